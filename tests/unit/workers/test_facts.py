"""The facts that a change of state amounts to."""

from dataclasses import replace

import pytest

from rlbus.schemas import (
    GenerationPaused,
    GenerationResumed,
    PauseView,
    ResumeGeneration,
    Version,
    WeightsChanged,
    WeightsState,
    WeightsView,
)
from rlbus.workers.facts import facts, is_visible
from rlbus.workers.state import Running, WorkerState

pytestmark = pytest.mark.unit

IDLE = WorkerState(component="c", instance_id="1", world_size=1, routes=frozenset())
DIRTY = WeightsView(state=WeightsState.DIRTY)
PAUSE = PauseView(owner="bob", mode="keep", since=0.0)


def test_nothing_changed_is_no_fact() -> None:
    """Also when only the running op changed, which is no announcement either."""
    busy = replace(IDLE, running=Running("op", ResumeGeneration()), term=4)
    assert facts(IDLE, busy, 1.0) == ()
    assert not is_visible(IDLE, busy)


def test_each_change_is_one_fact_that_names_its_op() -> None:
    """Weights, pause and resume, each with when and why."""
    busy = replace(IDLE, running=Running("op", ResumeGeneration()))
    clean = WeightsView(state=WeightsState.CLEAN, version=Version(step=3))
    assert facts(busy, replace(busy, weights=clean), 1.0) == (
        WeightsChanged(
            component="c", instance_id="1", at=1.0, op_id="op", state=WeightsState.CLEAN, version=Version(step=3)
        ),
    )
    assert facts(busy, replace(busy, pause=PAUSE), 1.0) == (
        GenerationPaused(component="c", instance_id="1", at=1.0, op_id="op", mode="keep", owner="bob"),
    )
    assert facts(replace(busy, pause=PAUSE), busy, 1.0) == (
        GenerationResumed(component="c", instance_id="1", at=1.0, op_id="op", forced=False, owner="bob"),
    )
    assert is_visible(busy, replace(busy, epoch=2))


@pytest.mark.parametrize(("force", "weights", "forced"), [(True, DIRTY, True), (True, IDLE.weights, False)])
def test_resume_is_forced_only_over_unclean_weights(force: bool, weights: WeightsView, forced: bool) -> None:
    """`force` on clean weights overrides nothing."""
    body = ResumeGeneration(force=force)
    before = replace(IDLE, pause=PAUSE, weights=weights, running=Running("op", body))
    (fact,) = facts(before, replace(before, pause=None), 1.0)
    assert isinstance(fact, GenerationResumed)
    assert fact.forced is forced
