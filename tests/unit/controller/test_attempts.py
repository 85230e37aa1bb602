"""Attempts of one update: who is lost, who goes on, when it is tried again and when it is not."""

import pytest

from rlbus.controller.attempts import MAX_ATTEMPTS, PROBE_S, housekeeping_s
from rlbus.controller.causes import fault
from rlbus.controller.report import standing_group
from rlbus.controller.testing import Play, failed, outcomes_of, plan_of, received, refused, silent, weights_are
from rlbus.controller.update_state import (
    Ask,
    Hold,
    SenderFailed,
    SenderJoined,
    Stage,
    StopAsked,
    WorkerAccepted,
    WorkerGone,
    WorkersAnswered,
    WorkerSilent,
)
from rlbus.fanout import Limits
from rlbus.schemas import (
    FaultCode,
    JoinTask,
    LeaveTask,
    OnFailure,
    OpStatus,
    PauseGeneration,
    SendTask,
    WeightsState,
    WorkerId,
)

pytestmark = pytest.mark.unit

W1, W2, W3 = WorkerId("backend/1"), WorkerId("backend/2"), WorkerId("backend/3")
DIED = fault(FaultCode.WORKER_LOST, "it died")
BROKEN = fault(FaultCode.TRANSFER_FAILED, "connection closed by peer")
CANCEL = StopAsked(fault(FaultCode.CANCELLED, "cancelled by a test"))


def play_of(require: int | None = None) -> Play:
    return Play(plan_of(W1, W2, W3, require=require, on_failure=OnFailure.RETRY))


def start_sending(play: Play) -> None:
    play.to(Stage.RECEIVE)
    play.accept()


def lose_in_transfer(play: Play, worker: WorkerId) -> None:
    """The trainer's connection breaks, and `worker` says nothing any more."""
    start_sending(play)
    assert play.state.group is not None
    play.feed(SenderFailed(play.state.group.plan.epoch, BROKEN))
    play.answer({worker: silent()})


@pytest.mark.parametrize("stage", [Stage.PREPARE, Stage.JOIN, Stage.PAUSE, Stage.RECEIVE])
@pytest.mark.parametrize("is_silent", [False, True])
def test_survivors_end_at_the_new_version_whenever_a_worker_is_lost(stage: Stage, is_silent: bool) -> None:
    """SCENARIOS 6 and 7: gone or silent, before the first byte: one report, the lost one failed, the others ok."""
    play = play_of()
    play.to(stage)
    if is_silent:
        play.answer({W2: silent()})
    else:
        play.feed(WorkerGone(W2, DIED))
    report = play.report()
    by_worker = outcomes_of(report)
    assert {w: by_worker[w][0] for w in (W1, W3)} == {W1: "ok", W3: "ok"}
    assert by_worker[W2][0] == ("unknown" if is_silent else "failed")
    assert report.status is OpStatus.PARTIAL
    expected = (1, (1,)) if stage is Stage.PREPARE else (2, (1, 2))
    assert (report.num_attempts, report.epochs) == expected


def test_a_worker_lost_in_the_broadcast_is_left_and_the_others_receive_again() -> None:
    """SCENARIOS 6: all leave the first group, the second is at the next epoch, and everything is sent once more."""
    play = play_of()
    lose_in_transfer(play, W2)
    assert play.asked(Stage.SETTLE) == [W1, W3]
    report = play.report()
    assert play.asked(Stage.REGROUP) == [W1, W3]
    assert [m.epoch for m in play.told(LeaveTask)] == [1]
    assert [m.plan.epoch for m in play.told(JoinTask)] == [1, 2]
    assert [m.epoch for m in play.told(SendTask)] == [1, 2]
    second = [a for a in play.actions if isinstance(a, Ask) and a.step.startswith("try2-")]
    assert {a.workers for a in second} == {(W1, W3)}
    assert outcomes_of(report) == {W1: ("ok", "resume"), W2: ("unknown", "undo"), W3: ("ok", "resume")}
    assert report.fault is not None
    assert report.fault.detail["worker"] == W2
    group = standing_group(play.state)
    assert group is not None
    assert group.workers == (W1, W3)


