"""The draft model at one worker: versions of its own, the same rules as for the target's weights. In virtual time."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlbus.schemas import (
    DRAFT_ROUTE,
    ChecksumsData,
    CommandBody,
    CommitWeights,
    DraftChanged,
    Fault,
    FaultCode,
    FlushCache,
    Generation,
    GetChecksums,
    GetVersion,
    InitGroup,
    PauseGeneration,
    PrepareDraftUpdate,
    PrepareWeightsUpdate,
    PutManifest,
    ReceiveWeights,
    Result,
    ResultStatus,
    ResumeGeneration,
    Sleep,
    TensorSpec,
    Version,
    WakeUp,
    WeightsChanged,
    WeightsData,
    WeightsState,
    WeightsView,
)
from rlbus.testing import run
from rlbus.transfer.fake import fake_sum
from rlbus.transfer.manifest import digest, pages
from rlbus.workers.engines.fake import DEFAULT_TENSORS, FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.ledger import opened
from rlbus.workers.testing import PAGE_BYTES, Rig, code_of, on_worker, updated, worker_on_bus

pytestmark = pytest.mark.unit

V1, V2 = Version(step=1), Version(step=2)
D7, D8 = Version(step=7), Version(step=8)
TENSORS = (
    TensorSpec(name="draft.embed", dtype="float32", shape=(64, 4)),
    TensorSpec(name="draft.head", dtype="float32", shape=(64, 4)),
)
BROKEN = Step(fault=Fault(code=FaultCode.TRANSFER_FAILED, message="the link broke"), after_parts=1)
LATE = Step(fault=Fault(code=FaultCode.TRANSFER_FAILED, message="no link"), after_parts=0)


def clean(version: Version | None) -> WeightsView:
    return WeightsView(state=WeightsState.CLEAN, version=version, last_good=version)


def dirty(last_good: Version | None) -> WeightsView:
    return WeightsView(state=WeightsState.DIRTY, last_good=last_good)


def on_drafting(
    scenario: Callable[[Rig], Coroutine[Any, Any, None]], steps: Mapping[str, Mapping[int, Step]] | None = None
) -> None:
    """Run a scenario against one worker that has a draft model."""

    async def main() -> None:
        engine = FakeEngine(FakeScript({} if steps is None else steps), draft_tensors=TENSORS)
        async with worker_on_bus(engine) as rig:
            await scenario(rig)
        assert engine.violations == []

    run(main())


async def prepare(rig: Rig, version: Version, tensors: Sequence[TensorSpec] = TENSORS, op_id: str = "d") -> Result:
    for page in pages(tensors, PAGE_BYTES):
        await rig.send(PutManifest(page=page))
    body = PrepareDraftUpdate(version=version, manifest_digest=digest(tensors))
    return await rig.send(body, op_id=f"{op_id}-prepare")


def receive_body(version: Version, op_id: str = "d", *, is_draft: bool = True) -> ReceiveWeights:
    return ReceiveWeights(
        update_op_id=op_id,
        epoch=1,
        version=version,
        manifest_digest=digest(TENSORS),
        bucket_bytes=1024,
        is_draft=is_draft,
    )


async def until_received(rig: Rig, version: Version, op_id: str = "d") -> Result:
    """Everything of an update of the draft up to its commit."""
    for done in (
        await prepare(rig, version, op_id=op_id),
        await rig.send(InitGroup(plan=rig.plan(1)), op_id=f"{op_id}-join"),
        await rig.send(PauseGeneration(owner=f"{op_id}-pause", lease_s=30.0), op_id=f"{op_id}-pause"),
    ):
        assert done.status is ResultStatus.OK, done.fault
    return await rig.send(receive_body(version, op_id), op_id=f"{op_id}-receive")


async def draft_updated(rig: Rig, version: Version, op_id: str = "d") -> Result:
    """A whole update of the draft; what its commit said."""
    assert (await until_received(rig, version, op_id)).status is ResultStatus.OK
    committed = await rig.commit(version, op_id)
    for body in (FlushCache(), ResumeGeneration()):
        assert (await rig.send(body)).status is ResultStatus.OK
    return committed


async def views(rig: Rig) -> tuple[WeightsView, WeightsView | None]:
    """What the worker says of both, in its answer and in its status."""
    data = (await rig.send(GetVersion())).data
    assert isinstance(data, WeightsData)
    await asyncio.sleep(0.1)
    assert (rig.last.status.weights, rig.last.status.draft) == (data.weights, data.draft)
    return data.weights, data.draft


def test_draft_has_a_version_of_its_own_beside_the_target_s() -> None:
    """Either is updated, older or newer than the other, and leaves the other as it is; events tell of each apart."""

    async def scenario(rig: Rig) -> None:
        assert DRAFT_ROUTE in rig.agent.descriptor.routes
        assert await views(rig) == (clean(None), clean(None))
        await updated(rig, V2)
        committed = await draft_updated(rig, V1)
        assert committed.data == WeightsData(weights=clean(V2), draft=clean(V1))
        assert await views(rig) == (clean(V2), clean(V1))
        await updated(rig, Version(step=3), op_id="u2", epoch=2)
        assert await views(rig) == (clean(Version(step=3)), clean(V1))
        assert rig.engine.label == Version(step=3)
        assert set(rig.engine.draft_held.values()) == {V1}
        drafts = [(e.state, e.version) for e in rig.events if isinstance(e, DraftChanged)]
        assert drafts == [(WeightsState.UPDATING, None), (WeightsState.CLEAN, V1)]
        targets = [e.version for e in rig.events if isinstance(e, WeightsChanged) if e.version is not None]
        assert targets == [V2, Version(step=3)]

    on_drafting(scenario)


def test_torn_draft_keeps_the_worker_paused_until_a_whole_one_came() -> None:
    """Not its lease, nor a resume, nor an update of the target lets it go on; the refusal says which model is torn."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V1)
        await draft_updated(rig, D7)
        assert code_of(await until_received(rig, D8, "e")) is FaultCode.TRANSFER_FAILED
        assert await views(rig) == (clean(V1), dirty(D7))
        refused = await rig.send(ResumeGeneration())
        assert code_of(refused) is FaultCode.DIRTY
        assert refused.fault is not None
        assert "draft" in refused.fault.message
        await asyncio.sleep(60.0)
        assert (rig.engine.requests.is_paused, rig.last.status.generation) == (True, Generation.PAUSED)
        await rig.until_paused(V2, DEFAULT_TENSORS, "u2", epoch=2)
        await rig.receive(V2, DEFAULT_TENSORS, "u2", epoch=2).result()
        assert (await rig.commit(V2, "u2")).status is ResultStatus.OK
        assert code_of(await rig.send(ResumeGeneration())) is FaultCode.DIRTY
        assert await views(rig) == (clean(V2), dirty(D7))
        await rig.send(InitGroup(plan=rig.plan(3)))
        assert (await prepare(rig, D8, op_id="f")).status is ResultStatus.OK
        received = await rig.send(
            ReceiveWeights(
                update_op_id="f",
                epoch=3,
                version=D8,
                manifest_digest=digest(TENSORS),
                bucket_bytes=1024,
                is_draft=True,
            )
        )
        assert received.status is ResultStatus.OK
        assert (await rig.commit(D8, "f")).status is ResultStatus.OK
        assert (await rig.send(ResumeGeneration())).status is ResultStatus.OK
        assert await views(rig) == (clean(V2), clean(D8))

    on_drafting(scenario, {"receive_weights": {3: BROKEN}})


