"""What goes wrong in this field (SCENARIOS.md): a worker is lost in an update, and the others go on in the same call.

Real agents, controller and trainer on a bus in memory, under virtual time.
"""

import asyncio

import pytest

from rlbus.controller.attempts import PROBE_S, STILL_S
from rlbus.errors import PartialError
from rlbus.schemas import OpStatus, ReceiveWeights
from rlbus.transfer.fake import FakePlaneScript
from rlbus.workers.config import DEFAULT_HEARTBEAT_S
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.scene import PAUSED, RUNNING, Scene, Steps, outcomes, play, source, worker

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("verb", ["join_group", "pause", "receive_weights"])
def test_a_worker_that_leaves_in_an_update_costs_the_others_one_attempt(verb: str) -> None:
    """SCENARIOS 6 and 7: its goodbye is heard outside the collective; the survivors serve the new version."""

    async def scenario(scene: Scene) -> None:
        updating = asyncio.create_task(scene.update(7))
        await asyncio.sleep(1.0)
        scene.fleet.workers[1].agent.stop("scaled down")
        report = await updating
        assert outcomes(report) == {"1": "ok", "2": "failed", "3": "ok"}
        assert (report.status, report.num_attempts, report.epochs) == (OpStatus.PARTIAL, 2, (1, 2))
        generations = await scene.generations()
        assert (generations[0], generations[2]) == (RUNNING, RUNNING)
        for number in (0, 2):
            assert list(scene.fleet.workers[number].engine.calls).count("start") == 1

    play([worker(1), worker(2, {verb: {1: Step(latency_s=30.0)}}), worker(3)], scenario)


