"""The agent's own clock at work: leases of pauses on one worker, in virtual time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlbus.schemas import (
    CommandBody,
    Fault,
    FaultCode,
    FlushCache,
    GenerationPaused,
    GenerationResumed,
    LoadWeights,
    PausedData,
    PauseGeneration,
    PauseMode,
    RenewLease,
    ResultStatus,
    ResumeGeneration,
    Sleep,
    Version,
    WeightsState,
)
from rlbus.testing import run
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import Step, failing
from rlbus.workers.leases import RETRY_S
from rlbus.workers.testing import Rig, code_of, on_worker, updated, worker_on_bus

pytestmark = pytest.mark.unit

V1, V2 = Version(step=1), Version(step=2)


def is_paused(rig: Rig) -> bool:
    return rig.engine.requests.is_paused


def test_a_pause_holds_for_its_lease_and_not_longer() -> None:
    """The engine is resumed, the announcement and the events say so."""

    async def scenario(rig: Rig) -> None:
        await rig.send(PauseGeneration(owner="u", lease_s=30.0))
        pause = rig.agent.status().pause
        assert pause is not None
        assert pause.expires_at == pytest.approx(pause.since + 30.0)
        await asyncio.sleep(29.9)
        assert is_paused(rig)
        await asyncio.sleep(0.3)
        assert not is_paused(rig)
        await asyncio.sleep(0.2)
        assert rig.last.status.pause is None
        paused, resumed = rig.events
        assert isinstance(paused, GenerationPaused)
        assert isinstance(resumed, GenerationResumed)
        assert (paused.expires_at, resumed.lease_ended, resumed.owner) == (pause.expires_at, True, "u")

    on_worker(scenario)


def test_renewals_keep_it_and_the_lease_is_a_duration_whatever_the_dates_are() -> None:
    """The worker's date jumps by a day; the lease doesn't."""

    async def scenario(rig: Rig) -> None:
        await rig.send(PauseGeneration(owner="u", lease_s=30.0))
        for _ in range(6):
            await asyncio.sleep(20.0)
            assert (await rig.send(RenewLease(owner="u", lease_s=30.0))).status is ResultStatus.OK
        clock: Any = rig.worker_bus.clock
        now = clock.now
        clock.now = lambda: now() + 86_400.0
        await asyncio.sleep(29.0)
        assert is_paused(rig)
        await asyncio.sleep(1.5)
        assert not is_paused(rig)

    on_worker(scenario)


def test_a_repeated_renewal_counts_once() -> None:
    """A late copy of the same command doesn't stretch the lease; it gets the same result."""

    async def scenario(rig: Rig) -> None:
        await rig.send(PauseGeneration(owner="u", lease_s=30.0))
        body = RenewLease(owner="u", lease_s=30.0)
        first = await rig.send(body, op_id="r")
        await asyncio.sleep(20.0)
        assert await rig.send(body, op_id="r") == first
        await asyncio.sleep(10.5)
        assert not is_paused(rig)
        assert code_of(await rig.send(body, op_id="r2")) is FaultCode.WRONG_STATE

    on_worker(scenario)


def test_a_load_is_not_cut_off_by_the_end_of_the_lease_and_flushes_before_it_resumes(tmp_path: Path) -> None:
    """It ends, caches of the old weights are emptied, and the engine goes on."""
    folder = str(tmp_path)

    async def scenario(rig: Rig) -> None:
        rig.engine.save(tmp_path, V2)
        await rig.send(PauseGeneration(owner="u", lease_s=5.0))
        loading = rig.post(LoadWeights(path=folder, version=V2), expires_in_s=100.0)
        await asyncio.sleep(19.0)
        assert is_paused(rig)
        assert rig.agent.status().work is not None
        assert (await loading.result()).status is ResultStatus.OK
        await asyncio.sleep(RETRY_S + 0.1)
        assert not is_paused(rig)
        assert [c for c in rig.engine.calls if c in ("flush_cache", "resume")] == ["flush_cache", "resume"]
        assert rig.agent.state.owes_flush is False
        assert rig.agent.state.weights.version == V2

    on_worker(scenario, {"load_weights": {1: Step(latency_s=20.0)}}, AgentConfig(weight_roots=(folder,)))


