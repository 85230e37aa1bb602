"""The agent on a bus in memory with the fake engine, under virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rlbus import subjects
from rlbus.codec import MAX_MESSAGE_BYTES
from rlbus.schemas import (
    AbortedData,
    AbortRequest,
    AbortWeights,
    Accepted,
    CommandRefused,
    CommitWeights,
    Descriptor,
    DestroyGroup,
    FaultCode,
    FlushCache,
    Generation,
    GenerationPaused,
    GenerationResumed,
    GetChecksums,
    GetOutcome,
    GetStatus,
    GetVersion,
    Goodbye,
    Hello,
    InitGroup,
    LoadWeights,
    OutcomeData,
    PausedData,
    PauseGeneration,
    PauseMode,
    PrepareWeightsUpdate,
    ReceivedData,
    Result,
    ResultStatus,
    ResumeGeneration,
    StatusData,
    TensorSpec,
    TensorSum,
    Version,
    WeightsChanged,
    WeightsData,
    WeightsState,
)
from rlbus.testing import run
from rlbus.transfer.fake import fake_sum
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.fake import DEFAULT_TENSORS, FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step, failing
from rlbus.workers.testing import COMPONENT, INSTANCE_ID, NAMESPACE, Rig, Sent, worker_on_bus

pytestmark = pytest.mark.unit

V1, V2, V3 = Version(step=1), Version(step=2), Version(step=3)
PROMPT = (1, 2, 3)


def on_worker(
    scenario: Callable[[Rig], Awaitable[None]],
    steps: dict[str, dict[int, Step]] | None = None,
    config: AgentConfig | None = None,
) -> None:
    """Run a scenario against one worker."""

    async def main() -> None:
        engine = FakeEngine(FakeScript(steps or {}))
        async with worker_on_bus(engine, config=config) as rig:
            await scenario(rig)
        assert engine.violations == []

    run(main())


def code_of(result: Result) -> FaultCode | None:
    """The fault code of a result."""
    return None if result.fault is None else result.fault.code


async def updated(rig: Rig, version: Version, op_id: str = "u", epoch: int = 1) -> None:
    """A whole update that goes well, up to resume."""
    await rig.until_paused(version, DEFAULT_TENSORS, op_id, epoch)
    received = await rig.receive(version, DEFAULT_TENSORS, op_id, epoch).result()
    assert received.status is ResultStatus.OK
    assert (await rig.commit(version, op_id)).status is ResultStatus.OK
    assert (await rig.send(ResumeGeneration(), op_id=f"{op_id}-resume")).status is ResultStatus.OK


def test_pause_is_accepted_then_ends_with_one_result() -> None:
    """A mutation answers accepted at once and one result with the engine's data."""

    async def scenario(rig: Rig) -> None:
        sent = rig.post(PauseGeneration(mode=PauseMode.KEEP), op_id="p1")
        result = await sent.result()
        assert [type(a) for a in sent.answers] == [Accepted, Result]
        assert (result.status, result.data) == (ResultStatus.OK, PausedData(num_aborted=0, num_held=0))
        assert (result.op_id, result.component, result.instance_id) == ("p1", COMPONENT, INSTANCE_ID)
        assert result.boot_id == rig.agent.boot_id
        pause = rig.agent.state.pause
        assert pause is not None
        assert (pause.owner, pause.mode) == ("p1", "keep")

    on_worker(scenario)


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


