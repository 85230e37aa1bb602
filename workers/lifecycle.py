"""The worker's state machine: `decide(state, event) -> (state, actions)`. Pure; the agent does what the actions say.

Rules (DESIGN section 4): a command is validated wholly before it changes anything; one mutation at a time; a repeat of
an op_id joins; a failed update leaves the weights as they were (before the first byte) or dirty (after it, or in
doubt), paused, and with its session closed. What takes a running mutation back (abort of the same update, destroy of
the same group, resume over a pause, unload of the adapter) is the one kind that is admitted beside another: it ends
that one and then runs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlbus.schemas import (
    QUERY_ROUTES,
    AbortRequest,
    AbortWeights,
    ApplyUpdate,
    Command,
    CommandBody,
    CommitWeights,
    DestroyGroup,
    Fault,
    FaultCode,
    FinishUpdate,
    FlushCache,
    GetLoras,
    Hello,
    InitGroup,
    InitTransfer,
    LoadLora,
    LoadWeights,
    PauseGeneration,
    PrepareWeightsUpdate,
    PutManifest,
    ReceiveWeights,
    RenewLease,
    ResumeGeneration,
    SetVersion,
    ShutdownTransfer,
    Sleep,
    StartUpdate,
    UnloadLora,
    Version,
    WakeUp,
    WeightsState,
    WeightsView,
    route_of,
)
from rlbus.workers import leases, sleeping
from rlbus.workers.checks import busy_with, check_body, fault, next_version
from rlbus.workers.described import described
from rlbus.workers.draft import (
    committed,
    in_session,
    is_about_draft,
    is_committed,
    is_for_draft,
    weights_of,
    with_weights,
)
from rlbus.workers.journal import Record, digest_of
from rlbus.workers.loras import check_load, check_unload, lora_event
from rlbus.workers.moves import (
    Action,
    AnswerNow,
    Arrived,
    Cleanup,
    Decision,
    Ended,
    Event,
    FirstByte,
    Flushed,
    GroupLeft,
    Ignore,
    Join,
    LeaseEnded,
    MayStand,
    Refuse,
    Released,
    Replay,
    Run,
    SessionClosed,
    Started,
    TakeBack,
    WakeAgain,
    WakeDue,
    Woke,
)
from rlbus.workers.slept import slept
from rlbus.workers.state import Prepared, Running, Session, WorkerState

# Largest term that is taken: JSON numbers above it are rounded by others. A leader's term is far below (milliseconds).
MAX_TERM = 2**53 - 1
# Routes that the agent serves itself, whatever the engine.
AGENT_ROUTES = QUERY_ROUTES
# Routes that belong to one another: whoever can receive can also prepare, commit, abort, and form the group.
_RECEIVE_ROUTE = "update_weights_from_distributed"
_LOAD_ROUTE = "update_weights_from_disk"
RELOAD_ROUTES = frozenset({"prepare_weights_reload", _LOAD_ROUTE})
UPDATE_ROUTES = frozenset(
    {
        "put_manifest",
        "prepare_weights_update",
        "init_weights_update_group",
        "destroy_weights_update_group",
        _RECEIVE_ROUTE,
        "commit_weights_update",
        "abort_weights_update",
    }
)


def served_routes(engine_routes: frozenset[str]) -> frozenset[str]:
    """Every route of a worker: the engine's, the agent's own, the whole update if the engine can receive, and the check
    of a folder if it can load one.
    """
    update = UPDATE_ROUTES if _RECEIVE_ROUTE in engine_routes else frozenset()
    lease = frozenset({"renew_lease"}) if "pause_generation" in engine_routes else frozenset()
    reload = RELOAD_ROUTES if _LOAD_ROUTE in engine_routes else frozenset()
    return AGENT_ROUTES | engine_routes | update | lease | reload


def decide(state: WorkerState, event: Event) -> Decision:
    """What an event makes of the state, and what is to be done."""
    match event:
        case Arrived():
            return _arrived(state, event)
        case Started():
            return _started(state), ()
        case FirstByte():
            return _first_byte(state, event), ()
        case SessionClosed():
            # What was received and not committed is torn; a failure has been judged before.
            is_open = in_session(state).state is WeightsState.UPDATING
            return replace(_torn(state) if is_open else state, session=None), ()
        case GroupLeft():
            return replace(state, epoch=None), ()
        case Flushed():
            return replace(state, owes_flush=False), ()
        case Woke() | MayStand() | WakeDue():
            return sleeping.moved(state, event)
        case Ended():
            return _ended(state, event)
        case Released():
            return _released(state, event)
        case LeaseEnded():
            return _lease_ended(state, event)
        case _:
            return lora_event(state, event)


# --- arrival


def _arrived(state: WorkerState, event: Arrived) -> Decision:
    command, body = event.command, event.command.body
    if not event.is_unicast and command.members is not None and state.instance_id not in command.members:
        return state, (Ignore(),)
    if event.record is not None:
        return state, (_repeat(event.record, command),)
    if refusal := _refusal(state, event):
        return state, (Refuse(refusal),)
    if not is_mutation(body) and not isinstance(body, RenewLease | Hello):
        return state, (AnswerNow(),)
    state = replace(state, term=command.term)
    if isinstance(body, RenewLease):
        if problem := leases.check_renewal(state, body):
            return state, (Refuse(problem),)
        return leases.renewed(state, body, event.now), (AnswerNow(),)
    if isinstance(body, Hello):  # a new leader says so, and from here on its predecessor is refused
        return state, (AnswerNow(),)
    mutation = Running(op_id=command.op_id, body=body, since=event.now)
    if state.running is not None:
        if state.queued is None and takes_back(body, state.running.body):
            if problem := problem_with(state, body):
                return state, (Refuse(problem),)
            return replace(state, queued=mutation), (Run(takes_back=state.running.op_id),)
        refused_at = event.now if state.running.is_own else state.refused_at
        return replace(state, refused_at=refused_at), (Refuse(busy_with(state.running)),)
    if problem := problem_with(state, body) or _manifest_problem(event) or event.outside:
        return state, (Refuse(problem),)
    prepared = state.prepared
    if isinstance(body, PrepareWeightsUpdate):
        assert event.tensors is not None
        is_draft = is_for_draft(body)
        prepared = Prepared(command.op_id, body.version, body.manifest_digest, event.tensors, is_draft)
    return replace(state, running=mutation, prepared=prepared), (Run(),)


def _repeat(record: Record, command: Command) -> Action:
    """The same op_id again. It comes before expiry and term: "refused" would say that nothing had changed."""
    if record.digest != digest_of(command.body):
        return Refuse(fault(FaultCode.BAD_MESSAGE, f"op_id {command.op_id} was used for another command"))
    return Join(record) if record.result is None else Replay(record)


def _refusal(state: WorkerState, event: Arrived) -> Fault | None:
    """What is wrong with the envelope, or None."""
    command = event.command
    route = route_of(command.body)
    if route != event.route:
        return fault(FaultCode.BAD_MESSAGE, f"a {route} came on the subject of {event.route}", route=event.route)
    if command.term > MAX_TERM:
        return fault(FaultCode.BAD_MESSAGE, f"term {command.term} is above {MAX_TERM}", max_term=MAX_TERM)
    if command.members is not None and state.instance_id not in command.members:
        return fault(FaultCode.NOT_A_MEMBER, "the command is addressed to other workers")
    if command.term < state.term:
        return fault(
            FaultCode.STALE_TERM,
            f"term {command.term} is over, a controller with term {state.term} has spoken",
            term=command.term,
            current=state.term,
        )
    if event.now >= command.expires_at:
        late_s = event.now - command.expires_at
        return fault(FaultCode.EXPIRED, f"the command arrived {late_s:.3f} s after it expired", late_s=f"{late_s:.3f}")
    if route not in state.routes:
        return fault(FaultCode.NO_ROUTE, f"this worker doesn't serve {route}", route=route)
    return None


def problem_with(state: WorkerState, body: CommandBody) -> Fault | None:
    """Why this command can't be done in this state, or None."""
    match body:
        case LoadLora():
            return check_load(state, body)
        case UnloadLora():
            return check_unload(state, body)
        case _:
            return check_body(state, body)


