"""The update transaction, forward half: (state, event) -> (state, actions). Pure.

prepare -> form or reuse the group -> sender ready -> pause -> receive -> verify -> commit -> flush -> resume. Rules:
- Nobody is paused before the trainer is in the group; nothing is sent before every receiver stands.
- A failure before the trainer is told to send takes everything back. After that, damage decides: who received
  everything and has the trainer's checksums is committed and resumed, the rest is wound down (`winding`).
- Once a worker is committed, neither a cancel nor the deadline turns back.
- `require` lets workers drop out while preparing; a group, once formed, needs all of its members.
- With `on_failure` retry, an attempt that lost somebody is followed by one on those who are left (`attempts`).
"""

from collections.abc import Callable
from dataclasses import replace

from rlbus.controller.answers import unknown
from rlbus.controller.attempts import may_go_without_lost, may_retry, next_attempt, note_late, probe_s, step_of
from rlbus.controller.causes import fault
from rlbus.controller.grouping import fits, new_plan
from rlbus.controller.leases import LEASE_S
from rlbus.controller.op_ids import PAUSE_STEP, derive
from rlbus.controller.seats import blame, change, record
from rlbus.controller.update_state import (
    FORWARD,
    Action,
    Ask,
    Began,
    Damage,
    Drop,
    Event,
    Group,
    Hold,
    Sender,
    SenderFailed,
    SenderJoined,
    SenderSent,
    Stage,
    StepOverdue,
    StopAsked,
    Tell,
    TimeUp,
    UpdateState,
    WorkerAccepted,
    WorkerGone,
    WorkersAnswered,
    WorkerSilent,
)
from rlbus.controller.verify import check_committed, check_received, check_sent
from rlbus.controller.winding import WINDING, wind_down, wind_up
from rlbus.schemas import (
    CommandBody,
    CommitWeights,
    DestroyGroup,
    FaultCode,
    FlushCache,
    InitGroup,
    JoinTask,
    LeaveTask,
    Outcome,
    PauseGeneration,
    PrepareDraftUpdate,
    PrepareWeightsUpdate,
    PutManifest,
    ReceiveWeights,
    ResumeGeneration,
    SendTask,
    WorkerId,
)

Decision = tuple[UpdateState, tuple[Action, ...]]


def decide(state: UpdateState, event: Event) -> Decision:
    """What an update does about `event`. Repeats, late and foreign events change nothing."""
    if state.stage is Stage.DONE:
        return state, ()
    match event:
        case Began():
            return _prepare(state) if state.stage is Stage.NEW else (state, ())
        case WorkerAccepted():
            if event.step != state.step or event.worker not in state.pending:
                return state, ()
            state = replace(state, accepted=state.accepted | {event.worker})
            # Only the last one moves anything; a look at everybody for each would cost a large fleet dearly.
            return _advance(state) if state.pending <= state.accepted else (state, ())
        case WorkersAnswered():
            if event.step == state.late_step and state.stage not in FORWARD:
                return note_late(state, event), ()
            return (state, ()) if event.step != state.step else _advance(record(state, event.answers))
        case WorkerGone():
            return _on_gone(state, event)
        case WorkerSilent():
            return _on_silent(state, event)
        case SenderJoined():
            if state.sender is not Sender.JOINING or state.group is None or event.epoch != state.group.plan.epoch:
                return state, ()
            return _advance(replace(state, sender=Sender.IN))
        case SenderSent():
            return _on_sent(state, event)
        case SenderFailed():
            return _on_sender_failed(state, event)
        case StopAsked():
            return _on_stop(state, event)
        case TimeUp():
            return replace(state, is_out_of_time=True), ()
        case StepOverdue():
            return _on_overdue(state, event)


# -- events that come at any time -------------------------------------------------------------------------------------


def _on_gone(state: UpdateState, event: WorkerGone) -> Decision:
    seat = state.seats.get(event.worker)
    if seat is None or seat.is_gone:
        return state, ()
    # What it had was that of the process that is gone.
    is_done = seat.damage is Damage.COMMITTED and seat.hold is Hold.RELEASED
    state = change(state, [event.worker], is_gone=True, hold=Hold.NONE)
    if not is_done:
        state = blame(state, event.worker, Outcome.FAILED, event.fault)
    state = replace(state, pending=state.pending - {event.worker})
    if seat.is_out:  # an attempt before lost it already; the group of this one is without it
        return _advance(state)
    if seat.is_joined:
        state = replace(state, is_group_suspect=True)
    if state.stage is Stage.RECEIVE and state.sender is Sender.SENDING:
        # A broadcast needs all of its members: the others would only wait for their stall limit.
        return wind_down(state)
    return _advance(state)


