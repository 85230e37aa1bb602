"""The output of a server and of everything that it starts, passed on to stderr with the worker's name before each line.

Through a pipe of our own: with one of asyncio's, waiting for the server's end would also wait until the last process
that has inherited the pipe is gone (seen with Python 3.11).

The process is read on whatever becomes of stderr: one whose pipe is full stops, and would be killed as if it hung. So
a line that can't be written is lost, and a thread writes, so that a stderr that nobody reads holds up nobody.
"""

import asyncio
import contextlib
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

# The longest line that is passed on; a longer one is dropped.
MAX_LINE_BYTES = 2**20
# How long the last lines may take to come once the server has ended: a process that it left behind may hold the pipe.
LAST_LINES_S = 2.0
# How long they may then take to be written.
FLUSH_LIMIT_S = 2.0
# How much may wait for stderr; lines beyond it are left out.
MAX_WAITING_BYTES = 4 * 2**20


class _Stderr:
    """Lines on their way to stderr, in their order, through a thread of their own."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the size, which both sides change
        self._num_bytes = 0
        self._num_left_out = 0
        self._thread: threading.Thread | None = None

    def write(self, line: bytes) -> None:
        """Have a line written, or left out if too much waits already."""
        if self._num_bytes + len(line) > MAX_WAITING_BYTES:
            self._num_left_out += 1
            return
        self._tell_left_out()
        self._put(line)

    async def flush(self) -> None:
        """Wait until everything so far is written, at most FLUSH_LIMIT_S. Cancel: it is written all the same."""
        self._tell_left_out()
        if self._thread is None:
            return  # there was never a line
        written = threading.Event()
        self._waiting.put(written)
        await asyncio.to_thread(written.wait, FLUSH_LIMIT_S)

    def _tell_left_out(self) -> None:
        if self._num_left_out:
            self._put(b"[rlbus] %d lines were left out here: nobody read stderr\n" % self._num_left_out)
            self._num_left_out = 0

    def _put(self, line: bytes) -> None:
        with self._lock:
            self._num_bytes += len(line)
        self._waiting.put(line)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rlbus-stderr", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            # ENOSPC, EPIPE, or no stderr at all: what people don't see must not end what they started.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                _write_all(sys.stderr.fileno(), item)
            with self._lock:
                self._num_bytes -= len(item)


def _write_all(fd: int, data: bytes) -> None:
    """Past Python's own buffer: its lock, held by a thread that is stuck, would abort the interpreter's end."""
    while data:
        data = data[os.write(fd, data) :]


# One for all lives of the process: stderr is one, too.
_stderr = _Stderr()


@contextlib.asynccontextmanager
async def output(name: str, log: Path | None) -> AsyncIterator[int | None]:
    """Yields the descriptor that a child process shall write to; None if its output goes to `log` anyway.

    Leaving waits for the last lines, at most LAST_LINES_S, and for stderr, at most FLUSH_LIMIT_S. Cancel: they are
    dropped.
    """
    if log is not None:
        yield None
        return
    read_fd, write_fd = os.pipe()
    reader = asyncio.StreamReader(MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", buffering=0)
    )
    printing = loop.create_task(_print_lines(reader, name))
    with contextlib.ExitStack() as stack:
        stack.callback(transport.close)
        stack.callback(printing.cancel)
        # As long as ours is open, too, the reader doesn't see the end.
        ours = stack.enter_context(os.fdopen(write_fd, "wb", buffering=0))
        yield write_fd
        ours.close()
        await asyncio.wait({printing}, timeout=LAST_LINES_S)
        await _stderr.flush()


async def _print_lines(reader: asyncio.StreamReader, name: str) -> None:
    while True:
        try:
            line = await reader.readline()
        except ValueError:
            continue  # longer than MAX_LINE_BYTES
        if not line:
            return
        text = line.decode(errors="replace").removesuffix("\n")
        _stderr.write(f"[{name}] {text}\n".encode())
