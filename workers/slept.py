"""What a sleep makes of a worker's state, when it has ended well. Pure, and all that a ledger has to know of it."""

from dataclasses import replace

from rlbus.schemas import Sleep, SleepTag, WeightsState, WeightsView
from rlbus.workers.state import WorkerState


def discards(state: WorkerState, body: Sleep) -> bool:
    """Whether this sleep costs the weights."""
    return body.level >= 2 and SleepTag.WEIGHTS in state.meant(body) - state.asleep


def slept(state: WorkerState, body: Sleep, _event: object = None) -> WorkerState:
    """The tags sleep now, or may do so."""
    state = discarded(state) if discards(state, body) else state
    prepared = None if SleepTag.WEIGHTS in state.meant(body) else state.prepared
    tags = state.meant(body)
    return replace(state, asleep=state.asleep | tags, to_wake=state.to_wake - tags, prepared=prepared)


def after_sleep(state: WorkerState) -> WorkerState:
    """What whoever goes on from here has to believe: a sleep that runs does its work, whoever hears of that."""
    running = state.running
    return state if running is None or not isinstance(running.body, Sleep) else slept(state, running.body)


def discarded(state: WorkerState) -> WorkerState:
    """The draft model's weights are gone with the target's."""
    draft = None if state.draft is None else _dirty(state.draft)
    return replace(state, weights=_dirty(state.weights), draft=draft)


def _dirty(weights: WeightsView) -> WeightsView:
    last_good = weights.version if weights.version is not None else weights.last_good
    return WeightsView(state=WeightsState.DIRTY, last_good=last_good)
