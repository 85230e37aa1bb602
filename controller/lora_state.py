"""What an op about adapters knows: its plan, each worker's seat, what comes in and what is to be done. Pure data."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlbus.controller.answers import StepAnswer
from rlbus.controller.causes import named
from rlbus.schemas import (
    CommandBody,
    Fault,
    LorasData,
    LoraSource,
    LoraState,
    Outcome,
    PauseMode,
    WorkerId,
    lora_id,
)


class Stage(enum.StrEnum):
    """Where a load stands; the value is the phase that people see."""

    CHECK = "check"
    PAUSE = "pause"
    LOAD = "load"
    SETTLE = "settle"
    SHOW = "show"
    FRONTEND = "frontend"
    UNLOAD = "unload"
    RESTORE = "restore"
    RESUME = "resume"
    DONE = "done"


class Has(enum.Enum):
    """Whether a worker has the adapter."""

    NO = "no"
    YES = "yes"
    MAYBE = "maybe"  # it was asked to load it, and nobody knows what came of it


@dataclass(frozen=True, slots=True)
class Kept:
    """An adapter that the fleet has, as far as it is needed to give it back to a worker."""

    name: str
    revision: int
    checksum: str
    source: LoraSource


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a load starts from. `kept` are the fleet's adapters by id, for what has to be given back after a failure.

    `held` are paused by somebody else. `is_hot_swap`: it was asked for, and every engine can do it. `has_frontend`:
    somebody has to show it, too. `owner` and `lease_s` are those of the pause.
    """

    name: str
    revision: int
    checksum: str
    source: LoraSource
    workers: tuple[WorkerId, ...]
    owner: str
    lease_s: float
    held: frozenset[WorkerId] = frozenset()
    pause_mode: PauseMode = PauseMode.KEEP
    is_hot_swap: bool = False
    evict_idle: bool = False
    is_catch_up: bool = False
    has_frontend: bool = False
    kept: Mapping[str, Kept] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """ "policy@7"."""
        return lora_id(self.name, self.revision)


@dataclass(frozen=True, slots=True)
class Blame:
    """What went wrong on a worker first, and in which phase."""

    outcome: Outcome
    phase: str
    fault: Fault


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker. `had`: it had the adapter before, so it is never taken from it; `was_draining`: it was about to let
    it go. `is_held`: this op has paused it.

    `before` are the ids that its engine had before the load. `data` is what the engine said last of its adapters.
    """

    worker: WorkerId
    had: bool = False
    was_draining: bool = False
    has: Has = Has.NO
    is_held: bool = False
    was_touched: bool = False
    before: frozenset[str] = frozenset()
    data: LorasData | None = None
    blame: Blame | None = None


@dataclass(frozen=True, slots=True)
class LoadState:
    """One load. `pending` awaits an answer to `stage`. `stop` is what ends it besides a worker: a person, a deadline, a
    frontend. `is_committed`: every worker shows it. `to_unload` are those from which it is still to be taken,
    `to_restore` ids with the workers that have to get them back, `restoring` the one that is given back now.
    """

    plan: LoadPlan
    stage: Stage
    seats: Mapping[WorkerId, Seat]
    stop: Fault | None = None
    failed_in: str | None = None
    is_committed: bool = False
    num_looks: int = 0
    to_unload: tuple[WorkerId, ...] = ()
    restoring: str | None = None
    to_restore: tuple[tuple[str, tuple[WorkerId, ...]], ...] = ()
    # What its end may take is used up: only what nobody else would do is still done.
    is_late: bool = False

    @property
    def causes(self) -> tuple[Fault, ...]:
        """All that went wrong: what somebody outside did first."""
        own = () if self.stop is None else (self.stop,)
        return own + tuple(named(s.blame.fault, s.worker) for s in self.seats.values() if s.blame is not None)


# -- what happens -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Began:
    """The op begins."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Everybody who was asked has an answer. `stop`: the op is to be taken back, for this reason. `is_late`: what its
    end may take is used up.
    """

    answers: Mapping[WorkerId, StepAnswer]
    stop: Fault | None = None
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Waited:
    """The wait is over. `stop` as in `Answered`."""

    stop: Fault | None = None


@dataclass(frozen=True, slots=True)
class Watched:
    """The frontend shows it, or `problem` says why not. `stop` as in `Answered`."""

    problem: Fault | None = None
    stop: Fault | None = None


LoadEvent = Began | Answered | Waited | Watched


# -- what is to be done -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """One command to some workers. `is_final`: it has to be done, whatever the deadline. `until_free`: those that are
    busy are asked again.
    """

    phase: str
    step: str
    body: CommandBody
    workers: tuple[WorkerId, ...]
    is_final: bool = False
    until_free: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Let some time pass before workers are looked at again, in seconds."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class Watch:
    """See whether the frontend shows this model, until it does or the op has no time left."""

    model: str


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing is left to do."""


LoadAction = Ask | Wait | Watch | Done


def shows(data: LorasData | None, name: str, revision: int, checksum: str) -> bool:
    """Whether an engine's own list has this adapter, loaded, and from these bytes. One whose bytes nobody knows may be
    that of an earlier run, under the same name.
    """
    if data is None:
        return False
    return any(
        view.name == name and view.revision == revision and view.state is LoraState.LOADED and view.checksum == checksum
        for view in data.loras
    )


def loaded_ids(data: LorasData) -> frozenset[str]:
    """What an engine serves, of adapters that have a revision."""
    return frozenset(
        lora_id(view.name, view.revision)
        for view in data.loras
        if view.revision is not None and view.state is LoraState.LOADED
    )
