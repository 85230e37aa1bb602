"""An adapter out of a trainer's memory as a PEFT folder."""

import enum
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

from rlbus.adapter import CONFIG_FILE, WEIGHTS_FILE, adapter_sum
from rlbus.errors import ConfigError
from rlbus.transfer.adapter_folder import write_adapter

pytestmark = pytest.mark.unit

CONFIG = {"r": 8, "lora_alpha": 16, "target_modules": {"v_proj", "q_proj"}}
TENSORS = {
    "base.q_proj.lora_B.weight": torch.arange(12.0).reshape(3, 4).t(),
    "base.q_proj.lora_A.weight": torch.ones(2, 3, dtype=torch.bfloat16),
}


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    """Also strided ones; safetensors itself reads the file."""
    write_adapter(tmp_path, TENSORS, CONFIG)
    read = load_file(tmp_path / WEIGHTS_FILE)
    assert {n: t.dtype for n, t in read.items()} == {n: t.dtype for n, t in TENSORS.items()}
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_the_configuration_of_peft_is_written_as_it_writes_it(tmp_path: Path) -> None:
    """From a mapping, or from an object with sets and enums in it."""

    class Kind(enum.Enum):
        LORA = "LORA"

    class LoraConfig:
        def to_dict(self) -> dict[str, Any]:
            return {**CONFIG, "peft_type": Kind.LORA}

    for config in (CONFIG, LoraConfig()):
        write_adapter(tmp_path, TENSORS, config)
        written = json.loads((tmp_path / CONFIG_FILE).read_text())
        assert (written["peft_type"], written["r"], written["target_modules"]) == ("LORA", 8, ["q_proj", "v_proj"])


def test_the_same_adapter_has_the_same_checksum_whatever_the_order_of_its_tensors(tmp_path: Path) -> None:
    """So that a repeat of a load is the same load."""
    first, second = tmp_path / "1", tmp_path / "2"
    for folder, tensors in ((first, TENSORS), (second, dict(reversed(TENSORS.items())))):
        folder.mkdir()
        write_adapter(folder, tensors, CONFIG)
    assert adapter_sum(first) == adapter_sum(second)


@pytest.mark.parametrize("config", [{}, {"r": 8}, "r=8", None])
def test_a_configuration_that_is_none_of_a_lora_is_refused(tmp_path: Path, config: Any) -> None:
    """Before anything is written that an engine would choke on."""
    with pytest.raises(ConfigError, match="LoraConfig"):
        write_adapter(tmp_path, TENSORS, config)
    with pytest.raises(ConfigError, match="no tensors"):
        write_adapter(tmp_path, {}, CONFIG)
