"""What the controller refuses before it begins, and what an update starts from. Pure.

Everything here is checked before the first side effect; a fault means that nothing changed anywhere.
"""

from collections.abc import Sequence

from rlbus.controller import draft
from rlbus.controller.causes import fault
from rlbus.controller.draft import view_of
from rlbus.controller.op_ids import PAUSE_STEP, is_pause_of_op
from rlbus.controller.registry import Member, Registry, list_names
from rlbus.controller.update_state import Candidate, Group, Plan
from rlbus.errors import ManifestError
from rlbus.schemas import (
    DRAFT_ROUTE,
    AbortFleet,
    Fault,
    FaultCode,
    FlushFleet,
    Generation,
    GetVersions,
    ListLoras,
    ManifestPage,
    PauseFleet,
    ReloadFleet,
    Request,
    ResumeFleet,
    SleepFleet,
    SleepTag,
    Target,
    TensorSpec,
    UpdateWeights,
    Version,
    WakeFleet,
    WeightsState,
    WorkerId,
    split_worker_id,
)
from rlbus.schemas.requests import MAX_DEADLINE_S
from rlbus.schemas.weights import MAX_VERSION_NUMBER
from rlbus.transfer.buckets import MAX_BUCKET_BYTES, MIN_BUCKET_BYTES
from rlbus.transfer.manifest import num_bytes

# What a worker must serve to take part in an update, and for a verb.
UPDATE_ROUTE = "update_weights_from_distributed"
_ROUTE: dict[type[Request], str] = {
    PauseFleet: "pause_generation",
    ResumeFleet: "resume_generation",
    FlushFleet: "flush_cache",
    AbortFleet: "abort_request",
    GetVersions: "get_weight_version",
    SleepFleet: "sleep",
    WakeFleet: "wake_up",
    ReloadFleet: "update_weights_from_disk",
    ListLoras: "list_loras",
}


def check_deadline(deadline_s: float) -> Fault | None:
    """Whether a request's deadline is a number of seconds that can be kept."""
    if 0 < deadline_s <= MAX_DEADLINE_S:
        return None
    message = f"deadline_s is {deadline_s:g}; use more than 0 and at most {MAX_DEADLINE_S:g} seconds"
    return fault(FaultCode.BAD_MESSAGE, message)


def check_sender(request: Request) -> Fault | None:
    """Whether a request's deadline can be kept, and its caller isn't called as an op's pause: an update would end what
    such a one holds.
    """
    if is_pause_of_op(request.caller):
        message = f"a caller can't be called {request.caller!r}: names that end with -{PAUSE_STEP} are for ops of rlbus"
        return fault(FaultCode.BAD_MESSAGE, message, caller=request.caller)
    return check_deadline(request.deadline_s)


def check_lease(lease_s: float | None) -> Fault | None:
    """Whether a pause can have this lease."""
    if lease_s is None or 0 < lease_s <= MAX_DEADLINE_S:
        return None
    message = f"lease_s is {lease_s:g}; use more than 0 and at most {MAX_DEADLINE_S:g} seconds, or none at all"
    return fault(FaultCode.BAD_MESSAGE, message)


def check_target(registry: Registry, target: Target) -> Fault | None:
    """Whether there is somebody to address, and everybody whom the target names."""
    absent = registry.unaddressable(target)
    if absent:
        listed = "; ".join(f"{worker}: {why}" for worker, why in absent.items())
        return fault(FaultCode.NO_WORKER, f"can't address {listed}", retryable=True, workers=", ".join(absent))
    if not registry.addressable(target):
        what = "no worker is there" if target == Target() else "the target matches no worker that is there"
        known = ", ".join(registry.components()) or "none"
        return fault(FaultCode.NO_WORKER, f"{what} (components seen: {known})", retryable=True)
    return None


def check_route(members: Sequence[Member], route: str) -> Fault | None:
    """Whether everybody serves `route`; the fault names those who don't, and how to address those who do."""
    lacking = [f"{m.worker} ({m.descriptor.engine})" for m in members if route not in m.descriptor.routes]
    if not lacking:
        return None
    serving = [m.worker for m in members if route in m.descriptor.routes]
    message = f"{list_names(lacking)} {'does' if len(lacking) == 1 else 'do'}n't serve {route}"
    if serving:
        message = f"{message}; address those that do (--worker, --component): {list_names(serving)}"
    worker = lacking[0].partition(" ")[0]
    return fault(FaultCode.NO_ROUTE, message, worker=worker, route=route)


