"""Whatever happens, at any point and in any order: the update ends, and nobody is left worse than its damage."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbus.controller.answers import StepAnswer
from rlbus.controller.attempts import MAX_ATTEMPTS
from rlbus.controller.causes import fault
from rlbus.controller.report import Timings, update_report
from rlbus.controller.testing import Play, failed, plan_of, received, refused, silent, weights_are
from rlbus.controller.update_state import (
    Ask,
    Damage,
    Hold,
    Sender,
    SenderFailed,
    SenderJoined,
    SenderSent,
    Stage,
    StopAsked,
    Tell,
    TimeUp,
    WorkerAccepted,
    WorkerGone,
    WorkersAnswered,
)
from rlbus.schemas import (
    FaultCode,
    JoinTask,
    OnFailure,
    Outcome,
    ResumeGeneration,
    SendTask,
    TensorSum,
    WeightsState,
    WorkerId,
)

pytestmark = pytest.mark.unit

WORKERS = tuple(WorkerId(f"backend/{n}") for n in range(1, 4))
WRONG = (TensorSum(name="a", checksum="0" * 16), TensorSum(name="b", checksum="0" * 16))


def answer_for(play: Play, worker: WorkerId, kind: str) -> StepAnswer:
    stage = play.state.stage
    if kind == "failed":
        return failed()
    if kind == "echo":
        return failed(FaultCode.TRANSFER_FAILED)
    if kind == "refused":
        return refused(FaultCode.BUSY if stage is Stage.FREE else FaultCode.MANIFEST_UNKNOWN)
    if kind == "silent":
        return silent()
    if kind == "odd":
        return received(WRONG) if stage is Stage.RECEIVE else weights_are(WeightsState.CLEAN)
    return play._ok(worker)


def one_event(play: Play, kind: str, worker: WorkerId) -> None:
    """One thing that can happen now."""
    state = play.state
    epoch = 1 if state.group is None else state.group.plan.epoch
    if kind == "stop":
        play.feed(StopAsked(fault(FaultCode.CANCELLED, "stop")))
    elif kind == "gone":
        play.feed(WorkerGone(worker, fault(FaultCode.WORKER_LOST, "gone")))
    elif kind == "sender failed":
        play.feed(SenderFailed(epoch, fault(FaultCode.SENDER_FAILED, "sender")))
    elif kind == "group broke":
        play.feed(SenderFailed(epoch, fault(FaultCode.TRANSFER_FAILED, "connection closed by peer")))
    elif kind == "sender":
        play.trainer()
    elif kind == "accept" and state.step is not None and worker in state.pending:
        play.feed(WorkerAccepted(state.step, worker))
    elif state.step is not None and worker in state.pending:
        play.feed(WorkersAnswered(state.step, {worker: answer_for(play, worker, kind)}))


KINDS = ("ok", "ok", "ok", "accept", "accept", "sender", "failed", "refused", "silent", "odd", "gone", "stop", "echo")
EVENTS = st.lists(
    st.tuples(st.sampled_from((*KINDS, "sender failed", "group broke")), st.sampled_from(WORKERS)), max_size=120
)


@settings(max_examples=400)
@given(
    events=EVENTS,
    require=st.sampled_from([None, 1, 2]),
    held=st.sampled_from([(), (WORKERS[0],)]),
    on_failure=st.sampled_from(OnFailure),
)
def test_every_update_ends_with_one_outcome_per_worker(
    events: list[tuple[str, WorkerId]], require: int | None, held: tuple[WorkerId, ...], on_failure: OnFailure
) -> None:
    """And: no pause before the sender is ready, no send before all receivers stand, nobody torn is let go, nobody
    untouched is kept although nothing new is served, nobody else's hold is ended, nobody is asked who is gone; attempts
    are bounded, each at a higher epoch, and no step comes twice.
    """
    play = Play(plan_of(*WORKERS, require=require, held=held, on_failure=on_failure))
    for kind, worker in events:
        gone = {w for w, seat in play.state.seats.items() if seat.is_gone}
        num_before = len(play.actions)
        is_joining = play.state.sender in (Sender.IDLE, Sender.JOINING)
        one_event(play, kind, worker)
        for action in play.actions[num_before:]:
            if isinstance(action, Ask):
                assert not gone & set(action.workers)
                assert action.workers
                if action.step.endswith(Stage.PAUSE.value):
                    assert not is_joining or kind == "sender"
    finish(play)
    check_end(play, held)


def finish(play: Play) -> None:
    """Everybody still asked answers well; a silent trainer is given up."""
    for number in range(100):
        if number == 50:
            play.feed(TimeUp())
        if play.state.stage is Stage.DONE:
            return
        play.go()
        if play.state.stage in (Stage.JOIN, Stage.RECEIVE) and not play.state.pending:
            play.feed(SenderFailed(None, fault(FaultCode.SENDER_FAILED, "silent")))
    raise AssertionError(f"it doesn't end: {play.state.stage}, pending {sorted(play.state.pending)}")


def check_end(play: Play, held: tuple[WorkerId, ...]) -> None:
    state = play.state
    report = update_report(state, Timings())
    assert [o.worker for o in report.outcomes] == list(WORKERS)
    assert 1 <= report.num_attempts <= MAX_ATTEMPTS
    assert len(report.epochs) <= report.num_attempts
    assert sorted(set(report.epochs)) == list(report.epochs)
    steps = [a.step for a in play.actions if isinstance(a, Ask)]
    assert len(set(steps)) == len(steps)
    has_new = any(seat.damage is Damage.COMMITTED for seat in state.seats.values())
    for worker, seat in state.seats.items():
        outcome = next(o for o in report.outcomes if o.worker == worker)
        assert (outcome.fault is None) == (outcome.outcome in (Outcome.OK, Outcome.UNDONE, Outcome.SKIPPED))
        if worker in held:
            assert seat.hold is Hold.NONE
        if seat.was_torn:
            assert seat.damage is not Damage.NONE
        if seat.hold is Hold.RELEASED:
            assert seat.damage in (Damage.NONE, Damage.COMMITTED)
        if seat.damage is Damage.NONE and not has_new and not seat.is_gone:
            assert seat.hold in (Hold.NONE, Hold.RELEASED, Hold.STUCK)
        if outcome.outcome is Outcome.OK:
            assert seat.damage is Damage.COMMITTED
    freed = [w for a in play.actions if isinstance(a, Ask) and isinstance(a.body, ResumeGeneration) for w in a.workers]
    assert not set(freed) & set(held)


def test_a_worker_that_stays_busy_is_given_up_when_the_time_is_over_and_named() -> None:
    """It is asked again until then; the lease of its pause ends by itself."""
    play = Play(plan_of(*WORKERS[:2]))
    play.to(Stage.PAUSE)
    play.feed(StopAsked(fault(FaultCode.CANCELLED, "stop")))
    num_asked = 0
    while play.state.stage is Stage.FREE:
        num_asked += 1
        if num_asked == 7:
            play.feed(TimeUp())
        play.answer({WORKERS[1]: refused(FaultCode.BUSY)})
    assert num_asked == 7
    (first, second) = update_report(play.state, Timings()).outcomes
    assert (first.outcome, second.outcome) == (Outcome.UNDONE, Outcome.FAILED)
    assert second.fault is not None
    assert second.fault.code is FaultCode.BUSY


def test_a_torn_worker_is_never_let_go_by_a_silent_settle() -> None:
    """Nobody can say what its weights are, so they count as torn."""
    play = Play(plan_of(WORKERS[0]))
    play.to(Stage.RECEIVE)
    play.accept()
    play.feed(SenderFailed(None, fault(FaultCode.SENDER_FAILED, "silent")))
    play.answer()
    play.answer({WORKERS[0]: silent()})
    play.to(Stage.DONE)
    assert play.asks(Stage.FREE) == []
    assert play.state.seats[WORKERS[0]].damage is Damage.TORN


def test_the_trainer_is_released_before_the_workers_are() -> None:
    """It may sit in a collective that nobody will complete."""
    play = Play(plan_of(*WORKERS))
    play.to(Stage.RECEIVE)
    play.accept()
    assert len(play.told(SendTask)) == len(play.told(JoinTask)) == 1
    actions = play.feed(WorkerGone(WORKERS[0], fault(FaultCode.WORKER_LOST, "gone")))
    assert [type(a).__name__ for a in actions] == ["Drop", "Tell", "Ask"]
    assert isinstance(actions[1], Tell)


def test_joined_and_sent_of_a_finished_update_change_nothing() -> None:
    """A trainer's late signal finds it done."""
    play = Play(plan_of(WORKERS[0]))
    play.to(Stage.DONE)
    before = play.state
    for event in (SenderJoined(1), SenderSent(1, (), 0), StopAsked(fault(FaultCode.CANCELLED, "late"))):
        assert play.feed(event) == ()
    assert play.state == before
