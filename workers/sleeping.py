"""What sleep and wake make of a worker's state. Pure.

Invariants: while a tag sleeps the engine isn't resumed, whoever asks; a wake ends no pause; weights that were discarded
are dirty until an update or a reload has brought others, and a worker that wakes on weights that aren't whole stays
paused. In doubt (a sleep that failed) a tag counts as asleep until the engine has taken it back.
"""

from dataclasses import replace

from rlbus.schemas import PauseMode, PauseView, Sleep, SleepTag, WakeUp, WeightsState, WeightsView
from rlbus.workers.draft import is_whole
from rlbus.workers.leases import RETRY_S
from rlbus.workers.state import Lease, WorkerState

# Owner of the pause of a worker that woke without whole weights: an update may end it, as it may end one of an update
# that failed. Source: rlbus.controller.op_ids.is_pause_of_op.
PAUSE_SUFFIX = "-pause"


def meant(state: WorkerState, body: Sleep | WakeUp) -> frozenset[SleepTag]:
    """The tags that a command is about."""
    return state.sleep_tags if body.tags is None else frozenset(body.tags)


def discards(state: WorkerState, body: Sleep) -> bool:
    """Whether this sleep costs the weights."""
    return body.level >= 2 and SleepTag.WEIGHTS in meant(state, body) - state.asleep


def slept(state: WorkerState, body: Sleep) -> WorkerState:
    """The tags sleep now, or may do so."""
    state = _discarded(state) if discards(state, body) else state
    prepared = None if SleepTag.WEIGHTS in meant(state, body) else state.prepared
    return replace(state, asleep=state.asleep | meant(state, body), prepared=prepared)


def failed(state: WorkerState, body: Sleep, is_touched: bool) -> tuple[WorkerState, frozenset[SleepTag]]:
    """A sleep has failed half way: the state in doubt, and the tags that have to be taken back."""
    new = meant(state, body) - state.asleep
    state = _discarded(state) if is_touched and discards(state, body) else state
    return replace(state, asleep=state.asleep | new), new


def woken(state: WorkerState, tags: frozenset[SleepTag]) -> WorkerState:
    """The engine has taken `tags` again. The last of them lets a worker that nobody holds go on, if its weights can."""
    state = replace(state, asleep=state.asleep - tags)
    if state.asleep or state.pause is not None or may_run(state):
        return state
    assert state.running is not None
    op_id, since = state.running.op_id, state.running.since
    pause = PauseView(owner=op_id + PAUSE_SUFFIX, mode=PauseMode.KEEP.value, since=since, expires_at=since + RETRY_S)
    return replace(state, pause=pause, lease=Lease(RETRY_S))


def may_run(state: WorkerState) -> bool:
    """Whether a worker that has just woken may generate: nobody holds it, nothing sleeps, its weights are whole."""
    return not state.asleep and state.pause is None and state.session is None and is_whole(state)


def _discarded(state: WorkerState) -> WorkerState:
    """The draft model's weights are gone with the target's."""
    draft = None if state.draft is None else _dirty(state.draft)
    return replace(state, weights=_dirty(state.weights), draft=draft)


def _dirty(weights: WeightsView) -> WeightsView:
    last_good = weights.version if weights.version is not None else weights.last_good
    return WeightsView(state=WeightsState.DIRTY, last_good=last_good)
