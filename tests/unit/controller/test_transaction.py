"""The update transaction, by table: what is done, in which order, and who is left how before the first byte."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from rlbus.controller.answers import StepAnswer
from rlbus.controller.causes import fault
from rlbus.controller.report import standing_group
from rlbus.controller.testing import (
    SUMS,
    V7,
    Play,
    failed,
    outcomes_of,
    plan_of,
    received,
    refused,
    silent,
)
from rlbus.controller.update_state import (
    SenderFailed,
    SenderJoined,
    SenderSent,
    Stage,
    StopAsked,
    WorkerAccepted,
    WorkerGone,
    WorkersAnswered,
)
from rlbus.schemas import (
    FaultCode,
    InitGroup,
    JoinTask,
    OpStatus,
    Outcome,
    PauseGeneration,
    PauseMode,
    ReceiveWeights,
    SendTask,
    WorkerId,
)

pytestmark = pytest.mark.unit

W1, W2, W3 = WorkerId("backend/1"), WorkerId("backend/2"), WorkerId("backend/3")
CANCEL = StopAsked(fault(FaultCode.CANCELLED, "cancelled by a test"))
DEADLINE = StopAsked(fault(FaultCode.DEADLINE, "too late"))
SENDER_DIED = fault(FaultCode.SENDER_FAILED, "the trainer gave up")


def test_a_good_update_goes_through_every_step_in_order() -> None:
    """prepare, group, sender ready, pause, receivers ready, send, verify, commit, flush, resume."""
    play = Play(plan_of(W1, W2))
    report = play.report()
    assert play.steps() == [
        "prepare",
        "join",
        "tell join",
        "pause",
        "receive",
        "tell send",
        "commit",
        "flush",
        "resume",
    ]
    assert report.status is OpStatus.OK
    assert outcomes_of(report) == {W1: ("ok", "resume"), W2: ("ok", "resume")}
    assert (report.version, report.epoch, report.num_bytes, report.fault) == (V7, 1, 32, None)
    assert standing_group(play.state) == play.state.group


def test_the_request_travels_into_the_commands() -> None:
    """Pause mode, version, manifest and buckets are the caller's; the pause clears nothing, the flush does that."""
    play = Play(plan_of(W1, pause_mode=PauseMode.ABORT, bucket_bytes=77, allow_rollback=True))
    play.to(Stage.DONE)
    pause, receive = play.asks(Stage.PAUSE)[0].body, play.asks(Stage.RECEIVE)[0].body
    assert pause == PauseGeneration(mode=PauseMode.ABORT, clear_cache=False, owner="u-pause", lease_s=30.0)
    assert isinstance(receive, ReceiveWeights)
    assert (receive.update_op_id, receive.epoch, receive.version, receive.bucket_bytes) == ("u", 1, V7, 77)


def test_the_trainer_is_called_only_when_every_worker_is_at_the_group() -> None:
    """SCENARIOS 46: a worker that refuses is known before the trainer enters the rendezvous."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.JOIN)
    play.feed(WorkerAccepted("join", W1))
    assert play.told(JoinTask) == []
    play.feed(WorkerAccepted("join", W2))
    assert [t.plan.epoch for t in play.told(JoinTask)] == [1]


def test_nobody_is_paused_before_the_trainer_is_in_the_group() -> None:
    """SCENARIOS 19: a sender that commits to nothing costs no engine a second."""
    play = Play(plan_of(W1))
    play.to(Stage.JOIN)
    play.accept()
    play.answer()
    assert (play.state.stage, play.asks(Stage.PAUSE)) == (Stage.JOIN, [])
    play.feed(SenderFailed(None, SENDER_DIED))
    report = play.report()
    assert play.asks(Stage.PAUSE) == []
    assert outcomes_of(report) == {W1: ("undone", "group")}
    assert report.fault == SENDER_DIED


def test_nothing_is_sent_before_every_receiver_stands() -> None:
    """One that isn't there yet would hang the broadcast for all."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.RECEIVE)
    play.feed(WorkerAccepted("receive", W1))
    assert play.told(SendTask) == []
    play.feed(WorkerAccepted("receive", W2))
    assert len(play.told(SendTask)) == 1


