"""Sleep and wake at one worker: what runs, what is refused, what is undone. In virtual time."""

import asyncio
from pathlib import Path

import pytest

from rlbus.schemas import (
    CommandBody,
    FaultCode,
    Generation,
    GetChecksums,
    InitGroup,
    LoadWeights,
    PauseGeneration,
    PauseMode,
    PrepareReload,
    ResultStatus,
    ResumeGeneration,
    Sleep,
    SleepChanged,
    SleepData,
    SleepTag,
    Version,
    WakeUp,
    WeightsState,
)
from rlbus.testing import run
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.fake import DEFAULT_TENSORS, KV_CACHE_BYTES, ROUTES, FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step, failing
from rlbus.workers.leases import RETRY_S
from rlbus.workers.testing import Rig, code_of, on_worker, updated, worker_on_bus

pytestmark = pytest.mark.unit

V1, V2 = Version(step=1), Version(step=2)
WEIGHTS, KV = SleepTag.WEIGHTS, SleepTag.KV_CACHE
BOTH = (KV, WEIGHTS)


async def ok(rig: Rig, body: CommandBody) -> SleepData | None:
    result = await rig.send(body)
    assert result.status is ResultStatus.OK, result.fault
    return result.data if isinstance(result.data, SleepData) else None


def generates(rig: Rig) -> bool:
    return not rig.engine.requests.is_paused


def asleep(rig: Rig) -> tuple[SleepTag, ...]:
    return tuple(sorted(rig.engine.memory.asleep))


def test_sleep_frees_the_memory_and_a_wake_lets_the_worker_go_on() -> None:
    """The freed bytes are counted, requests in flight end as aborted, late ones wait; status and events tell."""

    async def scenario(rig: Rig) -> None:
        request = rig.engine.submit("r1", (1, 2), 1000)
        await asyncio.sleep(0.1)
        data = await ok(rig, Sleep())
        assert data is not None
        assert (data.asleep, data.num_aborted) == (BOTH, 1)
        assert data.num_bytes is not None
        assert data.num_bytes > KV_CACHE_BYTES
        assert rig.engine.memory.num_bytes == 0
        assert request.finish == "abort"
        late = rig.engine.submit("r2", (1, 2), 5)
        await asyncio.sleep(1.0)
        status = rig.last.status
        assert (status.asleep, status.generation, status.pause, status.drift) == (BOTH, Generation.PAUSED, None, None)
        assert late.tokens == []
        woken = await ok(rig, WakeUp())
        assert woken is not None
        assert (woken.asleep, woken.num_bytes) == ((), data.num_bytes)
        await asyncio.sleep(1.0)
        assert late.finish == "length"
        assert (rig.last.status.asleep, rig.last.status.generation) == ((), Generation.RUNNING)
        assert [e.asleep for e in rig.events if isinstance(e, SleepChanged)] == [BOTH, ()]

    on_worker(scenario)


def test_a_partial_wake_runs_no_step() -> None:
    """The last tag decides, in whichever order they wake."""

    async def scenario(rig: Rig) -> None:
        for first, last in ((WEIGHTS, KV), (KV, WEIGHTS)):
            await ok(rig, Sleep())
            request = rig.engine.submit(f"r-{first.value}", (1,), 3)
            await ok(rig, WakeUp(tags=(first,)))
            await asyncio.sleep(1.0)
            assert (request.tokens, asleep(rig), generates(rig)) == ([], (last,), False)
            assert code_of(await rig.send(ResumeGeneration(force=True))) is FaultCode.ASLEEP
            await ok(rig, WakeUp(tags=(last,)))
            await asyncio.sleep(1.0)
            assert request.finish == "length"

    on_worker(scenario)


