"""What an agent knows of its engine's draft model: weights of their own beside the target's. Pure.

Invariants: both keep the same rules, so an engine with either of them torn generates nothing; a session is about
exactly one of them, and leaves the other as it is; their versions have nothing to do with each other.
"""

from dataclasses import replace

from rlbus.schemas import (
    DRAFT_ROUTE,
    WHOLE,
    CommitWeights,
    PrepareDraftUpdate,
    PrepareWeightsUpdate,
    WeightsData,
    WeightsState,
    WeightsView,
)
from rlbus.workers.state import WorkerState

# The draft of an engine that nobody has updated: what the engine loaded.
INITIAL = WeightsView(state=WeightsState.CLEAN)


def weights_of(state: WorkerState, is_draft: bool) -> WeightsView:
    """The target's weights, or those of the draft that the engine has."""
    if not is_draft:
        return state.weights
    assert state.draft is not None, "the route isn't served without it"
    return state.draft


def with_weights(state: WorkerState, is_draft: bool, weights: WeightsView) -> WorkerState:
    """The state with one of the two replaced."""
    return replace(state, draft=weights) if is_draft else replace(state, weights=weights)


def is_about_draft(state: WorkerState) -> bool:
    """Whether the session that is open, if any, is the draft's."""
    return state.session is not None and state.session.is_draft


def in_session(state: WorkerState) -> WeightsView:
    """The weights that the open session is about; without one, the target's."""
    return weights_of(state, is_about_draft(state))


def torn_part(state: WorkerState) -> tuple[str, WeightsView] | None:
    """Which weights keep the engine from generating, in words and as they are; None: all are whole."""
    if state.weights.state not in WHOLE:
        return "weights", state.weights
    if state.draft is not None and state.draft.state not in WHOLE:
        return "the draft model's weights", state.draft
    return None


def draft_is_stuck(state: WorkerState) -> str:
    """What frees a worker whose draft is torn where no update of it is served, to follow on what is said of it; else
    nothing.
    """
    if state.draft is None or state.draft.state in WHOLE or DRAFT_ROUTE in state.routes:
        return ""
    return "; no update reaches it here: restart the engine's server, or resume with force"


def is_whole(state: WorkerState) -> bool:
    """Whether the engine may generate on what it has."""
    return torn_part(state) is None


def is_for_draft(body: PrepareWeightsUpdate) -> bool:
    """Whose update this prepares."""
    return isinstance(body, PrepareDraftUpdate)


def is_committed(state: WorkerState, body: CommitWeights) -> bool:
    """Whether this commit repeats the last one, of either."""
    if state.committed_op_id == body.update_op_id:
        return state.weights.version == body.version
    is_drafts = state.draft is not None and state.draft_op_id == body.update_op_id
    return is_drafts and state.draft is not None and state.draft.version == body.version


def after_commit(state: WorkerState, body: CommitWeights) -> WeightsData:
    """What a commit answers once it is done."""
    if is_committed(state, body):
        return WeightsData(weights=state.weights, draft=state.draft)
    clean = WeightsView(state=WeightsState.CLEAN, version=body.version, last_good=body.version)
    done = with_weights(state, is_about_draft(state), clean)
    return WeightsData(weights=done.weights, draft=done.draft)


def committed(state: WorkerState, body: CommitWeights) -> WorkerState:
    """The op to remember, so that its repeat changes nothing; called while its session is still there."""
    if is_about_draft(state):
        return replace(state, draft_op_id=body.update_op_id)
    return replace(state, committed_op_id=body.update_op_id)


def restarted(state: WorkerState) -> WorkerState:
    """The engine is a new one, and has loaded the draft that it was started with."""
    return state if state.draft is None else replace(state, draft=WeightsView(state=WeightsState.UNKNOWN))
