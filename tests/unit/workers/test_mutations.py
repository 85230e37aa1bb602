"""What a command means to the engine, and what it leaves: updates, reloads, resumes (DESIGN section 4, 4 and 7)."""

import asyncio
import contextlib
from pathlib import Path
from unittest import mock

import pytest

from rlbus.schemas import (
    AbortWeights,
    ChecksumsData,
    CommitWeights,
    FaultCode,
    FlushCache,
    GenerationResumed,
    GetChecksums,
    GetStatus,
    GetVersion,
    InitGroup,
    LoadWeights,
    PauseGeneration,
    PauseMode,
    PrepareReload,
    ReceivedData,
    ResultStatus,
    ResumeGeneration,
    StatusData,
    TensorSum,
    Version,
    WeightsChanged,
    WeightsData,
    WeightsState,
)
from rlbus.transfer.fake import fake_sum
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.base import Observed
from rlbus.workers.engines.fake import DEFAULT_TENSORS, FakeEngine
from rlbus.workers.engines.fake_script import failing
from rlbus.workers.testing import (
    Rig,
    code_of,
    on_worker,
    updated,
)

pytestmark = pytest.mark.unit

V1, V2, V3 = Version(step=1), Version(step=2), Version(step=3)
PROMPT = (1, 2, 3)


def test_update_publishes_its_version_only_at_commit() -> None:
    """Received weights are `updating` without a version; the commit makes them clean at theirs."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        received = await rig.receive(V1, DEFAULT_TENSORS).result()
        assert isinstance(received.data, ReceivedData)
        assert received.data.sums == tuple(
            TensorSum(name=s.name, checksum=fake_sum(s.name, V1, s.shape)) for s in DEFAULT_TENSORS
        )
        between = (await rig.send(GetVersion())).data
        assert isinstance(between, WeightsData)
        assert (between.weights.state, between.weights.version) == (WeightsState.UPDATING, None)
        await rig.commit(V1)
        after = (await rig.send(GetVersion())).data
        assert isinstance(after, WeightsData)
        assert (after.weights.state, after.weights.version, after.weights.last_good) == (WeightsState.CLEAN, V1, V1)
        states = [(e.state, e.version) for e in rig.events if isinstance(e, WeightsChanged)]
        assert states == [(WeightsState.UPDATING, None), (WeightsState.CLEAN, V1)]

    on_worker(scenario)


def test_receive_needs_pause_preparation_and_the_right_epoch() -> None:
    """Each missing precondition is refused by name, without an engine call."""

    async def scenario(rig: Rig) -> None:
        await rig.send(InitGroup(plan=rig.plan(4)))
        assert code_of(await rig.receive(V1, DEFAULT_TENSORS, epoch=3).result()) is FaultCode.STALE_EPOCH
        assert code_of(await rig.receive(V1, DEFAULT_TENSORS, epoch=4).result()) is FaultCode.WRONG_STATE
        await rig.prepare(V1, DEFAULT_TENSORS, "v")
        refused = await rig.receive(V1, DEFAULT_TENSORS, op_id="v", epoch=4).result()
        assert refused.fault is not None
        assert refused.fault.message == "the worker is not paused; pause it first"
        assert "receive_weights" not in rig.engine.calls

    on_worker(scenario)


def test_receive_is_refused_when_somebody_resumed_the_engine_behind_our_back() -> None:
    """The pause that was commanded isn't believed: the engine is asked before the first byte."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        await rig.engine.resume()
        refused = await rig.receive(V1, DEFAULT_TENSORS).result()
        assert (refused.status, code_of(refused)) == (ResultStatus.REFUSED, FaultCode.WRONG_STATE)
        assert "receive_weights" not in rig.engine.calls
        assert rig.agent.state.weights.state is WeightsState.CLEAN
        status = (await rig.send(GetStatus())).data
        assert isinstance(status, StatusData)
        assert status.status.drift == "paused by u, but the engine is running"

    on_worker(scenario)


