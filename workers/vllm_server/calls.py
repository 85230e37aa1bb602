"""Calls of the engine that always end: bounded from outside, and raced against the engine's death.

vLLM's calls have no time-out that can be used (a passed one leaves replies out of step, facts/vllm-cpu.md 6), and
hang for ever when the engine dies meanwhile (11). So each runs in a task of its own: its caller stops waiting, the
call goes on, and nothing else is asked of the engine before it has come back.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from rlbus.errors import EngineDeadError, EngineError, FaultError
from rlbus.schemas import Fault, FaultCode

_log = logging.getLogger("rlbus.workers")
T = TypeVar("T")

# How often a waiting caller looks whether the engine died, in seconds. vLLM has no event for it.
DEATH_POLL_S = 0.1
# How long a call of an engine that stands still may stay away after its limit, or after it was told to stop, before
# the engine counts as dead. A rank looks every 50 ms whether its transfer was stopped (`exchange`); loading has a limit
# of its own, half an hour.
OVERDUE_S = 30.0
# Hashing all weights: 0.12 s for 537 MB (facts/vllm-cpu.md 5).
CHECKSUM_S = 600.0
# Length of vLLM's error text in a fault.
MAX_PROBLEM_CHARS = 500


class Mortal(Protocol):
    """What tells that an engine is gone."""

    @property
    def errored(self) -> bool:
        """Whether it died."""
        ...


class EngineCalls:
    """Makes the calls of one engine. `num_ranks` is the number of processes that answer a collective call.

    With more than one, a collective call that failed leaves their answers out of step (facts/vllm-cpu.md 6); from
    then on the engine counts as dead.
    """

    def __init__(self, engine: Mortal, num_ranks: int = 1) -> None:
        self._engine = engine
        self._num_ranks = num_ranks
        # Calls that hold the core and haven't come back, with their names; those in which it is known to be paused.
        self._pending: dict[asyncio.Task[Any], str] = {}
        self._paused: set[asyncio.Task[Any]] = set()
        # When calls of a paused engine have to be back, in seconds of the loop.
        self._due_s: dict[asyncio.Task[Any], float] = {}
        self._broken: str | None = None

    @property
    def is_held_paused(self) -> bool:
        """Whether the core is inside a call that is made of a paused engine only: it can't step, nor say so."""
        return bool(self._paused)

    @property
    def death(self) -> str | None:
        """Why the engine counts as dead, None while it lives."""
        if self._engine.errored:
            return "the engine died; what supervises it has to restart it"
        return self._broken or self._overdue()

    def call_back(self) -> None:
        """Whatever holds a paused core was told to stop: it has to be back in OVERDUE_S."""
        now_s = asyncio.get_running_loop().time()
        for task, due_s in self._due_s.items():
            self._due_s[task] = min(due_s, now_s + OVERDUE_S)

    def _overdue(self) -> str | None:
        """The call that will never come back, in words; None if there is none."""
        if not self._due_s:
            return None
        now_s = asyncio.get_running_loop().time()
        names = [self._pending[task] for task, due_s in self._due_s.items() if now_s > due_s]
        return f"the engine doesn't come back from {', '.join(names)}; restart it" if names else None

    def check_alive(self) -> None:
        """Raise EngineDeadError if the engine is gone."""
        if self.death is not None:
            raise EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=self.death))

    async def ask(self, what: str, call: Callable[[], Awaitable[T]], limit_s: float | None) -> T:
        """Make a call that doesn't hold the core: a question, a pause. It is dropped when the caller stops waiting.

        Raises: EngineError: it failed, or took longer than `limit_s` (None: as long as the caller waits).
            EngineDeadError. Cancel: the call's answer is ignored; the engine may still do it.
        """
        self.check_alive()
        task = self._start(call)
        try:
            await self._wait(what, task, limit_s)
            return self._result(what, task, is_collective=False)
        finally:
            task.cancel()

    async def hold(self, what: str, call: Callable[[], Awaitable[T]], limit_s: float, *, is_paused: bool = False) -> T:
        """Make a collective call during which the core does nothing else; earlier ones come back first.

        `is_paused` says that the engine stands still before and after it. Raises: as `ask`; after a passed limit the
        call is still pending. Cancel: likewise.
        """
        await self.settle(limit_s)
        self.check_alive()
        task = self._start(call)
        self._pending[task] = what
        if is_paused:
            self._paused.add(task)
            self._due_s[task] = asyncio.get_running_loop().time() + limit_s + OVERDUE_S
        task.add_done_callback(self._ended)
        await self._wait(what, task, limit_s)
        return self._result(what, task, is_collective=True)

    async def settle(self, limit_s: float) -> None:
        """Wait until no call is pending. Raises EngineError naming the one that doesn't come back; EngineDeadError.

        Cancel: the calls go on.
        """
        if not self._pending:
            return
        waited: set[asyncio.Future[Any]] = set(self._pending)
        if not await self._until(waited, limit_s):
            names = ", ".join(self._pending.values())
            raise _failed(f"the engine hasn't come back from {names}; restart it if it never does")

    def close(self) -> None:
        """Wait for nothing any more."""
        for task in self._pending:
            task.cancel()

    def _start(self, call: Callable[[], Awaitable[T]]) -> "asyncio.Task[T]":
        async def run() -> T:
            return await call()

        return asyncio.get_running_loop().create_task(run())

    async def _wait(self, what: str, task: "asyncio.Task[T]", limit_s: float | None) -> None:
        waited: set[asyncio.Future[T]] = {task}
        if not await self._until(waited, limit_s):
            raise _failed(f"{what} did not return within {limit_s:g} s", limit_s=f"{limit_s:g}")

    async def _until(self, waited: "set[asyncio.Future[T]]", limit_s: float | None) -> bool:
        """Wait for all of them; whether they are done. Raises EngineDeadError."""
        loop = asyncio.get_running_loop()
        ends_s = None if limit_s is None else loop.time() + limit_s
        while True:
            poll_s = DEATH_POLL_S if ends_s is None else min(DEATH_POLL_S, max(0.0, ends_s - loop.time()))
            _, pending = await asyncio.wait(waited, timeout=poll_s)
            if not pending:
                return True
            self.check_alive()
            if ends_s is not None and loop.time() >= ends_s:
                return False

    def _result(self, what: str, task: "asyncio.Task[T]", *, is_collective: bool) -> T:
        try:
            return task.result()
        except FaultError:
            raise
        except Exception as exc:
            self.check_alive()
            problem = f"{what}: {exc}".replace("\n", " ")[:MAX_PROBLEM_CHARS]
            if is_collective and self._num_ranks > 1:
                self._broken = f"{what} failed, and the answers of {self._num_ranks} ranks are out of step; restart it"
            raise _failed(problem) from exc

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._paused.discard(task)
        self._due_s.pop(task, None)
        what = self._pending.pop(task)
        if not task.cancelled() and task.exception() is not None:
            _log.debug("%s ended: %s", what, task.exception())


def _failed(message: str, **detail: str) -> EngineError:
    return EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=message, detail=detail))
