"""The safetensors format, written and read piece by piece. Free of torch, and of the library of that name: it maps
files (see `rlbus.files`).

Source: https://github.com/huggingface/safetensors, "Format": 8 bytes with the length of the header, a JSON header that
may be padded with blanks, then the tensors' bytes without gaps.
"""

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import msgspec

from rlbus.errors import RLBusError, TransferError
from rlbus.files import open_file
from rlbus.schemas import TensorSpec
from rlbus.transfer.manifest import DTYPE_BYTES, num_bytes

# How safetensors spells dtypes -> how torch does. Source: safetensors 0.8, `Dtype`. Those of less than a byte are left
# out: torch counts them otherwise.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
LENGTH = struct.Struct("<Q")
# Source: safetensors' own limit of a header.
MAX_HEADER_BYTES = 100_000_000
# Read and not written: safetensors before 0.8 doesn't know them.
_NEW = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")
_SPELLED = {ours: theirs for theirs, ours in DTYPES.items() if theirs not in _NEW}
# Source: torch's limit for most operations.
_MAX_DIMS = 64
# No tensor has more bytes, nor a dimension, whatever the others are.
_MAX_BYTES = 2**63 - 1
# Tensors begin at multiples of it in files that safetensors itself writes.
_ALIGN_BYTES = 8
_METADATA = "__metadata__"

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Told(msgspec.Struct):
    """A tensor in a header."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_told = msgspec.json.Decoder(_Told)


class FormatError(RLBusError):
    """A file is no complete safetensors file. The text says what is wrong with it, without its path."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: `num_bytes` from byte `begin` of the file on."""

    spec: TensorSpec
    begin: int
    num_bytes: int


class SafetensorsFile:
    """A file that is open for reading; a context manager. Its header is read and checked: what it says of its tensors
    is sound, and the file is as long as it says. Blocks as the disk does.

    Attributes:
        entries: its tensors, in the order in which their bytes lie.

    Raises:
        FormatError: it is truncated or garbled. OSError: it is missing, no regular file, or can't be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_file(path)
        try:
            self.entries = self._read_entries()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def read_into(self, entry: Entry, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of a tensor from its byte `offset` on.

        Raises: FormatError: the file has become shorter. OSError.
        """
        if not self._fill(entry.begin + offset, buffer):
            raise FormatError(f"it ends within tensor {entry.spec.name!r}: it was cut while it was read")

    def _read_entries(self) -> tuple[Entry, ...]:
        size = os.fstat(self._file.fileno()).st_size
        begin = bytearray(LENGTH.size)
        if not self._fill(0, memoryview(begin)):
            raise FormatError("it ends before its header")
        (length,) = LENGTH.unpack(begin)
        if length > min(MAX_HEADER_BYTES, size - LENGTH.size):
            raise FormatError("it is truncated within its header, or has none")
        header = bytearray(length)
        if not self._fill(LENGTH.size, memoryview(header)):
            raise FormatError("it ends within its header")
        return entries_of(bytes(header), size)

    def _fill(self, at: int, buffer: memoryview) -> bool:
        """Whether the file has as many bytes from there on."""
        self._file.seek(at)
        while len(buffer):
            num_read = self._file.readinto(buffer)
            if not num_read:
                return False
            buffer = buffer[num_read:]
        return True


def entries_of(header: bytes, file_bytes: int) -> tuple[Entry, ...]:
    """The tensors that a header tells of, in the order in which their bytes lie. Pure.

    Raises: FormatError: it is garbled, bytes belong to no tensor or to two, or the file hasn't `file_bytes` by it.
    """
    data = LENGTH.size + len(header)
    try:
        told = {name: _told.decode(raw) for name, raw in _header.decode(header).items() if name != _METADATA}
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise FormatError(f"its header is garbled: {exc}") from exc
    found = [
        Entry(_spec_of(name, one), data + one.data_offsets[0], _length_of(name, one)) for name, one in told.items()
    ]
    found.sort(key=lambda entry: (entry.begin, entry.num_bytes))
    at = data
    for entry in found:
        if entry.begin != at:
            raise FormatError(f"tensor {entry.spec.name!r} is at byte {entry.begin}, what lies before it ends at {at}")
        at += entry.num_bytes
    if at != file_bytes:
        raise FormatError(f"it has {file_bytes} bytes, by its header {at}: it is truncated, or still being written")
    return tuple(found)


def _spec_of(name: str, told: _Told) -> TensorSpec:
    dtype = DTYPES.get(told.dtype)
    if dtype is None:
        raise FormatError(f"tensor {name!r} has dtype {told.dtype!r}, which isn't known")
    return TensorSpec(name=name, dtype=dtype, shape=told.shape)


def _length_of(name: str, told: _Told) -> int:
    """Bytes of a tensor whose dtype is known; by its shape as by its place."""
    if len(told.shape) > _MAX_DIMS:
        raise FormatError(f"tensor {name!r} has {len(told.shape)} dimensions")
    size = DTYPE_BYTES[DTYPES[told.dtype]]
    for dim in told.shape:
        size *= dim or 1
        if size > _MAX_BYTES:
            raise FormatError(f"tensor {name!r} has a shape that no memory holds")
    size = 0 if 0 in told.shape else size
    begin, end = told.data_offsets
    if end - begin != size:
        raise FormatError(f"tensor {name!r} has {size} bytes by its shape, and lies from {begin} to {end}")
    return size


def header_of(specs: Sequence[TensorSpec]) -> bytes:
    """The beginning of a file with these tensors in this order.

    Raises: TransferError: safetensors has no such dtype; names the tensor.
    """
    entries: dict[str, object] = {}
    at = 0
    for spec in specs:
        dtype = _SPELLED.get(spec.dtype)
        if dtype is None:
            raise TransferError("write a snapshot", f"safetensors has no dtype {spec.dtype} (of tensor {spec.name!r})")
        size = num_bytes(spec)
        entries[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return LENGTH.pack(len(text)) + text