def test_receive_is_accepted_only_when_the_receiver_stands() -> None:
    """Accepted of a transfer is the engine's on_ready, not the validation."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        sent = rig.receive(V1, DEFAULT_TENSORS)
        await asyncio.sleep(2.1)
        assert not sent.is_accepted
        assert len(sent.progress) == 4  # a sign of life all the same
        await sent.until(lambda s: s.is_accepted)
        assert asyncio.get_running_loop().time() == pytest.approx(3.0, abs=0.2)
        assert (await sent.result()).status is ResultStatus.OK

    on_worker(scenario, {"receive_weights": {1: Step(latency_s=3.0)}})


def test_progress_comes_every_second_and_grows_only_with_bytes() -> None:
    """A slow transfer reports what has really come, at least every second."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        sent = rig.receive(V1, DEFAULT_TENSORS)
        await sent.result()
        total = sum(4 * s.shape[0] * s.shape[1] for s in DEFAULT_TENSORS)
        done = [p.done for p in sent.progress]
        assert done == sorted(done)
        assert len(done) >= 8
        assert set(done) == {0, 4096, 5120, 6144}
        assert {p.total for p in sent.progress if p.done} == {total}

    on_worker(scenario, {"receive_weights": {1: Step(transfer_s=8.0)}})


def test_second_mutation_is_busy_and_names_the_first() -> None:
    """One mutation at a time; the refusal says which one runs."""

    async def scenario(rig: Rig) -> None:
        first = rig.post(FlushCache(), op_id="slow")
        await first.until(lambda s: s.is_accepted)
        refused = await rig.send(PauseGeneration())
        assert (refused.status, code_of(refused)) == (ResultStatus.REFUSED, FaultCode.BUSY)
        assert refused.fault is not None
        assert refused.fault.detail["op_id"] == "slow"
        assert (await first.result()).status is ResultStatus.OK
        assert (await rig.send(PauseGeneration())).status is ResultStatus.OK

    on_worker(scenario, {"flush_cache": {1: Step(latency_s=5.0)}})


def test_queries_and_aborts_are_answered_during_a_mutation() -> None:
    """Status, outcome, version, hello and abort don't wait for what runs."""

    async def scenario(rig: Rig) -> None:
        rig.engine.submit("r1", PROMPT, 10_000)
        slow = rig.post(FlushCache(), op_id="slow")
        await slow.until(lambda s: s.is_accepted)
        began_s = asyncio.get_running_loop().time()
        status = (await rig.send(GetStatus())).data
        assert isinstance(status, StatusData)
        assert (status.status.op_id, status.status.generation) == ("slow", Generation.RUNNING)
        outcome = (await rig.send(GetOutcome(of_op_id="slow"))).data
        assert outcome == OutcomeData(of_op_id="slow", running=True)
        assert isinstance((await rig.send(GetVersion())).data, WeightsData)
        assert isinstance((await rig.send(Hello())).data, StatusData)
        assert (await rig.send(AbortRequest())).data == AbortedData(num_aborted=1)
        assert asyncio.get_running_loop().time() - began_s < 0.1
        assert slow.results == []

    on_worker(scenario, {"flush_cache": {1: Step(latency_s=50.0)}})


def test_repeat_of_a_running_op_joins_it() -> None:
    """The same op_id runs once; every reply address gets the one result."""

    async def scenario(rig: Rig) -> None:
        first = rig.post(FlushCache(), op_id="f")
        await first.until(lambda s: s.is_accepted)
        second = rig.post(FlushCache(), op_id="f")
        await second.until(lambda s: s.is_accepted)
        assert await first.result() == await second.result()
        assert (len(first.results), len(second.results)) == (1, 1)
        assert rig.engine.calls.count("flush_cache") == 1

    on_worker(scenario, {"flush_cache": {1: Step(latency_s=5.0)}})


def test_repeat_of_an_ended_op_gets_its_recorded_result() -> None:
    """Also late, also from an older term: "refused" would say that nothing had changed."""

    async def scenario(rig: Rig) -> None:
        first = await rig.send(FlushCache(), op_id="f", term=3)
        again = await rig.send(FlushCache(), op_id="f", term=1, expires_in_s=-5.0)
        assert again == first
        assert rig.engine.calls.count("flush_cache") == 1
        outcome = (await rig.send(GetOutcome(of_op_id="f"), term=3)).data
        assert outcome == OutcomeData(of_op_id="f", running=False, status=ResultStatus.OK)

    on_worker(scenario)


