"""Bytes of a tensor are taken in flat order whatever its strides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlbus.transfer.flat import byte_view, copy_bytes, dtype_name, dtype_of, new_row

pytestmark = pytest.mark.unit


def test_a_contiguous_tensor_is_viewed_and_others_are_not() -> None:
    """The view shares memory; a transposed or conjugated tensor has none."""
    tensor = torch.arange(6, dtype=torch.int32).view(2, 3)
    view = byte_view(tensor)
    assert view is not None
    assert view.data_ptr() == tensor.data_ptr()
    assert view.numel() == 24
    assert byte_view(tensor.t()) is None
    assert byte_view(torch.ones(2, dtype=torch.complex64).conj()) is None
    scalar = byte_view(torch.tensor(True))
    assert scalar is not None
    assert scalar.tolist() == [1]


@given(st.permutations([0, 1, 2, 3]), st.integers(0, 120), st.integers(0, 120), st.integers(1, 2))
def test_any_range_of_any_strides_is_copied_in_order(order: list[int], a: int, b: int, step: int) -> None:
    """Equal to the same range of the contiguous tensor."""
    tensor = torch.arange(120, dtype=torch.int16).view(2, 3, 4, 5).permute(order)[:, ::step]
    start, stop = sorted((min(a, tensor.numel()), min(b, tensor.numel())))
    out = torch.zeros((stop - start) * 2, dtype=torch.uint8)
    copy_bytes(tensor, start * 2, out)
    assert out.view(torch.int16).tolist() == tensor.flatten()[start:stop].tolist()


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    """What is copied is the value, not the memory under it."""
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    out = torch.zeros(16, dtype=torch.uint8)
    copy_bytes(tensor, 0, out)
    assert out.view(torch.complex64).tolist() == [1 - 2j, 3 + 4j]
    negative = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert negative.is_neg()
    out = torch.zeros(8, dtype=torch.uint8)
    copy_bytes(negative, 0, out)
    assert out.view(torch.float32).tolist() == [-2.0, 4.0]


def test_dtypes_are_spelled_without_prefix() -> None:
    """And back; what isn't a dtype is an error."""
    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert dtype_of("bfloat16") is torch.bfloat16
    for name in ("Tensor", "nothing"):
        with pytest.raises(KeyError):
            dtype_of(name)


@pytest.mark.parametrize("size", [0, 1, 4 * 1024 * 1024, 5_000_001])
def test_a_new_row_is_memory_of_its_own(size: int) -> None:
    """Of exactly that size, writable to its end, with or without huge pages."""
    row = new_row(size, torch.device("cpu"))
    row.fill_(7)
    assert row.numel() == row.untyped_storage().nbytes() == size
    assert row.sum().item() == 7 * size
