"""The safetensors format, as far as it is written and read piece by piece here. Free of torch.

Source: https://github.com/huggingface/safetensors, "Format": 8 bytes with the length of the header, a JSON header that
may be padded with blanks, then the tensors' bytes without gaps.
"""

import json
import struct
from collections.abc import Sequence

from rlbus.errors import TransferError
from rlbus.schemas import TensorSpec
from rlbus.transfer.manifest import num_bytes

# How safetensors spells dtypes -> how torch does. Source: safetensors 0.7, `Dtype`.
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
    "F8_E5M2": "float8_e5m2",
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
_SPELLED = {ours: theirs for theirs, ours in DTYPES.items()}
# Tensors begin at multiples of it in files that safetensors itself writes.
_ALIGN_BYTES = 8


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
