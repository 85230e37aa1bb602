"""Sleep of the fleet: all or nobody, out of admission and back, no update to weights that sleep."""

import asyncio

import pytest

from rlbus._memory import NO_FAULTS, Faults
from rlbus.controller.answers import StepAnswer
from rlbus.controller.causes import fault
from rlbus.controller.sleep_verb import to_wake
from rlbus.errors import AsleepError, ConfigError, PartialError, RefusedError
from rlbus.schemas import (
    Command,
    FaultCode,
    FlushCache,
    InitGroup,
    MemberView,
    OpStatus,
    Outcome,
    PauseGeneration,
    ReceiveWeights,
    Sleep,
    SleepTag,
    Target,
    Version,
    WakeUp,
    WeightsState,
)
from rlbus.testing import MemoryTransport
from rlbus.workers.engines.fake import ROUTES
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller import failover_stage
from tests.unit.controller.failover_stage import Stage
from tests.unit.controller.scene import PAUSED, RUNNING, Scene, code_of, outcomes, play, source, w, worker
from tests.unit.controller.test_catching_up import memory, until_admitted

pytestmark = pytest.mark.unit

WEIGHTS, KV = SleepTag.WEIGHTS, SleepTag.KV_CACHE
BOTH = (KV, WEIGHTS)
V7 = Version(step=7)


def sleeping(scene: Scene) -> list[tuple[SleepTag, ...]]:
    """What the engines themselves say."""
    return [tuple(sorted(rig.engine.memory.asleep)) for rig in scene.fleet.workers]


def test_worker_that_was_reported_busy_is_not_put_to_sleep_by_a_late_copy_of_the_command() -> None:
    """Its answer takes longer than the fan-out waits before it sends again, and its place is free by then."""

    async def scenario(scene: Scene) -> None:
        busy = scene.fleet.workers[0]
        flushing = busy.post(FlushCache())
        await flushing.until(lambda sent: sent.is_accepted)
        transport = busy.worker_bus.transport
        assert isinstance(transport, MemoryTransport)
        transport.faults = Faults(delay_s=(1.4, 1.4), only="_INBOX.>")
        report = await scene.fleet.client.sleep(check=False)
        transport.faults = NO_FAULTS
        assert (outcomes(report), code_of(report, 1)) == ({"1": "refused", "2": "undone"}, FaultCode.BUSY)
        await asyncio.sleep(10.0)
        assert sleeping(scene) == [(), ()]
        assert await scene.generations() == [RUNNING, RUNNING]

    play([worker(1, {"flush_cache": {1: Step(latency_s=1.0)}}), worker(2)], scenario)


async def member(scene: Scene, number: int) -> MemberView:
    await asyncio.sleep(0.3)
    return (await scene.fleet.members())[w(number)]


def test_the_fleet_sleeps_leaves_admission_and_joins_it_again() -> None:
    """With the reason while it sleeps, also after a partial wake."""

    async def scenario(scene: Scene) -> None:
        fleet = scene.fleet.client
        report = await fleet.sleep()
        assert (report.op, report.status, outcomes(report)) == ("sleep", OpStatus.OK, {"1": "ok", "2": "ok"})
        assert sleeping(scene) == [BOTH, BOTH]
        seen = await member(scene, 1)
        assert (seen.admitted, seen.reason, seen.status.asleep) == (False, "asleep: kv_cache, weights", BOTH)
        assert (await fleet.wake(tags=["weights"])).status is OpStatus.OK
        seen = await member(scene, 1)
        assert (seen.admitted, seen.reason) == (False, "asleep: kv_cache")
        assert await scene.generations() == [PAUSED, PAUSED]
        report = await fleet.wake()
        assert (report.op, report.status) == ("wake", OpStatus.OK)
        assert (await member(scene, 1)).admitted
        assert await scene.generations() == [RUNNING, RUNNING]

    play([worker(1), worker(2)], scenario)


def test_a_worker_that_falls_asleep_is_not_admitted_any_more() -> None:
    """SCENARIOS 41: already while it moves its weights."""

    async def scenario(scene: Scene) -> None:
        asking = asyncio.ensure_future(scene.fleet.client.sleep())
        seen = await member(scene, 1)
        assert (seen.admitted, seen.reason, seen.status.asleep) == (False, "falls asleep", ())
        await asking

    play([worker(1, {"sleep": {1: Step(latency_s=2.0)}})], scenario)


@pytest.mark.parametrize("bad", [failing(), Step(hangs=True)], ids=["fails", "hangs"])
def test_a_sleep_that_half_succeeds_is_undone_on_those_that_did(bad: Step) -> None:
    """Nobody sleeps, everybody generates and is admitted; the report names the one that failed."""

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.sleep(deadline_s=8.0, check=False)
        assert report.status is OpStatus.FAILED
        assert outcomes(report)["1"] == outcomes(report)["3"] == "undone"
        assert outcomes(report)["2"] in ("failed", "unknown")
        assert await scene.addressed(WakeUp) == (["1", "3"] if outcomes(report)["2"] == "failed" else ["1", "2", "3"])
        assert sleeping(scene) == [(), (), ()]
        assert await scene.generations() == [RUNNING] * 3
        await asyncio.sleep(0.3)
        assert all(m.admitted for m in (await scene.fleet.members()).values())

    play([worker(1), worker(2, {"sleep": {1: bad}}), worker(3)], scenario)


