"""The seam to an engine that defers aborts: it has more to say of one than how many requests it ended."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rlbus.schemas import AbortedData


@runtime_checkable
class CountsAborts(Protocol):
    """An engine that ends a request without a token at its first one, and closes its entrance for an abort of all."""

    async def abort_counted(self, request_ids: Sequence[str] | None) -> AbortedData:
        """As `Engine.abort`, and what became of it. Cancel: what was to be ended later still is."""
        ...
