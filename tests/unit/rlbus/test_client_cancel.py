"""FleetClient.cancel while nobody answers, or its own connection is down."""

import asyncio

import pytest

from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.errors import BrokenError, DeadlineError
from rlbus.schemas import CancelOp, ControlReply, ControlRequest, OpAccepted
from rlbus.testing import LoopClock, MemoryBroker, run
from tests.unit.rlbus.test_client import NAMESPACE, ScriptedController, play

pytestmark = pytest.mark.unit


def test_a_cancel_that_nobody_answers_is_sent_again() -> None:
    """Two answers are lost, the third comes, within the deadline; without any it is a DeadlineError at its end."""

    def script(request: ControlRequest, nth: int) -> list[ControlReply | float]:
        return [] if nth < 3 else [OpAccepted(op_id=request.op_id)]

    async def scenario(fleet: FleetClient, controller: ScriptedController) -> None:
        loop = asyncio.get_running_loop()
        await fleet.cancel("op")
        assert loop.time() == pytest.approx(1.0 + 2.0, abs=0.1)
        assert [(r.of_op_id, r.op_id) for r in controller.requests if isinstance(r, CancelOp)] == [("op", "op-1")] * 3

    async def in_vain(fleet: FleetClient, _controller: ScriptedController) -> None:
        with pytest.raises(DeadlineError, match=r"cancel did not end within 2\.5 s: .*doesn't answer"):
            await fleet.cancel("op", deadline_s=2.5)
        assert asyncio.get_running_loop().time() == pytest.approx(2.5, abs=0.1)

    play(script, scenario)
    play(lambda _request, _nth: [], in_vain)


def test_a_cancel_waits_for_our_own_connection() -> None:
    """It is down when it is asked for, and back after 3 s."""

    async def body() -> None:
        broker = MemoryBroker()
        transport = broker.connect()
        async with Bus(transport, clock=LoopClock()) as ours, Bus(broker.connect(), clock=LoopClock()) as theirs:
            controller = ScriptedController(theirs, lambda request, _nth: [OpAccepted(op_id=request.op_id)])
            broker.disconnect(transport)
            task = asyncio.create_task(FleetClient(ours, NAMESPACE).cancel("op"))
            await asyncio.sleep(3.0)
            broker.reconnect(transport)
            await task
            assert len(controller.requests) == 1
            await controller.aclose()
            broker.disconnect(transport)
            with pytest.raises(BrokenError):
                await FleetClient(ours, NAMESPACE).cancel("op", deadline_s=2.0)

    run(body())
