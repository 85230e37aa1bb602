"""Supervising a worker's process: stand-ins that start a process of their own, as engines do."""

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlbus.workers.supervisor.hang import HangLimits
from rlbus.workers.supervisor.restarts import RestartPolicy, Restarts
from rlbus.workers.supervisor.supervise import EXIT_GAVE_UP, Supervision, WorkerCommand, keep_running

pytestmark = pytest.mark.integration

LIMIT_S = 120.0
HOW = Supervision(who="backend/7")
# Says so, writes its pid and its child's, then serves for ever; on SIGTERM it ends and leaves its child behind.
SERVER = """
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("serving", flush=True)
    with open(os.environ["PIDS"], "a") as f:
        f.write(f"{os.getpid()} {child.pid}\\n")
    time.sleep(600)
"""


def command(script: str, pids: Path) -> WorkerCommand:
    """Runs `script` in a Python of its own."""
    return WorkerCommand((sys.executable, "-c", textwrap.dedent(script)), {"PIDS": str(pids)})


def restarts(max_restarts: int = 3) -> Restarts:
    """Quick ones."""
    return Restarts(RestartPolicy(max_restarts=max_restarts, first_s=0.01, max_s=0.02))


def begun(pids: Path) -> list[list[int]]:
    """(server, its child) of each life so far."""
    lines = pids.read_text().splitlines() if pids.exists() else []
    return [[int(pid) for pid in line.split()] for line in lines]


async def until(is_true: Callable[[], bool]) -> None:
    """Look until it is. Bounded by the test."""
    while not is_true():  # noqa: ASYNC110 - other processes have no Event
        await asyncio.sleep(0.02)


async def lives(pids: Path, num: int) -> list[list[int]]:
    """Those lives, once there are `num`."""
    await until(lambda: len(begun(pids)) >= num)
    return begun(pids)


def is_running(pid: int) -> bool:
    """Whether it lives; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pids: list[int]) -> None:
    """Wait until none of them lives."""
    await until(lambda: not any(is_running(pid) for pid in pids))


def test_dead_server_is_started_again_and_nothing_of_it_stays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its child neither; the output comes through with the worker's name."""

    async def main() -> None:
        stopped = asyncio.Event()
        pids = tmp_path / "pids"
        running = asyncio.ensure_future(keep_running(command(SERVER, pids), HOW, restarts(), stopped))
        (first,) = await lives(pids, 1)
        os.kill(first[0], signal.SIGKILL)
        second = (await lives(pids, 2))[1]
        await gone(first)
        assert all(is_running(pid) for pid in second)
        stopped.set()
        assert await running == 0
        await gone(second)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert "[backend/7] serving" in capfd.readouterr().err


def test_server_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    """Also one that ends with status 0, as vLLM does when its engine died; its words are in the log."""

    async def main() -> None:
        log = tmp_path / "log"
        stand_in = command("print('no good', flush=True)", tmp_path / "pids")
        code = await keep_running(stand_in, replace(HOW, log=log), restarts(2), asyncio.Event())
        assert code == EXIT_GAVE_UP
        assert log.read_text().splitlines() == ["no good"] * 3

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_program_that_is_replaced_while_it_restarts_is_started_once_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As an upgrade does; the supervisor doesn't end with it."""
    program, lives_file = tmp_path / "server", tmp_path / "lives"

    def install() -> None:
        """Each life removes its own file."""
        new = tmp_path / "new"
        new.write_text(f'#!/bin/sh\necho x >> {lives_file}\nrm -f "$0"\nexit 1\n')
        new.chmod(0o755)
        new.rename(program)

    async def main() -> None:
        install()
        how, stopped = replace(HOW, log=tmp_path / "log"), asyncio.Event()
        running = asyncio.ensure_future(
            keep_running(WorkerCommand((str(program),), {}, beats=False), how, restarts(1000), stopped)
        )
        await until(lambda: running.done() or "can't be started" in caplog.text)
        install()
        await until(lambda: running.done() or lives_file.read_text().count("x") == 2)
        stopped.set()
        assert await running == 0

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_process_that_finds_no_bus_is_not_one_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started again as long as the server is away, and has all of its restarts left afterwards."""
    monkeypatch.setattr("rlbus.workers.supervisor.supervise.NO_BUS_PAUSE_S", 0.01)
    lives_file = tmp_path / "lives"
    script = f"""
        with open({str(lives_file)!r}, "a+") as lives:
            lives.write("x")
            lives.seek(0)
            num = len(lives.read())
        raise SystemExit(4 if num <= 6 else 1)
    """

    async def main() -> None:
        stand_in = command(script, tmp_path / "pids")
        code = await keep_running(stand_in, replace(HOW, log=tmp_path / "log"), restarts(2), asyncio.Event())
        assert code == EXIT_GAVE_UP
        assert len(lives_file.read_text()) == 6 + 3

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_cancelled_supervisor_leaves_nothing(tmp_path: Path) -> None:
    """Whoever embeds it may cancel it."""

    async def main() -> None:
        pids = tmp_path / "pids"
        running = asyncio.ensure_future(
            keep_running(command(SERVER, pids), replace(HOW, log=tmp_path / "log"), restarts(), asyncio.Event())
        )
        (life,) = await lives(pids, 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await gone(life)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


# Gives signs of life for a while, and then does as it is told.
BEATS = """
    import os, subprocess, sys, time
    fd = int(os.environ["RLBUS_BEAT_FD"])
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    os.write(fd, b"r")
    with open(os.environ["PIDS"], "a") as f:
        f.write(f"{os.getpid()} {orphan.pid}\\n")
    for _ in range(20):
        os.write(fd, b".")
        time.sleep(0.05)
