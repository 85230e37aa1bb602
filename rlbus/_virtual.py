"""An event loop whose clock jumps: when nothing is ready, time moves to the next timer at once.

Invariants: with no thread involved, a run is deterministic (same code and seeds, same order, same times) and takes no
real time for sleeping; time never moves while something is ready. While executor work or `real_work` is outstanding,
the loop waits for real, and timers become due by the real time so waited.
Not for sockets or subprocesses: the loop would jump past them. Use `real_work` around those, or a real loop.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from rlbus.errors import BrokenError, DeadlineError

T = TypeVar("T")

# What `run` allows for the cleanup of cancelled tasks after its limit, in virtual seconds.
CLEANUP_S = 60.0
# Unix time at which every virtual loop starts, in seconds.
LOOP_CLOCK_START = 1_700_000_000.0


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`asyncio` loop with virtual time, starting at 0.0 s.

    `limit_s` is the virtual time that it refuses to pass (DeadlineError out of `run_until_complete`); None: no limit.
    """

    # Whether blocking work is done on the loop itself: in threads it ends when they like, and no two runs are alike.
    is_without_threads = False

    def __init__(self, limit_s: float | None = None) -> None:
        self._now_s = 0.0
        self._num_real = 0
        self._waited_s = 0.0
        self.limit_s = limit_s
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    @contextmanager
    def real_work(self) -> Iterator[None]:
        """Wait for real while this is open, since something outside the loop (a thread, a socket) will wake it."""
        self._num_real += 1
        try:
            yield
        finally:
            self._num_real -= 1

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """As in asyncio; time doesn't jump until the work has ended."""
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._num_real += 1
        future.add_done_callback(self._real_work_done)
        return future

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        """As in asyncio, which joins the threads from one more thread. Cancel: as there."""
        with self.real_work():
            await super().shutdown_default_executor(*args, **kwargs)

    def _real_work_done(self, _: asyncio.Future[Any]) -> None:
        self._num_real -= 1

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
        # The clock stays until a whole timer has been waited for, so work shorter than any timer moves nothing.
        began_s = time.monotonic()
        left_s = None if timeout_s is None else max(0.0, timeout_s - self._waited_s)
        events = select(left_s)
        self._waited_s += time.monotonic() - began_s
        if not events and timeout_s is not None:
            self._now_s += timeout_s
            self._waited_s = 0.0
        return events

    def _waiting(self) -> str:
        names = sorted(
            f"{t.get_name()} ({getattr(t.get_coro(), '__qualname__', '?')})" for t in asyncio.all_tasks(self)
        )
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


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