def _on_silent(state: UpdateState, event: WorkerSilent) -> Decision:
    """Nothing moves in the transfer, and this one says nothing: it isn't waited for."""
    if state.stage is not Stage.RECEIVE or event.worker not in state.pending:
        return state, ()
    state = blame(replace(state, is_group_suspect=True), event.worker, Outcome.UNKNOWN, event.fault)
    if state.sender is Sender.SENDING:
        return wind_down(state)
    return _advance(replace(state, pending=state.pending - {event.worker}))


def _on_overdue(state: UpdateState, event: StepOverdue) -> Decision:
    if event.step != state.step or state.stage in FORWARD or not state.pending:
        return state, ()
    silent = {worker: unknown(event.fault) for worker in state.pending}
    return _after(_advance(record(state, silent)), Drop(event.step))


def _on_stop(state: UpdateState, event: StopAsked) -> Decision:
    """Take it back, as far as that is no harm: who has everything already is better committed than torn."""
    if state.stage not in FORWARD:
        return replace(state, is_stopped=True), ()
    state = replace(state, causes=(*state.causes, event.fault), is_stopped=True)
    is_complete = any(seat.is_good and seat.damage is Damage.RECEIVED for seat in state.seats.values())
    if state.stage is not Stage.RECEIVE or state.sender is not Sender.SENT or not is_complete:
        return wind_down(state)
    before: tuple[Action, ...] = (Drop(state.step),) if state.step is not None and state.pending else ()
    for worker in sorted(state.pending):
        state = blame(replace(state, is_group_suspect=True), worker, Outcome.FAILED, event.fault)
    return _after(_verify(replace(state, pending=frozenset())), *before)


def _on_sent(state: UpdateState, event: SenderSent) -> Decision:
    if state.sender is not Sender.SENDING or state.group is None or event.epoch != state.group.plan.epoch:
        return state, ()
    problem = check_sent(state.plan.tensors, event.sums) or check_committed(state.plan.sums_digest, event.sums)
    if problem is not None:
        return _on_sender_failed(state, SenderFailed(event.epoch, problem))
    return _advance(replace(state, sender=Sender.SENT, sums=event.sums, num_bytes=event.num_bytes))


def _on_sender_failed(state: UpdateState, event: SenderFailed) -> Decision:
    is_other = event.epoch is not None and (state.group is None or event.epoch != state.group.plan.epoch)
    # Before it was told to join, only its silence counts: what else it says is about an attempt before.
    is_early = event.epoch is not None and state.sender is Sender.IDLE
    if is_other or is_early or state.sender in (Sender.SENT, Sender.FAILED) or state.stage not in FORWARD:
        return state, ()
    causes = (*state.causes, event.fault)
    failed = replace(state, sender=Sender.FAILED, sender_fault=event.fault, is_group_suspect=True, causes=causes)
    return wind_down(failed)


# -- the way forward --------------------------------------------------------------------------------------------------


def _ask(
    state: UpdateState, stage: Stage, body: CommandBody, workers: tuple[WorkerId, ...], step: str | None = None
) -> Decision:
    step = step_of(state, stage.value if step is None else step)
    state = replace(state, stage=stage, step=step, pending=frozenset(workers), accepted=frozenset())
    # In a transfer nobody waits for a silent agent as long as bytes move; who holds it up is told by `WorkerSilent`.
    ack_s = None if stage is Stage.RECEIVE else probe_s(state)
    return state, (Ask(step, body, workers, is_ending=stage not in FORWARD, ack_s=ack_s),)


def _advance(state: UpdateState) -> Decision:
    """Go on if the stage has all that it awaits."""
    if state.stage in WINDING:
        return WINDING[state.stage](state)
    return _NEXT[state.stage](state)


def _after(decision: Decision, *before: Action) -> Decision:
    return decision[0], (*before, *decision[1])


def _prepare(state: UpdateState) -> Decision:
    return _ask(state, Stage.PREPARE, _prepare_body(state), state.crew)


