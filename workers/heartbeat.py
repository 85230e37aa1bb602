"""When a worker announces itself: at start, soon after a change, and as a heartbeat."""

import asyncio
import random
from collections.abc import Awaitable, Callable

# Changes within this time are announced together; an update changes a worker's state some ten times within a second.
MIN_GAP_S = 0.05


class Heartbeat:
    """Calls `beat` at once, then every `interval_s` give or take `jitter` of it, and soon after `soon()`.

    Args:
        seed: of the jitter, so that workers differ and a test repeats.
    """

    def __init__(self, beat: Callable[[], Awaitable[None]], interval_s: float, jitter: float, seed: str) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._jitter = jitter
        self._random = random.Random(seed)
        self._wanted = asyncio.Event()

    def soon(self) -> None:
        """Something changed, or somebody asked: beat within MIN_GAP_S, as soon as the beat before has ended."""
        self._wanted.set()

    def next_wait_s(self) -> float:
        """The time until the next heartbeat, if nothing changes before."""
        return self._interval_s * self._random.uniform(1 - self._jitter, 1 + self._jitter)

    async def run(self) -> None:
        """Beat until cancelled. Cancel: at any point; a beat may be left out."""
        while True:
            self._wanted.clear()
            await self._beat()
            await asyncio.sleep(MIN_GAP_S)
            try:
                async with asyncio.timeout(self.next_wait_s() - MIN_GAP_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass
