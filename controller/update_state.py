"""The state of one update of the fleet's weights, and the events and actions of its decision core. No behaviour beyond
reading the state.

Invariants: every worker of the plan has one seat; the first thing that went wrong on a worker is what its seat blames,
and stays; at most one fan-out (`step`) is awaited at a time.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlbus.controller.answers import StepAnswer
from rlbus.schemas import (
    CommandBody,
    Fault,
    GroupPlan,
    JoinTask,
    LeaveTask,
    ManifestPage,
    Outcome,
    RankSpan,
    ReceivedData,
    SendTask,
    TensorSpec,
    TensorSum,
    UpdateWeights,
    Version,
    WorkerId,
    worker_id,
)


class Stage(enum.StrEnum):
    """What an update awaits. The value is the token of the step in op ids."""

    NEW = "new"
    PREPARE = "prepare"
    PAGES = "page"
    PREPARE_AGAIN = "prepare-again"
    LEAVE_OLD = "leave-old"
    JOIN = "join"
    PAUSE = "pause"
    RECEIVE = "receive"
    COMMIT = "commit"
    FLUSH = "flush"
    RESUME = "resume"
    # Winding down: what failed is aborted, settled and let go, as far as its damage allows.
    ABORT = "abort"
    SETTLE = "settle"
    FREE = "free"
    LEAVE = "leave"
    # Those who are left leave the broken group, to form the next one.
    REGROUP = "regroup"
    DONE = "done"


# Names of the phases as people see them.
PHASE_OF = {
    Stage.NEW: "plan",
    Stage.PREPARE: "prepare",
    Stage.PAGES: "prepare",
    Stage.PREPARE_AGAIN: "prepare",
    Stage.LEAVE_OLD: "group",
    Stage.JOIN: "group",
    Stage.PAUSE: "pause",
    Stage.RECEIVE: "transfer",
    Stage.COMMIT: "commit",
    Stage.FLUSH: "flush",
    Stage.RESUME: "resume",
    Stage.ABORT: "undo",
    Stage.SETTLE: "undo",
    Stage.FREE: "undo",
    Stage.LEAVE: "undo",
    Stage.REGROUP: "regroup",
    Stage.DONE: "done",
}
# Up to here an update can be taken back; after it, it is finished on whoever received everything.
FORWARD = frozenset(
    {
        Stage.NEW,
        Stage.PREPARE,
        Stage.PAGES,
        Stage.PREPARE_AGAIN,
        Stage.LEAVE_OLD,
        Stage.JOIN,
        Stage.PAUSE,
        Stage.RECEIVE,
    }
)
# What follows when it goes well. All other stages take back, and let go.
COMPLETING = frozenset({Stage.COMMIT, Stage.FLUSH, Stage.RESUME})


class Hold(enum.Enum):
    """What this update did to a worker's generation."""

    NONE = "none"
    ASKED = "asked"  # a pause was sent and not answered: it may be paused
    PAUSED = "paused"
    RELEASED = "released"
    STUCK = "stuck"  # a resume was sent, and didn't do it


class Damage(enum.Enum):
    """What this update did to a worker's weights."""

    NONE = "none"
    OPEN = "open"  # asked to receive; may be touched
    RECEIVED = "received"  # says that it has everything
    COMMITTED = "committed"
    TORN = "torn"  # touched, or nobody can say


class Sender(enum.Enum):
    """Where the trainer stands."""

    IDLE = "idle"
    JOINING = "joining"  # told to join
    IN = "in"
    SENDING = "sending"  # told to send
    SENT = "sent"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Group:
    """A process group that stands: its plan, who the trainer is, and which boots of which workers are in it."""

    plan: GroupPlan
    sender_id: str
    boots: Mapping[WorkerId, str]
    # The plan's spans by worker, in the order of their ranks.
    spans: Mapping[WorkerId, RankSpan] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", {worker_id(s.component, s.instance_id): s for s in self.plan.spans})

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Its workers, in the order of their ranks."""
        return tuple(self.spans)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that the update addresses. `is_held`: somebody else had paused it before, and keeps it so.

    `version` is what it had before: after a failure, having the new version proves a commit only if that is another.
    """

    worker: WorkerId
    boot_id: str
    world_size: int
    is_held: bool = False
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What an update starts from; constant.

    `total_bytes` is the size of the tensors. `current` is the group that stands from the last update, None if there is
    none; `is_whole` that all of its workers still say they are in it, `leavers` those of them that can be told to
    leave. `next_epoch` numbers a new group. `sums_digest` is that of what has to be sent, None: whatever is.
    """

    request: UpdateWeights
    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    pages: tuple[ManifestPage, ...]
    candidates: tuple[Candidate, ...]
    next_epoch: int
    group_timeout_s: float
    current: Group | None = None
    is_whole: bool = False
    leavers: tuple[WorkerId, ...] = ()
    sums_digest: str | None = None

    @property
    def num_needed(self) -> int:
        """How many workers have to end at the new version."""
        return len(self.candidates) if self.request.require is None else self.request.require


@dataclass(frozen=True, slots=True)
class Blame:
    """The first thing that went wrong on a worker, and in which phase."""

    outcome: Outcome
    phase: str
    fault: Fault


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker in the update."""

    candidate: Candidate
    hold: Hold = Hold.NONE
    damage: Damage = Damage.NONE
    is_joined: bool = False
    is_gone: bool = False
    blame: Blame | None = None
    received: ReceivedData | None = None
    # Torn by an attempt before this one; left out of this one for what it did in one before.
    was_torn: bool = False
    is_out: bool = False

    @property
    def is_good(self) -> bool:
        """Whether nothing went wrong on it so far."""
        return self.blame is None