def is_mutation(body: CommandBody) -> bool:
    """Whether a command needs the one place for mutations. Aborts of requests, manifest pages, renewals and
    the list of adapters don't.
    """
    is_beside = isinstance(body, AbortRequest | PutManifest | RenewLease | GetLoras)
    return route_of(body) not in QUERY_ROUTES and not is_beside


def takes_back(body: CommandBody, running: CommandBody) -> bool:
    """Whether `body` asks for the end of what is running: an abort of the same update, a destroy of the same group, a
    resume of what pauses, a wake of what falls asleep, an unload of the adapter that is being loaded.
    """
    match body, running:
        case AbortWeights(), ReceiveWeights():
            return body.update_op_id == running.update_op_id
        case DestroyGroup(), ReceiveWeights():
            return body.epoch == running.epoch
        case DestroyGroup(), InitGroup():
            return body.epoch == running.plan.epoch
        case (ResumeGeneration(), PauseGeneration()) | (WakeUp(), Sleep()):
            return True
        case ShutdownTransfer(), InitTransfer() | ApplyUpdate():
            return True
        case UnloadLora(), LoadLora():
            return (body.name, body.revision) == (running.name, running.revision)
        case _:
            return False


def _manifest_problem(event: Arrived) -> Fault | None:
    body = event.command.body
    if not isinstance(body, PrepareWeightsUpdate) or event.tensors is not None:
        return None
    return fault(
        FaultCode.MANIFEST_UNKNOWN,
        f"manifest {body.manifest_digest[:12]} is not complete here; send its pages and prepare again",
        retryable=True,
        digest=body.manifest_digest,
    )


