"""Weights and adapters that are pipes, or whose disk hangs, cost a call; never the process, nor its loop."""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from rlbus import files
from rlbus.adapter import CONFIG_FILE, WEIGHTS_FILE, AdapterError, adapter_sum
from rlbus.errors import ConfigError, FaultError
from rlbus.transfer.bounded import run_in_thread
from rlbus.workers.checkpoint import INDEX, CheckpointError, read_folder
from rlbus.workers.folder_sums import folder_sums
from rlbus.workers.torch_lm.adapter import read_adapter
from rlbus.workers.torch_lm.checkpoint import check_tensors, read_tensors
from rlbus.workers.torch_lm.completions import find_tokenizer
from rlbus.workers.torch_lm.model import ModelConfig

pytestmark = pytest.mark.unit

# From then on somebody writes into the pipe, so that a test which waits for that fails, and doesn't hang.
RESCUE_S = 120.0
REFUSED = (CheckpointError, AdapterError, ConfigError, FaultError, OSError)
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a pipe in the folder. Another process rescues whoever waits for it, since ours may stand still."""
    rescuers: list[subprocess.Popen[bytes]] = []

    def make(name: str) -> Path:
        os.mkfifo(tmp_path / name)
        rescue = f'sleep {RESCUE_S}; : > "$0"'
        rescuers.append(subprocess.Popen(["sh", "-c", rescue, str(tmp_path / name)], start_new_session=True))
        return tmp_path

    yield make
    for rescuer in rescuers:
        os.killpg(rescuer.pid, 9)
        rescuer.wait()


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("model.safetensors", lambda folder: read_tensors(folder, ())),
        ("model.safetensors", lambda folder: check_tensors(folder, ())),
        ("model.safetensors", read_folder),
        ("model.safetensors", folder_sums),
        (INDEX, read_folder),
        ("config.json", ModelConfig.read),
        ("tokenizer.json", find_tokenizer),
        (CONFIG_FILE, lambda folder: read_adapter(folder, {})),
        (WEIGHTS_FILE, lambda folder: read_adapter(folder, {})),
        (WEIGHTS_FILE, adapter_sum),
    ],
)
def test_a_pipe_is_refused_at_once(pipe: Callable[[str], Path], name: str, use: Callable[[Path], Any]) -> None:
    """Nobody writes into it."""
    pytest.importorskip("tokenizers")
    folder = pipe(name)
    if name == WEIGHTS_FILE:
        (folder / CONFIG_FILE).write_text(json.dumps(ADAPTER))
    began = time.monotonic()
    with pytest.raises(REFUSED):
        use(folder)
    assert time.monotonic() - began < RESCUE_S / 2


@pytest.mark.parametrize("use", [read_tensors, check_tensors])
def test_the_loop_goes_on_while_a_file_hangs(
    pipe: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, use: Callable[..., Any]
) -> None:
    """Here for somebody who writes into a pipe that is opened without a look; beats of the worker go on."""
    folder = pipe("model.safetensors")
    monkeypatch.setattr(files, "_opened", os.open)

    async def main() -> None:
        reading = asyncio.ensure_future(run_in_thread(lambda: use(folder, ()), name="rlbus disk"))
        began = time.monotonic()
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert time.monotonic() - began < RESCUE_S / 2
        assert not reading.done()
        os.close(os.open(folder / "model.safetensors", os.O_WRONLY))
        with pytest.raises(CheckpointError):
            await reading

    asyncio.run(main())
