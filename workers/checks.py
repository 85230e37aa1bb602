"""What a worker refuses, by route. Pure: a command and the state in, a fault or None out; nothing has changed yet.

The order of the checks is that of `lifecycle`: these here come last, when term, expiry, membership and `busy` are
settled. Each fault names the values that it is about.
"""

from collections.abc import Callable
from typing import Any

from rlbus.schemas import (
    WHOLE,
    CommandBody,
    CommitWeights,
    Fault,
    FaultCode,
    GroupPlan,
    InitGroup,
    LoadWeights,
    PauseGeneration,
    PrepareReload,
    PrepareWeightsUpdate,
    ReceiveWeights,
    ResumeGeneration,
    Version,
    WeightsState,
)
from rlbus.transfer.buckets import MAX_BUCKET_BYTES, MIN_BUCKET_BYTES
from rlbus.workers.state import WorkerState

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


def lease_problem(lease_s: float | None) -> Fault | None:
    """Why a pause can't have this lease, or None."""
    if lease_s is None or 0 < lease_s <= MAX_LEASE_S:
        return None
    message = f"lease_s is {lease_s:g}; use more than 0 and at most {MAX_LEASE_S:g} seconds, or none at all"
    return fault(FaultCode.BAD_MESSAGE, message, lease_s=lease_s)


def _check_pause(state: WorkerState, body: PauseGeneration) -> Fault | None:
    return lease_problem(body.lease_s)


def _check_resume(state: WorkerState, body: ResumeGeneration) -> Fault | None:
    if body.force or state.weights.state in WHOLE:
        return None
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
        f"weights are {state.weights.state.value}; a full update or a reload makes them clean",
        state=state.weights.state.value,
        last_good=state.weights.last_good,
    )


def _check_prepare(state: WorkerState, body: PrepareWeightsUpdate) -> Fault | None:
    current = state.weights.version
    if body.base_version is not None and body.base_version != current:
        return fault(
            FaultCode.WRONG_STATE,
            f"the update builds on version {body.base_version}, this worker has {current}",
            base_version=body.base_version,
            version=current,
        )
    return _check_version(state, body.version, body.allow_rollback)


def _check_version(state: WorkerState, version: Version, allow_rollback: bool) -> Fault | None:
    """Newer than what is served. Torn weights serve nothing: there the last good version itself may be restored."""
    weights = state.weights
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
    plan = body.plan
    spans = [s for s in plan.spans if (s.component, s.instance_id) == (state.component, state.instance_id)]
    if not spans:
        return fault(FaultCode.NOT_A_MEMBER, f"group {plan.epoch} has no ranks for this worker", epoch=plan.epoch)
    if problem := plan_problem(plan):
        return fault(FaultCode.BAD_MESSAGE, f"group plan {plan.epoch}: {problem}", epoch=plan.epoch)
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
    if state.epoch != body.epoch:
        return _stale_epoch(state, body.epoch)
    prepared = state.prepared
    if prepared is None or (prepared.version, prepared.manifest_digest) != (body.version, body.manifest_digest):
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
    return None if state.pause is not None else fault(FaultCode.WRONG_STATE, "the worker is not paused; pause it first")


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


def is_committed(state: WorkerState, body: CommitWeights) -> bool:
    """Whether this commit repeats the last one."""
    return state.committed_op_id == body.update_op_id and state.weights.version == body.version


def _check_load(state: WorkerState, body: LoadWeights) -> Fault | None:
    return _check_paused(state) or _check_version(state, body.version, body.allow_rollback)


def _check_prepare_reload(state: WorkerState, body: PrepareReload) -> Fault | None:
    return _check_version(state, body.version, body.allow_rollback)


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
    InitGroup: _check_init,
    ReceiveWeights: _check_receive,
    CommitWeights: _check_commit,
    PrepareReload: _check_prepare_reload,
    LoadWeights: _check_load,
}
