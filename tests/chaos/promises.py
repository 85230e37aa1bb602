"""What issue 3 promises of the update that a blow falls into: how it ends, and how it leaves everybody. Pure."""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.chaos.cases import UPDATE_PHASES, Case, Phase, Target


class Left(enum.StrEnum):
    """How the workers that weren't struck are left by the update."""

    NEW = "at the new version"
    OLD = "as they were, undone"
    TORN = "dirty, until they are healed"


# What the report may say of each of them. One that is as it was may also have failed, or not have been heard: it was
# asked to receive, say, and the group broke before the first byte.
OUTCOMES: Mapping[Left, frozenset[str]] = {
    Left.NEW: frozenset({"ok"}),
    Left.OLD: frozenset({"undone", "skipped", "failed", "unknown"}),
    Left.TORN: frozenset({"failed", "unknown"}),
}
# What it may say of the worker that was struck.
LOST = frozenset({"failed", "unknown"})
ENDED_BY_THE_AGENT = (Phase.BEFORE_COMMIT, Phase.BEFORE_RESUME)


@dataclass(frozen=True, slots=True)
class OpEnd:
    """How one update ended, by the journal. `outcomes`: of each worker, in the journal's order."""

    step: int
    status: str
    outcomes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """How a worker stands: the state and step of its weights (None: not clean), and whether it generates."""

    state: str
    step: int | None
    is_running: bool


@dataclass(frozen=True, slots=True)
class Torn:
    """A worker that was seen dirty. `last_good`: what it said it had before; `was_let_go`: it ran, or was admitted."""

    worker: str
    last_good: int | None
    was_let_go: bool


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What was seen of the update that the blow fell into, and of those after it.

    `ops` are the case's updates in order, `num_asked` how many there have to be. `torn` are the workers that were seen
    dirty between the blow and the next update; `rest` how each stood just before that (or at the end of the case).
    """

    old_step: int
    survivors: tuple[str, ...]
    victim: str | None
    num_asked: int
    ops: tuple[OpEnd, ...]
    torn: tuple[Torn, ...] = ()
    rest: Mapping[str, Standing] = field(default_factory=dict)


def _endings() -> Iterator[tuple[tuple[Target, Phase], dict[str, Left]]]:
    """Of each target and phase: the statuses that the update may end with, and how each leaves the survivors.

    A worker costs the others nothing. Without the trainer, or the leader, it is what has been received that decides:
    nothing, something, or everything. An outage of the server is shorter than the patience of some and longer than that
    of others, so an update may also be carried through it.
    """
    for phase in UPDATE_PHASES:
        yield (Target.WORKER, phase), {"partial": Left.NEW}
        yield (Target.ENGINE, phase), {"partial": Left.NEW}
    # Known to be gone before the update began, or found out by it.
    yield (Target.ENGINE, Phase.IDLE), {"ok": Left.NEW, "partial": Left.NEW}
    # The agent answers for an engine until its death is seen, and these need the agent only.
    for ended in ENDED_BY_THE_AGENT:
        yield (Target.ENGINE, ended), {"ok": Left.NEW, "partial": Left.NEW}
    without_it = {
        Phase.BEFORE_PAUSE: ("failed", Left.OLD),
        Phase.PAUSED: ("failed", Left.OLD),
        Phase.MID_BROADCAST: ("failed", Left.TORN),
        Phase.BEFORE_COMMIT: ("ok", Left.NEW),
        Phase.BEFORE_RESUME: ("ok", Left.NEW),
    }
    for reached, (status, left) in without_it.items():
        yield (Target.TRAINER, reached), {status: left}
        yield (Target.CONTROLLER, reached), {status: left}
        yield (Target.SERVER, reached), {status: left, "ok": Left.NEW}
    yield (Target.SERVER, Phase.IDLE), {"ok": Left.NEW}


ENDINGS: Mapping[tuple[Target, Phase], Mapping[str, Left]] = dict(_endings())


def broken(case: Case, seen: Aftermath) -> Iterator[str]:
    """What of it isn't so, in words."""
    yield from _let_go(seen)
    if len(seen.ops) != seen.num_asked:
        yield f"the journal has {len(seen.ops)} updates that ended, not {seen.num_asked}"
    if not seen.ops:
        return
    op = seen.ops[0]
    endings = ENDINGS[case.target, case.phase]
    for ended in seen.ops:
        named = [worker for worker, _ in ended.outcomes]
        if doubled := sorted({worker for worker in named if named.count(worker) > 1}):
            yield f"update {ended.step} has two outcomes for {', '.join(doubled)}"
    if op.status not in endings:
        yield f"the update ended {op.status}, not {' or '.join(sorted(endings))}"
        return
    left = endings[op.status]
    yield from _misreported(case, seen, op, left)
    yield from _left_otherwise(seen, op, left)
    if len(seen.ops) > 1 and seen.ops[-1].status != "ok":
        yield f"the last update ended {seen.ops[-1].status}, not ok"


def _let_go(seen: Aftermath) -> Iterator[str]:
    """Damage decides, in every case: what is torn says what it had, and stands still."""
    for torn in seen.torn:
        if torn.last_good != seen.old_step:
            yield f"{torn.worker} was dirty with last_good {torn.last_good}, not {seen.old_step}"
        if torn.was_let_go:
            yield f"{torn.worker} was dirty and ran, or was admitted"


def _misreported(case: Case, seen: Aftermath, op: OpEnd, left: Left) -> Iterator[str]:
    outcomes = dict(op.outcomes)
    for worker in seen.survivors:
        if outcomes.get(worker) not in OUTCOMES[left]:
            yield f"the outcome of {worker} is {outcomes.get(worker)}, not {' or '.join(sorted(OUTCOMES[left]))}"
    if seen.victim is None or (case.phase is Phase.IDLE and seen.victim not in outcomes):
        return
    if case.target is Target.ENGINE and op.status == "ok" and outcomes.get(seen.victim) == "ok":
        return
    if outcomes.get(seen.victim) not in LOST:
        yield f"the outcome of {seen.victim}, which was struck, is {outcomes.get(seen.victim)}"


def _left_otherwise(seen: Aftermath, op: OpEnd, left: Left) -> Iterator[str]:
    """Of survivors only; the judge has its own bounds for when they serve, and for the victim."""
    were_torn = {torn.worker for torn in seen.torn}
    for worker in seen.survivors:
        stood = seen.rest.get(worker)
        if left is Left.TORN:
            if worker not in were_torn:
                yield f"{worker} was never dirty, though the update failed after its first byte"
            continue
        if left is Left.OLD and worker in were_torn:
            yield f"{worker} was dirty, though the update failed before its first byte"
        step = op.step if left is Left.NEW else seen.old_step
        if stood != Standing("clean", step, True):
            yield f"{worker} was left {_words(stood)}, not clean, running and at {step}"


def _words(stood: Standing | None) -> str:
    if stood is None:
        return "unseen"
    return f"{stood.state}, {'running' if stood.is_running else 'paused'} and at {stood.step}"
