"""Child processes that never outlive their parent, and always end within a bound.

Each child leads a process group of its own, so that whatever it started (vLLM's EngineCore and Workers) ends with it;
and asks the kernel for a signal when its parent dies, so that a SIGKILLed parent leaves nothing behind either
(facts/vllm-cpu.md 8 and 11: orphaned EngineCores lived on for minutes).
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

# Source: linux/prctl.h
_PR_SET_PDEATHSIG = 1
# How long a child may take to end by itself after SIGTERM, before it is killed.
STOP_S = 10.0


def die_with_parent(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn` that makes the child receive `signum` when its parent ends. Linux only; elsewhere it does nothing.

    The parent is looked up again after the call: it may have died between fork and prctl.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def arm() -> None:
        if libc is None:
            return
        libc.prctl(_PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:
            os._exit(1)

    return arm


class Child:
    """One child process with its log file. Create it with `start`; end it with `stop`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path | None) -> None:
        self.name = name
        self.log = log
        self._process = process

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> "Child":
        """Start `argv`. stderr and stdout, unless an argument says otherwise, go to `log`, or to nobody. Of other
        descriptors it inherits `pass_fds`.

        The parent-death signal is bound to the thread that starts the child: call it on a thread that lives as long
        as the process does. Cancel: no child is left.
        """
        sink: IO[bytes] | int
        with contextlib.ExitStack() as stack:
            sink = stack.enter_context(log.open("ab")) if log is not None else subprocess.DEVNULL
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=None if env is None else {**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=sink if stdout is None else stdout,
                stderr=sink if stderr is None else stderr,
                start_new_session=True,
                preexec_fn=die_with_parent(),
                pass_fds=pass_fds,
                limit=2**20,
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        """Process id; also the id of its process group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, None while it runs."""
        return self._process.returncode

    @property
    def stdout(self) -> asyncio.StreamReader | None:
        """Its output, when started with stdout=PIPE."""
        return self._process.stdout

    async def wait(self) -> int:
        """Wait for its end. Cancel: leaves the child running.

        With stdout=PIPE it waits also for every grandchild that inherited the pipe: asyncio of Python 3.11 reports an
        end only when the pipes are closed too. A pipe of the caller's own, as the vLLM supervisor's, avoids that.
        """
        return await self._process.wait()

    async def stop(self, limit_s: float = STOP_S) -> int:
        """SIGTERM to the child, SIGKILL to its whole group after `limit_s` or once it has ended. Idempotent.

        Cancel: the group is killed at once.
        """
        try:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(self._process.wait()), limit_s)
        finally:
            self.kill()
        return await self._process.wait()

    def kill(self) -> None:
        """SIGKILL to its whole group, which ends stopped and stuck processes, too. Idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines of its log, for an error message."""
        if self.log is None or not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])
