"""Work on folders that callers name, which may lie on a shared disk that hangs.

A thread that hangs in such a disk can't be ended. So it is a daemon thread of its own, never one of those that the loop
lends to everybody: names are looked up there (without them no bus is found again), and the end of the process waits for
them.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from rlbus.errors import refused
from rlbus.schemas import FaultCode
from rlbus.transfer.bounded import run_in_thread

T = TypeVar("T")

# Threads that hang, and for whose result nobody waits any more, until nothing is read.
MAX_HUNG = 16


class DiskThreads:
    """Threads for one process. Those that somebody waits for aren't counted: an agent has one mutation at a time."""

    def __init__(self, max_hung: int = MAX_HUNG) -> None:
        self._max_hung = max_hung
        self._lock = threading.Lock()
        self._running: set[object] = set()
        # Of those, the ones whose caller has gone. Left by the thread itself, however late.
        self._hung: set[object] = set()

    async def run(self, work: Callable[[], T], path: str) -> T:
        """Do blocking `work` on `path`.

        Raises:
            BusyError: too many earlier ones hang; nothing was done. Whatever `work` raises.
        Cancel: the thread goes on, and its result is dropped.
        """
        job = object()
        with self._lock:
            if len(self._hung) >= self._max_hung:
                message = f"{path} isn't read: {len(self._hung)} reads before it haven't come back; a disk hangs"
                raise refused(FaultCode.BUSY, message, retryable=True, path=path)
            self._running.add(job)

        def look() -> T:
            try:
                return work()
            finally:
                with self._lock:
                    self._running.discard(job)
                    self._hung.discard(job)

        try:
            return await run_in_thread(look, name="rlbus disk")
        except asyncio.CancelledError:
            with self._lock:
                if job in self._running:
                    self._hung.add(job)
            raise


# The process has them, as it has its threads.
DISK = DiskThreads()