@pytest.mark.parametrize(("still_s", "status"), [(6.5, ResultStatus.OK), (9.0, ResultStatus.REFUSED)])
def test_engine_that_does_not_answer_for_seconds_before_the_first_byte_is_asked_again(
    still_s: float, status: ResultStatus
) -> None:
    """It stands still, or its machine does; that nobody knows how it is isn't that somebody resumed it."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        observe, time_s = rig.engine.observe, asyncio.get_running_loop().time
        ends_s = time_s() + still_s

        async def late() -> Observed:
            await asyncio.sleep(max(0.0, ends_s - time_s()))
            return await observe()

        with mock.patch.object(rig.engine, "observe", late):
            result = await rig.receive(V1, DEFAULT_TENSORS).result()
        assert result.status is status
        assert rig.engine.calls.count("receive_weights") == (status is ResultStatus.OK)

    on_worker(scenario)


@pytest.mark.parametrize("clings_s", [5.0, 14.0])
def test_what_an_engine_said_too_late_is_not_believed_before_the_first_byte(clings_s: float) -> None:
    """It doesn't let go of the question, and was resumed since it looked."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        observe, time_s = rig.engine.observe, asyncio.get_running_loop().time

        async def late() -> Observed:
            seen, ends_s = await observe(), time_s() + clings_s
            while time_s() < ends_s:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(ends_s - time_s())
            return seen

        with mock.patch.object(rig.engine, "observe", late):
            asyncio.get_running_loop().call_later(0.5, rig.engine.requests.resume)
            result = await rig.receive(V1, DEFAULT_TENSORS).result()
        assert result.status is ResultStatus.REFUSED
        assert "receive_weights" not in rig.engine.calls

    on_worker(scenario)


def test_failure_before_the_first_byte_leaves_what_was() -> None:
    """The old version is served again, the session is closed, and a resume is allowed."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V1)
        await rig.until_paused(V2, DEFAULT_TENSORS, "w")
        failed = await rig.receive(V2, DEFAULT_TENSORS, "w").result()
        assert (failed.status, code_of(failed)) == (ResultStatus.FAILED, FaultCode.TRANSFER_FAILED)
        state = rig.agent.state
        assert (state.weights.state, state.weights.version) == (WeightsState.CLEAN, V1)
        assert (state.session, state.epoch) == (None, None)
        assert rig.engine.session is None
        assert (await rig.send(ResumeGeneration())).status is ResultStatus.OK

    on_worker(scenario, {"receive_weights": {2: failing("no bytes", FaultCode.TRANSFER_FAILED)}})


def test_failure_after_the_first_byte_is_dirty_paused_and_heals_by_a_full_update() -> None:
    """SCENARIOS 4: torn weights refuse to resume, name the last good version; the next full update makes them clean."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V1)
        await rig.until_paused(V2, DEFAULT_TENSORS, "w")
        failed = await rig.receive(V2, DEFAULT_TENSORS, "w").result()
        assert failed.status is ResultStatus.FAILED
        assert rig.engine.is_torn
        weights = rig.agent.state.weights
        assert (weights.state, weights.version, weights.last_good) == (WeightsState.DIRTY, None, V1)
        assert rig.engine.session is None
        refused = await rig.send(ResumeGeneration())
        assert (refused.status, code_of(refused)) == (ResultStatus.REFUSED, FaultCode.DIRTY)
        assert rig.engine.requests.is_paused
        await updated(rig, V2, "x", epoch=2)
        assert not rig.engine.is_torn
        assert rig.agent.state.weights.version == V2

    on_worker(scenario, {"receive_weights": {2: failing(after_parts=2)}})


def test_wait_pause_on_top_of_a_pause_generates_nothing() -> None:
    """Requests that are held on torn weights stay held when the next update pauses in mode wait."""

    async def scenario(rig: Rig) -> None:
        request = rig.engine.submit("r", PROMPT, 100)
        await rig.until_paused(V1, DEFAULT_TENSORS)
        await rig.receive(V1, DEFAULT_TENSORS).result()
        assert rig.engine.is_torn
        num_tokens = len(request.tokens)
        paused = await rig.send(PauseGeneration(mode=PauseMode.WAIT, owner="next"))
        assert paused.status is ResultStatus.OK
        assert (len(request.tokens), request.finish) == (num_tokens, None)
        assert rig.agent.state.pause is not None
        assert rig.agent.state.pause.owner == "next"

    on_worker(scenario, {"receive_weights": {1: failing(after_parts=2)}})


def test_forced_resume_of_dirty_weights_is_published_as_forced() -> None:
    """SCENARIOS 4: a person may override; everybody sees it, and the weights stay dirty."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        await rig.receive(V1, DEFAULT_TENSORS).result()
        assert (await rig.send(ResumeGeneration(force=True))).status is ResultStatus.OK
        resumed = [e for e in rig.events if isinstance(e, GenerationResumed)]
        assert [e.forced for e in resumed] == [True]
        assert rig.agent.state.weights.state is WeightsState.DIRTY
        assert rig.agent.state.pause is None

    on_worker(scenario, {"receive_weights": {1: failing(after_parts=1)}})


def test_resume_of_a_received_but_uncommitted_update_is_busy() -> None:
    """Between transfer and commit the update owns the pause; the refusal names it."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        await rig.receive(V1, DEFAULT_TENSORS).result()
        refused = await rig.send(ResumeGeneration())
        assert code_of(refused) is FaultCode.BUSY
        assert refused.fault is not None
        assert refused.fault.detail == {"op_id": "u", "open": "u"}

    on_worker(scenario)