def test_who_stands_ready_for_a_transfer_that_another_holds_up_is_not_lost() -> None:
    """No byte moves before all accept, so a stall before says nothing about who has accepted."""
    play = play_of()
    play.to(Stage.RECEIVE)
    for worker in (W1, W2):
        play.feed(WorkerAccepted("receive", worker))
    play.feed(WorkersAnswered("receive", {W1: silent(FaultCode.STALLED)}))
    assert play.told(SendTask) == []
    report = play.report()
    assert outcomes_of(report) == {W1: ("ok", "resume"), W2: ("ok", "resume"), W3: ("unknown", "transfer")}
    assert report.fault is not None
    assert (report.fault.code, report.fault.detail["worker"]) == (FaultCode.NO_ACK, W3)


@pytest.mark.parametrize(("stage", "ends_s"), [(Stage.PAUSE, 40.0), (Stage.JOIN, 30.0), (Stage.RECEIVE, 6.0)])
def test_the_wait_for_a_worker_s_own_op_ends_well_before_the_limits_of_who_waits_with_it(
    stage: Stage, ends_s: float
) -> None:
    """In a group that forms, and in a transfer, the others stand ready; alone a worker holds up nobody."""
    limits, alone = Limits(5.0, 12.0, 300.0), Play(plan_of(W1))
    for play in (together := play_of(), alone):
        play.to(stage)
    assert (housekeeping_s(together.state, limits), housekeeping_s(alone.state, limits)) == (ends_s, 40.0)


def test_a_stall_once_bytes_may_move_is_held_against_who_stalled() -> None:
    """Then it is the worker, or the trainer, that doesn't move."""
    play = play_of()
    start_sending(play)
    play.feed(WorkersAnswered("receive", {W1: silent(FaultCode.STALLED)}))
    play.feed(SenderFailed(1, BROKEN))
    assert outcomes_of(play.report())[W1][0] == "unknown"


def test_nobody_is_resumed_between_two_attempts() -> None:
    """Who is torn must not generate, and who isn't would be paused again at once; step names differ per attempt."""
    play = play_of()
    lose_in_transfer(play, W2)
    play.to(Stage.PREPARE)
    assert play.asks(Stage.FREE) == []
    assert [play.state.seats[w].hold for w in (W1, W3)] == [Hold.PAUSED, Hold.PAUSED]
    play.to(Stage.PAUSE)
    pauses = [a.step for a in play.actions if isinstance(a, Ask) and isinstance(a.body, PauseGeneration)]
    assert pauses == ["pause", "try2-pause"]


def test_silence_after_a_broken_attempt_is_not_waited_out() -> None:
    """The bound of the detection: one probe, shorter than the limit of a step that nobody waits behind."""
    play = play_of()
    lose_in_transfer(play, W2)
    probes = [a.ack_s for a in play.actions if isinstance(a, Ask) and a.step in ("abort", "settle")]
    assert probes == [PROBE_S, PROBE_S]


def test_a_worker_that_failed_on_its_own_account_is_left_out() -> None:
    """An engine that can't load would fail again, and cost the others another attempt."""
    play = play_of()
    start_sending(play)
    play.feed(SenderFailed(1, BROKEN))
    play.to(Stage.SETTLE)
    play.answer({W3: failed(FaultCode.ENGINE_FAILED)})
    report = play.report()
    assert report.num_attempts == 2
    assert outcomes_of(report)[W3] == ("failed", "undo")


def test_attempts_are_bounded() -> None:
    """A group that breaks each time for all, with nobody to blame, is given up."""
    play = play_of()
    for _ in range(MAX_ATTEMPTS):
        start_sending(play)
        play.answer({w: failed(FaultCode.TRANSFER_FAILED) for w in (W1, W2, W3)})
        play.to(Stage.SETTLE)
        play.answer()
    report = play.report()
    assert (report.status, report.num_attempts, report.epochs) == (OpStatus.FAILED, 3, (1, 2, 3))
    assert play.asks(Stage.FREE) == []


