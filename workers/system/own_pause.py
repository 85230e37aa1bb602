"""The pause of an update that comes unpaused: made before it, kept while it lasts, and ended with it.

Invariants: what looks otherwise than it was made here is somebody else's, and is neither renewed nor ended; it never
ends within an open update, nor on torn weights, which stay paused for whoever heals them.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from rlbus.schemas import (
    WHOLE,
    PauseGeneration,
    PauseMode,
    PauseView,
    RenewLease,
    Result,
    ResultStatus,
    ResumeGeneration,
)
from rlbus.workers.state import WorkerState
from rlbus.workers.system.calls import DEFAULT_LEASE_S, Call, OpError, is_busy

_log = logging.getLogger("rlbus.workers")

# How long a renewal is waited for, in seconds: it takes no turn and asks no engine.
RENEWAL_S = 5.0
# Renewals within the time of one lease: two of them may come late.
RENEWALS = 3

# `Call.do`, or `Call.then`.
Do = Callable[..., Awaitable[Result]]


def next_of(call: Call) -> Do:
    """What an op is sent by: only one that follows on another of its call waits for its turn."""
    return call.then if call.has_op else call.do


class OwnPause:
    """One per surface. Cancel, of every coroutine: its ops go on to their end, and the pause ends with its lease."""

    def __init__(self) -> None:
        # As it was when it was made or renewed last.
        self._made: PauseView | None = None
        # How long it holds without renewal, in seconds, as its start said.
        self._lease_s = DEFAULT_LEASE_S

    def stands(self, state: WorkerState) -> bool:
        """Whether the worker stands still by it, and nobody has paused over it."""
        return self._made is not None and state.pause == self._made

    async def make(self, call: Call) -> bool:
        """Pause a worker that runs, or take over what an update before has left; False: somebody else's pause holds.

        Raises OpError: it can't be paused.
        """
        state = call.agent.state
        if state.pause is not None and not self.stands(state):
            return False
        self._lease_s = call.lease_s
        if state.pause is not None and state.pause.owner == call.caller:
            # No op: one of the same update, which is asked for again, may be running.
            await self._renew(call)
            return True
        await call.do(PauseGeneration(mode=PauseMode.KEEP, clear_cache=False), "pause")
        self._made = call.agent.state.pause
        return True

    @contextlib.asynccontextmanager
    async def kept(self, call: Call) -> AsyncIterator[None]:
        """Renew it now, and while the context lasts: whoever sends a step of its update lives."""
        await self._renew(call)
        keeping = asyncio.get_running_loop().create_task(self._keep(call), name="lease of an unpaused update")
        try:
            yield
        finally:
            keeping.cancel()
            (ended,) = await asyncio.gather(keeping, return_exceptions=True)
            if isinstance(ended, Exception):
                _log.warning("the pause of an unpaused update was not renewed any more", exc_info=ended)

    @contextlib.asynccontextmanager
    async def standing_still(self, call: Call, allows_unpaused: bool) -> AsyncIterator[Do]:
        """A worker that may be updated unpaused stands still within the context; what its first op is sent by.

        Raises OpError: it can't be paused, or doesn't go on.
        """
        is_own = allows_unpaused and await self.make(call)
        try:
            async with self.kept(call):
                yield next_of(call)
        finally:
            if is_own:
                await self.end(call)

    @contextlib.asynccontextmanager
    async def step(self, call: Call) -> AsyncIterator[None]:
        """One step of an open update, whose pause is kept meanwhile, and ends if the step closes it.

        Raises OpError: the worker doesn't go on.
        """
        was_open = call.agent.state.session is not None
        try:
            async with self.kept(call):
                yield
        finally:
            if was_open:
                await self.end(call)

    async def end(self, call: Call) -> None:
        """Resume from it, if nothing speaks against that. Other ops are waited for, at most as long as one may take.

        Raises OpError: the worker doesn't resume.
        """
        until_s = asyncio.get_running_loop().time() + call.limit_s
        while self._is_over(call.agent.state):
            is_late = asyncio.get_running_loop().time() >= until_s
            running = call.agent.state.running
            # A resume would take back a pause that is being made just now, which is its owner's.
            if running is None or not isinstance(running.body, PauseGeneration):
                result = await call.submit_anew(ResumeGeneration())
                if result.status is not ResultStatus.OK and (is_late or not is_busy(result)):
                    raise OpError(result)
            elif is_late:
                return
            if self._is_over(call.agent.state):
                await call.turn(until_s)

    def _is_over(self, state: WorkerState) -> bool:
        """Whether its update is, and it still stands."""
        return self.stands(state) and state.session is None and state.weights.state in WHOLE

    async def _keep(self, call: Call) -> None:
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS)
            await self._renew(call)

    async def _renew(self, call: Call) -> None:
        """In its owner's name, whoever sends the step: they are of one update."""
        made = self._made
        if made is None or not self.stands(call.agent.state):
            return
        body = RenewLease(owner=made.owner, lease_s=self._lease_s)
        result = await call.agent.entrance.submit(body, caller=made.owner, lease_s=self._lease_s, limit_s=RENEWAL_S)
        pause = call.agent.state.pause
        if result.status is ResultStatus.OK and pause is not None and pause.since == made.since:
            self._made = pause
