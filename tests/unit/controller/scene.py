"""A fleet of real agents with fake engines, a real controller and a real trainer, in memory: for the scenario tests."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from rlbus.bus import Bus
from rlbus.controller.testing import Fleet, fleet_on_bus
from rlbus.schemas import Command, FaultCode, Generation, Report, WorkerId
from rlbus.testing import MemoryBroker, MemoryTransport, run
from rlbus.transfer.fake import FakePlane, FakePlaneScript, FakeSource
from rlbus.workers.engines.fake import DEFAULT_TENSORS, FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.testing import Rig, worker_on_bus

Worker = Callable[[MemoryBroker], AbstractAsyncContextManager[Rig]]
Steps = dict[str, dict[int, Step]]
RUNNING, PAUSED = Generation.RUNNING, Generation.PAUSED


class Scene:
    """One fleet under virtual time, and a spy on every command that is sent to a worker."""

    def __init__(self, fleet: Fleet[Rig]) -> None:
        self.fleet = fleet
        self.commands: list[tuple[Command, str]] = []
        self._spy = Bus(fleet.broker.connect())
        self._spy.subscribe("dyn.test.*.rl.>", Command, lambda c, m: self.commands.append((c, m.subject)))

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

    def cut(self, number: int) -> None:
        """Nothing reaches worker `number` or leaves it any more, and nobody is told."""
        transport = self.fleet.workers[number - 1].worker_bus.transport
        assert isinstance(transport, MemoryTransport)
        self.fleet.broker.partition(transport)

    def heal(self, number: int) -> None:
        """The end of `cut`."""
        transport = self.fleet.workers[number - 1].worker_bus.transport
        assert isinstance(transport, MemoryTransport)
        self.fleet.broker.heal(transport)


def worker(number: int, steps: Steps | None = None, **engine: Any) -> Worker:
    """The worker "backend/<number>", whose engine does what is scripted."""

    def start(broker: MemoryBroker) -> AbstractAsyncContextManager[Rig]:
        return worker_on_bus(FakeEngine(FakeScript(steps or {}), **engine), broker=broker, instance_id=str(number))

    return start


def play(
    workers: Sequence[Worker],
    scenario: Callable[[Scene], Coroutine[Any, Any, None]],
    plane: FakePlaneScript | None = None,
) -> None:
    """Run one scenario, and check that no engine was asked for anything out of order."""

    async def main() -> None:
        async with fleet_on_bus(workers, plane=FakePlane(plane)) as fleet:
            await scenario(Scene(fleet))
            assert [r.engine.violations for r in fleet.workers] == [[] for _ in fleet.workers]

    run(main())


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
