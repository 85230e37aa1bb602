"""What a new leader does with an op about adapters that the one before left unfinished: finish it, or take it back.

A load that every member shows is the fleet's; any other is unloaded where it is, since nobody may serve what the others
don't have, and whatever had to go for it is given back by the catch-up. An unload is asked for once more: it only goes
forward. Then everybody whom the op has paused is let go.
"""

import msgspec

from rlbus.controller.causes import fault
from rlbus.controller.line import Line
from rlbus.controller.lora_book import fleet_lora, revisions_on
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


class LoraTakeOver(TakeOver):
    """One load or unload that was left behind. `settle` once, as the work of `op`."""

    def __init__(self, op: Op, line: Line, registry: Registry, entry: JournalEntry, loras: Loras) -> None:
        super().__init__(op, line, registry, entry)
        self._loras = loras
        # What each member's engine has, by its own word.
        self._lists: dict[WorkerId, LorasData] = {}
        self._is_done = False
        # Of a load: its revision, and whether the fleet has it.
        self._revision = 0
        self._is_fleets = False
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
        having = [w for w, data in self._lists.items() if self._shows(data, request)]
        self._is_done = len(having) == len(self._entry.members)
        self._is_fleets = request.is_catch_up or self._loras.book.get(*parts) is not None
        if self._is_fleets:
            return  # nobody is to lose it
        if self._is_done:
            self._is_fleets = True
            lora = fleet_lora(request, self._revision, self._entry.item.began_at)
            gone = self._loras.settled(request, lora, tuple(self._lists.values()))
            self._result = msgspec.structs.replace(self._result, evicted=gone)
            return
        body = UnloadLora(name=name, revision=self._revision, drain_s=0.0)
        await self._until_free("undo", body, list(self._seen))
        await self._list()

    async def _settle_unload(self, request: UnloadLoraFleet) -> None:
        known = set(self._loras.book.revisions(request.name))
        there = known | revisions_on(request.name, self._seen.values())
        revisions = sorted(there) if request.revision is None else [request.revision]
        for revision in revisions:
            body = UnloadLora(name=request.name, revision=revision, drain_s=request.drain_s)
            await self._until_free("unload", body, list(self._seen))
        await self._list()
        served = {
            v.revision
            for data in self._lists.values()
            for v in data.loras
            if v.name == request.name and v.state is not LoraState.DRAINING
        }
        is_heard = len(self._lists) == len(self._entry.members)
        gone = tuple(lora_id(request.name, r) for r in revisions if is_heard and r not in served)
        self._is_done = len(gone) == len(revisions)
        self._result = LoraResult(ids=gone)
        self._loras.unloaded(request, gone)

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
            return Outcome.FAILED, self._nobody_knows("some worker still has it; unload it again")
        if isinstance(request, LoadLoraFleet):
            return self._judge_load(self._lists[worker], request)
        return Outcome.UNDONE, None

    def _judge_load(self, data: LorasData, request: LoadLoraFleet) -> tuple[Outcome, Fault | None]:
        """Of a load that not everybody has: what this one's own list says."""
        own = lora_id(request.name, self._revision)
        if self._is_fleets and self._shows(data, request):
            return Outcome.OK, None
        match next((v.state for v in data.loras if (v.name, v.revision) == (request.name, self._revision)), None):
            case LoraState.LOADED if not self._is_fleets:
                return Outcome.FAILED, self._nobody_knows(f"it still has {own}, which the fleet doesn't: unload it")
            case LoraState.DRAINING if not self._is_fleets:
                why = f"it still has {own}, and takes no requests for it; it unloads it by itself once it can"
                return Outcome.FAILED, self._nobody_knows(why)
            case LoraState.UNSETTLED:
                return Outcome.UNKNOWN, self._nobody_knows(f"its engine doesn't say yet whether it has {own}")
        return Outcome.UNDONE, None

    def _shows(self, data: LorasData, request: LoadLoraFleet) -> bool:
        return shows(data, request.name, self._revision, request.checksum)
