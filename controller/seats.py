"""How one worker's answer to a step changes its seat. Pure. `RECORD` has one function per stage."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlbus.controller.answers import StepAnswer
from rlbus.controller.causes import named
from rlbus.controller.draft import view_of
from rlbus.controller.spans import check_joined
from rlbus.controller.update_state import Blame, Damage, Hold, Seat, Stage, UpdateState
from rlbus.schemas import WHOLE, Fault, FaultCode, Outcome, ReceivedData, WeightsData, WorkerId


@dataclass(frozen=True, slots=True)
class Note:
    """What an answer makes of a seat. `cause` is what went wrong, `lacks` that it needs the manifest first."""

    seat: Seat
    cause: Fault | None = None
    lacks: bool = False


Recorder = Callable[[UpdateState, Seat, StepAnswer], Note]


def record(state: UpdateState, answers: Mapping[WorkerId, StepAnswer]) -> UpdateState:
    """Take down what workers said to the step that is awaited; answers that nobody waits for are dropped."""
    seats = dict(state.seats)
    causes, lacking, ok = list(state.causes), list(state.lacking), set(state.accepted)
    answered = [worker for worker in answers if worker in state.pending]
    for worker in answered:
        if worker not in seats:  # of the old group, and not of this update
            continue
        note = RECORD[state.stage](state, seats[worker], answers[worker])
        seats[worker] = note.seat
        if note.cause is not None:
            causes.append(named(note.cause, worker))
        if note.lacks:
            lacking.append(worker)
        if answers[worker].is_ok:
            ok.add(worker)
    is_broken = state.stage is Stage.RECEIVE and len(causes) > len(state.causes)
    return replace(
        state,
        seats=seats,
        causes=tuple(causes),
        lacking=tuple(lacking),
        accepted=frozenset(ok),
        pending=state.pending.difference(answered),
        # A broadcast that failed for one may hang, or lie, for the others next time.
        is_group_suspect=state.is_group_suspect or is_broken,
    )


def change(state: UpdateState, workers: Iterable[WorkerId], **fields: Any) -> UpdateState:
    """The state with some fields of these workers' seats replaced."""
    seats = dict(state.seats)
    for worker in workers:
        seats[worker] = replace(seats[worker], **fields)
    return replace(state, seats=seats)


def blame(state: UpdateState, worker: WorkerId, outcome: Outcome, why: Fault, phase: str | None = None) -> UpdateState:
    """Note what went wrong on a worker (in `phase`, None: the present one), unless something did before."""
    seat = _blamed(state.seats[worker], outcome, why, state.phase if phase is None else phase)
    return replace(state, seats={**state.seats, worker: seat}, causes=(*state.causes, named(why, worker)))


def _blamed(seat: Seat, outcome: Outcome, why: Fault, phase: str) -> Seat:
    return replace(seat, blame=Blame(outcome, phase, why)) if seat.is_good else seat


def _blame_answer(state: UpdateState, seat: Seat, answer: StepAnswer) -> Note:
    if answer.is_ok:
        return Note(seat)
    assert answer.fault is not None
    return Note(_blamed(seat, answer.outcome, answer.fault, state.phase), answer.fault)


def _prepared(state: UpdateState, seat: Seat, answer: StepAnswer) -> Note:
    lacks = answer.fault is not None and answer.fault.code is FaultCode.MANIFEST_UNKNOWN
    if lacks and state.stage is Stage.PREPARE:
        return Note(seat, lacks=True)
    return _blame_answer(state, seat, answer)


def _ignored(state: UpdateState, seat: Seat, answer: StepAnswer) -> Note:
    return Note(seat)


def _joined(state: UpdateState, seat: Seat, answer: StepAnswer) -> Note:
    if not answer.is_ok:
        return _blame_answer(state, seat, answer)
    assert state.group is not None
    worker = seat.candidate.worker
    problem = check_joined(state.group.plan, worker, state.group.spans.get(worker), answer.data)
    if problem is not None:
        return Note(_blamed(seat, Outcome.FAILED, problem, state.phase), problem)
    return Note(replace(seat, is_joined=True))