def test_a_wake_ends_no_pause() -> None:
    """SCENARIOS 39: paused, asleep, awake: still paused, by the same owner, until somebody resumes."""

    async def scenario(rig: Rig) -> None:
        await ok(rig, PauseGeneration(owner="ann"))
        await ok(rig, Sleep())
        assert code_of(await rig.send(ResumeGeneration())) is FaultCode.ASLEEP
        await ok(rig, WakeUp())
        await asyncio.sleep(1.0)
        assert not generates(rig)
        pause = rig.last.status.pause
        assert pause is not None
        assert (pause.owner, rig.last.status.drift) == ("ann", None)
        await ok(rig, ResumeGeneration())
        assert generates(rig)

    on_worker(scenario)


def test_a_pause_while_asleep_is_there_after_the_wake() -> None:
    """In every mode; a wait has nothing to wait for."""

    async def scenario(rig: Rig) -> None:
        for mode in PauseMode:
            await ok(rig, Sleep(mode=PauseMode.KEEP))
            rig.engine.submit(f"r-{mode.value}", (1,), 3)
            await ok(rig, PauseGeneration(owner="bob", mode=mode))
            await ok(rig, WakeUp())
            assert not generates(rig)
            await ok(rig, ResumeGeneration())

    on_worker(scenario)


def test_a_lease_that_ends_while_asleep_resumes_when_the_worker_is_awake() -> None:
    """Not before, and not after a partial wake."""

    async def scenario(rig: Rig) -> None:
        await ok(rig, PauseGeneration(owner="u", lease_s=5.0))
        await ok(rig, Sleep())
        await asyncio.sleep(20.0)
        assert "resume" not in rig.engine.calls
        await ok(rig, WakeUp(tags=(KV,)))
        await asyncio.sleep(20.0)
        assert "resume" not in rig.engine.calls
        await ok(rig, WakeUp())
        await asyncio.sleep(0.1)
        assert generates(rig)
        assert rig.agent.status().pause is None

    on_worker(scenario)


def test_sleep_and_wake_are_idempotent_per_tag() -> None:
    """A tag that sleeps isn't put to sleep again, one that is awake isn't woken: the bytes are counted once."""

    async def scenario(rig: Rig) -> None:
        first = await ok(rig, Sleep(tags=(KV,)))
        assert first is not None
        assert (first.asleep, first.num_bytes) == ((KV,), KV_CACHE_BYTES)
        again = await ok(rig, Sleep(tags=(KV,)))
        assert again == SleepData(asleep=(KV,))
        both = await ok(rig, Sleep())
        assert both is not None
        assert (both.asleep, both.num_bytes) == (BOTH, rig.engine.memory._sizes[WEIGHTS])
        assert await ok(rig, Sleep(level=2)) == SleepData(asleep=BOTH)
        assert rig.agent.state.weights.state is WeightsState.CLEAN
        for _ in range(2):
            data = await ok(rig, WakeUp(tags=(WEIGHTS,)))
            assert data is not None
            assert data.asleep == (KV,)
        assert list(rig.engine.calls).count("sleep") == 2
        await ok(rig, WakeUp())
        await ok(rig, WakeUp())
        assert generates(rig)

    on_worker(scenario)


