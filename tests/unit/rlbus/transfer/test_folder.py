"""Safetensors files, read without the library of that name: what it reads, and nothing that it refuses."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file

from rlbus.transfer.flat import dtype_of
from rlbus.transfer.folder import DTYPES, LENGTH, FormatError, SafetensorsFile, entries_of
from rlbus.transfer.tensor_file import read_tensor

pytestmark = pytest.mark.unit

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (2, 0, 3), (5,), (1, 1), (3, 4, 2))
SMALL = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.int16), "c": torch.zeros(0)}


def write(path: Path, content: bytes) -> Path:
    """A file."""
    path.write_bytes(content)
    return path


def read(path: Path) -> dict[str, torch.Tensor]:
    """All of a file."""
    with SafetensorsFile(path) as file:
        return {entry.spec.name: read_tensor(file, entry) for entry in file.entries}


def file_of(header: object, data: bytes) -> bytes:
    """With this header, which may be JSON's bytes already."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return LENGTH.pack(len(text)) + text + data


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """All that a tensor is."""
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def raws(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """The same of all."""
    return {name: raw(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", sorted(set(DTYPES.values())))
def test_every_dtype_is_read_as_safetensors_itself_reads_it(tmp_path: Path, dtype: str) -> None:
    """Scalars and empty tensors, too; NaNs with all their bits."""
    tensors = {}
    for number, shape in enumerate(SHAPES):
        size = dtype_of(dtype).itemsize * torch.Size(shape).numel()
        content = torch.tensor(list(random.Random(number).randbytes(size)), dtype=torch.uint8)
        tensors[f"t{number}"] = (content % 2 if dtype == "bool" else content).view(dtype_of(dtype)).view(shape)
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    found = read(path)
    assert raws(found) == raws(load_file(path)) == raws(tensors)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found.values())


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    """Whatever the order in the header, so that the disk is read from front to back."""
    header = {
        "late": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
        "early": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
    }
    found = read(write(tmp_path / "a", file_of(header, b"\1\2\3")))
    assert [(name, tensor.tolist()) for name, tensor in found.items()] == [("early", [1]), ("late", [2, 3])]


def test_a_file_without_tensors_is_one(tmp_path: Path) -> None:
    """As safetensors writes it."""
    assert read(write(tmp_path / "a", save({}))) == {}


def one(**changes: Any) -> dict[str, Any]:
    """A header of one tensor of 4 bytes."""
    return {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}}


def two(first: list[int], second: list[int]) -> dict[str, Any]:
    """A header of two tensors that lie there."""
    spans = {"a": first, "b": second}
    return {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in spans.items()
    }


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "before its header"),
        (b"\0" * 7, "before its header"),
        (b"\xff" * 64, "within its header"),
        (LENGTH.pack(9) + b"{}", "within its header"),
        (file_of(b"[]", b""), "garbled"),
        (file_of(b"{", b""), "garbled"),
        (file_of(b'{"\xff": 1}', b""), "garbled"),
        (file_of(b'{"a": ' + b"[" * 100_000, b""), "garbled"),
        (file_of({"a": 1}, b""), "garbled"),
        (file_of({"a": {}}, b""), "garbled"),
        (file_of(one(shape=[-4]), bytes(4)), "garbled"),
        (file_of(one(shape=[True] * 4), bytes(4)), "garbled"),
        (file_of(one(data_offsets=[0]), bytes(4)), "garbled"),
        (file_of(one(data_offsets=[-1, 3]), bytes(4)), "garbled"),
        (file_of(one(dtype="F4"), bytes(4)), "dtype 'F4', which isn't known"),
        (file_of(one(shape=[5]), bytes(4)), "5 bytes by its shape"),
        (file_of(one(data_offsets=[4, 0]), bytes(4)), "4 bytes by its shape"),
        (file_of(one(shape=[1] * 65), bytes(4)), "65 dimensions"),
        (file_of(one(shape=[2**62, 2**62]), bytes(4)), "no memory holds"),
        (file_of(one(shape=[0, 2**62, 2**62], data_offsets=[0, 0]), b""), "no memory holds"),
        (file_of(one(), bytes(3)), "truncated"),
        (file_of(one(), bytes(5)), "5 bytes|truncated"),
        (file_of(two([0, 3], [2, 4]), bytes(4)), "what lies before it ends at"),
        (file_of(two([0, 1], [2, 4]), bytes(4)), "what lies before it ends at"),
        (file_of(two([1, 2], [2, 4]), bytes(4)), "what lies before it ends at"),
        (file_of(two([0, 4], [0, 4]), bytes(4)), "what lies before it ends at"),
    ],
)
def test_a_garbled_file_is_refused_with_the_reason(tmp_path: Path, content: bytes, words: str) -> None:
    """Before anything is read beyond the header."""
    with pytest.raises(FormatError, match=words):
        SafetensorsFile(write(tmp_path / "a", content))
    with pytest.raises((SafetensorError, RuntimeError)):
        load(content)


