"""Loads of adapters whose folder hangs: they end at their deadline, and keep no process alive."""

import threading
from pathlib import Path
from typing import Any

import pytest

from rlbus.bus import Bus
from rlbus.errors import DeadlineError
from rlbus.testing import LoopClock, MemoryBroker, hangs, run
from rlbus.trainer import Trainer
from rlbus.workers.lora_testing import fake_adapter
from tests.unit.rlbus.scripted_controller import NAMESPACE, ScriptedPlane

pytestmark = pytest.mark.unit

# A test that fails leaves no thread for longer, in real seconds.
LEFT_S = 30.0


class Hung:
    """What is called there doesn't return before `heal`."""

    def __init__(self) -> None:
        self._is_well = threading.Event()
        self.threads: list[threading.Thread] = []

    def __call__(self, *_: Any) -> Any:
        self.threads.append(threading.current_thread())
        with hangs():
            self._is_well.wait(LEFT_S)
        raise OSError("the disk was away")

    def heal(self) -> None:
        """Give back what hangs."""
        self._is_well.set()
        for thread in self.threads:
            thread.join(LEFT_S)


@pytest.mark.parametrize(
    ("hangs", "options"),
    [
        ("rlbus.lora_verbs.adapter_sum", {"shared": True}),
        ("rlbus.adapter_objects.adapter_sum", {}),
        ("rlbus.adapter_objects._size_of", {}),
        ("rlbus.adapter_objects.open_file", {}),
        ("rlbus.transfer.adapter_folder.write_adapter", {"config": {"r": 8}}),
    ],
)
def test_a_load_whose_folder_hangs_ends_at_its_deadline_and_keeps_no_process_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str, options: dict[str, Any]
) -> None:
    """Wherever it hangs: the loop goes on, and the thread is left behind."""
    if "config" in options:
        pytest.importorskip("torch")
    hung, folder = Hung(), fake_adapter(tmp_path / "adapter", "7")
    monkeypatch.setattr(hangs, hung)

    async def body() -> None:
        async with Bus(MemoryBroker().connect(), clock=LoopClock()) as bus:
            trainer = Trainer(bus, NAMESPACE, ScriptedPlane())
            adapter: Any = {} if "config" in options else folder
            with pytest.raises(DeadlineError, match=r"lora_load did not end within 0\.1 s: the adapter"):
                await trainer.load_lora("policy", adapter, deadline_s=0.1, **options)
            await trainer.aclose()

    run(body())
    [thread] = hung.threads
    assert thread.daemon
    assert thread is not threading.main_thread()
    hung.heal()
