"""Checksums of adapters' folders that callers name, which may lie on a shared disk that hangs.

A thread that hangs in such a disk can't be ended. So each read has a daemon thread of its own, and never one of those
that the agent needs; one folder is read at a time, whoever asks, and the next one doesn't wait for a read that takes
long, so that a disk that hangs costs the others TURN_S, once for each folder on it.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from weakref import WeakKeyDictionary

from rlbus.transfer.bounded import run_in_thread
from rlbus.workers.system.calls import CallError
from rlbus.workers.system.dynamo_bodies import said

# For how long the next read waits for the one before, in seconds: most adapters are read by then.
TURN_S = 5.0
# Folders that are read at the same time, those included that hang.
MAX_READING = 16


class Summing:
    """The folders that this process reads now."""

    def __init__(self) -> None:
        # Left by the thread itself, however late.
        self._reading: set[str] = set()
        # One for each loop: a lock belongs to the first one that waits in it, and this object to the whole process.
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def run(self, path: str, look: Callable[[], str], limit_s: float) -> str:
        """What `look` returns, which reads the folder `path`.

        Raises: what it raises. CallError: it took longer than `limit_s`; an earlier read of `path`, or MAX_READING of
            other folders, go on. Cancel: a thread may read on.
        """
        try:
            async with asyncio.timeout(limit_s):
                return await self._run(path, look)
        except TimeoutError as exc:
            raise said(f"reading {path} took longer than {limit_s:g} s", HTTPStatus.GATEWAY_TIMEOUT) from exc

    async def _run(self, path: str, look: Callable[[], str]) -> str:
        loop = asyncio.get_running_loop()
        turn = self._turns.setdefault(loop, asyncio.Lock())
        reading: asyncio.Task[str] | None = None
        try:
            async with turn:
                self._check(path)
                self._reading.add(path)
                reading = loop.create_task(run_in_thread(lambda: self._read(path, look), name="rlbus adapter sum"))
                await asyncio.wait({reading}, timeout=TURN_S)
            return await reading
        finally:
            if reading is not None:
                reading.cancel()

    def _check(self, path: str) -> None:
        if path in self._reading or len(self._reading) >= MAX_READING:
            what = f"{path} is" if path in self._reading else f"{MAX_READING} folders are"
            text = f"{what} still being read for another request; try again; if that goes on, a disk hangs"
            raise CallError(HTTPStatus.SERVICE_UNAVAILABLE, "Busy", text)

    def _read(self, path: str, look: Callable[[], str]) -> str:
        try:
            return look()
        finally:
            self._reading.discard(path)
