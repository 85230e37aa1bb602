"""Gives workers the adapters that the fleet has and they lack (restarted, new), while nothing else runs.

Admission stays a matter of weights: a worker that lacks an adapter refuses requests that name it, never answers them
with the base model. Invariants: at most one load at a time, of one adapter, on those workers alone; nobody is paused;
any other mutation takes its place. What can't be given (its source is gone, no room) is tried again after ever longer
waits, and shown in the fleet's view until it is there.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from rlbus.bus import Bus
from rlbus.controller.catch_up import FIRST_RETRY_S, MAX_AT_ONCE, MAX_RETRY_S, SETTLE_S
from rlbus.controller.catching_up import CALLER, LOOK_S, RELOAD_DEADLINE_S
from rlbus.controller.desk import Desk
from rlbus.controller.lora_book import LoraBook, should_have
from rlbus.controller.lora_lists import LoraLists, tells_of
from rlbus.controller.op_ids import derive
from rlbus.controller.registry import Member, Registry
from rlbus.schemas import (
    SHORT_SUM_CHARS,
    Fault,
    FaultCode,
    FleetLora,
    FleetView,
    Generation,
    Liveness,
    LoadLoraFleet,
    LoraBehind,
    LorasView,
    MemberView,
    Outcome,
    Report,
    Target,
    UnloadLoraFleet,
    WorkerId,
    lora_id,
)

_log = logging.getLogger("rlbus.controller")

# Why a worker isn't given what it has under the same name.
FOREIGN = "it has one of that name whose bytes aren't known to be the fleet's: unload it there"
# Why it isn't given anything yet.
UNSAID = "its engine hasn't listed its adapters yet; it is asked, and given what it lacks then"
# (worker, its boot, id of the adapter).
Lack = tuple[WorkerId, str, str]


@dataclass(frozen=True, slots=True)
class Attempt:
    """How far giving one adapter to one boot of a worker is. `next_s`: not before, in loop time."""

    next_s: float
    num_failed: int = 0
    why: str | None = None


def lacks(lora: FleetLora, member: Member, registry: Registry, own: Mapping[str, str] | None = None) -> bool:
    """Whether this worker should have the adapter, is awake, can be addressed, and doesn't have it. Pure.

    `own` is its own list (`lora_lists`), which counts where its status doesn't tell; None: it hasn't said. Who has said
    nothing at all counts as one that lacks it.
    """
    if not should_have(lora, member.worker) or member.status.asleep or member.liveness is not Liveness.ALIVE:
        return False
    if not {"load_lora", "list_loras"}.issubset(member.descriptor.routes):
        return False
    return not _has(member.status.loras, lora, own) and registry.refusal(member) is None


def _has(loras: LorasView | None, lora: FleetLora, own: Mapping[str, str] | None) -> bool:
    """Whether a worker says that it has the adapter, and not only its name: from the fleet's bytes."""
    key, checksum = lora_id(lora.name, lora.revision), lora.checksum[:SHORT_SUM_CHARS]
    if loras is None:
        return own is not None and own.get(key) == checksum
    if not tells_of(loras, key):
        return own is None or own.get(key) == checksum
    if key not in loras.ids:
        return False
    if len(loras.sums) != len(loras.ids):
        return True  # an agent before there were sums: its own list tells, when it is asked
    return loras.sums[loras.ids.index(key)] == checksum


def is_foreign(lora: FleetLora, member: Member, own: Mapping[str, str] | None = None) -> bool:
    """Whether a worker that lacks it has one of that name, from other bytes or from such as nobody knows. Pure."""
    loras, key = member.status.loras, lora_id(lora.name, lora.revision)
    if loras is not None and (key in loras.ids or tells_of(loras, key)):
        return key in loras.ids
    return own is not None and key in own


def failed(attempt: Attempt, why: str, now_s: float) -> Attempt:
    """The attempt after one more failure. Pure."""
    wait_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(attempt.num_failed, 16))
    return Attempt(now_s + wait_s, attempt.num_failed + 1, why)