def _paused(state: UpdateState, seat: Seat, answer: StepAnswer) -> Note:
    if answer.is_ok:
        return Note(replace(seat, hold=Hold.PAUSED))
    if answer.outcome is not Outcome.UNKNOWN:  # else it may be paused: it stays ASKED, and is let go with the others
        seat = replace(seat, hold=Hold.NONE)
    return _blame_answer(state, seat, answer)


def _received(state: UpdateState, seat: Seat, answer: StepAnswer) -> Note:
    if answer.is_ok:
        data = answer.data if isinstance(answer.data, ReceivedData) else None
        return Note(replace(seat, damage=Damage.RECEIVED, received=data))
    is_stalled = answer.fault is not None and answer.fault.code is FaultCode.STALLED
    if is_stalled and not state.may_have_sent and seat.candidate.worker in state.accepted:
        return Note(seat)  # no byte could move: whoever hasn't accepted holds it up
    if answer.outcome is Outcome.REFUSED:
        seat = replace(seat, damage=Damage.NONE)
    return _blame_answer(state, seat, answer)


def _committed(state: UpdateState, seat: Seat, answer: StepAnswer) -> Note:
    if answer.is_ok:
        return Note(replace(seat, damage=Damage.COMMITTED))
    return _blame_answer(state, seat, answer)


def _released(state: UpdateState, seat: Seat, answer: StepAnswer) -> Note:
    if answer.is_ok:
        return Note(replace(seat, hold=Hold.RELEASED))
    return _blame_answer(state, seat, answer)


def _aborted(state: UpdateState, seat: Seat, answer: StepAnswer) -> Note:
    # A refusal says that there was nothing to abort, a failure is judged by what the worker says of its weights next.
    return _blame_answer(state, seat, answer) if answer.outcome is Outcome.UNKNOWN else Note(seat)


def _settled(state: UpdateState, seat: Seat, answer: StepAnswer) -> Note:
    """Take the worker's own word for what its weights are; without a word they count as torn.

    One whose commit wasn't heard of may well have the new version: then nothing is wrong with it. One that had the same
    version before (the same step given again) is only as it was, unless a commit was asked for.
    """
    damage = Damage.TORN
    request, new = state.plan.request, state.plan.request.version
    weights = view_of(answer.data, request) if answer.is_ok and isinstance(answer.data, WeightsData) else None
    if weights is not None and weights.state in WHOLE:
        may_be_committed = seat.candidate.version != new or (seat.blame is not None and seat.blame.phase == "commit")
        if weights.version == new and may_be_committed:
            return Note(replace(seat, damage=Damage.COMMITTED, blame=None))
        damage = Damage.NONE
    return _blame_answer(state, replace(seat, damage=damage), answer)


def _freed(state: UpdateState, seat: Seat, answer: StepAnswer) -> Note:
    if answer.is_ok:
        return Note(replace(seat, hold=Hold.RELEASED))
    if answer.is_busy:  # asked again as long as there are tries left
        return Note(seat)
    return _blame_answer(state, replace(seat, hold=Hold.STUCK), answer)


RECORD: dict[Stage, Recorder] = {
    Stage.PREPARE: _prepared,
    Stage.PAGES: _blame_answer,
    Stage.PREPARE_AGAIN: _prepared,
    Stage.LEAVE_OLD: _ignored,  # best effort: joining the next group leaves any other
    Stage.JOIN: _joined,
    Stage.PAUSE: _paused,
    Stage.RECEIVE: _received,
    Stage.COMMIT: _committed,
    Stage.FLUSH: _blame_answer,
    Stage.RESUME: _released,
    Stage.ABORT: _aborted,
    Stage.SETTLE: _settled,
    Stage.FREE: _freed,
    Stage.REGROUP: _aborted,  # who can't is asked to leave once more by joining the next group; who is silent is lost
    Stage.LEAVE: _ignored,  # whoever can't leave is asked to again when the next group is formed
}
