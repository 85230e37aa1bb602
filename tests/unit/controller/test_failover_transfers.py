"""Controllers that die in the middle of another trainer's update: its next steps find everything at the workers."""

import asyncio
import json

import pytest

from rlbus.errors import PartialError
from rlbus.schemas import FaultCode, Version, WeightsState
from rlbus.workers.engines.fake import DEFAULT_TENSORS
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


# Every tensor, named: less doesn't heal torn weights.
WHOLE_MODEL = {
    "step": 2,
    "names": [spec.name for spec in DEFAULT_TENSORS],
    "dtype_names": [spec.dtype for spec in DEFAULT_TENSORS],
    "shapes": [spec.shape for spec in DEFAULT_TENSORS],
}


def test_a_step_whose_leader_dies_says_so_and_the_update_can_be_begun_again() -> None:
    """What became of it isn't known; a start gives up what is open, and nobody generates on torn weights meanwhile."""

    async def scenario(stage: Stage) -> None:
        await stage.client.transfer("init", INIT)
        await stage.client.transfer("start")
        asyncio.get_running_loop().call_later(1.0, stage.kill, stage.processes[0])
        with pytest.raises(PartialError) as caught:
            await stage.client.transfer("update", json.dumps({"step": 1}))
        assert outcomes(caught.value.report) == {"1": "unknown", "2": "unknown"}
        assert caught.value.report.fault.code is FaultCode.CONTROLLER_LOST
        assert await stage.generations() == [PAUSED] * 2
        await asyncio.sleep(30)
        for step, info in (("start", None), ("update", json.dumps(WHOLE_MODEL)), ("finish", None)):
            await stage.client.transfer(step, info)
        assert stage.weights() == [(WeightsState.CLEAN, Version(step=1))] * 2
        assert await stage.generations() == [RUNNING] * 2

    slow = {"update_native": {1: Step(latency_s=20.0)}}
    play([worker(1, slow), worker(2, slow)], scenario)
