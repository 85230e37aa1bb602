"""Work on folders that callers name, which may lie on a shared disk that hangs.

A thread that hangs in such a disk can't be ended. So it is a daemon thread of its own, never one of those that the loop
lends to everybody: names are looked up there (without them no bus is found again), and the end of the process waits for
them.

All of it are calls that let other threads run meanwhile (`rlbus.files`), or the loop would hang, too. So one that hangs
costs what lies beside what it reads, and nothing else: reads are counted for each place, which is what a path lies on
by its text, since to look could hang, too.
"""

import asyncio
import functools
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from rlbus.errors import refused
from rlbus.schemas import FaultCode
from rlbus.transfer.bounded import run_in_thread, start_in_thread
from rlbus.workers.config import AgentConfig

_log = logging.getLogger("rlbus.workers")

T = TypeVar("T")

# Threads that hang in one place, and for whose result nobody waits any more, until nothing is read there.
MAX_HUNG = 16
# Where Linux lists what is mounted; reading it asks no disk.
MOUNTS = Path("/proc/self/mounts")


def mounted() -> tuple[str, ...]:
    """Where something is mounted; nothing on systems that don't say so in MOUNTS."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ()
    # A blank in a name is written as \040, and so on.
    return tuple(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split(" ")[1]) for line in lines)


def place_of(path: str, places: Iterable[str]) -> str:
    """The innermost of `places` that `path` lies on, by their text; without one, the root of all paths, or of all
    relative ones.
    """
    given = os.path.normpath(path)
    given = f"/{given.lstrip('/')}" if given.startswith("/") else given
    around = [place for place in map(os.path.normpath, places) if Path(given).is_relative_to(place)]
    return max(around, key=len, default="/" if given.startswith("/") else ".")


class DiskThreads:
    """Threads for one process. Those that somebody waits for aren't counted: an agent has one mutation at a time."""

    def __init__(self, max_hung: int = MAX_HUNG, mounts: Callable[[], Iterable[str]] = mounted) -> None:
        self._max_hung = max_hung
        self._mounts = mounts
        self._lock = threading.Lock()
        self._running: set[object] = set()
        # Of those, the ones whose caller has gone, and what they read. Left by the thread itself, however late.
        self._hung: dict[object, str] = {}
        # Folders that count for themselves, since they may be links to another disk than the one that they are on.
        self._known: set[str] = set()

    def know(self, config: AgentConfig) -> None:
        """Count a worker's roots, and where it keeps its own copies, each for itself."""
        kept_in = tempfile.gettempdir() if config.lora_cache_dir is None else config.lora_cache_dir
        with self._lock:
            self._known.update((*config.weight_roots, *config.lora_roots, kept_in))

    async def run(self, work: Callable[[], T], path: str) -> T:
        """Do blocking `work` on `path`.

        Raises:
            BusyError: too many earlier ones hang in the same place; nothing was done. Whatever `work` raises.
        Cancel: the thread goes on, and its result is dropped.
        """
        job = object()
        with self._lock:
            place, num_hung = self._hung_beside(path)
            if num_hung >= self._max_hung:
                message = f"{path} isn't read: {num_hung} reads on {place} before it haven't come back; a disk hangs"
                raise refused(FaultCode.BUSY, message, retryable=True, path=path)
            self._running.add(job)

        def look() -> T:
            try:
                return work()
            finally:
                with self._lock:
                    self._running.discard(job)
                    self._hung.pop(job, None)

        try:
            return await run_in_thread(look, name="rlbus disk")
        except asyncio.CancelledError:
            with self._lock:
                if job in self._running:
                    self._hung[job] = path
            raise

    def _hung_beside(self, path: str) -> tuple[str, int]:
        """The place of `path`, and how many hang there; what is mounted is asked only while any do."""
        if not self._hung:
            return "", 0
        places = (*self._mounts(), *self._known)
        place = place_of(path, places)
        return place, sum(place_of(other, places) == place for other in self._hung.values())


# The process has them, as it has its threads.
DISK = DiskThreads()


def warn_of_absent(config: AgentConfig) -> None:
    """Log which of a worker's roots aren't there. No error: they may be mounted later. Called on a loop, when the
    worker starts; waits for no disk.
    """
    for what, roots in (("weight root", config.weight_roots), ("adapter root", config.lora_roots)):
        for root in roots:
            start_in_thread(functools.partial(_warn_if_absent, what, root), name="rlbus disk")


def _warn_if_absent(what: str, root: str) -> None:
    if not os.path.isdir(root):
        _log.warning("the %s %s is no folder (yet): until it is there, nothing is loaded from it", what, root)
