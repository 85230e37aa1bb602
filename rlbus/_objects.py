"""The seam to a store of large things beside the bus: for adapters that no shared folder brings to the workers.

`rlbus._objects_jetstream` implements it over NATS JetStream, `rlbus._objects_memory` in memory. Contract (both pass the
same tests):
- An object is seen only once all of it is there: one that was put half way is as one that isn't.
- Whoever reads or writes holds a few parts in memory, never a whole object.
- Names are tokens; a name stands for one content (a digest), so putting it again changes nothing but its end.
- An object ends by itself `ttl_s` seconds after it was put.
"""

from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import Protocol

# One message of an object, at most; less where the server takes less. Source: facts/nats.md A4, 287 MB/s with 512 KiB;
# a smaller one leaves more room for other messages between two parts.
PART_BYTES = 256 << 10
# Parts on their way at the same time, per object and reader: what a reader or writer holds in memory.
MAX_PARTS_IN_FLIGHT = 8
# The largest object. Source: facts/nats.md A4 ("a few hundred MB"); what is larger belongs into a shared folder.
MAX_OBJECT_BYTES = 1 << 30
# How long one part may take there or back, in seconds.
PART_LIMIT_S = 10.0
# How long an object is kept at most, in seconds: a week. What is unloaded is deleted at once.
DEFAULT_TTL_S = 7 * 86_400


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What is known of an object that is there."""

    size_bytes: int
    num_parts: int


class Objects(Protocol):
    """One store of objects.

    Every call raises DeadlineError (no answer within PART_LIMIT_S) or BrokenError (disconnected, or it refuses).
    """

    async def look(self, name: str) -> ObjectInfo | None:
        """What is known of `name`; None: it isn't there, or not wholly. Cancel: leaves nothing."""
        ...

    async def put(self, name: str, pieces: AsyncIterable[bytes], *, ttl_s: int = DEFAULT_TTL_S) -> ObjectInfo:
        """Store what `pieces` yields, over what was there before.

        Raises: PayloadTooLargeError: it has more than MAX_OBJECT_BYTES; it isn't seen. Whatever `pieces` raises.
        Cancel: parts may be there, which nobody sees, until their TTL.
        """
        ...

    def get(self, name: str) -> AsyncGenerator[bytes, None]:
        """Yield the object, part by part. Close the generator if it isn't read to its end.

        Raises: MissingError: it isn't there, or a part of it is gone. Cancel: leaves nothing.
        """
        ...

    async def delete(self, name: str) -> None:
        """Remove it; one that isn't there is no error. Cancel: it may be gone."""
        ...

    def close(self) -> None:
        """Take no more answers. Idempotent; what is kept stays."""
        ...


async def parts_of(pieces: AsyncIterable[bytes], part_bytes: int) -> AsyncGenerator[bytes, None]:
    """The same bytes in parts of `part_bytes`, the last one shorter; none is empty. Cancel: leaves nothing."""
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        while len(rest) >= part_bytes:
            yield bytes(rest[:part_bytes])
            del rest[:part_bytes]
    if rest:
        yield bytes(rest)
