"""Rank spans, by table (SCENARIOS 17)."""

import pytest

from rlbus.controller.grouping import new_plan
from rlbus.controller.spans import check_joined, group_size, rank_spans
from rlbus.controller.testing import plan_of
from rlbus.errors import ConfigError
from rlbus.schemas import FaultCode, JoinedData, ResultData, WeightsData, WeightsState, WeightsView, WorkerId

pytestmark = pytest.mark.unit

WORKERS = [WorkerId(f"backend/{n}") for n in range(1, 5)]


@pytest.mark.parametrize(
    ("sizes", "num_trainer_ranks", "expected"),
    [
        ([1, 2, 4, 1], 1, [[1], [2, 3], [4, 5, 6, 7], [8]]),
        ([1], 1, [[1]]),
        ([2, 2], 4, [[4, 5], [6, 7]]),
        ([3, 1], 2, [[2, 3, 4], [5]]),
        ([], 1, []),
    ],
)
def test_each_worker_gets_as_many_ranks_as_its_own_world_size(
    sizes: list[int], num_trainer_ranks: int, expected: list[list[int]]
) -> None:
    """SCENARIOS 17: the trainer's ranks come first; no gap, no overlap, and the sum is the group's size."""
    spans = rank_spans(list(zip(WORKERS, sizes, strict=False)), num_trainer_ranks)
    assert [list(range(s.first, s.first + s.num_ranks)) for s in spans] == expected
    covered = list(range(num_trainer_ranks)) + [rank for ranks in expected for rank in ranks]
    assert covered == list(range(group_size(spans, num_trainer_ranks)))


@pytest.mark.parametrize(
    ("sizes", "num_trainer_ranks"),
    [([(WORKERS[0], 0)], 1), ([(WORKERS[0], 1)], 0), ([(WORKERS[0], 1), (WORKERS[0], 1)], 1)],
)
def test_sizes_that_make_no_group_are_refused(sizes: list[tuple[WorkerId, int]], num_trainer_ranks: int) -> None:
    """No empty span, no group without a sender, nobody twice."""
    with pytest.raises(ConfigError):
        rank_spans(sizes, num_trainer_ranks)


def joined(**changes: object) -> JoinedData:
    fields: dict[str, object] = {"epoch": 1, "ranks": (2, 3), "world_size": 4}
    return JoinedData(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (joined(), None),
        (joined(epoch=2), "backend/2: it joined group 2, not 1"),
        (joined(ranks=(1, 2)), "backend/2: it has ranks [1, 2], planned were [2, 3]"),
        (joined(ranks=(2,)), "backend/2: it has ranks [2], planned were [2, 3]"),
        (joined(world_size=3), "backend/2: it sees 3 ranks in the group, planned were 4"),
        (WeightsData(weights=WeightsView(state=WeightsState.CLEAN)), "backend/2: it didn't say which ranks it has"),
        (None, "backend/2: it didn't say which ranks it has"),
    ],
)
def test_what_a_worker_says_of_the_group_is_checked_before_any_tensor(
    data: ResultData | None, problem: str | None
) -> None:
    """SCENARIOS 17: a worker that counts otherwise than planned fails the forming of the group."""
    plan = plan_of("backend/1", "backend/2", sizes={"backend/2": 2})
    group = new_plan(plan, plan.candidates)
    found = check_joined(group, WorkerId("backend/2"), group.spans[1], data)
    assert (None if found is None else found.message) == problem
    assert found is None or found.code is FaultCode.GROUP_FAILED


def test_a_worker_outside_of_the_plan_has_no_span() -> None:
    """It is named as such."""
    plan = plan_of("backend/1")
    group = new_plan(plan, plan.candidates)
    found = check_joined(group, WorkerId("backend/9"), None, joined())
    assert found is not None
    assert found.message == "backend/9: it isn't in the plan of group 1"
