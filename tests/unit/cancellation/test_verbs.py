"""Verbs of the client that are cancelled at any turn of the loop: taken back, unless they had ended."""

import asyncio
from pathlib import Path

import pytest

from rlbus.schemas import Generation, OpStatus, SleepTag, Version, WeightsState
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.testing import worker_on_bus
from tests.unit.cancellation.steps import World, cancelled_at, turns
from tests.unit.controller import scene
from tests.unit.controller.scene import Worker, worker

pytestmark = pytest.mark.unit

# What a verb promises of its own end, and the controller of the op's, in seconds.
ENDS_S = 5.01
OP_ENDS_S = 40.0
LATE_S, PAUSE_S = 2.0, 1.0
RUNNING, PAUSED = Generation.RUNNING, Generation.PAUSED


async def generations(world: World) -> tuple[Generation, ...]:
    return tuple(generation for _, _, generation in await world.states())


async def check_usable(world: World, turn: int) -> None:
    """The next verbs work as if nothing had been."""
    assert (await world.fleet.client.pause()).status is OpStatus.OK, f"turn {turn}"
    assert (await world.fleet.client.resume()).status is OpStatus.OK, f"turn {turn}"
    assert await generations(world) == (RUNNING, RUNNING), f"turn {turn}"


@pytest.mark.parametrize(("mode", "step"), [("keep", 1), ("wait", 3)])
def test_a_pause_that_is_cancelled_holds_nobody_unless_it_was_done_on_everybody(mode: str, step: int) -> None:
    """Never half a fleet; worker 2 takes its time."""
    seen: set[tuple[Generation, ...]] = set()

    async def round_of(world: World, turn: int) -> bool:
        end = await cancelled_at(turn, world.fleet.client.pause(mode=mode))
        assert end.took_s <= ENDS_S, f"turn {turn}"
        await world.until_idle(OP_ENDS_S)
        now = await generations(world)
        seen.add(now)
        if end.was_asked and end.after_s < LATE_S:  # worker 2 wasn't paused yet
            assert now == (RUNNING, RUNNING), f"turn {turn}"
        await check_usable(world, turn)
        return end.was_asked

    slow: scene.Steps = {"pause": {2: Step(latency_s=LATE_S)}}
    assert turns(lambda: [worker(1), worker(2, slow)], round_of, step=step) > 10
    assert seen == {(RUNNING, RUNNING), (PAUSED, PAUSED)}


def test_a_sleep_that_is_cancelled_leaves_nobody_asleep_unless_it_was_done_on_everybody() -> None:
    """Never half a fleet; worker 2 takes its time."""
    seen: set[tuple[frozenset[SleepTag], ...]] = set()

    async def round_of(world: World, turn: int) -> bool:
        end = await cancelled_at(turn, world.fleet.client.sleep())
        assert end.took_s <= ENDS_S, f"turn {turn}"
        await world.until_idle(OP_ENDS_S)
        now = tuple(rig.engine.memory.asleep for rig in world.fleet.workers)
        seen.add(now)
        if end.was_asked and end.after_s < LATE_S:  # worker 2 didn't sleep yet
            assert not any(now), f"turn {turn}"
            assert await generations(world) == (RUNNING, RUNNING), f"turn {turn}"
        assert (await world.fleet.client.wake()).status is OpStatus.OK, f"turn {turn}"
        await check_usable(world, turn)
        return end.was_asked

    slow: scene.Steps = {"sleep": {1: Step(latency_s=LATE_S)}}
    assert turns(lambda: [worker(1), worker(2, slow)], round_of) > 10
    assert seen == {(frozenset[SleepTag](),) * 2, (frozenset(SleepTag),) * 2}


def test_a_resume_that_is_cancelled_may_have_reached_some_and_a_repeat_reaches_the_rest() -> None:
    """Nothing is undone: to pause engines again would be worse than to leave them running."""
    seen: set[tuple[Generation, ...]] = set()

    async def round_of(world: World, turn: int) -> bool:
        await world.fleet.client.pause()
        end = await cancelled_at(turn, world.fleet.client.resume())
        assert end.took_s <= ENDS_S, f"turn {turn}"
        await world.until_idle(OP_ENDS_S)
        seen.add(await generations(world))
        await asyncio.sleep(LATE_S)  # what a worker was sent goes on; until it has ended it is busy
        assert (await world.fleet.client.resume()).status is OpStatus.OK, f"turn {turn}"
        await check_usable(world, turn)
        return end.was_asked

    slow: scene.Steps = {"resume": {2: Step(latency_s=LATE_S)}}
    assert turns(lambda: [worker(1), worker(2, slow)], round_of) > 10
    assert seen >= {(PAUSED, PAUSED), (RUNNING, RUNNING)}


def loader(number: int, folder: Path) -> Worker:
    """A worker that takes a second to load from `folder`."""
    config = AgentConfig(weight_roots=(str(folder),))
    script = FakeScript({"load_weights": {0: Step(latency_s=1.0)}, "pause": {2: Step(latency_s=PAUSE_S)}})
    engine = FakeEngine(script, feed=scene._feed)
    return lambda broker: worker_on_bus(engine, broker=broker, instance_id=str(number), config=config)


def test_a_reload_that_is_cancelled_is_undone_before_it_loads_and_finished_after_that(tmp_path: Path) -> None:
    """A folder that is being loaded isn't taken back; everybody ends at one version, and generates."""
    seen: set[tuple[object, ...]] = set()

    async def round_of(world: World, turn: int) -> bool:
        end = await cancelled_at(turn, world.fleet.client.reload(str(tmp_path), version=Version(step=7)))
        assert end.took_s <= ENDS_S, f"turn {turn}"
        await world.until_idle(OP_ENDS_S)
        states = tuple(await world.states())
        assert len(set(states)) == 1, f"turn {turn}: {states}"
        seen.add(states[0])
        if end.was_asked and end.after_s < PAUSE_S:  # nobody loads yet
            assert states[0][1] == Version(step=6), f"turn {turn}"
        await check_usable(world, turn)
        return end.was_asked

    FakeEngine().save(tmp_path, Version(step=7))
    assert turns(lambda: [loader(1, tmp_path), loader(2, tmp_path)], round_of) > 20
    assert seen == {(WeightsState.CLEAN, Version(step=step), RUNNING) for step in (6, 7)}


def test_a_wait_that_is_cancelled_is_forgotten_by_the_controller() -> None:
    """It waits for a third worker that never comes."""

    async def round_of(world: World, turn: int) -> bool:
        end = await cancelled_at(turn, world.fleet.client.wait_ready(num_workers=3, deadline_s=5.0))
        assert world.fleet.controller._waiting.is_empty, f"turn {turn}"
        assert end.took_s <= ENDS_S
        return turn < 40

    assert turns(lambda: [worker(1), worker(2)], round_of) == 39


def test_questions_and_short_verbs_that_are_cancelled_leave_nothing() -> None:
    """Flush, abort, versions, status: the next ones are answered."""

    async def round_of(world: World, turn: int) -> bool:
        client = world.fleet.client
        ends = [
            await cancelled_at(turn, verb)
            for verb in (client.flush(), client.abort(), client.versions(), client.status())
        ]
        assert max(end.took_s for end in ends) <= ENDS_S, f"turn {turn}"
        await world.until_idle(OP_ENDS_S)
        await check_usable(world, turn)
        return any(end.was_asked for end in ends)

    assert turns(lambda: [worker(1), worker(2)], round_of) > 5
