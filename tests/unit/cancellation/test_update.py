"""A cancelled update ends like any other failed one, wherever it is cancelled: undone, or dirty and reported."""

import pytest

from rlbus.schemas import Generation, Version, WeightsState
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from rlbus.workers.engines.fake_script import Step
from tests.unit.cancellation.steps import World, cancelled_at, turns
from tests.unit.controller import scene
from tests.unit.controller.scene import source, worker

pytestmark = pytest.mark.unit

# What `Trainer.update_weights` promises of its own end; and the op's, where nothing is stuck; in seconds.
ENDS_S = 25.0
OP_ENDS_S = 5.0
TRANSFER_S = 2.0
OLD = (WeightsState.CLEAN, Version(step=6), Generation.RUNNING)
NEW = (WeightsState.CLEAN, Version(step=7), Generation.RUNNING)
# As workers are started: no version yet.
BLANK = (WeightsState.CLEAN, None, Generation.RUNNING)
TORN = (WeightsState.DIRTY, None, Generation.PAUSED)


@pytest.mark.parametrize(("is_new", "step"), [(False, 1), (True, 3)])
def test_an_update_that_is_cancelled_at_any_turn_leaves_every_worker_whole_or_dirty_and_the_next_one_heals(
    is_new: bool, step: int
) -> None:
    """No op runs on, nobody is paused with good weights, no task is left, and version 8 reaches everybody."""
    old = BLANK if is_new else OLD
    seen: set[tuple[object, ...]] = set()

    async def round_of(world: World, turn: int) -> bool:
        world.fleet.plane.script.send_s = TRANSFER_S
        world.fleet.plane.script.send_parts = 4
        updating = world.fleet.trainer.update_weights(source(), version=7, deadline_s=60.0)
        end = await cancelled_at(turn, updating)
        assert end.took_s <= ENDS_S, f"turn {turn}"
        await world.until_idle(OP_ENDS_S)
        states = await world.states()
        assert set(states) <= {old, NEW, TORN}, f"turn {turn}: {states}"
        if end.was_asked and 0.0 < end.after_s < TRANSFER_S:  # some bytes are there, and never all
            assert states == [TORN, TORN], f"turn {turn}: {states}"
        seen.add(tuple(states))
        report = await world.fleet.update(8, DEFAULT_TENSORS)
        assert report.status.value == "ok", f"turn {turn}: {report}"
        assert await world.states() == [(WeightsState.CLEAN, Version(step=8), Generation.RUNNING)] * 2, f"turn {turn}"
        return end.was_asked

    slow: scene.Steps = {"receive_weights": {2: Step(transfer_s=TRANSFER_S)}}
    num_rounds = turns(lambda: [worker(1, slow), worker(2, slow)], round_of, step=step, is_new=is_new)
    assert num_rounds > 30
    assert {(old, old), (TORN, TORN), (NEW, NEW)} <= seen
