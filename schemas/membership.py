"""What workers say of themselves, unasked: on start, on change, as a heartbeat, and when they leave.

Published on `dyn.<ns>.<component>.worker.<id>`.
"""

import enum

import msgspec

from rlbus.schemas.base import Wire
from rlbus.schemas.ids import BootId, InstanceId, OpId, Token
from rlbus.schemas.loras import LorasView
from rlbus.schemas.sleeping import SleepTag
from rlbus.schemas.weights import WeightsView


class Descriptor(Wire, frozen=True, kw_only=True):
    """Identity and abilities of one worker. Changes only when the worker restarts.

    `system_url` is the base of its HTTP surface (None if it has none), `completions_url` the base under which it
    serves `/v1/completions` (None for an engine that generates nothing). `routes` are sorted and without duplicates.
    `backends` names the transfer backends it can join ("gloo", "nccl").
    """

    namespace: Token
    component: Token
    instance_id: InstanceId
    engine: str
    model: str
    world_size: int
    routes: tuple[str, ...]
    backends: tuple[str, ...] = ()
    system_url: str | None = None
    completions_url: str | None = None
    schema_version: int = 1


class Generation(enum.StrEnum):
    """What the engine does with requests, as read from the engine."""

    RUNNING = "running"
    PAUSED = "paused"
    UNKNOWN = "unknown"  # the engine didn't answer


class PauseView(Wire, frozen=True, kw_only=True):
    """Who holds a pause: `owner` is an op_id or a person's name, `since` in Unix seconds.

    `expires_at`, in Unix seconds of the worker's clock, is when its lease ends; in the past: it ended, and unclean
    weights keep the worker paused. None: an explicit hold without a lease.
    """

    owner: str
    mode: str
    since: float
    expires_at: float | None = None


class WorkView(Wire, frozen=True, kw_only=True):
    """Declared work that may keep a worker from its heartbeats: a collective, a large load.

    `since` is in Unix seconds of the worker's clock. `lease_s` is a duration: for so long after the message that says
    so, silence means nothing. Each later message renews it.
    """

    route: str
    since: float
    lease_s: float


class WorkerStatus(Wire, frozen=True, kw_only=True):
    """Observed state, read from the engine, beside what was commanded. Independent fields, never one enum for all.

    `drift` says in words where what is observed differs from what was commanded; None when they agree.
    `op_id` is the mutation in progress. `epoch` is the process group it is in. `term` the highest it has seen. `work`
    is what excuses late heartbeats now. `asleep` are the parts of the engine's memory that sleep, sorted. `loras` is
    None for an engine that takes no adapters, or didn't say. `draft` are the weights of its draft model (None: it has
    none), whose versions are the draft's own.
    """

    generation: Generation
    weights: WeightsView
    pause: PauseView | None = None
    drift: str | None = None
    op_id: OpId | None = None
    epoch: int | None = None
    term: int = 0
    num_refused_messages: int = 0
    work: WorkView | None = None
    asleep: tuple[SleepTag, ...] = ()
    loras: LorasView | None = None
    draft: WeightsView | None = None


class Announcement(Wire, frozen=True, kw_only=True, tag_field="kind", tag="announcement"):
    """Descriptor and status: sent on start, on change and as heartbeat. `seq` grows within a boot.

    A larger seq of the same boot wins over a smaller one that arrives later. `interval_s` is the worker's own
    heartbeat interval, from which the controller computes suspect and dead.
    """

    boot_id: BootId
    seq: int
    interval_s: float
    descriptor: Descriptor
    status: WorkerStatus


class Goodbye(Wire, frozen=True, kw_only=True, tag_field="kind", tag="goodbye"):
    """The worker leaves on purpose. Silence after it is not a fault."""

    boot_id: BootId
    component: Token
    instance_id: InstanceId
    reason: str = msgspec.field(default="stopped")


WorkerMessage = Announcement | Goodbye
