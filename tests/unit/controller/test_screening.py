"""Which messages of workers are believed, by table."""

from typing import Any

import pytest

from rlbus.controller.screening import MAX_WORLD_SIZE, problem_of
from rlbus.controller.testing import announcement
from rlbus.schemas import Goodbye

pytestmark = pytest.mark.unit

ONE = "dyn.test.backend.worker.1"


@pytest.mark.parametrize(
    ("worker", "changes", "subject", "problem"),
    [
        ("backend/1", {}, ONE, None),
        ("backend/1", {"world_size": MAX_WORLD_SIZE, "interval_s": 0.05}, ONE, None),
        ("controller/9", {}, "dyn.test.controller.worker.9", "reserved"),
        ("backend/2", {}, ONE, "names backend/2"),
        ("decode/1", {}, ONE, "names decode/1"),
        ("backend/1", {"namespace": "other"}, ONE, "namespace other"),
        ("backend/1", {"world_size": 0}, ONE, "world_size is 0"),
        ("backend/1", {"world_size": -5}, ONE, "world_size is -5"),
        ("backend/1", {"world_size": 2**62}, ONE, "world_size"),
        ("backend/1", {"interval_s": 0.0}, ONE, "interval_s is 0"),
        ("backend/1", {"interval_s": -1.0}, ONE, "interval_s is -1"),
        ("backend/1", {"interval_s": 1e308}, ONE, "interval_s"),
        ("backend/1", {"interval_s": float("nan")}, ONE, "interval_s is nan"),
        ("backend/1", {"routes": tuple(f"r{i}" for i in range(257))}, ONE, "257 routes"),
    ],
)
def test_an_announcement_keeps_to_its_subject_and_to_reason(
    worker: str, changes: dict[str, Any], subject: str, problem: str | None
) -> None:
    """Reserved name, contradiction, ranges: each in words."""
    found = problem_of(announcement(worker, **changes), subject, "test")
    assert found is None if problem is None else found is not None and problem in found


def test_a_goodbye_is_only_for_who_says_it() -> None:
    """Nobody sends another worker away."""
    bye = Goodbye(boot_id="b", component="backend", instance_id="2")
    assert problem_of(bye, ONE, "test") is not None
    assert problem_of(bye, "dyn.test.backend.worker.2", "test") is None
