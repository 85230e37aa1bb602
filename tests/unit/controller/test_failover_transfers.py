"""Controllers that die in the middle of another trainer's update: its next steps find everything at the workers."""

import asyncio
import json

import pytest

from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.controller.callers import SILENT_S
from rlbus.controller.transfers import HOLD_S
from rlbus.schemas import Version, WeightsState
from rlbus.testing import LoopClock, sequential_ids
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller.failover_stage import Stage, play
from tests.unit.controller.scene import PAUSED, RUNNING, outcomes, worker

pytestmark = pytest.mark.unit

INIT = json.dumps({"rank_offset": 1, "world_size": 3})


def test_the_steps_go_on_under_the_next_leader() -> None:
    """The group is the engines', the pause is held in the trainer's name: nothing of it was the leader's alone."""

    async def scenario(stage: Stage) -> None:
        await stage.client.transfer("init", INIT)
        await stage.client.transfer("start")
        stage.kill(stage.processes[0])
        await stage.client.transfer("update", json.dumps({"step": 1}))
        await stage.client.transfer("finish")
        assert stage.weights() == [(WeightsState.CLEAN, Version(step=1))] * 2
        assert await stage.generations() == [RUNNING] * 2
        assert (await stage.client.status()).version == Version(step=1)

    play([worker(1), worker(2)], scenario)


@pytest.mark.parametrize("takes_s", [20.0, HOLD_S + 60.0])
def test_a_transfer_goes_on_under_the_next_leader_as_long_as_its_trainer_asks_for_it(takes_s: float) -> None:
    """Its bytes pass by the controllers, so none of them that dies is a reason to tear what comes."""

    async def scenario(stage: Stage) -> None:
        await stage.client.transfer("init", INIT)
        await stage.client.transfer("start")
        asyncio.get_running_loop().call_later(1.0, stage.kill, stage.processes[0])
        report = await stage.client.transfer("update", json.dumps({"step": 1}))
        assert outcomes(report) == {"1": "ok", "2": "ok"}
        assert await stage.generations() == [PAUSED] * 2
        await stage.client.transfer("finish")
        assert stage.weights() == [(WeightsState.CLEAN, Version(step=1))] * 2
        assert await stage.generations() == [RUNNING] * 2

    slow = {"update_native": {1: Step(latency_s=takes_s)}}
    play([worker(1, slow), worker(2, slow)], scenario)


def test_a_trainer_that_dies_once_the_next_leader_has_heard_it_is_given_up_too() -> None:
    """That it asked once doesn't mean that it is still there."""

    async def scenario(stage: Stage) -> None:
        await stage.client.transfer("init", INIT)
        await stage.client.transfer("start")
        transport = stage.broker.connect("trainer")
        async with Bus(transport, clock=LoopClock(), new_id=sequential_ids("other")) as bus:
            other = FleetClient(bus, "test", caller=stage.client.caller)
            update = asyncio.ensure_future(other.transfer("update", json.dumps({"step": 1})))
            await asyncio.sleep(1.0)
            stage.kill(stage.processes[0])
            await asyncio.sleep(20.0)
            assert await stage.generations() == [PAUSED] * 2
            stage.broker.partition(transport)
            await asyncio.sleep(SILENT_S + 10.0)
            assert await stage.generations() == [RUNNING] * 2
            assert (await stage.client.status()).op_id is None
            update.cancel()
            await asyncio.wait({update})

    hung = {"update_native": {1: Step(hangs=True, after_parts=0, claims_touched=False)}}
    play([worker(1, hung), worker(2, hung)], scenario)
