"""The output of a server and of everything that it starts, passed on to stderr with the worker's name before each line.

Through a pipe of our own: with one of asyncio's, waiting for the server's end would also wait until the last process
that has inherited the pipe is gone (seen with Python 3.11).
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

# The longest line that is passed on; a longer one is dropped.
MAX_LINE_BYTES = 2**20
# How long the last lines may take to come once the server has ended.
LAST_LINES_S = 2.0


@contextlib.asynccontextmanager
async def output(name: str, log: Path | None) -> AsyncIterator[int | None]:
    """Yields the descriptor that a child process shall write to; None if its output goes to `log` anyway.

    Leaving waits for the last lines, at most LAST_LINES_S. Cancel: they are dropped.
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


async def _print_lines(reader: asyncio.StreamReader, name: str) -> None:
    while True:
        try:
            line = await reader.readline()
        except ValueError:
            continue  # longer than MAX_LINE_BYTES
        if not line:
            return
        sys.stderr.write(f"[{name}] {line.decode(errors='replace')}")
        sys.stderr.flush()