@pytest.mark.parametrize(("stage", "kind"), [(Stage.JOIN, JoinTask), (Stage.RECEIVE, SendTask)])
def test_one_that_is_done_already_does_not_stand_for_one_that_has_not_begun(stage: Stage, kind: type[Any]) -> None:
    """A result counts as a sign that it runs, for that worker alone."""
    play = Play(plan_of(W1, W2))
    play.to(stage)
    play.feed(WorkersAnswered(stage.value, {W1: play._ok(W1)}))
    assert play.told(kind) == []
    play.feed(WorkerAccepted(stage.value, W2))
    assert len(play.told(kind)) == 1


def test_a_worker_without_the_manifest_gets_its_pages_and_prepares_again() -> None:
    """Only those that lack it; a second time unknown is a failure."""
    play = Play(plan_of(W1, W2))
    play.answer({W2: refused(FaultCode.MANIFEST_UNKNOWN)})
    assert [(a.step, a.workers) for a in play.asks(Stage.PAGES)] == [("page-0", (W2,))]
    play.answer()
    assert play.state.step == "prepare-again"
    assert play.state.pending == {W2}
    play.answer({W2: refused(FaultCode.MANIFEST_UNKNOWN)})
    report = play.report()
    assert report.status is OpStatus.REFUSED
    assert report.fault is not None
    assert report.fault.code is FaultCode.MANIFEST_UNKNOWN


def test_a_manifest_that_does_not_fit_is_refused_before_anything_happens() -> None:
    """Issue 2 section 4: refused before the pause, naming the first bad tensor, nothing changed."""
    bad = StepAnswer(Outcome.REFUSED, fault(FaultCode.MANIFEST_MISMATCH, "no tensor 'x'", tensor="x"))
    play = Play(plan_of(W1, W2))
    play.answer({W2: bad})
    report = play.report()
    assert play.steps() == ["prepare"]
    assert report.status is OpStatus.REFUSED
    assert outcomes_of(report) == {W1: ("skipped", "prepare"), W2: ("refused", "prepare")}
    assert report.fault is not None
    assert (report.fault.code, report.fault.detail) == (
        FaultCode.MANIFEST_MISMATCH,
        {"tensor": "x", "worker": "backend/2"},
    )


def test_require_lets_a_worker_drop_out_while_preparing() -> None:
    """The group is formed over the others, whose ranks leave no gap."""
    play = Play(plan_of(W1, W2, W3, require=2))
    play.answer({W2: refused()})
    (ask,) = play.asks(Stage.JOIN)
    assert ask.workers == (W1, W3)
    assert isinstance(ask.body, InitGroup)
    assert [(s.instance_id, s.first) for s in ask.body.plan.spans] == [("1", 1), ("3", 2)]
    report = play.report()
    assert report.status is OpStatus.OK
    assert outcomes_of(report)[W2] == ("refused", "prepare")


def test_a_failed_join_ends_at_once_without_the_trainer_and_without_a_pause() -> None:
    """SCENARIOS 46: named at the first answer, the others still in the rendezvous are called out of it."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.JOIN)
    play.feed(WorkerAccepted("join", W1))
    play.feed(WorkersAnswered("join", {W2: failed(FaultCode.GROUP_FAILED)}))
    assert play.steps()[-3:] == ["drop join", "tell leave", "leave"]
    assert play.told(JoinTask) == []
    report = play.report()
    assert outcomes_of(report) == {W1: ("skipped", "group"), W2: ("failed", "group")}
    assert report.fault is not None
    assert report.fault.message == "backend/2: scripted group_failed"
    assert standing_group(play.state) is None


def test_a_worker_that_counts_other_ranks_fails_the_group() -> None:
    """SCENARIOS 17: checked before any tensor."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.JOIN)
    play.accept()
    play.trainer()
    play.feed(WorkersAnswered("join", {W1: received(), W2: received()}))
    report = play.report()
    assert play.asks(Stage.PAUSE) == []
    assert outcomes_of(report)[W1] == ("failed", "group")