def test_forced_resume_over_an_open_session_closes_it_first() -> None:
    """Received and never committed weights are torn once the session is given up."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        await rig.receive(V1, DEFAULT_TENSORS).result()
        assert (await rig.send(ResumeGeneration(force=True))).status is ResultStatus.OK
        assert list(rig.engine.calls)[-3:] == ["abort_update", "flush_cache", "resume"]
        assert rig.agent.state.weights.state is WeightsState.DIRTY
        assert [e.forced for e in rig.events if isinstance(e, GenerationResumed)] == [True]

    on_worker(scenario)


def test_abort_of_a_received_update_makes_dirty_and_closes_the_session() -> None:
    """E.g. after a checksum mismatch; a repeat of the abort changes nothing."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        await rig.receive(V1, DEFAULT_TENSORS).result()
        abort = AbortWeights(update_op_id="u", reason="checksum")
        assert (await rig.send(abort)).status is ResultStatus.OK
        assert rig.agent.state.weights.state is WeightsState.DIRTY
        assert rig.engine.session is None
        assert (await rig.send(abort)).status is ResultStatus.OK
        assert rig.engine.calls.count("abort_update") == 1
        assert code_of(await rig.commit(V1)) is FaultCode.WRONG_STATE

    on_worker(scenario)


def test_abort_before_the_transfer_drops_the_preparation_and_resume_is_allowed() -> None:
    """Nothing was touched, so nothing is dirty."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        assert (await rig.send(AbortWeights(update_op_id="u", reason="x"))).status is ResultStatus.OK
        assert rig.agent.state.prepared is None
        assert (await rig.send(ResumeGeneration())).status is ResultStatus.OK
        assert rig.agent.state.weights.state is WeightsState.CLEAN

    on_worker(scenario)


def test_resume_flushes_what_nobody_flushed() -> None:
    """Rule 7: new weights never run on old caches, whether or not the controller sends flush_cache."""

    async def scenario(rig: Rig) -> None:
        before = rig.engine.submit("r1", PROMPT, 3)
        await before.ended.wait()
        assert rig.engine.requests.cache
        await rig.until_paused(V1, DEFAULT_TENSORS)
        await rig.receive(V1, DEFAULT_TENSORS).result()
        await rig.commit(V1)
        assert (await rig.send(ResumeGeneration())).status is ResultStatus.OK
        assert list(rig.engine.calls)[-2:] == ["flush_cache", "resume"]
        after = rig.engine.submit("r2", PROMPT, 3)
        await after.ended.wait()
        assert after.tokens != before.tokens
        await rig.send(PauseGeneration())
        await rig.send(ResumeGeneration())
        assert rig.engine.calls.count("flush_cache") == 1

    on_worker(scenario)


def test_flush_by_command_pays_what_is_owed() -> None:
    """The resume after it doesn't flush again."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        await rig.receive(V1, DEFAULT_TENSORS).result()
        await rig.commit(V1)
        await rig.send(FlushCache())
        await rig.send(ResumeGeneration())
        assert rig.engine.calls.count("flush_cache") == 1

    on_worker(scenario)


def test_resume_fails_and_stays_paused_when_the_owed_flush_fails() -> None:
    """Stale caches are never served; the next resume tries again."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        await rig.receive(V1, DEFAULT_TENSORS).result()
        await rig.commit(V1)
        failed = await rig.send(ResumeGeneration())
        assert (failed.status, code_of(failed)) == (ResultStatus.FAILED, FaultCode.FLUSH_FAILED)
        assert rig.engine.requests.is_paused
        assert rig.agent.state.pause is not None
        assert (await rig.send(ResumeGeneration())).status is ResultStatus.OK

    on_worker(scenario, {"flush_cache": {1: failing("blocks in use", FaultCode.FLUSH_FAILED)}})


def test_transfer_of_an_unfinished_session_closes_it_first() -> None:
    """Whoever opened it is gone; the next update needs no restart."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS, "old")
        await rig.receive(V1, DEFAULT_TENSORS, "old").result()
        await rig.prepare(V2, DEFAULT_TENSORS, "new")
        received = await rig.receive(V2, DEFAULT_TENSORS, "new").result()
        assert received.status is ResultStatus.OK
        assert code_of(await rig.commit(V1, "old")) is FaultCode.WRONG_STATE
        assert (await rig.commit(V2, "new")).status is ResultStatus.OK
        assert rig.agent.state.weights.version == V2

    on_worker(scenario)


