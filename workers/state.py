"""What an agent knows of its worker: commanded state and what is in progress. Immutable; `lifecycle` makes new ones.

Invariants: `weights.version` is set only while `weights.state` is clean; a session is open only between the begin of a
transfer and its commit or abort; at most one mutation is in `running`, and at most one `queued` behind it (the one that
takes it back).
"""

from dataclasses import dataclass, field

from rlbus.schemas import (
    CommandBody,
    LoraState,
    PauseView,
    Sleep,
    SleepTag,
    TensorSpec,
    Version,
    WakeUp,
    WeightsState,
    WeightsView,
)
from rlbus.workers.engines.lora import LoraInfo


@dataclass(frozen=True, slots=True)
class Running:
    """A mutation in progress, or about to be."""

    op_id: str
    body: CommandBody
    # When it was admitted, in Unix seconds.
    since: float = 0.0
    # Nobody sent it: the agent's own housekeeping.
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class Lease:
    """How long a pause holds from when this was made, in seconds of this process's own clock.

    `end_op_id` is set when that time is over: what has to follow is named after it. `end_update` is the update that
    was open or running then, if any: it is ended too, and no other.
    """

    lease_s: float
    end_op_id: str | None = None
    end_update: str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """An update that was checked and could be applied: nothing has changed for it yet."""

    op_id: str
    version: Version
    manifest_digest: str
    tensors: tuple[TensorSpec, ...]
    is_draft: bool = False


@dataclass(frozen=True, slots=True)
class Session:
    """A transfer that was begun and is neither committed nor aborted. `before` is what the weights were, or what a
    failure left of them, if the engine didn't close it then.

    `version` None: another trainer's update (`rlbus.schemas.native`), which says at its end what it was.
    """

    update_op_id: str
    version: Version | None
    before: WeightsView
    is_received: bool = False
    # A part of it is in place, whatever becomes of the next one.
    is_touched: bool = False
    # What another trainer said that it brings, kept where `before` isn't whole: only all of a model heals it.
    tensors: tuple[TensorSpec, ...] = ()
    # It is about the draft model's weights, and so is `before`.
    is_draft: bool = False


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was asked for. `was_loaded` once the engine had it; `drain_s`: for how long it may drain.

    `checksum` None: nobody knows its bytes, an agent before this one has loaded it, and it is to go. `hot_swap`: it
    took the place of an older revision. `is_unwanted`: somebody unloaded it, and nobody knows whether a load of it
    still comes to its end; then it goes.
    """

    name: str
    revision: int
    checksum: str | None
    state: LoraState
    was_loaded: bool = False
    # The first load of this revision here, whose outcome isn't known yet.
    is_new: bool = False
    hot_swap: bool = False
    drain_s: float | None = None
    is_unwanted: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """What it is asked for by."""
        return self.name, self.revision

    @property
    def is_going(self) -> bool:
        """Whether the agent unloads it by itself."""
        return self.is_unwanted or self.state is LoraState.DRAINING


@dataclass(frozen=True, slots=True)
class AdapterGone:
    """The last adapter that was unloaded, and how many requests were ended with it (None: nobody can say)."""

    name: str
    revision: int
    num_aborted: int | None


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The whole state of one worker, as commanded. What the engine really does is observed beside it."""

    component: str
    instance_id: str
    world_size: int
    # Every route that this worker serves: the engine's and the agent's own.
    routes: frozenset[str]
    backends: tuple[str, ...] = ()
    # Highest term that a command for this worker carried.
    term: int = 0
    weights: WeightsView = field(default_factory=lambda: WeightsView(state=WeightsState.CLEAN))
    # Nobody has said which version the clean weights are: the one they have is only the next, and may yet be named.
    is_unnamed: bool = False
    # Those of the draft model; None: the engine has none. `draft_op_id` as `committed_op_id`.
    draft: WeightsView | None = None
    draft_op_id: str | None = None
    # None: commanded to run.
    pause: PauseView | None = None
    # None: not paused, or an explicit hold.
    lease: Lease | None = None
    # Process group that the worker is in; the newest one that it ever began to join, and the term of that one.
    epoch: int | None = None
    newest_epoch: int | None = None
    epoch_term: int = 0
    prepared: Prepared | None = None
    session: Session | None = None
    running: Running | None = None
    queued: Running | None = None
    # When somebody was last refused because of an op of the agent's own, in Unix seconds: he asks again.
    refused_at: float | None = None
    # Update that was committed last, so that a repeated commit changes nothing.
    committed_op_id: str | None = None
    # Caches may hold entries of older weights; a resume flushes them first (DESIGN section 4 rule 7).
    owes_flush: bool = False
    # Parts of the engine's memory that can sleep, and those that were told to (or may do so, after a failure).
    sleep_tags: frozenset[SleepTag] = frozenset()
    asleep: frozenset[SleepTag] = frozenset()
    # Of those, what a sleep that failed may have put to sleep: the worker itself wakes it.
    to_wake: frozenset[SleepTag] = frozenset()
    # Adapters in the order in which they were loaded, and what the engine can do with them (None: it takes none).
    adapters: tuple[Adapter, ...] = ()
    lora_info: LoraInfo | None = None
    # Grows with every change of an adapter, so that an older answer of the engine isn't taken for a newer one.
    lora_turn: int = 0
    # (name, revision, checksum) of what the engine was ever told to load, newest last: those names are taken.
    known_sums: tuple[tuple[str, int, str], ...] = ()
    # The same of what an agent before this one has loaded, as long as the engine, which outlived it, lists them.
    found_sums: tuple[tuple[str, int, str], ...] = ()
    adapter_gone: AdapterGone | None = None

    def meant(self, body: Sleep | WakeUp) -> frozenset[SleepTag]:
        """The tags that a command is about."""
        return self.sleep_tags if body.tags is None else frozenset(body.tags)
