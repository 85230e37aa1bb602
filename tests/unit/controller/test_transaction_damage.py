"""The update transaction after the first byte: damage decides; and what taking an op back leaves at each stage."""

from dataclasses import replace

import pytest

from rlbus.controller.answers import StepAnswer
from rlbus.controller.causes import fault
from rlbus.controller.report import has_committed, standing_group
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
    weights_are,
)
from rlbus.controller.update_state import (
    Ask,
    SenderFailed,
    SenderSent,
    Stage,
    StopAsked,
    WorkerGone,
    WorkersAnswered,
)
from rlbus.schemas import (
    FaultCode,
    OpStatus,
    Outcome,
    TensorSum,
    WeightsState,
    WorkerId,
)

pytestmark = pytest.mark.unit

W1, W2, W3 = WorkerId("backend/1"), WorkerId("backend/2"), WorkerId("backend/3")
CANCEL = StopAsked(fault(FaultCode.CANCELLED, "cancelled by a test"))
DEADLINE = StopAsked(fault(FaultCode.DEADLINE, "too late"))
SENDER_DIED = fault(FaultCode.SENDER_FAILED, "the trainer gave up")


def start_sending(play: Play) -> None:
    play.to(Stage.RECEIVE)
    play.accept()


def test_who_failed_in_the_transfer_stays_paused_and_the_others_go_on() -> None:
    """Damage decides: SCENARIOS 2 and 4. Committed, flushed and resumed are those that have everything."""
    play = Play(plan_of(W1, W2, W3))
    start_sending(play)
    play.trainer()
    play.answer({W3: failed(FaultCode.TRANSFER_FAILED)})
    report = play.report()
    assert [play.asked(s) for s in (Stage.COMMIT, Stage.FLUSH, Stage.RESUME)] == [[W1, W2]] * 3
    assert (play.asked(Stage.ABORT), play.asked(Stage.SETTLE), play.asks(Stage.FREE)) == ([W3], [W3], [])
    assert report.status is OpStatus.PARTIAL
    assert outcomes_of(report) == {W1: ("ok", "resume"), W2: ("ok", "resume"), W3: ("failed", "transfer")}
    torn = report.outcomes[2].fault
    assert torn is not None
    assert torn.detail == {"weights": "torn: a full update or a reload makes them clean", "generation": "paused"}
    assert standing_group(play.state) is None
    assert play.asked(Stage.LEAVE) == [W1, W2, W3]


@pytest.mark.parametrize(("require", "freed"), [(None, []), (1, [W2])])
def test_an_untouched_worker_is_let_go_beside_a_newer_version_only_if_asked_for(
    require: int | None, freed: list[WorkerId]
) -> None:
    """SCENARIOS 2: no worker is resumed under two different versions unless asked for."""
    play = Play(plan_of(W1, W2, require=require))
    start_sending(play)
    play.trainer()
    play.answer({W2: failed()})
    play.to(Stage.SETTLE)
    play.answer({W2: weights_are(WeightsState.CLEAN)})
    play.to(Stage.DONE)
    assert play.asked(Stage.FREE) == freed


@pytest.mark.parametrize("whole", [WeightsState.CLEAN, WeightsState.UNKNOWN])
def test_if_all_fail_those_that_were_not_touched_generate_again(whole: WeightsState) -> None:
    """The worker's own word decides, and silence counts as torn; unknown weights are whole."""
    play = Play(plan_of(W1, W2, W3))
    start_sending(play)
    play.answer({w: failed() for w in (W1, W2, W3)})
    play.to(Stage.SETTLE)
    play.answer({W1: weights_are(whole), W2: silent(), W3: weights_are(WeightsState.DIRTY)})
    assert play.asked(Stage.FREE) == [W1]
    report = play.report()
    assert report.status is OpStatus.FAILED
    assert not has_committed(play.state)


def test_a_checksum_that_differs_keeps_the_worker_out() -> None:
    """SCENARIOS 47: it claims to be done, and isn't committed; the first bad tensor is named."""
    play = Play(plan_of(W1, W2))
    start_sending(play)
    play.trainer()
    play.answer({W2: received((SUMS[0], TensorSum(name="b", checksum="0" * 16)))})
    report = play.report()
    assert play.asked(Stage.COMMIT) == [W1]
    assert outcomes_of(report) == {W1: ("ok", "resume"), W2: ("failed", "verify")}
    why = report.outcomes[1].fault
    assert why is not None
    assert (why.code, why.detail["tensor"]) == (FaultCode.CHECKSUM_MISMATCH, "b")
    assert play.asked(Stage.ABORT) == [W2]


def test_an_answer_without_data_proves_nothing() -> None:
    """SCENARIOS 47: "ok" alone isn't enough for a commit."""
    play = Play(plan_of(W1))
    start_sending(play)
    play.trainer()
    play.answer({W1: StepAnswer(Outcome.OK)})
    report = play.report()
    assert play.asks(Stage.COMMIT) == []
    assert report.fault is not None
    assert report.fault.code is FaultCode.CHECKSUM_MISMATCH


