"""The update transaction, by table: what is done, in which order, and what each failure at each point leaves."""

from collections.abc import Mapping

import msgspec
import pytest

from rlbus.controller.answers import StepAnswer
from rlbus.controller.causes import fault
from rlbus.controller.report import Timings, has_committed, standing_group, update_report
from rlbus.controller.testing import (
    SUMS,
    V7,
    Play,
    failed,
    plan_of,
    received,
    refused,
    silent,
    weights_are,
)
from rlbus.controller.update_state import (
    Ask,
    Drop,
    SenderFailed,
    SenderJoined,
    SenderSent,
    Stage,
    StopAsked,
    Tell,
    WorkerAccepted,
    WorkerGone,
    WorkersAnswered,
)
from rlbus.schemas import (
    FaultCode,
    InitGroup,
    JoinTask,
    LeaveTask,
    OpStatus,
    Outcome,
    PauseGeneration,
    PauseMode,
    ReceiveWeights,
    Report,
    SendTask,
    TensorSum,
    WeightsState,
    WorkerId,
)

pytestmark = pytest.mark.unit

W1, W2, W3 = WorkerId("backend/1"), WorkerId("backend/2"), WorkerId("backend/3")
CANCEL = StopAsked(fault(FaultCode.CANCELLED, "cancelled by a test"))
DEADLINE = StopAsked(fault(FaultCode.DEADLINE, "too late"))
SENDER_DIED = fault(FaultCode.SENDER_FAILED, "the trainer gave up")


def report_of(play: Play) -> Report:
    play.to(Stage.DONE)
    return update_report(play.state, Timings())


def outcomes(report: Report) -> dict[str, tuple[str, str]]:
    return {o.worker: (o.outcome.value, o.phase) for o in report.outcomes}


def steps(play: Play) -> list[str]:
    """Everything that was decided, in order, in short."""
    return [
        a.step if isinstance(a, Ask) else f"drop {a.step}" if isinstance(a, Drop) else _name(a) for a in play.actions
    ]


def _name(tell: Tell) -> str:
    return f"tell {tell.message.__struct_config__.tag}"


