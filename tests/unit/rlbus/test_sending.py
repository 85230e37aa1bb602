"""The trainer's half of an update as a table: (state, event) -> (state, actions)."""

import pytest

from rlbus._sending import (
    Action,
    Event,
    Join,
    Leave,
    Send,
    SenderState,
    Signal,
    Stage,
    WorkEnded,
    WorkFailed,
    alive_in,
    decide,
)
from rlbus.schemas import (
    NO_EPOCH,
    Fault,
    FaultCode,
    GroupPlan,
    JoinTask,
    LeaveTask,
    Rendezvous,
    SenderStep,
    SendTask,
    Version,
)

pytestmark = pytest.mark.unit


def plan(epoch: int) -> GroupPlan:
    """A plan; its group id follows from the epoch."""
    return GroupPlan(
        epoch=epoch,
        group_id=f"g{epoch}",
        backend="fake",
        num_trainer_ranks=1,
        world_size=2,
        spans=(),
        rendezvous=Rendezvous(host="h", port=1, prefix="p"),
        bucket_bytes=1024,
    )


def join(epoch: int) -> JoinTask:
    """The controller's task."""
    return JoinTask(op_id="u1", plan=plan(epoch))


def send(epoch: int) -> SendTask:
    """The controller's task."""
    return SendTask(op_id="u1", epoch=epoch, version=Version(step=1))


def leave(epoch: int) -> LeaveTask:
    """The controller's task."""
    return LeaveTask(op_id="u1", epoch=epoch, reason="over")


def at(stage: Stage, epoch: int = 1) -> SenderState:
    """A state in the group of `epoch`."""
    return SenderState(stage, epoch, f"g{epoch}")


FAULT = Fault(code=FaultCode.GROUP_FAILED, message="no")

TABLE: list[tuple[str, SenderState, Event, SenderState, tuple[Action, ...]]] = [
    ("the first join is begun", SenderState(), join(1), at(Stage.JOINING), (Join(plan(1)),)),
    ("a repeat while joining waits", at(Stage.JOINING), join(1), at(Stage.JOINING), ()),
    ("a repeat when joined is told again", at(Stage.IN), join(1), at(Stage.IN), (Signal(SenderStep.JOINED, 1),)),
    ("a repeat while sending changes nothing", at(Stage.SENDING), join(1), at(Stage.SENDING), ()),
    ("a repeat of a group that was left isn't joined", at(Stage.OUT), join(1), at(Stage.OUT), ()),
    ("another group replaces one that stands", at(Stage.SENT), join(2), at(Stage.JOINING, 2), (Join(plan(2)),)),
    (
        "another group ends a join that runs",
        at(Stage.JOINING),
        join(2),
        at(Stage.JOINING, 2),
        (Leave("another group is formed"), Join(plan(2))),
    ),
    ("a new controller may count from 1 again", at(Stage.IN, 9), join(1), at(Stage.JOINING, 1), (Join(plan(1)),)),
    ("a join that ended is told", at(Stage.JOINING), WorkEnded(1), at(Stage.IN), (Signal(SenderStep.JOINED, 1),)),
    ("a join that ended late is nothing", at(Stage.JOINING, 2), WorkEnded(1), at(Stage.JOINING, 2), ()),
    (
        "a join that failed is told and left",
        at(Stage.JOINING),
        WorkFailed(1, FAULT),
        at(Stage.OUT),
        (Signal(SenderStep.FAILED, 1, FAULT), Leave("no")),
    ),
    ("a member sends when told", at(Stage.IN), send(1), at(Stage.SENDING), (Send(1),)),
    ("a repeat while sending is no second send", at(Stage.SENDING), send(1), at(Stage.SENDING), ()),
    ("a repeat after it is told again", at(Stage.SENT), send(1), at(Stage.SENT), (Signal(SenderStep.SENT, 1),)),
    ("a send that ended is told", at(Stage.SENDING), WorkEnded(1), at(Stage.SENT), (Signal(SenderStep.SENT, 1),)),
    (
        "a send that failed is told and left",
        at(Stage.SENDING),
        WorkFailed(1, FAULT),
        at(Stage.OUT),
        (Signal(SenderStep.FAILED, 1, FAULT), Leave("no")),
    ),
    ("a leave while sending releases it", at(Stage.SENDING), leave(1), at(Stage.OUT), (Leave("over"),)),
    ("a leave while joining releases it", at(Stage.JOINING), leave(1), at(Stage.OUT), (Leave("over"),)),
    ("a leave of a standing group is done", at(Stage.SENT), leave(1), at(Stage.OUT), (Leave("over"),)),
    ("a second leave is nothing", at(Stage.OUT), leave(1), at(Stage.OUT), ()),
    ("a leave of an older group is nothing", at(Stage.IN, 2), leave(1), at(Stage.IN, 2), ()),
    ("what fails after a leave is nothing", at(Stage.OUT), WorkFailed(1, FAULT), at(Stage.OUT), ()),
]


@pytest.mark.parametrize(("state", "event", "after", "actions"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE])
def test_each_event_leads_to_its_state_and_actions(
    state: SenderState, event: Event, after: SenderState, actions: tuple[Action, ...]
) -> None:
    """One row of the table."""
    assert decide(state, event) == (after, actions)


@pytest.mark.parametrize("state", [SenderState(), at(Stage.OUT), at(Stage.JOINING), at(Stage.IN, 2)])
def test_a_send_in_a_group_that_we_are_not_in_is_answered_with_failed(state: SenderState) -> None:
    """Nothing is sent, nothing changes, and the controller hears `stale_epoch` at once instead of waiting."""
    after, actions = decide(state, send(1))
    [signal] = actions
    assert after == state
    assert isinstance(signal, Signal)
    assert (signal.step, signal.epoch) == (SenderStep.FAILED, 1)
    assert signal.fault is not None
    assert signal.fault.code is FaultCode.STALE_EPOCH
    assert signal.fault.retryable


@pytest.mark.parametrize(
    ("ended", "begins"),
    [
        (SenderState(), SenderState()),
        (at(Stage.IN), at(Stage.IN)),
        (at(Stage.SENT), at(Stage.IN)),
        (at(Stage.OUT), SenderState()),
    ],
)
def test_the_next_op_begins_in_a_standing_group_with_nothing_sent(ended: SenderState, begins: SenderState) -> None:
    """A group is used again, but what the op before has sent never counts for the next one."""
    assert ended.at_next_op() == begins


@pytest.mark.parametrize(
    ("state", "asked_epoch", "epoch"),
    [
        (SenderState(), None, NO_EPOCH),
        (at(Stage.IN), None, NO_EPOCH),
        (at(Stage.JOINING), 1, 1),
        (at(Stage.IN), 1, NO_EPOCH),
        (at(Stage.SENDING), 1, 1),
        (at(Stage.SENDING), None, 1),
        (at(Stage.SENT), 1, NO_EPOCH),
        (at(Stage.OUT), 1, NO_EPOCH),
        (at(Stage.OUT), 2, 2),
        (at(Stage.SENDING), 2, 2),
    ],
)
def test_a_sign_of_life_is_about_a_group_only_if_its_task_was_heard(
    state: SenderState, asked_epoch: int | None, epoch: int
) -> None:
    """Or a task that was lost would count as heard, and never be told again."""
    assert alive_in(state, asked_epoch) == epoch