def _prepare_body(state: UpdateState) -> PrepareWeightsUpdate:
    request = state.plan.request
    body = PrepareDraftUpdate if request.is_draft else PrepareWeightsUpdate
    return body(version=request.version, manifest_digest=request.manifest_digest, allow_rollback=request.allow_rollback)


def _after_prepare(state: UpdateState) -> Decision:
    if state.pending:
        return state, ()
    if state.lacking and state.stage is Stage.PREPARE:
        return _put_page(state)
    if not may_go_without_lost(state):
        return wind_down(state)
    return _form(state)


def _put_page(state: UpdateState) -> Decision:
    """Give who lacks the manifest its next page, and have them check again after the last."""
    lacking = tuple(w for w in state.lacking if state.seats[w].is_good)
    if not lacking:
        return _after_prepare(replace(state, stage=Stage.PREPARE_AGAIN, step=None))
    if state.num_pages_put == len(state.plan.pages):
        return _ask(state, Stage.PREPARE_AGAIN, _prepare_body(state), lacking)
    page = state.plan.pages[state.num_pages_put]
    state = replace(state, num_pages_put=state.num_pages_put + 1)
    return _ask(state, Stage.PAGES, PutManifest(page=page), lacking, f"{Stage.PAGES.value}-{page.page}")


def _after_page(state: UpdateState) -> Decision:
    return (state, ()) if state.pending else _put_page(state)


def _form(state: UpdateState) -> Decision:
    """Use the group that stands if it has exactly these members; else leave it and form the next."""
    plan = state.plan
    crew = tuple(state.seats[w].candidate for w in state.crew)
    if plan.current is not None and plan.is_whole and fits(plan.current, plan.request, crew):
        epochs = (*state.epochs, plan.current.plan.epoch)
        state = replace(state, stage=Stage.JOIN, step=None, group=plan.current, epochs=epochs)
        state = change(state, state.crew, is_joined=True)
        return _after_join(state)
    if plan.current is None:
        return _join(state)
    state = replace(state, plan=replace(plan, current=None))
    epoch = plan.current.plan.epoch
    leave = Tell(LeaveTask(op_id=plan.request.op_id, epoch=epoch, reason="a new group is formed"))
    if not plan.leavers:
        return _after(_join(state), leave)
    return _after(_ask(state, Stage.LEAVE_OLD, DestroyGroup(epoch=epoch), plan.leavers), leave)


def _after_leave_old(state: UpdateState) -> Decision:
    return (state, ()) if state.pending else _join(state)


def _join(state: UpdateState) -> Decision:
    crew = state.crew
    group_plan = new_plan(state.plan, tuple(state.seats[w].candidate for w in crew))
    boots = {w: state.seats[w].candidate.boot_id for w in crew}
    group = Group(group_plan, state.plan.request.sender_id, boots)
    state = replace(state, group=group, epochs=(*state.epochs, group_plan.epoch))
    return _ask(state, Stage.JOIN, InitGroup(plan=group_plan), crew)


def _after_join(state: UpdateState) -> Decision:
    """Fail at once with whoever fails; else call the trainer when all workers are at it, and go on when all are in."""
    group = state.group
    assert group is not None
    if any(not state.seats[w].is_good for w in group.workers):
        return wind_down(replace(state, is_group_suspect=True))
    if state.sender is Sender.IDLE and state.pending <= state.accepted:
        state = replace(state, sender=Sender.JOINING)
        return state, (Tell(JoinTask(op_id=state.plan.request.op_id, plan=group.plan)),)
    if state.pending or state.sender is not Sender.IN:
        return state, ()
    return _pause(state)


def _pause(state: UpdateState) -> Decision:
    """Pause whom nobody else holds paused; a pause of ours would take over the hold, and its end would end it."""
    running = tuple(w for w in state.crew if not state.seats[w].candidate.is_held)
    if not running:
        return _receive(state)
    state = change(state, running, hold=Hold.ASKED)
    # The caches are emptied after the commit, when it counts.
    # One owner for all attempts: the lease goes on from one to the next.
    owner = derive(state.plan.request.op_id, PAUSE_STEP)
    body = PauseGeneration(mode=state.plan.request.pause_mode, clear_cache=False, owner=owner, lease_s=LEASE_S)
    return _ask(state, Stage.PAUSE, body, running)


def _after_pause(state: UpdateState) -> Decision:
    # Not at the first failure: a resume that overtakes a pause in progress would be taken for nothing.
    if state.pending:
        return state, ()
    if not _is_group_good(state):
        return wind_down(state)
    return _receive(state)