def test_same_op_id_for_another_command_is_a_bad_message() -> None:
    """An op_id names one command."""

    async def scenario(rig: Rig) -> None:
        await rig.send(FlushCache(), op_id="f")
        assert code_of(await rig.send(PauseGeneration(), op_id="f")) is FaultCode.BAD_MESSAGE
        assert "pause" not in rig.engine.calls

    on_worker(scenario)


def test_outcome_of_an_unheard_op_is_unknown() -> None:
    """A refused op changed nothing and has no record either."""

    async def scenario(rig: Rig) -> None:
        assert code_of(await rig.send(GetOutcome(of_op_id="never"))) is FaultCode.UNKNOWN_OP
        await rig.send(ResumeGeneration(), op_id="late", expires_in_s=-1.0)
        assert code_of(await rig.send(GetOutcome(of_op_id="late"))) is FaultCode.UNKNOWN_OP

    on_worker(scenario)


def test_stale_and_foreign_commands_change_nothing() -> None:
    """Expired, of an old term, for others, on the wrong subject: refused before any engine call."""

    async def scenario(rig: Rig) -> None:
        await rig.send(GetVersion(), term=5)
        assert code_of(await rig.send(PauseGeneration(), term=4)) is FaultCode.STALE_TERM
        assert code_of(await rig.send(PauseGeneration(), term=5, expires_in_s=-0.001)) is FaultCode.EXPIRED
        assert code_of(await rig.send(PauseGeneration(), term=5, members=("8",))) is FaultCode.NOT_A_MEMBER
        wrong = await rig.send(PauseGeneration(), term=5, route="flush_cache")
        assert code_of(wrong) is FaultCode.BAD_MESSAGE
        assert [c for c in rig.engine.calls if c not in ("start", "observe")] == []

    on_worker(scenario)


def test_broadcast_to_others_is_not_answered() -> None:
    """Who isn't on the member list stays silent: the sender doesn't count it, and a fleet would answer as one."""

    async def scenario(rig: Rig) -> None:
        others = rig.post(PauseGeneration(), members=("8", "9"), is_broadcast=True)
        mine = rig.post(PauseGeneration(), members=("8", INSTANCE_ID), is_broadcast=True)
        assert (await mine.result()).status is ResultStatus.OK
        assert others.answers == []

    on_worker(scenario)


def test_prepare_without_the_manifest_asks_for_it() -> None:
    """manifest_unknown is retryable with the same op_id, once the pages are there."""

    async def scenario(rig: Rig) -> None:
        body = PrepareWeightsUpdate(version=V1, manifest_digest="0" * 64)
        refused = await rig.send(body, op_id="p")
        assert code_of(refused) is FaultCode.MANIFEST_UNKNOWN
        assert refused.fault is not None
        assert refused.fault.retryable
        assert (await rig.prepare(V1, DEFAULT_TENSORS)).status is ResultStatus.OK

    on_worker(scenario)


def test_prepare_names_the_first_tensor_that_does_not_fit() -> None:
    """A manifest for another model is refused, naming the tensor; nothing is prepared."""

    async def scenario(rig: Rig) -> None:
        bad = (*DEFAULT_TENSORS[:1], TensorSpec(name="layers.0.weight", dtype="float32", shape=(16, 17)))
        refused = await rig.prepare(V1, bad)
        assert (refused.status, code_of(refused)) == (ResultStatus.REFUSED, FaultCode.MANIFEST_MISMATCH)
        assert refused.fault is not None
        assert refused.fault.detail["tensor"] == "layers.0.weight"
        assert rig.agent.state.prepared is None

    on_worker(scenario)


def test_manifest_whose_checksums_fit_no_message_is_refused_before_anything() -> None:
    """What could never be reported is not begun."""

    async def scenario(rig: Rig) -> None:
        many = tuple(TensorSpec(name=f"t{'x' * 60}{i}", dtype="float32", shape=(1,)) for i in range(12_000))
        assert code_of(await rig.prepare(V1, many)) is FaultCode.TOO_LARGE

    on_worker(scenario)


