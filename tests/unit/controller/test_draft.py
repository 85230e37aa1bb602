"""Updates of draft models over a fleet: an op of their own, with versions that aren't the fleet's. In virtual time."""

import asyncio
from typing import Any

import pytest

from rlbus.bus import Bus
from rlbus.errors import RefusedError, VersionRegressionError
from rlbus.schemas import (
    Command,
    CommitWeights,
    Fault,
    FaultCode,
    OpStatus,
    PauseGeneration,
    PrepareDraftUpdate,
    Report,
    ResumeGeneration,
    Target,
    TensorSpec,
    Version,
    WeightsState,
    WeightsView,
)
from rlbus.transfer.fake import FakeSource
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller import failover_stage
from tests.unit.controller.failover_stage import Stage
from tests.unit.controller.scene import PAUSED, RUNNING, Scene, Steps, Worker, code_of, outcomes, play, w, worker

pytestmark = pytest.mark.unit

TENSORS = (
    TensorSpec(name="draft.embed", dtype="float32", shape=(64, 4)),
    TensorSpec(name="draft.head", dtype="float32", shape=(64, 4)),
)
BROKEN = Fault(code=FaultCode.ENGINE_FAILED, message="it broke")
UNKNOWN = WeightsView(state=WeightsState.UNKNOWN)


def drafting(number: int, steps: Steps | None = None) -> Worker:
    return worker(number, steps, draft_tensors=TENSORS)


async def update_draft(scene: Scene, step: int, **options: Any) -> Report:
    return await scene.fleet.update(step, TENSORS, draft=True, **options)


async def drafts(scene: Scene) -> dict[str, tuple[str, Version | None]]:
    """State and version of each worker's draft, as the controller's view has them."""
    members = await scene.fleet.members()
    found = {member.worker.partition("/")[2]: member.status.draft or UNKNOWN for member in members.values()}
    return {number: (view.state.value, view.version) for number, view in found.items()}


def test_draft_is_updated_on_everybody_and_the_fleet_s_version_stays() -> None:
    """Its steps may be below the target's; it is an op of its own name; nobody falls behind or out by it."""

    async def scenario(scene: Scene) -> None:
        assert (await scene.update(6)).status is OpStatus.OK
        report = await update_draft(scene, 2)
        assert (report.op, report.status, report.version) == ("update_draft", OpStatus.OK, Version(step=2))
        assert outcomes(report) == {"1": "ok", "2": "ok"}
        assert await drafts(scene) == {"1": ("clean", Version(step=2)), "2": ("clean", Version(step=2))}
        view = await scene.fleet.client.status()
        assert view.version == Version(step=6)
        assert [(m.admitted, m.status.weights.version) for m in view.members] == [(True, Version(step=6))] * 2
        assert (scene.fleet.trainer.version, scene.fleet.trainer.draft_version) == (Version(step=6), Version(step=2))
        assert (await scene.update(7)).status is OpStatus.OK
        assert await drafts(scene) == {"1": ("clean", Version(step=2)), "2": ("clean", Version(step=2))}
        assert [set(r.engine.draft_held.values()) for r in scene.fleet.workers] == [{Version(step=2)}] * 2

    play([drafting(1), drafting(2)], scenario)


def test_worker_without_a_draft_is_named_before_anybody_is_paused() -> None:
    """And how to address the others, which then works."""

    async def scenario(scene: Scene) -> None:
        with pytest.raises(RefusedError) as caught:
            await scene.fleet.trainer.update_weights(FakeSource(TENSORS), version=1, draft=True)
        assert caught.value.code is FaultCode.NO_ROUTE
        assert "backend/2 (fake)" in str(caught.value)
        assert await scene.addressed(PauseGeneration) == []
        report = await update_draft(scene, 1, target=Target(workers=(w(1),)))
        assert (report.status, outcomes(report)) == (OpStatus.OK, {"1": "ok"})
        assert await drafts(scene) == {"1": ("clean", Version(step=1)), "2": ("unknown", None)}
        assert [m.admitted for m in (await scene.fleet.members()).values()] == [True, True]

    play([drafting(1), worker(2)], scenario)


