"""What an answered command says about its worker's status. Pure.

A worker announces every change, but a moment after it answered; whoever asks for the fleet's state right after an op
must see what that op did. The worker's next announcement replaces what is written here.
"""

import msgspec

from rlbus.schemas import (
    SHORT_SUM_CHARS,
    CommandBody,
    CommitWeights,
    DestroyGroup,
    FinishUpdate,
    Generation,
    GetLoras,
    GetVersion,
    InitGroup,
    LoadLora,
    LoadWeights,
    LorasData,
    LoraState,
    LorasView,
    PauseGeneration,
    PauseView,
    ReceiveWeights,
    RenewLease,
    Result,
    ResultStatus,
    ResumeGeneration,
    Sleep,
    SleepData,
    UnloadLora,
    WakeUp,
    WeightsData,
    WeightsState,
    WeightsView,
    WorkerStatus,
    lora_id,
    route_of,
)


def status_after(status: WorkerStatus, body: CommandBody, result: Result, now: float) -> WorkerStatus:
    """The status of a worker after it answered `body` with `result`; unchanged unless it did it. `now` is Unix time."""
    change = msgspec.structs.replace
    is_over = result.status is not ResultStatus.REFUSED
    if is_over and status.work is not None and status.work.route == route_of(body):
        status = change(status, work=None)  # an answer, also a bad one, ends the excuse for silence
    if result.status is not ResultStatus.OK:
        return status
    match body:
        case PauseGeneration():
            owner = result.op_id if body.owner is None else body.owner
            since = now if status.pause is None else status.pause.since
            is_hold = status.pause is not None and status.pause.expires_at is None
            expires_at = None if is_hold or body.lease_s is None else now + body.lease_s
            pause = PauseView(owner=owner, mode=body.mode.value, since=since, expires_at=expires_at)
            return change(status, generation=Generation.PAUSED, pause=pause)
        case RenewLease() if status.pause is not None and status.pause.expires_at is not None:
            expires_at = None if body.lease_s is None else now + body.lease_s
            return change(status, pause=change(status.pause, expires_at=expires_at))
        case ResumeGeneration():
            return change(status, generation=Generation.RUNNING, pause=None)
        case InitGroup():
            return change(status, epoch=body.plan.epoch)
        case DestroyGroup() if status.epoch == body.epoch:
            return change(status, epoch=None)
        case ReceiveWeights():
            before = status.draft if body.is_draft and status.draft is not None else status.weights
            last_good = before.last_good if before.version is None else before.version
            updating = WeightsView(state=WeightsState.UPDATING, last_good=last_good)
            return change(status, draft=updating) if body.is_draft else change(status, weights=updating)
        case CommitWeights() | GetVersion() | FinishUpdate() if isinstance(result.data, WeightsData):
            return change(status, weights=result.data.weights, draft=result.data.draft or status.draft)
        case CommitWeights() | LoadWeights():
            weights = WeightsView(state=WeightsState.CLEAN, version=body.version, last_good=body.version)
            return change(status, weights=weights)
        case LoadLora() | UnloadLora() | GetLoras() if isinstance(result.data, LorasData):
            return change(status, loras=_listed(status.loras, result.data))
        case Sleep() | WakeUp() if isinstance(result.data, SleepData):
            return change(status, asleep=result.data.asleep)
        case _:
            return status


def loaded_sums(data: LorasData) -> dict[str, str]:
    """What an engine serves: id -> the first digits of the checksum ("": nobody knows its bytes). Pure."""
    return {
        lora_id(view.name, view.revision): (view.checksum or "")[:SHORT_SUM_CHARS]
        for view in data.loras
        if view.revision is not None and view.state is LoraState.LOADED
    }


def _listed(before: LorasView | None, data: LorasData) -> LorasView:
    """The view of an engine's adapters after its list; with checksums if its agent tells them at all. `before` is None
    where heartbeats tell nothing, since the engine is too slow for them.
    """
    loaded = loaded_sums(data)
    ids = tuple(sorted(loaded))
    before = LorasView(ids=(), capacity=data.capacity) if before is None else before
    sums = tuple(loaded[i] for i in ids) if len(before.sums) == len(before.ids) else ()
    num_draining = sum(v.state is LoraState.DRAINING for v in data.loras)
    return msgspec.structs.replace(before, ids=ids, sums=sums, num_draining=num_draining)