def test_a_good_update_goes_through_every_step_in_order() -> None:
    """prepare, group, sender ready, pause, receivers ready, send, verify, commit, flush, resume."""
    play = Play(plan_of(W1, W2))
    report = report_of(play)
    assert steps(play) == [
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
    assert outcomes(report) == {W1: ("ok", "resume"), W2: ("ok", "resume")}
    assert (report.version, report.epoch, report.num_bytes, report.fault) == (V7, 1, 32, None)
    assert standing_group(play.state) == play.state.group


def test_the_request_travels_into_the_commands() -> None:
    """Pause mode, version, manifest and buckets are the caller's; the pause clears nothing, the flush does that."""
    play = Play(plan_of(W1, pause_mode=PauseMode.ABORT, bucket_bytes=77, allow_rollback=True))
    play.to(Stage.DONE)
    pause, receive = play.asks(Stage.PAUSE)[0].body, play.asks(Stage.RECEIVE)[0].body
    assert pause == PauseGeneration(mode=PauseMode.ABORT, clear_cache=False)
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
    report = report_of(play)
    assert play.asks(Stage.PAUSE) == []
    assert outcomes(report) == {W1: ("undone", "group")}
    assert report.fault == SENDER_DIED


def test_nothing_is_sent_before_every_receiver_stands() -> None:
    """One that isn't there yet would hang the broadcast for all."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.RECEIVE)
    play.feed(WorkerAccepted("receive", W1))
    assert play.told(SendTask) == []
    play.feed(WorkerAccepted("receive", W2))
    assert len(play.told(SendTask)) == 1


def test_a_worker_without_the_manifest_gets_its_pages_and_prepares_again() -> None:
    """Only those that lack it; a second time unknown is a failure."""
    play = Play(plan_of(W1, W2))
    play.answer({W2: refused(FaultCode.MANIFEST_UNKNOWN)})
    assert [(a.step, a.workers) for a in play.asks(Stage.PAGES)] == [("page-0", (W2,))]
    play.answer()
    assert play.state.step == "prepare-again"
    assert play.state.pending == {W2}
    play.answer({W2: refused(FaultCode.MANIFEST_UNKNOWN)})
    report = report_of(play)
    assert report.status is OpStatus.REFUSED
    assert report.fault is not None
    assert report.fault.code is FaultCode.MANIFEST_UNKNOWN


def test_a_manifest_that_does_not_fit_is_refused_before_anything_happens() -> None:
    """Issue 2 section 4: refused before the pause, naming the first bad tensor, nothing changed."""
    bad = StepAnswer(Outcome.REFUSED, fault(FaultCode.MANIFEST_MISMATCH, "no tensor 'x'", tensor="x"))
    play = Play(plan_of(W1, W2))
    play.answer({W2: bad})
    report = report_of(play)
    assert steps(play) == ["prepare"]
    assert report.status is OpStatus.REFUSED
    assert outcomes(report) == {W1: ("skipped", "prepare"), W2: ("refused", "prepare")}
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
    report = report_of(play)
    assert report.status is OpStatus.OK
    assert outcomes(report)[W2] == ("refused", "prepare")


def test_a_failed_join_ends_at_once_without_the_trainer_and_without_a_pause() -> None:
    """SCENARIOS 46: named at the first answer, the others still in the rendezvous are called out of it."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.JOIN)
    play.feed(WorkerAccepted("join", W1))
    play.feed(WorkersAnswered("join", {W2: failed(FaultCode.GROUP_FAILED)}))
    assert steps(play)[-3:] == ["drop join", "tell leave", "leave"]
    assert play.told(JoinTask) == []
    report = report_of(play)
    assert outcomes(report) == {W1: ("skipped", "group"), W2: ("failed", "group")}
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
    report = report_of(play)
    assert play.asks(Stage.PAUSE) == []
    assert outcomes(report)[W1] == ("failed", "group")


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
    report = report_of(play)
    assert outcomes(report) == {W1: ("undone", "pause"), W2: (outcome, "pause"), W3: ("undone", "pause")}
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
    report = report_of(play)
    assert outcomes(report) == {W1: ("undone", "pause"), W2: ("undone", "pause")}


def test_a_worker_that_cannot_be_let_go_is_reported_as_such() -> None:
    """It stays paused: the worst that an undo can leave, so never hidden behind "undone"."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.PAUSE)
    play.answer({W2: failed()})
    play.answer({W1: failed(FaultCode.ENGINE_DEAD)})
    (first, _) = report_of(play).outcomes
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
    report = report_of(play)
    assert play.asks(Stage.SETTLE) == []
    assert play.asked(Stage.FREE) == [W1, W2]
    assert outcomes(report) == {W1: ("undone", "transfer"), W2: ("refused", "transfer")}


def start_sending(play: Play) -> None:
    play.to(Stage.RECEIVE)
    play.accept()


def test_who_failed_in_the_transfer_stays_paused_and_the_others_go_on() -> None:
    """Damage decides: SCENARIOS 2 and 4. Committed, flushed and resumed are those that have everything."""
    play = Play(plan_of(W1, W2, W3))
    start_sending(play)
    play.trainer()
    play.answer({W3: failed(FaultCode.TRANSFER_FAILED)})
    report = report_of(play)
    assert [play.asked(s) for s in (Stage.COMMIT, Stage.FLUSH, Stage.RESUME)] == [[W1, W2]] * 3
    assert (play.asked(Stage.ABORT), play.asked(Stage.SETTLE), play.asks(Stage.FREE)) == ([W3], [W3], [])
    assert report.status is OpStatus.PARTIAL
    assert outcomes(report) == {W1: ("ok", "resume"), W2: ("ok", "resume"), W3: ("failed", "transfer")}
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


def test_if_all_fail_those_that_were_not_touched_generate_again() -> None:
    """The worker's own word decides, and silence counts as torn."""
    play = Play(plan_of(W1, W2, W3))
    start_sending(play)
    play.answer({w: failed() for w in (W1, W2, W3)})
    play.to(Stage.SETTLE)
    play.answer({W1: weights_are(WeightsState.CLEAN), W2: silent(), W3: weights_are(WeightsState.DIRTY)})
    assert play.asked(Stage.FREE) == [W1]
    report = report_of(play)
    assert report.status is OpStatus.FAILED
    assert not has_committed(play.state)


def test_a_checksum_that_differs_keeps_the_worker_out() -> None:
    """SCENARIOS 47: it claims to be done, and isn't committed; the first bad tensor is named."""
    play = Play(plan_of(W1, W2))
    start_sending(play)
    play.trainer()
    play.answer({W2: received((SUMS[0], TensorSum(name="b", checksum="0" * 16)))})
    report = report_of(play)
    assert play.asked(Stage.COMMIT) == [W1]
    assert outcomes(report) == {W1: ("ok", "resume"), W2: ("failed", "verify")}
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
    report = report_of(play)
    assert play.asks(Stage.COMMIT) == []
    assert report.fault is not None
    assert report.fault.code is FaultCode.CHECKSUM_MISMATCH


def test_a_trainer_that_sent_something_else_than_announced_fails_everybody() -> None:
    """Its own sums are checked against the manifest."""
    play = Play(plan_of(W1))
    start_sending(play)
    play.feed(SenderSent(1, SUMS[:1], 16))
    report = report_of(play)
    assert play.asks(Stage.COMMIT) == []
    assert report.fault is not None
    assert report.fault.message == "the trainer sent 1 tensors, 2 were announced"


def test_a_trainer_that_gives_up_while_sending_releases_everybody() -> None:
    """SCENARIOS 5 and 6: nobody waits for a broadcast that won't come; what was received can't be proven."""
    play = Play(plan_of(W1, W2))
    start_sending(play)
    play.feed(WorkersAnswered("receive", {W1: received()}))
    play.feed(SenderFailed(1, SENDER_DIED))
    assert steps(play)[-3:] == ["drop receive", "tell leave", "abort"]
    assert play.asked(Stage.ABORT) == [W1, W2]
    report = report_of(play)
    assert outcomes(report) == {W1: ("failed", "transfer"), W2: ("failed", "transfer")}
    assert report.fault == SENDER_DIED
    assert play.asks(Stage.FREE) == []


def test_the_cause_is_the_worker_that_died_not_the_sender_that_noticed() -> None:
    """SCENARIOS 6: the error names w2 although the trainer's broken connection was seen first."""
    play = Play(plan_of(W1, W2))
    start_sending(play)
    play.feed(SenderFailed(1, SENDER_DIED))
    play.answer({W2: silent()})
    report = report_of(play)
    assert report.fault is not None
    assert (report.fault.code, report.fault.detail["worker"]) == (FaultCode.NO_ACK, W2)


def test_a_worker_that_dies_in_the_transfer_ends_it_for_all() -> None:
    """A broadcast needs every member: the others don't wait for their stall limit."""
    play = Play(plan_of(W1, W2))
    start_sending(play)
    play.feed(WorkerGone(W2, fault(FaultCode.WORKER_LOST, "it died")))
    assert play.asked(Stage.ABORT) == [W1]
    report = report_of(play)
    assert outcomes(report) == {W1: ("failed", "transfer"), W2: ("failed", "transfer")}
    assert play.asked(Stage.LEAVE) == [W1]


def test_a_worker_that_dies_after_everything_was_sent_costs_nobody_else() -> None:
    """The others have it all: they are verified and committed."""
    play = Play(plan_of(W1, W2))
    start_sending(play)
    play.trainer()
    play.feed(WorkerGone(W2, fault(FaultCode.WORKER_LOST, "it died")))
    report = report_of(play)
    assert outcomes(report) == {W1: ("ok", "resume"), W2: ("failed", "transfer")}


def test_a_worker_that_dies_is_never_addressed_again() -> None:
    """SCENARIOS 7: no later step of the op includes it."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.PAUSE)
    play.feed(WorkerGone(W2, fault(FaultCode.WORKER_LOST, "it died")))
    play.to(Stage.DONE)
    after = play.actions[play.actions.index(play.asks(Stage.PAUSE)[0]) + 1 :]
    assert [a.workers for a in after if isinstance(a, Ask)] == [(W1,), (W1,)]


def test_a_commit_nobody_heard_of_is_settled_by_asking() -> None:
    """Silence is unknown, not failure: the worker says that it has the new version, and is let go."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.COMMIT)
    play.answer({W2: silent()})
    play.to(Stage.SETTLE)
    play.answer({W2: weights_are(WeightsState.CLEAN, V7)})
    report = report_of(play)
    assert play.asked(Stage.FREE) == [W2]
    assert {o.outcome for o in report.outcomes} == {Outcome.OK}


def test_a_failed_commit_is_aborted_and_stays_paused() -> None:
    """The engine could not finish: its weights are what it says, and it says dirty."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.COMMIT)
    play.answer({W2: failed()})
    report = report_of(play)
    assert (play.asked(Stage.FLUSH), play.asked(Stage.RESUME), play.asked(Stage.ABORT)) == ([W1], [W1], [W2])
    assert outcomes(report) == {W1: ("ok", "resume"), W2: ("failed", "commit")}


def test_a_worker_with_old_cache_entries_does_not_generate() -> None:
    """SCENARIOS 14: a flush that fails fails the op, and the worker isn't resumed."""
    play = Play(plan_of(W1, W2))
    play.to(Stage.FLUSH)
    play.answer({W2: failed(FaultCode.FLUSH_FAILED)})
    report = report_of(play)
    assert play.asked(Stage.RESUME) == [W1]
    assert play.asks(Stage.FREE) == []
    assert outcomes(report) == {W1: ("ok", "resume"), W2: ("failed", "flush")}
    assert standing_group(play.state) is not None


def test_without_reset_prefix_cache_nothing_is_flushed() -> None:
    """The caller took that upon themselves."""
    play = Play(plan_of(W1, reset_prefix_cache=False))
    play.to(Stage.DONE)
    assert play.asks(Stage.FLUSH) == []


def test_a_worker_that_somebody_else_holds_is_updated_and_stays_held() -> None:
    """Neither paused by us (that would take over the hold) nor resumed by us."""
    play = Play(plan_of(W1, W2, held=[W2]))
    report = report_of(play)
    assert (play.asked(Stage.PAUSE), play.asked(Stage.RESUME)) == ([W1], [W1])
    assert play.asked(Stage.RECEIVE) == [W1, W2]
    assert report.status is OpStatus.OK


def test_a_wholly_held_fleet_is_updated_without_pause_or_resume() -> None:
    """The operator's hold covers it all."""
    play = Play(plan_of(W1, held=[W1]))
    report = report_of(play)
    assert (play.asks(Stage.PAUSE), play.asks(Stage.RESUME)) == ([], [])
    assert outcomes(report) == {W1: ("ok", "resume")}


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
    report = report_of(play)
    assert steps(play)[num_before:] == steps_after
    assert {o.outcome.value for o in report.outcomes} == {expected}
    assert (report.status, report.fault) == (OpStatus.FAILED, stop.fault)


def test_an_op_taken_back_while_sending_leaves_torn_workers_paused() -> None:
    """Like any other failure after the first byte."""
    play = Play(plan_of(W1, W2))
    start_sending(play)
    play.feed(CANCEL)
    report = report_of(play)
    assert {o.outcome for o in report.outcomes} == {Outcome.FAILED}
    assert play.asks(Stage.FREE) == []


@pytest.mark.parametrize("stage", [Stage.COMMIT, Stage.FLUSH, Stage.RESUME])
@pytest.mark.parametrize("stop", [CANCEL, DEADLINE])
def test_once_all_is_verified_there_is_no_way_back(stop: StopAsked, stage: Stage) -> None:
    """Half of a fleet at the new version would be worse than being late."""
    play = Play(plan_of(W1, W2))
    play.to(stage)
    assert play.feed(stop) == ()
    assert report_of(play).status is OpStatus.OK


def test_a_standing_group_is_used_again_after_the_trainer_says_it_is_ready() -> None:
    """No join on the workers; the sender's ready still comes before the pause."""
    first = Play(plan_of(W1, W2))
    first.to(Stage.DONE)
    group = standing_group(first.state)
    again = Play(plan_of(W1, W2, current=group, is_whole=True, leavers=(W1, W2), next_epoch=2, op_id="u2"))
    again.to(Stage.JOIN)
    assert (again.asks(Stage.JOIN), len(again.told(JoinTask)), again.asks(Stage.PAUSE)) == ([], 1, [])
    report = report_of(again)
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
    assert steps(again)[:5] == ["prepare", "tell leave", "leave-old", "join", "tell join"]
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
