"""The adapters of one fleet: takes requests about them, runs them as ops, keeps the book of what the fleet has."""

import asyncio
import logging
from collections.abc import Collection, Sequence

from rlbus._objects import Objects
from rlbus.bus import Bus
from rlbus.controller import admission
from rlbus.controller.causes import fault
from rlbus.controller.desk import Desk, Record, Running
from rlbus.controller.frontend import Frontend
from rlbus.controller.leases import LEASE_S
from rlbus.controller.limits import ENDING_STEP_S
from rlbus.controller.line import Line
from rlbus.controller.lora_book import LoraBook, fleet_lora, gone_for, is_freeing, revisions_on
from rlbus.controller.lora_run import LoadRun, UnloadRun, evicted
from rlbus.controller.lora_state import LoadPlan, LoadState
from rlbus.controller.lora_unload import UnloadPlan
from rlbus.controller.lora_where import check_routes, chosen, spared, takes_loras, with_spared
from rlbus.controller.op import Op
from rlbus.controller.op_ids import PAUSE_STEP, derive
from rlbus.controller.registry import Member
from rlbus.controller.succession import Succession
from rlbus.errors import RLBusError
from rlbus.schemas import (
    Fault,
    FaultCode,
    FleetLora,
    LoadLoraFleet,
    LoraResult,
    LorasData,
    LoraSource,
    ObjectSource,
    Report,
    UnloadLoraFleet,
    WorkerId,
    lora_id,
)

_log = logging.getLogger("rlbus.controller")


