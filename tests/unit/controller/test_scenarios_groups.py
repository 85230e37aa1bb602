"""What goes wrong in this field (SCENARIOS.md): who is there, the process group, the proof, holds, a new controller."""

import asyncio

import pytest

from rlbus.bus import Bus
from rlbus.controller.testing import controller_on_bus
from rlbus.errors import DeadlineError
from rlbus.schemas import (
    FaultCode,
    InitGroup,
    OpStatus,
    PauseMode,
    ReceiveWeights,
    Version,
    route_of,
)
from rlbus.testing import MemoryBroker, run
from rlbus.trainer import Trainer
from rlbus.transfer.fake import FakePlane, FakePlaneScript
from rlbus.workers.engines.fake import DEFAULT_TENSORS, FakeEngine
from rlbus.workers.engines.fake_script import Step, failing
from rlbus.workers.testing import worker_on_bus
from tests.unit.controller.scene import PAUSED, RUNNING, Scene, Steps, code_of, outcomes, play, source, worker

pytestmark = pytest.mark.unit


def test_a_partial_fleet_is_waited_for_and_the_missing_are_named() -> None:
    """SCENARIOS 16: workers announce over 10 s; a wait ends when the sum is reached, or says what is missing."""

    async def scenario(scene: Scene) -> None:
        broker, client = scene.fleet.broker, scene.fleet.client
        waiting = asyncio.create_task(client.wait_ready(world_size=8, deadline_s=60.0))
        with pytest.raises(DeadlineError) as caught:
            await client.wait_ready(world_size=8, deadline_s=5.0)
        assert "world size is 1 of 8; there: backend/1 (1)" in str(caught.value)
        async with worker(2, world_size=4)(broker):
            await asyncio.sleep(5.0)
            assert not waiting.done()
            async with worker(3, world_size=3)(broker):
                view = await waiting
                assert sum(m.descriptor.world_size for m in view.members) == 8

    play([worker(1)], scenario)


def test_workers_of_unequal_world_sizes_get_spans_without_gap_or_overlap() -> None:
    """SCENARIOS 17: 1, 2, 4, 1 -> [1], [2, 3], [4..7], [8], and each reports back what it has."""

    async def scenario(scene: Scene) -> None:
        report = await scene.update(7)
        assert report.status is OpStatus.OK
        await asyncio.sleep(0.1)
        plan = next(c.body.plan for c, _ in scene.commands if isinstance(c.body, InitGroup))
        assert [(s.instance_id, s.first, s.num_ranks) for s in plan.spans] == [
            ("1", 1, 1),
            ("2", 2, 2),
            ("3", 4, 4),
            ("4", 8, 1),
        ]
        assert plan.world_size == 9

    play([worker(n, world_size=size) for n, size in enumerate((1, 2, 4, 1), start=1)], scenario)


def test_a_group_of_a_trainer_that_died_does_not_block_the_next() -> None:
    """SCENARIOS 18: another trainer process is another sender: epoch 1 is left by all, epoch 2 is formed."""

    async def scenario(scene: Scene) -> None:
        assert (await scene.update(6)).epoch == 1
        async with Bus(scene.fleet.broker.connect()) as bus:
            relaunched = Trainer(bus, "test", scene.relaunch("relaunched"))
            report = (await relaunched.update_weights(source(), version=7)).report
        assert (report.status, report.epoch) == (OpStatus.OK, 2)
        calls = list(scene.fleet.workers[0].engine.calls)
        assert calls.count("leave_group") == 1

    play([worker(1), worker(2)], scenario)


@pytest.mark.parametrize("how", ["fails to join", "never joins"])
def test_workers_are_not_paused_for_a_sender_that_is_not_there(how: str) -> None:
    """SCENARIOS 19: the sender's ready comes first, so no engine stands still for it."""

    async def scenario(scene: Scene) -> None:
        report = await scene.update(15, deadline_s=300.0)
        assert report.status is OpStatus.FAILED
        assert report.fault is not None
        assert report.fault.code in (FaultCode.GROUP_FAILED, FaultCode.SENDER_FAILED)
        assert (report.paused_s, outcomes(report)) == (0.0, {"1": "undone", "2": "undone"})
        for rig in scene.fleet.workers:
            assert "pause" not in rig.engine.calls
            assert rig.engine.epoch is None

    script = FakePlaneScript(fail_join="no route to host") if how == "fails to join" else FakePlaneScript(join_s=200.0)
    play([worker(1), worker(2)], scenario, plane=script)


