"""When a process group is used again, and when the next one is formed."""

from dataclasses import replace

import pytest

from rlbus.controller.causes import fault
from rlbus.controller.grouping import fits
from rlbus.controller.report import standing_group
from rlbus.controller.testing import (
    Play,
    plan_of,
    refused,
)
from rlbus.controller.update_state import (
    Stage,
    StopAsked,
)
from rlbus.schemas import (
    FaultCode,
    JoinTask,
    LeaveTask,
    OpStatus,
    WorkerId,
)

pytestmark = pytest.mark.unit

W1, W2, W3 = WorkerId("backend/1"), WorkerId("backend/2"), WorkerId("backend/3")
CANCEL = StopAsked(fault(FaultCode.CANCELLED, "cancelled by a test"))
DEADLINE = StopAsked(fault(FaultCode.DEADLINE, "too late"))
SENDER_DIED = fault(FaultCode.SENDER_FAILED, "the trainer gave up")


def test_a_standing_group_is_used_again_after_the_trainer_says_it_is_ready() -> None:
    """No join on the workers; the sender's ready still comes before the pause."""
    first = Play(plan_of(W1, W2))
    first.to(Stage.DONE)
    group = standing_group(first.state)
    again = Play(plan_of(W1, W2, current=group, is_whole=True, leavers=(W1, W2), next_epoch=2, op_id="u2"))
    again.to(Stage.JOIN)
    assert (again.asks(Stage.JOIN), len(again.told(JoinTask)), again.asks(Stage.PAUSE)) == ([], 1, [])
    report = again.report()
    assert (report.status, report.epoch) == (OpStatus.OK, 1)


REFORMS: list[tuple[str, dict[str, object]]] = [
    ("another trainer", {"sender_id": "other"}),
    ("another back end", {"backend": "gloo"}),
    ("more trainer ranks", {"num_trainer_ranks": 2}),
    ("not everybody says it is in it", {"is_whole": False}),
    ("another world size", {"sizes": {W2: 2}}),
]


@pytest.mark.parametrize(("why", "changes"), REFORMS, ids=[why for why, _ in REFORMS])
def test_a_group_that_does_not_fit_any_more_is_left_by_all_first(why: str, changes: dict[str, object]) -> None:
    """SCENARIOS 18 and 59: then the next epoch is formed."""
    first = Play(plan_of(W1, W2))
    first.to(Stage.DONE)
    fields: dict[str, object] = {"current": standing_group(first.state), "is_whole": True, "leavers": (W1, W2)}
    fields.update({"next_epoch": 2, "op_id": "u2", **changes})
    again = Play(plan_of(W1, W2, **fields))  # type: ignore[arg-type]
    again.to(Stage.DONE)
    assert again.steps()[:5] == ["prepare", "tell leave", "leave-old", "join", "tell join"]
    assert [t.epoch for t in again.told(LeaveTask)] == [1]
    assert again.state.group is not None
    assert again.state.group.plan.epoch == 2


@pytest.mark.parametrize(("workers", "leavers"), [((W1, W2, W3), (W1, W2)), ((W1,), (W1, W2))])
def test_who_came_back_and_who_left_both_form_a_new_group(
    workers: tuple[WorkerId, ...], leavers: tuple[WorkerId, ...]
) -> None:
    """SCENARIOS 59: membership is compared in both directions."""
    first = Play(plan_of(W1, W2))
    first.to(Stage.DONE)
    group = standing_group(first.state)
    again = Play(plan_of(*workers, current=group, is_whole=True, leavers=leavers, next_epoch=2, op_id="u2"))
    again.to(Stage.DONE)
    assert again.asked(Stage.LEAVE_OLD) == list(leavers)
    assert again.asked(Stage.JOIN) == list(workers)


def test_an_update_refused_in_prepare_keeps_the_standing_group() -> None:
    """Nothing changed, so the next update needs no new one."""
    first = Play(plan_of(W1))
    first.to(Stage.DONE)
    group = standing_group(first.state)
    again = Play(plan_of(W1, current=group, is_whole=True, leavers=(W1,), next_epoch=2, op_id="u2"))
    again.answer({W1: refused()})
    again.to(Stage.DONE)
    assert standing_group(again.state) == group


def test_a_worker_that_restarted_is_not_the_member_it_was() -> None:
    """Its process, and with it its end of the group, is another."""
    first = Play(plan_of(W1, W2))
    first.to(Stage.DONE)
    group = standing_group(first.state)
    assert group is not None
    plan = plan_of(W1, W2)
    assert fits(group, plan.request, plan.candidates)
    restarted = (plan.candidates[0], replace(plan.candidates[1], boot_id="new"))
    assert not fits(group, plan.request, restarted)