def test_an_update_is_refused_while_the_weights_sleep() -> None:
    """SCENARIOS 37: at its first command, before a group is formed or a byte moves; the fault names what to wake."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V1)
        await ok(rig, Sleep(tags=(WEIGHTS,)))
        calls = len(rig.engine.calls)
        prepared = await rig.prepare(V2, DEFAULT_TENSORS, "u2")
        joined = await rig.send(InitGroup(plan=rig.plan(2)))
        loaded = await rig.send(LoadWeights(path="/w", version=V2))
        checked = await rig.send(PrepareReload(path="/w", version=V2))
        summed = await rig.send(GetChecksums())
        for result in (prepared, joined, loaded, checked, summed):
            assert (result.status, code_of(result)) == (ResultStatus.REFUSED, FaultCode.ASLEEP)
            assert result.fault is not None
            assert result.fault.detail["tags"] == "weights"
        assert set(list(rig.engine.calls)[calls:]) <= {"observe", "check_manifest"}
        await ok(rig, WakeUp())
        await updated(rig, V2, "u3", 2)

    on_worker(scenario)


def test_weights_that_fell_asleep_between_two_steps_of_an_update_stop_it_before_the_first_byte() -> None:
    """Also when somebody put the engine to sleep behind the agent's back."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, DEFAULT_TENSORS)
        rig.engine.memory.sleep(frozenset({WEIGHTS}), 1)
        result = await rig.receive(V1, DEFAULT_TENSORS).result()
        assert (result.status, code_of(result)) == (ResultStatus.REFUSED, FaultCode.ASLEEP)
        assert rig.agent.state.weights.state is WeightsState.CLEAN
        assert "weights" in (rig.agent.status().drift or "")
        await ok(rig, WakeUp())
        await ok(rig, Sleep(tags=(WEIGHTS,)))
        again = await rig.receive(V1, DEFAULT_TENSORS, "u").result()
        assert code_of(again) is FaultCode.ASLEEP

    on_worker(scenario)


def test_an_update_can_be_taken_with_the_cache_asleep_and_no_pause(tmp_path: Path) -> None:
    """The way of a trainer that shares the GPU: the weights come, the cache wakes, and it generates on them."""

    async def scenario(rig: Rig) -> None:
        await ok(rig, Sleep())
        await ok(rig, WakeUp(tags=(WEIGHTS,)))
        await rig.prepare(V1, DEFAULT_TENSORS)
        await ok(rig, InitGroup(plan=rig.plan()))
        received = await rig.receive(V1, DEFAULT_TENSORS).result()
        assert received.status is ResultStatus.OK
        assert code_of(await rig.send(Sleep())) is FaultCode.BUSY
        committed = await rig.commit(V1)
        assert committed.status is ResultStatus.OK
        assert not generates(rig)
        await ok(rig, WakeUp())
        assert generates(rig)
        assert rig.agent.state.weights.version == V1
        # Rule 7: caches of the old weights were emptied first.
        assert [c for c in rig.engine.calls if c in ("flush_cache", "resume")] == ["flush_cache", "resume"]

    on_worker(scenario)


def test_discarded_weights_are_dirty_until_others_have_come(tmp_path: Path) -> None:
    """Level 2: a worker that wakes on them stays paused, and a reload sets it free."""
    folder = str(tmp_path)

    async def scenario(rig: Rig) -> None:
        rig.engine.save(tmp_path, V2)
        await updated(rig, V1)
        await ok(rig, Sleep(level=2))
        weights = rig.agent.status().weights
        assert (weights.state, weights.version, weights.last_good) == (WeightsState.DIRTY, None, V1)
        await ok(rig, WakeUp())
        await asyncio.sleep(60.0)
        assert not generates(rig)
        assert rig.last.status.pause is not None
        assert code_of(await rig.send(ResumeGeneration())) is FaultCode.DIRTY
        await ok(rig, LoadWeights(path=folder, version=V2))
        await asyncio.sleep(RETRY_S + 0.1)
        assert generates(rig)
        assert rig.agent.state.weights.version == V2

    on_worker(scenario, config=AgentConfig(weight_roots=(folder,)))


def test_a_sleep_that_fails_is_taken_back() -> None:
    """The memory is there again, and the worker goes on; what slept before still sleeps."""

    async def scenario(rig: Rig) -> None:
        result = await rig.send(Sleep())
        assert (result.status, code_of(result)) == (ResultStatus.FAILED, FaultCode.ENGINE_FAILED)
        assert (asleep(rig), generates(rig)) == ((), True)
        await ok(rig, Sleep(tags=(KV,)))
        result = await rig.send(Sleep(tags=(WEIGHTS,)))
        assert result.status is ResultStatus.FAILED
        assert (asleep(rig), generates(rig)) == ((KV,), False)
        await ok(rig, WakeUp())
        assert generates(rig)

    on_worker(scenario, {"sleep": {1: failing(), 3: failing()}})


