"""Facts, in the past tense. Workers publish theirs on `dyn.<ns>.<component>.event.<id>`, the controller on
`dyn.<ns>.controller.event.<kind>`. Nobody may depend on an event arriving: state is in statuses and reports.
"""

import msgspec

from rlbus.schemas.base import Wire
from rlbus.schemas.faults import Fault
from rlbus.schemas.ids import InstanceId, OpId, Token
from rlbus.schemas.sleeping import SleepTag
from rlbus.schemas.weights import Version, WeightsState


class WorkerEventBase(Wire, frozen=True, kw_only=True, tag_field="kind"):
    """Base: which worker, when (Unix seconds), because of which op."""

    component: Token
    instance_id: InstanceId
    at: float
    op_id: OpId | None = None


class GenerationPaused(WorkerEventBase, frozen=True, kw_only=True, tag="generation_paused"):
    """The engine stands still. `expires_at` is when its lease ends unless it is renewed; None: an explicit hold."""

    mode: str
    owner: str
    expires_at: float | None = None


class GenerationResumed(WorkerEventBase, frozen=True, kw_only=True, tag="generation_resumed"):
    """The engine generates again. `forced` is set when a person overrode unclean weights.

    `owner` is who held the pause; with `lease_ended` nobody resumed it, its lease ended without renewal.
    """

    forced: bool = False
    lease_ended: bool = False
    owner: str | None = None


class WeightsChanged(WorkerEventBase, frozen=True, kw_only=True, tag="weights_changed"):
    """The weights' state or version changed."""

    state: WeightsState
    version: Version | None = None


class DraftChanged(WorkerEventBase, frozen=True, kw_only=True, tag="draft_changed"):
    """The state or version of the draft model's weights changed."""

    state: WeightsState
    version: Version | None = None


class SleepChanged(WorkerEventBase, frozen=True, kw_only=True, tag="sleep_changed"):
    """Parts of the engine's memory fell asleep or woke; `asleep` are those that sleep now, sorted."""

    asleep: tuple[SleepTag, ...]


class LoraLoaded(WorkerEventBase, frozen=True, kw_only=True, tag="lora_loaded"):
    """Requests can name this adapter from now on. `hot_swap`: it took the place of an older revision in the engine."""

    name: str
    revision: int
    checksum: str
    hot_swap: bool = False


class LoraDraining(WorkerEventBase, frozen=True, kw_only=True, tag="lora_draining"):
    """No new request may name this adapter; it is unloaded when those in flight have ended."""

    name: str
    revision: int


class LoraUnloaded(WorkerEventBase, frozen=True, kw_only=True, tag="lora_unloaded"):
    """The adapter is gone from the engine. `num_aborted` requests were ended with it; None: the engine can't say."""

    name: str
    revision: int
    num_aborted: int | None = None


class CommandRefused(WorkerEventBase, frozen=True, kw_only=True, tag="command_refused"):
    """A command was refused; `route` is None when it could not be parsed that far."""

    fault: Fault
    route: str | None = None


WorkerEvent = (
    GenerationPaused
    | GenerationResumed
    | WeightsChanged
    | DraftChanged
    | SleepChanged
    | LoraLoaded
    | LoraDraining
    | LoraUnloaded
    | CommandRefused
)


class ControllerEventBase(Wire, frozen=True, kw_only=True, tag_field="kind"):
    """Base: when (Unix seconds)."""

    at: float


class WorkerJoined(ControllerEventBase, frozen=True, kw_only=True, tag="worker_joined"):
    """A worker announced itself for the first time, or with a new boot id."""

    component: Token
    instance_id: InstanceId
    boot_id: str


class WorkerLeft(ControllerEventBase, frozen=True, kw_only=True, tag="worker_left"):
    """A worker said goodbye, or was declared dead for `reason`."""

    component: Token
    instance_id: InstanceId
    reason: str


class OpStarted(ControllerEventBase, frozen=True, kw_only=True, tag="op_started"):
    """An op began. `caller` is who asked for it, as far as the bus can say."""

    op_id: OpId
    op: str
    caller: str


class OpAdvanced(ControllerEventBase, frozen=True, kw_only=True, tag="op_advanced"):
    """An op entered a phase, or reported progress within one (`done` of `total`, in `unit`)."""

    op_id: OpId
    phase: str
    done: int = 0
    total: int | None = None
    unit: str = "workers"


class OpEnded(ControllerEventBase, frozen=True, kw_only=True, tag="op_ended"):
    """An op ended with `status` (ok, partial, failed, refused)."""

    op_id: OpId
    op: str
    status: str
    took_s: float
    fault: Fault | None = msgspec.field(default=None)


ControllerEvent = WorkerJoined | WorkerLeft | OpStarted | OpAdvanced | OpEnded
