"""What goes wrong in this field (SCENARIOS.md): half done ops, torn weights, deaths, versions, caches."""

import asyncio

import pytest

from rlbus.errors import PartialError, VersionRegressionError
from rlbus.schemas import (
    FaultCode,
    Liveness,
    OpStatus,
    Report,
    ResumeGeneration,
    Version,
    WeightsState,
    route_of,
)
from rlbus.testing import Faults, MemoryTransport
from rlbus.transfer.fake import FakePlaneScript
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.scene import PAUSED, RUNNING, Scene, Steps, code_of, outcomes, play, source, w, worker

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("how", ["answers error", "never answers"])
def test_a_pause_that_half_succeeds_is_undone_on_those_that_acked(how: str) -> None:
    """SCENARIOS 1: w1, w2, w4 run again within the deadline, w3 is reported with its reason."""

    async def scenario(scene: Scene) -> None:
        if how == "never answers":
            scene.cut(3)
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(PartialError) as caught:
            await scene.fleet.client.pause(deadline_s=30.0)
        assert asyncio.get_running_loop().time() - began_s <= 30.0
        report: Report = caught.value.report
        bad = "failed" if how == "answers error" else "unknown"
        assert outcomes(report) == {"1": "undone", "2": "undone", "3": bad, "4": "undone"}
        assert report.fault is not None
        assert report.fault.detail["worker"] == "backend/3"
        # A pause that nobody heard of may have happened, so that worker is let go as well.
        expected = ["1", "2", "4"] if how == "answers error" else ["1", "2", "3", "4"]
        assert await scene.addressed(ResumeGeneration) == expected
        view = await scene.fleet.client.status()
        assert [m.worker for m in view.members if m.status.pause is not None] == []
        assert await scene.generations() == [RUNNING] * 4

    steps: Steps | None = {"pause": {1: failing()}} if how == "answers error" else None
    play([worker(1), worker(2), worker(3, steps), worker(4)], scenario)


def test_a_pause_cancelled_in_the_middle_of_its_fan_out_is_undone() -> None:
    """SCENARIOS 1: the caller takes it back while w3 is still at it; nobody stays paused."""

    async def scenario(scene: Scene) -> None:
        pausing = asyncio.create_task(scene.fleet.client.pause(deadline_s=30.0))
        await asyncio.sleep(1.0)
        assert (await scene.generations())[:2] == [PAUSED, PAUSED]
        pausing.cancel()
        await asyncio.wait({pausing})
        await asyncio.sleep(12.0)
        assert await scene.generations() == [RUNNING] * 4
        view = await scene.fleet.client.status()
        assert (view.op_id, [m.worker for m in view.members if m.status.pause is not None]) == (None, [])

    slow: Steps = {"pause": {1: Step(latency_s=8.0)}}
    play([worker(1), worker(2), worker(3, slow), worker(4)], scenario)


def test_a_fleet_update_that_half_succeeds_is_partial_and_never_ok() -> None:
    """SCENARIOS 2: w3 is dirty, paused and not admitted; nobody is resumed under the old version beside the new."""

    async def scenario(scene: Scene) -> None:
        assert (await scene.update(6)).status is OpStatus.OK
        report = await scene.update(7)
        assert report.status is OpStatus.PARTIAL
        assert outcomes(report) == {"1": "ok", "2": "ok", "3": "failed"}
        members = await scene.fleet.members()
        assert [members[w(n)].admitted for n in (1, 2, 3)] == [True, True, False]
        versions = await scene.fleet.client.versions()
        weights = [o.data.weights for o in versions.outcomes if o.data is not None and hasattr(o.data, "weights")]
        assert [(x.state.value, str(x.version)) for x in weights] == [
            ("clean", "0.7"),
            ("clean", "0.7"),
            ("dirty", "None"),
        ]
        assert await scene.generations() == [RUNNING, RUNNING, PAUSED]

    torn: Steps = {"receive_weights": {2: failing(after_parts=2)}}
    play([worker(1), worker(2), worker(3, torn)], scenario)


