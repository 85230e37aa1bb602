"""How the bytes of a manifest are cut into buckets. Pure, and the same on every member, so only data has to travel.

Rules: a tensor larger than a bucket starts in one of its own and fills as many as it needs, its tail may share the
last with what follows; any other tensor lies whole in one bucket. Pieces begin at multiples of ALIGN_BYTES, so that
neither end splits an element or reads it unaligned. A bucket with a single piece can be sent from and received into
the tensor's own memory, without a copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlbus.errors import ConfigError

# The largest element (complex128) and what vector loads like.
ALIGN_BYTES = 16
# What one bucket may be: room for an element, and no more than a member can be asked to allocate (1 GiB).
MIN_BUCKET_BYTES = ALIGN_BYTES
MAX_BUCKET_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_bytes` of the tensor with index `tensor`, from its byte `offset` on, at byte `at` of the bucket."""

    tensor: int
    offset: int
    at: int
    num_bytes: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Bucket:
    """One broadcast: its pieces in order, and its size with padding."""

    index: int
    pieces: tuple[Piece, ...]
    num_bytes: int


def capacity(bucket_bytes: int) -> int:
    """The usable size of a bucket: `bucket_bytes` rounded down to a multiple of ALIGN_BYTES.

    Raises:
        ConfigError: under ALIGN_BYTES.
    """
    usable = bucket_bytes - bucket_bytes % ALIGN_BYTES
    if usable < ALIGN_BYTES:
        raise ConfigError("bucket_bytes", bucket_bytes, f"use at least {ALIGN_BYTES}")
    return usable


def padded_bytes(sizes: Sequence[int]) -> int:
    """More than a bucket that has all tensors of `sizes` can have: a small model needs no full-size buffer."""
    return sum(sizes) + ALIGN_BYTES * (len(sizes) + 1)


def plan_buckets(sizes: Sequence[int], bucket_bytes: int) -> Iterator[Bucket]:
    """Cut tensors of `sizes` bytes into buckets of at most `bucket_bytes`, in order. Nothing for no tensors.

    Raises:
        ConfigError: see `capacity`.
    """
    limit = capacity(bucket_bytes)
    index = 0
    pieces: list[Piece] = []
    used = 0
    for tensor, size in enumerate(sizes):
        at = -(-used // ALIGN_BYTES) * ALIGN_BYTES
        if pieces and at + size > limit:
            yield Bucket(index, tuple(pieces), used)
            index, pieces, at = index + 1, [], 0
        offset = 0
        while size - offset > limit:
            yield Bucket(index, (Piece(tensor, offset, 0, limit, is_last=False),), limit)
            index, offset = index + 1, offset + limit
        pieces.append(Piece(tensor, offset, at, size - offset, is_last=True))
        used = at + size - offset
    if pieces:
        yield Bucket(index, tuple(pieces), used)
