"""What a new leader does with an op about adapters that the one before left unfinished: finish it, or take it back.

A load that every member shows is the fleet's, for all of them; any other is unloaded where it is and wasn't before,
since nobody may serve what the others don't have. Requests that are on it there end by themselves; whatever had to go
for it is given back by the catch-up, and nothing is taken that somebody else put there. An unload is asked for once
more: it only goes forward. Then everybody whom the op has paused is let go.
"""

from collections.abc import Collection, Sequence

import msgspec

from rlbus.controller.causes import fault
from rlbus.controller.limits import ENDING_STEP_S
from rlbus.controller.line import Line
from rlbus.controller.lora_book import fleet_lora, has_other_bytes, may_have_freed, revisions_on, should_have
from rlbus.controller.lora_state import shows
from rlbus.controller.lora_where import spared, with_spared
from rlbus.controller.loras import Loras
from rlbus.controller.op import Op
from rlbus.controller.registry import Registry
from rlbus.controller.takeover import PHASE, TakeOver
from rlbus.schemas import (
    Fault,
    FaultCode,
    GetLoras,
    JournalEntry,
    LoadLoraFleet,
    LoraResult,
    LorasData,
    LoraState,
    Outcome,
    Report,
    UnloadLora,
    UnloadLoraFleet,
    WorkerId,
    WorkerStatus,
    lora_id,
    split_lora_id,
)

# What an engine does with an adapter that it has let go.
LET_GO = (None, LoraState.DRAINING)
# How long an unload goes on with those that answer when its time is used up: for healthy ones, which take milliseconds.
MAX_LATE_S = 2 * ENDING_STEP_S