def test_a_command_that_is_sent_again_joins_the_one_that_runs() -> None:
    """SCENARIOS 3: answers are lost while w1 takes its time; what is sent again joins, and everything is done once."""

    async def scenario(scene: Scene) -> None:
        transport = scene.fleet.workers[0].worker_bus.transport
        assert isinstance(transport, MemoryTransport)
        running = asyncio.create_task(scene.update(7, stall_s=20.0))
        await asyncio.sleep(0.5)
        transport.faults = Faults(drop=1.0, only="_INBOX.>")
        await asyncio.sleep(5.0)
        transport.faults = Faults()
        report = await running
        assert report.status is OpStatus.OK
        again = [route_of(c.body) for c, subject in scene.commands if subject.endswith(".1")]
        assert "pause_generation" in again
        calls = list(scene.fleet.workers[0].engine.calls)
        assert [calls.count(c) for c in ("pause", "receive_weights", "finish_update", "resume")] == [1, 1, 1, 1]

    slow: Steps = {"pause": {1: Step(latency_s=2.0)}, "receive_weights": {1: Step(transfer_s=5.0)}}
    play([worker(1, slow), worker(2)], scenario)


def test_torn_weights_do_not_generate_until_a_full_update_heals_them() -> None:
    """SCENARIOS 4: bucket 3 of 5 fails; w1 stays paused and dirty, refuses resume, and the next update heals it."""

    async def scenario(scene: Scene) -> None:
        report = await scene.update(7)
        assert (report.status, outcomes(report)) == (OpStatus.FAILED, {"1": "failed"})
        assert await scene.generations() == [PAUSED]
        resumed = await scene.fleet.client.resume(check=False)
        assert (outcomes(resumed), code_of(resumed, 1)) == ({"1": "refused"}, FaultCode.DIRTY)
        assert not (await scene.fleet.members())[w(1)].admitted
        report = await scene.update(8)
        assert report.status is OpStatus.OK
        assert await scene.generations() == [RUNNING]
        assert (await scene.fleet.members())[w(1)].admitted

    play([worker(1, {"receive_weights": {1: failing(after_parts=3)}})], scenario)


def test_a_failure_before_the_first_byte_lets_everybody_go() -> None:
    """SCENARIOS 4: nothing was touched, so resume is automatic and the version is what it was."""

    async def scenario(scene: Scene) -> None:
        assert (await scene.update(6)).status is OpStatus.OK
        report = await scene.update(7)
        assert report.status is OpStatus.FAILED
        assert await scene.generations() == [RUNNING, RUNNING]
        members = await scene.fleet.members()
        assert {str(m.status.weights.version) for m in members.values()} == {"0.6"}
        assert all(m.admitted for m in members.values())

    early: Steps = {"receive_weights": {2: failing(after_parts=0)}}
    play([worker(1, early), worker(2, early)], scenario)


@pytest.mark.parametrize("how", ["receive raises", "finish raises", "trainer dies"])
def test_a_failed_update_leaves_no_session_open(how: str) -> None:
    """SCENARIOS 5: the session is aborted on the worker, and the next update starts at once and is ok."""

    async def scenario(scene: Scene) -> None:
        if how == "trainer dies":
            scene.fleet.plane.script = FakePlaneScript(send_s=1.0, send_parts=2, fail_send="out of memory")
            scene.fleet.plane.script.fail_after_parts = 1
        report = await scene.update(7)
        assert report.status is OpStatus.FAILED
        assert scene.fleet.workers[0].engine.session is None
        status = (await scene.fleet.members())[w(1)].status
        assert status.weights.version is None
        scene.fleet.plane.script = FakePlaneScript()
        began_s = asyncio.get_running_loop().time()
        assert (await scene.update(8)).status is OpStatus.OK
        assert asyncio.get_running_loop().time() - began_s < 1.0

    steps: dict[str, Steps] = {
        "receive raises": {"receive_weights": {1: failing(after_parts=1)}},
        "finish raises": {"finish_update": {1: failing()}},
        "trainer dies": {"receive_weights": {1: Step(transfer_s=5.0)}},
    }
    play([worker(1, steps[how])], scenario)


