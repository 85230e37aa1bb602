"""Services that are cancelled in the middle of an update, at any turn of the loop: the agent, and the controller."""

import asyncio
from typing import Any

import pytest

from rlbus.controller.testing import controller_on_bus
from rlbus.errors import RLBusError
from rlbus.reports import UpdateReport
from rlbus.schemas import Generation, OpStatus, Version, WeightsState
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from rlbus.workers.engines.fake_script import Step
from tests.unit.cancellation.steps import Cancelled, World, disturbed_at, turns
from tests.unit.controller import scene
from tests.unit.controller.scene import source, worker

pytestmark = pytest.mark.unit

# What a controller's stop may take, and an agent's without time to drain, in seconds; and an update's end after that.
STOP_S = 8.5
UPDATE_ENDS_S = 45.0
TRANSFER_S = 2.0
OLD = (WeightsState.CLEAN, Version(step=6), Generation.RUNNING)
NEW = (WeightsState.CLEAN, Version(step=7), Generation.RUNNING)
TORN = (WeightsState.DIRTY, None, Generation.PAUSED)
SLOW: scene.Steps = {"receive_weights": {2: Step(transfer_s=TRANSFER_S)}}


def task_of(name: str) -> "asyncio.Task[Any]":
    """The oldest task that runs this coroutine."""
    found = [t for t in asyncio.all_tasks() if getattr(t.get_coro(), "__qualname__", "") == name and not t.done()]
    return min(found, key=lambda task: int(task.get_name().rpartition("-")[2]))


async def update_with(world: World, turn: int, victim: "asyncio.Task[Any]") -> Cancelled:
    """An update to version 7 in the middle of which `victim` is cancelled."""
    world.fleet.plane.script.send_s, world.fleet.plane.script.send_parts = TRANSFER_S, 4
    updating = world.fleet.trainer.update_weights(source(), version=7, deadline_s=60.0, check=False)
    end = await disturbed_at(turn, updating, victim.cancel)
    assert end.took_s <= UPDATE_ENDS_S, f"turn {turn}"
    return end


def test_an_agent_that_is_cancelled_says_goodbye_and_the_update_ends_with_a_report_that_names_it() -> None:
    """The other worker is at a version as a whole or dirty; nothing of the agent is left running."""

    async def round_of(world: World, turn: int) -> bool:
        running = task_of("Agent.run")
        end = await update_with(world, turn, running)
        if not end.was_asked:
            return False
        await asyncio.wait({running}, timeout=STOP_S)
        assert running.cancelled(), f"turn {turn}: {running}"
        report: UpdateReport = end.task.result()
        assert set(report.outcomes) in ({"backend/1", "backend/2"}, {"backend/2"}, set()), f"turn {turn}"
        await world.until_idle(UPDATE_ENDS_S)
        _, other = await world.states()
        assert other in (OLD, NEW, TORN), f"turn {turn}: {other}"
        again = await world.fleet.update(8, DEFAULT_TENSORS)
        assert (again.status, len(again.outcomes)) == (OpStatus.OK, 1), f"turn {turn}: {again}"
        return True

    assert turns(lambda: [worker(1, SLOW), worker(2, SLOW)], round_of, step=3) > 20


def test_a_controller_that_is_stopped_takes_the_update_back_and_the_next_one_finds_a_usable_fleet() -> None:
    """Every worker whole or dirty, nobody paused with good weights; the trainer gets a report, or hears it go."""
    seen: set[object] = set()

    async def round_of(world: World, turn: int) -> bool:
        running = task_of("Controller.run")
        end = await update_with(world, turn, running)
        if not end.was_asked:
            return False
        await asyncio.wait({running}, timeout=STOP_S)
        assert running.cancelled(), f"turn {turn}: {running}"
        states = await world.states()
        assert set(states) <= {OLD, NEW, TORN}, f"turn {turn}: {states}"
        error = end.task.exception()
        assert error is None or isinstance(error, RLBusError), f"turn {turn}: {error!r}"
        seen.update((state, error is None) for state in states)
        async with controller_on_bus(world.fleet.broker, term=world.fleet.controller.term + 1):
            await world.fleet.client.wait_ready(num_workers=2, deadline_s=30.0)
            report = await world.fleet.update(8, DEFAULT_TENSORS)
            assert report.status is OpStatus.OK, f"turn {turn}: {report}"
        return True

    assert turns(lambda: [worker(1, SLOW), worker(2, SLOW)], round_of, step=3) > 20
    assert seen >= {(OLD, True), (TORN, True), (NEW, True)}
