"""The facts that a change of state amounts to."""

from dataclasses import replace

import pytest

from rlbus.schemas import (
    GenerationPaused,
    GenerationResumed,
    LoadWeights,
    PauseView,
    ResumeGeneration,
    Version,
    WeightsChanged,
    WeightsState,
    WeightsView,
)
from rlbus.workers.facts import facts, is_visible
from rlbus.workers.state import Lease, Running, WorkerState

pytestmark = pytest.mark.unit

IDLE = WorkerState(component="c", instance_id="1", world_size=1, routes=frozenset())
DIRTY = WeightsView(state=WeightsState.DIRTY)
PAUSE = PauseView(owner="bob", mode="keep", since=0.0)


def test_nothing_changed_is_no_fact() -> None:
    """Also when only the running op changed, which is no announcement either."""
    busy = replace(IDLE, running=Running("op", ResumeGeneration()))
    assert facts(IDLE, busy, 1.0) == ()
    assert not is_visible(IDLE, busy)


def test_a_new_term_is_no_fact_and_is_announced() -> None:
    """A leader that is refused from now on shall hear which term it has to exceed."""
    newer = replace(IDLE, term=4)
    assert facts(IDLE, newer, 1.0) == ()
    assert is_visible(IDLE, newer)


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


def test_a_renewal_is_no_fact_but_a_change_into_a_hold_is() -> None:
    """Renewals come every few seconds; what a lease turns into is worth telling."""
    leased = replace(IDLE, pause=PauseView(owner="bob", mode="keep", since=0.0, expires_at=30.0), lease=Lease(30.0))
    renewed = replace(leased, pause=PauseView(owner="bob", mode="keep", since=0.0, expires_at=40.0))
    assert (facts(leased, renewed, 1.0), is_visible(leased, renewed)) == ((), False)
    held = replace(leased, pause=PAUSE, lease=None)
    (fact,) = facts(leased, held, 1.0)
    assert isinstance(fact, GenerationPaused)
    assert fact.expires_at is None
    assert is_visible(leased, held)


def test_a_resume_by_the_end_of_a_lease_says_so() -> None:
    """And whose it was; not so a resume that somebody asked for just then."""
    over = replace(IDLE, pause=PAUSE, lease=Lease(30.0, "e"))
    for op_id, lease_ended in (("e-resume", True), ("op", False)):
        before = replace(over, running=Running(op_id, ResumeGeneration()))
        (fact,) = facts(before, replace(before, pause=None, lease=None), 1.0)
        assert isinstance(fact, GenerationResumed)
        assert (fact.lease_ended, fact.owner) == (lease_ended, "bob")


def test_work_that_may_block_is_announced_when_it_begins() -> None:
    """Once it blocks it is too late to say so."""
    busy = replace(IDLE, running=Running("op", LoadWeights(path="/w", version=Version(step=1))))
    assert is_visible(IDLE, busy)
