"""Pause, resume, flush and end-all of a `vllm-rs` server, all made of its pauses.

Invariants: what is paused stays paused and what runs goes on, through a flush and an end-all; none of them comes
between another's pause and resume. One thing may overtake: an end-all releases a pause that waits for requests.

Seen with vllm-rs 0.32: the server takes one of its pauses, resumes and weight calls at a time, so that a pause which
waits holds up the others; a cancelled one leaves the engine paused and lets the next in; a second pause empties the
caches if it is told to, also of requests that it holds; IsPaused and Abort wait for nobody.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rlbus.errors import EngineError, refused
from rlbus.schemas import Fault, FaultCode, PauseMode
from rlbus.workers.vllm_grpc.control import CALL_S, Control
from rlbus.workers.vllm_server.calls import EngineCalls

# The longest that a pause waits for requests, in seconds; the agent's deadline is normally far below it.
WAIT_S = 86_400.0


class Pausing:
    """The one place that pauses and resumes a server."""

    def __init__(self, control: Control, calls: EngineCalls) -> None:
        self._control = control
        self._calls = calls
        # Held from a question about the pause to what is done about it.
        self._turn = asyncio.Lock()
        # Set when requests that a pause waits for shall end instead; None while none waits.
        self._give_up: asyncio.Event | None = None

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """See `Engine.pause`. Cancel: the engine is, or becomes, paused."""
        if mode is PauseMode.WAIT:
            await self._wait(clear_cache)
        else:
            async with self._turn:
                await self._pause(mode, clear_cache)
        # A wait also returns after somebody else has resumed the engine meanwhile.
        if not await self._is_paused():
            text = "the engine was resumed by somebody else while it was being paused"
            raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text, retryable=True))

    async def resume(self) -> None:
        """See `Engine.resume`. Cancel: the engine may be running."""
        async with self._turn:
            await self._resume()

    async def flush(self) -> None:
        """Empty the caches. A running engine stands still for some milliseconds.

        Cancel: the caches may be emptied; an engine that ran goes on.
        """
        async with self._turn, self._as_it_was():
            await self._pause(PauseMode.KEEP, clear_cache=True)

    async def abort_all(self) -> None:
        """End every request. Raises: EngineError while a call that changes weights holds the engine.

        Cancel: some may have ended; an engine that ran goes on.
        """
        if self._give_up is not None:
            self._give_up.set()
            return
        if self._calls.is_held_paused:
            text = "the engine is in an update, and can't end what it holds before that is over"
            raise refused(FaultCode.ENGINE_FAILED, text, retryable=True)
        async with self._turn, self._as_it_was():
            await self._pause(PauseMode.ABORT, clear_cache=False)

    async def _wait(self, clear_cache: bool) -> None:
        """Pause once everything has finished, or was ended by `abort_all`."""
        give_up = self._give_up = asyncio.Event()
        loop = asyncio.get_running_loop()
        waiting = loop.create_task(self._pause(PauseMode.WAIT, clear_cache, WAIT_S))
        giving_up = loop.create_task(give_up.wait())
        try:
            await asyncio.wait({waiting, giving_up}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()
                return
            waiting.cancel()
            await asyncio.wait({waiting})
            await self._pause(PauseMode.ABORT, clear_cache)
        finally:
            self._give_up = None
            waiting.cancel()
            giving_up.cancel()

    @contextlib.asynccontextmanager
    async def _as_it_was(self) -> AsyncIterator[None]:
        """Inside the engine may be paused; afterwards it runs again if it ran before."""
        was_paused = await self._is_paused()
        try:
            yield
        finally:
            if not was_paused:
                await self._resume_surely()

    async def _is_paused(self) -> bool:
        return await self._calls.ask("IsPaused", self._control.is_paused, CALL_S)

    async def _pause(self, mode: PauseMode, clear_cache: bool, limit_s: float = CALL_S) -> None:
        what = f"PauseGeneration ({mode.value})"
        await self._calls.ask(what, lambda: self._control.pause(mode, clear_cache, limit_s), limit_s)

    async def _resume_surely(self) -> None:
        """Also when whoever waits for it is cancelled: then it ends only once the engine goes on, or CALL_S is over."""
        resuming = asyncio.get_running_loop().create_task(self._resume())
        try:
            await asyncio.shield(resuming)
        except asyncio.CancelledError:
            await asyncio.wait({resuming})
            raise

    async def _resume(self) -> None:
        await self._calls.ask("ResumeGeneration", self._control.resume, CALL_S)
