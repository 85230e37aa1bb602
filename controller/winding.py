"""The update transaction, winding half: what is taken back, and from whom. Pure.

abort -> settle -> free -> leave. Whatever the way here was: a session that is open on a worker is aborted, the worker
itself says what its weights are, who is untouched and was paused by this update generates again, torn ones stay paused,
and a group that may be broken is left by all. If the update is to be tried again (`attempts`), the survivors only leave
the group, and stay paused. Workers that are at the new version and run are not touched.
"""

from collections.abc import Callable
from dataclasses import replace

from rlbus.controller.attempts import is_lost, may_retry, probe_s, recall_torn, step_of
from rlbus.controller.causes import fault
from rlbus.controller.limits import RETRY_S
from rlbus.controller.seats import blame, change
from rlbus.controller.update_state import (
    FORWARD,
    PHASE_OF,
    Action,
    Ask,
    Damage,
    Drop,
    Hold,
    Seat,
    Stage,
    Tell,
    UpdateState,
)
from rlbus.schemas import (
    AbortWeights,
    CommandBody,
    DestroyGroup,
    FaultCode,
    GetVersion,
    LeaveTask,
    Outcome,
    ResumeGeneration,
    WorkerId,
)

Decision = tuple[UpdateState, tuple[Action, ...]]


def wind_down(state: UpdateState) -> Decision:
    """Begin to end the update, from wherever it is."""
    before: list[Action] = []
    step = state.step
    if step is not None and state.pending:
        if state.stage is Stage.RECEIVE and probe_s(state) is not None:
            state = replace(state, late_step=step)
        else:
            before.append(Drop(step))
    if state.stage in FORWARD:
        state = replace(state, failed_in=state.phase)
        if state.stage in (Stage.JOIN, Stage.RECEIVE):
            # Somebody may hang in a collective, or hold a half joined group.
            state = replace(state, is_group_suspect=True)
    if state.group is not None and state.is_group_suspect:
        reason = state.causes[-1].message if state.causes else "the group is in doubt"
        leave = LeaveTask(op_id=state.plan.request.op_id, epoch=state.group.plan.epoch, reason=reason)
        before.append(Tell(leave))
    return _after(_abort(state), *before)


def _abort(state: UpdateState) -> Decision:
    state = _give_up_silent(state)
    opened = _who(state, lambda seat: seat.damage in (Damage.OPEN, Damage.RECEIVED))
    if not opened:
        return _regroup(state)
    reason = state.causes[-1].message if state.causes else "the update ended"
    body = AbortWeights(update_op_id=state.plan.request.op_id, reason=reason)
    return _ask(state, Stage.ABORT, body, opened, ack_s=probe_s(state))


def _give_up_silent(state: UpdateState) -> UpdateState:
    """Others wait for the next attempt: who was silent just now isn't asked again, and counts as torn.

    It needn't be told: its group breaks, and the lease of its pause ends.
    """
    if probe_s(state) is None or not state.may_have_sent:
        return state
    silent = _who(state, lambda seat: seat.damage in (Damage.OPEN, Damage.RECEIVED) and is_lost(seat))
    return change(state, silent, damage=Damage.TORN)


def _after_abort(state: UpdateState) -> Decision:
    if state.pending:
        return state, ()
    state = _give_up_silent(state)
    opened = _who(state, lambda seat: seat.damage in (Damage.OPEN, Damage.RECEIVED))
    if opened and state.may_have_sent:
        return _ask(state, Stage.SETTLE, GetVersion(), opened, ack_s=probe_s(state))
    return _regroup(change(state, opened, damage=Damage.NONE))  # no byte can have reached them


def _after_settle(state: UpdateState) -> Decision:
    return (state, ()) if state.pending else _regroup(state)


def _regroup(state: UpdateState) -> Decision:
    """The fork: another attempt on those who are left, or the end."""
    if not may_retry(state):
        return wind_up(state)
    assert state.group is not None
    body = DestroyGroup(epoch=state.group.plan.epoch)
    # Everybody who is there, blamed or not: it also shows who is silent.
    members = tuple(w for w in state.group.workers if not is_lost(state.seats[w]))
    if not members:
        return wind_up(state)  # nobody would answer, so nothing would ever follow
    return _ask(state, Stage.REGROUP, body, members, ack_s=probe_s(state))


def wind_up(state: UpdateState) -> Decision:
    """End the update, after what was open is closed and nothing is tried again.

    A join that still runs would refuse every resume until its time is up: then the group is left first.
    """
    state = recall_torn(state)
    is_joining = state.failed_in == PHASE_OF[Stage.JOIN]
    return _leave(state) if is_joining and _to_free(state) else _free(state)