def test_an_undo_wakes_only_what_was_awake_before() -> None:
    """Memory that somebody else was given isn't taken back by our failure."""

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.sleep(Target(workers=(w(1),)), tags=["kv_cache"])
        await asyncio.sleep(0.3)
        report = await scene.fleet.client.sleep(check=False)
        assert outcomes(report) == {"1": "undone", "2": "failed"}
        assert sleeping(scene) == [(KV,), ()]
        assert await scene.generations() == [PAUSED, RUNNING]

    play([worker(1), worker(2, {"sleep": {1: failing()}})], scenario)


def test_who_is_woken_after_a_failure() -> None:
    """Who did as told and who may have; each with what it had awake."""
    ok, silent = StepAnswer(Outcome.OK), StepAnswer(Outcome.UNKNOWN, fault(FaultCode.NO_ACK, "silent"))
    bad = StepAnswer(Outcome.FAILED, fault(FaultCode.ENGINE_FAILED, "broken"))
    no = StepAnswer(Outcome.REFUSED, fault(FaultCode.BUSY, "busy"))
    answers = {w(1): ok, w(2): silent, w(3): bad, w(4): no, w(5): ok, w(6): ok}
    before = {w(5): (KV,), w(6): BOTH}
    assert to_wake(answers, before, None) == {None: [w(1), w(2)], (WEIGHTS,): [w(5)]}
    assert to_wake(answers, before, (KV,)) == {(KV,): [w(1), w(2)]}


def test_a_caller_that_goes_away_takes_its_sleep_back() -> None:
    """Who was asleep already is woken."""

    async def scenario(scene: Scene) -> None:
        asking = asyncio.ensure_future(scene.fleet.client.sleep())
        await asyncio.sleep(1.0)
        asking.cancel()
        await asyncio.wait({asking})
        await asyncio.sleep(5.0)
        assert sleeping(scene) == [(), ()]
        assert await scene.generations() == [RUNNING, RUNNING]

    play([worker(1), worker(2, {"sleep": {1: Step(latency_s=3.0)}})], scenario)


def test_discarded_weights_are_not_undone() -> None:
    """There is nothing to wake to: who did sleeps, and the report says so."""

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.sleep(level=2, check=False)
        assert (report.status, outcomes(report)) == (OpStatus.PARTIAL, {"1": "ok", "2": "failed"})
        assert await scene.addressed(WakeUp) == []
        seen = await member(scene, 1)
        assert (seen.status.weights.state, seen.status.asleep) == (WeightsState.DIRTY, BOTH)

    play([worker(1), worker(2, {"sleep": {1: failing()}})], scenario)


def test_an_update_is_refused_while_weights_sleep_and_names_who() -> None:
    """SCENARIOS 37: nobody is paused, no group is formed; without the sleeper in the target it goes well."""

    async def scenario(scene: Scene) -> None:
        await scene.update(6)
        await scene.fleet.client.sleep(Target(workers=(w(2),)))
        await asyncio.sleep(0.3)
        scene.commands.clear()
        with pytest.raises(AsleepError, match=r"backend/2.*rlbus wake --tags weights"):
            await scene.fleet.trainer.update_weights(source(), version=7)
        with pytest.raises(RefusedError, match="backend/2"):
            await scene.fleet.client.reload("/w")
        for body in (PauseGeneration, InitGroup, ReceiveWeights):
            assert await scene.addressed(body) == []
        report = await scene.update(7, target=Target(workers=(w(1),)))
        assert outcomes(report) == {"1": "ok"}

    play([worker(1), worker(2)], scenario)


def test_an_update_comes_to_weights_that_are_awake_and_does_not_run_the_worker() -> None:
    """The trainer shares the GPU: weights awake, update, then the cache; nothing is paused or resumed in between."""

    async def scenario(scene: Scene) -> None:
        fleet = scene.fleet.client
        await fleet.sleep()
        await fleet.wake(tags=["weights"])
        await asyncio.sleep(0.3)
        report = await scene.update(7)
        assert (report.status, outcomes(report)) == (OpStatus.OK, {"1": "ok", "2": "ok"})
        assert sleeping(scene) == [(KV,), (KV,)]
        assert await scene.generations() == [PAUSED, PAUSED]
        await fleet.wake()
        assert await scene.generations() == [RUNNING, RUNNING]
        seen = await member(scene, 2)
        assert (seen.admitted, seen.status.weights.version) == (True, V7)

    play([worker(1), worker(2)], scenario)