def test_draft_that_got_no_byte_is_what_it_was_and_the_worker_goes_on() -> None:
    """Nor is the target touched."""

    async def scenario(rig: Rig) -> None:
        await draft_updated(rig, D7)
        assert code_of(await until_received(rig, D8, "e")) is FaultCode.TRANSFER_FAILED
        assert await views(rig) == (clean(None), clean(D7))
        assert (await rig.send(ResumeGeneration())).status is ResultStatus.OK

    on_drafting(scenario, {"receive_weights": {2: LATE}})


def test_received_draft_that_nobody_commits_is_torn_at_the_end_of_the_lease() -> None:
    """Its controller is gone: the session is closed, and the worker stays paused."""

    async def scenario(rig: Rig) -> None:
        assert (await until_received(rig, D7)).status is ResultStatus.OK
        await asyncio.sleep(60.0)
        assert await views(rig) == (clean(None), dirty(None))
        assert rig.engine.session is None
        assert rig.engine.requests.is_paused

    on_drafting(scenario)


def test_draft_is_prepared_against_its_own_manifest_and_version() -> None:
    """Refused before anything: the target's tensors, an older version; and a base that it hasn't."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V2)
        assert code_of(await prepare(rig, D7, DEFAULT_TENSORS)) is FaultCode.MANIFEST_MISMATCH
        await draft_updated(rig, D7)
        assert code_of(await prepare(rig, V1, op_id="e")) is FaultCode.VERSION_REGRESSION
        body = PrepareDraftUpdate(version=D8, manifest_digest=digest(TENSORS), base_version=V2)
        assert code_of(await rig.send(body)) is FaultCode.WRONG_STATE
        other = PrepareWeightsUpdate(version=D8, manifest_digest=digest(TENSORS))
        assert code_of(await rig.send(other)) is FaultCode.MANIFEST_MISMATCH

    on_drafting(scenario)


def test_what_was_prepared_for_one_model_is_not_received_by_the_other() -> None:
    """Also with the same version and manifest."""

    async def scenario(rig: Rig) -> None:
        await prepare(rig, D7)
        await rig.send(InitGroup(plan=rig.plan(1)))
        await rig.send(PauseGeneration())
        assert code_of(await rig.send(receive_body(D7, is_draft=False))) is FaultCode.WRONG_STATE
        assert (await rig.send(receive_body(D7))).status is ResultStatus.OK

    on_drafting(scenario)


def test_repeated_commit_of_a_draft_changes_nothing() -> None:
    """Under another op_id, as a new leader sends it; and one of an update that isn't open is refused."""

    async def scenario(rig: Rig) -> None:
        await draft_updated(rig, D7)
        again = await rig.send(commit_of("d", D7))
        assert again.data == WeightsData(weights=clean(None), draft=clean(D7))
        assert rig.engine.calls.count("finish_update") == 1
        assert code_of(await rig.send(commit_of("d", D8))) is FaultCode.WRONG_STATE

    on_drafting(scenario)


