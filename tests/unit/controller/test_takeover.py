"""What a new leader says of the members of an op that was left behind."""

import asyncio
from pathlib import Path

import pytest

from rlbus.bus import Bus
from rlbus.schemas import CommitWeights, FaultCode, Generation, OpStatus, Version
from rlbus.testing import LoopClock, MemoryTransport
from rlbus.workers.agent import Agent
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.testing import worker_on_bus
from tests.unit.controller.failover_stage import Stage, play
from tests.unit.controller.scene import Worker, outcomes, worker

pytestmark = pytest.mark.unit


def test_a_version_is_known_though_its_leader_died_between_the_ops_end_and_the_mark() -> None:
    """The store has the op's report and no version; nobody who took it lives to tell."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(7)).status is OpStatus.OK
        await asyncio.sleep(0.5)
        del stage.broker.buckets["state"].kept["version"]
        transport = stage.workers[0].worker_bus.transport
        assert isinstance(transport, MemoryTransport)
        stage.broker.partition(transport)
        stage.kill(stage.processes[0])
        await stage.leader()
        assert (await stage.client.status()).version == Version(step=7)

    play([worker(1)], scenario)


def test_a_member_that_was_restarted_meanwhile_is_reported_as_lost_and_not_as_undone() -> None:
    """It may have had the new version before; what answers now under its name has what it was started with."""

    async def scenario(stage: Stage) -> None:
        transport = stage.workers[1].worker_bus.transport
        assert isinstance(transport, MemoryTransport)
        engine = FakeEngine(FakeScript({}))
        await engine.start()
        bus = Bus(stage.broker.connect(), clock=LoopClock(), new_id=lambda: "second-boot")
        again = Agent(engine, bus, namespace="test", component="backend", instance_id="2")
        lives: list[asyncio.Task[None]] = []

        def crash() -> None:
            stage.broker.partition(transport)
            stage.kill(stage.processes[0])
            lives.append(asyncio.get_running_loop().create_task(again.run()))

        stage.on_command = lambda command: crash() if isinstance(command.body, CommitWeights) and not lives else None
        report = await stage.update(7)
        assert (report.status, outcomes(report)["2"]) == (OpStatus.PARTIAL, "failed")
        (why,) = [o.fault for o in report.outcomes if o.worker == "backend/2"]
        assert why is not None
        assert why.code is FaultCode.WORKER_LOST
        again.stop()
        await lives[0]
        await bus.aclose()

    play([worker(1), worker(2)], scenario)


def loader(number: int, folder: Path, step: Step) -> Worker:
    """A worker that may load from `folder`, as `step` says."""
    engine = FakeEngine(FakeScript({"load_weights": {1: step}}))
    config = AgentConfig(weight_roots=(str(folder),))
    return lambda broker: worker_on_bus(engine, broker=broker, instance_id=str(number), config=config)


def test_a_reload_in_progress_is_waited_for_and_finished(tmp_path: Path) -> None:
    """A folder that is being loaded can't be taken back: whoever has it is let go, at the new version."""

    async def scenario(stage: Stage) -> None:
        asyncio.get_running_loop().call_later(3.0, stage.kill, stage.processes[0])
        report = await stage.client.reload(str(tmp_path), version=Version(step=7), deadline_s=60.0)
        assert (report.status, outcomes(report)) == (OpStatus.OK, {"1": "ok", "2": "ok"})
        assert await stage.generations() == [Generation.RUNNING] * 2
        assert (await stage.client.status()).version == Version(step=7)

    FakeEngine().save(tmp_path, Version(step=7))
    play([loader(1, tmp_path, Step()), loader(2, tmp_path, Step(latency_s=12.0))], scenario)


def test_a_reload_is_waited_for_though_its_worker_is_silent_for_a_while(tmp_path: Path) -> None:
    """Longer than the budget of any end; and one question without an answer doesn't say that the load is over."""

    async def scenario(stage: Stage) -> None:
        loop, transport = asyncio.get_running_loop(), stage.workers[1].worker_bus.transport
        assert isinstance(transport, MemoryTransport)
        loop.call_later(3.0, stage.kill, stage.processes[0])
        loop.call_later(20.0, stage.broker.partition, transport)
        loop.call_later(32.0, stage.broker.heal, transport)
        report = await stage.client.reload(str(tmp_path), version=Version(step=7), deadline_s=120.0)
        assert (report.status, outcomes(report)) == (OpStatus.OK, {"1": "ok", "2": "ok"})
        assert await stage.generations() == [Generation.RUNNING] * 2

    FakeEngine().save(tmp_path, Version(step=7))
    play([loader(1, tmp_path, Step()), loader(2, tmp_path, Step(latency_s=50.0))], scenario)
