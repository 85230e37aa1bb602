"""What goes wrong in this field (SCENARIOS.md): workers that are killed, come back, or whose answers are lost.

Real agents, controller and trainer on a bus in memory, under virtual time.
"""

import asyncio

import pytest

from rlbus.controller.attempts import PROBE_S
from rlbus.schemas import CommitWeights, GetOutcome, Liveness, OpStatus, Version
from rlbus.testing import Faults, MemoryTransport
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller.scene import RUNNING, Scene, Steps, outcomes, play, w, worker

pytestmark = pytest.mark.unit


def test_a_restarted_worker_is_not_admitted_for_being_healthy() -> None:
    """SCENARIOS 8: fleet at v40, it announces its start-up weights; only a confirmed v40 or more admits it."""

    async def scenario(scene: Scene) -> None:
        await scene.update(40)
        scene.cut(2)
        async with worker(2, boot="again")(scene.fleet.broker):
            for _ in range(30):
                await asyncio.sleep(1.0)
                member = (await scene.fleet.members())[w(2)]
                assert not member.admitted or member.status.weights.version == Version(step=40)
            assert member.liveness is Liveness.ALIVE
            report = await scene.update(41)
            assert outcomes(report) == {"1": "ok", "2": "ok"}
            member = (await scene.fleet.members())[w(2)]
            assert (member.admitted, member.status.weights.version) == (True, Version(step=41))

    play([worker(1), worker(2)], scenario)


def test_a_new_instance_of_a_dead_worker_is_in_the_group_of_the_next_update() -> None:
    """SCENARIOS 59: epoch 2 was formed without w2; the next is formed with it, and three are admitted again."""

    async def scenario(scene: Scene) -> None:
        assert (await scene.update(6)).epoch == 1
        scene.cut(2)
        await asyncio.sleep(30.0)
        report = await scene.update(7)
        assert (report.epoch, outcomes(report)) == (2, {"1": "ok", "3": "ok"})
        async with worker(2, boot="again")(scene.fleet.broker):
            await asyncio.sleep(10.0)
            report = await scene.update(8)
            assert (report.epoch, outcomes(report)) == (3, {"1": "ok", "2": "ok", "3": "ok"})
            members = await scene.fleet.members()
            assert {m.status.weights.version for m in members.values() if m.admitted} == {Version(step=8)}
            assert sum(m.admitted for m in members.values()) == 3
            assert (await scene.update(9)).epoch == 3

    play([worker(1), worker(2), worker(3)], scenario)


def test_a_commit_whose_answer_was_lost_is_settled_by_asking() -> None:
    """SCENARIOS 34: w1 did it, nobody heard; the op asks what became of it, and neither fails nor does it again."""

    async def scenario(scene: Scene) -> None:
        transport = scene.fleet.workers[0].worker_bus.transport
        assert isinstance(transport, MemoryTransport)

        def lose_answers() -> None:
            transport.faults = Faults(drop=1.0, only="_INBOX.>")
            # Before it is asked: it had accepted, so three times the probe's limit pass first.
            asyncio.get_running_loop().call_later(3 * PROBE_S - 1.0, hear_again)

        def hear_again() -> None:
            transport.faults = Faults()

        scene.at(CommitWeights, lose_answers)
        report = await scene.update(7)
        assert await scene.addressed(GetOutcome) == ["1"]
        assert (report.status, outcomes(report)) == (OpStatus.OK, {"1": "ok", "2": "ok"})
        assert list(scene.fleet.workers[0].engine.calls).count("finish_update") == 1
        assert await scene.generations() == [RUNNING, RUNNING]

    play([worker(1), worker(2)], scenario)


def test_a_join_that_holds_on_is_visible_and_the_worker_is_not_asked_for_more_until_it_lets_go() -> None:
    """SCENARIOS 23: the op ends in its time, what still blocks w1 is in its status, it isn't paused, and comes back."""

    async def scenario(scene: Scene) -> None:
        began_s = asyncio.get_running_loop().time()
        report = await scene.update(7, deadline_s=60.0)
        assert report.status is OpStatus.FAILED
        assert asyncio.get_running_loop().time() - began_s < 100.0
        assert "pause" not in scene.fleet.workers[0].engine.calls
        busy = (await scene.fleet.members())[w(1)].status
        assert busy.op_id is not None
        await asyncio.sleep(60.0)
        free = (await scene.fleet.members())[w(1)].status
        assert (free.op_id, free.epoch) == (None, None)
        assert (await scene.update(8)).status is OpStatus.OK

    stuck: Steps = {"join_group": {1: Step(hangs=True, clings_s=40.0)}}
    play([worker(1, stuck)], scenario)
