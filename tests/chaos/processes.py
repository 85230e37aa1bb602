"""Processes to be struck: started so that none outlives the harness, and found again by what they do."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from rlbus._process import Child, die_with_parent
from rlbus.errors import BrokenError, DeadlineError
from tests.chaos.messages import Ended, News, Order

# Source: Linux, include/net/tcp_states.h
TCP_LISTEN = "0A"
MAX_LINE_BYTES = 1 << 20


def strike(pid: int, number: signal.Signals) -> None:
    """Send a signal to one process; one that is gone already is left alone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def is_running(pid: int) -> bool:
    """Whether it lives; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> tuple[int, ...]:
    """It and everything that it started, in this order, as of now."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return tuple(found)


def serving_pid(root: int, port: int) -> int | None:
    """Which of the processes below `root` listens on `port` of loopback: the one that serves. None: nobody."""
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == TCP_LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
            inodes.add(f"socket:[{fields[9]}]")
    return next((pid for pid in reversed(descendants(root)) if inodes & _links(pid)), None)


def engine_pid(root: int, words: Sequence[str]) -> int | None:
    """The first process below `root` whose command line has one of `words`."""
    for pid in descendants(root)[1:]:
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if any(word in line for word in words):
                return pid
    return None


def _links(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(descriptor))
    return found


async def start(name: str, argv: Sequence[str], env: Mapping[str, str], folder: Path) -> Child:
    """Start `python -m ...` with a log of its own, which later starts of the same name append to."""
    return await Child.start(name, [sys.executable, "-m", *argv], env=env, log=folder / f"{name}.log")


class TrainerProcess:
    """One `tests.chaos.trainer`. `on_news` is called on the loop with each of its lines."""

    def __init__(self, process: asyncio.subprocess.Process, on_news: Callable[[News], None]) -> None:
        self._process = process
        self._on_news = on_news
        self._news: list[News] = []
        self._came = asyncio.Event()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(
        cls, argv: Sequence[str], env: Mapping[str, str], log: Path, on_news: Callable[[News], None]
    ) -> "TrainerProcess":
        """Start it; `await expect(Up, ...)` says when it is there."""
        with log.open("ab") as sink:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.chaos.trainer",
                *argv,
                env={**os.environ, **env},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
                preexec_fn=die_with_parent(),
                limit=MAX_LINE_BYTES,
            )
        return cls(process, on_news)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self._process.returncode is None

    def order(self, order: Order) -> None:
        """Give it something to do."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    def tell_of(self, kind: type[News], version: int | None = None) -> News | None:
        """What it said of that kind (about `version`); None: nothing yet."""
        for news in self._news:
            if isinstance(news, kind) and version in (None, getattr(news, "version", None)):
                return news
        return None

    async def expect(self, kind: type[News], limit_s: float, version: int | None = None) -> News:
        """Wait until it says something of that kind. Raises: DeadlineError, or BrokenError when it ended before."""
        try:
            async with asyncio.timeout(limit_s):
                while (news := self.tell_of(kind, version)) is None:
                    if self._reading.done():
                        raise BrokenError("trainer", f"ended before it said {kind.__name__}")
                    self._came.clear()
                    await self._came.wait()
                return news
        except TimeoutError as exc:
            raise DeadlineError(f"waiting for the trainer to say {kind.__name__}", limit_s) from exc

    async def ended(self, version: int, limit_s: float) -> Ended | None:
        """How its update ended; None: not within the limit, or it died."""
        with contextlib.suppress(DeadlineError, BrokenError):
            news = await self.expect(Ended, limit_s, version)
            assert isinstance(news, Ended)
            return news
        return None

    async def stop(self) -> None:
        """Kill it. Idempotent."""
        strike(self.pid, signal.SIGKILL)
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                news = msgspec.json.decode(line, type=News)
                self._news.append(news)
                self._came.set()
                self._on_news(news)
        finally:
            self._came.set()
