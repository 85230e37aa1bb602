"""What an agent makes of an engine that ran before it: the agent before it died alone. Pure.

What that agent kept (`ledger`) is a claim about an engine that may have been replaced since. The engine's own label is
what tells: rlbus sets it as the last step of an update, to the version, and a fresh server doesn't have it.
"""

import re
from dataclasses import replace

from rlbus.schemas import PauseGeneration, PauseMode, PauseView, WeightsState, WeightsView
from rlbus.workers.draft import draft_is_stuck
from rlbus.workers.engines.found import Found
from rlbus.workers.ledger import Noted
from rlbus.workers.sleeping import PAUSE_SUFFIX
from rlbus.workers.state import Lease, WorkerState

# How long an engine that was found paused stays so, for whoever paused it to come back and say so; then it resumes as
# at the end of any lease: with flushed caches, and not on torn weights. Source: the lease of an op's pause (30 s).
FOUND_LEASE_S = 30.0
# Who holds such a pause.
OWNER = "an agent before this one"
# Weights as a fresh engine loads them, which no update through rlbus has replaced.
INITIAL = WeightsView(state=WeightsState.CLEAN)
# A version as rlbus labels an engine with it. Source: `str(rlbus.schemas.Version)`.
_LABEL = re.compile(r"\d{1,16}\.\d{1,16}", re.ASCII)


def adopt(
    state: WorkerState, past: Noted | None, found: Found, now: float, loras: tuple[tuple[str, int, str], ...] = ()
) -> WorkerState:
    """The state to begin with. `state` has what is known without the engine, `past` is what the agent before noted,
    `loras` are the adapters of an agent of another day.
    """
    weights = _weights(state.weights, None if past is None else past.weights, found.label, found.is_torn)
    state = replace(state, weights=weights, owes_flush=found.is_paused or found.has_torn)
    if state.draft is not None or found.is_draft_torn:
        # A torn one is generated with, too, where no update of it is served (its checkpoint can't be read any more).
        fresh = INITIAL if state.draft is None else state.draft
        before = None if past is None else past.draft
        state = replace(state, draft=_weights(fresh, before, found.draft_label, found.is_draft_torn))
    # What it still lists of them it reads, however long ago it was loaded; a name that it doesn't list is free.
    state = replace(state, found_sums=loras)
    if past is not None and not loras:
        # An engine that lists one of them still has these bytes under that name; another one lists none.
        state = replace(state, known_sums=past.loras, found_sums=past.loras)
    if past is not None and found.is_paused and (asleep := frozenset(past.asleep) & state.sleep_tags):
        # A sleep is a hold, without a lease: it stands still until somebody wakes it; the worker itself, what a failed
        # sleep has left. Awake, it would generate.
        return replace(_discarded(state, past), asleep=asleep, to_wake=frozenset(past.to_wake) & asleep)
    if not found.is_paused or (past is None and not is_ours(found)):
        # Somebody whom no agent of this worker knows has paused it: shown as drift, and left to whoever did.
        return state
    pause = PauseView(owner=OWNER, mode=PauseMode.KEEP.value, since=now, expires_at=now + FOUND_LEASE_S)
    return replace(state, pause=pause, lease=Lease(FOUND_LEASE_S))


def in_words(state: WorkerState, found: Found) -> str:
    """How the engine was found, and what is made of it, for the log."""
    held, weights, draft = "paused" if found.is_paused else "running", state.weights, state.draft
    text = f"{held}; its weights are {weights.state.value} at {weights.version}"
    if draft is None:
        return text
    return f"{text}, those of its draft model {draft.state.value} at {draft.version}{draft_is_stuck(state)}"


def is_ours(found: Found) -> bool:
    """Whether rlbus has updated this engine before: it has a label as only rlbus writes one, or is torn."""
    labels = [label for label in (found.label, found.draft_label) if label is not None]
    return found.has_torn or any(_LABEL.fullmatch(label) for label in labels)


def own_pause(found: Found, new_id: str) -> tuple[str, PauseGeneration] | None:
    """The op_id and the pause with which an agent stops an engine that it found generating on torn weights; None: it
    doesn't. An update may end it; the end of its lease doesn't, before the weights are whole.
    """
    if not found.has_torn or found.is_paused:
        return None
    return new_id + PAUSE_SUFFIX, PauseGeneration(mode=PauseMode.KEEP, clear_cache=False, lease_s=FOUND_LEASE_S)


def _discarded(state: WorkerState, past: Noted) -> WorkerState:
    """Still asleep, it has had no update since: what was torn, or was given up for the sleep, is so, whatever its label
    says.
    """
    if past.weights.state is WeightsState.DIRTY:
        state = replace(state, weights=past.weights)
    if state.draft is not None and past.draft is not None and past.draft.state is WeightsState.DIRTY:
        state = replace(state, draft=past.draft)
    return state


def _weights(fresh: WeightsView, before: WeightsView | None, label: str | None, is_torn: bool) -> WeightsView:
    """Of the target or of the draft: as known without the engine, as noted before, and as the engine says."""
    if is_torn:
        return WeightsView(state=WeightsState.DIRTY, last_good=None if before is None else before.last_good)
    if label is None:
        # Nobody has updated it, and what was noted says that nobody had: it is what it was started from, as then.
        return INITIAL if before == INITIAL else fresh
    is_same = before is not None and before.state is WeightsState.CLEAN and str(before.version) == label
    return before if before is not None and is_same else WeightsView(state=WeightsState.UNKNOWN)