def commit_of(op_id: str, version: Version) -> CommandBody:
    return CommitWeights(update_op_id=op_id, version=version)


def test_engine_without_a_draft_refuses_it() -> None:
    """The route isn't there, its status says nothing of a draft, and it has no checksums of one."""

    async def scenario(rig: Rig) -> None:
        assert code_of(await prepare(rig, D7)) is FaultCode.NO_ROUTE
        assert code_of(await rig.send(GetChecksums(is_draft=True))) is FaultCode.NO_ROUTE
        assert await views(rig) == (clean(None), None)

    on_worker(scenario)


def test_checksums_are_those_of_the_model_that_was_asked_for() -> None:
    """The draft's after its update."""

    async def scenario(rig: Rig) -> None:
        await draft_updated(rig, D7)
        data = (await rig.send(GetChecksums(is_draft=True))).data
        assert isinstance(data, ChecksumsData)
        assert {s.name: s.checksum for s in data.sums} == {t.name: fake_sum(t.name, D7, t.shape) for t in TENSORS}
        target = (await rig.send(GetChecksums())).data
        assert isinstance(target, ChecksumsData)
        assert [s.name for s in target.sums] == [t.name for t in DEFAULT_TENSORS]

    on_drafting(scenario)


def test_sleep_that_discards_the_weights_costs_the_draft_too() -> None:
    """Both have to come again before the worker generates."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V1)
        await draft_updated(rig, D7)
        assert (await rig.send(Sleep(level=2))).status is ResultStatus.OK
        assert await views(rig) == (dirty(V1), dirty(D7))
        assert (await rig.send(WakeUp())).status is ResultStatus.OK
        await rig.until_paused(V2, DEFAULT_TENSORS, "u2", epoch=2)
        await rig.receive(V2, DEFAULT_TENSORS, "u2", epoch=2).result()
        await rig.commit(V2, "u2")
        assert code_of(await rig.send(ResumeGeneration())) is FaultCode.DIRTY
        assert rig.engine.requests.is_paused

    on_drafting(scenario)


def test_restarted_worker_says_that_nobody_knows_its_draft(tmp_path: Path) -> None:
    """It has the one that it was started with, and generates."""

    async def main() -> None:
        for boot, expected in (("a", clean(None)), ("b", WeightsView(state=WeightsState.UNKNOWN))):
            with opened(str(tmp_path), "test", "backend", "7") as ledger:
                engine = FakeEngine(draft_tensors=TENSORS)
                async with worker_on_bus(engine, instance_id="7", boot=boot, ledger=ledger) as rig:
                    assert rig.agent.status().draft == expected
                    await draft_updated(rig, D7)

    run(main())
