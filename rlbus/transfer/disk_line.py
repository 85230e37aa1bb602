"""Work for one disk, done in order by one daemon thread: a disk that hangs holds up that thread, and nobody else.

Invariants: one job runs at a time, in the order of `put`; what waits is at most MAX_WAITING_BYTES; a thread exists only
while there is work, and keeps no process alive.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from rlbus.errors import DeadlineError

# What waits for the disk in host memory, at most.
MAX_WAITING_BYTES = 256 * 1024 * 1024
# How long somebody who has more for a full line waits for room; and the time after which one job counts as stuck.
# Engines stand still meanwhile, so it is well below the default `stall_s`.
FULL_LIMIT_S = 5.0
# How often somebody who waits for a job looks whether one before it is stuck.
POLL_S = 0.5


class DiskLine:
    """One line of jobs. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        # Of all jobs that have not ended, the one that runs included.
        self._num_bytes = 0
        self._is_served = False
        # When the job that runs began; None between two.
        self._began_s: float | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether one job has been running for longer than FULL_LIMIT_S."""
        began_s = self._began_s
        return began_s is not None and time.monotonic() - began_s > FULL_LIMIT_S

    def put(self, job: Callable[[], None], num_bytes: int = 0) -> None:
        """Let `job`, which raises nothing and holds `num_bytes`, be done after all before it.

        Blocks while there is no room. Raises: DeadlineError: there was none within FULL_LIMIT_S.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_room(num_bytes), FULL_LIMIT_S):
                raise DeadlineError("writing to the disk", FULL_LIMIT_S, f"{self._num_bytes} bytes wait for it")
            self._jobs.append((job, num_bytes))
            self._num_bytes += num_bytes
            if not self._is_served:
                self._is_served = True
                threading.Thread(target=self._serve, name="rlbus disk", daemon=True).start()

    def call(self, job: Callable[[], None], limit_s: float) -> None:
        """Let `job` be done, and wait for it, at most `limit_s`.

        Raises: what it raises; DeadlineError: it isn't done, or one before it is stuck: it goes on by itself then.
        """
        begun, ended = threading.Event(), threading.Event()
        errors: list[Exception] = []

        def noted() -> None:
            begun.set()
            try:
                job()
            except Exception as exc:  # noqa: BLE001 - raised below, in whoever waits
                errors.append(exc)
            finally:
                ended.set()

        self.put(noted)
        until_s = time.monotonic() + limit_s
        while not ended.wait(min(POLL_S, limit_s)):
            if time.monotonic() >= until_s:
                raise DeadlineError("writing to the disk", limit_s)
            if not begun.is_set():
                self.check()
        if errors:
            raise errors[0]

    def check(self) -> None:
        """Raises: DeadlineError: one job is stuck."""
        if self.is_stuck:
            raise DeadlineError("an earlier write to the disk", FULL_LIMIT_S)

    def _has_room(self, num_bytes: int) -> bool:
        return num_bytes == 0 or self._num_bytes == 0 or self._num_bytes + num_bytes <= MAX_WAITING_BYTES

    def _serve(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._is_served = False
                    return
                job, num_bytes = self._jobs.popleft()
            self._began_s = time.monotonic()
            try:
                job()
            finally:
                del job  # what it holds is freed before its room is given away
                with self._changed:
                    self._began_s = None
                    self._num_bytes -= num_bytes
                    self._changed.notify_all()