class LoraTakeOver(TakeOver):
    """One load or unload that was left behind. `settle` once, as the work of `op`."""

    def __init__(self, op: Op, line: Line, registry: Registry, entry: JournalEntry, loras: Loras) -> None:
        super().__init__(op, line, registry, entry)
        self._loras = loras
        # What each member's engine has, by its own word.
        self._lists: dict[WorkerId, LorasData] = {}
        self._is_done = False
        # Of an unload: the revisions that are to go.
        self._wanted: Sequence[int] = ()
        # Of a load: its revision, and for which members the fleet has it.
        self._revision = 0
        self._meant: frozenset[WorkerId] = frozenset()
        # Of a load that is taken back: who has said that it lets it go.
        self._unloaded: frozenset[WorkerId] = frozenset()
        self._result: LoraResult | None = None

    async def settle(self) -> Report:
        """Settle it; the report. Cancel: what is being asked is dropped; the next leader finds it as it is then."""
        request = self._entry.request
        self._op.enter(PHASE, total=len(self._entry.members))
        async with self._renewing():
            await self._await_members()
            await self._look()
            if isinstance(request, LoadLoraFleet):
                await self._settle_load(request)
            elif isinstance(request, UnloadLoraFleet):
                await self._settle_unload(request)
            await self._free(may_be_old=True)
        report = msgspec.structs.replace(self._report(), lora=self._result)
        if not isinstance(request, LoadLoraFleet):
            return report
        left_out = spared(self._registry.addressable(request.target), request)
        return with_spared(report, [one for one in left_out if one.worker not in self._entry.members])

    async def _settle_load(self, request: LoadLoraFleet) -> None:
        parts = split_lora_id(self._entry.item.what or "")
        assert parts is not None
        name, self._revision = parts
        self._result = LoraResult(ids=(lora_id(*parts),), checksum=request.checksum)
        await self._await_loads()
        await self._list()
        known, members = self._loras.book.get(*parts), self._entry.members
        having = [w for w, data in self._lists.items() if self._shows(data, request)]
        self._is_done = len(having) == len(members)
        meant = [w for w in members if request.is_catch_up or (known is not None and should_have(known, w))]
        if self._is_done and not request.is_catch_up:
            meant = list(members)
            lora = fleet_lora(request, self._revision, self._entry.item.began_at)
            gone = self._loras.settled(request, lora, tuple(self._lists.values()))
            self._result = msgspec.structs.replace(self._result, evicted=gone)
        self._meant = frozenset(meant)
        mine = [w for w in self._seen if w not in self._meant and self._may_have(w, request)]
        if mine:
            # Requests may be on it: moved to it by a hot swap, or promised their time before the load.
            answers = await self._answers("undo", UnloadLora(name=name, revision=self._revision), mine)
            self._unloaded = frozenset(w for w, answer in answers.items() if answer.is_ok)
            await self._list()

    def _had(self, worker: WorkerId) -> bool:
        """Whether it served it before the load, from the same bytes."""
        before = self._before.get(worker)
        return before is not None and before.has_lora

    def _may_have(self, worker: WorkerId, request: LoadLoraFleet) -> bool:
        """Whether the load may have put it there, or still does; what was there before isn't touched, nor what takes no
        requests any more.
        """
        if self._had(worker):
            return False
        data, status = self._lists.get(worker), self._seen[worker]
        if data is None:
            return not has_other_bytes(lora_id(request.name, self._revision), request.checksum, status)
        state = _state(data, request.name, self._revision)
        if state is None:
            return status.op_id is not None  # may still load it
        return state is LoraState.UNSETTLED or self._shows(data, request)

    async def _settle_unload(self, request: UnloadLoraFleet) -> None:
        before = list(self._seen.values())
        there = {*self._loras.book.revisions(request.name), *revisions_on(request.name, before)}
        self._wanted = sorted(there) if request.revision is None else [request.revision]
        freeing = self._freeing(request, before)
        asked = await self._unload(request, self._wanted)
        await self._list()
        is_whole = len(self._lists) == len(self._entry.members)
        gone: list[str] = []
        partly: list[str] = []
        for revision in self._wanted:
            states = [_state(data, request.name, revision) for data in self._lists.values()]
            are_gone, was_asked = [state in LET_GO for state in states], revision in asked
            if was_asked and is_whole and all(are_gone):
                gone.append(lora_id(request.name, revision))
            elif any(are_gone) or (was_asked and not (is_whole and set(states) == {LoraState.LOADED})):
                partly.append(lora_id(request.name, revision))  # those not asked now may be, by the leader before
        self._is_done = len(gone) == len(self._wanted)
        self._result = LoraResult(ids=tuple(gone), partly=tuple(partly))
        self._loras.unloaded(request, self._result, freeing)

    def _freeing(self, request: UnloadLoraFleet, now: Sequence[WorkerStatus]) -> Collection[str]:
        """Those that stay the fleet's, since other bytes went under their names: these may be gone already."""
        if self._entry.freeing is not None:
            return self._entry.freeing
        known = self._loras.book.of(lora_id(request.name, revision) for revision in self._wanted)
        return [i for i, one in known.items() if may_have_freed(one, request.target, now)]

    async def _unload(self, request: UnloadLoraFleet, revisions: Sequence[int]) -> Sequence[int]:
        """Ask for one after the other; those that were asked for.

        Each step has a moment still when the time is used up, so then nobody is asked again who let one pass.
        """
        workers, late_until_s = list(self._seen), self._until_s + MAX_LATE_S
        for place, revision in enumerate(revisions):
            if not workers or self._op.stopped.is_set() or self._loop.time() >= late_until_s:
                return revisions[:place]
            body = UnloadLora(name=request.name, revision=revision, drain_s=request.drain_s)
            answers = await self._answers("unload", body, workers)
            if self._loop.time() >= self._until_s:
                workers = [w for w in workers if answers[w].outcome is not Outcome.UNKNOWN]
        return revisions

    async def _list(self) -> None:
        answers = await self._ask("list", GetLoras(), list(self._seen))
        self._lists = {w: a.data for w, a in answers.items() if isinstance(a.data, LorasData)}

    def _judge(self, worker: WorkerId, status: WorkerStatus) -> tuple[Outcome, Fault | None]:
        if self._is_held_by_op(status, None):
            return Outcome.FAILED, fault(FaultCode.CONTROLLER_LOST, "its controller died; it stays paused")
        if worker not in self._lists:
            return Outcome.UNKNOWN, self._nobody_knows("its engine didn't say which adapters it has")
        if self._is_done:
            return Outcome.OK, None
        request = self._entry.request
        if isinstance(request, UnloadLoraFleet):
            states = (_state(self._lists[worker], request.name, revision) for revision in self._wanted)
            if all(state in LET_GO for state in states):
                return Outcome.OK, None
            return Outcome.FAILED, self._nobody_knows("it still has it; unload it again")
        if isinstance(request, LoadLoraFleet):
            return self._judge_load(worker, request)
        return Outcome.UNDONE, None

    def _judge_load(self, worker: WorkerId, request: LoadLoraFleet) -> tuple[Outcome, Fault | None]:
        """Of a load that not everybody has: what this one's own list says."""
        data = self._lists[worker]
        own, is_meant = lora_id(request.name, self._revision), worker in self._meant
        if is_meant and self._shows(data, request):
            return Outcome.OK, None
        match _state(data, request.name, self._revision):
            case LoraState.LOADED if self._shows(data, request) and not self._had(worker):
                return Outcome.FAILED, self._nobody_knows(f"it still has {own}, which the fleet doesn't: unload it")
            case LoraState.DRAINING if not is_meant and worker not in self._unloaded:
                why = f"it still has {own}, and takes no requests for it; it unloads it by itself once it can"
                return Outcome.FAILED, self._nobody_knows(why)
            case LoraState.UNSETTLED:
                return Outcome.UNKNOWN, self._nobody_knows(f"its engine doesn't say yet whether it has {own}")
        return Outcome.UNDONE, None

    def _shows(self, data: LorasData, request: LoadLoraFleet) -> bool:
        return shows(data, request.name, self._revision, request.checksum)


def _state(data: LorasData, name: str, revision: int) -> LoraState | None:
    """What an engine does with a revision; None: it hasn't got it."""
    return next((v.state for v in data.loras if (v.name, v.revision) == (name, revision)), None)