def test_a_partitioned_worker_is_found_by_a_probe_when_the_broadcast_breaks() -> None:
    """SCENARIOS 6: nothing says goodbye. The others serve the new version one probe and one transfer later."""

    async def scenario(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        scene.fleet.plane.script = FakePlaneScript(
            send_s=4.0, send_parts=4, break_send="peer closed", fail_after_parts=1
        )
        updating = asyncio.create_task(scene.update(7, require=2))
        await asyncio.sleep(0.5)
        scene.cut(2)
        lost_s = loop.time()
        await asyncio.sleep(0.7)
        scene.fleet.plane.script = FakePlaneScript()
        report = await updating
        assert outcomes(report) == {"1": "ok", "2": "unknown", "3": "ok"}
        assert (report.status, report.num_attempts) == (OpStatus.OK, 2)
        assert loop.time() - lost_s < 5.0 + PROBE_S
        scene.heal(2)

    play([worker(1), worker(2), worker(3)], scenario)


def test_a_worker_that_hangs_in_a_broadcast_is_lost_although_no_connection_breaks() -> None:
    """SCENARIOS 6: stopped, not dead. The others don't wait for the limit of a transfer that stalls."""

    async def scenario(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        scene.fleet.plane.script = FakePlaneScript(send_s=3600.0)
        updating = asyncio.create_task(scene.update(7, require=2, stall_s=300.0))
        await asyncio.sleep(0.5)
        scene.cut(2)
        lost_s = loop.time()
        scene.fleet.plane.script = FakePlaneScript()
        report = await updating
        assert outcomes(report) == {"1": "ok", "2": "unknown", "3": "ok"}
        assert report.num_attempts == 2
        assert loop.time() - lost_s < STILL_S + 2 * PROBE_S + 2.0
        scene.heal(2)

    stuck: Steps = {"receive_weights": {1: Step(transfer_s=3600.0, num_parts=1)}}
    play([worker(n, stuck) for n in (1, 2, 3)], scenario)


def test_a_worker_that_falls_silent_when_the_others_have_everything_is_lost_by_their_heartbeats() -> None:
    """SCENARIOS 6: nobody else has anything to say in the transfer any more; that they live is heard all the same."""

    async def scenario(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        lost_s: list[float] = []

        def cut() -> None:
            lost_s.append(loop.time())
            scene.cut(2)

        scene.at(ReceiveWeights, cut)
        report = await scene.update(7, require=2)
        assert outcomes(report) == {"1": "ok", "2": "unknown", "3": "ok"}
        assert report.num_attempts == 2
        # A heartbeat comes within 1.2 intervals (rlbus.workers.config); then an abort, and the end, are probes.
        assert loop.time() - lost_s[0] < STILL_S + 1.2 * DEFAULT_HEARTBEAT_S + 4 * PROBE_S
        scene.heal(2)

    play([worker(1), worker(2), worker(3)], scenario)


def test_a_worker_that_never_takes_up_a_transfer_holds_the_others_up_no_longer_than_a_still_one() -> None:
    """SCENARIOS 6: it hears of the transfer and says nothing; nobody was told to send yet."""

    async def scenario(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        updating = asyncio.create_task(scene.update(7, require=2))
        await asyncio.sleep(0.5)
        scene.cut(2)
        lost_s = loop.time()
        report = await updating
        assert outcomes(report) == {"1": "ok", "2": "unknown", "3": "ok"}
        assert loop.time() - lost_s < STILL_S + 1.2 * DEFAULT_HEARTBEAT_S + 4 * PROBE_S
        scene.heal(2)

    # Receivers that stand only after 3600 s: no `accepted` from the stopped one.
    slow: Steps = {"receive_weights": {0: Step(latency_s=1.0)}}
    mute: Steps = {"receive_weights": {0: Step(latency_s=3600.0)}}
    play([worker(1, slow), worker(2, mute), worker(3, slow)], scenario)


def test_a_short_stall_limit_leaves_time_to_find_out_who_holds_the_others_up() -> None:
    """SCENARIOS 6: a stopped worker stalls everybody's transfer; the others aren't given up for it."""

    async def scenario(scene: Scene) -> None:
        scene.fleet.plane.script = FakePlaneScript(send_s=3600.0)
        updating = asyncio.create_task(scene.update(7, require=2, stall_s=3.0))
        await asyncio.sleep(0.5)
        scene.cut(2)
        scene.fleet.plane.script = FakePlaneScript()
        report = await updating
        assert outcomes(report) == {"1": "ok", "2": "unknown", "3": "ok"}
        assert report.num_attempts == 2
        scene.heal(2)

    stuck: Steps = {"receive_weights": {1: Step(transfer_s=3600.0, num_parts=1)}}
    play([worker(n, stuck) for n in (1, 2, 3)], scenario)


def test_a_partial_update_is_no_error_when_the_others_go_on() -> None:
    """A run doesn't end because one of its workers did; with "stop", or fewer than required, it is told by an error."""

    async def scenario(scene: Scene) -> None:
        trainer = scene.fleet.trainer
        report = await trainer.update_weights(source(), version=7)
        assert (report.ok, report.status, outcomes(report.report)["2"]) == (False, OpStatus.PARTIAL, "failed")
        with pytest.raises(PartialError):
            await trainer.update_weights(source(), version=8, on_failure="stop")
        with pytest.raises(PartialError):
            await trainer.update_weights(source(), version=9, require=2)

    play([worker(1), worker(2, {"finish_update": {0: failing()}})], scenario)


def test_whoever_is_back_is_in_the_group_of_the_next_update() -> None:
    """SCENARIOS 59: it was lost to one update; the next forms a group with it, and it has that version."""

    async def scenario(scene: Scene) -> None:
        updating = asyncio.create_task(scene.update(7))
        await asyncio.sleep(1.0)
        scene.fleet.workers[1].agent.stop("restarted")
        assert (await updating).status is OpStatus.PARTIAL
        async with worker(2, boot="again")(scene.fleet.broker):
            await scene.fleet.client.wait_ready(num_workers=2, deadline_s=30.0)
            report = await scene.update(8)
            assert (report.status, outcomes(report)) == (OpStatus.OK, {"1": "ok", "2": "ok"})
            assert report.epoch == 3
            assert (await scene.update(9)).epoch == 3

    play([worker(1), worker(2, {"pause": {1: Step(latency_s=30.0)}})], scenario)


def test_an_engine_that_breaks_for_good_is_left_out_of_the_second_attempt() -> None:
    """SCENARIOS 7: the update ends in bounded time, and the healthy worker is not held back."""

    async def scenario(scene: Scene) -> None:
        report = await scene.update(7)
        assert outcomes(report) == {"1": "ok", "2": "failed"}
        assert (await scene.generations())[0] is RUNNING

    play([worker(1), worker(2, {"join_group": {0: failing()}})], scenario)


def test_a_cancel_in_the_second_attempt_ends_it() -> None:
    """Nobody is left paused whose weights are whole."""

    async def scenario(scene: Scene) -> None:
        updating = asyncio.create_task(scene.update(7))
        await asyncio.sleep(1.0)
        scene.fleet.workers[1].agent.stop("scaled down")
        await asyncio.sleep(1.0)
        assert (await scene.generations())[0] is PAUSED
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        await asyncio.sleep(5.0)
        assert (await scene.generations())[0] is RUNNING

    steps = {"join_group": {2: Step(latency_s=20.0)}}
    play([worker(1, steps), worker(2, {"pause": {1: Step(latency_s=30.0)}})], scenario)
