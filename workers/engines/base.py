"""The seam between an agent and an inference engine: what an adapter has to do, and in which order it is asked to.

Ordering contract, kept by the agent for every adapter:
- `start` comes first and once, `aclose` last; `aclose` may come at any time and also after a failure of `start`.
- At most one *mutation* runs at a time: pause, resume, flush_cache, join_group, leave_group, receive_weights,
  finish_update, abort_update, load_weights. `observe` and `abort` may be called beside one, and have to answer then.
- receive_weights is called only while the engine is paused and joined to the group; it is followed by exactly one of
  finish_update (the checksums agreed) or abort_update (anything else), also when it raised.
- resume is called after an unfinished update only when a person forces it.

An adapter never decides policy: it doesn't retry, doesn't resume by itself, and doesn't judge versions or terms.
What it can't do it doesn't list in `EngineInfo.routes`; the agent refuses the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlbus.errors import RLBusError
from rlbus.schemas import (
    ChecksumsData,
    Fault,
    Generation,
    GroupPlan,
    JoinedData,
    PausedData,
    PauseMode,
    RankSpan,
    ReceivedData,
    SleepTag,
    TensorSpec,
    TensorSum,
    Version,
)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine is; constant after `start`.

    `routes` are the command routes that this engine really serves, `backends` the transfer backends that it can join.
    `completions_url` is the base URL under which `/v1/completions` answers, None if there is none.
    """

    engine: str
    model: str
    world_size: int
    routes: frozenset[str]
    backends: tuple[str, ...] = ()
    system_url: str | None = None
    completions_url: str | None = None


# The label of weights that nobody has labelled, of an engine that keeps one.
NO_LABEL = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the engine itself says now. `weight_version` is the engine's own label: NO_LABEL before it was given one,
    None if it keeps none, or can't say it now.

    `asleep` are the parts of its memory that sleep; while there is one, `generation` is paused.
    """

    generation: Generation
    weight_version: str | None = None
    num_running: int | None = None
    asleep: frozenset[SleepTag] = frozenset()


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
    """One transfer: which tensors come, in which order, over which group, cut into which buckets.

    `is_draft` only for engines that list that route (`rlbus.workers.engines.draft`).
    """

    update_op_id: str
    epoch: int
    version: Version
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    is_draft: bool = False


class UpdateFailedError(RLBusError):
    """A transfer, finish or reload failed inside the engine.

    `weights_touched` False promises that every weight still has its old value; anything else, including doubt, is True.
    """

    def __init__(self, fault: Fault, weights_touched: bool) -> None:
        super().__init__(fault, weights_touched)
        self.fault = fault
        self.weights_touched = weights_touched

    def __str__(self) -> str:
        left = "touched" if self.weights_touched else "untouched"
        return f"{self.fault.message} [{self.fault.code.value}, weights {left}]"


# Called from any thread with (bytes done, bytes total).
ProgressFn = Callable[[int, int], None]
ReadyFn = Callable[[], None]


class Engine(Protocol):
    """One inference engine. Errors are `rlbus.errors.EngineError` (and `UpdateFailedError` where it says so)."""

    @property
    def info(self) -> EngineInfo:
        """Valid after `start`."""
        ...

    async def start(self) -> None:
        """Make the engine ready to serve. Cancel: whatever was started is stopped by `aclose`."""
        ...

    async def aclose(self) -> None:
        """Stop everything that `start` began, within 10 s, leaving no process behind. Idempotent.

        Cancel: the rest is stopped all the same.
        """
        ...

    async def observe(self) -> Observed:
        """Ask the engine, not a cached flag. Cancel: leaves nothing."""
        ...

    async def pause(self, mode: PauseMode, clear_cache: bool) -> PausedData:
        """Return only when no step runs and none will start until `resume`. Idempotent in every mode; `abort` on top of
        `keep` ends what is held. The agent never asks for `wait` on top of a pause that stands. Cancel: the engine may
        be paused; the agent resumes it.
        """
        ...

    async def resume(self) -> None:
        """Generate again, also what a `keep` pause held. Idempotent. Cancel: the engine may be running."""
        ...

    async def flush_cache(self) -> None:
        """Empty every cache that could serve old weights. Raises EngineError (`flush_failed`) if one stayed.

        Cancel: some may be emptied; the agent owes the flush until one has succeeded.
        """
        ...

    async def abort(self, request_ids: Sequence[str] | None) -> int | None:
        """End those requests, or all; the number ended, None if the engine doesn't count. Unknown ids are not an error.
        Works beside a mutation.

        Cancel: some may have ended.
        """
        ...

    def check_manifest(self, tensors: Sequence[TensorSpec]) -> None:
        """Compare with the model, without side effects. Raises ManifestError naming the first bad tensor: missing,
        unexpected, wrong shape, or a dtype that the engine can't convert.
        """
        ...

    async def join_group(self, plan: GroupPlan, span: RankSpan) -> JoinedData:
        """Join with `span.num_ranks` ranks from `span.first` on, and prove the group by one tiny collective.

        A group that is already joined is left first. Bounded by plan.timeout_s. Cancel or failure: no group.
        """
        ...

    async def leave_group(self) -> None:
        """Drop the group, in whatever state it is; also releases a receive that is stuck in it. Idempotent.

        Cancel: the group may still stand; it isn't used any more, and the next join or leave drops it.
        """
        ...

    async def receive_weights(self, order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
        """Receive and load every tensor. `on_ready` is called once, when the receiver stands and the sender may begin;
        `on_progress` at least once a second while bytes come.

        Raises UpdateFailedError. Cancel: like a failure with the weights touched; `abort_update` follows.
        """
        ...

    async def finish_update(self, version: Version) -> None:
        """Make the received weights the model's, and label them. Raises UpdateFailedError.

        Cancel: like a failure with the weights touched; `abort_update` follows.
        """
        ...

    async def abort_update(self) -> None:
        """Close an open update session, so that the next can start. The weights may stay torn. Idempotent.

        Cancel: the session may still be open; called again, it is closed.
        """
        ...

    async def check_checkpoint(self, path: str) -> None:
        """Whether `load_weights` could take this folder, without side effects, also while the engine generates: it is
        there, its files are complete by their headers, and its tensors are the model's.

        Raises ManifestError saying what is wrong. Cancel: leaves nothing.
        """
        ...

    async def checkpoint_sums(self, path: str) -> tuple[TensorSum, ...]:
        """The checksums of a folder's tensors, as rlbus computes them of what is sent (`rlbus.workers.folder_sums`).

        Reads all of it, without side effects, also while the engine generates. Raises ManifestError as
        `check_checkpoint`. Cancel: a thread may go on reading.
        """
        ...

    async def load_weights(self, path: str, version: Version) -> None:
        """Load a safetensors folder completely. Raises UpdateFailedError (e.g. a missing file: untouched).

        Cancel: like a failure with the weights touched; `abort_update` follows.
        """
        ...

    async def checksums(self) -> ChecksumsData:
        """Checksums of what the engine holds now. Cancel: nothing changes; the engine may still compute them."""
        ...
