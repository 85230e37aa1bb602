"""One digest for the checksums of a whole model. Free of torch."""

import hashlib
from collections.abc import Sequence

import msgspec

from rlbus.schemas import TensorSum

_encoder = msgspec.json.Encoder()


def sums_digest(sums: Sequence[TensorSum]) -> str:
    """SHA-256 in hex over the canonical JSON of the sums in the order of their names.

    In that order a folder can be compared with what was sent: safetensors files keep no other.
    """
    return hashlib.sha256(_encoder.encode(sorted(sums, key=lambda s: s.name))).hexdigest()