def test_nobody_is_caught_up_while_asleep() -> None:
    """It stays behind, says that it sleeps, and is caught up once it is awake."""

    async def scenario(scene: Scene) -> None:
        await scene.update(6)
        await scene.fleet.client.sleep(Target(workers=(w(2),)))
        await asyncio.sleep(0.3)
        await scene.update(7, target=Target(workers=(w(1),)))
        scene.commands.clear()
        await asyncio.sleep(20.0)
        seen = await member(scene, 2)
        assert seen.reason == "asleep: kv_cache, weights"
        assert scene.commands == []
        await scene.fleet.client.wake(Target(workers=(w(2),)))
        assert (await until_admitted(scene, 2)).status.weights.version == V7

    play([worker(1), worker(2)], scenario, snapshots=memory())


def test_a_fleet_with_an_engine_that_has_no_sleep_is_refused_as_a_whole() -> None:
    """Before anybody sleeps; the fault names the one that can't."""

    async def scenario(scene: Scene) -> None:
        with pytest.raises(RefusedError, match=r"backend/2 .* doesn't serve sleep"):
            await scene.fleet.client.sleep()
        with pytest.raises(RefusedError, match="doesn't serve wake_up"):
            await scene.fleet.client.wake()
        assert sleeping(scene) == [(), ()]

    play([worker(1), worker(2, routes=ROUTES - {"sleep", "wake_up"})], scenario)


def test_a_wake_that_fails_on_one_leaves_the_others_awake() -> None:
    """A partial report; the second try wakes the rest."""

    async def scenario(scene: Scene) -> None:
        fleet = scene.fleet.client
        await fleet.sleep()
        with pytest.raises(PartialError):
            await fleet.wake()
        assert sleeping(scene) == [(), BOTH]
        assert (await fleet.wake()).status is OpStatus.OK
        assert await scene.generations() == [RUNNING, RUNNING]

    play([worker(1), worker(2, {"wake_up": {1: failing()}})], scenario)


def test_a_resume_while_asleep_is_refused_on_the_sleeper_alone() -> None:
    """Forced or not; the others go on."""

    async def scenario(scene: Scene) -> None:
        fleet = scene.fleet.client
        await fleet.pause()
        await fleet.sleep(Target(workers=(w(1),)))
        report = await fleet.resume(force=True, check=False)
        assert (outcomes(report), code_of(report, 1)) == ({"1": "refused", "2": "ok"}, FaultCode.ASLEEP)
        assert await scene.generations() == [PAUSED, RUNNING]

    play([worker(1), worker(2)], scenario)


@pytest.mark.parametrize("tags", [["kv"], [], "weights"])
def test_a_word_that_is_no_tag_is_found_before_anything_is_sent(tags: list[str]) -> None:
    """As is no word at all, and a text that would be taken for its letters."""

    async def scenario(scene: Scene) -> None:
        with pytest.raises(ConfigError, match="tags"):
            await scene.fleet.client.sleep(tags=tags)
        with pytest.raises(ConfigError, match="tags"):
            await scene.fleet.client.wake(tags=tags)

    play([worker(1)], scenario)


def test_a_half_done_sleep_of_a_dead_controller_is_undone_by_the_next() -> None:
    """Who fell asleep is woken, and the op's report says how it ended."""

    async def scenario(stage: Stage) -> None:
        def kill(command: Command) -> None:
            if isinstance(command.body, Sleep):
                asyncio.get_running_loop().call_later(1.0, stage.kill, stage.processes[0])
                stage.on_command = lambda _: None

        stage.on_command = kill
        report = await stage.client.sleep(deadline_s=60.0, check=False)
        assert {o.outcome for o in report.outcomes} <= {Outcome.UNDONE}
        assert report.fault is not None
        assert report.fault.code is FaultCode.CONTROLLER_LOST
        assert [rig.engine.memory.asleep for rig in stage.workers] == [frozenset(), frozenset()]
        assert await stage.generations() == [RUNNING, RUNNING]

    failover_stage.play([worker(1), worker(2, {"sleep": {1: Step(latency_s=20.0)}})], scenario)


def test_a_sleep_that_was_done_when_its_controller_died_is_ok() -> None:
    """The next one reads it from the workers."""

    async def scenario(stage: Stage) -> None:
        def kill(command: Command) -> None:
            if isinstance(command.body, Sleep):
                asyncio.get_running_loop().call_later(0.5, stage.kill, stage.processes[0])
                stage.on_command = lambda _: None

        stage.on_command = kill
        report = await stage.client.sleep(deadline_s=60.0, check=False)
        assert {o.outcome for o in report.outcomes} == {Outcome.OK}
        assert await stage.generations() == [PAUSED, PAUSED]
        assert (await stage.client.wake()).status is OpStatus.OK
        assert await stage.generations() == [RUNNING, RUNNING]

    failover_stage.play([worker(1), worker(2, {"sleep": {1: Step(latency_s=1.0)}})], scenario)
