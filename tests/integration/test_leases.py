"""Real processes on a real server: the controller is killed, and the engines that it had paused go on by themselves."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from rlbus import subjects
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.controller.leases import LEASE_S
from rlbus.schemas import GenerationPaused, GenerationResumed, WorkerEvent
from rlbus.server import EmbeddedServer
from rlbus.sync import LoopThread
from tests.integration.commands import NAMESPACE, Process, asked, done_well, program, rlbus, until_listed
from tests.tries import best_of, in_time

pytestmark = [pytest.mark.integration, pytest.mark.alone]

E = TypeVar("E")

# What real processes may take on top of a lease: a loaded machine, a resume.
BOUND_S = 60.0
# Of a pause by hand: long enough to look at it first, on a busy machine.
PERSON_S = 8


@pytest.fixture
def url() -> Iterator[str]:
    """A real server on loopback."""
    loop = LoopThread("test-server")
    server = EmbeddedServer()
    loop.call(server.__aenter__())
    yield server.url
    loop.call(server.__aexit__(None, None, None))
    loop.stop()


@pytest.fixture
def workers(url: str) -> Iterator[list[Process]]:
    """Two fake workers, backend/1 and backend/2. Nobody restarts them, so that one can be frozen."""
    fake = ("worker", "fake", "--no-restart", "--json", "--instance-id")
    started = [program(*fake, number, url=url) for number in ("1", "2")]
    for process in started:
        process.document()
    yield started
    for process in started:
        process.kill()


@pytest.fixture
def controller(url: str, workers: list[Process]) -> Iterator[Callable[[], Process]]:
    """Starts a controller, and waits until it knows both workers."""
    started: list[Process] = []

    def start() -> Process:
        process = program("controller", "--json", url=url)
        started.append(process)
        process.document()
        until_listed(url, 2)
        return process

    yield start
    for process in started:
        process.kill()


class Watch:
    """What the workers say of their pauses, with when it came."""

    def __init__(self) -> None:
        self.events: list[tuple[float, WorkerEvent]] = []
        self._changed = asyncio.Event()

    def take(self, event: WorkerEvent, _: object) -> None:
        """One more."""
        self.events.append((time.monotonic(), event))
        self._changed.set()

    async def until(self, kind: type[E], num: int, limit_s: float) -> list[tuple[float, E]]:
        """The events of a kind, once there are `num`."""
        async with asyncio.timeout(limit_s):
            while len(found := self._of(kind)) < num:
                self._changed.clear()
                await self._changed.wait()
        return found

    async def until_all_run(self, limit_s: float) -> list[GenerationResumed]:
        """What each that was paused said last, once that is that it goes on."""
        async with asyncio.timeout(limit_s):
            while True:
                last = {e.instance_id: e for _, e in self.events if isinstance(e, GenerationPaused | GenerationResumed)}
                going = [event for event in last.values() if isinstance(event, GenerationResumed)]
                if len(going) == len(last):
                    return going
                self._changed.clear()
                await self._changed.wait()

    def _of(self, kind: type[E]) -> list[tuple[float, E]]:
        found: list[tuple[float, E]] = []
        for at, event in self.events:
            if isinstance(event, kind):
                found.append((at, event))
        return found


def leased_pause(url: str, pauses_s: list[int]) -> None:
    """Pause with a lease that others are shown; longer than that of the one before, which ended too early for it."""
    lease_s, began_s = 3 * pauses_s[-1] if pauses_s else PERSON_S, time.monotonic()
    pauses_s.append(lease_s)
    done_well(url, "pause", "--lease", str(lease_s))
    shown = rlbus("workers", url=url)
    if "if nobody renews it" not in shown.stderr + shown.stdout:
        in_time("the look at it", time.monotonic() - began_s, lease_s)
        raise AssertionError(shown)


def test_a_leased_pause_ends_by_itself_after_the_controller_was_killed(
    url: str, controller: Callable[[], Process]
) -> None:
    """`rlbus pause --lease 8`, SIGKILL: 8 s later both run and say why, and the next controller sees it."""

    async def main() -> None:
        first = await asyncio.to_thread(controller)
        async with await connect_bus(BusConfig(url=url), name="test") as bus:
            watch = Watch()
            for number in ("1", "2"):
                bus.subscribe(subjects.worker_event(NAMESPACE, "backend", number), WorkerEvent, watch.take)
            await bus.barrier(30.0)
            pauses_s: list[int] = []
            await asyncio.to_thread(best_of, lambda: leased_pause(url, pauses_s))
            await bus.barrier(30.0)  # what they said of the pause is here
            first.popen.send_signal(signal.SIGKILL)
            resumed = await watch.until_all_run(pauses_s[-1] + BOUND_S)
            assert len(resumed) == 2
            assert all(e.lease_ended and e.owner and e.owner.startswith("cli:") for e in resumed)
        await asyncio.to_thread(controller)
        members = (await asyncio.to_thread(asked, url, "workers"))["workers"]
        assert [(m["status"]["generation"], m["status"]["pause"]) for m in members] == [("running", None)] * 2
        assert all(m["admitted"] for m in members)

    asyncio.run(main())


def test_what_an_op_had_paused_when_its_controller_was_killed_goes_on(
    url: str, workers: list[Process], controller: Callable[[], Process]
) -> None:
    """A plain `rlbus pause` waits for a frozen worker; the controller dies; the other is no hold, and runs again."""

    async def main() -> None:
        first = await asyncio.to_thread(controller)
        async with await connect_bus(BusConfig(url=url), name="test") as bus:
            watch = Watch()
            bus.subscribe(subjects.worker_event(NAMESPACE, "backend", "1"), WorkerEvent, watch.take)
            await bus.barrier(30.0)
            workers[1].popen.send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            pausing = program("pause", url=url)
            try:
                await watch.until(GenerationPaused, 1, BOUND_S)
                first.popen.send_signal(signal.SIGKILL)
                ((resumed_s, event),) = await watch.until(GenerationResumed, 1, LEASE_S + BOUND_S)
            finally:
                pausing.kill()
            assert event.lease_ended
            assert resumed_s - began_s > LEASE_S

    asyncio.run(main())