def test_a_group_that_one_worker_cannot_join_fails_at_once_and_names_it() -> None:
    """SCENARIOS 46: w2 answers an error; nobody is paused, w1 is called out of the rendezvous."""

    async def scenario(scene: Scene) -> None:
        began_s = asyncio.get_running_loop().time()
        report = await scene.update(7, on_failure="stop")
        assert asyncio.get_running_loop().time() - began_s < 5.0
        assert report.fault is not None
        assert (report.fault.code, report.fault.detail["worker"]) == (FaultCode.GROUP_FAILED, "backend/2")
        assert outcomes(report)["2"] == "failed"
        assert scene.fleet.workers[0].engine.epoch is None
        assert await scene.generations() == [RUNNING, RUNNING]

    steps: Steps = {"join_group": {1: failing(code=FaultCode.GROUP_FAILED)}}
    play([worker(1, {"join_group": {1: Step(latency_s=30.0)}}), worker(2, steps)], scenario)


@pytest.mark.parametrize("step", [Step(skips=True), Step(wrong_sum_of=DEFAULT_TENSORS[0].name)])
def test_a_worker_that_did_not_receive_what_was_sent_fails_the_op(step: Step) -> None:
    """SCENARIOS 47: "ok" without a transfer, or with other bytes: the checksum says so, and names the tensor."""

    async def scenario(scene: Scene) -> None:
        report = await scene.update(7)
        assert report.status is OpStatus.PARTIAL
        assert (outcomes(report), code_of(report, 2)) == (
            {"1": "ok", "2": "failed"},
            FaultCode.CHECKSUM_MISMATCH,
        )
        why = report.outcomes[1].fault
        assert why is not None
        assert why.detail["tensor"] == DEFAULT_TENSORS[0].name
        assert await scene.generations() == [RUNNING, PAUSED]
        assert "finish_update" not in scene.fleet.workers[1].engine.calls

    play([worker(1), worker(2, {"receive_weights": {1: step}})], scenario)


def test_a_person_who_holds_the_fleet_paused_keeps_it_so_through_an_update() -> None:
    """The update doesn't end a hold that isn't its own; the weights are new all the same."""

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.pause(mode=PauseMode.KEEP)
        report = await scene.update(7)
        assert report.status is OpStatus.OK
        assert await scene.generations() == [PAUSED, PAUSED]
        await scene.fleet.client.resume()
        assert all(m.admitted for m in (await scene.fleet.members()).values())

    play([worker(1), worker(2)], scenario)


def test_a_controller_that_is_restarted_finds_the_fleet_and_is_newer() -> None:
    """Its term is larger, the fleet's version comes from the workers, and epochs go on from what they name."""

    async def main() -> None:
        broker = MemoryBroker()
        async with worker_on_bus(FakeEngine(), broker=broker, instance_id="1") as rig, Bus(broker.connect()) as bus:
            trainer = Trainer(bus, "test", FakePlane())
            async with controller_on_bus(broker, term=100):
                await trainer.wait_ready(num_workers=1)
                await trainer.update_weights(source(), version=6)
            async with controller_on_bus(broker, term=200) as controller:
                await trainer.wait_ready(num_workers=1)
                assert controller.registry.version == Version(step=6)
                report = await trainer.update_weights(source(), version=7)
                assert (report.status, report.report.epoch) == (OpStatus.OK, 2)
            assert rig.agent.state.term == 200

    run(main())


def test_the_receive_command_names_the_update_and_its_group() -> None:
    """What the worker checks before the first byte."""

    async def scenario(scene: Scene) -> None:
        report = await scene.update(7, bucket_bytes=4096)
        await asyncio.sleep(0.1)
        (body,) = {c.body for c, _ in scene.commands if isinstance(c.body, ReceiveWeights)}
        assert (body.update_op_id, body.epoch, body.bucket_bytes) == (report.op_id, 1, 4096)

    play([worker(1)], scenario)


def test_a_mutation_always_says_whom_it_is_meant_for() -> None:
    """A worker that nobody knows yet must not be paused by a broadcast that nobody would undo on it."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        await scene.fleet.client.versions()
        await asyncio.sleep(0.1)
        meant = {route_of(c.body): c.members for c, subject in scene.commands if subject.count(".") == 4}
        assert meant["pause_generation"] == meant["commit_weights_update"] == ("1", "2")
        assert meant["get_weight_version"] is None

    play([worker(1), worker(2)], scenario)
