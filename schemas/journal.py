"""What a leader keeps in the store, so that the next can finish what it began. Only controllers use it."""

from rlbus.schemas.base import Wire
from rlbus.schemas.control import (
    FlushFleet,
    HistoryItem,
    PauseFleet,
    ReloadFleet,
    Report,
    ResumeFleet,
    SleepFleet,
    TransferFleet,
    UpdateWeights,
    WakeFleet,
)
from rlbus.schemas.ids import WorkerId
from rlbus.schemas.lora_ops import LoadLoraFleet, UnloadLoraFleet
from rlbus.schemas.sleeping import SleepTag
from rlbus.schemas.snapshots import FleetSnapshot
from rlbus.schemas.weights import Version

# Requests that change something on workers.
MutationRequest = (
    PauseFleet
    | ResumeFleet
    | FlushFleet
    | UpdateWeights
    | ReloadFleet
    | SleepFleet
    | WakeFleet
    | TransferFleet
    | LoadLoraFleet
    | UnloadLoraFleet
)


class MemberBefore(Wire, frozen=True, kw_only=True):
    """How a member was when an op began: its process, the version that the op is about (None: not clean, or none), and
    what slept. `has_lora`: it served the adapter of a load already, from the same bytes, by its status.
    """

    boot_id: str
    version: Version | None = None
    asleep: tuple[SleepTag, ...] = ()
    has_lora: bool = False


class JournalEntry(Wire, frozen=True, kw_only=True):
    """One op: what was asked, of whom, how far it came, and its report once it has ended.

    `fleet` is the fleet's version before, `before` is how the members were, in their order. `held` are members that
    somebody else had paused before. `verified` are those that have everything and the sender's checksums: whoever is
    named here may be committed. `freeing`, of an unload: those of its adapters that stay the fleet's, since it takes
    other bytes under their names; None: nobody wrote that down.
    """

    item: HistoryItem
    request: MutationRequest
    members: tuple[WorkerId, ...]
    fleet: Version | None = None
    before: tuple[MemberBefore, ...] = ()
    held: tuple[WorkerId, ...] = ()
    verified: tuple[WorkerId, ...] = ()
    freeing: tuple[str, ...] | None = None
    report: Report | None = None


class FleetMark(Wire, frozen=True, kw_only=True):
    """The fleet's version, by the leader of `term`; `rolled_back_from` is the highest one that a rollback left.

    `snapshot` is what can bring a worker to `version`.
    """

    term: int
    version: Version
    rolled_back_from: Version | None = None
    snapshot: FleetSnapshot | None = None


class Lease(Wire, frozen=True, kw_only=True):
    """Who leads: `holder` is unique for each process."""

    holder: str
    name: str
    since: float


class TermMark(Wire, frozen=True, kw_only=True):
    """The largest term that any leader took. It stays when leases end: the next leader takes one above it."""

    term: int
