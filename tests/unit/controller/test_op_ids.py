"""Op ids of steps: no controller takes what became of its predecessor's steps for the outcome of its own."""

import asyncio
from typing import Any

import pytest

from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.controller.op_ids import MAX_TOKEN_CHARS, derive_step
from rlbus.controller.service import Controller
from rlbus.errors import RefusedError
from rlbus.schemas import Generation, OpStatus, PauseGeneration
from rlbus.testing import LoopClock, sequential_ids
from tests.unit.controller.scene import Scene, play, worker

pytestmark = pytest.mark.unit


def test_an_op_that_a_second_controller_runs_again_is_really_run_again() -> None:
    """Without a journal (`--single`) a restarted controller knows nothing of the op that the client asks for again.
    Somebody has resumed meanwhile: that the pause had succeeded before is no answer now.
    """

    async def scenario(s: Scene) -> None:
        lives: list[Any] = []

        def restart() -> None:
            s.kill_controller()
            bus = Bus(s.fleet.broker.connect(), clock=LoopClock(), new_id=sequential_ids("c2"))
            again = Controller(bus, "test", term=s.fleet.controller.term + 1)
            lives.extend([asyncio.get_running_loop().create_task(again.run()), bus])

        s.at(PauseGeneration, restart)
        asked = asyncio.get_running_loop().create_task(s.fleet.client.pause(check=False))
        await asyncio.sleep(2.0)
        assert (await s.fleet.client.resume()).status is OpStatus.OK
        report = await asked
        assert (report.status, len(lives)) == (OpStatus.OK, 2)
        assert await s.generations() == [Generation.PAUSED, Generation.PAUSED]
        lives[0].cancel()
        await asyncio.gather(lives[0], return_exceptions=True)
        await lives[1].aclose()

    play([worker(1), worker(2)], scenario)


def test_steps_of_one_op_under_two_terms_have_different_ids_that_fit_a_subject() -> None:
    """Also when the op's own id leaves no room."""
    for op_id in ("x", "x" * MAX_TOKEN_CHARS):
        ids = {derive_step(op_id, term, "pause") for term in (1, 2, 2**53 - 1)}
        assert len(ids) == 3
        assert all(len(one) <= MAX_TOKEN_CHARS for one in ids)


def test_nobody_is_called_as_the_pause_of_an_op() -> None:
    """Audit of issue 4, 18: an update would take such a hold for a pause of its own, and end it."""

    async def scenario(s: Scene) -> None:
        client = FleetClient(s.fleet.client.bus, "test", caller="eval-pause")
        with pytest.raises(RefusedError, match="-pause"):
            await client.pause()
        assert await s.generations() == [Generation.RUNNING, Generation.RUNNING]

    play([worker(1), worker(2)], scenario)
