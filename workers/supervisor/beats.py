"""Signs of life of a worker's process, through a pipe to whoever supervises it.

One byte each: the event loop of the process turns (`.`), it turns and the engine doesn't answer it (`e`), or it serves
from now on (`r`). A full pipe means that nobody reads; then bytes are dropped, and nothing waits.
"""

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable, MutableMapping

# The descriptor to write to, in the environment of the process.
BEAT_FD = "RLBUS_BEAT_FD"
# Between two signs of life.
BEAT_S = 0.25
ALIVE, WAITS, READY = b".", b"e", b"r"


class Beats:
    """The writing end, in the process. `run` beats until cancelled."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
        self._fd = fd

    @classmethod
    def from_env(cls, environ: MutableMapping[str, str]) -> "Beats | None":
        """The end that a supervisor has handed over; None without one. It is taken out of `environ`, so that no child
        writes there.
        """
        text = environ.pop(BEAT_FD, "")
        if not text.isdecimal():
            return None
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(int(text)).st_mode):
                return cls(int(text))
        return None

    def ready(self) -> None:
        """The worker can be reached on the bus."""
        self._say(READY)

    async def run(self, answers: Callable[[], bool] = lambda: True) -> None:
        """Beat every BEAT_S; `answers` says whether the engine does. Cancel: at any point."""
        while True:
            self._say(ALIVE if answers() else WAITS)
            await asyncio.sleep(BEAT_S)

    def _say(self, sign: bytes) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._fd, sign)


class Hearing:
    """The reading end, in the supervisor: when was what heard last, in seconds of its loop."""

    def __init__(self) -> None:
        self._on_ready: Callable[[], None] | None = None
        self.loop_s: float | None = None
        self.engine_s: float | None = None
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """The process has been started, and has its own writing end by now. `on_ready` is called at most once."""
        self._on_ready = on_ready
        self._close_write()
        asyncio.get_running_loop().add_reader(self.read_fd, self._read)

    def _close_write(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        """Hear nothing any more. Idempotent."""
        self._close_write()
        if self.read_fd >= 0:
            asyncio.get_running_loop().remove_reader(self.read_fd)
            os.close(self.read_fd)
            self.read_fd = -1

    def _read(self) -> None:
        data = os.read(self.read_fd, 4096)
        loop = asyncio.get_running_loop()
        if not data:  # the process has ended; its exit is seen elsewhere
            loop.remove_reader(self.read_fd)
            return
        self.loop_s = loop.time()
        if ALIVE in data or self.engine_s is None:
            self.engine_s = self.loop_s
        if READY in data and self._on_ready is not None:
            on_ready, self._on_ready = self._on_ready, None
            on_ready()