def test_receive_needs_pause_preparation_and_the_right_epoch() -> None:
    """Each missing precondition is refused by name, without an engine call."""

    async def scenario(rig: Rig) -> None:
        await rig.send(InitGroup(plan=rig.plan(4)))
        assert code_of(await rig.receive(V1, DEFAULT_TENSORS, epoch=3).result()) is FaultCode.STALE_EPOCH
        assert code_of(await rig.receive(V1, DEFAULT_TENSORS, epoch=4).result()) is FaultCode.WRONG_STATE
        await rig.prepare(V1, DEFAULT_TENSORS)
        refused = await rig.receive(V1, DEFAULT_TENSORS, epoch=4).result()
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
    """Torn weights refuse to resume, name the last good version, and the next full update makes them clean."""

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


def test_forced_resume_of_dirty_weights_is_published_as_forced() -> None:
    """A person may override; everybody sees it, and the weights stay dirty."""

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
        assert refused.fault.detail["op_id"] == "u"

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


def test_abort_takes_a_running_transfer_back_before_its_first_byte() -> None:
    """A receiver that waits for a dead sender is let go, says that nothing was touched, and the worker is clean."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        receive = rig.receive(V1, DEFAULT_TENSORS)
        await receive.until(lambda s: s.is_accepted)
        abort = await rig.send(AbortWeights(update_op_id="u", reason="the sender died"))
        assert abort.status is ResultStatus.OK
        taken = await receive.result()
        assert (taken.status, code_of(taken)) == (ResultStatus.FAILED, FaultCode.CANCELLED)
        assert rig.agent.state.weights.state is WeightsState.CLEAN
        assert rig.agent.state.running is None
        assert (await rig.send(ResumeGeneration())).status is ResultStatus.OK

    on_worker(scenario, {"receive_weights": {1: Step(hangs=True)}})


def test_destroy_of_the_group_takes_a_running_transfer_back() -> None:
    """After the first byte it ends dirty."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        receive = rig.receive(V1, DEFAULT_TENSORS)
        await receive.until(lambda s: bool(s.progress))
        other = await rig.send(DestroyGroup(epoch=9))
        assert code_of(other) is FaultCode.BUSY
        assert (await rig.send(DestroyGroup(epoch=1))).status is ResultStatus.OK
        assert code_of(await receive.result()) is FaultCode.CANCELLED
        assert rig.agent.state.weights.state is WeightsState.DIRTY

    on_worker(scenario, {"receive_weights": {1: Step(hangs=True, after_parts=2)}})


def test_destroy_takes_a_running_join_back() -> None:
    """A group that others couldn't join isn't waited for."""

    async def scenario(rig: Rig) -> None:
        join = rig.post(InitGroup(plan=rig.plan(1)))
        await join.until(lambda s: s.is_accepted)
        assert (await rig.send(DestroyGroup(epoch=1))).status is ResultStatus.OK
        assert code_of(await join.result()) is FaultCode.CANCELLED
        assert rig.agent.state.epoch is None

    on_worker(scenario, {"join_group": {1: Step(latency_s=1000.0)}})


