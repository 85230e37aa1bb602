"""For whom workers stand still while somebody else's trainer drives updates, and who of them may be let go. Pure.

A trainer's pause is like that of any update: after a failure the next one takes it over, whatever that one is called.
"""

from collections.abc import Sequence

from rlbus.controller.causes import fault
from rlbus.controller.leases import KEPT_S
from rlbus.controller.op_ids import PAUSE_STEP, is_pause_of_op
from rlbus.controller.registry import Member
from rlbus.schemas import WHOLE, Fault, FaultCode, Generation, TransferFleet, Version, WeightsState, WorkerStatus


def owner_of(request: TransferFleet) -> str:
    """In whose name the fleet stands still between the steps: the trainer's, so that any of its steps finds its own."""
    return f"{request.caller}-{PAUSE_STEP}"


def is_held_by_another(status: WorkerStatus) -> bool:
    """Whether a person or program pauses it already, and will resume it: what an update left, of torn weights too, is
    nobody's.
    """
    if status.generation is not Generation.PAUSED or status.pause is None or is_held_by_op(status):
        return False
    return status.weights.state is not WeightsState.DIRTY


def is_held_by_op(status: WorkerStatus) -> bool:
    """Whether an update holds it, or a trainer, this one or one before it."""
    return status.pause is not None and is_pause_of_op(status.pause.owner)


def served_version(members: Sequence[Member], fleet: Version | None) -> Version | None:
    """The fleet's version, if one of `members` has it; None: nobody can generate beside that."""
    weights = [m.status.weights for m in members]
    return fleet if any(w.state is WeightsState.CLEAN and w.version == fleet for w in weights) else None


def is_behind(status: WorkerStatus, served: Version | None) -> bool:
    """Whether it would generate on other weights than the fleet, if it was let go."""
    return served is not None and status.weights.state in WHOLE and status.weights.version != served


def is_kept(status: WorkerStatus, served: Version | None) -> bool:
    """Whether it was left paused because it is behind: until it has another version, whatever a trainer does."""
    pause = status.pause
    if pause is None or pause.expires_at is None or not is_held_by_op(status):
        return False
    return is_behind(status, served) and pause.expires_at - pause.since >= KEPT_S


def is_to_free(status: WorkerStatus, served: Version | None) -> bool:
    """Whether it stands still for nothing, once whoever paused it is gone. Torn weights refuse by themselves."""
    return is_held_by_op(status) and not status.asleep and not is_behind(status, served)


def driver_problem(request: TransferFleet, driver: str | None) -> Fault | None:
    """Whether another trainer drives the fleet by now, one that has formed the group since."""
    if driver in (None, request.caller):
        return None
    message = f"{driver} has formed the group, and drives the fleet; to drive it, form it again"
    return fault(FaultCode.WRONG_STATE, f"{message}: init_weight_transfer_engine", driver=driver)


def owner_problem(request: TransferFleet, members: Sequence[Member]) -> Fault | None:
    """Whether what is open is another trainer's: what this one sends must not get into it, nor finish it."""
    owner = owner_of(request)
    for member in members:
        pause = member.status.pause
        if pause is not None and pause.owner != owner and is_held_by_op(member.status):
            message = f"{member.worker} stands still for {pause.owner}, not for this trainer; begin again"
            why = f"{message}: init_weight_transfer_engine, start_weight_update"
            return fault(FaultCode.WRONG_STATE, why, worker=member.worker, owner=pause.owner)
    return None
