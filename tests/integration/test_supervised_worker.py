"""`rlbus worker torch` with two ranks as real processes: whatever of it is killed or stopped, it comes back."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from rlbus import subjects
from rlbus.bus import Bus
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.schemas import (
    Announcement,
    Command,
    CommandBody,
    FlushCache,
    Goodbye,
    Result,
    WeightsState,
    WorkerAnswer,
    WorkerMessage,
    route_of,
)
from rlbus.server import EmbeddedServer
from rlbus.workers.supervisor.processes import look, tree
from rlbus.workers.torch_lm.make import make_tiny_model
from tests.tries import best_of, in_time

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

# A start takes some 5 s here, and much longer on a loaded machine.
LIMIT_S = 180.0
# In which a death or a hang is to be seen. Source: issue 3 point 7; what is above 2 s allows for a machine under load.
SEEN_S = 4.0


class Scene:
    """A supervised worker, what it has said on the bus, and on its stderr."""

    def __init__(self, bus: Bus, process: asyncio.subprocess.Process) -> None:
        self.bus = bus
        self.process = process
        self.heard: list[WorkerMessage] = []
        self.lines: list[str] = []
        self.document: dict[str, object] = {}
        bus.subscribe(subjects.worker("default", "backend", "7"), WorkerMessage, lambda m, _: self.heard.append(m))

    async def read(self) -> None:
        """Its stderr, line by line."""
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.lines.append(line.decode())

    async def until(self, is_true: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Look until it is."""
        async with asyncio.timeout(limit_s):
            while not is_true():  # noqa: ASYNC110 - other processes have no Event
                await asyncio.sleep(0.02)

    async def sees(self, what: str, is_true: Callable[[], bool]) -> None:
        """Look until it is, which has to be soon."""
        began_s = time.monotonic()
        await self.until(is_true)
        in_time(what, time.monotonic() - began_s, SEEN_S)

    @property
    def last(self) -> Announcement:
        """The newest announcement."""
        return next(m for m in reversed(self.heard) if isinstance(m, Announcement))

    async def up_again(self, boot_id: str) -> Announcement:
        """The first announcement of the next life."""
        await self.until(lambda: any(isinstance(m, Announcement) and m.boot_id != boot_id for m in self.heard))
        return self.last

    def below(self) -> list[int]:
        """Ids of the worker's process and of its rank's: the worker's first."""
        return [process.pid for process in tree(self.process.pid)[1:]]

    async def send(self, body: CommandBody, op_id: str) -> Result:
        """A command; its result."""
        subject = subjects.command_to("default", "backend", route_of(body), "7")
        command = Command(op_id=op_id, term=1, expires_at=self.bus.clock.now() + LIMIT_S, body=body)
        async with self.bus.stream(subject, command, WorkerAnswer) as replies:
            while True:
                answer = await replies.next(LIMIT_S)
                if isinstance(answer, Result):
                    return answer


def is_gone(pid: int) -> bool:
    """Whether it has ended."""
    process = look(pid)
    return process is None or process.is_over