def _receive(state: UpdateState) -> Decision:
    assert state.group is not None
    request, crew, epoch = state.plan.request, state.crew, state.group.plan.epoch
    state = change(state, crew, damage=Damage.OPEN)
    body = ReceiveWeights(
        update_op_id=request.op_id,
        epoch=epoch,
        version=request.version,
        manifest_digest=request.manifest_digest,
        bucket_bytes=request.bucket_bytes,
        is_draft=request.is_draft,
    )
    return _ask(state, Stage.RECEIVE, body, crew)


def _after_receive(state: UpdateState) -> Decision:
    assert state.group is not None
    if not state.may_have_sent:
        if not _is_group_good(state):
            return wind_down(replace(state, is_group_suspect=True))
        if _has_waited_in_vain(state):
            return wind_down(_blame_late(replace(state, is_group_suspect=True)))
        if not state.pending <= state.accepted:
            return state, ()
        request, epoch = state.plan.request, state.group.plan.epoch
        state = replace(state, sender=Sender.SENDING, may_have_sent=True)
        return state, (Tell(SendTask(op_id=request.op_id, epoch=epoch, version=request.version)),)
    if state.pending:
        return state, ()
    if not state.crew:
        return wind_down(state)
    if state.sender is not Sender.SENT:
        return state, ()
    return _verify(state)


def _has_waited_in_vain(state: UpdateState) -> bool:
    """Whether somebody who was ready to receive has stalled before a byte could move."""
    return any(state.seats[w].damage is Damage.OPEN and w not in state.pending for w in state.crew)


def _blame_late(state: UpdateState) -> UpdateState:
    why = "it hadn't begun to receive when others had been ready for as long as they may stand still"
    for worker in sorted(state.pending - state.accepted):
        state = blame(state, worker, Outcome.UNKNOWN, fault(FaultCode.NO_ACK, why, retryable=True))
    return state


def _verify(state: UpdateState) -> Decision:
    """Compare what each worker received with what the trainer sent; commit those that agree."""
    for worker in state.crew:
        problem = check_received(state.sums, state.seats[worker].received)
        if problem is not None:
            state = blame(replace(state, is_group_suspect=True), worker, Outcome.FAILED, problem, "verify")
    if not state.crew:
        return wind_down(state)
    request = state.plan.request
    return _ask(state, Stage.COMMIT, CommitWeights(update_op_id=request.op_id, version=request.version), state.crew)


def _after_commit(state: UpdateState) -> Decision:
    if state.pending:
        return state, ()
    if state.crew and state.plan.request.reset_prefix_cache:
        return _ask(state, Stage.FLUSH, FlushCache(), state.crew)
    return _resume(state)


def _after_flush(state: UpdateState) -> Decision:
    return (state, ()) if state.pending else _resume(state)


def _resume(state: UpdateState) -> Decision:
    """Let go those that are at the new version with empty caches, except whom somebody else holds."""
    free = tuple(w for w in state.crew if not state.seats[w].candidate.is_held)
    if not free:
        return wind_down(state)
    return _ask(state, Stage.RESUME, ResumeGeneration(), free)


def _after_resume(state: UpdateState) -> Decision:
    return (state, ()) if state.pending else wind_down(state)


def _after_regroup(state: UpdateState) -> Decision:
    """Begin again with those who left the broken group, if there still are enough and nobody wants it ended."""
    if state.pending:
        return state, ()
    return _prepare(next_attempt(state)) if may_retry(state) else wind_up(state)


def _is_group_good(state: UpdateState) -> bool:
    assert state.group is not None
    return all(state.seats[w].is_good for w in state.group.workers)


def _stay(state: UpdateState) -> Decision:
    return state, ()


_NEXT: dict[Stage, Callable[[UpdateState], Decision]] = {
    Stage.NEW: _stay,
    Stage.PREPARE: _after_prepare,
    Stage.PAGES: _after_page,
    Stage.PREPARE_AGAIN: _after_prepare,
    Stage.LEAVE_OLD: _after_leave_old,
    Stage.JOIN: _after_join,
    Stage.PAUSE: _after_pause,
    Stage.RECEIVE: _after_receive,
    Stage.COMMIT: _after_commit,
    Stage.FLUSH: _after_flush,
    Stage.RESUME: _after_resume,
    Stage.REGROUP: _after_regroup,
}
