"""The output of a supervised process is read on, whatever becomes of stderr: a full pipe would stop the process."""

import asyncio
import os
import re
import sys

import pytest

from rlbus.workers.supervisor import output as module
from rlbus.workers.supervisor.output import output

pytestmark = pytest.mark.unit

LINE = b"x" * 999 + b"\n"
# More than a pipe and the buffers of both sides hold.
NUM_LINES = 4000
LEFT_OUT = re.compile(rb"\[rlbus\] (\d+) lines were left out here: nobody read stderr\n")


def write(fd: int, num_lines: int = NUM_LINES) -> None:
    """What a process does that logs; blocks as long as nobody reads."""
    with os.fdopen(os.dup(fd), "wb", buffering=0) as file:
        for _ in range(num_lines):
            file.write(LINE)


def test_a_process_is_read_on_though_stderr_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk behind stderr costs the lines, and not the engine."""
    # Nothing is left for the next test's stderr.
    monkeypatch.setattr(module, "LAST_LINES_S", 30.0)
    monkeypatch.setattr(module, "FLUSH_LIMIT_S", 30.0)

    async def main() -> None:
        async with output("backend/1", None) as sink:
            assert sink is not None
            async with asyncio.timeout(30.0):
                await asyncio.to_thread(write, sink)

    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        asyncio.run(main())
        monkeypatch.undo()


def test_a_stderr_that_nobody_reads_stops_neither_the_process_nor_the_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines beyond a bound are left out, and it is said how many; what is read later is whole lines."""
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 2**18)
    monkeypatch.setattr(module, "LAST_LINES_S", 30.0)  # all is read, on a slow machine too
    monkeypatch.setattr(module, "FLUSH_LIMIT_S", 0.1)
    read_fd, write_fd = os.pipe()
    read: list[bytes] = []

    def told() -> list[int]:
        """How many were left out, each time that it is said."""
        return [int(found[1]) for line in read if (found := LEFT_OUT.fullmatch(line))]

    async def main() -> None:
        async with output("backend/1", None) as sink:
            assert sink is not None
            async with asyncio.timeout(30.0):
                await asyncio.to_thread(write, sink)
        # Nobody has read a line until now. More than one may tell of others: before the pipe was full there was room.
        async with asyncio.timeout(30.0):
            while len(read) - len(told()) + sum(told()) < NUM_LINES:
                read.append(await asyncio.to_thread(source.readline))

    with os.fdopen(read_fd, "rb") as source, os.fdopen(write_fd, "w") as stalled:
        monkeypatch.setattr(sys, "stderr", stalled)
        asyncio.run(main())
        monkeypatch.undo()
    assert {line for line in read if not LEFT_OUT.fullmatch(line)} == {b"[backend/1] " + LINE}
    assert len(read) - len(told()) + sum(told()) == NUM_LINES
    assert LEFT_OUT.fullmatch(read[-1])


def test_lines_are_there_before_what_comes_after_them(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the name of their worker, and also without an end of line."""
    monkeypatch.setattr(module, "LAST_LINES_S", 30.0)
    monkeypatch.setattr(module, "FLUSH_LIMIT_S", 30.0)

    async def main() -> None:
        async with output("backend/1", None) as sink:
            assert sink is not None
            os.write(sink, b"one\n\xff")
        sys.stderr.write("after\n")

    asyncio.run(main())
    assert capfd.readouterr().err == "[backend/1] one\n[backend/1] \N{REPLACEMENT CHARACTER}\nafter\n"