def test_commit_repeated_under_another_op_id_changes_nothing() -> None:
    """A new attempt of the controller finds it done."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V1)
        again = await rig.send(CommitWeights(update_op_id="u", version=V1))
        assert again.status is ResultStatus.OK
        assert rig.engine.calls.count("finish_update") == 1

    on_worker(scenario)


def test_failed_commit_is_dirty() -> None:
    """What can't be finished isn't served."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        await rig.receive(V1, DEFAULT_TENSORS).result()
        failed = await rig.commit(V1)
        assert failed.status is ResultStatus.FAILED
        assert rig.agent.state.weights.state is WeightsState.DIRTY
        assert rig.engine.session is None

    on_worker(scenario, {"finish_update": {1: failing()}})


def test_version_must_grow_unless_a_rollback_is_asked_for() -> None:
    """The same or an older version is a regression."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V2)
        assert code_of(await rig.prepare(V2, DEFAULT_TENSORS, "a")) is FaultCode.VERSION_REGRESSION
        refused = await rig.prepare(V1, DEFAULT_TENSORS, "b")
        assert refused.fault is not None
        assert refused.fault.detail == {"version": "0.1", "served": "0.2"}
        assert (await rig.prepare(V3, DEFAULT_TENSORS, "c")).status is ResultStatus.OK

    on_worker(scenario)


def test_reload_from_disk_heals_and_keeps_below_its_roots(tmp_path: Path) -> None:
    """SCENARIOS 4: a folder below a root makes dirty weights clean; any other path is refused, also through a link."""
    outside = tmp_path / "outside"
    FakeEngine.save(outside, V1)
    root = tmp_path / "root"
    FakeEngine.save(root / "ckpt", V1)
    (root / "link").symlink_to(outside)

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        await rig.receive(V1, DEFAULT_TENSORS).result()
        assert rig.agent.state.weights.state is WeightsState.DIRTY
        for path in (str(outside), str(root / "link"), str(root / ".." / "outside"), "ckpt"):
            assert code_of(await rig.send(LoadWeights(path=path, version=V1))) is FaultCode.WRONG_STATE
        assert "load_weights" not in rig.engine.calls
        loaded = await rig.send(LoadWeights(path=str(root / "ckpt"), version=V1))
        assert loaded.status is ResultStatus.OK
        assert rig.agent.state.weights.version == V1
        assert (await rig.send(ResumeGeneration())).status is ResultStatus.OK

    on_worker(scenario, {"receive_weights": {1: failing(after_parts=1)}}, AgentConfig(weight_roots=(str(root),)))


def test_a_reload_is_checked_without_a_pause(tmp_path: Path) -> None:
    """Root, folder and version; nothing changes, whatever comes of it."""
    FakeEngine.save(tmp_path / "ckpt", V2)

    async def scenario(rig: Rig) -> None:
        await updated(rig, V1)
        before = rig.agent.state
        good = str(tmp_path / "ckpt")
        for path, version, code in (
            (good, V2, None),
            (good, V1, FaultCode.VERSION_REGRESSION),
            (str(tmp_path / "none"), V2, FaultCode.MANIFEST_MISMATCH),
            ("/", V2, FaultCode.WRONG_STATE),
        ):
            result = await rig.send(PrepareReload(path=path, version=version))
            assert result.status is (ResultStatus.OK if code is None else ResultStatus.REFUSED)
            assert (None if result.fault is None else result.fault.code) is code
        assert rig.agent.state == before
        assert "load_weights" not in rig.engine.calls

    on_worker(scenario, None, AgentConfig(weight_roots=(str(tmp_path),)))


def test_reload_of_a_missing_folder_leaves_what_was(tmp_path: Path) -> None:
    """The engine says untouched, so the weights stay clean."""

    async def scenario(rig: Rig) -> None:
        await rig.send(PauseGeneration())
        failed = await rig.send(LoadWeights(path=str(tmp_path / "none"), version=V1))
        assert failed.status is ResultStatus.FAILED
        assert rig.agent.state.weights.state is WeightsState.CLEAN
        assert rig.agent.state.weights.version is None

    on_worker(scenario, None, AgentConfig(weight_roots=(str(tmp_path),)))


def test_checksums_are_those_that_the_engine_holds() -> None:
    """A command of its own, which takes the place of a mutation."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V1)
        data = (await rig.send(GetChecksums())).data
        assert isinstance(data, ChecksumsData)
        assert data.sums == tuple(
            TensorSum(name=s.name, checksum=fake_sum(s.name, V1, s.shape)) for s in DEFAULT_TENSORS
        )

    on_worker(scenario)
