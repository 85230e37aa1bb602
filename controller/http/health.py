"""Whether somebody leads and answers. Anybody may ask that, as often as he likes, so it costs little: one question at a
time, of a size that doesn't depend on the fleet's, and its answer is good for everybody who asks in the next second.
"""

import asyncio
from collections.abc import Awaitable, Callable

from rlbus.errors import RLBusError
from rlbus.schemas import FaultCode

# For so long an answer is good for others who ask, in seconds.
FRESH_S = 1.0


class Health:
    """Asks by `ask`. `aclose` at the end."""

    def __init__(self, ask: Callable[[], Awaitable[object]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[bool] | None = None
        self._began_s = 0.0

    async def is_well(self) -> bool:
        """Whether somebody leads and answers. Cancel: the question goes on, for others."""
        now_s = asyncio.get_running_loop().time()
        asking = self._asking
        if asking is None or (asking.done() and now_s - self._began_s >= FRESH_S):
            asking = self._asking = asyncio.get_running_loop().create_task(self._answers())
            self._began_s = now_s
        await asyncio.wait({asking})
        return not asking.cancelled() and asking.result()

    async def aclose(self) -> None:
        """End the question. Idempotent. Cancel: likewise."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _answers(self) -> bool:
        try:
            await self._ask()
        except RLBusError as exc:
            # A leader of before there were pages may have too much to say: that is an answer, too.
            return getattr(exc, "code", None) is FaultCode.TOO_LARGE
        return True
