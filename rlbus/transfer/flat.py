"""A tensor as the flat row of bytes that travels: views where the memory allows it, piecewise copies where not."""

import ctypes
import sys

import torch
from torch import Tensor

# Elements move as plain integers of their size, so that every dtype can be copied, also those without arithmetic.
_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Source: linux/mman.h
_MADV_HUGEPAGE = 14
_PAGE_BYTES = 4096
# Below it there is hardly a whole huge page (2 MiB) to be had.
_HUGE_FROM_BYTES = 4 * 1024 * 1024


def new_row(size: int, device: torch.device) -> Tensor:
    """Fresh memory for `size` bytes, as a flat uint8 tensor that owns it.

    On Linux the kernel is asked for huge pages: bytes that arrive in fresh memory otherwise cost a page fault every
    4 KiB, which took longer than Gloo itself (bench_transfer; filling fresh rows of 32 MiB went from 0.6 to 1.1 GiB/s).
    """
    row = torch.empty(size, dtype=torch.uint8, device=device)
    if size >= _HUGE_FROM_BYTES and row.device.type == "cpu" and sys.platform == "linux":
        start = -(-row.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
        length = row.data_ptr() + size - start
        # Advice only: where huge pages are off it fails, and nothing is lost.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return row


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as manifests spell it: torch's own without the prefix."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a manifest's name.

    Raises:
        KeyError: this torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise KeyError(name)
    return dtype


def byte_view(tensor: Tensor) -> Tensor | None:
    """The bytes of a tensor as a flat uint8 view of its own memory; None where only a copy has them in order."""
    tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.reshape(-1).view(torch.uint8)


def copy_bytes(tensor: Tensor, offset: int, out: Tensor) -> None:
    """Copy `out.numel()` bytes of `tensor`, from byte `offset` of its flat order on, into the uint8 row `out`.

    Never copies more than it was asked for, whatever the strides; the two may lie on different devices (torch then
    makes one temporary of the size of `out`). `offset` and the size are multiples of the element size.
    """
    tensor = tensor.detach()
    item_bytes = tensor.element_size()
    plain = None if tensor.is_conj() or tensor.is_neg() else _PLAIN.get(item_bytes)
    elements = tensor if plain is None else tensor.view(plain)
    start = offset // item_bytes
    _copy_elements(elements, start, start + out.numel() // item_bytes, out.view(elements.dtype))


def _copy_elements(tensor: Tensor, start: int, stop: int, out: Tensor) -> None:
    """Copy the flat elements [start, stop): whole rows of the first dimension at once, its two ends by recursion."""
    if start == stop:
        return
    if stop - start == tensor.numel():
        out.view(tensor.shape).copy_(tensor)
        return
    if tensor.dim() == 1:
        out.copy_(tensor[start:stop])
        return
    row = tensor.numel() // tensor.shape[0]
    first, skipped = divmod(start, row)
    last, left = divmod(stop, row)
    if first == last:
        _copy_elements(tensor[first], skipped, left, out)
        return
    at = 0
    if skipped:
        at = row - skipped
        _copy_elements(tensor[first], skipped, row, out[:at])
        first += 1
    if first < last:
        whole = (last - first) * row
        out[at : at + whole].view(last - first, *tensor.shape[1:]).copy_(tensor[first:last])
        at += whole
    if left:
        _copy_elements(tensor[last], 0, left, out[at:])
