"""Reading a folder is all or nothing, and says what is wrong with it."""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from rlbus.schemas import TensorSpec
from rlbus.transfer.folder import SafetensorsFile
from rlbus.workers.checkpoint import CheckpointError
from rlbus.workers.torch_lm.checkpoint import read_tensors

pytestmark = pytest.mark.unit

SPECS = (
    TensorSpec(name="a", dtype="float32", shape=(2, 3)),
    TensorSpec(name="b", dtype="float32", shape=(4,)),
)


def save(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    """One file."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return folder / name


def good() -> dict[str, torch.Tensor]:
    """What SPECS describes."""
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}


def test_tensors_of_one_file_or_of_several_are_read(tmp_path: Path) -> None:
    """With an index only the files that it names count."""
    save(tmp_path, {"a": good()["a"]}, "one.safetensors")
    save(tmp_path, {"b": good()["b"].half()}, "two.safetensors")
    found = read_tensors(tmp_path, SPECS)
    assert torch.equal(found["a"], good()["a"])
    assert found["b"].dtype is torch.float16
    save(tmp_path, good(), "old.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(read_tensors(tmp_path, SPECS)) == {"a", "b"}


def test_tensors_own_their_memory(tmp_path: Path) -> None:
    """A file that is overwritten later changes nothing."""
    path = save(tmp_path, good())
    found = read_tensors(tmp_path, SPECS)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(found["a"], good()["a"])


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"a": torch.zeros(2, 3)}, "tensor 'b'.*isn't announced"),
        ({**good(), "c": torch.zeros(1)}, "tensor 'c'.*no such tensor"),
        ({**good(), "b": torch.zeros(5)}, "tensor 'b': shape"),
        ({**good(), "b": torch.zeros(4, dtype=torch.int32)}, "tensor 'b': dtype int32"),
    ],
)
def test_other_tensors_than_the_models_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], problem: str
) -> None:
    """Naming the first."""
    save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=problem):
        read_tensors(tmp_path, SPECS)


def test_missing_truncated_and_garbled_files_are_refused(tmp_path: Path) -> None:
    """Each naming the file or folder."""
    with pytest.raises(CheckpointError, match="no such folder"):
        read_tensors(tmp_path / "none", SPECS)
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        read_tensors(tmp_path, SPECS)
    path = save(tmp_path, good())
    data = path.read_bytes()
    for bad in (data[:-4], data[:20], b"nonsense", b""):
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match="no complete safetensors"):
            read_tensors(tmp_path, SPECS)
    path.write_bytes(data)
    assert set(load_file(path)) == {"a", "b"}
    save(tmp_path, {"a": torch.zeros(2, 3)}, "twice.safetensors")
    with pytest.raises(CheckpointError, match="in another file too"):
        read_tensors(tmp_path, SPECS)


@pytest.mark.parametrize("index", ["{}", "[]", "nonsense", '{"weight_map": {"a": "../x.safetensors"}}'])
def test_index_that_is_none_or_points_outside_is_refused(tmp_path: Path, index: str) -> None:
    """A checkpoint is its folder."""
    save(tmp_path, good())
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="index"):
        read_tensors(tmp_path, SPECS)


def test_a_file_that_is_cut_after_its_header_was_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the end of the process, as of whoever has it mapped; file and tensor are named."""
    big = {"a": torch.zeros(2, 3), "b": torch.zeros(1_000_000)}
    specs = (SPECS[0], TensorSpec(name="b", dtype="float32", shape=(1_000_000,)))
    path = save(tmp_path, big)
    read_into = SafetensorsFile.read_into

    def cut(*args: Any) -> None:
        os.truncate(path, 4096)
        read_into(*args)

    monkeypatch.setattr(SafetensorsFile, "read_into", cut)
    problem = f"{re.escape(str(path))}: is no complete safetensors file .it ends within tensor 'b'"
    with pytest.raises(CheckpointError, match=problem):
        read_tensors(tmp_path, specs)


def test_a_disk_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the system's words."""
    path = save(tmp_path, good())

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(SafetensorsFile, "read_into", fail)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}: Input/output error"):
        read_tensors(tmp_path, SPECS)
