"""What the demo counts of its trainer's steps."""

import pytest

from rlbus.demo.events import NO_VERSION, StepDone, num_mixed, summarise

pytestmark = pytest.mark.unit


def test_a_worker_that_is_lost_as_it_is_asked_is_not_at_another_version() -> None:
    """Killed by hand between an update and the question: the demo goes on, and doesn't end as if versions had mixed."""
    assert num_mixed({"backend/1": "0.3", "backend/2": "0.3"}, "0.3") == 0
    assert num_mixed({"backend/1": "0.3", "backend/2": NO_VERSION}, "0.3") == 0
    assert num_mixed({"backend/1": "0.2", "backend/2": NO_VERSION}, "0.3") == 1


@pytest.mark.parametrize(("num_steps", "is_judged"), [(1, False), (19, False), (20, True)])
def test_a_reward_that_does_not_grow_is_a_problem_of_long_enough_demos_only(num_steps: int, is_judged: bool) -> None:
    """From the first step on the rewards are noise."""
    step = StepDone(
        step=1,
        reward=0.1,
        versions={},
        phases_s={},
        update_s=0.1,
        paused_s=0.1,
        mismatches=0,
        near_ties=0,
        mixed=0,
        logprob_gap=0.0,
    )
    assert summarise("torch", 1, [step] * num_steps).problems == (["the reward didn't grow"] if is_judged else [])
