"""What a worker refuses, by route. Pure: a command and the state in, a fault or None out; nothing has changed yet.

The order of the checks is that of `lifecycle`: these here come last, when term, expiry, membership and `busy` are
settled. Each fault names the values that it is about.
"""

from collections.abc import Callable
from typing import Any

from rlbus.schemas import (
    ApplyUpdate,
    CommandBody,
    CommitWeights,
    Fault,
    FaultCode,
    FinishUpdate,
    GetChecksums,
    GroupPlan,
    InitGroup,
    InitTransfer,
    LoadWeights,
    PauseGeneration,
    PrepareDraftUpdate,
    PrepareReload,
    PrepareWeightsUpdate,
    ReceiveWeights,
    ResumeGeneration,
    SetVersion,
    ShutdownTransfer,
    Sleep,
    SleepTag,
    StartUpdate,
    Version,
    WakeUp,
    WeightsState,
    route_of,
)
from rlbus.transfer.buckets import MAX_BUCKET_BYTES, MIN_BUCKET_BYTES
from rlbus.workers.draft import draft_is_stuck, is_committed, is_for_draft, torn_part, weights_of
from rlbus.workers.state import Running, WorkerState

# Longest lease that a pause may have, in seconds: what is to hold longer than a day is an explicit hold.
MAX_LEASE_S = 86_400.0

# Codes that promise that nothing has changed (rlbus.schemas.faults, first half).
REFUSALS = frozenset(
    {
        FaultCode.BAD_MESSAGE,
        FaultCode.TOO_LARGE,
        FaultCode.NO_ROUTE,
        FaultCode.NOT_A_MEMBER,
        FaultCode.EXPIRED,
        FaultCode.STALE_TERM,
        FaultCode.STALE_EPOCH,
        FaultCode.BUSY,
        FaultCode.WRONG_STATE,
        FaultCode.ASLEEP,
        FaultCode.DIRTY,
        FaultCode.VERSION_REGRESSION,
        FaultCode.MANIFEST_UNKNOWN,
        FaultCode.MANIFEST_MISMATCH,
        FaultCode.UNKNOWN_OP,
        FaultCode.NO_CAPACITY,
        FaultCode.REVISION_TAKEN,
    }
)


def fault(code: FaultCode, message: str, *, retryable: bool = False, **detail: object) -> Fault:
    """A fault with its values as text."""
    return Fault(code=code, message=message, retryable=retryable, detail={k: str(v) for k, v in detail.items()})


def check_body(state: WorkerState, body: CommandBody) -> Fault | None:
    """Why this command can't be done in this state, or None."""
    check = _CHECKS.get(type(body))
    return None if check is None else check(state, body)


def busy_with(running: Running) -> Fault:
    """Why nothing else can begin; `own` in its detail says that nobody sent what runs, and that it ends by itself."""
    op_id, route = running.op_id, route_of(running.body)
    if not running.is_own:
        return fault(FaultCode.BUSY, f"op {op_id} is running ({route})", op_id=op_id, retryable=True)
    message = f"op {op_id} is running ({route}, the worker's own)"
    return fault(FaultCode.BUSY, message, op_id=op_id, own=route, retryable=True)


def lease_problem(lease_s: float | None) -> Fault | None:
    """Why a pause can't have this lease, or None."""
    if lease_s is None or 0 < lease_s <= MAX_LEASE_S:
        return None
    message = f"lease_s is {lease_s:g}; use more than 0 and at most {MAX_LEASE_S:g} seconds, or none at all"
    return fault(FaultCode.BAD_MESSAGE, message, lease_s=lease_s)


def _check_pause(state: WorkerState, body: PauseGeneration) -> Fault | None:
    return lease_problem(body.lease_s)


def asleep_problem(asleep: frozenset[SleepTag], needs: str) -> Fault:
    """The refusal of what can't be done while these tags sleep; it names what to wake."""
    tags = ", ".join(sorted(asleep))
    return fault(FaultCode.ASLEEP, f"asleep: {tags}; {needs} needs it awake: wake it first", tags=tags)