"""
QUICK = HangLimits(seen_s=0.5, idle_s=2.0, busy_s=6.0)
# Nothing of it has to run out but `seen_s`.
PATIENT = HangLimits(seen_s=0.5, stopped_s=LIMIT_S, idle_s=LIMIT_S, busy_s=LIMIT_S)


@pytest.mark.parametrize(
    ("does", "words"),
    [
        pytest.param("time.sleep(600)", "waits", id="waits for what doesn't come"),
        pytest.param("while True: pass", "computes", id="spins"),
    ],
)
def test_process_that_hangs_is_killed_with_what_it_started_and_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, does: str, words: str
) -> None:
    """Also what it has started in a group of its own; it was said to be ready, once in each life."""

    async def main() -> None:
        pids, stopped = tmp_path / "pids", asyncio.Event()
        ready: list[int] = []
        how = replace(HOW, log=tmp_path / "log", limits=QUICK, on_ready=ready.append)
        stand_in = command(textwrap.dedent(BEATS) + does, pids)
        running = asyncio.ensure_future(keep_running(stand_in, how, restarts(1000), stopped))
        # A test that stands still meets a third one.
        first, second = (await lives(pids, 2))[:2]
        assert not any(is_running(pid) for pid in first)
        await until(lambda: second[0] in ready)
        assert (ready.count(first[0]), ready.count(second[0])) == (1, 1)
        stopped.set()
        assert await running == 0
        for life in begun(pids):
            await gone(life)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    said = [record.getMessage() for record in caplog.records if "no sign of life" in record.getMessage()]
    assert any(f"and {words}; it is killed" in line for line in said)


def test_process_that_is_only_slow_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said to be silent, and to be back."""
    # Again and again: one silence may pass while the supervisor stands still, which counts for nothing then.
    does = """
    while True:
        end = time.monotonic() + 1.5
        while time.monotonic() < end: pass
        for _ in range(20):
            os.write(fd, b".")
            time.sleep(0.05)
    """

    async def main() -> None:
        pids, stopped = tmp_path / "pids", asyncio.Event()
        how = replace(HOW, log=tmp_path / "log", limits=PATIENT)
        stand_in = command(textwrap.dedent(BEATS) + textwrap.dedent(does), pids)
        running = asyncio.ensure_future(keep_running(stand_in, how, restarts(), stopped))
        await until(lambda: "answers again" in caplog.text)
        assert len(begun(pids)) == 1
        stopped.set()
        assert await running == 0

    with caplog.at_level("WARNING"):
        asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert "it is killed" not in caplog.text


def test_process_that_was_called_in_a_wrong_way_is_not_started_again(tmp_path: Path) -> None:
    """Status 2, of vLLM's options or of ours, stays what it is."""

    async def main() -> None:
        log = tmp_path / "log"
        stand_in = command("import sys; print('usage', flush=True); sys.exit(2)", tmp_path / "pids")
        assert await keep_running(stand_in, replace(HOW, log=log), restarts(), asyncio.Event()) == 2
        assert log.read_text() == "usage\n"

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_wrong_options_are_none_once_it_was_up(tmp_path: Path) -> None:
    """A disk or a port that is away for a moment ends it with 2, too: it is started again, as after any death."""
    lives_file = tmp_path / "lives"
    script = f"""
        import os
        with open({str(lives_file)!r}, "a+") as lives:
            lives.write("x")
            lives.seek(0)
            num = len(lives.read())
        if num == 1:
            os.write(int(os.environ["RLBUS_BEAT_FD"]), b"r")
            raise SystemExit(1)
        raise SystemExit(2)
    """

    async def main() -> None:
        stand_in = command(script, tmp_path / "pids")
        code = await keep_running(stand_in, replace(HOW, log=tmp_path / "log"), restarts(3), asyncio.Event())
        assert code == EXIT_GAVE_UP
        assert len(lives_file.read_text()) == 1 + 3

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