def test_a_sleep_that_can_not_be_taken_back_counts_as_asleep() -> None:
    """In doubt nothing runs, until a wake has succeeded."""

    async def scenario(rig: Rig) -> None:
        assert (await rig.send(Sleep())).status is ResultStatus.FAILED
        assert not generates(rig)
        assert code_of(await rig.send(ResumeGeneration())) is FaultCode.ASLEEP
        assert code_of(await rig.prepare(V1, DEFAULT_TENSORS)) is FaultCode.ASLEEP
        await ok(rig, WakeUp())
        assert generates(rig)

    on_worker(scenario, {"sleep": {1: failing()}, "wake_up": {1: failing()}})


@pytest.mark.parametrize("held", [(), (PauseGeneration(owner="ann"),)], ids=["running", "held"])
def test_a_failed_sleep_that_could_not_be_taken_back_is_by_the_worker_itself(held: tuple[CommandBody, ...]) -> None:
    """Whoever was told that it failed sends no wake. It ends no pause, and a part that was put to sleep sleeps on."""

    async def scenario(rig: Rig) -> None:
        for body in (*held, Sleep(tags=(KV,))):
            await ok(rig, body)
        assert (await rig.send(Sleep())).status is ResultStatus.FAILED
        await asyncio.sleep(2 * RETRY_S + 0.1)
        assert asleep(rig) == (KV,)
        assert rig.agent.state.asleep == frozenset((KV,))
        assert rig.agent.state.running is None
        await ok(rig, WakeUp())
        assert generates(rig) is not bool(held)
        num_calls = list(rig.engine.calls).count("wake_up")
        await asyncio.sleep(60.0)
        assert list(rig.engine.calls).count("wake_up") == num_calls

    on_worker(scenario, {"sleep": {2: failing()}, "wake_up": {1: failing(), 2: failing()}})


def test_what_a_failed_sleep_has_left_is_not_woken_once_somebody_has_put_it_to_sleep() -> None:
    """The sleep that was asked for again has its memory."""

    async def scenario(rig: Rig) -> None:
        assert (await rig.send(Sleep())).status is ResultStatus.FAILED
        await ok(rig, Sleep())
        await asyncio.sleep(60.0)
        assert asleep(rig) == BOTH

    on_worker(scenario, {"sleep": {1: failing()}, "wake_up": {1: failing()}})


class LateSleep(FakeEngine):
    """Frees its memory only after it was cancelled, and lets go then."""

    async def sleep(self, tags: frozenset[SleepTag], level: int, mode: PauseMode) -> SleepData:
        """See `SleepEngine`."""
        try:
            await asyncio.sleep(1000.0)
        finally:
            await asyncio.sleep(20.0)
            await super().sleep(tags, level, mode)
        raise AssertionError


def test_a_sleep_that_was_given_up_and_comes_late_is_taken_back_when_it_has_ended() -> None:
    """The wake after it came too early; until then it counts as asleep."""

    async def main() -> None:
        engine = LateSleep()
        async with worker_on_bus(engine) as rig:
            assert code_of(await rig.send(Sleep(), expires_in_s=1.0)) is FaultCode.DEADLINE
            assert rig.agent.state.asleep == frozenset(BOTH)
            await asyncio.sleep(60.0)
            assert (asleep(rig), generates(rig)) == ((), True)
        assert engine.violations == []

    run(main())


def test_a_failed_sleep_that_may_have_cost_the_weights_leaves_them_dirty() -> None:
    """It is woken, and stays paused."""

    async def scenario(rig: Rig) -> None:
        assert (await rig.send(Sleep(level=2))).status is ResultStatus.FAILED
        await asyncio.sleep(60.0)
        assert (asleep(rig), generates(rig)) == ((), False)
        assert rig.agent.state.weights.state is WeightsState.DIRTY
        assert code_of(await rig.send(ResumeGeneration())) is FaultCode.DIRTY

    on_worker(scenario, {"sleep": {1: failing()}})


