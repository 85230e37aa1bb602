"""What a trainer of somebody else's says of a group of rlbus' own."""

import json
from typing import Any

import pytest

from rlbus.schemas import (
    ApplyUpdate,
    FaultCode,
    FinishUpdate,
    InitTransfer,
    PauseGeneration,
    ResultStatus,
    StartUpdate,
    Version,
    WeightsState,
    WeightsView,
)
from rlbus.testing import run
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript
from rlbus.workers.engines.native_group import GroupedNative
from rlbus.workers.testing import code_of, worker_on_bus

pytestmark = pytest.mark.unit


class Grouped(FakeEngine):
    """A fake engine that joins rlbus' own groups, and so knows what an `init_info` has to be."""

    def check_init(self, info: dict[str, Any]) -> None:
        """See `ChecksInit`."""
        GroupedNative(self).check_init(info)


GROUP = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
V2 = Version(step=2)
PART = ApplyUpdate(info=json.dumps({"step": 2}))


@pytest.mark.parametrize(
    "wrong", [{"master_port": 0}, {"rank_offset": 2}, {"packed": True}], ids=["value", "ranks", "field"]
)
def test_an_init_that_makes_no_sense_leaves_the_update_that_somebody_else_has_open(wrong: dict[str, object]) -> None:
    """It was torn first, and the mistake found then. One that is right gives it up, as ever."""

    async def scenario() -> None:
        async with worker_on_bus(Grouped(FakeScript({}))) as rig:
            begin = InitTransfer(info=json.dumps(GROUP))
            for body in (begin, PauseGeneration(), StartUpdate(), PART):
                assert (await rig.send(body)).status is ResultStatus.OK
            refused = await rig.send(InitTransfer(info=json.dumps(GROUP | wrong)))
            assert (refused.status, code_of(refused)) == (ResultStatus.REFUSED, FaultCode.BAD_MESSAGE)
            assert rig.agent.state.weights.state is WeightsState.UPDATING
            assert (await rig.send(PART)).status is ResultStatus.OK
            assert (await rig.send(FinishUpdate(version=V2))).status is ResultStatus.OK
            assert rig.agent.state.weights == WeightsView(state=WeightsState.CLEAN, version=V2, last_good=V2)
            assert rig.engine.violations == []

    run(scenario())
