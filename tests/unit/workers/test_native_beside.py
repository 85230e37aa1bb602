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