def test_passed_deadline_ends_a_stuck_transfer_with_what_the_engine_says() -> None:
    """The group is dropped first, so that the receive can end by itself and tell the truth about the weights."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        body_sent = rig.receive(V1, DEFAULT_TENSORS)
        result = await body_sent.result()
        assert code_of(result) is FaultCode.DEADLINE
        assert asyncio.get_running_loop().time() == pytest.approx(30.0, abs=0.5)
        assert rig.agent.state.weights.state is WeightsState.DIRTY
        assert rig.agent.state.epoch is None
        assert rig.engine.session is None

    on_worker(scenario, {"receive_weights": {1: Step(hangs=True, after_parts=1)}})


def test_engine_call_that_clings_keeps_the_place_but_not_the_result() -> None:
    """The result comes at the deadline; until the engine lets go, other mutations are busy."""

    async def scenario(rig: Rig) -> None:
        sent = rig.post(FlushCache(), op_id="f", expires_in_s=5.0)
        assert code_of(await sent.result()) is FaultCode.DEADLINE
        refused = await rig.send(PauseGeneration())
        assert code_of(refused) is FaultCode.BUSY
        await asyncio.sleep(100.0)
        assert (await rig.send(PauseGeneration())).status is ResultStatus.OK

    on_worker(scenario, {"flush_cache": {1: Step(hangs=True, clings_s=60.0)}})


def test_failed_pause_is_undone() -> None:
    """The engine may stand half paused; it runs again, and the state says so."""

    async def scenario(rig: Rig) -> None:
        failed = await rig.send(PauseGeneration())
        assert (failed.status, code_of(failed)) == (ResultStatus.FAILED, FaultCode.ENGINE_FAILED)
        assert list(rig.engine.calls)[-2:] == ["pause", "resume"]
        assert rig.agent.state.pause is None

    on_worker(scenario, {"pause": {1: failing()}})


def test_pause_mode_wait_that_passes_its_deadline_is_undone() -> None:
    """Requests go on, and the engine isn't left paused for ever."""

    async def scenario(rig: Rig) -> None:
        request = rig.engine.submit("r", PROMPT, 1000)
        failed = await rig.send(PauseGeneration(mode=PauseMode.WAIT), expires_in_s=1.0)
        assert code_of(failed) is FaultCode.DEADLINE
        assert not rig.engine.requests.is_paused
        await request.ended.wait()
        assert request.finish == "length"

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
    """A folder below a root makes dirty weights clean; any other path is refused, also through a link."""
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


def test_reload_of_a_missing_folder_leaves_what_was(tmp_path: Path) -> None:
    """The engine says untouched, so the weights stay clean."""

    async def scenario(rig: Rig) -> None:
        await rig.send(PauseGeneration())
        failed = await rig.send(LoadWeights(path=str(tmp_path / "none"), version=V1))
        assert failed.status is ResultStatus.FAILED
        assert rig.agent.state.weights.state is WeightsState.CLEAN
        assert rig.agent.state.weights.version is None

    on_worker(scenario, None, AgentConfig(weight_roots=(str(tmp_path),)))


def test_engine_exception_becomes_a_fault_with_its_type_only(caplog: pytest.LogCaptureFixture) -> None:
    """The traceback goes to the log, never over the wire."""

    async def scenario(rig: Rig) -> None:
        async def broken() -> None:
            raise KeyError("secret")

        rig.engine.flush_cache = broken  # type: ignore[method-assign]
        failed = await rig.send(FlushCache())
        assert code_of(failed) is FaultCode.ENGINE_FAILED
        assert failed.fault is not None
        assert failed.fault.detail == {"error": "KeyError"}
        assert "secret" not in failed.fault.message
        assert (await rig.send(GetVersion())).status is ResultStatus.OK

    on_worker(scenario)
    assert "KeyError: 'secret'" in caplog.text


def test_route_that_the_engine_does_not_have_is_refused() -> None:
    """Never emulated in silence; the descriptor doesn't list it either."""

    async def main() -> None:
        engine = FakeEngine(routes=frozenset({"pause_generation", "resume_generation"}))
        async with worker_on_bus(engine) as rig:
            assert code_of(await rig.send(FlushCache())) is FaultCode.NO_ROUTE
            assert code_of(await rig.prepare(V1, DEFAULT_TENSORS)) is FaultCode.NO_ROUTE
            assert rig.agent.descriptor.routes == (
                "get_outcome",
                "get_status",
                "get_weight_version",
                "hello",
                "pause_generation",
                "resume_generation",
            )

    run(main())