class LoraCatchUps:
    """The adapters' catch-ups of one controller; `tick` it. `begin` takes a request of ours as if it had come in."""

    def __init__(
        self,
        bus: Bus,
        registry: Registry,
        desk: Desk,
        book: LoraBook,
        lists: LoraLists,
        begin: Callable[[LoadLoraFleet], Fault | None],
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._desk = desk
        self._book = book
        self._lists = lists
        # The last op that the book counted when we looked.
        self._op_id = book.op_id
        self._begin = begin
        self._attempts: dict[Lack, Attempt] = {}
        # The running one: its op, and what it is to end.
        self._current: tuple[str, tuple[Lack, ...]] | None = None
        self._look_at_s = float("-inf")

    def tick(self, now_s: float) -> None:
        """See how the running one goes on, or begin one. Called several times a second."""
        self._watch_ops()
        self._lists.learn(self._registry.members())
        if self._current is not None:
            self._check(*self._current, now_s)
            return
        if self._desk.mutation is not None:
            self._look_at_s = now_s + SETTLE_S
            return
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        self._lists.refresh(m for m in self._registry.members() if self._hides_some(m))
        lacking = self._lacking()
        new = Attempt(now_s + SETTLE_S)
        self._attempts = {lack: self._attempts.get(lack, new) for lacks in lacking.values() for lack in lacks}
        for lora_key, lacks_of in lacking.items():
            lora = next(one for one in self._book.loras if lora_id(one.name, one.revision) == lora_key)
            due = [x for x in lacks_of if self._attempts[x].next_s <= now_s and self._is_ready(x[0], lora_key)]
            foreign = {x for x in due if self._is_foreign(x[0], lora)}
            for lack in foreign:  # no op would change that, and each would push another one out of the history
                self._attempts[lack] = Attempt(now_s + LOOK_S, why=FOREIGN)
            # Those above are due at every look: only who is left takes a place.
            given = tuple(x for x in due if x not in foreign)[:MAX_AT_ONCE]
            if given:
                self._give(lora, given, now_s)
                return

    def explain(self, view: FleetView) -> FleetView:
        """The view, with the fleet's adapters and who lacks which."""
        now_s = asyncio.get_running_loop().time()
        members = tuple(self._explained(member, now_s) for member in view.members)
        return msgspec.structs.replace(view, loras=self._book.loras, members=members)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _lacking(self) -> dict[str, tuple[Lack, ...]]:
        members = self._registry.members()
        found: dict[str, tuple[Lack, ...]] = {}
        for lora in self._book.loras:
            key = lora_id(lora.name, lora.revision)
            found[key] = tuple((m.worker, m.boot_id, key) for m in members if self._lacks(lora, m))
        return found

    def _lacks(self, lora: FleetLora, member: Member) -> bool:
        return lacks(lora, member, self._registry, self._lists.sums_of(member))

    def _is_foreign(self, worker: WorkerId, lora: FleetLora) -> bool:
        member = self._registry.get(worker)
        return member is not None and is_foreign(lora, member, self._lists.sums_of(member))

    def _is_ready(self, worker: WorkerId, key: str) -> bool:
        """Whether nothing runs on it, and what it says of this adapter is of now."""
        member = self._registry.get(worker)
        if member is None or member.status.op_id is not None or member.status.generation is Generation.UNKNOWN:
            return False
        loras = member.status.loras
        return (loras is not None and tells_of(loras, key)) or self._lists.is_new(member)

    def _hides_some(self, member: Member) -> bool:
        """Whether its status doesn't tell of all that it should have; one that is asleep is given nothing."""
        loras = member.status.loras
        is_there = member.liveness is Liveness.ALIVE and not member.status.asleep
        if not is_there or "list_loras" not in member.descriptor.routes:
            return False
        return any(
            (loras is None or not tells_of(loras, lora_id(lora.name, lora.revision)))
            and should_have(lora, member.worker)
            for lora in self._book.loras
        )

    def _watch_ops(self) -> None:
        """Lists that were read before an op about adapters don't count any more."""
        mutation = self._desk.mutation
        is_running = mutation is not None and isinstance(mutation.op.request, LoadLoraFleet | UnloadLoraFleet)
        if is_running or self._current is not None or self._op_id != self._book.op_id:
            self._op_id = self._book.op_id
            self._lists.changed()

    def _give(self, lora: FleetLora, due: tuple[Lack, ...], now_s: float) -> None:
        op_id = derive(self._bus.new_id(), CALLER)
        workers = tuple(worker for worker, _, _ in due)
        _log.info("op %s: giving %s to %s", op_id, lora_id(lora.name, lora.revision), ", ".join(workers))
        why = self._begin(
            LoadLoraFleet(
                op_id=op_id,
                deadline_s=RELOAD_DEADLINE_S,
                caller=CALLER,
                name=lora.name,
                revision=lora.revision,
                checksum=lora.checksum,
                source=lora.source,
                target=Target(workers=workers),
                is_catch_up=True,
            )
        )
        self._current = (op_id, due)
        if why is not None:
            self._end(due, now_s, lambda _: why.message)

    def _check(self, op_id: str, due: tuple[Lack, ...], now_s: float) -> None:
        if self._desk.running(op_id) is not None:
            return
        report = self._desk.report_of(op_id)
        if report is None:
            self._end(due, now_s, lambda _: "it ended without a report")
        elif report.fault is not None and report.fault.code is FaultCode.CANCELLED:
            self._current = None  # another op took its place: that counts for nothing
        else:
            self._end(due, now_s, lambda worker: _why(report, worker))

    def _end(self, due: tuple[Lack, ...], now_s: float, why: Callable[[WorkerId], str | None]) -> None:
        self._current = None
        for lack in due:
            problem = why(lack[0])
            if problem is not None and lack in self._attempts:
                _log.warning("%s isn't given %s: %s", lack[0], lack[2], problem)
                self._attempts[lack] = failed(self._attempts[lack], problem, now_s)

    def _explained(self, view: MemberView, now_s: float) -> MemberView:
        member = self._registry.get(view.worker)
        if member is None:
            return view
        behind = tuple(
            LoraBehind(id=lora_id(lora.name, lora.revision), note=self._note(member, lora, now_s))
            for lora in self._book.loras
            if self._lacks(lora, member)
        )
        # Meanwhile an op may be about to give it to the others, or to take it away; and who is silent serves nobody.
        is_settled = self._desk.mutation is None and member.liveness is Liveness.ALIVE
        extra = self._book.extra(view.worker, view.status) if is_settled else ()
        return msgspec.structs.replace(view, loras_behind=behind, loras_extra=extra) if behind or extra else view

    def _note(self, member: Member, lora: FleetLora, now_s: float) -> str:
        lack = (member.worker, member.boot_id, lora_id(lora.name, lora.revision))
        if self._current is not None and lack in self._current[1]:
            return "is given it now"
        if member.status.loras is None and self._lists.sums_of(member) is None:
            return UNSAID
        attempt = self._attempts.get(lack)
        if attempt is None or attempt.why is None:
            return "is given it next"
        if attempt.num_failed == 0:
            return attempt.why
        tries = "once" if attempt.num_failed == 1 else f"{attempt.num_failed} times"
        return f"giving it failed {tries} ({attempt.why}); tried again in {max(0.0, attempt.next_s - now_s):.0f} s"


def _why(report: Report, worker: WorkerId) -> str | None:
    """Why this worker doesn't have it after all, None: it does."""
    outcome = next((o for o in report.outcomes if o.worker == worker), None)
    if outcome is not None and outcome.outcome is Outcome.OK:
        return None
    own = None if outcome is None else outcome.fault
    why = own or report.fault
    return "it ended without a cause" if why is None else why.message
