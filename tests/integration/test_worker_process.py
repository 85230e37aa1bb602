"""A worker as a process of its own on a real server: it comes, obeys, and leaves when it is told to."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rlbus import subjects
from rlbus.bus import Bus
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.errors import BrokenError
from rlbus.schemas import Announcement, Command, Goodbye, PauseGeneration, Result, WorkerAnswer, WorkerMessage
from rlbus.server import EmbeddedServer
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.run import serve

pytestmark = pytest.mark.integration

CODE = """
import asyncio, sys
from rlbus.config import BusConfig
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.run import serve
script = FakeScript({"start": {1: Step(latency_s=float(sys.argv[2]))}})
class Engine(FakeEngine):
    async def start(self):
        print("up", flush=True)
        await super().start()
asyncio.run(serve(Engine(script), BusConfig(url=sys.argv[1]), component="backend", instance_id="7"))
print("down", flush=True)
"""


@asynccontextmanager
async def process(url: str, start_s: float) -> AsyncIterator[asyncio.subprocess.Process]:
    """The worker's process; killed at the end if it is still there."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, url, str(start_s), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def until(bus: Bus, seen: list[WorkerMessage], num: int) -> None:
    """Until so many announcements came."""
    async with asyncio.timeout(60.0):
        while len(seen) < num:
            await bus.barrier(30.0)


async def ask(bus: Bus, command: Command) -> Result:
    """Send to the worker; its result."""
    subject = subjects.command_to("default", "backend", "pause_generation", "7")
    async with bus.stream(subject, command, WorkerAnswer) as replies:
        while True:
            answer = await replies.next(30.0)
            if isinstance(answer, Result):
                return answer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_worker_announces_itself_obeys_and_says_goodbye_on_a_signal(number: signal.Signals) -> None:
    """Status 0 within seconds, and the goodbye names the signal."""

    async def main() -> None:
        async with EmbeddedServer() as server, await connect_bus(BusConfig(url=server.url), name="test") as bus:
            seen: list[WorkerMessage] = []
            bus.subscribe(subjects.worker("default", "backend", "7"), WorkerMessage, lambda m, _: seen.append(m))
            async with process(server.url, 0.0) as worker:
                await until(bus, seen, 1)
                first = seen[0]
                assert isinstance(first, Announcement)
                assert (first.seq, first.descriptor.engine) == (1, "fake")
                command = Command(op_id="p", term=1, expires_at=bus.clock.now() + 60, body=PauseGeneration())
                result = await ask(bus, command)
                assert (result.op_id, result.status, result.boot_id) == ("p", "ok", first.boot_id)
                worker.send_signal(number)
                async with asyncio.timeout(30.0):
                    assert await worker.wait() == 0
                await bus.barrier(30.0)
                assert seen[-1] == Goodbye(
                    boot_id=first.boot_id, component="backend", instance_id="7", reason=number.name
                )

    asyncio.run(main())


def test_signal_while_the_engine_starts_ends_the_worker() -> None:
    """A slow start is no reason to be killed hard."""

    async def main() -> None:
        async with EmbeddedServer() as server, process(server.url, 600.0) as worker:
            assert worker.stdout is not None
            assert await worker.stdout.readline() == b"up\n"
            worker.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30.0):
                assert await worker.wait() == 0
                assert await worker.stdout.readline() == b"down\n"

    asyncio.run(main())


def test_worker_without_a_server_ends_before_it_starts_its_engine() -> None:
    """A model may take minutes to load."""

    async def main() -> None:
        engine = FakeEngine(FakeScript({"start": {1: Step()}}))
        with pytest.raises(BrokenError):
            async with asyncio.timeout(30.0):
                await serve(engine, BusConfig(url="nats://127.0.0.1:1", connect_s=2.0), handle_signals=False)
        assert list(engine.calls) == []

    asyncio.run(main())
