"""Blocking work in threads that can be left behind. A thread stuck in native code can't be ended, only abandoned.

The threads are daemons: an abandoned one doesn't keep the process alive.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from rlbus._virtual import is_without_threads, real_work
from rlbus.errors import DeadlineError, TransferError

T = TypeVar("T")

# How often a waiting caller looks whether it was told to give up, in seconds.
POLL_S = 0.02


class GiveUp:
    """Tells blocking work, from any thread, that nobody wants its result any more. The first reason stays."""

    def __init__(self) -> None:
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Why, or None while the work is wanted."""
        return self._reason

    def set(self, reason: str) -> None:
        """Give up. Idempotent."""
        if self._reason is None:
            self._reason = reason

    def check(self, operation: str) -> None:
        """Raise TransferError if the work isn't wanted any more."""
        if self._reason is not None:
            raise TransferError(operation, f"given up: {self._reason}")


class _Job(Generic[T]):
    """One call in a daemon thread, with its result."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self.done = threading.Event()
        self._work = work
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._on_done: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)

    def start(self, on_done: Callable[[], None] | None = None) -> None:
        self._on_done = on_done
        self._thread.start()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result[0]

    def run(self) -> None:
        """Do it on this thread."""
        try:
            self._result.append(self._work())
        except BaseException as exc:  # noqa: BLE001 - `result` raises it in the caller
            self._error = exc
        del self._work  # what it holds is the caller's alone again, although this thread takes a moment to end
        self.done.set()
        if self._on_done is not None:
            self._on_done()


def call_bounded(
    work: Callable[[], T],
    *,
    operation: str,
    limit_s: float,
    give_up: GiveUp,
    discard: Callable[[T], None],
) -> T:
    """Run `work` in a thread and wait for it, at most `limit_s` seconds or until `give_up`; then leave it behind.

    For native calls that ignore their own time-out. `discard` gets a result that comes after that.

    Raises:
        DeadlineError, TransferError: it was left behind. Whatever `work` raises.
    """
    lock = threading.Lock()
    is_abandoned = False

    def wanted_work() -> T:
        result = work()
        with lock:
            late = is_abandoned
        if late:
            discard(result)
        return result

    job = _Job(wanted_work, f"rlbus {operation}")
    job.start()
    deadline = time.monotonic() + limit_s
    while not job.done.wait(POLL_S):
        is_late = time.monotonic() > deadline
        if not is_late and give_up.reason is None:
            continue
        with lock:
            is_abandoned = True
        if job.done.is_set():
            break
        give_up.set("left behind")
        if is_late:
            raise DeadlineError(operation, limit_s, "a native call didn't return; its thread was left behind")
        give_up.check(operation)
    return job.result()


def start_in_thread(work: Callable[[], object], *, name: str) -> None:
    """Start blocking work in a daemon thread of its own, for whose end nobody waits. What it raises is dropped.

    Called on a loop; on one without threads it is done at once.
    """
    job = _Job(work, name)
    if is_without_threads(asyncio.get_running_loop()):
        job.run()
    else:
        job.start()


async def run_in_thread(work: Callable[[], T], *, name: str) -> T:
    """Run blocking `work` in a daemon thread of its own and await it.

    Cancel: the thread goes on and its result is dropped; whoever cancels releases what it is blocked on.
    """
    loop = asyncio.get_running_loop()
    if is_without_threads(loop):
        return work()
    ended: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ended.done():
            ended.set_result(None)

    def on_done() -> None:
        with contextlib.suppress(RuntimeError):  # a closed loop has nobody left who waits
            loop.call_soon_threadsafe(wake)

    job = _Job(work, name)
    with real_work(loop):
        job.start(on_done)
        await ended
    return job.result()
