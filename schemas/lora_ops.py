"""Adapters (LoRA) of a whole fleet: what is asked of the controller, what it keeps, and what it says."""

from rlbus.schemas.base import Wire
from rlbus.schemas.ids import WorkerId
from rlbus.schemas.loras import DEFAULT_DRAIN_S, DrainS, LoraName, LoraSource, Revision, Sha256
from rlbus.schemas.pausing import PauseMode
from rlbus.schemas.requests import Request, Target


class LoadLoraFleet(Request, frozen=True, kw_only=True, tag="lora_load"):
    """Let requests name this adapter on every worker of the target, or on none.

    `revision` None: the name's next one. The same name@revision again needs the same checksum. All are paused
    meanwhile, unless `hot_swap` is asked for and every engine can do it: then the newest older revision is replaced in
    its place while they generate. `evict_idle` as in the command `LoadLora`. `is_catch_up`: only for workers that lack
    what the fleet has; nobody is paused, nothing is taken back from the others. `where_possible`: only for those of
    the target whose engine takes adapters; the others have the outcome `skipped`. Without it one such worker makes it
    a refusal.
    """

    name: LoraName
    source: LoraSource
    checksum: Sha256
    revision: Revision | None = None
    target: Target = Target()
    pause_mode: PauseMode = PauseMode.KEEP
    hot_swap: bool = False
    evict_idle: bool = False
    is_catch_up: bool = False
    where_possible: bool = False


class UnloadLoraFleet(Request, frozen=True, kw_only=True, tag="lora_unload"):
    """Let this adapter go on every worker of the target; `revision` None: every revision of the name.

    Requests in flight keep it until they have ended, at most `drain_s`; the op doesn't wait for that.
    """

    name: LoraName
    revision: Revision | None = None
    drain_s: DrainS = DEFAULT_DRAIN_S
    target: Target = Target()


class ListLoras(Request, frozen=True, kw_only=True, tag="lora_list"):
    """Ask each worker's engine for its adapters and their requests in flight; each outcome's data is `LorasData`."""

    target: Target = Target()


class LoraResult(Wire, frozen=True, kw_only=True):
    """What an op was about: "policy@7", and what its name stands for. `hot_swap`: nobody was paused for it.

    `evicted` went to make room, on some worker. After an unload `ids` are those that nobody serves any more, and
    `partly` those that some let go and others may still serve: nobody is given them again. `num_draining` workers still
    have requests on one.
    """

    ids: tuple[str, ...]
    checksum: Sha256 | None = None
    hot_swap: bool = False
    evicted: tuple[str, ...] = ()
    num_draining: int = 0
    partly: tuple[str, ...] = ()


class FleetLora(Wire, frozen=True, kw_only=True):
    """One adapter that the fleet has: every worker of `target` is given it, also those that come later.

    `since` in Unix seconds. `op_id` is the op that gave it. `not_on` are components ("decode") and workers ("decode/1")
    of the target that don't have it any more: it was unloaded there, or had to go for a newer revision. `also_on` are
    workers that have it all the same, of a component that isn't meant.
    """

    name: LoraName
    revision: Revision
    checksum: Sha256
    source: LoraSource
    since: float
    op_id: str
    target: Target = Target()
    not_on: tuple[str, ...] = ()
    also_on: tuple[WorkerId, ...] = ()


class LoraBehind(Wire, frozen=True, kw_only=True):
    """An adapter that the fleet has and one worker lacks: "policy@7", and what is done about it, in words."""

    id: str
    note: str


class PastRevision(Wire, frozen=True, kw_only=True, array_like=True):
    """A revision that was given once, and the bytes that it stands for since. On the wire `[name, 7, checksum]`."""

    name: LoraName
    revision: Revision
    checksum: Sha256


class LoraMark(Wire, frozen=True, kw_only=True):
    """The fleet's adapters, by the leader of `term`: those that it has, and the newest revisions that were ever given,
    so that none is given twice. `op_id` is the last op that counts in it.
    """

    term: int
    op_id: str | None = None
    loras: tuple[FleetLora, ...] = ()
    past: tuple[PastRevision, ...] = ()