@pytest.mark.parametrize("step", ["before its header", "within its header", "within tensor 'a'"])
def test_a_file_that_is_cut_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Whatever was read of it before; mapped, it would end the process."""
    path = write(tmp_path / "a", save(SMALL))
    left = {"before its header": 0, "within its header": LENGTH.size + 1, "within tensor 'a'": -8}[step]
    size = os.path.getsize(path)
    fill = SafetensorsFile._fill

    def cut(self: SafetensorsFile, at: int, buffer: memoryview) -> bool:
        if step != "within tensor 'a'" or at > LENGTH.size:
            os.truncate(path, left if left >= 0 else size - 40)
        return fill(self, at, buffer)

    monkeypatch.setattr(SafetensorsFile, "_fill", cut)
    with pytest.raises(FormatError, match=step):
        read(path)


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """A small file, of which one field of the header, or some bytes, are others."""
    content = save(SMALL)
    (length,) = LENGTH.unpack(content[: LENGTH.size])
    if draw(st.booleans()):
        header = json.loads(content[LENGTH.size : LENGTH.size + length])
        entry = header[draw(st.sampled_from(sorted(header)))]
        number = st.integers(-1, 40) | st.sampled_from([2**31, 2**63, 2**64])
        field, values = draw(
            st.sampled_from(
                [
                    ("dtype", st.sampled_from([*DTYPES, "F4", "", 1, None])),
                    ("shape", st.lists(number, max_size=3) | st.none()),
                    ("data_offsets", st.lists(number, min_size=1, max_size=3)),
                ]
            )
        )
        entry[field] = draw(values)
        return file_of(header, content[LENGTH.size + length :])
    bad = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        bad[draw(st.integers(0, len(bad) - 1))] = draw(st.integers(0, 255))
    return bytes(bad[: draw(st.integers(0, len(bad)) | st.just(len(bad)))])


@given(content=spoiled())
@example(content=save(SMALL))
def test_no_garbled_header_is_taken_that_safetensors_refuses(content: bytes) -> None:
    """And what both take is the same."""
    try:
        theirs: dict[str, torch.Tensor] | None = load(content)
    except (KeyError, AttributeError, TypeError):  # it took the header, but has no name for some dtypes
        return
    except (SafetensorError, RuntimeError):
        theirs = None
    (length,) = LENGTH.unpack(content[: LENGTH.size].ljust(LENGTH.size, b"\0"))
    header = content[LENGTH.size : LENGTH.size + length]
    try:
        ours = entries_of(header, len(content))
    except FormatError as exc:
        # It counts no bytes of a tensor that has none, however large its other sides are.
        is_meant = "F4" in str(header) or "no memory holds" in str(exc)
        assert theirs is None or is_meant or raws(theirs) == raws(SMALL), theirs
        return
    assert theirs is not None, ours
    assert {entry.spec.name: entry.spec.shape for entry in ours} == {name: tuple(t.shape) for name, t in theirs.items()}
    for entry in ours:
        dtype, _, data = raw(theirs[entry.spec.name])
        assert dtype == dtype_of(entry.spec.dtype)
        assert data == content[entry.begin : entry.begin + entry.num_bytes]
