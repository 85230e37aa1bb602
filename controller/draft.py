"""Updates of draft models: what differs from one of the target's weights. Pure.

A draft has versions of its own, and the fleet has none of it: under exact rejection sampling an old draft gives the
right tokens, only slower. So a worker with another draft than the others is admitted, and one that an update of the
draft left as it was goes on; a torn draft keeps its worker paused, as torn weights do.
"""

from collections.abc import Sequence

from rlbus.controller.causes import fault
from rlbus.controller.registry import Member
from rlbus.schemas import Fault, FaultCode, UpdateWeights, Version, WeightsData, WeightsState, WeightsView, WorkerStatus


def is_draft(request: object) -> bool:
    """Whether this request is about draft models, and leaves the fleet's version as it is."""
    return isinstance(request, UpdateWeights) and request.is_draft


def name_of(request: UpdateWeights) -> str:
    """What such an op is called."""
    return "update_draft" if request.is_draft else "update_weights"


def healing_of(request: object) -> str:
    """What makes the weights clean that such an op left torn, in words."""
    return "a full update of the draft" if is_draft(request) else "a full update or a reload"


def view_of(said: WorkerStatus | WeightsData, request: object) -> WeightsView:
    """The weights that this request is about, as a worker says; unknown if it says nothing of a draft."""
    if not is_draft(request):
        return said.weights
    return WeightsView(state=WeightsState.UNKNOWN) if said.draft is None else said.draft


def check_version(members: Sequence[Member], request: UpdateWeights) -> Fault | None:
    """Whether the version is newer than every draft that the members have, or asked for as a rollback."""
    if request.is_catch_up:
        return fault(FaultCode.BAD_MESSAGE, "there is no catch-up of draft models: send another version")
    if request.allow_rollback:
        return None
    for member in members:
        has = _version_of(member)
        if has is not None and request.version <= has:
            message = f"version {request.version} of the draft is not newer than {has}, which {member.worker} has"
            return fault(
                FaultCode.VERSION_REGRESSION,
                f"{message}; ask for a rollback if that is meant",
                version=request.version,
                worker=member.worker,
                has=has,
            )
    return None


def _version_of(member: Member) -> Version | None:
    draft = member.status.draft
    return None if draft is None or draft.state is not WeightsState.CLEAN else draft.version