@asynccontextmanager
async def worker(folder: Path) -> AsyncIterator[Scene]:
    """The worker, once it can be reached; it is stopped at the end."""
    make_tiny_model(folder / "model", vocab_size=64)
    async with EmbeddedServer() as server, await connect_bus(BusConfig(url=server.url), name="test") as bus:
        env = {k: v for k, v in os.environ.items() if not k.startswith("RLBUS_")}
        env |= {"RLBUS_URL": server.url, "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
        command = ["worker", "torch", str(folder / "model"), "--ranks", "2", "--instance-id", "7", "--json"]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rlbus",
            *command,
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        scene = Scene(bus, process)
        reading = asyncio.ensure_future(scene.read())
        try:
            assert process.stdout is not None
            async with asyncio.timeout(LIMIT_S):
                scene.document = json.loads(await process.stdout.readline())
            await scene.until(lambda: bool(scene.heard))
            yield scene
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await asyncio.wait({reading}, timeout=10.0)


def on_worker(folder: Path, scenario: Callable[[Scene], Awaitable[None]]) -> None:
    """Run a scenario with it; with another one, if the machine stood still when something was to be seen."""
    folders = (folder / str(number) for number in count())

    async def main() -> None:
        async with worker(next(folders)) as scene:
            await scenario(scene)

    best_of(lambda: asyncio.run(main()))


def test_killed_worker_comes_back_as_itself_with_unknown_weights_and_one_engine(tmp_path: Path) -> None:
    """Its rank doesn't live on; an op that had ended is answered as before; that it died is said at once."""

    async def scenario(scene: Scene) -> None:
        before = scene.last
        assert before.status.weights.state is WeightsState.CLEAN
        result = await scene.send(FlushCache(), "f")
        old = scene.below()
        assert (len(old), scene.document["worker_pid"], scene.document["pid"]) == (2, old[0], scene.process.pid)
        os.kill(old[0], signal.SIGKILL)
        await scene.sees("the death", lambda: any(isinstance(m, Goodbye) for m in scene.heard))
        goodbye = next(m for m in scene.heard if isinstance(m, Goodbye))
        assert (goodbye.boot_id, goodbye.reason) == (before.boot_id, f"its process ended with status {-signal.SIGKILL}")
        again = await scene.up_again(before.boot_id)
        assert all(is_gone(pid) for pid in old)
        assert len(scene.below()) == 2
        assert (again.status.weights.state, again.status.term) == (WeightsState.UNKNOWN, 1)
        assert (await scene.send(FlushCache(), "f")).boot_id == result.boot_id == before.boot_id
        scene.process.terminate()
        await asyncio.wait_for(scene.process.wait(), LIMIT_S)

    on_worker(tmp_path, scenario)


def test_dead_rank_is_seen_at_once_and_the_worker_is_started_again(tmp_path: Path) -> None:
    """It says goodbye with the reason, so that nobody waits for its silence."""

    async def scenario(scene: Scene) -> None:
        boot_id = scene.last.boot_id
        old = scene.below()
        os.kill(old[1], signal.SIGKILL)
        await scene.sees("the death", lambda: any(isinstance(m, Goodbye) for m in scene.heard))
        goodbye = next(m for m in scene.heard if isinstance(m, Goodbye))
        assert "the engine is lost" in goodbye.reason
        await scene.up_again(boot_id)
        assert all(is_gone(pid) for pid in old)

    on_worker(tmp_path, scenario)


@pytest.mark.parametrize("which", [0, 1], ids=["worker", "rank"])
def test_stopped_process_is_seen_and_the_worker_is_started_again(tmp_path: Path, which: int) -> None:
    """SCENARIOS 23: the one that has the agent, or the other: nothing in a stopped one can help itself."""

    async def scenario(scene: Scene) -> None:
        boot_id = scene.last.boot_id
        old = scene.below()
        os.kill(old[which], signal.SIGSTOP)
        await scene.sees("the stop", lambda: any("was stopped by a signal" in line for line in scene.lines))
        await scene.up_again(boot_id)
        assert all(is_gone(pid) for pid in old)
        assert len(scene.below()) == 2

    on_worker(tmp_path, scenario)


def test_supervisor_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """Neither the worker nor its rank."""

    async def scenario(scene: Scene) -> None:
        old = scene.below()
        assert len(old) == 2
        scene.process.kill()
        await scene.until(lambda: all(is_gone(pid) for pid in old))

    on_worker(tmp_path, scenario)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_the_supervisor_stops_the_worker_with_a_goodbye(tmp_path: Path, number: signal.Signals) -> None:
    """And with status 0; nothing is started again."""

    async def scenario(scene: Scene) -> None:
        old = scene.below()
        scene.process.send_signal(number)
        assert await asyncio.wait_for(scene.process.wait(), LIMIT_S) == 0
        assert all(is_gone(pid) for pid in old)
        await scene.bus.barrier(LIMIT_S)
        assert isinstance(scene.heard[-1], Goodbye)

    on_worker(tmp_path, scenario)
