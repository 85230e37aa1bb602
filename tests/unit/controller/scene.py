"""A fleet of real agents with fake engines, a real controller and a real trainer, in memory: for the scenario tests."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from rlbus._snapshots import Snapshots
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.controller.testing import Fleet, fleet_on_bus
from rlbus.schemas import Command, FaultCode, Generation, Report, TensorSpec, WorkerId
from rlbus.testing import MemoryBroker, MemoryTransport, VirtualTimeLoop, run
from rlbus.transfer.fake import FakePlane, FakePlaneScript, FakeSource
from rlbus.transfer.plane import Sent, WeightSource
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.base import ReceiveOrder
from rlbus.workers.engines.fake import DEFAULT_TENSORS, FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.testing import Rig, worker_on_bus

Worker = Callable[[MemoryBroker], AbstractAsyncContextManager[Rig]]
Steps = dict[str, dict[int, Step]]
RUNNING, PAUSED = Generation.RUNNING, Generation.PAUSED


class FedPlane(FakePlane):
    """A trainer's end whose sending is what the fake engines wait for: no byte arrives before it begins."""

    def __init__(self, script: FakePlaneScript | None = None, *, sender_id: str = "fake-sender") -> None:
        super().__init__(script, sender_id=sender_id)
        self._begun: dict[str, asyncio.Future[int | None]] = {}

    def begin(self, op_id: str, num_tensors: int | None = None) -> None:
        """Bytes of this update come from now on; `num_tensors` of them, or all."""
        begun = self._of(op_id)
        if not begun.done():
            begun.set_result(num_tensors)

    async def send(self, source: WeightSource, specs: Sequence[TensorSpec], **options: Any) -> Sent:
        """As FakePlane, and the engines hear it."""
        is_whole = self.script.fail_send is None
        self.begin(options["stream_id"], None if is_whole else self.script.fail_after_parts)
        return await super().send(source, specs, **options)

    async def feed(self, order: ReceiveOrder) -> int | None:
        """What an engine awaits."""
        return await asyncio.shield(self._of(order.update_op_id))

    def _of(self, op_id: str) -> asyncio.Future[int | None]:
        return self._begun.setdefault(op_id, asyncio.get_running_loop().create_future())


def stand_still(gap_s: float) -> None:
    """The process does nothing for so long: all timers are overdue then, and what comes is read after they fired."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop._now_s += gap_s


# The plane of the scene that is played.
_planes: list[FedPlane] = []


async def _feed(order: ReceiveOrder) -> int | None:
    return await _planes[-1].feed(order)


class Scene:
    """One fleet under virtual time, and a spy on every command that is sent to a worker."""

    def __init__(self, fleet: Fleet[Rig]) -> None:
        self.fleet = fleet
        self.plane = _planes[-1]
        self.commands: list[tuple[Command, str]] = []
        self._spy = Bus(fleet.broker.connect())
        self._spy.subscribe("dyn.test.*.rl.>", Command, lambda c, m: self.commands.append((c, m.subject)))

    def spy(self, pattern: str, as_type: Any, handler: Callable[[Any, Message], None]) -> None:
        """Hear what goes over the bus from now on."""
        self._spy.subscribe(pattern, as_type, handler)

    async def update(self, step: int, **options: Any) -> Report:
        """Give the fleet version 0.`step`; the report, whatever it says."""
        return await self.fleet.update(step, DEFAULT_TENSORS, **options)

    async def addressed(self, body: type[Any]) -> list[str]:
        """Whom such commands were sent to, by instance id, repeats aside."""
        await asyncio.sleep(0.1)
        ids: list[str] = []
        for command, subject in self.commands:
            if isinstance(command.body, body):
                ids.extend(command.members or (subject.rpartition(".")[2],))
        return sorted(set(ids))

    async def generations(self) -> list[Generation]:
        """What the engines themselves say, in order."""
        return [(await r.engine.observe()).generation for r in self.fleet.workers]

    def relaunch(self, sender_id: str) -> FedPlane:
        """Another trainer process takes over: its own end of the data plane."""
        self.plane = FedPlane(sender_id=sender_id)
        _planes.append(self.plane)
        return self.plane

    def cut(self, number: int) -> None:
        """Nothing reaches worker `number` or leaves it any more, and nobody is told."""
        transport = self.fleet.workers[number - 1].worker_bus.transport
        assert isinstance(transport, MemoryTransport)
        self.fleet.broker.partition(transport)

    def kill_controller(self) -> None:
        """It does nothing any more that anybody hears of, and takes nothing back: a SIGKILL, as the others see it."""
        transport = self.fleet.controller._bus.transport
        assert isinstance(transport, MemoryTransport)
        self.fleet.broker.partition(transport)

    def at(self, body: type[Any], call: Callable[[], None]) -> None:
        """Call once when such a command is first sent to a worker; the command itself arrives."""

        def look(command: Command, _: Message) -> None:
            if isinstance(command.body, body):
                watching.unsubscribe()
                call()

        watching = self._spy.subscribe("dyn.test.*.rl.>", Command, look)

    def heal(self, number: int) -> None:
        """The end of `cut`."""
        transport = self.fleet.workers[number - 1].worker_bus.transport
        assert isinstance(transport, MemoryTransport)
        self.fleet.broker.heal(transport)


def worker(
    number: int, steps: Steps | None = None, boot: str = "boot", config: AgentConfig | None = None, **engine: Any
) -> Worker:
    """The worker "backend/<number>", whose engine does what is scripted. `boot` tells one process from the next."""

    def start(broker: MemoryBroker) -> AbstractAsyncContextManager[Rig]:
        made = FakeEngine(FakeScript(steps or {}), feed=_feed, **engine)
        return worker_on_bus(made, broker=broker, instance_id=str(number), boot=boot, config=config)

    return start


def play(
    workers: Sequence[Worker],
    scenario: Callable[[Scene], Coroutine[Any, Any, None]],
    plane: FakePlaneScript | None = None,
    snapshots: Snapshots | None = None,
) -> None:
    """Run one scenario, and check that no engine was asked for anything out of order."""

    async def main() -> None:
        _planes.append(FedPlane(plane))
        async with fleet_on_bus(workers, plane=_planes[-1], snapshots=snapshots) as fleet:
            await scenario(Scene(fleet))
            assert [r.engine.violations for r in fleet.workers] == [[] for _ in fleet.workers]

    try:
        run(main())
    finally:
        _planes.clear()


def source() -> FakeSource:
    """What the fake engines' model takes."""
    return FakeSource(DEFAULT_TENSORS)


def w(number: int) -> WorkerId:
    return WorkerId(f"backend/{number}")


def outcomes(report: Report) -> dict[str, str]:
    return {o.worker.partition("/")[2]: o.outcome.value for o in report.outcomes}


def code_of(report: Report, number: int) -> FaultCode | None:
    outcome = next(o for o in report.outcomes if o.worker == w(number))
    return None if outcome.fault is None else outcome.fault.code
