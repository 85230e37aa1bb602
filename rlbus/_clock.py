"""Wall time as an object. Durations and sleeps go through the running event loop (`loop.time()`, `asyncio.sleep`,
`asyncio.timeout`), so that a loop with virtual time (`rlbus.testing.VirtualTimeLoop`) makes them all virtual; only the
date, which travels between machines in `expires_at`, needs a seam of its own.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the date."""

    def now(self) -> float:
        """Unix time in seconds."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """Unix time in seconds."""
        return time.time()