@pytest.mark.parametrize(
    ("data", "op_id", "code"),
    [
        (b'{"op_id":"x1","term":1,"expires_at":1e12,"body":{"route":"nope"}}', "x1", FaultCode.BAD_MESSAGE),
        (b'{"op_id":"x2","term":"one"', "x2", FaultCode.BAD_MESSAGE),
        (b'{"op_id":"x3","pad":"' + b"a" * MAX_MESSAGE_BYTES + b'"}', "x3", FaultCode.TOO_LARGE),
    ],
)
def test_bad_message_is_refused_to_its_sender_if_that_can_be_read_out(data: bytes, op_id: str, code: FaultCode) -> None:
    """Counted, logged, answered; the agent lives on."""

    async def scenario(rig: Rig) -> None:
        sent = Sent(op_id)
        subject = subjects.command_to(NAMESPACE, COMPONENT, "flush_cache", INSTANCE_ID)
        rig.bus.transport.publish(subject, data, rig.inbox(sent))
        result = await sent.result()
        assert (result.op_id, result.status, code_of(result)) == (op_id, ResultStatus.REFUSED, code)
        status = (await rig.send(GetStatus())).data
        assert isinstance(status, StatusData)
        assert status.status.num_refused_messages == 1
        refused = [e for e in rig.events if isinstance(e, CommandRefused)]
        assert [(e.op_id, e.route) for e in refused] == [(op_id, "flush_cache")]

    on_worker(scenario)


def test_flood_of_garbage_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The counter has them all, the log and the events at most one a second."""

    async def scenario(rig: Rig) -> None:
        subject = subjects.command_to(NAMESPACE, COMPONENT, "flush_cache", INSTANCE_ID)
        for junk in (b"", b"\xff\xfe", b"[" * 10_000, b"null", b'{"op_id": 3}') * 20:
            rig.bus.transport.publish(subject, junk)
        status = (await rig.send(GetStatus())).data
        assert isinstance(status, StatusData)
        assert status.status.num_refused_messages == 100
        assert len([e for e in rig.events if isinstance(e, CommandRefused)]) == 1

    on_worker(scenario)
    assert caplog.text.count("refused") <= 2


def test_routes_query_is_answered_with_the_descriptor() -> None:
    """Dynamo's literal, on the plain reply subject."""

    async def scenario(rig: Rig) -> None:
        got: list[Descriptor] = []
        rig.bus.subscribe("my.reply", Descriptor, lambda d, _: got.append(d))
        rig.bus.transport.publish(f"dyn.{NAMESPACE}.{COMPONENT}.rl.routes", b'{"method": "routes"}', "my.reply")
        await rig.send(GetVersion())
        assert got == [rig.agent.descriptor]
        assert "update_weights_from_distributed" in got[0].routes
        assert "prepare_weights_update" in got[0].routes
        assert list(got[0].routes) == sorted(set(got[0].routes))

    on_worker(scenario)


def test_announcements_come_at_start_on_change_as_heartbeat_and_as_goodbye() -> None:
    """seq grows, the boot id stays, and the interval is moved by at most a fifth."""

    async def main() -> None:
        engine = FakeEngine()
        async with worker_on_bus(engine) as rig:
            await asyncio.sleep(0.01)
            assert rig.last.seq == 1
            assert rig.last.status.generation is Generation.RUNNING
            await rig.send(PauseGeneration(owner="alice"))
            await asyncio.sleep(0.1)
            assert rig.last.status.generation is Generation.PAUSED
            assert rig.last.status.pause is not None
            assert rig.last.status.pause.owner == "alice"
            seq = rig.last.seq
            await asyncio.sleep(50.0)
            assert 50 / 6 <= rig.last.seq - seq <= 50 / 4
            assert {a.boot_id for a in rig.announcements} == {rig.agent.boot_id}
            announcements = rig.announcements
            bus = rig.bus
            await bus.barrier(1.0)
            rig.agent.stop("test")
            await asyncio.sleep(1.0)
            assert announcements[-1] == Goodbye(
                boot_id=rig.agent.boot_id, component=COMPONENT, instance_id=INSTANCE_ID, reason="test"
            )
            paused = [e for e in rig.events if isinstance(e, GenerationPaused)]
            assert [(e.owner, e.mode) for e in paused] == [("alice", "keep")]

    run(main())


