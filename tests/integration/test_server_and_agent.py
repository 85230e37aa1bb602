"""A server and its agent under one supervisor, with stand-ins for both: who is started again, and who ends first."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rlbus.workers.supervisor.restarts import RestartPolicy
from rlbus.workers.supervisor.supervise import EXIT_GAVE_UP, EXIT_USAGE, Supervision, WorkerCommand
from rlbus.workers.vllm_http.supervisor import LOST, Pair, run_pair

pytestmark = pytest.mark.integration

LIMIT_S = 120.0
POLICY = RestartPolicy(max_restarts=2, first_s=0.05, max_s=0.05)
# Says that it lives, and that it ends; both by one line in a file that all share.
SERVICE = """
import signal, sys, time
def say(word):
    with open(sys.argv[1], "a") as file:
        file.write(word + " " + sys.argv[2] + "\\n")
def end(*_):
    say("end")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
say("begin")
"""
STAYS = SERVICE + "time.sleep(600)"


def ends_beside(other: str, status: int) -> str:
    """What ends with this status once the other one lives, too."""
    return (
        SERVICE
        + f"""
while "begin {other}\\n" not in open(sys.argv[1]).read():
    time.sleep(0.02)
sys.exit({status})
"""
    )


class Stage:
    """A server and an agent that run; `lines` is what they said."""

    def __init__(self, folder: Path, server: str, agent: str) -> None:
        self.folder = folder
        self.said = folder / "said"
        self.said.touch()
        self.stopped = asyncio.Event()
        pair = Pair(server=self._command("server", server), agent=self._command("agent", agent))
        how = Supervision(who="backend/7", log=folder / "log")
        self.running = asyncio.ensure_future(run_pair(pair, how, POLICY, self.stopped, lost=folder / LOST))

    def _command(self, name: str, code: str) -> WorkerCommand:
        return WorkerCommand((sys.executable, "-c", code, str(self.said), name), {}, beats=False)

    @property
    def lines(self) -> list[str]:
        """In their order."""
        return self.said.read_text().splitlines()

    async def until(self, line: str, count: int = 1) -> None:
        """Until it was said so often."""
        while self.lines.count(line) < count:  # noqa: ASYNC110 - other processes have no Event
            await asyncio.sleep(0.02)


def on_stage(
    folder: Path, scenario: Callable[[Stage], Awaitable[None]], *, server: str = STAYS, agent: str = STAYS
) -> None:
    """Play a scenario, bounded."""

    async def main() -> None:
        stage = Stage(folder, server, agent)
        try:
            async with asyncio.timeout(LIMIT_S):
                await scenario(stage)
        finally:
            stage.running.cancel()
            await asyncio.wait({stage.running})

    asyncio.run(main())


def test_agent_ends_before_its_server(tmp_path: Path) -> None:
    """So that its goodbye is of an engine that stands; with status 0."""

    async def scenario(stage: Stage) -> None:
        await stage.until("begin server")
        await stage.until("begin agent")
        stage.stopped.set()
        assert await stage.running == 0
        assert stage.lines[-2:] == ["end agent", "end server"]

    on_stage(tmp_path, scenario, agent=STAYS.replace('say("end")', 'time.sleep(0.5); say("end")'))


def test_agent_that_dies_is_started_again_beside_the_same_server(tmp_path: Path) -> None:
    """Until it has died too often: then the server ends, too, with the agent's status."""

    async def scenario(stage: Stage) -> None:
        assert await stage.running == EXIT_GAVE_UP
        assert stage.lines.count("begin agent") == 3
        assert [line for line in stage.lines if line.endswith("server")] == ["begin server", "end server"]

    on_stage(tmp_path, scenario, agent=ends_beside("server", 1))


def test_server_that_dies_is_started_again_beside_the_same_agent(tmp_path: Path) -> None:
    """What the agent makes of it is its own business."""

    async def scenario(stage: Stage) -> None:
        await stage.until("begin server", 2)
        assert stage.lines.count("begin agent") == 1
        assert await stage.running == EXIT_GAVE_UP
        assert stage.lines[-1] == "end agent"

    on_stage(tmp_path, scenario, server=ends_beside("agent", 0))


def test_wrong_options_of_the_server_end_both(tmp_path: Path) -> None:
    """A restart would change nothing."""

    async def scenario(stage: Stage) -> None:
        assert await stage.running == EXIT_USAGE
        assert stage.lines.count("begin server") == 1

    on_stage(tmp_path, scenario, server=ends_beside("agent", 2))


def test_server_whose_engine_the_agent_calls_lost_is_started_anew(tmp_path: Path) -> None:
    """It would run on as if nothing were."""

    async def scenario(stage: Stage) -> None:
        await stage.until("begin server")
        (stage.folder / LOST).touch()
        await stage.until("begin server", 2)
        assert [line for line in stage.lines if line.endswith("server")] == [
            "begin server",
            "end server",
            "begin server",
        ]
        assert not (stage.folder / LOST).exists()
        stage.stopped.set()
        assert await stage.running == 0

    on_stage(tmp_path, scenario)
