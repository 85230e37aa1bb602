"""What sleep and wake make of a worker's state. Pure.

Invariants: while a tag sleeps the engine isn't resumed, whoever asks; a wake ends no pause; weights that were discarded
are dirty until an update or a reload has brought others, and a worker that wakes on weights that aren't whole stays
paused. In doubt (a sleep that failed) a tag counts as asleep until the engine has taken it back, for which the worker
asks it again and again: whoever was told that it failed won't.
"""

from dataclasses import replace

from rlbus.schemas import PauseMode, PauseView, Sleep, SleepTag, WakeUp
from rlbus.workers.draft import is_whole
from rlbus.workers.engines.sleep import in_order
from rlbus.workers.leases import RETRY_S
from rlbus.workers.moves import MayStand, RunOwn, WakeDue, Woke
from rlbus.workers.slept import discarded, discards
from rlbus.workers.state import Lease, Running, WorkerState

# Owner of the pause of a worker that woke without whole weights: an update may end it, as it may end one of an update
# that failed. Source: rlbus.controller.op_ids.is_pause_of_op.
PAUSE_SUFFIX = "-pause"
# Of one that an op leaves behind which couldn't let the engine go on: a wake may end it, too.
_LEFT_SUFFIX = "-left" + PAUSE_SUFFIX


def moved(state: WorkerState, event: Woke | MayStand | WakeDue) -> tuple[WorkerState, tuple[RunOwn, ...]]:
    """What is heard of the engine beside the ends of ops."""
    match event:
        case Woke():
            return woken(state, event.tags), ()
        case MayStand():
            return paused(state), ()
    # Not in the middle of an update, which may come while a part sleeps.
    if not state.to_wake or state.running is not None or state.session is not None:
        return state, ()
    body = WakeUp(tags=in_order(state.to_wake))
    running = Running(event.op_id, body, since=event.now, is_own=True)
    return replace(state, running=running), (RunOwn(event.op_id, body),)


def meant(state: WorkerState, body: Sleep | WakeUp) -> frozenset[SleepTag]:
    """The tags that a command is about."""
    return state.meant(body)


def failed(state: WorkerState, body: Sleep, is_touched: bool) -> tuple[WorkerState, frozenset[SleepTag]]:
    """A sleep has failed half way: the state in doubt, and the tags that have to be taken back."""
    new = meant(state, body) - state.asleep
    state = discarded(state) if is_touched and discards(state, body) else state
    return replace(state, asleep=state.asleep | new, to_wake=state.to_wake | new), new


def woken(state: WorkerState, tags: frozenset[SleepTag]) -> WorkerState:
    """The engine has taken `tags` again. The last of them lets a worker that nobody holds go on, if its weights can."""
    state = replace(state, asleep=state.asleep - tags, to_wake=state.to_wake - tags)
    return state if state.asleep or state.pause is not None or may_run(state) else paused(state)


def paused(state: WorkerState) -> WorkerState:
    """The engine stands still, or may, after an op that should have let it go on: in a pause whose end does that as
    soon as it can.
    """
    assert state.running is not None
    op_id, since = state.running.op_id, state.running.since
    pause = PauseView(owner=op_id + _LEFT_SUFFIX, mode=PauseMode.KEEP.value, since=since, expires_at=since + RETRY_S)
    return replace(state, pause=pause, lease=Lease(RETRY_S))


def woke(state: WorkerState, _body: WakeUp, _event: object = None) -> WorkerState:
    """A wake has ended well: it generates, if it may, and a pause that an earlier wake has left is over."""
    return replace(state, pause=None, lease=None) if state.pause is not None and may_run(state) else state


def may_run(state: WorkerState) -> bool:
    """Whether a worker that has just woken, or whose pause has failed, may generate: nobody holds it, nothing sleeps,
    its weights are whole.
    """
    is_free = state.pause is None or state.pause.owner.endswith(_LEFT_SUFFIX)
    return not state.asleep and is_free and state.session is None and is_whole(state)