def _check_awake(state: WorkerState, needs: str) -> Fault | None:
    """Whether the weights are there to be read and written (SCENARIOS 37)."""
    asleep = state.asleep & {SleepTag.WEIGHTS}
    return asleep_problem(asleep, needs) if asleep else None


def _check_sleep(state: WorkerState, body: Sleep) -> Fault | None:
    if body.level not in (1, 2):
        return fault(FaultCode.BAD_MESSAGE, f"level is {body.level}; use 1 (keep weights) or 2 (discard them)")
    if problem := _check_tags(state, body.tags):
        return problem
    if state.session is None:
        return None
    update = state.session.update_op_id
    message = f"update {update} is open; commit or abort it before the worker sleeps"
    return fault(FaultCode.BUSY, message, op_id=update, open=update, retryable=True)


def _check_wake(state: WorkerState, body: WakeUp) -> Fault | None:
    return _check_tags(state, body.tags)


def _check_tags(state: WorkerState, tags: tuple[SleepTag, ...] | None) -> Fault | None:
    if tags is None or (tags and state.sleep_tags.issuperset(tags)):
        return None
    has = ", ".join(sorted(state.sleep_tags))
    named = ", ".join(tags) or "none"
    return fault(FaultCode.BAD_MESSAGE, f"tags are {named}; this engine's are {has}", tags=named, has=has)


def _check_resume(state: WorkerState, body: ResumeGeneration) -> Fault | None:
    if state.asleep:
        return asleep_problem(state.asleep, "resuming")
    if body.force or (torn := torn_part(state)) is None:
        return None
    what, weights = torn
    or_reload = " or a reload" if weights is state.weights else ""
    heals = f"; a full update{or_reload} makes them clean"
    if weights is not state.weights and (stuck := draft_is_stuck(state)):
        heals = stuck
    if state.session is not None:
        update = state.session.update_op_id
        return fault(
            FaultCode.BUSY,
            f"update {update} is open; commit or abort it before resuming",
            op_id=update,
            open=update,
            retryable=True,
        )
    return fault(
        FaultCode.DIRTY,
        f"{what} are {weights.state.value}{heals}",
        state=weights.state.value,
        last_good=weights.last_good,
    )


def _check_prepare(state: WorkerState, body: PrepareWeightsUpdate) -> Fault | None:
    if problem := _check_awake(state, "an update"):
        return problem
    current = weights_of(state, is_for_draft(body)).version
    if body.base_version is not None and body.base_version != current:
        return fault(
            FaultCode.WRONG_STATE,
            f"the update builds on version {body.base_version}, this worker has {current}",
            base_version=body.base_version,
            version=current,
        )
    return _check_version(state, body.version, body.allow_rollback, is_for_draft(body))


def _check_version(state: WorkerState, version: Version, allow_rollback: bool, is_draft: bool = False) -> Fault | None:
    """Newer than what is served. Torn weights serve nothing: there the last good version itself may be restored."""
    weights = weights_of(state, is_draft)
    is_clean = weights.state is WeightsState.CLEAN
    served = weights.version if is_clean else weights.last_good
    if allow_rollback or served is None or version > served or (version == served and not is_clean):
        return None
    return fault(
        FaultCode.VERSION_REGRESSION,
        f"version {version} is not newer than {served}; ask for a rollback if that is meant",
        version=version,
        served=served,
    )