@pytest.mark.parametrize(
    ("answer", "freed", "outcome"),
    [
        (failed(), [W1, W3], "failed"),
        (refused(), [W1, W3], "refused"),
        (silent(), [W1, W2, W3], "unknown"),
    ],
)
def test_a_failed_pause_lets_go_who_was_paused_and_who_may_be(
    answer: StepAnswer, freed: list[WorkerId], outcome: str
) -> None:
    """SCENARIOS 1: exactly those that acked, and whose pause is unknown; the group stays good."""
    play = Play(plan_of(W1, W2, W3))
    play.to(Stage.PAUSE)
    play.answer({W2: answer})
    assert play.asked(Stage.FREE) == freed
    report = play.report()
    assert outcomes_of(report) == {W1: ("undone", "pause"), W2: (outcome, "pause"), W3: ("undone", "pause")}
    assert report.status is OpStatus.FAILED
    assert standing_group(play.state) is not None
    assert play.asks(Stage.LEAVE) == []


def test_an_undo_waits_for_all_pauses_to_answer() -> None:
    """A resume that overtook a pause would be refused as busy, or worse: be forgotten."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.PAUSE)
    play.feed(WorkersAnswered("pause", {W2: failed()}))
    assert play.asks(Stage.FREE) == []
    play.answer()
    assert play.asked(Stage.FREE) == [W1]


def test_a_worker_busy_with_a_pause_nobody_wants_is_asked_again() -> None:
    """After a cancel in the middle of a long pause."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.PAUSE)
    play.feed(CANCEL)
    play.answer({W2: refused(FaultCode.BUSY)})
    assert play.asks(Stage.FREE)[-1].workers == (W2,)
    assert play.asks(Stage.FREE)[-1].after_s > 0
    report = play.report()
    assert outcomes_of(report) == {W1: ("undone", "pause"), W2: ("undone", "pause")}


def test_a_worker_that_cannot_be_let_go_is_reported_as_such() -> None:
    """It stays paused: the worst that an undo can leave, so never hidden behind "undone"."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.PAUSE)
    play.answer({W2: failed()})
    play.answer({W1: failed(FaultCode.ENGINE_DEAD)})
    (first, _) = play.report().outcomes
    assert (first.outcome, first.phase) == (Outcome.FAILED, "undo")
    assert first.fault is not None
    assert first.fault.detail["generation"] == "may be paused"


def test_a_receiver_that_refuses_stops_the_update_before_the_first_byte() -> None:
    """Everything goes back to what was: nobody is torn, everybody generates again."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.RECEIVE)
    play.feed(WorkerAccepted("receive", W1))
    play.feed(WorkersAnswered("receive", {W2: refused(FaultCode.STALE_EPOCH)}))
    assert play.told(SendTask) == []
    assert play.asked(Stage.ABORT) == [W1]
    report = play.report()
    assert play.asks(Stage.SETTLE) == []
    assert play.asked(Stage.FREE) == [W1, W2]
    assert outcomes_of(report) == {W1: ("undone", "transfer"), W2: ("refused", "transfer")}


LATE: Mapping[str, object] = {
    "foreign step": WorkersAnswered("receive", {W1: received()}),
    "foreign epoch": SenderJoined(9),
    "unknown worker": WorkerGone(WorkerId("x/1"), fault(FaultCode.WORKER_LOST, "gone")),
    "not asked to send": SenderSent(1, SUMS, 32),
    "stranger accepts": WorkerAccepted("pause", WorkerId("x/1")),
    "failure of another group": SenderFailed(9, SENDER_DIED),
}


@pytest.mark.parametrize("name", LATE)
def test_late_repeated_and_foreign_events_change_nothing(name: str) -> None:
    """The bus may deliver twice, late, or what was meant for an earlier op."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.PAUSE)
    before = play.state
    assert play.feed(LATE[name]) == ()  # type: ignore[arg-type]
    assert play.state == before


def test_a_repeated_answer_counts_once() -> None:
    """The first stands."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.PAUSE)
    play.feed(WorkersAnswered("pause", {W1: StepAnswer(Outcome.OK)}))
    play.feed(WorkersAnswered("pause", {W1: failed()}))
    assert play.state.seats[W1].blame is None


def test_the_group_id_is_the_same_for_a_repeat_and_another_for_the_next_epoch() -> None:
    """A trainer tells a repeated task from a new group by it."""
    play = Play(plan_of(W1))
    play.to(Stage.JOIN)
    assert play.state.group is not None
    plan = play.state.group.plan
    assert plan.group_id == "u-group-1"
    assert msgspec.structs.replace(plan, epoch=plan.epoch) == plan
