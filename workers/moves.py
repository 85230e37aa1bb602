"""What the state machine of `lifecycle` is told (events), and what it wants done (actions). Data only."""

import enum
from dataclasses import dataclass

from rlbus.schemas import Command, CommandBody, Fault, SleepTag, TensorSpec
from rlbus.workers.engines.lora import Resident
from rlbus.workers.journal import Record
from rlbus.workers.state import Adapter, WorkerState

# --- events


@dataclass(frozen=True, slots=True)
class Arrived:
    """A command, as parsed. `route` and `is_unicast` come from its subject, `record` from the journal.

    `tensors` is the complete manifest that a prepare names (None: not known), `outside` what the agent found wrong when
    it looked at the model for this command.
    """

    command: Command
    route: str
    is_unicast: bool
    now: float
    record: Record | None = None
    tensors: tuple[TensorSpec, ...] | None = None
    outside: Fault | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The engine is about to be called for the running mutation."""

    op_id: str


@dataclass(frozen=True, slots=True)
class FirstByte:
    """The transfer of the running mutation has brought its first byte."""

    op_id: str


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """`engine.abort_update` has succeeded."""


@dataclass(frozen=True, slots=True)
class GroupLeft:
    """`engine.leave_group` has been called."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """Every cache is empty."""


@dataclass(frozen=True, slots=True)
class Woke:
    """The engine has taken the memory of `tags` again."""

    tags: frozenset[SleepTag]


@dataclass(frozen=True, slots=True)
class MayStand:
    """A pause or sleep has failed, and nobody knows whether the engine goes on: the resume after it failed, too, or the
    call itself hasn't ended.
    """


@dataclass(frozen=True, slots=True)
class WakeDue:
    """A sleep has failed some time ago, and couldn't be taken back then. `op_id` is new."""

    op_id: str
    now: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine calls of the running mutation have ended. `is_touched` counts only with a fault."""

    op_id: str
    now: float
    fault: Fault | None = None
    is_touched: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """Nothing of the mutation runs any more, cleaning up included."""

    op_id: str
    now: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The lease that was granted last has run out. `op_id` is new: what follows from it is named after it."""

    op_id: str
    now: float


@dataclass(frozen=True, slots=True)
class LoraBegins:
    """The engine is about to be told to load this adapter, maybe in the place of revision `replaces`."""

    adapter: Adapter
    replaces: int | None = None


@dataclass(frozen=True, slots=True)
class LoraDrains:
    """The engine takes no new requests for this adapter; it is to go when those in flight have ended. `checksum` is
    what is known of one that an agent before this one has loaded.
    """

    name: str
    revision: int
    drain_s: float
    checksum: str | None = None


@dataclass(frozen=True, slots=True)
class LoraGone:
    """The engine has let it go, and ended so many requests with it."""

    name: str
    revision: int
    num_aborted: int | None


@dataclass(frozen=True, slots=True)
class LoraRefused:
    """The engine has refused to load this adapter: nothing has changed."""

    name: str
    revision: int


@dataclass(frozen=True, slots=True)
class LoraUnsettled:
    """A call about this adapter went wrong, and the engine doesn't say what became of it. `is_unwanted`: it is to go,
    should it turn up.
    """

    name: str
    revision: int
    is_unwanted: bool = False


@dataclass(frozen=True, slots=True)
class LorasSeen:
    """What the engine has, by its own list, asked for when `lora_turn` was `turn`."""

    residents: tuple[Resident, ...]
    turn: int
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """No request needs this draining adapter any more, or its time is over, or nobody wants it. `op_id` is new."""

    name: str
    revision: int
    op_id: str
    now: float


LoraEvent = LoraBegins | LoraDrains | LoraGone | LoraRefused | LoraUnsettled | LorasSeen | DrainEnded
Event = (
    LoraEvent
    | Arrived
    | Started
    | FirstByte
    | SessionClosed
    | GroupLeft
    | Flushed
    | Woke
    | MayStand
    | WakeDue
    | Ended
    | Released
    | LeaseEnded
)


# --- actions


@dataclass(frozen=True, slots=True)
class Ignore:
    """Addressed to others, who are told so by the member list: no answer, which nobody waits for."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer with this fault; nothing has changed."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class Join:
    """The op is running already: add the reply address."""

    record: Record


@dataclass(frozen=True, slots=True)
class Replay:
    """The op has ended: send its recorded result again."""

    record: Record


@dataclass(frozen=True, slots=True)
class AnswerNow:
    """Do it beside whatever runs: a query, a page of a manifest, or an abort of requests."""


@dataclass(frozen=True, slots=True)
class Run:
    """Begin the mutation. With `takes_back` the running one is ended first."""

    takes_back: str | None = None


@dataclass(frozen=True, slots=True)
class RunOwn:
    """Begin a mutation that nobody sent: the lease of a pause has ended."""

    op_id: str
    body: CommandBody


@dataclass(frozen=True, slots=True)
class TakeBack:
    """End the running mutation for `fault`; it has not touched anything."""

    op_id: str
    fault: Fault


@dataclass(frozen=True, slots=True)
class WakeAgain:
    """Take back the memory that a failed sleep may have freed, before the op counts as over."""

    tags: frozenset[SleepTag]


class Cleanup(enum.Enum):
    """Engine calls that follow a failure, in this order, before the op counts as over."""

    CLOSE_SESSION = "abort_update"
    LEAVE_GROUP = "leave_group"
    RESUME = "resume"


Action = Ignore | Refuse | Join | Replay | AnswerNow | Run | RunOwn | TakeBack | WakeAgain | Cleanup
Decision = tuple[WorkerState, tuple[Action, ...]]