def test_torn_draft_is_paused_and_out_until_the_next_update_of_the_draft() -> None:
    """The others go on with the new one; an update of the target doesn't heal it, and says so."""

    async def scenario(scene: Scene) -> None:
        assert (await scene.update(6)).status is OpStatus.OK
        report = await update_draft(scene, 1, on_failure="stop")
        assert outcomes(report) == {"1": "ok", "2": "failed"}
        assert await drafts(scene) == {"1": ("clean", Version(step=1)), "2": ("dirty", None)}
        torn = (await scene.fleet.members())[w(2)]
        assert (torn.admitted, torn.status.weights.version) == (False, Version(step=6))
        assert await scene.generations() == [RUNNING, PAUSED]
        await asyncio.sleep(60.0)
        assert await scene.generations() == [RUNNING, PAUSED]
        report = await scene.update(7)
        assert (outcomes(report), code_of(report, 2)) == ({"1": "ok", "2": "failed"}, FaultCode.DIRTY)
        assert await scene.generations() == [RUNNING, PAUSED]
        assert (await update_draft(scene, 2)).status is OpStatus.OK
        assert await scene.generations() == [RUNNING, RUNNING]
        assert [m.admitted for m in (await scene.fleet.members()).values()] == [True, True]

    play([drafting(1), drafting(2, {"finish_update": {2: Step(fault=BROKEN)}})], scenario)


def test_worker_that_keeps_its_old_draft_goes_on() -> None:
    """Untouched, beside others with the new one: the tokens are the same, so it is let go and stays admitted."""

    async def scenario(scene: Scene) -> None:
        assert (await update_draft(scene, 1)).status is OpStatus.OK
        report = await update_draft(scene, 2, on_failure="stop")
        assert outcomes(report)["1"] == "ok"
        assert outcomes(report)["2"] != "ok"
        assert await drafts(scene) == {"1": ("clean", Version(step=2)), "2": ("clean", Version(step=1))}
        assert await scene.generations() == [RUNNING, RUNNING]
        assert [m.admitted for m in (await scene.fleet.members()).values()] == [True, True]

    untouched = Step(fault=BROKEN, claims_touched=False)
    play([drafting(1), drafting(2, {"finish_update": {2: untouched}})], scenario)


def test_version_of_a_draft_grows_on_whoever_gets_it() -> None:
    """An older one is refused unless a rollback is meant; who lacks it can be given the same one alone."""

    async def scenario(scene: Scene) -> None:
        assert (await update_draft(scene, 5)).status is OpStatus.OK
        trainer = scene.fleet.trainer
        for step in (4, 5):
            with pytest.raises(VersionRegressionError):
                await trainer.update_weights(FakeSource(TENSORS), version=step, draft=True)
        assert (await update_draft(scene, 3, allow_rollback=True)).status is OpStatus.OK
        assert await drafts(scene) == {"1": ("clean", Version(step=3))}

    play([drafting(1)], scenario)


def test_tensors_that_are_not_the_draft_s_are_refused_before_anybody_is_paused() -> None:
    """The target's, say; the first one is named."""

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.update(1, DEFAULT_TENSORS, draft=True)
        assert (report.status, code_of(report, 1)) == (OpStatus.REFUSED, FaultCode.MANIFEST_MISMATCH)
        assert await scene.addressed(PauseGeneration) == []
        assert await scene.addressed(PrepareDraftUpdate) == ["1"]

    play([drafting(1)], scenario)


@pytest.mark.parametrize("at", [PauseGeneration, CommitWeights, ResumeGeneration])
def test_next_leader_settles_an_update_of_the_draft_as_one(at: type[Any]) -> None:
    """Nobody stays paused on a whole draft, and the draft's version never becomes the fleet's."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(6)).status is OpStatus.OK
        first = stage.processes[0]
        spy = Bus(stage.broker.connect())

        def look(command: Command, _: object) -> None:
            if isinstance(command.body, at) and not first.is_killed:
                stage.kill(first)

        async with spy:
            spy.subscribe("dyn.test.*.rl.>", Command, look)
            update = await stage.trainer.update_weights(
                FakeSource(TENSORS), version=9, draft=True, check=False, deadline_s=60.0
            )
        report = update.report
        assert report.op == "update_draft"
        assert await stage.generations() == [RUNNING, RUNNING]
        found = [rig.agent.status().draft for rig in stage.workers]
        is_done = report.status is OpStatus.OK
        assert is_done is (at is not PauseGeneration)
        assert [view.version for view in found if view is not None] == [Version(step=9) if is_done else None] * 2
        view = await stage.client.status()
        assert (view.version, [m.admitted for m in view.members]) == (Version(step=6), [True, True])
        assert (await stage.update(7)).status is OpStatus.OK

    failover_stage.play([drafting(1), drafting(2)], scenario)
