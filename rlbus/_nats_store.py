"""How one sees that a NATS server has lost its JetStream store for good, which a full disk does to it.

It answers the JetStream API as ever, and pings; but after one write that failed it refuses every further one to that
stream in silence, also when there is room again, until it is started again. What it logs says so in words; silence
doesn't, since a slow or busy server is silent, too.
"""

import os
import re
from pathlib import Path

# Most of a log that is read at once; what is older says nothing that isn't said again.
MAX_READ_BYTES = 1 << 20
_LOST = re.compile(
    rb"^\[\d+\] \S+ \S+ \[(?:ERR|WRN|FTL)\] "
    rb"(?:Filestore \[[^]]*\] C|JetStream stream '[^']*' c)ritical write error: (?P<why>.*)$"
    rb"|^\[\d+\] \S+ \S+ \[(?:ERR|WRN|FTL)\] (?P<off>JetStream out of (?:space|resources), will be DISABLED)$",
    re.MULTILINE,
)


def lost_store(log: bytes) -> str | None:
    """Why the server keeps nothing any more, in its own words, if whole lines of its log say that."""
    found = _LOST.search(log)
    return None if found is None else (found["why"] or found["off"]).decode(errors="replace").strip()


class StoreLog:
    """What a server logs from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = self._size()

    def problem(self) -> str | None:
        """Why it keeps nothing any more, if it has said so since the last call."""
        size = self._size()
        if size <= self._at:
            return None
        self._at = max(self._at, size - MAX_READ_BYTES)
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                text = file.read(MAX_READ_BYTES)
        except OSError:
            return None
        whole, _, _ = text.rpartition(b"\n")
        self._at += len(whole)
        return lost_store(whole)

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:  # a cleaner of /tmp has taken it
            return 0


def free_bytes(folder: Path) -> int:
    """How much may be written there. Raises OSError. It may hang with its disk: call it on a thread."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
