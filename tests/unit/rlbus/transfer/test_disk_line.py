"""A line of work for one disk. Waits are for events, never for a while."""

import threading
import time

import pytest

from rlbus.errors import DeadlineError
from rlbus.transfer import disk_line
from rlbus.transfer.disk_line import DiskLine

pytestmark = pytest.mark.unit


class Hung:
    """A job that ends when it is told to."""

    def __init__(self) -> None:
        self.begun, self.well = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        self.well.wait(30.0)


def test_jobs_are_done_in_order_and_what_one_raises_reaches_who_waits_for_it() -> None:
    """By one thread after the other, which is gone when nothing is left."""
    line, done = DiskLine(), list[int]()

    def fail() -> None:
        raise OSError(28, "No space left on device")

    for n in range(100):
        line.put(lambda n=n: done.append(n), 1)  # type: ignore[misc]
    with pytest.raises(OSError, match="No space"):
        line.call(fail, 30.0)
    line.call(lambda: done.append(100), 30.0)
    assert done == list(range(101))
    assert not line.is_stuck


def test_a_line_that_is_full_takes_no_more_than_it_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has more waits for a while, and is told; what frees memory always has a place; room comes back."""
    monkeypatch.setattr(disk_line, "FULL_LIMIT_S", 0.02)
    monkeypatch.setattr(disk_line, "POLL_S", 0.01)
    monkeypatch.setattr(disk_line, "MAX_WAITING_BYTES", 10)
    line, hung, done = DiskLine(), Hung(), list[str]()
    line.put(hung, 6)
    assert hung.begun.wait(30.0)
    line.put(lambda: done.append("fits"), 4)
    with pytest.raises(DeadlineError, match="10 bytes wait for it"):
        line.put(lambda: done.append("more"), 1)
    line.put(lambda: done.append("free"))
    assert line.is_stuck
    with pytest.raises(DeadlineError, match="an earlier write"):
        line.call(lambda: done.append("called"), 30.0)
    # From here on all is well, and how long a thread waits for the CPU is no matter.
    monkeypatch.setattr(disk_line, "FULL_LIMIT_S", 30.0)
    hung.well.set()
    line.call(lambda: None, 30.0)
    line.put(lambda: done.append("large"), 11)  # alone
    line.call(lambda: None, 30.0)
    assert done == ["fits", "free", "called", "large"]


def test_a_job_of_its_own_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it waits for is bounded by its own limit, not by that of the jobs before it."""
    monkeypatch.setattr(disk_line, "POLL_S", 0.01)
    line, hung = DiskLine(), Hung()

    def slow() -> None:
        time.sleep(0.05)  # the other thread sees that it has begun
        with monkeypatch.context() as patch:
            patch.setattr(disk_line, "FULL_LIMIT_S", 0.0)
            time.sleep(0.05)

    line.call(slow, 30.0)
    with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
        line.call(hung, 0.05)
    hung.well.set()
