"""All ranks of a torch engine together: calls that every rank makes at once, and what they come to.

Invariant: a call that was cancelled or left behind is known until it is over, and the rank that it is stuck in is
killed after a while; a rank that is killed makes the engine a dead one.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from rlbus.errors import EngineDeadError, FaultError, error_from_fault
from rlbus.schemas import Fault, FaultCode, ReceivedData, TensorSum
from rlbus.workers.engines.base import ProgressFn, ReadyFn, UpdateFailedError
from rlbus.workers.engines.torch_rank import EngineRank

_log = logging.getLogger("rlbus.workers")
T = TypeVar("T")

# How long the other ranks may take to fail by themselves when one has, before the group is broken.
SETTLE_S = 1.0
# How long a rank whose group was broken may take to answer, before it is killed.
RELEASE_S = 5.0
# How long a call that is cancelled waits for its ranks; the agent's own patience is 2 s.
CANCEL_S = 1.5
# A call that isn't bounded by the group: reading and copying a model on every rank, or summing it up.
LOCAL_S = 300.0


class Ranks:
    """The ranks, in order. They are added while the engine starts."""

    def __init__(self) -> None:
        self.all: list[EngineRank] = []
        # Calls that nobody may wait for any more, until they are over.
        self._stray: set[asyncio.Future[Any]] = set()

    @property
    def has_stray(self) -> bool:
        """Whether a call of before still runs in a rank."""
        return bool(self._stray)

    def check_alive(self) -> None:
        """Raise EngineDeadError if one is gone."""
        for rank in self.all:
            rank.check_alive()

    def leave(self, reason: str) -> None:
        """Drop the group on every rank. Never blocks."""
        for rank in self.all:
            rank.leave(reason)

    async def wait_for_stray(self) -> None:
        """Until no call of before runs, at most RELEASE_S. Cancel: leaves nothing."""
        if self._stray:
            await asyncio.wait(tuple(self._stray), timeout=RELEASE_S)

    async def aclose(self) -> None:
        """Close every rank. Idempotent. Cancel: processes are killed."""
        await asyncio.gather(*(rank.aclose() for rank in self.all))
        for stray in tuple(self._stray):
            stray.cancel()

    async def in_group(
        self, calls: Sequence[Coroutine[Any, Any, T]], limit_s: float | None, reason: str
    ) -> list[T | BaseException]:
        """Make a call that blocks in the group on every rank; what each came to.

        When one fails, the others get SETTLE_S to fail alike, then the group is broken; a rank that doesn't answer
        within RELEASE_S after that is killed. `limit_s` None: the group itself bounds the call.

        Cancel: the group is broken, and the calls awaited for CANCEL_S.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            _, pending = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                _, pending = await asyncio.wait(pending, timeout=SETTLE_S)
            if pending:
                self.leave(reason)
                self._let_go(tasks, RELEASE_S)
                await asyncio.wait(tasks, timeout=RELEASE_S)
        except asyncio.CancelledError:
            self.leave("the call was cancelled")
            self._let_go(tasks, RELEASE_S)
            await asyncio.wait(tasks, timeout=CANCEL_S)
            raise
        return [_result(task, reason) for task in tasks]

    async def on_all(self, calls: Sequence[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
        """Make a call that waits for nobody else on every rank; what each came to. One that takes LOCAL_S is killed.

        Cancel: the calls are awaited for CANCEL_S; until they end, nothing else may change the weights.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        self._let_go(tasks, LOCAL_S)
        try:
            await asyncio.wait(tasks, timeout=LOCAL_S)
        except asyncio.CancelledError:
            await asyncio.wait(tasks, timeout=CANCEL_S)
            raise
        return [_result(task, f"for {LOCAL_S:g} s") for task in tasks]

    def _let_go(self, tasks: Sequence["asyncio.Future[Any]"], limit_s: float) -> None:
        """From here on the calls may be left behind; after `limit_s` their ranks are killed."""
        loop = asyncio.get_running_loop()
        for index, task in enumerate(tasks):
            if not task.done():
                self._stray.add(task)
                killing = loop.call_later(limit_s, self._kill, index)
                task.add_done_callback(partial(self._is_over, killing))

    def _kill(self, index: int) -> None:
        _log.error("rank %d of the engine does not answer, and is killed", index)
        self.all[index].kill()

    def _is_over(self, killing: asyncio.TimerHandle, task: "asyncio.Future[Any]") -> None:
        killing.cancel()
        self._stray.discard(task)
        if not task.cancelled():
            task.exception()  # seen here if its caller was cancelled


class Standing:
    """Calls `on_ready` once every rank stands. From any thread."""

    def __init__(self, num_ranks: int, on_ready: ReadyFn) -> None:
        self._missing = num_ranks
        self._on_ready = on_ready
        self._lock = threading.Lock()

    def stands(self) -> None:
        """One more."""
        with self._lock:
            self._missing -= 1
            is_last = self._missing == 0
        if is_last:
            self._on_ready()


class Slowest:
    """Progress of several ranks: that of the slowest. From any thread."""

    def __init__(self, num_ranks: int, total: int, on_progress: ProgressFn) -> None:
        self._done = [0] * num_ranks
        self._told = 0
        self._total = total
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def advance(self, index: int, done: int, _total: int) -> None:
        """A rank has so many bytes."""
        with self._lock:  # held while telling, so that counts come in order
            self._done[index] = done
            slowest = min(self._done)
            if slowest > self._told:
                self._told = slowest
                self._on_progress(slowest, self._total)


def _result(task: "asyncio.Task[T]", reason: str) -> T | BaseException:
    if not task.done() or task.cancelled():
        return EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=f"a rank does not answer ({reason})"))
    error = task.exception()
    return task.result() if error is None else error


def _fault_of(error: BaseException) -> Fault:
    if isinstance(error, FaultError | UpdateFailedError):
        return error.fault
    return Fault(code=FaultCode.ENGINE_FAILED, message=f"{type(error).__name__}: {error}")


def first_bad(results: Sequence[object]) -> Fault | None:
    """What was wrong with the first call that raised, None if none did."""
    return next((_fault_of(r) for r in results if isinstance(r, BaseException)), None)


def agreed(received: Sequence[ReceivedData | BaseException]) -> ReceivedData:
    """The first rank's data, if every rank has the same; else UpdateFailedError, touched if any may have been."""
    bad = first_bad(received)
    good = [r for r in received if isinstance(r, ReceivedData)]
    if bad is not None:
        errors = [r for r in received if isinstance(r, BaseException)]
        touched = bool(good) or any(not isinstance(e, UpdateFailedError) or e.weights_touched for e in errors)
        raise UpdateFailedError(bad, touched)
    try:
        check_equal([r.sums for r in good])
    except FaultError as exc:
        raise UpdateFailedError(exc.fault, weights_touched=True) from exc
    return good[0]


def check_equal(tables: Sequence[tuple[TensorSum, ...]]) -> None:
    """Raise TornWeightsError naming the first tensor that two ranks have different sums of."""
    for index, table in enumerate(tables):
        for first, other in zip(tables[0], table, strict=True):
            if first != other:
                message = f"rank {index} of the engine holds other bytes of {first.name!r} than rank 0"
                fault = Fault(code=FaultCode.CHECKSUM_MISMATCH, message=message, detail={"tensor": first.name})
                raise error_from_fault(fault)
