"""An adapter out of a trainer's memory as a PEFT folder."""

import enum
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
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


class Listed(Sequence[str]):
    """A sequence that is no list, as omegaconf's."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: Any) -> Any:
        return self._names[index]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(8), 8),
        (np.float32(0.5), 0.5),
        (torch.tensor(8), 8),
        (Listed("q_proj", "v_proj"), ["q_proj", "v_proj"]),
        (MappingProxyType({"q_proj": np.int64(4)}), {"q_proj": 4}),
        ({"b": 1, "a": 2}.keys(), ["a", "b"]),
        (Path("org/model"), "org/model"),
        (("a", {"c", "b"}), ["a", ["b", "c"]]),
    ],
)
def test_a_configuration_keeps_its_values_whatever_they_are_of(tmp_path: Path, value: Any, expected: Any) -> None:
    """Numbers of numpy and torch, others' sequences and mappings; never as text."""
    write_adapter(tmp_path, TENSORS, {**CONFIG, "value": value})
    assert json.loads((tmp_path / CONFIG_FILE).read_text())["value"] == expected


@pytest.mark.parametrize(
    "value", [object(), float("nan"), b"q_proj", np.zeros(2), torch.zeros(1), {1, "a"}, {("a",): 1}]
)
def test_a_configuration_that_json_can_not_hold_is_refused(tmp_path: Path, value: Any) -> None:
    """Before anything is written: as its text it would mean something else, or nothing."""
    with pytest.raises(ConfigError, match="JSON"):
        write_adapter(tmp_path, TENSORS, {**CONFIG, "value": value})
    assert list(tmp_path.iterdir()) == []


class Mesh:
    """Of so many ranks."""

    def __init__(self, num_ranks: int) -> None:
        self.size = lambda: num_ranks


class Sharded(torch.Tensor):
    """Stands in for a DTensor, without a process group."""

    device_mesh = Mesh(1)

    def full_tensor(self) -> torch.Tensor:
        """All of it."""
        return self.as_subclass(torch.Tensor) + 1


def test_a_dtensor_is_gathered_where_that_needs_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several ranks is refused by name, before anything is written: nobody tells the others to gather it."""
    module = SimpleNamespace(DTensor=Sharded)
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", module)
    tensors = {"a.lora_A.weight": torch.zeros(2, 2).as_subclass(Sharded)}
    write_adapter(tmp_path, tensors, CONFIG)
    assert torch.equal(load_file(tmp_path / WEIGHTS_FILE)["a.lora_A.weight"], torch.ones(2, 2))
    monkeypatch.setattr(Sharded, "device_mesh", Mesh(2))
    (tmp_path / "2").mkdir()
    with pytest.raises(ConfigError, match=r"a\.lora_A\.weight.* DTensor of several ranks"):
        write_adapter(tmp_path / "2", tensors, CONFIG)
    assert list((tmp_path / "2").iterdir()) == []


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([("a", torch.zeros(1))], "pass a folder"),
        ({"a": 1.5}, "'a': is a float"),
        ({"a": torch.zeros(1, device="meta")}, "'a': is on the meta device"),
        ({1: torch.zeros(1), "a": torch.zeros(1)}, "names of tensors are text"),
    ],
)
def test_what_is_no_adapter_is_refused_by_name(tmp_path: Path, tensors: Any, problem: str) -> None:
    """As `update_weights` does."""
    with pytest.raises(ConfigError, match=problem):
        write_adapter(tmp_path, tensors, CONFIG)
