"""What the system says of a process and of those that it has started. Linux; elsewhere nobody is seen."""

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/<pid>/stat after the command's name, from 0. Source: man 5 proc.
_STATE, _USER, _SYSTEM, _START = 0, 11, 12, 19
# Processes of one worker that are looked at; a tensor-parallel engine has some ten.
MAX_TREE = 512


@dataclass(frozen=True, slots=True)
class Process:
    """One process as it is now. `started` tells it from a later one with the same id; `cpu_s` is what it has used.

    `state` is that of its first thread: R runs or wants to, S and D wait, T was stopped by a signal, Z has ended.
    """

    pid: int
    started: int
    state: str
    cpu_s: float

    @property
    def is_stopped(self) -> bool:
        """Somebody has sent it SIGSTOP; it does nothing until SIGCONT. Not one that a debugger holds (t)."""
        return self.state == "T"

    @property
    def is_over(self) -> bool:
        """It has ended, and only its entry is left."""
        return self.state in ("Z", "X")


def look(pid: int) -> Process | None:
    """One process; None if there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    cpu_s = (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_PER_S
    return Process(pid, int(fields[_START]), fields[_STATE], cpu_s)


def tree(pid: int) -> list[Process]:
    """A process and all below it, it first, without those that have ended; at most MAX_TREE."""
    found: list[Process] = []
    waiting = [pid]
    while waiting and len(found) < MAX_TREE:
        process = look(waiting.pop(0))
        if process is not None and not process.is_over:
            found.append(process)
            waiting += _children(process.pid)
    return found


def _children(pid: int) -> list[int]:
    """Of every thread; the system keeps them by thread."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def left_of(processes: Iterable[Process]) -> list[int]:
    """Ids of those that still live."""
    left: list[int] = []
    for process in processes:
        now = look(process.pid)
        if now is not None and not now.is_over and now.started == process.started:
            left.append(process.pid)
    return left


def kill_left(processes: Iterable[Process]) -> list[int]:
    """SIGKILL to those that still live; their ids."""
    left = left_of(processes)
    for pid in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return left