class Loras:
    """Adapters of one controller. `load` and `unload` take a request that may begin now, and say why it doesn't.

    `frontend` has to show what is loaded (None: there is none to ask). `succession` is what writes it down. What is
    unloaded is deleted from `objects`.
    """

    def __init__(
        self,
        bus: Bus,
        line: Line,
        desk: Desk,
        *,
        frontend: Frontend | None,
        succession: Succession | None,
        objects: Objects | None,
    ) -> None:
        self.book = LoraBook()
        self._bus = bus
        self._line = line
        self._registry = line.registry
        self._namespace = line.namespace
        self._desk = desk
        self._frontend = frontend
        self._succession = succession
        self._objects = objects

    def restore(self) -> None:
        """Know what the leader before knew. Called before anything begins."""
        if self._succession is not None:
            journal = self._succession.journal
            self.book.restore(journal.lora_mark, journal.entries)

    # -- load ---------------------------------------------------------------------------------------------------------

    def load(self, request: LoadLoraFleet, reply: str | None, name: str) -> Fault | None:
        """Begin to load; why it isn't begun."""
        addressed = self._registry.addressable(request.target)
        members, left_out = chosen(addressed, request), spared(addressed, request)
        is_hot_swap = request.hot_swap and all(_can_hot_swap(m) for m in members)
        missing = check_routes(members, request, with_pause=not is_hot_swap and not request.is_catch_up)
        if missing is not None:
            return missing
        if (sleeping := admission.check_awake(members)) is not None:
            return sleeping
        revision = request.revision or self.book.next_revision(request.name, [m.status for m in members])
        problem = self.book.problem(request.name, revision, request.checksum) or self._source_problem(request)
        if problem is None and request.is_catch_up and self.book.get(request.name, revision) is None:
            message = f"no catch-up of {lora_id(request.name, revision)}: the fleet doesn't have it"
            problem = fault(FaultCode.WRONG_STATE, message)
        if problem is not None:
            return problem
        self.book.give(request.name, revision, request.checksum)
        self._keep()  # a load that fails leaves the journal, and its number stays given
        op = Op(self._bus, self._namespace, request, name)
        held = admission.held(members)
        plan = LoadPlan(
            name=request.name,
            revision=revision,
            checksum=request.checksum,
            source=request.source,
            workers=tuple(m.worker for m in members),
            owner=derive(op.op_id, PAUSE_STEP),
            lease_s=LEASE_S,
            held=frozenset(held),
            pause_mode=request.pause_mode,
            is_hot_swap=is_hot_swap,
            evict_idle=request.evict_idle,
            is_catch_up=request.is_catch_up,
            has_frontend=self._frontend is not None,
            kept=self.book.kept(),
        )
        before = {lora_id(one.name, one.revision): one for one in self.book.loras}

        async def work(_: Running) -> Report:
            run = LoadRun(op, self._line, plan, self._frontend, lambda state: self._committed(request, state))
            report = await run.run()
            gone = () if report.lora is None else report.lora.evicted
            await self._delete([request.source, *(one.source for i, one in before.items() if i in gone)])
            return with_spared(report, left_out)

        record = self._record(request, name, members, what=plan.id, held=held)
        self._desk.begin(op, reply, work, is_mutation=True, record=record)
        return None

    def _committed(self, request: LoadLoraFleet, state: LoadState) -> None:
        """Every worker shows it: from now on it is the fleet's, and what had to go for it, on any worker of the target,
        is nobody's of the target any more.
        """
        if request.is_catch_up:
            return
        self.book.add(fleet_lora(request, state.plan.revision, self._bus.clock.now()))
        self.book.take(evicted(state), request.op_id, request.target)
        self._keep()

    def _source_problem(self, request: LoadLoraFleet) -> Fault | None:
        source = request.source
        if not isinstance(source, ObjectSource):
            return None
        if not source.has_good_key:
            return fault(FaultCode.BAD_MESSAGE, "the key of its object is no checksum", key=source.key)
        if source.bucket != self._namespace:
            message = f"its object lies in the store of {source.bucket}, this is {self._namespace}"
            return fault(FaultCode.BAD_MESSAGE, message, bucket=source.bucket)
        return None

    # -- unload -------------------------------------------------------------------------------------------------------

    def unload(self, request: UnloadLoraFleet, reply: str | None, name: str) -> Fault | None:
        """Begin to unload; why it isn't begun."""
        members = [m for m in self._registry.addressable(request.target) if "unload_lora" in m.descriptor.routes]
        if not members:
            message = "nobody of the target serves unload_lora"
            return fault(FaultCode.NO_ROUTE, message, route="unload_lora")
        if (sleeping := admission.check_awake(members)) is not None:
            return sleeping
        there = revisions_on(request.name, [m.status for m in members]) | set(self.book.revisions(request.name))
        revisions = tuple(sorted(there)) if request.revision is None else (request.revision,)
        if not revisions:
            known = ", ".join(lora_id(one.name, one.revision) for one in self.book.loras) or "none"
            return fault(FaultCode.WRONG_STATE, f"no revision of {request.name} is loaded; the fleet has {known}")
        op = Op(self._bus, self._namespace, request, name)
        plan = UnloadPlan(request.name, revisions, tuple(m.worker for m in members), request.drain_s)
        before = [m.status for m in members]
        loras = self.book.of(lora_id(request.name, revision) for revision in revisions)
        freeing = tuple(i for i, one in loras.items() if is_freeing(one, request.target, before))

        async def work(_: Running) -> Report:
            report = await UnloadRun(op, self._line, plan).run()
            assert report.lora is not None
            known = [m.worker for m in self._registry.members() if takes_loras(m)]
            await self._delete(self.unloaded(request, report.lora, freeing, known))
            return report

        what = lora_id(request.name, revisions[0]) if len(revisions) == 1 else request.name
        record = self._record(request, name, members, what=what, freeing=freeing)
        self._desk.begin(op, reply, work, is_mutation=True, record=record)
        return None

    def unloaded(
        self,
        request: UnloadLoraFleet,
        result: LoraResult,
        freeing: Collection[str],
        known: Collection[WorkerId] | None = None,
    ) -> tuple[LoraSource, ...]:
        """Nobody of the target is given these any more, also where one could not be let go; where they came from.
        `freeing`: those of which only other bytes went, so they are to be given them still. `known` as in
        `LoraBook.take`.
        """
        ids = {*result.ids, *result.partly}.difference(freeing)
        taken = self.book.take(ids, request.op_id, request.target, known)
        self._keep()
        return tuple(one.source for one in taken.values())

    # -- what is kept -------------------------------------------------------------------------------------------------

    def settled(self, request: LoadLoraFleet, lora: FleetLora, lists: Sequence[LorasData]) -> tuple[str, ...]:
        """A load that a leader before us had begun turned out to be done everywhere; what had to go for it, by the
        lists of all its workers.
        """
        gone = gone_for(lora, self.book.revisions(lora.name), lists)
        self.book.add(lora)
        taken = self.book.take(gone, request.op_id, request.target)
        self._keep()
        return tuple(taken)

    def _keep(self) -> None:
        if self._succession is not None:
            self._succession.journal.set_loras(self.book.mark(self._line.term))

    def _record(
        self,
        request: LoadLoraFleet | UnloadLoraFleet,
        name: str,
        members: Sequence[Member],
        *,
        what: str,
        held: Sequence[str] = (),
        freeing: tuple[str, ...] | None = None,
    ) -> Record | None:
        if self._succession is None:
            return None
        return self._succession.record(request, name, members, held=held, what=what, freeing=freeing)  # type: ignore[arg-type]

    async def _delete(self, sources: Sequence[LoraSource]) -> None:
        """Free the store of objects that no adapter of the fleet comes from; they would end by themselves, too.

        Within the op, so that whoever puts the same bytes after it finds them there; all together have as long as one
        step at the op's end. Cancel: some may be gone.
        """
        objects = [s for s in sources if isinstance(s, ObjectSource) and s.has_good_key]
        keys = [s.key for s in objects if not self.book.uses(s.key)]
        try:
            async with asyncio.timeout(ENDING_STEP_S):
                for key in keys:
                    await self._free(key)
        except TimeoutError:
            _log.warning("the store doesn't answer; objects of %s may stay, and end by themselves", ", ".join(keys))

    async def _free(self, key: str) -> None:
        if self._objects is None:
            return
        try:
            await self._objects.delete(key)
        except RLBusError as exc:
            _log.warning("object %s isn't deleted, and ends by itself: %s", key, exc)


def _can_hot_swap(member: Member) -> bool:
    loras = member.status.loras
    return loras is not None and loras.can_hot_swap