@dataclass(frozen=True, slots=True)
class UpdateState:
    """Where an update stands.

    `step` names the fan-out that is awaited (the stage, with a number where one repeats), `pending` who hasn't answered
    it, `accepted` who said that it runs. `lacking` are workers without the manifest. `causes` are all faults in order.
    """

    plan: Plan
    seats: Mapping[WorkerId, Seat]
    stage: Stage = Stage.NEW
    step: str | None = None
    pending: frozenset[WorkerId] = frozenset()
    accepted: frozenset[WorkerId] = frozenset()
    lacking: tuple[WorkerId, ...] = ()
    num_pages_put: int = 0
    num_tries: int = 0
    group: Group | None = None
    is_group_suspect: bool = False
    # Whether its members were told to leave it, at the end of the update.
    has_left: bool = False
    sender: Sender = Sender.IDLE
    # Whether the trainer was told to send: from then on a byte may have reached every receiver.
    may_have_sent: bool = False
    sums: tuple[TensorSum, ...] = ()
    num_bytes: int = 0
    causes: tuple[Fault, ...] = ()
    # The phase in which it was given up; None: it went through to its end.
    failed_in: str | None = None
    # Attempts count from 1; `epochs` are those of the groups that were used, in order.
    attempt: int = 1
    epochs: tuple[int, ...] = ()
    # Cancelled, or out of time: there is no other attempt.
    is_stopped: bool = False
    # Nor is anybody asked again.
    is_out_of_time: bool = False
    # Why the trainer gave up the present attempt.
    sender_fault: Fault | None = None
    # The broadcast that is being wound down, whose answers still tell who broke it.
    late_step: str | None = None

    @property
    def phase(self) -> str:
        """The phase as people see it."""
        return PHASE_OF[self.stage]

    @property
    def crew(self) -> tuple[WorkerId, ...]:
        """Workers on which nothing went wrong so far, in the order of the plan."""
        return tuple(w for w, seat in self.seats.items() if seat.is_good)


def initial(plan: Plan) -> UpdateState:
    """The state before `Began`."""
    return UpdateState(plan=plan, seats={c.worker: Seat(c) for c in plan.candidates})


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Began:
    """Start."""


@dataclass(frozen=True, slots=True)
class WorkerAccepted:
    """A worker validated `step` and runs it; for a transfer: its receiver stands."""

    step: str
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkersAnswered:
    """How `step` ended on some of its workers. Every asked worker comes exactly once, as soon as it is known."""

    step: str
    answers: Mapping[WorkerId, StepAnswer]


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker died, left or restarted."""

    worker: WorkerId
    fault: Fault


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """A worker gives no sign of life while no byte moves in the transfer."""

    worker: WorkerId
    fault: Fault


@dataclass(frozen=True, slots=True)
class SenderJoined:
    """The trainer is in the group."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SenderSent:
    """The trainer sent everything."""

    epoch: int
    sums: tuple[TensorSum, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SenderFailed:
    """The trainer gave up on `epoch`, or fell silent (None: whatever epoch there is)."""

    epoch: int | None
    fault: Fault


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Cancelled by somebody, or the deadline passed. Ignored once everything was received and checked."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class StepOverdue:
    """A step of the end has used up the time of the op, which was stopped meanwhile: whoever hasn't answered won't."""

    step: str
    fault: Fault


@dataclass(frozen=True, slots=True)
class TimeUp:
    """The time for what has to be done at the end is over, too: who is still busy is given up."""


Event = (
    Began
    | WorkerAccepted
    | WorkersAnswered
    | WorkerGone
    | WorkerSilent
    | SenderJoined
    | SenderSent
    | SenderFailed
    | StopAsked
    | TimeUp
    | StepOverdue
)

# -- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Fan `body` out to `workers` as `step`, `after_s` seconds from now.

    `is_ending`: it must be done even when the op's deadline has passed, within a bound of its own.
    """

    step: str
    body: CommandBody
    workers: tuple[WorkerId, ...]
    is_ending: bool = False
    after_s: float = 0.0
    # Without a sign of life for this long a worker counts as silent; None: as in any step.
    ack_s: float | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop waiting for `step`; what it would still bring is of no interest."""

    step: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the trainer."""

    message: JoinTask | SendTask | LeaveTask


Action = Ask | Drop | Tell
