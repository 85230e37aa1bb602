"""Supervising a server process: a stand-in for vLLM that starts a process of its own, as vLLM does."""

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from rlbus.workers.vllm_server.command import ServerCommand
from rlbus.workers.vllm_server.restarts import RestartPolicy, Restarts
from rlbus.workers.vllm_server.supervisor import EXIT_GAVE_UP, keep_running

pytestmark = pytest.mark.integration

LIMIT_S = 60.0
# Writes its pid and its child's, then serves for ever; on SIGTERM it ends and leaves its child behind.
SERVER = """
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["PIDS"], "a") as f:
        f.write(f"{os.getpid()} {child.pid}\\n")
    print("serving", flush=True)
    time.sleep(600)
"""


def command(script: str, pids: Path) -> ServerCommand:
    """Runs `script` in a Python of its own."""
    return ServerCommand((sys.executable, "-c", textwrap.dedent(script)), {"PIDS": str(pids)})


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
    except (FileNotFoundError, ProcessLookupError):  # it may end between the opening and the reading
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
        running = asyncio.ensure_future(keep_running(command(SERVER, pids), "backend/7", restarts(), stopped, None))
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
        code = await keep_running(stand_in, "backend/7", restarts(2), asyncio.Event(), log)
        assert code == EXIT_GAVE_UP
        assert log.read_text().splitlines() == ["no good"] * 3

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_cancelled_supervisor_leaves_nothing(tmp_path: Path) -> None:
    """Whoever embeds it may cancel it."""

    async def main() -> None:
        pids = tmp_path / "pids"
        running = asyncio.ensure_future(
            keep_running(command(SERVER, pids), "backend/7", restarts(), asyncio.Event(), tmp_path / "log")
        )
        (life,) = await lives(pids, 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await gone(life)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