def test_after_a_death_no_op_addresses_the_dead_worker() -> None:
    """SCENARIOS 7: versions, flush, pause, resume and update are ok at once, over the survivors, in the next epoch."""

    async def scenario(scene: Scene) -> None:
        assert (await scene.update(6)).epoch == 1
        scene.cut(2)
        await asyncio.sleep(30.0)
        assert (await scene.fleet.members())[w(2)].liveness is Liveness.DEAD
        scene.commands.clear()
        began_s = asyncio.get_running_loop().time()
        client = scene.fleet.client
        reports = [await client.versions(), await client.flush(), await client.pause(), await client.resume()]
        reports.append(await scene.update(7))
        assert asyncio.get_running_loop().time() - began_s < 1.0
        assert [(r.status, outcomes(r)) for r in reports] == [(OpStatus.OK, {"1": "ok", "3": "ok"})] * 5
        assert reports[-1].epoch == 2
        await asyncio.sleep(0.1)
        to_two = [c for c, subject in scene.commands if subject.endswith(".2") or "2" in (c.members or ())]
        assert [route_of(c.body) for c in to_two] == []

    play([worker(1), worker(2), worker(3)], scenario)


def test_a_worker_that_is_back_is_taken_into_the_next_group() -> None:
    """SCENARIOS 59: it was away, it returns, and the next update forms an epoch with it in."""

    async def scenario(scene: Scene) -> None:
        assert (await scene.update(6)).epoch == 1
        scene.cut(2)
        await asyncio.sleep(30.0)
        assert (await scene.update(7)).epoch == 2
        scene.heal(2)
        await asyncio.sleep(10.0)
        members = await scene.fleet.members()
        behind = "version 0.6, the fleet is at 0.7; waits for the next update: the trainer keeps no snapshot of this"
        assert (members[w(2)].admitted, members[w(2)].reason) == (False, f"{behind} version")
        report = await scene.update(8)
        assert (report.epoch, outcomes(report)) == (3, {"1": "ok", "2": "ok", "3": "ok"})
        assert all(m.admitted for m in (await scene.fleet.members()).values())

    play([worker(1), worker(2), worker(3)], scenario)


def test_a_version_is_never_shown_before_the_update_is_complete() -> None:
    """SCENARIOS 9: the first chunk carried v7, the second failed: unknown, last good 6, dirty; never 7."""

    async def scenario(scene: Scene) -> None:
        await scene.update(6)
        await scene.update(7)
        weights = (await scene.fleet.members())[w(1)].status.weights
        assert (weights.state, weights.version, weights.last_good) == (WeightsState.DIRTY, None, Version(step=6))
        assert (await scene.fleet.client.status()).version == Version(step=6)

    play([worker(1, {"receive_weights": {2: failing(after_parts=1)}})], scenario)


def test_an_older_version_is_refused_and_a_rollback_has_to_be_asked_for() -> None:
    """SCENARIOS 12: newer, not only different. With allow_rollback it is accepted, and the fleet is at it."""

    async def scenario(scene: Scene) -> None:
        await scene.update(0, incarnation=1)
        await scene.update(120, incarnation=1)
        restarted = scene.fleet.trainer
        restarted.version = None  # a trainer that was restarted without its history
        with pytest.raises(VersionRegressionError):
            await restarted.update_weights(source(), version=0, incarnation=1)
        assert (await scene.fleet.client.status()).version == Version(incarnation=1, step=120)
        report = await scene.update(0, incarnation=1, allow_rollback=True)
        assert report.status is OpStatus.OK
        view = await scene.fleet.client.status()
        assert view.version == Version(incarnation=1, step=0)
        assert all(m.admitted for m in view.members)

    play([worker(1)], scenario)


def test_no_cache_entry_of_the_old_weights_survives_an_update() -> None:
    """SCENARIOS 14: the flush comes after the commit, on every worker, before the resume."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        for rig in scene.fleet.workers:
            calls = [c for c in rig.engine.calls if c in ("finish_update", "flush_cache", "resume")]
            assert calls == ["finish_update", "flush_cache", "resume"]

    play([worker(1), worker(2)], scenario)


def test_a_flush_that_fails_fails_the_op_on_that_worker() -> None:
    """SCENARIOS 14: it has the new weights and old cache entries, so it doesn't generate."""

    async def scenario(scene: Scene) -> None:
        report = await scene.update(7)
        assert report.status is OpStatus.PARTIAL
        assert (outcomes(report), code_of(report, 2)) == ({"1": "ok", "2": "failed"}, FaultCode.FLUSH_FAILED)
        assert await scene.generations() == [RUNNING, PAUSED]
        assert (await scene.update(8)).status is OpStatus.OK
        assert await scene.generations() == [RUNNING, RUNNING]

    bad: Steps = {"flush_cache": {1: failing(code=FaultCode.FLUSH_FAILED)}}
    play([worker(1), worker(2, bad)], scenario)