def check_awake(members: Sequence[Member]) -> Fault | None:
    """Whether everybody's weights are there to be written; the fault names all of those that sleep (SCENARIOS 37)."""
    asleep = [m.worker for m in members if SleepTag.WEIGHTS in m.status.asleep]
    if not asleep:
        return None
    listed = ", ".join(asleep)
    message = f"the weights of {listed} sleep; wake them (`rlbus wake --tags weights`), or leave them out of the target"
    return fault(FaultCode.ASLEEP, message, workers=listed, tags=SleepTag.WEIGHTS.value)


def asked(members: Sequence[Member], request: Request) -> Sequence[Member]:
    """Whom of the target a verb is for: all, but a question about adapters only those that take any, if some do."""
    if not isinstance(request, ListLoras):
        return members
    return [m for m in members if _ROUTE[ListLoras] in m.descriptor.routes] or members


def check_verb(members: Sequence[Member], request: Request) -> Fault | None:
    """Whether everybody serves this verb and is awake for it, and whether a pause can have its lease."""
    problem = check_route(members, _ROUTE[type(request)])
    if problem is None and isinstance(request, ReloadFleet):
        problem = check_awake(members)
    return check_lease(request.lease_s) if problem is None and isinstance(request, PauseFleet) else problem


def check_version(
    registry: Registry, members: Sequence[Member], version: Version, *, allow_rollback: bool
) -> Fault | None:
    """Newer than the fleet's (not only different: SCENARIOS 12), or asked for as a rollback.

    The fleet's own version may be given again to workers that don't have it: that catches them up.
    """
    if not _is_in_bounds(version):
        return fault(FaultCode.BAD_MESSAGE, _beyond(version))
    fleet = registry.version
    if fleet is None or allow_rollback or version > fleet:
        return None
    has_it = [m for m in members if _is_clean_at(m, fleet)]
    if version == fleet and not has_it:
        return None
    return fault(
        FaultCode.VERSION_REGRESSION,
        f"version {version} is not newer than the fleet's, which is {fleet}; ask for a rollback if that is meant",
        version=version,
        fleet=fleet,
    )


def check_catch_up(
    registry: Registry, request: UpdateWeights | ReloadFleet, members: Sequence[Member], version: Version
) -> Fault | None:
    """Whether a catch-up is one: the fleet's own version, for named workers that don't have it."""
    if not request.is_catch_up:
        return None
    fleet = registry.version
    if version != fleet or request.target.workers is None or any(_is_clean_at(m, version) for m in members):
        message = f"no catch-up to {version}: the fleet is at {fleet}, or a worker has it, or none is named"
        return fault(FaultCode.VERSION_REGRESSION, message, version=version, fleet=fleet)
    return None


def check_update(
    registry: Registry, request: UpdateWeights, members: Sequence[Member], tensors: Sequence[TensorSpec] | None
) -> Fault | None:
    """Whether this update can be begun on `members`. `tensors` None: the manifest isn't complete here."""
    problem = _numbers_problem(request, len(members))
    if problem is not None:
        return fault(FaultCode.BAD_MESSAGE, problem)
    missing = check_route(members, UPDATE_ROUTE)
    if missing is None and request.is_draft:
        missing = check_route(members, DRAFT_ROUTE)
    if missing is not None:
        return missing
    if (sleeping := check_awake(members)) is not None:
        return sleeping
    for member in members:
        descriptor = member.descriptor
        if request.backend not in descriptor.backends:
            has = ", ".join(descriptor.backends) or "none"
            message = f"{member.worker} can't join a {request.backend} group; its backends: {has}"
            return fault(FaultCode.NO_ROUTE, message, worker=member.worker, backend=request.backend)
        if descriptor.world_size < 1:
            message = f"{member.worker} says that its world size is {descriptor.world_size}"
            return fault(FaultCode.WRONG_STATE, message, worker=member.worker)
    regression = _check_newer(registry, members, request)
    if regression is not None:
        return regression
    if tensors is None:
        message = f"manifest {request.manifest_digest[:12]} is not complete here; put its pages first"
        return fault(FaultCode.MANIFEST_UNKNOWN, message, retryable=True, digest=request.manifest_digest)
    try:
        for spec in tensors:
            num_bytes(spec)
    except ManifestError as exc:
        return exc.fault
    return None


