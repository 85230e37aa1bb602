"""Tensors read from a safetensors file, each straight into memory of its own."""

import torch
from torch import Tensor

from rlbus.transfer.flat import dtype_of, new_row
from rlbus.transfer.folder import Entry, FormatError, SafetensorsFile

_CPU = torch.device("cpu")


def read_tensor(file: SafetensorsFile, entry: Entry) -> Tensor:
    """A tensor of a file, on the CPU. Blocks as the disk does; what becomes of the file later changes nothing.

    Raises:
        FormatError: the file has become shorter, or this torch has no such dtype. OSError.
    """
    spec = entry.spec
    try:
        dtype = dtype_of(spec.dtype)
    except KeyError as exc:
        raise FormatError(f"tensor {spec.name!r} has dtype {spec.dtype}, which this torch hasn't") from exc
    row = new_row(entry.num_bytes, _CPU)
    if entry.num_bytes:
        file.read_into(entry, 0, row.numpy().data)
    return row.view(dtype).view(spec.shape)
