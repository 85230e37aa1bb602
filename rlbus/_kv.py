"""The seam to a small store of key and value with revisions, beside the bus: for the lease, the journal, the version.

`rlbus._kv_jetstream` implements it over NATS JetStream, `rlbus._kv_memory` in memory. Contract (both pass the same
tests):
- A revision is a number that only grows over the whole bucket; no two writes share one.
- A write names the revision that it expects to replace, and changes nothing if another one stands there.
- A write with a TTL ends by itself that many seconds after the store took it, by the store's own clock, as if the key
  had never been; nobody's date is compared with anybody else's.
- A write whose answer is lost may have happened (DeadlineError); whoever needs to know reads the key.
"""

from dataclasses import dataclass
from typing import Protocol

from rlbus.errors import BrokenError

# One call of the store. Source: facts/nats.md A5 (p99 0.4 ms, 2.5 ms with fsync); R3 without a leader answers nothing
# for seconds, and a leader has to know soon enough that its lease isn't renewed (rlbus.controller.leader).
CALL_LIMIT_S = 0.6


class NoStoreError(BrokenError):
    """There is no such bucket, or nothing that could have one (yet, if the server has just started)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What stands under a key, and the revision of that write."""

    value: bytes
    revision: int


class Kv(Protocol):
    """One bucket. Keys are tokens of A-Z a-z 0-9 _ - joined by dots.

    Every call raises DeadlineError (no answer within CALL_LIMIT_S) or BrokenError (disconnected, or it refuses;
    NoStoreError: there is no bucket).
    Cancel: a write may have happened.
    """

    async def get(self, key: str) -> Entry | None:
        """What stands under `key`; None: nothing."""
        ...

    async def create(self, key: str, value: bytes, *, ttl_s: int | None = None) -> int:
        """Write where nothing stands; the revision. `ttl_s` in whole seconds from 1 on; None: it stays.

        Raises: ConflictError: something stands there. PayloadTooLargeError: nothing was written.
        """
        ...

    async def update(self, key: str, value: bytes, revision: int, *, ttl_s: int | None = None) -> int:
        """Replace the write of `revision`; the new revision. The TTL begins anew (None: it stays from now on).

        Raises: ConflictError: another write stands there, or none. PayloadTooLargeError: nothing was written.
        """
        ...

    async def delete(self, key: str, revision: int) -> None:
        """Remove the write of `revision`. Raises: ConflictError: another one stands there, or none."""
        ...

    async def keys(self, prefix: str) -> tuple[str, ...]:
        """Keys that begin with the tokens of `prefix` and a dot, sorted. One that was deleted may still be named."""
        ...