def test_whoever_breaks_the_group_twice_is_left_out_of_the_third_attempt() -> None:
    """A worker that fails by itself looks like one that suffers from another: until it does so again."""
    play = play_of()
    for _ in range(2):
        play.to(Stage.JOIN)
        play.answer({W2: failed(FaultCode.GROUP_FAILED)})
        play.to(Stage.PREPARE)
    report = play.report()
    assert (report.num_attempts, report.epochs) == (3, (1, 2, 3))
    assert {w: o[0] for w, o in outcomes_of(report).items()} == {W1: "ok", W2: "failed", W3: "ok"}


def test_why_a_worker_broke_the_broadcast_is_heard_although_the_trainer_spoke_first() -> None:
    """Its engine can't load: it is left out at once."""
    play = play_of()
    start_sending(play)
    play.feed(SenderFailed(1, BROKEN))
    play.feed(WorkersAnswered("receive", {W2: failed(FaultCode.ENGINE_FAILED), W1: failed(FaultCode.CANCELLED)}))
    report = play.report()
    assert (report.num_attempts, outcomes_of(report)[W2]) == (2, ("failed", "transfer"))
    assert {outcomes_of(report)[w][0] for w in (W1, W3)} == {"ok"}


@pytest.mark.parametrize(("is_sent", "num_attempts"), [(False, 2), (True, 1)])
def test_a_worker_that_is_silent_while_nothing_moves_is_lost(is_sent: bool, num_attempts: int) -> None:
    """SCENARIOS 6: the others receive again; if they have everything already, they are committed."""
    play = play_of()
    start_sending(play)
    if is_sent:
        play.trainer()
        play.feed(WorkersAnswered("receive", {w: received() for w in (W1, W3)}))
    play.feed(WorkerSilent(W2, fault(FaultCode.NO_ACK, "silent")))
    report = play.report()
    assert report.num_attempts == num_attempts
    assert {w: o[0] for w, o in outcomes_of(report).items()} == {W1: "ok", W2: "unknown", W3: "ok"}


@pytest.mark.parametrize(("require", "num_attempts"), [(2, 2), (3, 1)])
def test_it_is_tried_again_only_for_as_many_as_are_required(require: int, num_attempts: int) -> None:
    """`require` is how many have to end at the new version."""
    play = play_of(require)
    lose_in_transfer(play, W2)
    report = play.report()
    assert report.num_attempts == num_attempts
    assert report.status is (OpStatus.OK if num_attempts == 2 else OpStatus.FAILED)


def test_a_trainer_that_fails_itself_ends_the_update() -> None:
    """Its source would fail again; nobody is left in the group."""
    play = play_of()
    start_sending(play)
    play.feed(SenderFailed(1, fault(FaultCode.SENDER_FAILED, "the source raised")))
    report = play.report()
    assert (report.status, report.num_attempts) == (OpStatus.FAILED, 1)


def test_the_death_of_a_worker_that_an_attempt_left_behind_costs_no_other_attempt() -> None:
    """Its engine broke first, and its process ends a moment later: the others are sending already, without it."""
    play = play_of()
    lose_in_transfer(play, W2)
    play.to(Stage.JOIN)
    play.to(Stage.RECEIVE)
    play.accept()
    play.feed(WorkerGone(W2, DIED))
    report = play.report()
    assert (report.status, report.num_attempts) == (OpStatus.PARTIAL, 2)
    assert {w: outcomes_of(report)[w][0] for w in (W1, W3)} == {W1: "ok", W3: "ok"}


def test_a_group_that_is_lost_as_a_whole_ends_the_update() -> None:
    """Nobody is left to begin again with, and nobody is asked who isn't there."""
    play = play_of(require=1)
    play.answer({W1: failed(), W2: failed(FaultCode.GROUP_FAILED)})
    play.to(Stage.JOIN)
    play.answer({W3: silent()})
    assert play.asks(Stage.REGROUP) == []
    assert play.report().status is OpStatus.FAILED


