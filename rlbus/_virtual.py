"""An event loop whose clock jumps: when nothing is ready, time moves to the next timer at once.

Invariants: with no thread involved, a run is deterministic (same code and seeds, same order, same times) and takes no
real time for sleeping; time never moves while something is ready. While executor work or `real_work` is outstanding,
the loop waits for real: work that ends within PATIENCE_S moves no time, so a slow machine changes no run. Beyond that,
and at once while a thread says that it `hangs`, timers become due by the real time so waited.
Not for sockets or subprocesses: the loop would jump past them. Use `real_work` around those, or a real loop.
"""

import asyncio
import selectors
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

from rlbus.errors import BrokenError, DeadlineError

T = TypeVar("T")

# What `run` allows for the cleanup of cancelled tasks after its limit, in virtual seconds.
CLEANUP_S = 60.0
# How long work outside the loop may take before a timer passes it, in real seconds: what gets no CPU doesn't hang.
PATIENCE_S = 60.0
# Unix time at which every virtual loop starts, in seconds.
LOOP_CLOCK_START = 1_700_000_000.0


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`asyncio` loop with virtual time, starting at 0.0 s.

    `limit_s` is the virtual time that it refuses to pass (DeadlineError out of `run_until_complete`); None: no limit.
    """

    # Whether blocking work is done on the loop itself: in threads it ends when they like, and no two runs are alike.
    is_without_threads = False
    # For tests of the loop itself; see PATIENCE_S.
    patience_s = PATIENCE_S

    def __init__(self, limit_s: float | None = None) -> None:
        self._now_s = 0.0
        self._num_real = 0
        # Of those, the ones that say that they hang.
        self._num_hung = 0
        self._waited_s = 0.0
        self._patience_left_s = 0.0
        self.limit_s = limit_s
        super().__init__(_JumpingSelector(self))
        _loops.add(self)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    @contextmanager
    def real_work(self) -> Iterator[None]:
        """Wait for real while this is open, since something outside the loop (a thread, a socket) will wake it."""
        self._begin_real()
        is_left = True
        try:
            yield
            is_left = False
        finally:
            self._end_real(is_left)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """As in asyncio; time doesn't jump until the work has ended."""
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._begin_real()
        future.add_done_callback(lambda ended: self._end_real(ended.cancelled()))
        return future

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        """As in asyncio, which joins the threads from one more thread. Cancel: as there."""
        with self.real_work():
            await super().shutdown_default_executor(*args, **kwargs)

    def _begin_real(self) -> None:
        if not self._num_real:
            self._waited_s = 0.0
        self._num_real += 1
        self._patience_left_s = self.patience_s

    def _end_real(self, is_left: bool) -> None:
        self._num_real -= 1
        if is_left:
            self._count_hung(-1)  # who is left before its end hangs, if anybody does

    def _count_hung(self, by: int) -> None:
        self._num_hung = max(0, self._num_hung + by)

    def wait_for_events(self, select: Callable[[float | None], list[Any]], timeout_s: float | None) -> list[Any]:
        """One step of waiting, called by the selector: returns events, or moves the clock by `timeout_s`.

        Raises:
            BrokenError: nothing is scheduled and nobody outside could wake the loop. DeadlineError: past `limit_s`.
        """
        events = select(0)
        if events or timeout_s == 0:
            return events
        if self._num_real:
            return self._wait_for_real(select, timeout_s)
        self._waited_s = 0.0
        if timeout_s is None:
            raise BrokenError("virtual loop", f"deadlock at {self._now_s:g} s, waiting: {self._waiting()}")
        if self.limit_s is not None and self._now_s + timeout_s > self.limit_s:
            limit_s, self.limit_s = self.limit_s, None
            raise DeadlineError("virtual run", limit_s, f"waiting: {self._waiting()}")
        self._now_s += timeout_s
        return []

    def _wait_for_real(self, select: Callable[[float | None], list[Any]], timeout_s: float | None) -> list[Any]:
        # The clock stays until a whole timer has been waited for, and whoever doesn't hang has had its time.
        began_s = time.monotonic()
        patience_s = self._patience_left_s if self._num_real > self._num_hung else 0.0
        left_s = None if timeout_s is None else max(0.0, timeout_s - self._waited_s, patience_s)
        events = select(left_s)
        waited_s = time.monotonic() - began_s
        self._waited_s += waited_s
        self._patience_left_s -= waited_s
        if not events and timeout_s is not None:
            self._now_s += timeout_s
            self._waited_s = 0.0
        return events

    def _waiting(self) -> str:
        names = sorted(
            f"{t.get_name()} ({getattr(t.get_coro(), '__qualname__', '?')})" for t in asyncio.all_tasks(self)
        )
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


_loops: "weakref.WeakSet[VirtualTimeLoop]" = weakref.WeakSet()


@contextmanager
def hangs() -> Iterator[None]:
    """For a thread that a test has hang: while this is open, timers of virtual loops pass its work as real time does,
    and don't wait first whether it ends after all.
    """
    loops = list(_loops)
    _tell(loops, 1)
    try:
        yield
    finally:
        _tell(loops, -1)


def _tell(loops: list[VirtualTimeLoop], by: int) -> None:
    for loop in loops:
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(loop._count_hung, by)


def real_work(loop: asyncio.AbstractEventLoop) -> AbstractContextManager[None]:
    """While it is open, a virtual `loop` waits for real; nothing for any other loop. For who waits for a thread."""
    return loop.real_work() if isinstance(loop, VirtualTimeLoop) else nullcontext()


def is_without_threads(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether whoever would start a thread for `loop` shall do its work at once instead."""
    return isinstance(loop, VirtualTimeLoop) and loop.is_without_threads


class _JumpingSelector(selectors.DefaultSelector):
    """Asks the loop how to wait; the loop's self-pipe stays a real file, so other threads can wake it."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        return self._loop.wait_for_events(super().select, timeout)


class LoopClock:
    """Clock whose date follows the running loop's time: `LOOP_CLOCK_START + loop.time()`."""

    def now(self) -> float:
        """Unix time in seconds; only from within a running loop."""
        return LOOP_CLOCK_START + asyncio.get_running_loop().time()


def run(coro: Coroutine[Any, Any, T], *, timeout_s: float = 3600.0) -> T:
    """Run `coro` on a fresh VirtualTimeLoop to its end, and cancel what it left behind.

    Args:
        timeout_s: virtual seconds that it may take.

    Raises:
        DeadlineError: it took longer. BrokenError: it waits for what nobody will ever do. And whatever it raises.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(timeout_s)) as runner:
        try:
            return runner.run(coro)
        finally:
            loop = runner.get_loop()
            assert isinstance(loop, VirtualTimeLoop)
            loop.limit_s = loop.time() + CLEANUP_S


def sequential_ids(prefix: str) -> Callable[[], str]:
    """A source of ids for tests: `<prefix>-1`, `<prefix>-2`, ..."""
    count = 0

    def new_id() -> str:
        nonlocal count
        count += 1
        return f"{prefix}-{count}"

    return new_id