def _check_init(state: WorkerState, body: InitGroup) -> Fault | None:
    if problem := _check_awake(state, "a group"):
        return problem
    plan = body.plan
    spans = [s for s in plan.spans if (s.component, s.instance_id) == (state.component, state.instance_id)]
    if not spans:
        return fault(FaultCode.NOT_A_MEMBER, f"group {plan.epoch} has no ranks for this worker", epoch=plan.epoch)
    if (wrong := plan_problem(plan)) is not None:
        return fault(FaultCode.BAD_MESSAGE, f"group plan {plan.epoch}: {wrong}", epoch=plan.epoch)
    if spans[0].num_ranks != state.world_size:
        return fault(
            FaultCode.BAD_MESSAGE,
            f"the plan has {spans[0].num_ranks} ranks for this worker, its world size is {state.world_size}",
            num_ranks=spans[0].num_ranks,
            world_size=state.world_size,
        )
    if plan.backend not in state.backends:
        has = ", ".join(state.backends) or "none"
        return fault(
            FaultCode.NO_ROUTE,
            f"this engine can't join a {plan.backend} group; its backends: {has}",
            backend=plan.backend,
        )
    newest = state.newest_epoch
    if newest is not None and state.epoch_term == state.term and plan.epoch < newest:
        return fault(
            FaultCode.STALE_EPOCH,
            f"group {plan.epoch} is over, this worker was in {newest} since",
            epoch=plan.epoch,
            current=newest,
        )
    return None


def plan_problem(plan: GroupPlan) -> str | None:
    """What is wrong with a plan's ranks in themselves, or None: trainer first, then spans without gap or overlap."""
    if plan.num_trainer_ranks < 1:
        return "it has no trainer rank"
    next_rank = plan.num_trainer_ranks
    for span in plan.spans:
        if span.first != next_rank or span.num_ranks < 1:
            return f"the span of {span.component}/{span.instance_id} begins at {span.first}, not at {next_rank}"
        next_rank += span.num_ranks
    if next_rank != plan.world_size:
        return f"its ranks sum up to {next_rank}, its world size is {plan.world_size}"
    return None


def _check_receive(state: WorkerState, body: ReceiveWeights) -> Fault | None:
    if problem := _check_awake(state, "an update"):
        return problem
    if state.epoch != body.epoch:
        return _stale_epoch(state, body.epoch)
    prepared = state.prepared
    what = body.version, body.manifest_digest, body.is_draft
    if prepared is None or (prepared.version, prepared.manifest_digest, prepared.is_draft) != what:
        return fault(
            FaultCode.WRONG_STATE,
            f"version {body.version} with this manifest was not prepared here",
            version=body.version,
            prepared=None if prepared is None else prepared.version,
        )
    if not MIN_BUCKET_BYTES <= body.bucket_bytes <= MAX_BUCKET_BYTES:
        return fault(
            FaultCode.BAD_MESSAGE,
            f"bucket_bytes {body.bucket_bytes} is not in {MIN_BUCKET_BYTES}..{MAX_BUCKET_BYTES}",
            bucket_bytes=body.bucket_bytes,
        )
    return _check_paused(state)


def _check_paused(state: WorkerState) -> Fault | None:
    """Whether it was told to stand still: by a pause, or because a part of its memory sleeps."""
    stands = state.pause is not None or state.asleep
    return None if stands else fault(FaultCode.WRONG_STATE, "the worker is not paused; pause it first")


def _check_commit(state: WorkerState, body: CommitWeights) -> Fault | None:
    if is_committed(state, body):
        return None
    session = state.session
    if session is None or (session.update_op_id, session.version) != (body.update_op_id, body.version):
        return fault(
            FaultCode.WRONG_STATE,
            f"no open update {body.update_op_id} to version {body.version}",
            open=None if session is None else session.update_op_id,
        )
    if not session.is_received:
        return fault(FaultCode.WRONG_STATE, f"update {body.update_op_id} has not received everything")
    return None


def _check_load(state: WorkerState, body: LoadWeights) -> Fault | None:
    problem = _check_awake(state, "a reload") or _check_paused(state)
    return problem or _check_version(state, body.version, body.allow_rollback)


def _check_checksums(state: WorkerState, body: GetChecksums) -> Fault | None:
    if body.is_draft and state.draft is None:
        return fault(FaultCode.NO_ROUTE, "this engine has no draft model that can be updated")
    return _check_awake(state, "a checksum")


def _check_prepare_reload(state: WorkerState, body: PrepareReload) -> Fault | None:
    return _check_awake(state, "a reload") or _check_version(state, body.version, body.allow_rollback)