def test_a_trainer_that_dies_before_the_second_group_stands_leaves_nobody_paused() -> None:
    """The others still join, and would refuse to resume for as long as that may take: they leave it first."""
    play = play_of()
    start_sending(play)
    play.feed(SenderFailed(1, BROKEN))
    play.to(Stage.SETTLE)
    play.answer({w: weights_are(WeightsState.CLEAN) for w in (W1, W2, W3)})
    play.to(Stage.JOIN)
    play.accept()
    play.feed(SenderFailed(None, fault(FaultCode.SENDER_FAILED, "silent")))
    report = play.report()
    steps = play.steps()
    assert steps.index("try2-leave") < steps.index("try2-free")
    assert report.status is OpStatus.FAILED
    assert {outcome for outcome, _ in outcomes_of(report).values()} == {"undone"}
    assert {seat.hold for seat in play.state.seats.values()} == {Hold.RELEASED}


def test_a_refusal_while_preparing_stops_the_update_for_all() -> None:
    """A tensor that doesn't fit is no loss of a worker: nothing is changed anywhere."""
    play = play_of()
    play.answer({W2: refused(FaultCode.MANIFEST_MISMATCH)})
    report = play.report()
    assert (report.status, play.asks(Stage.JOIN)) == (OpStatus.REFUSED, [])


@pytest.mark.parametrize("stage", [Stage.ABORT, Stage.SETTLE, Stage.REGROUP])
def test_a_cancel_between_two_attempts_ends_the_update(stage: Stage) -> None:
    """There is no second attempt, torn workers stay paused, and the torn say so."""
    play = play_of()
    start_sending(play)
    play.feed(WorkerGone(W2, DIED))
    play.to(stage)
    play.feed(CANCEL)
    report = play.report()
    assert (report.status, report.num_attempts) == (OpStatus.FAILED, 1)
    assert play.asks(Stage.FREE) == []


@pytest.mark.parametrize("stage", [Stage.PREPARE, Stage.JOIN, Stage.PAUSE])
@pytest.mark.parametrize(("weights", "freed"), [(WeightsState.DIRTY, []), (WeightsState.CLEAN, [W1, W3])])
def test_a_cancel_in_the_second_attempt_leaves_who_was_torn_in_the_first_paused(
    stage: Stage, weights: WeightsState, freed: list[WorkerId]
) -> None:
    """Before its first byte the second attempt is taken back; what the first did to weights remains."""
    play = play_of()
    start_sending(play)
    play.feed(WorkerGone(W2, DIED))
    play.to(Stage.SETTLE)
    play.answer({w: weights_are(weights) for w in (W1, W3)})
    play.to(stage)
    assert play.state.attempt == 2
    play.feed(CANCEL)
    report = play.report()
    frees = [a for a in play.actions if isinstance(a, Ask) and a.step == "try2-free"]
    assert [w for a in frees for w in a.workers] == freed
    ending = "undone" if freed else "failed"
    assert {outcomes_of(report)[w][0] for w in (W1, W3)} == {ending}
    assert report.num_attempts == 2


def test_a_second_loss_is_followed_by_a_third_attempt() -> None:
    """SCENARIOS 7: the last one left ends at the new version."""
    play = play_of()
    start_sending(play)
    play.feed(WorkerGone(W2, DIED))
    play.to(Stage.PREPARE)
    start_sending(play)
    play.feed(WorkerGone(W3, DIED))
    report = play.report()
    assert (report.num_attempts, report.epochs) == (3, (1, 2, 3))
    assert {w: o[0] for w, o in outcomes_of(report).items()} == {W1: "ok", W2: "failed", W3: "failed"}


def test_a_late_word_of_the_first_group_changes_nothing_in_the_second() -> None:
    """The trainer's signals are told apart by epoch."""
    play = play_of()
    start_sending(play)
    play.feed(WorkerGone(W2, DIED))
    play.to(Stage.PREPARE)
    play.to(Stage.JOIN)
    play.accept()
    before = play.state
    assert play.feed(SenderJoined(1)) == ()
    assert play.feed(SenderFailed(1, BROKEN)) == ()
    assert play.state == before


def test_with_stop_there_is_one_attempt() -> None:
    """The policy of who wants to decide for themselves."""
    play = Play(plan_of(W1, W2))
    start_sending(play)
    play.feed(WorkerGone(W2, DIED))
    assert play.report().num_attempts == 1
