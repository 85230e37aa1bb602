"""When a server that ended is started again."""

import pytest

from rlbus.workers.supervisor.restarts import RestartPolicy, Restarts

pytestmark = pytest.mark.unit

POLICY = RestartPolicy(max_restarts=4, window_s=100.0, first_s=1.0, max_s=4.0, settled_s=50.0)


def test_pauses_grow_up_to_a_bound_and_then_it_gives_up() -> None:
    """Five deaths at once: four restarts."""
    restarts = Restarts(POLICY)
    assert [restarts.on_end(float(i), 1.0) for i in range(5)] == [1.0, 2.0, 4.0, 4.0, None]


def test_server_that_ran_well_starts_anew_at_once() -> None:
    """Its death has nothing to do with the earlier ones."""
    restarts = Restarts(POLICY)
    restarts.on_end(0.0, 1.0)
    restarts.on_end(1.0, 1.0)
    assert restarts.on_end(60.0, 59.0) == 1.0


def test_deaths_that_are_long_ago_do_not_count() -> None:
    """The bound is on a window."""
    restarts = Restarts(POLICY)
    for i in range(4):
        restarts.on_end(float(i), 1.0)
    assert restarts.on_end(200.0, 10.0) is not None