def test_a_trainer_that_sent_something_else_than_announced_fails_everybody() -> None:
    """Its own sums are checked against the manifest."""
    play = Play(plan_of(W1))
    start_sending(play)
    play.feed(SenderSent(1, SUMS[:1], 16))
    report = play.report()
    assert play.asks(Stage.COMMIT) == []
    assert report.fault is not None
    assert report.fault.message == "the trainer sent 1 tensors, 2 were announced"


def test_a_trainer_that_gives_up_while_sending_releases_everybody() -> None:
    """SCENARIOS 5 and 6: nobody waits for a broadcast that won't come; what was received can't be proven."""
    play = Play(plan_of(W1, W2))
    start_sending(play)
    play.feed(WorkersAnswered("receive", {W1: received()}))
    play.feed(SenderFailed(1, SENDER_DIED))
    assert play.steps()[-3:] == ["drop receive", "tell leave", "abort"]
    assert play.asked(Stage.ABORT) == [W1, W2]
    report = play.report()
    assert outcomes_of(report) == {W1: ("failed", "transfer"), W2: ("failed", "transfer")}
    assert report.fault == SENDER_DIED
    assert play.asks(Stage.FREE) == []


def test_the_cause_is_the_worker_that_died_not_the_sender_that_noticed() -> None:
    """SCENARIOS 6: the error names w2 although the trainer's broken connection was seen first."""
    play = Play(plan_of(W1, W2))
    start_sending(play)
    play.feed(SenderFailed(1, SENDER_DIED))
    play.answer({W2: silent()})
    report = play.report()
    assert report.fault is not None
    assert (report.fault.code, report.fault.detail["worker"]) == (FaultCode.NO_ACK, W2)


def test_a_worker_that_dies_in_the_transfer_ends_it_for_all() -> None:
    """A broadcast needs every member: the others don't wait for their stall limit."""
    play = Play(plan_of(W1, W2))
    start_sending(play)
    play.feed(WorkerGone(W2, fault(FaultCode.WORKER_LOST, "it died")))
    assert play.asked(Stage.ABORT) == [W1]
    report = play.report()
    assert outcomes_of(report) == {W1: ("failed", "transfer"), W2: ("failed", "transfer")}
    assert play.asked(Stage.LEAVE) == [W1]


def test_a_worker_that_dies_after_everything_was_sent_costs_nobody_else() -> None:
    """The others have it all: they are verified and committed."""
    play = Play(plan_of(W1, W2))
    start_sending(play)
    play.trainer()
    play.feed(WorkerGone(W2, fault(FaultCode.WORKER_LOST, "it died")))
    report = play.report()
    assert outcomes_of(report) == {W1: ("ok", "resume"), W2: ("failed", "transfer")}


def test_a_worker_that_dies_is_never_addressed_again() -> None:
    """SCENARIOS 7: no later step of the op includes it."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.PAUSE)
    play.feed(WorkerGone(W2, fault(FaultCode.WORKER_LOST, "it died")))
    play.to(Stage.DONE)
    after = play.actions[play.actions.index(play.asks(Stage.PAUSE)[0]) + 1 :]
    assert [a.workers for a in after if isinstance(a, Ask)] == [(W1,), (W1,)]


def test_a_commit_nobody_heard_of_is_settled_by_asking() -> None:
    """SCENARIOS 34: silence is unknown, not failure; the worker says that it has the new version, and is let go."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.COMMIT)
    play.answer({W2: silent()})
    play.to(Stage.SETTLE)
    play.answer({W2: weights_are(WeightsState.CLEAN, V7)})
    report = play.report()
    assert play.asked(Stage.FREE) == [W2]
    assert {o.outcome for o in report.outcomes} == {Outcome.OK}


def test_a_failed_commit_is_aborted_and_stays_paused() -> None:
    """The engine could not finish: its weights are what it says, and it says dirty."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.COMMIT)
    play.answer({W2: failed()})
    report = play.report()
    assert (play.asked(Stage.FLUSH), play.asked(Stage.RESUME), play.asked(Stage.ABORT)) == ([W1], [W1], [W2])
    assert outcomes_of(report) == {W1: ("ok", "resume"), W2: ("failed", "commit")}


def test_a_worker_with_old_cache_entries_does_not_generate() -> None:
    """SCENARIOS 14: a flush that fails fails the op, and the worker isn't resumed."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.FLUSH)
    play.answer({W2: failed(FaultCode.FLUSH_FAILED)})
    report = play.report()
    assert play.asked(Stage.RESUME) == [W1]
    assert play.asks(Stage.FREE) == []
    assert outcomes_of(report) == {W1: ("ok", "resume"), W2: ("failed", "flush")}
    assert standing_group(play.state) is not None