def _free(state: UpdateState) -> Decision:
    """Let go who was paused for nothing, and who turned out to be at the new version after all.

    Not a worker that stayed at the old version while others are at the new one: two versions would serve side by side.
    With `require` that was asked for.
    """
    free = _to_free(state)
    if not free:
        return _leave(state)
    return _ask(replace(state, num_tries=1), Stage.FREE, ResumeGeneration(), free, ack_s=_lost_s(state, free))


def to_keep(state: UpdateState) -> tuple[WorkerId, ...]:
    """Who stays paused after the update although it is untouched: the end of a lease must not set it free."""
    if state.plan.request.require is not None or not _has_new(state):
        return ()

    def is_to_stay(seat: Seat) -> bool:
        return seat.hold in (Hold.ASKED, Hold.PAUSED) and seat.damage is Damage.NONE and not is_lost(seat)

    return _who(state, is_to_stay)


def _has_new(state: UpdateState) -> bool:
    """Whether others are at the new version, so that nobody may serve the old one; in a catch-up the whole fleet is.
    With drafts the tokens are the same.
    """
    if state.plan.request.is_draft:
        return False
    return state.plan.request.is_catch_up or any(seat.damage is Damage.COMMITTED for seat in state.seats.values())


def _to_free(state: UpdateState) -> tuple[WorkerId, ...]:
    may_be_old = not _has_new(state) or state.plan.request.require is not None

    def is_held_for_nothing(seat: Seat) -> bool:
        if seat.hold not in (Hold.ASKED, Hold.PAUSED):
            return False
        return (seat.damage is Damage.NONE and may_be_old) or (seat.damage is Damage.COMMITTED and seat.is_good)

    return _who(state, is_held_for_nothing)


def _after_free(state: UpdateState) -> Decision:
    if state.pending:
        return state, ()
    busy = _to_free(state)
    if not busy:
        return _leave(state)
    if not state.is_out_of_time:
        state = replace(state, num_tries=state.num_tries + 1)
        step = f"{Stage.FREE.value}-{state.num_tries}"
        return _ask(state, Stage.FREE, ResumeGeneration(), busy, step=step, after_s=RETRY_S)
    for worker in busy:
        why = fault(FaultCode.BUSY, f"still busy after {state.num_tries} tries to resume it; it may stay paused")
        state = blame(change(state, [worker], hold=Hold.STUCK), worker, Outcome.FAILED, why)
    return _leave(state)


def _leave(state: UpdateState) -> Decision:
    members: tuple[WorkerId, ...] = ()
    if state.group is not None and state.is_group_suspect and not state.has_left:
        members = tuple(w for w in state.group.workers if not state.seats[w].is_gone)
    if state.group is None or not members:
        return replace(state, stage=Stage.DONE, step=None, pending=frozenset()), ()
    body = DestroyGroup(epoch=state.group.plan.epoch)
    return _ask(state, Stage.LEAVE, body, members, ack_s=_lost_s(state, members))


def _after_leave(state: UpdateState) -> Decision:
    return (state, ()) if state.pending else _free(replace(state, has_left=True))


def _lost_s(state: UpdateState, workers: tuple[WorkerId, ...]) -> float | None:
    """The ack limit of a step at the end: the trainer doesn't wait long for those who were silent all along."""
    return probe_s(state) if all(is_lost(state.seats[w]) for w in workers) else None


def _ask(
    state: UpdateState,
    stage: Stage,
    body: CommandBody,
    workers: tuple[WorkerId, ...],
    *,
    step: str | None = None,
    after_s: float = 0.0,
    ack_s: float | None = None,
) -> Decision:
    step = step_of(state, stage.value if step is None else step)
    state = replace(state, stage=stage, step=step, pending=frozenset(workers), accepted=frozenset())
    return state, (Ask(step, body, workers, is_ending=True, after_s=after_s, ack_s=ack_s),)


def _who(state: UpdateState, holds: Callable[[Seat], bool]) -> tuple[WorkerId, ...]:
    return tuple(w for w, seat in state.seats.items() if not seat.is_gone and holds(seat))


def _after(decision: Decision, *before: Action) -> Decision:
    return decision[0], (*before, *decision[1])


WINDING: dict[Stage, Callable[[UpdateState], Decision]] = {
    Stage.ABORT: _after_abort,
    Stage.SETTLE: _after_settle,
    Stage.FREE: _after_free,
    Stage.LEAVE: _after_leave,
}