def _check_newer(registry: Registry, members: Sequence[Member], request: UpdateWeights) -> Fault | None:
    if not _is_in_bounds(request.version):
        return fault(FaultCode.BAD_MESSAGE, _beyond(request.version))
    if request.is_draft:
        return draft.check_version(members, request)
    problem = check_version(registry, members, request.version, allow_rollback=request.allow_rollback)
    return problem or check_catch_up(registry, request, members, request.version)


def reload_version(registry: Registry, request: ReloadFleet) -> Version:
    """The version that a reload gives: the one asked for, else the fleet's next step."""
    return next_version(registry) if request.version is None else request.version


def next_version(registry: Registry) -> Version:
    """The step after the fleet's; the first one of a fleet that has none."""
    fleet = registry.version
    return Version(step=1) if fleet is None else Version(incarnation=fleet.incarnation, step=fleet.step + 1)


def held(members: Sequence[Member]) -> tuple[WorkerId, ...]:
    """Workers that a person or program holds paused (and not an update that failed), or of whose memory a part sleeps:
    no op of ours ends that.
    """
    return tuple(m.worker for m in members if _is_held(m))


def plan_update(
    registry: Registry,
    request: UpdateWeights,
    members: Sequence[Member],
    tensors: tuple[TensorSpec, ...],
    pages: tuple[ManifestPage, ...],
    current: Group | None,
    group_timeout_s: float,
    sums_digest: str | None = None,
) -> Plan:
    """What an update of `members` starts from. `current` is the group that stood after the last one, `sums_digest` what
    a catch-up has to bring.
    """
    # Who isn't caught up isn't touched: what is left of the group there is left when the next one is joined.
    leavers = () if current is None or request.is_catch_up else current.workers
    return Plan(
        request=request,
        tensors=tensors,
        total_bytes=sum(num_bytes(spec) for spec in tensors),
        pages=pages,
        candidates=tuple(
            Candidate(m.worker, m.boot_id, m.descriptor.world_size, _is_held(m), view_of(m.status, request).version)
            for m in _in_order(members)
        ),
        next_epoch=registry.max_epoch + 1,
        group_timeout_s=max(group_timeout_s, request.stall_s),
        current=current,
        is_whole=current is not None and all(_is_in(registry, current, w) for w in current.workers),
        leavers=tuple(w for w in leavers if _can_leave(registry, w)),
        sums_digest=sums_digest,
    )


def _numbers_problem(request: UpdateWeights, num_workers: int) -> str | None:
    if request.require is not None and not 1 <= request.require <= num_workers:
        return f"require is {request.require}, the target has {num_workers} workers"
    if not MIN_BUCKET_BYTES <= request.bucket_bytes <= MAX_BUCKET_BYTES:
        return f"bucket_bytes is {request.bucket_bytes}; use {MIN_BUCKET_BYTES} to {MAX_BUCKET_BYTES}"
    if request.num_trainer_ranks < 1:
        return f"num_trainer_ranks is {request.num_trainer_ranks}, at least 1 is needed"
    if not 0 < request.stall_s <= MAX_DEADLINE_S:
        return f"stall_s is {request.stall_s:g}; use more than 0 and at most {MAX_DEADLINE_S:g} seconds"
    return None


def _beyond(version: Version) -> str:
    return f"version is {version}; use numbers from 0 to {MAX_VERSION_NUMBER}"


def _is_in_bounds(version: Version) -> bool:
    return all(0 <= number <= MAX_VERSION_NUMBER for number in (version.incarnation, version.step))


def _in_order(members: Sequence[Member]) -> list[Member]:
    """By component, then by number: the order of ranks doesn't change because somebody's id has more digits."""

    def key(member: Member) -> tuple[str, int]:
        component, instance_id = split_worker_id(member.worker)
        return component, int(instance_id)

    return sorted(members, key=key)


def _is_clean_at(member: Member, version: Version) -> bool:
    weights = member.status.weights
    return weights.state is WeightsState.CLEAN and weights.version == version


def _is_held(member: Member) -> bool:
    status = member.status
    if status.asleep:
        return True
    if status.generation is not Generation.PAUSED or status.pause is None:
        return False
    return not is_pause_of_op(status.pause.owner)


def _can_leave(registry: Registry, worker: WorkerId) -> bool:
    member = registry.get(worker)
    return member is not None and registry.refusal(member) is None


def _is_in(registry: Registry, group: Group, worker: WorkerId) -> bool:
    member = registry.get(worker)
    if member is None or member.gone is not None or member.boot_id != group.boots.get(worker):
        return False
    return member.status.epoch == group.plan.epoch
