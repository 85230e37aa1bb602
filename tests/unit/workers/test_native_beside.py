"""An update that somebody else's trainer drives, beside the leases of pauses, sleep, and the updates of rlbus."""

import asyncio

import pytest

from rlbus.schemas import (
    FaultCode,
    FinishUpdate,
    Generation,
    InitGroup,
    InitTransfer,
    PauseGeneration,
    ResultStatus,
    ShutdownTransfer,
    Sleep,
    SleepTag,
    StartUpdate,
    WakeUp,
    WeightsState,
)
from rlbus.workers.engines.fake_script import Step
from rlbus.workers.testing import Rig, code_of, on_worker
from tests.unit.workers.test_native import INIT, V1, V2, brings_whole, weights

pytestmark = pytest.mark.unit


def test_a_pause_whose_lease_ends_gives_the_update_up() -> None:
    """Nobody renewed it: before the first byte the worker generates again, on what it had."""

    async def scenario(rig: Rig) -> None:
        await rig.send(INIT)
        await rig.send(PauseGeneration(lease_s=5.0))
        await rig.send(StartUpdate())
        await asyncio.sleep(20.0)
        assert rig.agent.state.pause is None
        assert rig.agent.state.session is None
        assert (await rig.engine.observe()).generation is Generation.RUNNING

    on_worker(scenario)


LEASE_S = 600.0


async def begun_by_a_trainer(rig: Rig) -> None:
    """Up to an open update, in a pause with a lease."""
    for body in (INIT, PauseGeneration(lease_s=LEASE_S, owner="trainer"), StartUpdate()):
        assert (await rig.send(body)).status is ResultStatus.OK


LATE = Step(latency_s=LEASE_S + 100.0)


@pytest.mark.parametrize("verb", ["start_native", "update_native", "finish_native"])
def test_a_step_that_outlasts_the_lease_and_ends_well_leaves_the_update_whole(verb: str) -> None:
    """Its trainer lives. The pause holds for as long again, and no longer: then the worker generates by itself."""

    async def scenario(rig: Rig) -> None:
        for body in (INIT, PauseGeneration(lease_s=LEASE_S, owner="trainer")):
            assert (await rig.send(body)).status is ResultStatus.OK
        for step in (StartUpdate(), brings_whole(1), FinishUpdate(version=V1)):
            result = await rig.post(step, expires_in_s=3000.0).result(2000.0)
            assert (result.status, result.fault) == (ResultStatus.OK, None)
        assert weights(rig) == (WeightsState.CLEAN, V1)
        pause = rig.agent.state.pause
        assert pause is not None
        assert pause.expires_at is not None
        left_s = pause.expires_at - rig.worker_bus.clock.now()
        assert LEASE_S - 1.0 < left_s <= LEASE_S
        await asyncio.sleep(left_s - 1.0)
        assert (await rig.engine.observe()).generation is Generation.PAUSED
        await asyncio.sleep(2.0)
        assert (await rig.engine.observe()).generation is Generation.RUNNING

    on_worker(scenario, {verb: {1: LATE}})


def test_a_trainer_that_dies_after_such_a_step_is_noticed_by_the_next_lease() -> None:
    """Its update is given up then, torn."""

    async def scenario(rig: Rig) -> None:
        await begun_by_a_trainer(rig)
        assert (await rig.post(brings_whole(1), expires_in_s=3000.0).result(2000.0)).status is ResultStatus.OK
        await asyncio.sleep(LEASE_S + 1.0)
        assert rig.agent.state.session is None
        assert weights(rig) == (WeightsState.DIRTY, None)

    on_worker(scenario, {"update_native": {1: LATE}})


@pytest.mark.parametrize(
    ("step", "left"),
    [
        (Step(hangs=True, claims_touched=False), (WeightsState.CLEAN, None)),
        (Step(hangs=True, after_parts=1), (WeightsState.DIRTY, None)),
    ],
    ids=["untouched", "touched"],
)
def test_a_transfer_that_hangs_past_its_lease_is_ended_by_its_deadline_and_then_the_lease_ends(
    step: Step, left: tuple[WeightsState, None]
) -> None:
    """A dead trainer keeps no whole engine paused."""

    async def scenario(rig: Rig) -> None:
        await begun_by_a_trainer(rig)
        failed = await rig.post(brings_whole(1), expires_in_s=LEASE_S + 100.0).result(2000.0)
        assert code_of(failed) is FaultCode.DEADLINE
        await asyncio.sleep(1.0)
        assert rig.agent.state.session is None
        assert weights(rig) == left
        is_whole = left[0] is WeightsState.CLEAN
        assert (rig.agent.state.pause is None) is is_whole
        assert rig.engine.requests.is_paused is not is_whole

    on_worker(scenario, {"update_native": {1: step}})


@pytest.mark.parametrize("body", [INIT, ShutdownTransfer(), StartUpdate()], ids=["init", "shutdown", "start"])
def test_another_trainer_leaves_an_update_of_rlbus_that_awaits_its_commit(
    body: InitTransfer | ShutdownTransfer | StartUpdate,
) -> None:
    """Its controller ends it, or whoever takes over from that one: to give it up would tear the weights."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, rig.engine.tensors, "u", 1)
        await rig.receive(V1, rig.engine.tensors, "u", 1).result()
        refused = await rig.send(body)
        assert (refused.status, code_of(refused)) == (ResultStatus.REFUSED, FaultCode.BUSY)
        assert refused.fault is not None
        assert (refused.fault.detail["open"], refused.fault.detail["owner"]) == ("u", "u")
        assert (await rig.commit(V1, "u")).status is ResultStatus.OK
        assert weights(rig) == (WeightsState.CLEAN, V1)
        assert (await rig.send(body)).status is ResultStatus.OK

    on_worker(scenario)


def test_an_update_of_a_dead_controller_is_given_up_when_its_lease_ends_and_another_trainer_goes_on() -> None:
    """What it left keeps nobody out for longer."""

    async def scenario(rig: Rig) -> None:
        await rig.prepare(V1, rig.engine.tensors)
        await rig.send(InitGroup(plan=rig.plan()))
        await rig.send(PauseGeneration(owner="u", lease_s=30.0))
        await rig.receive(V1, rig.engine.tensors, "u", 1).result()
        assert code_of(await rig.send(StartUpdate())) is FaultCode.BUSY
        await asyncio.sleep(31.0)
        assert weights(rig) == (WeightsState.DIRTY, None)
        for body in (INIT, PauseGeneration(), StartUpdate(), brings_whole(2), FinishUpdate(version=V2)):
            assert (await rig.send(body)).status is ResultStatus.OK
        assert weights(rig) == (WeightsState.CLEAN, V2)

    on_worker(scenario)


def test_no_group_is_joined_while_the_weights_sleep() -> None:
    """A transfer needs them awake; an engine that was asked would fail somewhere inside. Leaving one needs nothing."""

    async def scenario(rig: Rig) -> None:
        await rig.send(Sleep())
        refused = await rig.send(INIT)
        assert (refused.status, code_of(refused)) == (ResultStatus.REFUSED, FaultCode.ASLEEP)
        assert "init_native" not in rig.engine.calls
        assert (await rig.send(ShutdownTransfer())).status is ResultStatus.OK
        await rig.send(WakeUp(tags=(SleepTag.WEIGHTS,)))
        assert (await rig.send(INIT)).status is ResultStatus.OK

    on_worker(scenario)
