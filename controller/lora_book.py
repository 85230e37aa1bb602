"""Which adapters the fleet has, and which revisions were ever given. No I/O; `mark` and `restore` are for the journal.

Invariants: a name@revision stands for one checksum for ever, also after it was unloaded, and also for the next leader;
a revision that an op was begun with is never given out again by number, whatever became of that op.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from rlbus.controller.causes import fault
from rlbus.controller.lora_reach import NOBODY, reach, reach_of, reaching
from rlbus.controller.lora_state import Kept
from rlbus.schemas import (
    MAX_REVISION,
    SHORT_SUM_CHARS,
    Fault,
    FaultCode,
    FleetLora,
    JournalEntry,
    LoadLoraFleet,
    LoraMark,
    LorasData,
    Outcome,
    PastRevision,
    Target,
    UnloadLoraFleet,
    WorkerId,
    WorkerStatus,
    lora_id,
    split_lora_id,
    split_worker_id,
)

# Adapters that a fleet may have. Source: rlbus.schemas.loras.MAX_LORAS, what one worker may have.
MAX_FLEET_LORAS = 256
# Revisions that are remembered with their checksums; the oldest goes first, but the newest of a name stays.
MAX_PAST = 1024


class LoraBook:
    """The fleet's adapters. Called on the loop; never waits."""

    def __init__(self) -> None:
        # The last op that counts in it.
        self.op_id: str | None = None
        # By id, in the order in which they came.
        self._loras: dict[str, FleetLora] = {}
        # (name, revision) -> checksum, in the order in which they were first given.
        self._past: dict[tuple[str, int], str] = {}
        # Name -> largest revision.
        self._newest: dict[str, int] = {}

    @property
    def loras(self) -> tuple[FleetLora, ...]:
        """What the fleet has, oldest first."""
        return tuple(self._loras.values())

    def of(self, ids: Iterable[str]) -> Mapping[str, FleetLora]:
        """Those of these that the fleet has, by id."""
        return {i: self._loras[i] for i in ids if i in self._loras}

    def get(self, name: str, revision: int) -> FleetLora | None:
        """One adapter that the fleet has."""
        return self._loras.get(lora_id(name, revision))

    def revisions(self, name: str) -> tuple[int, ...]:
        """Those of a name that the fleet has, smallest first."""
        return tuple(sorted(one.revision for one in self._loras.values() if one.name == name))

    def kept(self) -> Mapping[str, Kept]:
        """What can be given to workers, by id."""
        return {i: Kept(one.name, one.revision, one.checksum, one.source) for i, one in self._loras.items()}

    def next_revision(self, name: str, statuses: Iterable[WorkerStatus]) -> int:
        """The number of a name's next revision: above all that were given, and all that any worker has."""
        return max([self._newest.get(name, 0), *revisions_on(name, statuses)]) + 1

    def problem(self, name: str, revision: int, checksum: str) -> Fault | None:
        """Why this revision can't stand for these bytes, None: it can."""
        known = self._past.get((name, revision))
        if revision > MAX_REVISION:
            return fault(FaultCode.BAD_MESSAGE, f"revision {revision} is over {MAX_REVISION}", revision=revision)
        if known is not None and known != checksum:
            message = f"{lora_id(name, revision)} stands for other bytes ({known[:12]}) for ever; use the next revision"
            return fault(FaultCode.REVISION_TAKEN, message, lora=lora_id(name, revision), checksum=known)
        if known is None and self.get(name, revision) is None and len(self._loras) >= MAX_FLEET_LORAS:
            message = f"the fleet has {MAX_FLEET_LORAS} adapters; unload some"
            return fault(FaultCode.NO_CAPACITY, message, capacity=MAX_FLEET_LORAS)
        return None

    def give(self, name: str, revision: int, checksum: str) -> None:
        """An op begins with this revision."""
        self._past.setdefault((name, revision), checksum)
        self._newest[name] = max(revision, self._newest.get(name, 0))
        while len(self._past) > MAX_PAST:
            old = next(((n, r) for n, r in self._past if r != self._newest.get(n)), next(iter(self._past)))
            del self._past[old]
            if self._newest.get(old[0]) == old[1]:
                del self._newest[old[0]]

    def add(self, lora: FleetLora) -> None:
        """The fleet has this one now; one that it had is meant for the workers of both loads."""
        self.give(lora.name, lora.revision, lora.checksum)
        known = self.get(lora.name, lora.revision)
        if known is not None:
            lora = reaching(replace(lora, since=known.since), reach(known) | reach(lora))
        self._loras[lora_id(lora.name, lora.revision)] = lora
        self.op_id = lora.op_id

    def take(
        self, ids: Iterable[str], op_id: str, target: Target, known: Collection[WorkerId] | None = None
    ) -> Mapping[str, FleetLora]:
        """Nobody of `target` is given these any more: they were unloaded there, or had to go for a load. Those that the
        fleet had there, by id, as they were; one that others should have is still the fleet's, unless none of them is
        `known` (None: nobody can say yet who there is).
        """
        self.op_id = op_id
        found: dict[str, FleetLora] = {}
        for key in sorted(i for i in ids if i in self._loras):
            one = self._loras[key]
            left = reach(one) - reach_of(target)
            if left == reach(one):
                continue
            found[key] = one
            if left == NOBODY or (known is not None and not any(worker in left for worker in known)):
                del self._loras[key]
            else:
                self._loras[key] = reaching(one, left)
        return found

    def extra(self, worker: WorkerId, status: WorkerStatus) -> tuple[str, ...]:
        """What a worker serves from bytes that an op gave, and that the fleet doesn't have there. As far as its status
        tells: a name alone proves nothing.
        """
        loras = status.loras
        if loras is None or len(loras.sums) != len(loras.ids):
            return ()
        return tuple(i for i, own in zip(loras.ids, loras.sums, strict=True) if own and self._is_extra(i, own, worker))

    def _is_extra(self, key: str, own_sum: str, worker: WorkerId) -> bool:
        lora, parts = self._loras.get(key), split_lora_id(key)
        if parts is None or (lora is not None and should_have(lora, worker)):
            return False
        return self._past.get(parts, "")[:SHORT_SUM_CHARS] == own_sum

    def uses(self, key: str) -> bool:
        """Whether an adapter that the fleet has comes from this object of the store."""
        return any(getattr(one.source, "key", None) == key for one in self._loras.values())

    # -- what outlives a leader ---------------------------------------------------------------------------------------

    def mark(self, term: int) -> LoraMark:
        """All of it, to be written down."""
        past = tuple(PastRevision(name=n, revision=r, checksum=c) for (n, r), c in self._past.items())
        return LoraMark(term=term, op_id=self.op_id, loras=self.loras, past=past)

    def restore(self, mark: LoraMark | None, entries: Iterable[JournalEntry]) -> None:
        """What the leader before knew: its mark, and the ops since, which it may not have lived to count."""
        if mark is not None:
            for past in mark.past:
                self.give(past.name, past.revision, past.checksum)
            for one in mark.loras:
                self.add(one)
            self.op_id = mark.op_id
        entries = tuple(entries)
        is_new = mark is None or mark.op_id is None
        # The last op that counts has left the journal: what came since has changed nothing but the numbers given.
        has_left = all(entry.item.op_id != (mark and mark.op_id) for entry in entries)
        for entry in entries:
            if is_new or has_left:
                self._recall_number(entry)
            if is_new:
                self._recall(entry)
            is_new = is_new or entry.item.op_id == (mark and mark.op_id)

    def _recall_number(self, entry: JournalEntry) -> None:
        parts = split_lora_id(entry.item.what or "")
        if isinstance(entry.request, LoadLoraFleet) and parts is not None:
            self.give(*parts, entry.request.checksum)

    def _recall(self, entry: JournalEntry) -> None:
        request, report = entry.request, entry.report
        parts = split_lora_id(entry.item.what or "")
        if isinstance(request, LoadLoraFleet) and parts is not None:
            outcomes = () if report is None else report.outcomes
            # Those whom it was for.
            own = [o for o in outcomes if not (request.where_possible and o.outcome is Outcome.SKIPPED)]
            if own and all(o.outcome is Outcome.OK for o in own) and not request.is_catch_up:
                self.add(fleet_lora(request, parts[1], entry.item.began_at))
                evicted = () if report is None or report.lora is None else report.lora.evicted
                self.take(evicted, request.op_id, request.target)
        elif isinstance(request, UnloadLoraFleet) and report is not None and report.lora is not None:
            ids = {*report.lora.ids, *report.lora.partly}.difference(entry.freeing or ())
            self.take(ids, request.op_id, request.target)


