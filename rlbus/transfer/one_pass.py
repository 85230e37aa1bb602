"""Sources that all ranks of a trainer read together (FSDP): each tensor is gathered by a collective of theirs.

Invariant: within one update our rank reads such a source exactly once, from its first tensor to its last, whatever
becomes of the update, since that is what the others do, and nobody can tell them otherwise. A second read would pair
with what they read next: layers of equal shape would mix, and nothing would show it.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from rlbus.errors import TransferError
from rlbus.schemas import TensorSpec
from rlbus.transfer.bounded import run_in_thread
from rlbus.transfer.plane import WeightSource

_log = logging.getLogger("rlbus.trainer")

# How long an update that failed may go on with reading, in seconds: beyond it the other ranks hang, or are gone.
READ_REST_S = 120.0


def is_shared(source: WeightSource) -> bool:
    """Whether other ranks have to read it with us: it says so by an attribute of that name. Blocks as reading does."""
    return bool(getattr(source, "is_shared", False))


class SharedReads:
    """Of one trainer: at most one read at a time. Used by one update at a time."""

    def __init__(self) -> None:
        # One that was still running when nobody waited for it any longer.
        self._left: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def read_by_all(self, source: WeightSource, is_shared: bool) -> AsyncIterator[WeightSource]:
        """What to send in place of `source` in one update; if it is shared, it has been read to its end afterwards.

        `is_shared`: what the function of that name said: it may read all of the source, for which no loop waits.

        Raises TransferError, before anything is read: a read of an update before has not ended.
        Cancel: as any other end: it is read to its end first, for at most READ_REST_S.
        """
        if not is_shared:
            yield source
            return
        if self._left is not None and not self._left.done():
            why = "the other ranks haven't read what an update before began to read with them; start the trainer anew"
            raise TransferError("read the weights", why)
        once = OnePass(source)
        try:
            yield once
        finally:
            await self._read_rest(once)

    async def _read_rest(self, once: "OnePass") -> None:
        loop = asyncio.get_running_loop()
        self._left = asyncio.ensure_future(run_in_thread(once.read_rest, name="rlbus reading with other ranks"))
        until_s = loop.time() + READ_REST_S
        cancelled: asyncio.CancelledError | None = None
        while not self._left.done() and loop.time() < until_s:
            try:
                await asyncio.wait({self._left}, timeout=until_s - loop.time())
            except asyncio.CancelledError as exc:
                cancelled = exc
        if not self._left.done():
            _log.error("the other ranks of the trainer did not read the weights with us within %g s", READ_REST_S)
        if cancelled is not None:
            raise cancelled


class OnePass:
    """`source`, to be read once. Threads may follow each other: one that was left behind takes at most one tensor."""

    is_shared = True

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._pairs: Iterator[tuple[str, Any]] | None = None
        self._lock = threading.Lock()

    def specs(self) -> tuple[TensorSpec, ...]:
        """As the source."""
        return self._source.specs()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield what the source yields. Raises TransferError: it was read before."""
        if self._pairs is not None:
            why = "the source is read together with the trainer's other ranks, once in each update"
            raise TransferError("read the weights", why)
        self._pairs = iter(self._source)
        while (pair := self._next()) is not None:
            yield pair

    def read_rest(self) -> None:
        """Read on to the end, and drop what comes. Blocks as long as the source does; its errors go to the log."""
        try:
            if self._pairs is None:
                self._pairs = iter(self._source)
            while self._next() is not None:
                pass
        except BaseException as exc:  # noqa: BLE001 - user code, after the update has ended: there is nobody to tell
            _log.error("the weights could not be read to their end: %s: %s", type(exc).__name__, exc)

    def _next(self) -> tuple[str, Any] | None:
        assert self._pairs is not None
        with self._lock:
            return next(self._pairs, None)
