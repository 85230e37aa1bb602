"""Checksums of adapters' folders that callers name, which may lie on a shared disk that hangs.

A thread that hangs in such a disk can't be ended. So each read has a daemon thread of its own, never one of those that
the loop lends to everybody (names are looked up there, and the end of the process waits for them); a folder is read
once at a time, and few at all.
"""

import asyncio
from pathlib import Path

from rlbus.adapter import ADAPTER_FILES, AdapterError, adapter_sum
from rlbus.errors import BusyError, DeadlineError
from rlbus.schemas import Fault, FaultCode
from rlbus.transfer.bounded import run_in_thread

# Folders that are read at the same time, those included that hang. The controller loads one adapter at a time.
MAX_READING = 16


class Summing:
    """The folders that this process reads now. `absent` is what to do about one that isn't here, for the error."""

    def __init__(self, absent: str) -> None:
        self._absent = absent
        # Left by the thread itself, however late.
        self._reading: set[Path] = set()

    async def sum_of(self, folder: Path, limit_s: float) -> str:
        """The checksum of the files that are there now; the workers copy them, and refuse if they have changed by then.

        Raises: AdapterError: no such folder here. DeadlineError. BusyError: it, or MAX_READING others, are being read,
            or hang. Cancel: a thread may read on.
        """
        if folder in self._reading or len(self._reading) >= MAX_READING:
            what = f"{folder} is" if folder in self._reading else f"{MAX_READING} folders are"
            message = f"{what} being read for another request; if that goes on, a disk hangs"
            raise BusyError(Fault(code=FaultCode.BUSY, message=message, retryable=True))
        self._reading.add(folder)

        def look() -> str:
            try:
                return self._look(folder)
            finally:
                self._reading.discard(folder)

        try:
            async with asyncio.timeout(limit_s):
                return await run_in_thread(look, name="rlbus adapter sum")
        except TimeoutError as exc:
            raise DeadlineError(f"reading {folder}", limit_s) from exc

    def _look(self, folder: Path) -> str:
        for name in ADAPTER_FILES:  # a pipe, or a device, would keep the thread for ever
            self._check(folder / name)
        try:
            return adapter_sum(folder).checksum
        except AdapterError as exc:
            if isinstance(exc.__cause__, OSError):
                raise self._unseen(exc.path, exc.problem) from exc
            raise

    def _check(self, file: Path) -> None:
        """Raises AdapterError: it isn't there, as far as this process can see."""
        try:
            if file.is_file():
                return
        except OSError as exc:  # a name too long, no permission, a stale mount: all but "not found" is raised
            raise self._unseen(str(file), exc.strerror or type(exc).__name__) from exc
        raise self._unseen(str(file), "there is no such file here")

    def _unseen(self, path: str, problem: str) -> AdapterError:
        return AdapterError(path, f"{problem}; {self._absent}")