def should_have(lora: FleetLora, worker: WorkerId) -> bool:
    """Whether this worker is to be given the adapter: as `reach` says, but cheap, for it is asked often."""
    component, target = split_worker_id(worker)[0], lora.target
    if worker in lora.also_on:
        return True
    if worker in lora.not_on or component in lora.not_on:
        return False
    named = worker in (target.workers or ()) or component in (target.components or ())
    return named or (target.workers is None and target.components is None)


def is_freeing(lora: FleetLora, target: Target, before: Sequence[WorkerStatus]) -> bool:
    """Whether an unload on a part of an adapter's workers, with these statuses before it, took only copies from other
    bytes under its name, or from such as nobody knows: then these workers are still to be given the fleet's. Pure.
    """
    is_part, key = reach(lora) - reach_of(target) != NOBODY, lora_id(lora.name, lora.revision)
    return is_part and bool(before) and all(has_other_bytes(key, lora.checksum, status) for status in before)


def may_have_freed(lora: FleetLora, target: Target, now: Sequence[WorkerStatus]) -> bool:
    """The same of an unload that may be done already, and of which nobody wrote down what it took: so if it named the
    workers, as one is told to that takes other bytes, and none of them may have the fleet's. Rather given once too
    often than lacked for ever. Pure.
    """
    if target.components is not None or reach(lora) - reach_of(target) == NOBODY:
        return False
    key = lora_id(lora.name, lora.revision)
    return bool(now) and all(
        has_other_bytes(key, lora.checksum, status) or (status.loras is not None and key not in status.loras.ids)
        for status in now
    )