@pytest.mark.parametrize("stage", [Stage.FLUSH, Stage.RESUME])
def test_a_worker_that_never_got_the_command_after_its_commit_has_failed(stage: Stage) -> None:
    """Refused would say that nothing had changed; it is at the new version, and paused."""
    play = Play(plan_of(W1, W2))
    play.to(stage)
    play.answer({W2: refused(FaultCode.NO_ACK)})
    report = play.report()
    assert outcomes_of(report) == {W1: ("ok", "resume"), W2: ("failed", stage.value)}
    left = report.outcomes[1].fault
    assert left is not None
    assert left.detail == {"generation": "paused"}


def test_without_reset_prefix_cache_nothing_is_flushed() -> None:
    """The caller took that upon themselves."""
    play = Play(plan_of(W1, reset_prefix_cache=False))
    play.to(Stage.DONE)
    assert play.asks(Stage.FLUSH) == []


def test_a_worker_that_somebody_else_holds_is_updated_and_stays_held() -> None:
    """Neither paused by us (that would take over the hold) nor resumed by us."""
    play = Play(plan_of(W1, W2, held=[W2]))
    report = play.report()
    assert (play.asked(Stage.PAUSE), play.asked(Stage.RESUME)) == ([W1], [W1])
    assert play.asked(Stage.RECEIVE) == [W1, W2]
    assert report.status is OpStatus.OK


def test_a_wholly_held_fleet_is_updated_without_pause_or_resume() -> None:
    """The operator's hold covers it all."""
    play = Play(plan_of(W1, held=[W1]))
    report = play.report()
    assert (play.asks(Stage.PAUSE), play.asks(Stage.RESUME)) == ([], [])
    assert outcomes_of(report) == {W1: ("ok", "resume")}


@pytest.mark.parametrize("stop", [CANCEL, DEADLINE])
@pytest.mark.parametrize(
    ("stage", "expected", "steps_after"),
    [
        (Stage.PREPARE, "skipped", ["drop prepare"]),
        (Stage.JOIN, "skipped", ["drop join", "tell leave", "leave"]),
        (Stage.PAUSE, "undone", ["drop pause", "free"]),
        (Stage.RECEIVE, "undone", ["drop receive", "tell leave", "abort", "free", "leave"]),
    ],
)
def test_an_op_taken_back_before_the_first_byte_leaves_everything_as_it_was(
    stop: StopAsked, stage: Stage, expected: str, steps_after: list[str]
) -> None:
    """Cancel and deadline at every stage before the transfer."""
    play = Play(plan_of(W1, W2))
    play.to(stage)
    num_before = len(play.actions)
    play.feed(stop)
    report = play.report()
    assert play.steps()[num_before:] == steps_after
    assert {o.outcome.value for o in report.outcomes} == {expected}
    assert (report.status, report.fault) == (OpStatus.FAILED, stop.fault)


def test_an_op_taken_back_while_sending_leaves_torn_workers_paused() -> None:
    """Like any other failure after the first byte."""
    play = Play(plan_of(W1, W2))
    start_sending(play)
    play.feed(CANCEL)
    report = play.report()
    assert {o.outcome for o in report.outcomes} == {Outcome.FAILED}
    assert play.asks(Stage.FREE) == []


@pytest.mark.parametrize("stop", [CANCEL, DEADLINE])
def test_who_has_everything_when_it_is_taken_back_is_committed_rather_than_torn(stop: StopAsked) -> None:
    """All was sent and w1 has it; only w2, which is still at it, is given up."""
    play = Play(plan_of(W1, W2))
    start_sending(play)
    play.trainer()
    play.feed(WorkersAnswered("receive", {W1: received()}))
    play.feed(stop)
    report = play.report()
    assert (play.asked(Stage.COMMIT), play.asked(Stage.ABORT)) == ([W1], [W2])
    assert outcomes_of(report) == {W1: ("ok", "resume"), W2: ("failed", "transfer")}
    assert report.fault is not None
    assert report.fault.code is stop.fault.code


@pytest.mark.parametrize("stage", [Stage.COMMIT, Stage.FLUSH, Stage.RESUME])
@pytest.mark.parametrize("stop", [CANCEL, DEADLINE])
def test_once_all_is_verified_there_is_no_way_back(stop: StopAsked, stage: Stage) -> None:
    """Half of a fleet at the new version would be worse than being late."""
    play = Play(plan_of(W1, W2))
    play.to(stage)
    assert play.feed(stop) == ()
    assert play.report().status is OpStatus.OK


def test_having_the_version_from_before_is_no_proof_of_a_commit() -> None:
    """The same step given again (a rollback to what is served) that fails before a byte is not ok (simulation, 709)."""
    plan = plan_of(W1)
    again = replace(plan, candidates=tuple(replace(c, version=V7) for c in plan.candidates))
    play = Play(again)
    start_sending(play)
    play.answer({W1: failed()})
    play.to(Stage.SETTLE)
    play.answer({W1: weights_are(WeightsState.CLEAN, V7)})
    play.to(Stage.DONE)
    report = play.report()
    assert (report.status, outcomes_of(report)) == (OpStatus.FAILED, {W1: ("failed", "transfer")})