def _check_set_version(state: WorkerState, body: SetVersion) -> Fault | None:
    weights = state.weights
    if weights.state is not WeightsState.CLEAN:
        return fault(
            FaultCode.DIRTY if weights.state is WeightsState.DIRTY else FaultCode.WRONG_STATE,
            f"weights are {weights.state.value}; a full update or a reload says what they are",
            state=weights.state.value,
        )
    if weights.version == body.version:
        return None
    if not state.is_unnamed:
        # Versions are what tells who is behind: another name would make an old worker pass for one of the fleet's.
        has = "those that it was started with" if weights.version is None else str(weights.version)
        message = f"the weights are {has}; only an update or a reload that came without a version can be named after it"
        return fault(FaultCode.WRONG_STATE, message, version=body.version, has=weights.version)
    return _check_version(state, body.version, body.allow_rollback)


def next_version(state: WorkerState, body: FinishUpdate) -> Version:
    """What weights are after another trainer's update: as it says, or the step after the last good one."""
    if body.version is not None:
        return body.version
    last = state.weights.last_good or Version()
    return Version(incarnation=last.incarnation, step=last.step + 1)


def _check_native(state: WorkerState, body: ApplyUpdate | FinishUpdate) -> Fault | None:
    session = state.session
    if session is None or session.version is not None:
        return fault(FaultCode.WRONG_STATE, "no update of this kind is open; start one first")
    if body.update_op_id is not None and body.update_op_id != session.update_op_id:
        text = f"update {body.update_op_id} is not the one that is open, which is {session.update_op_id}"
        return fault(FaultCode.WRONG_STATE, text, open=session.update_op_id)
    return _check_paused(state)


def _check_finish(state: WorkerState, body: FinishUpdate) -> Fault | None:
    if (problem := _check_native(state, body)) is not None:
        return problem
    if state.weights.state is not WeightsState.UPDATING:
        return fault(FaultCode.WRONG_STATE, "nothing was received in this update")
    return _check_version(state, next_version(state, body), allow_rollback=False)


def _check_gives_up(state: WorkerState) -> Fault | None:
    """What an earlier trainer left open is given up by the next one: with each pause that it makes, the lease that
    would end it is renewed. An update of a controller that has all its bytes isn't: its end is under way.
    """
    session = state.session
    if session is None or not session.is_received:
        return None
    update = session.update_op_id
    owner = "nobody" if state.pause is None else state.pause.owner
    message = f"update {update} is open: all of it has come, and it waits for its commit (paused by {owner})"
    return fault(FaultCode.BUSY, message, op_id=update, open=update, owner=owner, retryable=True)


def _check_init_transfer(state: WorkerState, body: InitTransfer) -> Fault | None:
    return _check_awake(state, "a group") or _check_gives_up(state)


def _check_shutdown(state: WorkerState, body: ShutdownTransfer) -> Fault | None:
    return _check_gives_up(state)


def _check_start(state: WorkerState, body: StartUpdate) -> Fault | None:
    return _check_awake(state, "an update") or _check_gives_up(state) or _check_paused(state)


def _stale_epoch(state: WorkerState, epoch: int) -> Fault:
    return fault(
        FaultCode.STALE_EPOCH,
        f"group {epoch} is not this worker's, which is {state.epoch}",
        epoch=epoch,
        current=state.epoch,
    )


_CHECKS: dict[type[Any], Callable[[WorkerState, Any], Fault | None]] = {
    PauseGeneration: _check_pause,
    ResumeGeneration: _check_resume,
    PrepareWeightsUpdate: _check_prepare,
    PrepareDraftUpdate: _check_prepare,
    InitGroup: _check_init,
    ReceiveWeights: _check_receive,
    CommitWeights: _check_commit,
    PrepareReload: _check_prepare_reload,
    LoadWeights: _check_load,
    SetVersion: _check_set_version,
    GetChecksums: _check_checksums,
    Sleep: _check_sleep,
    WakeUp: _check_wake,
    InitTransfer: _check_init_transfer,
    ShutdownTransfer: _check_shutdown,
    StartUpdate: _check_start,
    ApplyUpdate: _check_native,
    FinishUpdate: _check_finish,
}