def has_other_bytes(key: str, checksum: str, status: WorkerStatus) -> bool:
    """Whether a worker says that it has this adapter from other bytes, or from such as nobody knows. Pure."""
    return _sum_of(key, status) not in (None, checksum[:SHORT_SUM_CHARS])


def has_bytes(key: str, checksum: str, status: WorkerStatus) -> bool:
    """Whether a worker says that it has this adapter from these bytes. Pure."""
    return _sum_of(key, status) == checksum[:SHORT_SUM_CHARS]


def _sum_of(key: str, status: WorkerStatus) -> str | None:
    """What a worker says of an adapter's bytes; None: it hasn't got it, or names no checksums."""
    loras = status.loras
    if loras is None or key not in loras.ids or len(loras.sums) != len(loras.ids):
        return None
    return loras.sums[loras.ids.index(key)]


def fleet_lora(request: LoadLoraFleet, revision: int, at: float) -> FleetLora:
    """What the fleet has after this request. `at` in Unix seconds."""
    return FleetLora(
        name=request.name,
        revision=revision,
        checksum=request.checksum,
        source=request.source,
        since=at,
        op_id=request.op_id,
        target=request.target,
    )


def revisions_on(name: str, statuses: Iterable[WorkerStatus]) -> set[int]:
    """The revisions of a name that workers say they have."""
    found: set[int] = set()
    for status in statuses:
        for one in () if status.loras is None else status.loras.ids:
            parts = split_lora_id(one)
            if parts is not None and parts[0] == name:
                found.add(parts[1])
    return found


def gone_for(lora: FleetLora, revisions: Iterable[int], lists: Sequence[LorasData]) -> tuple[str, ...]:
    """Which of the fleet's `revisions` of a name had to go for a newer one that all of these engines have: those that
    none of them lists any more. Pure.
    """
    listed = {(view.name, view.revision) for data in lists for view in data.loras}
    older = sorted(revision for revision in revisions if revision < lora.revision)
    return tuple(lora_id(lora.name, revision) for revision in older if (lora.name, revision) not in listed)
