"""How long a pause holds when nobody renews it, and what its end asks for. Pure; durations are of this process's clock.

Invariants: an explicit hold has no lease, and no pause with a lease makes it weaker; a lease that ended is carried out
by ops of the worker's own, which take the one place for mutations like any other: never in the middle of a transfer,
never over an open session (that is closed first), never on torn weights.
"""

from dataclasses import replace

from rlbus.schemas import (
    AbortWeights,
    ApplyUpdate,
    Fault,
    FaultCode,
    FinishUpdate,
    InitGroup,
    InitTransfer,
    LoadLora,
    LoadWeights,
    PauseGeneration,
    PauseView,
    ReceiveWeights,
    RenewLease,
    ResumeGeneration,
    Sleep,
    WakeUp,
    WeightsState,
    WorkView,
    route_of,
)
from rlbus.workers.checks import fault, lease_problem
from rlbus.workers.draft import in_session, is_whole
from rlbus.workers.moves import RunOwn
from rlbus.workers.state import Lease, Running, WorkerState

# After the end of a lease could not be carried out (the engine failed to resume, say): when it is tried again.
RETRY_S = 5.0
# What the agent gives the engine for one op at the end of a lease, in seconds.
OWN_OP_S = 30.0
# Work that may keep a process from its heartbeats: a collective, the reading of a large folder, the moving of weights.
_BLOCKING = (
    InitGroup | ReceiveWeights | LoadWeights | LoadLora | Sleep | WakeUp | InitTransfer | ApplyUpdate | FinishUpdate
)


def check_renewal(state: WorkerState, body: RenewLease) -> Fault | None:
    """Why this renewal can't be taken, or None."""
    if problem := lease_problem(body.lease_s):
        return problem
    if state.pause is None:
        return fault(FaultCode.WRONG_STATE, f"{body.owner} has no pause to renew: the worker is not paused")
    if state.pause.owner != body.owner:
        held = state.pause.owner
        return fault(FaultCode.WRONG_STATE, f"{body.owner} doesn't hold the pause, {held} does", owner=held)
    if is_resuming(state):
        return fault(FaultCode.WRONG_STATE, f"the lease of {body.owner} has ended, the worker resumes")
    return None


def is_resuming(state: WorkerState) -> bool:
    """Whether the worker is at the resume that the end of a lease asked for."""
    if state.lease is None or state.lease.end_op_id is None or state.running is None:
        return False
    return state.running.op_id == _resume_id(state.lease.end_op_id)


def paused(state: WorkerState, body: PauseGeneration, op_id: str, now: float) -> WorkerState:
    """The engine stands still for `body`. An explicit hold stays one, whoever pauses over it; only a resume ends it."""
    is_hold = state.pause is not None and state.lease is None
    since = now if state.pause is None else state.pause.since
    owner = op_id if body.owner is None else body.owner
    pause = PauseView(owner=owner, mode=body.mode.value, since=since)
    return _granted(replace(state, pause=pause), None if is_hold else body.lease_s, now)


def renewed(state: WorkerState, body: RenewLease, now: float) -> WorkerState:
    """The pause holds for longer; `check_renewal` was None. On an explicit hold there is nothing to renew."""
    return state if state.lease is None else _granted(state, body.lease_s, now)


def _granted(state: WorkerState, lease_s: float | None, now: float) -> WorkerState:
    assert state.pause is not None
    pause = state.pause
    expires_at = None if lease_s is None else now + lease_s
    pause = PauseView(owner=pause.owner, mode=pause.mode, since=pause.since, expires_at=expires_at)
    return replace(state, pause=pause, lease=None if lease_s is None else Lease(lease_s))


def ended(state: WorkerState, op_id: str) -> WorkerState:
    """The lease's time is over; what follows from it is named after `op_id`.

    It ends the update that is open or running now, whose controller has let it down, unless `stepped`. An update that
    begins later, on torn weights that kept the worker paused, has a controller that lives, and is none of this lease's
    business.
    """
    if state.lease is None or state.lease.end_op_id is not None:
        return state
    update = state.session.update_op_id if state.session is not None else None
    if update is None and state.running is not None and isinstance(state.running.body, ReceiveWeights):
        update = state.running.body.update_op_id
    return replace(state, lease=replace(state.lease, end_op_id=op_id, end_update=update))


def stepped(state: WorkerState, now: float) -> WorkerState:
    """A step of another trainer's update has ended well, so that whoever sends it lives: a lease that ended in the
    middle of the step, and of nothing older, holds for as long again.
    """
    lease = state.lease
    if lease is None or lease.end_op_id is None or state.session is None:
        return state
    return _granted(state, lease.lease_s, now) if lease.end_update == state.session.update_op_id else state


def next_op(state: WorkerState) -> RunOwn | None:
    """What a lease that ended asks for, when nothing runs; None: nothing, or not before it can be done."""
    lease = state.lease
    if lease is None or lease.end_op_id is None:
        return None
    if state.session is not None:
        update = state.session.update_op_id
        if update != lease.end_update:
            return None
        body = AbortWeights(update_op_id=update, reason="the lease of its pause ended without renewal")
        return RunOwn(f"{lease.end_op_id}-abort", body)
    if is_whole(state) and not state.asleep:
        return RunOwn(_resume_id(lease.end_op_id), ResumeGeneration())
    return None


def _resume_id(end_op_id: str) -> str:
    return f"{end_op_id}-resume"


def to_take_back(state: WorkerState) -> str | None:
    """The transfer that nobody will begin any more: its lease ended before its first byte. Its op_id, or None.

    One that has begun goes on to its own end: to cut it off would tear weights that may yet become whole.
    """
    running = state.running
    if state.lease is None or state.lease.end_op_id is None or running is None:
        return None
    if not isinstance(running.body, ReceiveWeights) or running.body.update_op_id != state.lease.end_update:
        return None
    return running.op_id if in_session(state).state is not WeightsState.UPDATING else None


def retried(state: WorkerState) -> WorkerState:
    """Its end could not be carried out: the lease goes on for a moment, and ends again."""
    return replace(state, lease=Lease(RETRY_S))


def healed(state: WorkerState) -> WorkerState:
    """The weights are clean again. A lease that had ended over torn ones goes on for a moment, so that whoever healed
    them can also empty the caches before the worker resumes.
    """
    return state if state.lease is None or state.lease.end_op_id is None else retried(state)


def work_of(running: Running | None, lease_s: float) -> WorkView | None:
    """What to declare of the work in progress, so that late heartbeats don't count as death; None: nothing."""
    if running is None or not isinstance(running.body, _BLOCKING):
        return None
    return WorkView(route=route_of(running.body), since=running.since, lease_s=lease_s)
