"""Reports: one outcome per worker, a status for the whole, and the cause. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlbus.controller.causes import fault, root_cause
from rlbus.controller.draft import healing_of, name_of
from rlbus.controller.update_state import Damage, Group, Hold, Seat, UpdateState
from rlbus.schemas import Fault, FaultCode, OpStatus, Outcome, Report, WorkerOutcome


@dataclass(slots=True)
class Timings:
    """Seconds of an op, filled by who drives it: per phase in order of first entry, in all, and of standing still."""

    phases_s: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0
    paused_s: float = 0.0


def status_of(outcomes: Sequence[WorkerOutcome], num_needed: int) -> OpStatus:
    """The status of an op that was begun: ok when enough workers are, partial when some are."""
    num_ok = sum(o.outcome is Outcome.OK for o in outcomes)
    if num_ok >= num_needed and num_ok > 0:
        return OpStatus.OK
    return OpStatus.PARTIAL if num_ok else OpStatus.FAILED


def update_report(state: UpdateState, timings: Timings) -> Report:
    """The report of an update that is done. `version` is the one that was asked for."""
    request = state.plan.request
    outcomes = tuple(_outcome(state, seat) for seat in state.seats.values())
    status = status_of(outcomes, state.plan.num_needed)
    if state.failed_in == "prepare" and all(o.outcome in (Outcome.REFUSED, Outcome.SKIPPED) for o in outcomes):
        has_stop = any(c.code in (FaultCode.CANCELLED, FaultCode.DEADLINE) for c in state.causes)
        status = OpStatus.FAILED if has_stop else OpStatus.REFUSED
    return Report(
        op_id=request.op_id,
        op=name_of(request),
        status=status,
        outcomes=outcomes,
        phases_s=dict(timings.phases_s),
        took_s=timings.took_s,
        fault=None if status is OpStatus.OK else root_cause(state.causes),
        version=request.version,
        epoch=state.epochs[-1] if state.epochs else None,
        num_attempts=state.attempt,
        epochs=state.epochs,
        num_bytes=state.num_bytes,
        paused_s=timings.paused_s,
    )


def standing_group(state: UpdateState) -> Group | None:
    """The group that a next update may use again, after this one is done."""
    if state.group is None:
        return state.plan.current
    return None if state.is_group_suspect else state.group


def has_committed(state: UpdateState) -> bool:
    """Whether any worker is at the new version."""
    return any(seat.damage is Damage.COMMITTED for seat in state.seats.values())


def _outcome(state: UpdateState, seat: Seat) -> WorkerOutcome:
    worker = seat.candidate.worker
    if seat.blame is not None:
        blamed = seat.blame
        outcome = Outcome.FAILED if blamed.outcome is Outcome.REFUSED and _is_changed(seat) else blamed.outcome
        why = _with_state(state, seat, blamed.fault)
        return WorkerOutcome(worker=worker, outcome=outcome, phase=blamed.phase, fault=why)
    if seat.damage is Damage.COMMITTED:
        return WorkerOutcome(worker=worker, outcome=Outcome.OK, phase="resume" if state.failed_in is None else "undo")
    phase = state.failed_in or state.phase
    if seat.damage is not Damage.NONE:
        cause = root_cause(state.causes) or fault(FaultCode.INTERNAL, "the update ended without a cause")
        why = _with_state(state, seat, cause)
        return WorkerOutcome(worker=worker, outcome=Outcome.FAILED, phase=phase, fault=why)
    was_touched = seat.is_joined or seat.hold is not Hold.NONE
    return WorkerOutcome(worker=worker, outcome=Outcome.UNDONE if was_touched else Outcome.SKIPPED, phase=phase)


def _is_changed(seat: Seat) -> bool:
    """Whether the update left something on the worker, so that "refused" (nothing changed) would be a lie."""
    return seat.damage is not Damage.NONE or seat.hold in (Hold.PAUSED, Hold.ASKED, Hold.STUCK)


def _with_state(state: UpdateState, seat: Seat, cause: Fault) -> Fault:
    """The cause, with how the update left the worker: what a person has to know who reads only this line."""
    if seat.is_gone:
        return cause
    left: dict[str, str] = {}
    if seat.damage in (Damage.TORN, Damage.OPEN, Damage.RECEIVED):
        left["weights"] = f"torn: {healing_of(state.plan.request)} makes them clean"
    if seat.hold in (Hold.PAUSED, Hold.ASKED, Hold.STUCK):
        left["generation"] = "paused" if seat.hold is Hold.PAUSED else "may be paused"
    if not left:
        return cause
    return Fault(code=cause.code, message=cause.message, retryable=cause.retryable, detail={**cause.detail, **left})


def verb_report(
    op_id: str,
    op: str,
    outcomes: Mapping[str, WorkerOutcome],
    timings: Timings,
    causes: Sequence[Fault],
    **extra: object,
) -> Report:
    """The report of a fleet verb, which needs every addressed worker."""
    listed = tuple(outcomes.values())
    status = status_of(listed, len(listed))
    if {o.outcome for o in listed} in ({Outcome.REFUSED}, {Outcome.REFUSED, Outcome.SKIPPED}):
        status = OpStatus.REFUSED
    return Report(
        op_id=op_id,
        op=op,
        status=status,
        outcomes=listed,
        phases_s=dict(timings.phases_s),
        took_s=timings.took_s,
        fault=None if status is OpStatus.OK else root_cause(causes),
        paused_s=timings.paused_s,
        **extra,  # type: ignore[arg-type]
    )
