"""Weights as they are announced, compared and versioned."""

import enum

import msgspec

from rlbus.schemas.base import Wire

# Largest incarnation and step: above it JSON numbers lose digits, and a fleet that served it could take nothing newer.
MAX_VERSION_NUMBER = 2**53


class Version(Wire, frozen=True, kw_only=True, order=True, array_like=True):
    """Version of a worker's weights: ordered by incarnation, then step. On the wire `[incarnation, step]`.

    A trainer that starts over without its history opens a new incarnation; within one, steps only grow
    (SCENARIOS 11 and 12: a restarted publisher whose step 1 looks older or "different").
    """

    incarnation: int = 0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


class WeightsState(enum.StrEnum):
    """Whether a worker's weights can be trusted."""

    CLEAN = "clean"  # exactly the version it reports
    UPDATING = "updating"  # an update has touched them and hasn't ended
    DIRTY = "dirty"  # torn: an update failed after its first byte
    UNKNOWN = "unknown"  # whole, as a restarted engine loaded them, and nobody can say which


# Weights that an engine can generate on: no update has torn them.
WHOLE = frozenset({WeightsState.CLEAN, WeightsState.UNKNOWN})


class TensorSpec(Wire, frozen=True, kw_only=True, array_like=True):
    """One tensor of a manifest: checkpoint name, dtype as torch spells it without the prefix, full shape.

    On the wire `[name, dtype, [dim, ...]]`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class ManifestPage(Wire, frozen=True, kw_only=True):
    """A slice of a manifest. A manifest larger than the server's max_payload travels as several pages.

    `digest` is that of the whole manifest (see `rlbus.transfer.manifest`), so pages of two manifests never mix.
    """

    digest: str
    page: int
    num_pages: int
    tensors: tuple[TensorSpec, ...]


class TensorSum(Wire, frozen=True, kw_only=True, array_like=True):
    """Checksum of one tensor's bytes as sent or as received. On the wire `[name, checksum]`, checksum 16 hex digits."""

    name: str
    checksum: str


class WeightsView(Wire, frozen=True, kw_only=True):
    """What a worker says of its weights. `version` is None until an update or reload through rlbus completed.

    While `state` isn't clean, `version` is None and `last_good` has the last one that was.
    """

    state: WeightsState
    version: Version | None = None
    last_good: Version | None = None
    checksum: str | None = msgspec.field(default=None)
