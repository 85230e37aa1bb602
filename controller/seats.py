"""How one worker's answer to a step changes its seat. Pure. `RECORD` has one function per stage."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlbus.controller.answers import StepAnswer
from rlbus.controller.causes import named
from rlbus.controller.spans import check_joined
from rlbus.controller.update_state import Blame, Damage, Hold, Stage, UpdateState
from rlbus.schemas import Fault, FaultCode, Outcome, ReceivedData, WeightsData, WeightsState, WorkerId

Recorder = Callable[[UpdateState, WorkerId, StepAnswer], UpdateState]


def change(state: UpdateState, worker: WorkerId, **fields: Any) -> UpdateState:
    """The state with some fields of one seat replaced."""
    return replace(state, seats={**state.seats, worker: replace(state.seats[worker], **fields)})


def blame(state: UpdateState, worker: WorkerId, outcome: Outcome, why: Fault, phase: str | None = None) -> UpdateState:
    """Note what went wrong on a worker (in `phase`, None: the present one), unless something did before."""
    state = replace(state, causes=(*state.causes, named(why, worker)))
    if not state.seats[worker].is_good:
        return state
    return change(state, worker, blame=Blame(outcome, state.phase if phase is None else phase, why))


def _blame_answer(state: UpdateState, worker: WorkerId, answer: StepAnswer) -> UpdateState:
    if answer.is_ok:
        return state
    assert answer.fault is not None
    return blame(state, worker, answer.outcome, answer.fault)


def _prepared(state: UpdateState, worker: WorkerId, answer: StepAnswer) -> UpdateState:
    lacks = answer.fault is not None and answer.fault.code is FaultCode.MANIFEST_UNKNOWN
    if lacks and state.stage is Stage.PREPARE:
        return replace(state, lacking=(*state.lacking, worker))
    return _blame_answer(state, worker, answer)


def _ignored(state: UpdateState, worker: WorkerId, answer: StepAnswer) -> UpdateState:
    return state


def _joined(state: UpdateState, worker: WorkerId, answer: StepAnswer) -> UpdateState:
    if not answer.is_ok:
        return _blame_answer(state, worker, answer)
    assert state.group is not None
    problem = check_joined(state.group.plan, worker, answer.data)
    if problem is not None:
        return blame(state, worker, Outcome.FAILED, problem)
    return change(state, worker, is_joined=True)


def _paused(state: UpdateState, worker: WorkerId, answer: StepAnswer) -> UpdateState:
    if answer.is_ok:
        return change(state, worker, hold=Hold.PAUSED)
    if answer.outcome is not Outcome.UNKNOWN:  # else it may be paused: it stays ASKED, and is let go with the others
        state = change(state, worker, hold=Hold.NONE)
    return _blame_answer(state, worker, answer)


def _received(state: UpdateState, worker: WorkerId, answer: StepAnswer) -> UpdateState:
    if answer.is_ok:
        data = answer.data if isinstance(answer.data, ReceivedData) else None
        return change(state, worker, damage=Damage.RECEIVED, received=data)
    if answer.outcome is Outcome.REFUSED:
        state = change(state, worker, damage=Damage.NONE)
    return _blame_answer(replace(state, is_group_suspect=True), worker, answer)


def _committed(state: UpdateState, worker: WorkerId, answer: StepAnswer) -> UpdateState:
    if answer.is_ok:
        return change(state, worker, damage=Damage.COMMITTED)
    return _blame_answer(state, worker, answer)


def _released(state: UpdateState, worker: WorkerId, answer: StepAnswer) -> UpdateState:
    if answer.is_ok:
        return change(state, worker, hold=Hold.RELEASED)
    return _blame_answer(state, worker, answer)


def _aborted(state: UpdateState, worker: WorkerId, answer: StepAnswer) -> UpdateState:
    # A refusal says that there was nothing to abort, a failure is judged by what the worker says of its weights next.
    return _blame_answer(state, worker, answer) if answer.outcome is Outcome.UNKNOWN else state


def _settled(state: UpdateState, worker: WorkerId, answer: StepAnswer) -> UpdateState:
    """Take the worker's own word for what its weights are; without a word they count as torn.

    One whose commit wasn't heard of may well have the new version: then nothing is wrong with it.
    """
    damage = Damage.TORN
    if answer.is_ok and isinstance(answer.data, WeightsData) and answer.data.weights.state is WeightsState.CLEAN:
        if answer.data.weights.version == state.plan.request.version:
            return change(state, worker, damage=Damage.COMMITTED, blame=None)
        damage = Damage.NONE
    return _blame_answer(change(state, worker, damage=damage), worker, answer)


def _freed(state: UpdateState, worker: WorkerId, answer: StepAnswer) -> UpdateState:
    if answer.is_ok:
        return change(state, worker, hold=Hold.RELEASED)
    if answer.is_busy:  # asked again as long as there are tries left
        return state
    assert answer.fault is not None
    return blame(change(state, worker, hold=Hold.STUCK), worker, answer.outcome, answer.fault)


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
    Stage.LEAVE: _ignored,  # whoever can't leave is asked to again when the next group is formed
}
