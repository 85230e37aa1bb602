"""The plan of buckets covers every byte once, in order, within the limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbus.errors import ConfigError
from rlbus.transfer.buckets import ALIGN_BYTES, Bucket, Piece, capacity, padded_bytes, plan_buckets

pytestmark = pytest.mark.unit


def test_small_tensors_share_and_large_ones_are_split() -> None:
    """The tail of a large one shares the last bucket with what follows; pieces are aligned."""
    assert list(plan_buckets([5, 20, 70, 3], 32)) == [
        Bucket(0, (Piece(0, 0, 0, 5, True),), 5),
        Bucket(1, (Piece(1, 0, 0, 20, True),), 20),
        Bucket(2, (Piece(2, 0, 0, 32, False),), 32),
        Bucket(3, (Piece(2, 32, 0, 32, False),), 32),
        Bucket(4, (Piece(2, 64, 0, 6, True), Piece(3, 0, 16, 3, True)), 19),
    ]


def test_empty_tensors_have_pieces_too() -> None:
    """They have to be handed out like all others."""
    assert list(plan_buckets([0, 0], 16)) == [Bucket(0, (Piece(0, 0, 0, 0, True), Piece(1, 0, 0, 0, True)), 0)]
    assert list(plan_buckets([], 16)) == []


def test_a_bucket_without_room_for_an_element_is_refused() -> None:
    """And odd sizes are rounded down."""
    assert capacity(47) == 32
    with pytest.raises(ConfigError, match="bucket_bytes"):
        list(plan_buckets([1], ALIGN_BYTES - 1))


@given(st.lists(st.integers(0, 200), max_size=30), st.integers(16, 120))
def test_every_byte_is_planned_once_and_in_order(sizes: list[int], bucket_bytes: int) -> None:
    """Whatever the sizes: no gap, no overlap, aligned, small ones whole, and no bucket over the limit."""
    limit = capacity(bucket_bytes)
    reached = [0] * len(sizes)
    ended: list[int] = []
    for index, bucket in enumerate(plan_buckets(sizes, bucket_bytes)):
        assert bucket.index == index
        assert bucket.num_bytes <= min(limit, padded_bytes(sizes))
        end = 0
        for piece in bucket.pieces:
            assert piece.at >= end
            assert piece.at % ALIGN_BYTES == 0
            assert piece.offset == reached[piece.tensor]
            assert piece.offset % ALIGN_BYTES == 0
            assert sizes[piece.tensor] > limit or piece.num_bytes == sizes[piece.tensor]
            end = piece.at + piece.num_bytes
            reached[piece.tensor] += piece.num_bytes
            if piece.is_last:
                ended.append(piece.tensor)
        assert end == bucket.num_bytes
    assert reached == sizes
    assert ended == list(range(len(sizes)))