# --- progress


def _started(state: WorkerState) -> WorkerState:
    """From here on the engine may change. A session opens with the weights still as they were."""
    assert state.running is not None
    match state.running.body:
        case InitGroup(plan=plan):
            # Also if the join fails: a command to join the one before it may still be on its way.
            return replace(state, epoch=None, newest_epoch=plan.epoch, epoch_term=state.term)
        case ReceiveWeights() as body:
            before = weights_of(state, body.is_draft)
            session = Session(body.update_op_id, body.version, before, is_draft=body.is_draft)
            return replace(state, session=session)
        case StartUpdate():
            return replace(state, session=Session(state.running.op_id, None, before=state.weights))
        case ApplyUpdate():
            return replace(state, weights=_updating(state.weights), owes_flush=True)
        case InitTransfer() | ShutdownTransfer():
            return replace(state, epoch=None)  # a group of ours is left for it
        case LoadWeights() as body:
            session = Session(state.running.op_id, body.version, before=state.weights)
            return replace(state, session=session, weights=_updating(state.weights), owes_flush=True)
        case _:
            return state


def _first_byte(state: WorkerState, event: FirstByte) -> WorkerState:
    if state.running is None or state.running.op_id != event.op_id or state.session is None:
        return state  # a thread that the engine abandoned still counts
    return _touched(state)


def _touched(state: WorkerState) -> WorkerState:
    """Bytes have come for the open session."""
    updating = _updating(in_session(state))
    return replace(with_weights(state, is_about_draft(state), updating), owes_flush=True)


def _updating(weights: WeightsView) -> WeightsView:
    return WeightsView(state=WeightsState.UPDATING, last_good=_last_good(weights))


def _torn(state: WorkerState) -> WorkerState:
    """What the open session is about can't be trusted."""
    dirty = WeightsView(state=WeightsState.DIRTY, last_good=_last_good(in_session(state)))
    return with_weights(state, is_about_draft(state), dirty)


def _last_good(weights: WeightsView) -> Any:
    return weights.version if weights.version is not None else weights.last_good


# --- end


def _ended(state: WorkerState, event: Ended) -> Decision:
    assert state.running is not None
    assert state.running.op_id == event.op_id
    body = state.running.body
    if event.fault is None:
        if isinstance(body, StartUpdate | ApplyUpdate | FinishUpdate):
            state = leases.stepped(state, event.now)
        return _SUCCEEDED.get(type(body), _unchanged)(state, body, event), ()
    return _failed(state, body, event)


def _failed(state: WorkerState, body: CommandBody, event: Ended) -> Decision:
    match body:
        case PauseGeneration() if state.pause is None:
            # The engine may stand still, half paused: back to what was.
            return state, (Cleanup.RESUME,)
        case Sleep():
            state, tags = sleeping.failed(state, body, event.is_touched)
            return state, (WakeAgain(tags), Cleanup.RESUME)
        case WakeUp() if sleeping.may_run(state):
            return sleeping.paused(state), ()  # all is awake, and only the resume has failed
        case InitGroup():
            return replace(state, epoch=None), (Cleanup.LEAVE_GROUP,)
        case PrepareWeightsUpdate():
            return replace(state, prepared=None), ()
        case ReceiveWeights() | CommitWeights() | LoadWeights() if state.session is not None:
            return _undone(state, body, event)
        case StartUpdate() | ApplyUpdate() | FinishUpdate() if state.session is not None:
            return _undone(state, body, event)
        case _:
            return state, ()


def _undone(state: WorkerState, body: CommandBody, event: Ended) -> Decision:
    session = state.session
    assert session is not None
    cleanup: tuple[Action, ...] = (Cleanup.CLOSE_SESSION,)
    if isinstance(body, ReceiveWeights):
        cleanup += (Cleanup.LEAVE_GROUP,)
    # The engine speaks of this call, and only at a commit of the whole update.
    is_touched = event.is_touched or (session.is_touched and not isinstance(body, CommitWeights))
    left = _torn(state) if is_touched else with_weights(state, session.is_draft, session.before)
    # It stays open until the engine has closed it (`SessionClosed`); nothing that it brought counts any more.
    failed = Session(session.update_op_id, session.version, in_session(left), is_draft=session.is_draft)
    return replace(left, session=failed, prepared=None, owes_flush=state.owes_flush or is_touched), cleanup


def _unchanged(state: WorkerState, body: Any, event: Ended) -> WorkerState:
    return state