def test_a_wake_that_fails_leaves_it_asleep_and_can_be_asked_for_again() -> None:
    """And one whose resume failed is carried out by the next."""

    async def scenario(rig: Rig) -> None:
        await ok(rig, Sleep())
        assert (await rig.send(WakeUp())).status is ResultStatus.FAILED
        assert (asleep(rig), rig.agent.state.asleep) == (BOTH, frozenset(BOTH))
        assert (await rig.send(WakeUp())).status is ResultStatus.FAILED
        assert (asleep(rig), generates(rig)) == ((), False)
        await ok(rig, WakeUp())
        assert generates(rig)

    on_worker(scenario, {"wake_up": {1: failing()}, "resume": {1: failing()}})


def test_a_wake_whose_resume_failed_is_carried_out_by_the_worker_itself() -> None:
    """Whoever woke it may be gone: no engine stands still for that."""

    async def scenario(rig: Rig) -> None:
        await ok(rig, Sleep())
        assert (await rig.send(WakeUp())).status is ResultStatus.FAILED
        assert not generates(rig)
        await asyncio.sleep(30.0)
        assert generates(rig)
        assert rig.agent.state.pause is None

    on_worker(scenario, {"resume": {1: failing(), 2: failing()}})


def test_a_sleep_that_waits_for_requests_is_taken_back_by_a_wake() -> None:
    """It ends as cancelled, the request goes on, and nothing sleeps."""

    async def scenario(rig: Rig) -> None:
        request = rig.engine.submit("r1", (1,), 10_000)
        sleeping = rig.post(Sleep(mode=PauseMode.WAIT), expires_in_s=500.0)
        await asyncio.sleep(1.0)
        assert rig.agent.status().work is not None
        await ok(rig, WakeUp())
        result = await sleeping.result()
        assert (result.status, code_of(result)) == (ResultStatus.FAILED, FaultCode.CANCELLED)
        assert (asleep(rig), generates(rig)) == ((), True)
        await asyncio.sleep(150.0)
        assert request.finish == "length"

    on_worker(scenario)


def test_a_sleep_is_announced_as_soon_as_it_begins() -> None:
    """SCENARIOS 41: who hears of it sends no more rollouts; the engine itself holds those that come all the same."""

    async def scenario(rig: Rig) -> None:
        sleeping = rig.post(Sleep())
        await asyncio.sleep(0.5)
        work = rig.last.status.work
        assert work is not None
        assert (work.route, rig.last.status.asleep) == ("sleep", ())
        await sleeping.result()

    on_worker(scenario, {"sleep": {1: Step(latency_s=2.0)}})


def test_bad_tags_and_levels_are_refused_before_anything_changes() -> None:
    """Each names what would do."""

    async def scenario(rig: Rig) -> None:
        for body in (Sleep(tags=()), Sleep(level=0), Sleep(level=3), WakeUp(tags=())):
            result = await rig.send(body)
            assert (result.status, code_of(result)) == (ResultStatus.REFUSED, FaultCode.BAD_MESSAGE)
        assert (asleep(rig), generates(rig)) == ((), True)

    on_worker(scenario)


def test_an_engine_without_sleep_does_not_serve_it() -> None:
    """The route isn't advertised, and is refused."""

    async def main() -> None:
        async with worker_on_bus(FakeEngine(FakeScript(), routes=ROUTES - {"sleep", "wake_up"})) as rig:
            assert not {"sleep", "wake_up"} & set(rig.agent.descriptor.routes)
            assert code_of(await rig.send(Sleep())) is FaultCode.NO_ROUTE
            assert code_of(await rig.send(WakeUp())) is FaultCode.NO_ROUTE

    run(main())