def test_worker_announces_itself_again_after_a_reconnect_and_when_greeted() -> None:
    """A controller that was away, or is new, needn't wait for the heartbeat."""

    async def scenario(rig: Rig) -> None:
        await asyncio.sleep(0.2)
        seq = rig.last.seq
        transport = rig.worker_bus.transport
        rig.broker.disconnect(transport)  # type: ignore[arg-type]
        await asyncio.sleep(1.0)
        rig.broker.reconnect(transport)  # type: ignore[arg-type]
        await asyncio.sleep(0.2)
        assert rig.last.seq > seq
        seq = rig.last.seq
        await rig.send(Hello())
        await asyncio.sleep(0.2)
        assert rig.last.seq == seq + 1

    on_worker(scenario)


def test_result_that_could_not_leave_is_there_for_the_repeat() -> None:
    """A mutation that ends while the bus is away is not lost."""

    async def scenario(rig: Rig) -> None:
        sent = rig.post(FlushCache(), op_id="f")
        await sent.until(lambda s: s.is_accepted)
        transport = rig.worker_bus.transport
        rig.broker.disconnect(transport)  # type: ignore[arg-type]
        await asyncio.sleep(10.0)
        rig.broker.reconnect(transport)  # type: ignore[arg-type]
        await asyncio.sleep(1.0)
        assert sent.results == []
        assert (await rig.send(FlushCache(), op_id="f")).status is ResultStatus.OK
        assert rig.engine.calls.count("flush_cache") == 1

    on_worker(scenario, {"flush_cache": {1: Step(latency_s=5.0)}})


def test_engine_that_does_not_answer_is_unknown_within_a_second() -> None:
    """Heartbeats and status go on; the question is not asked twice at once."""

    async def scenario(rig: Rig) -> None:
        await asyncio.sleep(0.01)
        began_s = asyncio.get_running_loop().time()
        status = (await rig.send(GetStatus())).data
        assert isinstance(status, StatusData)
        assert status.status.generation is Generation.UNKNOWN
        assert asyncio.get_running_loop().time() - began_s <= 1.1
        seq = rig.last.seq
        await asyncio.sleep(30.0)
        assert rig.last.seq >= seq + 3

    on_worker(scenario, {"observe": {n: Step(hangs=True) for n in range(2, 100)}})


def test_stop_lets_a_running_mutation_end_and_then_says_goodbye() -> None:
    """What ends within the drain time gets its result; what doesn't is cancelled and says so."""

    async def main() -> None:
        for latency_s, status in ((2.0, ResultStatus.OK), (1000.0, ResultStatus.FAILED)):
            engine = FakeEngine(FakeScript({"flush_cache": {1: Step(latency_s=latency_s)}}))
            async with worker_on_bus(engine) as rig:
                sent = rig.post(FlushCache(), expires_in_s=5000.0)
                await sent.until(lambda s: s.is_accepted)
                rig.agent.stop()
                assert (await sent.result()).status is status
                await asyncio.sleep(1.0)
                assert isinstance(rig.announcements[-1], Goodbye)

    run(main())


def test_checksums_are_those_that_the_engine_holds() -> None:
    """A command of its own, which takes the place of a mutation."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V1)
        data = (await rig.send(GetChecksums())).data
        assert data is not None
        assert getattr(data, "sums", ())[0] == TensorSum(
            name="embed.weight", checksum=fake_sum("embed.weight", V1, (64, 16))
        )

    on_worker(scenario)


def test_repeated_abort_of_requests_counts_once() -> None:
    """Aborts of requests are remembered by op_id too, though they run beside mutations."""

    async def scenario(rig: Rig) -> None:
        rig.engine.submit("r1", PROMPT, 10_000)
        first = rig.post(AbortRequest(request_ids=("r1", "unknown")), op_id="a")
        second = rig.post(AbortRequest(request_ids=("r1", "unknown")), op_id="a")
        assert (await first.result()).data == AbortedData(num_aborted=1)
        assert (await second.result()).data == AbortedData(num_aborted=1)
        assert rig.engine.calls.count("abort") == 1

    on_worker(scenario)
