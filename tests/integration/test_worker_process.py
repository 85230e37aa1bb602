"""A worker as a process of its own on a real server: it comes, obeys, and leaves when it is told to."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rlbus import subjects
from rlbus.bus import Bus
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.errors import BrokenError
from rlbus.schemas import (
    Accepted,
    Announcement,
    Command,
    CommandBody,
    FaultCode,
    FlushCache,
    GetOutcome,
    Goodbye,
    OutcomeData,
    PauseGeneration,
    Result,
    WorkerAnswer,
    WorkerMessage,
    route_of,
)
from rlbus.server import EmbeddedServer
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.run import serve
from tests.tries import best_of, in_time

pytestmark = pytest.mark.integration

CODE = """
import asyncio, sys
from rlbus.config import BusConfig
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.run import serve
script = FakeScript({
    "start": {1: Step(latency_s=float(sys.argv[2]))},
    "flush_cache": {1: Step(latency_s=float(sys.argv[3]))},
    "pause": {1: Step(dies=bool(sys.argv[4:]))},
})
class Engine(FakeEngine):
    async def start(self):
        print("up", flush=True)
        await super().start()
asyncio.run(serve(Engine(script), BusConfig(url=sys.argv[1]), component="backend", instance_id="7"))
print("down", flush=True)
"""


@asynccontextmanager
async def process(
    url: str, start_s: float, flush_s: float = 0.0, *, state_dir: Path | None = None, dies: bool = False
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The worker's process; killed at the end if it is still there."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("RLBUS_")}
    if state_dir is not None:
        env["RLBUS_STATE_DIR"] = str(state_dir)
    arguments = [url, str(start_s), str(flush_s), *(["dies"] if dies else [])]
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, *arguments, env=env, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def announced(bus: Bus, seen: list[WorkerMessage], after: str = "") -> Announcement:
    """The first announcement of another process than the one with that boot id, whose last one may come late."""
    async with asyncio.timeout(60.0):
        while not (found := [m for m in seen if isinstance(m, Announcement) and m.boot_id != after]):
            await bus.barrier(60.0)
    return found[0]


async def ask(bus: Bus, command: Command, until: type[Accepted] | type[Result] = Result) -> WorkerAnswer:
    """Send to the worker; its result, or that it was accepted."""
    subject = subjects.command_to("default", "backend", route_of(command.body), "7")
    async with bus.stream(subject, command, WorkerAnswer) as replies:
        while True:
            answer = await replies.next(60.0)
            if isinstance(answer, until):
                return answer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_worker_announces_itself_obeys_and_says_goodbye_on_a_signal(number: signal.Signals) -> None:
    """Status 0 within seconds, and the goodbye names the signal."""

    async def main() -> None:
        async with EmbeddedServer() as server, await connect_bus(BusConfig(url=server.url), name="test") as bus:
            seen: list[WorkerMessage] = []
            bus.subscribe(subjects.worker("default", "backend", "7"), WorkerMessage, lambda m, _: seen.append(m))
            async with process(server.url, 0.0) as worker:
                first = await announced(bus, seen)
                assert (first.seq, first.descriptor.engine) == (1, "fake")
                command = Command(op_id="p", term=1, expires_at=bus.clock.now() + 60, body=PauseGeneration())
                result = await ask(bus, command)
                assert isinstance(result, Result)
                assert (result.op_id, result.status, result.boot_id) == ("p", "ok", first.boot_id)
                worker.send_signal(number)
                async with asyncio.timeout(60.0):
                    assert await worker.wait() == 0
                await bus.barrier(60.0)
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
            async with asyncio.timeout(60.0):
                assert await worker.wait() == 0
                assert await worker.stdout.readline() == b"down\n"

    asyncio.run(main())


def test_worker_without_a_server_ends_before_it_starts_its_engine() -> None:
    """A model may take minutes to load."""

    async def main() -> None:
        engine = FakeEngine(FakeScript({"start": {1: Step()}}))
        with pytest.raises(BrokenError):
            async with asyncio.timeout(60.0):
                await serve(engine, BusConfig(url="nats://127.0.0.1:1", connect_s=2.0), handle_signals=False)
        assert list(engine.calls) == []

    asyncio.run(main())


def test_op_in_whose_middle_the_worker_is_killed_is_never_run_again(tmp_path: Path) -> None:
    """SIGKILL in an engine call; the next process says what became of it, and obeys no older controller."""

    async def main() -> None:
        async with EmbeddedServer() as server, await connect_bus(BusConfig(url=server.url), name="test") as bus:
            seen: list[WorkerMessage] = []
            bus.subscribe(subjects.worker("default", "backend", "7"), WorkerMessage, lambda m, _: seen.append(m))

            def command(body: CommandBody, op_id: str, term: int = 9) -> Command:
                return Command(op_id=op_id, term=term, expires_at=bus.clock.now() + 60, body=body)

            async with process(server.url, 0.0, 600.0, state_dir=tmp_path) as worker:
                await announced(bus, seen)
                done = await ask(bus, command(PauseGeneration(), "p"))
                await ask(bus, command(FlushCache(), "f"), Accepted)
                worker.kill()
                await worker.wait()
            async with process(server.url, 0.0, state_dir=tmp_path):
                await announced(bus, seen, after=done.boot_id)
                lost = await ask(bus, command(FlushCache(), "f"))
                assert isinstance(lost, Result)
                assert lost.fault is not None
                assert (lost.status, lost.fault.code) == ("failed", FaultCode.WORKER_LOST)
                again = await ask(bus, command(PauseGeneration(), "p"))
                assert isinstance(again, Result)
                assert (again.status, again.boot_id) == ("ok", done.boot_id)
                outcome = await ask(bus, command(GetOutcome(of_op_id="f"), "o"))
                assert isinstance(outcome, Result)
                assert outcome.data == OutcomeData(of_op_id="f", running=False, status=lost.status, fault=lost.fault)
                stale = await ask(bus, command(FlushCache(), "f2", term=8))
                assert isinstance(stale, Result)
                assert stale.fault is not None
                assert stale.fault.code is FaultCode.STALE_TERM

    asyncio.run(main())


def test_worker_whose_engine_dies_ends_with_a_goodbye_and_an_error() -> None:
    """Within 2 s, so that what supervises it can start it again; a loaded machine gets some more."""

    async def main() -> None:
        async with EmbeddedServer() as server, await connect_bus(BusConfig(url=server.url), name="test") as bus:
            seen: list[WorkerMessage] = []
            bus.subscribe(subjects.worker("default", "backend", "7"), WorkerMessage, lambda m, _: seen.append(m))
            async with process(server.url, 0.0, dies=True) as worker:
                await announced(bus, seen)
                command = Command(op_id="p", term=1, expires_at=bus.clock.now() + 60, body=PauseGeneration())
                result = await ask(bus, command)
                assert isinstance(result, Result)
                assert result.fault is not None
                assert result.fault.code is FaultCode.ENGINE_DEAD
                began_s = asyncio.get_running_loop().time()
                async with asyncio.timeout(60.0):
                    assert await worker.wait() != 0
                took_s = asyncio.get_running_loop().time() - began_s
                await bus.barrier(60.0)
                goodbye = seen[-1]
                assert isinstance(goodbye, Goodbye)
                assert goodbye.reason.startswith("the engine is lost")
                in_time("its end", took_s, 5.0)

    best_of(lambda: asyncio.run(main()))
