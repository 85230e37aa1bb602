"""The checksum is what its definition says, whatever the dtype, strides or parts."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlbus.transfer.checksum import ROW_BYTES, ROW_WORDS, RunningChecksum, tensor_checksum
from rlbus.transfer.flat import byte_view

pytestmark = pytest.mark.unit

_MASK = 2**64 - 1


def _weights() -> list[int]:
    state, found = 0, []
    for _ in range(ROW_WORDS):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        found.append((z ^ (z >> 31)) | 1)
    return found


WEIGHTS = _weights()


def plain(data: bytes) -> str:
    """The definition, in plain Python."""
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little", signed=True) for i in range(0, len(padded), 8)]
    total = 1
    for start in range(0, len(words), ROW_WORDS):
        row = sum(k * (w + (w >> 33)) for k, w in zip(WEIGHTS, words[start : start + ROW_WORDS], strict=False)) & _MASK
        total = (total * 0x9E3779B97F4A7C15 + row) % (2**64 - 59)
    return f"{(total * 0x9E3779B97F4A7C15 + len(data)) % (2**64 - 59):016x}"


def row_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "9e3779b97f4a7c15"),
        (b"\x00", "687b1f62781dc57f"),
        (b"rlbus", "dbe9f38510074711"),
        (bytes(range(256)) * 300, "605d560023c5d3be"),
    ],
)
def test_known_vectors_stay(data: bytes, expected: str) -> None:
    """A change of the algorithm would make old and new ends disagree."""
    assert plain(data) == expected
    assert tensor_checksum(row_of(data)) == expected


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_parts_make_the_same_sum_as_the_whole(data: bytes, cuts: list[int]) -> None:
    """Wherever the bytes are cut, aligned or not."""
    row = row_of(data)
    running = RunningChecksum(torch.device("cpu"))
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        running.update(row[start:stop])
    assert running.hexdigest() == plain(data)


@pytest.mark.parametrize("size", [ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1, 8 * ROW_BYTES, 9 * ROW_BYTES + 13])
def test_rows_and_tails_follow_the_definition(size: int) -> None:
    """Around the sizes at which rows and chunks end, whole and in odd parts."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    expected = plain(bytes(data.tolist()))
    assert tensor_checksum(data) == expected
    running = RunningChecksum(torch.device("cpu"))
    for start in range(0, size, 50_001):
        running.update(data[start : start + 50_001])
    assert running.hexdigest() == expected


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e5m2]
)
def test_only_bytes_count_not_dtype_or_shape(dtype: torch.dtype) -> None:
    """A tensor has the sum of its bytes, as a scalar, a matrix, or transposed and made contiguous."""
    tensor = torch.randint(0, 2, (6, 10), generator=torch.Generator().manual_seed(1)).to(dtype)
    flat = byte_view(tensor)
    assert flat is not None
    assert tensor_checksum(tensor) == plain(bytes(flat.tolist()))
    assert tensor_checksum(tensor.t()) == tensor_checksum(tensor.t().contiguous())
    assert tensor_checksum(tensor[:, 1::3]) == tensor_checksum(tensor[:, 1::3].contiguous())
    assert tensor_checksum(tensor[2, 3]) == tensor_checksum(tensor[2, 3].clone())


def test_a_view_at_an_odd_place_has_the_same_sum() -> None:
    """Bytes that aren't aligned to words."""
    tensor = torch.arange(1000, dtype=torch.int16)
    assert tensor_checksum(tensor[1:]) == tensor_checksum(tensor[1:].clone())


def test_what_goes_wrong_is_seen() -> None:
    """Swapped elements, flipped signs (also two in a row of words), lost tails, a single bit."""
    tensor = torch.arange(1.0, 30_001.0, dtype=torch.float64)
    good = tensor_checksum(tensor)
    swapped = tensor.clone()
    swapped[[3, 20_000]] = swapped[[20_000, 3]]
    signs = tensor.clone()
    signs[4:6] *= -1
    bad = [swapped, signs, -tensor, tensor[:-1], torch.cat([tensor, torch.zeros(1)]), torch.zeros_like(tensor)]
    for bit in range(0, 64, 7):
        flipped = tensor.clone()
        flipped.view(torch.int64)[12_345] ^= 1 << bit if bit < 63 else -(2**63)
        bad.append(flipped)
    sums = {tensor_checksum(t) for t in bad}
    assert good not in sums
    assert len(sums) == len(bad)


def test_rows_that_change_places_are_seen() -> None:
    """Whole rows of the sum swapped, each having the same value within."""
    tensor = torch.arange(4 * ROW_WORDS)
    other = tensor.view(4, -1)[[1, 0, 2, 3]].flatten()
    assert tensor_checksum(tensor) != tensor_checksum(other)