def test_dirty_weights_stay_paused_after_their_lease_and_a_later_load_sets_them_free(tmp_path: Path) -> None:
    """The owner and the end of its lease stay in sight; nobody has to resume what is healed."""
    folder = str(tmp_path)

    async def scenario(rig: Rig) -> None:
        rig.engine.save(tmp_path, V2)
        await updated(rig, V1)
        await rig.send(PauseGeneration(owner="u", lease_s=5.0))
        await rig.send(LoadWeights(path=folder, version=V2))
        await asyncio.sleep(100.0)
        assert is_paused(rig)
        status = rig.agent.status()
        assert status.weights.state is WeightsState.DIRTY
        assert status.pause is not None
        assert status.pause.owner == "u"
        assert status.pause.expires_at is not None
        assert status.pause.expires_at < rig.bus.clock.now()
        assert (await rig.send(LoadWeights(path=folder, version=V2))).status is ResultStatus.OK
        await asyncio.sleep(RETRY_S + 0.1)
        assert not is_paused(rig)

    on_worker(scenario, {"load_weights": {1: failing(after_parts=1)}}, AgentConfig(weight_roots=(folder,)))


def test_an_engine_that_fails_to_resume_is_asked_again() -> None:
    """Every few seconds, until it does; it serves commands in between."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V1)
        await rig.send(PauseGeneration(owner="u", lease_s=5.0))
        await asyncio.sleep(5.1)
        assert is_paused(rig)
        assert (await rig.send(FlushCache())).status is ResultStatus.OK
        await asyncio.sleep(RETRY_S)
        assert not is_paused(rig)

    on_worker(scenario, {"resume": {2: failing()}})


def test_a_resume_in_time_ends_the_lease() -> None:
    """The old timer doesn't touch the next pause, which is a hold."""

    async def scenario(rig: Rig) -> None:
        await rig.send(PauseGeneration(owner="u", lease_s=5.0))
        await rig.send(ResumeGeneration())
        await rig.send(PauseGeneration(owner="ann"))
        await asyncio.sleep(500.0)
        assert is_paused(rig)
        assert rig.agent.status().pause is not None

    on_worker(scenario)


def test_a_worker_that_stops_leaves_no_timer_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing wakes up at the end of a lease whose agent has ended."""

    async def main() -> None:
        async with worker_on_bus(FakeEngine()) as rig:
            await rig.send(PauseGeneration(owner="u", lease_s=5.0))
            assert rig.agent.state.lease is not None
        await asyncio.sleep(100.0)
        assert rig.agent.state.lease is not None
        assert rig.agent.state.lease.end_op_id is None
        assert "resume" not in rig.engine.calls

    run(main())
    assert "ended without renewal" not in caplog.text


UNKNOWN = Step(does_it=True, fault=Fault(code=FaultCode.ENGINE_FAILED, message="connection reset"))


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        (PauseGeneration(owner="u", lease_s=30.0), {"pause": {1: UNKNOWN}}),
        (PauseGeneration(owner="ann"), {"pause": {1: UNKNOWN}}),
        (Sleep(), {"sleep": {1: UNKNOWN}}),
    ],
    ids=["a pause", "a hold", "a sleep"],
)
@pytest.mark.parametrize("resume", [failing(), Step(hangs=True), Step(does_it=True, fault=UNKNOWN.fault)])
def test_an_engine_is_let_go_after_a_pause_and_its_undoing_have_failed(
    body: CommandBody, steps: dict[str, dict[int, Step]], resume: Step
) -> None:
    """A blip of the network: whoever paused it was told that it failed, and won't resume it. The worker does."""

    async def scenario(rig: Rig) -> None:
        result = await rig.send(body)
        assert result.status is ResultStatus.FAILED
        pause = rig.agent.state.pause
        assert pause is not None
        assert pause.expires_at is not None
        await asyncio.sleep(2 * RETRY_S + 0.1)
        assert not is_paused(rig)
        assert rig.agent.state.pause is None
        assert rig.agent.status().drift is None
        assert rig.agent.state.running is None

    on_worker(scenario, steps | {"resume": {1: resume, 2: failing()}})


class LatePause(FakeEngine):
    """Pauses only after it was cancelled, and lets go then."""

    async def pause(self, mode: PauseMode, clear_cache: bool) -> PausedData:
        """See `Engine`."""
        try:
            await asyncio.sleep(1000.0)
        finally:
            await asyncio.sleep(20.0)
            await self.requests.pause(mode, clear_cache)
        raise AssertionError


def test_an_engine_that_clings_to_a_pause_that_was_given_up_is_let_go_when_it_ends() -> None:
    """The resume after it came too early: the engine stood still only then."""

    async def main() -> None:
        async with worker_on_bus(LatePause()) as rig:
            failed = await rig.send(PauseGeneration(owner="u", lease_s=30.0), expires_in_s=1.0)
            assert code_of(failed) is FaultCode.DEADLINE
            await asyncio.sleep(60.0)
            assert not is_paused(rig)
            assert rig.agent.state.pause is None

    run(main())
