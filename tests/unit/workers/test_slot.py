"""The one place for mutations: acceptance, progress, deadlines, taking back, cleaning up."""

import asyncio
from collections.abc import Callable

import pytest

from rlbus.errors import refused
from rlbus.schemas import (
    AbortWeights,
    DestroyGroup,
    FaultCode,
    FlushCache,
    GetVersion,
    Goodbye,
    InitGroup,
    PauseGeneration,
    PauseMode,
    ReceivedData,
    ResultStatus,
    ResumeGeneration,
    Version,
    WeightsState,
)
from rlbus.workers.engines.base import ProgressFn, ReadyFn, ReceiveOrder
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from rlbus.workers.engines.fake_script import Step, failing
from rlbus.workers.testing import (
    Rig,
    code_of,
    on_worker,
)

pytestmark = pytest.mark.unit

V1, V2, V3 = Version(step=1), Version(step=2), Version(step=3)
PROMPT = (1, 2, 3)


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
    """SCENARIOS 3: one mutation at a time; the refusal says which one runs."""

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


def test_repeat_of_a_running_op_joins_it() -> None:
    """SCENARIOS 3: the same op_id runs once; every reply address gets the one result."""

    async def scenario(rig: Rig) -> None:
        first = rig.post(FlushCache(), op_id="f")
        await first.until(lambda s: s.is_accepted)
        second = rig.post(FlushCache(), op_id="f")
        await second.until(lambda s: s.is_accepted)
        assert await first.result() == await second.result()
        assert (len(first.results), len(second.results)) == (1, 1)
        assert rig.engine.calls.count("flush_cache") == 1

    on_worker(scenario, {"flush_cache": {1: Step(latency_s=5.0)}})


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
    """SCENARIOS 23: a group that others couldn't join isn't waited for."""

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
    """SCENARIOS 23: the result comes at the deadline; until the engine lets go, other mutations are busy."""

    async def scenario(rig: Rig) -> None:
        sent = rig.post(FlushCache(), op_id="f", expires_in_s=5.0)
        assert code_of(await sent.result()) is FaultCode.DEADLINE
        refused = await rig.send(PauseGeneration())
        assert code_of(refused) is FaultCode.BUSY
        await asyncio.sleep(100.0)
        assert (await rig.send(PauseGeneration())).status is ResultStatus.OK

    on_worker(scenario, {"flush_cache": {1: Step(hangs=True, clings_s=60.0)}})


def test_engine_call_that_clings_for_minutes_ends_the_agent_which_says_why() -> None:
    """Whoever supervises the process starts it again."""

    async def scenario(rig: Rig) -> None:
        assert code_of(await rig.post(FlushCache(), expires_in_s=1.0).result()) is FaultCode.DEADLINE
        await asyncio.sleep(100.0)
        assert rig.agent.lost is None
        await asyncio.sleep(60.0)
        assert rig.agent.lost == "it doesn't come back from flush_cache"
        last = rig.announcements[-1]
        assert isinstance(last, Goodbye)
        assert last.reason == "the engine is lost: it doesn't come back from flush_cache"

    on_worker(scenario, {"flush_cache": {1: Step(hangs=True, clings_s=600.0)}})


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


def test_phase_says_what_a_transfer_waits_for() -> None:
    """Its route until the receiver stands, then that it receives; a new phase counts as a sign of progress."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        sent = rig.receive(V1, DEFAULT_TENSORS)
        await sent.result()
        phases = list(dict.fromkeys(p.phase for p in sent.progress))
        assert phases == ["update_weights_from_distributed", "receiving"]

    on_worker(scenario, {"receive_weights": {1: Step(latency_s=2.0, transfer_s=2.0)}})


def test_what_an_abandoned_thread_says_late_changes_nothing() -> None:
    """Its op was judged: no first byte, no acceptance, no answer any more."""

    async def scenario(rig: Rig) -> None:
        late: list[Callable[[], None]] = []
        receive = rig.engine.receive_weights

        async def remember(order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
            late.extend((on_ready, lambda: on_progress(1, 2)))
            return await receive(order, lambda: None, lambda done, total: None)

        rig.engine.receive_weights = remember  # type: ignore[method-assign]
        abort_update = rig.engine.abort_update

        async def slowly() -> None:
            for call in late:
                call()
            await asyncio.sleep(0.1)
            await abort_update()

        rig.engine.abort_update = slowly  # type: ignore[method-assign]
        await rig.until_paused(V1, DEFAULT_TENSORS)
        sent = rig.receive(V1, DEFAULT_TENSORS)
        assert (await sent.result()).status is ResultStatus.FAILED
        assert not sent.is_accepted
        assert rig.agent.state.weights.state is WeightsState.CLEAN

    on_worker(scenario, {"receive_weights": {1: failing()}})


def test_engine_that_refuses_after_it_was_begun_counts_as_failed() -> None:
    """A refusal promises that nothing has changed; that can't be promised any more, so the weights are in doubt."""

    async def scenario(rig: Rig) -> None:
        async def refuse(order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
            raise refused(FaultCode.WRONG_STATE, "not now")

        rig.engine.receive_weights = refuse  # type: ignore[method-assign]
        await rig.until_paused(V1, DEFAULT_TENSORS)
        result = await rig.receive(V1, DEFAULT_TENSORS).result()
        assert (result.status, code_of(result)) == (ResultStatus.FAILED, FaultCode.WRONG_STATE)
        assert rig.agent.state.weights.state is WeightsState.DIRTY

    on_worker(scenario)