def _paused(state: WorkerState, body: PauseGeneration, event: Ended) -> WorkerState:
    return leases.paused(state, body, event.op_id, event.now)


def _resumed(state: WorkerState, body: ResumeGeneration, event: Ended) -> WorkerState:
    return replace(state, pause=None, lease=None, prepared=None)


def _flushed(state: WorkerState, body: FlushCache, event: Ended) -> WorkerState:
    return replace(state, owes_flush=False)


def _joined(state: WorkerState, body: InitGroup, event: Ended) -> WorkerState:
    return replace(state, epoch=body.plan.epoch)


def _left(state: WorkerState, body: DestroyGroup, event: Ended) -> WorkerState:
    return replace(state, epoch=None) if state.epoch == body.epoch else state


def _received(state: WorkerState, body: ReceiveWeights, event: Ended) -> WorkerState:
    assert state.session is not None
    session = replace(state.session, is_received=True, is_touched=True)
    return replace(_touched(state), session=session, prepared=None)


def _committed(state: WorkerState, body: CommitWeights, event: Ended) -> WorkerState:
    if is_committed(state, body):
        return state
    return _clean(committed(state, body), body.version)


def _loaded(state: WorkerState, body: LoadWeights, event: Ended) -> WorkerState:
    return replace(_clean(state, body.version), committed_op_id=None, is_unnamed=not body.is_named)


def _clean(state: WorkerState, version: Version) -> WorkerState:
    """What the open session is about is; without one, the target's weights are."""
    weights, is_draft = WeightsView(state=WeightsState.CLEAN, version=version, last_good=version), is_about_draft(state)
    is_unnamed = state.is_unnamed and is_draft
    state = with_weights(state, is_draft, weights)
    return leases.healed(replace(state, is_unnamed=is_unnamed, session=None, prepared=None, owes_flush=True))


def _applied(state: WorkerState, body: ApplyUpdate, event: Ended) -> WorkerState:
    assert state.session is not None
    session = replace(state.session, is_touched=True)
    if session.before.state is not WeightsState.CLEAN:
        brought = {spec.name: spec for spec in (*session.tensors, *described(body.info))}
        session = replace(session, tensors=tuple(brought.values()))
    return replace(state, session=session)


def _finished(state: WorkerState, body: FinishUpdate, event: Ended) -> WorkerState:
    is_unnamed = body.version is None
    return replace(_clean(state, next_version(state, body)), committed_op_id=None, is_unnamed=is_unnamed)


def _named(state: WorkerState, body: SetVersion, event: Ended) -> WorkerState:
    weights = WeightsView(state=WeightsState.CLEAN, version=body.version, last_good=body.version)
    return replace(state, weights=weights, committed_op_id=None, is_unnamed=False)


def _aborted(state: WorkerState, body: AbortWeights, event: Ended) -> WorkerState:
    """The agent has closed the session if it was this update's; what was prepared for it is dropped with it."""
    prepared = state.prepared
    if prepared is not None and prepared.op_id.startswith(body.update_op_id):
        prepared = None
    return replace(state, prepared=prepared)


_SUCCEEDED: dict[type[Any], Callable[[WorkerState, Any, Ended], WorkerState]] = {
    PauseGeneration: _paused,
    ResumeGeneration: _resumed,
    FlushCache: _flushed,
    Sleep: slept,
    WakeUp: sleeping.woke,
    InitGroup: _joined,
    DestroyGroup: _left,
    ReceiveWeights: _received,
    CommitWeights: _committed,
    LoadWeights: _loaded,
    AbortWeights: _aborted,
    SetVersion: _named,
    ApplyUpdate: _applied,
    FinishUpdate: _finished,
}


# --- the end of a lease


def _lease_ended(state: WorkerState, event: LeaseEnded) -> Decision:
    state = leases.ended(state, event.op_id)
    if state.running is None:
        return _carry_out(state, event.now)
    if (op_id := leases.to_take_back(state)) is not None:
        why = fault(FaultCode.CANCELLED, "the lease of the pause ended before the first byte", op_id=op_id)
        return state, (TakeBack(op_id, why),)
    return state, ()


def _released(state: WorkerState, event: Released) -> Decision:
    """The place is free: for what was queued, or for what a lease that ended meanwhile asks for."""
    state = replace(state, running=state.queued, queued=None)
    if state.running is not None:
        return state, ()
    op = leases.next_op(state)
    if op is not None and op.op_id == event.op_id:
        return leases.retried(state), ()  # it was just tried, and didn't do it
    return _carry_out(state, event.now)


def _carry_out(state: WorkerState, now: float) -> Decision:
    op = leases.next_op(state)
    if op is None:
        return state, ()
    return replace(state, running=Running(op.op_id, op.body, since=now, is_own=True)), (op,)
