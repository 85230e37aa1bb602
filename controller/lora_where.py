"""Whom of a target a load of an adapter is for, when some engines take none. Pure.

Without `where_possible` such a worker makes the load a refusal: it would serve the base model where others serve the
adapter. With it the load is for those that take adapters, and the others are in the report, each with the reason.
"""

from collections.abc import Sequence

import msgspec

from rlbus.controller import admission
from rlbus.controller.causes import fault
from rlbus.controller.registry import Member
from rlbus.schemas import Fault, FaultCode, LoadLoraFleet, Outcome, Report, WorkerOutcome

# Whoever serves it serves the other routes about adapters, too (`LORA_ROUTES`).
ROUTE = "load_lora"


def takes_loras(member: Member) -> bool:
    """Whether its engine takes adapters at all; what it takes just now is another matter."""
    return ROUTE in member.descriptor.routes


def chosen(members: Sequence[Member], request: LoadLoraFleet) -> Sequence[Member]:
    """Those of the target that the load is for; all of them, if none takes adapters, so that they are named."""
    if not request.where_possible:
        return members
    return [m for m in members if takes_loras(m)] or members


def check_routes(members: Sequence[Member], request: LoadLoraFleet, *, with_pause: bool) -> Fault | None:
    """Whether everybody whom the load is for takes adapters, and can be paused if it has to be; names who doesn't."""
    missing = admission.check_route(members, ROUTE)
    if missing is not None and not request.where_possible and any(takes_loras(m) for m in members):
        message = f"{missing.message}; or load it only where that is possible (--where-possible)"
        return msgspec.structs.replace(missing, message=message)
    if missing is not None:
        return missing
    pausing = ("pause_generation", "resume_generation") if with_pause else ()
    return next((problem for route in pausing if (problem := admission.check_route(members, route))), None)


def spared(members: Sequence[Member], request: LoadLoraFleet) -> tuple[WorkerOutcome, ...]:
    """The outcomes of those whom the load isn't for."""
    chosen_ones = {m.worker for m in chosen(members, request)}
    return tuple(_spared(m) for m in members if m.worker not in chosen_ones)


def with_spared(report: Report, outcomes: Sequence[WorkerOutcome]) -> Report:
    """The report of a load with one outcome for each worker of the target; its status is that of the load."""
    return msgspec.structs.replace(report, outcomes=(*report.outcomes, *outcomes))


def _spared(member: Member) -> WorkerOutcome:
    message = f"{member.descriptor.engine} takes no adapters here (it doesn't serve {ROUTE})"
    why = fault(FaultCode.NO_ROUTE, message, worker=member.worker, route=ROUTE)
    return WorkerOutcome(worker=member.worker, outcome=Outcome.SKIPPED, phase="check", fault=why)
