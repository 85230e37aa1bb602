"""What the demo counts of its trainer's steps."""

import pytest

from rlbus.demo.events import NO_VERSION, num_mixed

pytestmark = pytest.mark.unit


def test_a_worker_that_is_lost_as_it_is_asked_is_not_at_another_version() -> None:
    """Killed by hand between an update and the question: the demo goes on, and doesn't end as if versions had mixed."""
    assert num_mixed({"backend/1": "0.3", "backend/2": "0.3"}, "0.3") == 0
    assert num_mixed({"backend/1": "0.3", "backend/2": NO_VERSION}, "0.3") == 0
    assert num_mixed({"backend/1": "0.2", "backend/2": NO_VERSION}, "0.3") == 1
