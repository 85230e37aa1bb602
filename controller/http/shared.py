"""Ops that HTTP callers wait for: identical requests share one, and who goes away leaves it to whoever asks again.

An orchestrator's read time-out isn't the end of the work (SCENARIOS 3): it asks again, and joins the op that runs. An
op that nobody has waited for in GRACE_S is taken back, as one whose caller died; or left to its own end, as a finish of
vLLM's verbs (`rlbus._conversation.goes_on`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

from rlbus.errors import BusyError
from rlbus.schemas import Fault, FaultCode, Report

# How long an op goes on without anybody who waits for it, in seconds. Longer than a retrying client's back-off, which
# is 10 s at most in prime-rl.
GRACE_S = 15.0
# Ops at the same time; of those that change something the controller runs one anyway.
MAX_OPS = 64


@dataclass(slots=True)
class _Shared:
    task: "asyncio.Task[Report]"
    num_waiting: int = 0
    ending: asyncio.TimerHandle | None = None


class SharedOps:
    """The running ops of this process' HTTP callers. `aclose` at the end."""

    def __init__(self) -> None:
        self._ops: dict[Hashable, _Shared] = {}
        # Ops that are being taken back, which takes the controller some seconds: nobody joins them any more.
        self._leaving: set[asyncio.Task[Report]] = set()

    async def join(self, key: Hashable, begin: Callable[[], Awaitable[Report]]) -> Report:
        """The report of the op `key`; `begin` is called if it doesn't run yet. `key` is all that the request says.

        Raises: BusyError: MAX_OPS run already. What `begin` raises.
        Cancel: the op goes on; unless somebody joins within GRACE_S, or others wait, it is cancelled, and whoever asks
            then begins another one.
        """
        shared = self._ops.get(key)
        if shared is None:
            shared = self._begin(key, begin)
        if shared.ending is not None:
            shared.ending.cancel()
            shared.ending = None
        shared.num_waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.num_waiting -= 1
            if shared.num_waiting == 0 and not shared.task.done():
                shared.ending = asyncio.get_running_loop().call_later(GRACE_S, self._take_back, key, shared)

    async def aclose(self) -> None:
        """Take back what runs. Idempotent. Cancel: what is being taken back is left to the controller."""
        tasks = [shared.task for shared in self._ops.values()]
        for task in tasks:
            task.cancel()
        # Those that leave aren't cancelled again: they would leave without having asked for it.
        await asyncio.gather(*tasks, *self._leaving, return_exceptions=True)

    def _begin(self, key: Hashable, begin: Callable[[], Awaitable[Report]]) -> _Shared:
        if len(self._ops) + len(self._leaving) >= MAX_OPS:
            message = f"{MAX_OPS} ops of HTTP callers run already"
            raise BusyError(Fault(code=FaultCode.BUSY, message=message, retryable=True))
        shared = self._ops[key] = _Shared(asyncio.ensure_future(_awaited(begin)))

        def on_done(task: "asyncio.Task[Report]") -> None:
            if self._ops.get(key) is shared:
                del self._ops[key]
            self._leaving.discard(task)
            if shared.ending is not None:
                shared.ending.cancel()
            if not task.cancelled():
                task.exception()  # whoever waits has it; nobody has to

        shared.task.add_done_callback(on_done)
        return shared

    def _take_back(self, key: Hashable, shared: _Shared) -> None:
        del self._ops[key]
        self._leaving.add(shared.task)
        shared.task.cancel()


async def _awaited(begin: Callable[[], Awaitable[Report]]) -> Report:
    return await begin()
