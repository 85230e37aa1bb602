"""One controller's place in the line of them: what it learns from its predecessor, and leaves to its successor."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from rlbus.bus import Bus
from rlbus.controller.catching_up import CatchUps
from rlbus.controller.causes import fault
from rlbus.controller.desk import Desk, Record, Running
from rlbus.controller.draft import view_of
from rlbus.controller.giving_way import keeps_version
from rlbus.controller.journal import Journal
from rlbus.controller.line import Line
from rlbus.controller.lora_book import has_bytes
from rlbus.controller.op import Op
from rlbus.controller.registry import Member, Registry
from rlbus.controller.takeover import COMMIT_PHASE, TakeOver
from rlbus.controller.transfer_takeover import TransferTakeOver
from rlbus.controller.update_state import Stage, UpdateState
from rlbus.schemas import (
    Fault,
    FaultCode,
    GetHistory,
    HistoryView,
    JournalEntry,
    LoadLoraFleet,
    MemberBefore,
    MutationRequest,
    OpStatus,
    Outcome,
    ReloadFleet,
    Report,
    TransferFleet,
    UnloadLoraFleet,
    UpdateWeights,
    Version,
    WeightsState,
    WorkerId,
    split_worker_id,
)

# What a new leader gives workers to answer its hello before it takes requests: an answer takes milliseconds. It waits
# for the members of an op that was left behind, up to the second number.
SETTLE_S = 0.3
LOOK_S = 1.0
# The answer to whoever asks for a history that nobody keeps.
NO_JOURNAL = fault(FaultCode.WRONG_STATE, "this controller keeps no journal: it was started with --single")


def _before(member: Member, request: Any, what: str | None) -> MemberBefore:
    weights = view_of(member.status, request)
    version = weights.version if weights.state is WeightsState.CLEAN else None
    has_lora = isinstance(request, LoadLoraFleet) and has_bytes(what or "", request.checksum, member.status)
    return MemberBefore(boot_id=member.boot_id, version=version, asleep=member.status.asleep, has_lora=has_lora)


def _went_back(entry: JournalEntry, known: Version) -> bool:
    """Whether it was to set the fleet back from `known`. From a version that the fleet got after it, it didn't."""
    may_go_back = isinstance(entry.request, UpdateWeights | ReloadFleet) and entry.request.allow_rollback
    return may_go_back and entry.fleet == known and entry.item.version != known


def _gave_version(entry: JournalEntry) -> bool:
    """Whether some worker has its version from this op, by its report."""
    if entry.report is None or entry.item.version is None or keeps_version(entry.request):
        return False
    return entry.item.num_ok > 0  # a report that was too large has no outcomes


class Succession:
    """Reads and writes `journal` for one controller. Called on the loop; only `listen` waits.

    `on_committed` is told the version that a settled op turned out to have given to workers, and its request.
    """

    def __init__(
        self,
        journal: Journal,
        bus: Bus,
        namespace: str,
        desk: Desk,
        line: Line,
        catch_ups: CatchUps,
        *,
        on_committed: Callable[[Version, MutationRequest], None],
    ) -> None:
        self.journal = journal
        self._bus = bus
        self._namespace = namespace
        self._desk = desk
        self._line = line
        self._registry: Registry = line.registry
        self._on_committed = on_committed
        self._catch_ups = catch_ups
        # Settles an op about adapters; set by who keeps those.
        self.settle_lora: Callable[[Op, JournalEntry], Awaitable[Report]] | None = None

    def history(self, request: GetHistory) -> HistoryView | Fault:
        """What the journal has."""
        if request.of_op_id is None:
            items, report = self.journal.newest(max(1, request.limit)), None
        else:
            found = [entry for entry in self.journal.entries if entry.item.op_id == request.of_op_id]
            if not found:
                nothing = f"the journal has no op {request.of_op_id} (any more); `rlbus history` shows what it has"
                return fault(FaultCode.UNKNOWN_OP, nothing, op_id=request.of_op_id)
            items, report = (found[0].item,), found[0].report
        return HistoryView(namespace=self._namespace, term=self.journal.term, items=items, report=report)

    # -- what was before ----------------------------------------------------------------------------------------------

    def restore(self) -> tuple[str, ...]:
        """Know what the leader before knew; the components to greet."""
        mark, entries = self.journal.mark, self.journal.entries
        if mark is not None:
            self._registry.restore(mark.version, mark.rolled_back_from)
            self._catch_ups.snapshot = mark.snapshot
        for entry in entries:
            self._registry.saw_epoch(entry.item.epoch or 0)
            if entry.report is not None:
                self._desk.remember(entry.request, entry.report)
        self._recall_version(entries)
        members = self._left_members().union(*(entry.members for entry in entries[-1:]))
        return tuple(sorted({split_worker_id(worker)[0] for worker in members}))

    def _recall_version(self, entries: Sequence[JournalEntry]) -> None:
        """The leader before wrote down that an op ended, and died before it wrote down the version that it gave: the
        newest op that gave one says which it is. What is marked may be newer, by the word of workers.
        """
        entry = next((e for e in reversed(entries) if _gave_version(e)), None)
        if entry is None or entry.item.version is None:
            return
        version, mark = entry.item.version, self.journal.mark
        known = None if mark is None else max(mark.version, mark.rolled_back_from or mark.version)
        if mark is not None and known is not None and version <= known:
            if not _went_back(entry, mark.version):
                return
            self._registry.restore(version, known)
        else:
            self._registry.restore(version, None)
        self._catch_ups.committed(version, entry.request)

    async def listen(self) -> None:
        """Give the workers time to answer the hello, or the first request would find nobody. Cancel: leaves nothing."""
        loop = asyncio.get_running_loop()
        members = self._left_members()
        await asyncio.sleep(SETTLE_S)
        until_s = loop.time() + LOOK_S - SETTLE_S
        while loop.time() < until_s and any(self._registry.get(w) is None for w in members):  # noqa: ASYNC110 - bounded
            await asyncio.sleep(SETTLE_S / 10)

    def begin_takeovers(self) -> None:
        """Settle what was left behind, one after the other, each as an op with the old one's id: whoever asks for that
        again joins it, and others are told `busy`.
        """
        one_at_a_time = asyncio.Lock()
        for entry in self.journal.left_behind:
            self._begin_takeover(entry, one_at_a_time)

    def _begin_takeover(self, entry: JournalEntry, one_at_a_time: asyncio.Lock) -> None:
        op = Op(self._bus, self._namespace, entry.request, entry.item.op)
        self.journal.take_over(op.op_id)

        async def work(_: Running) -> Report:
            if isinstance(entry.request, LoadLoraFleet | UnloadLoraFleet) and self.settle_lora is not None:
                async with one_at_a_time:
                    return await self.settle_lora(op, entry)
            async with one_at_a_time:
                taker = TransferTakeOver if isinstance(entry.request, TransferFleet) else TakeOver
                report, version = await taker(op, self._line, self._registry, entry).run()
            fleet, known = self._registry.version, self._catch_ups.snapshot
            if fleet is not None and fleet == entry.item.version and (known is None or known.version != fleet):
                version = fleet  # somebody said that it had it, and is gone since
            is_newest = version is not None and (fleet is None or version >= fleet or _went_back(entry, fleet))
            if version is not None and is_newest and not keeps_version(entry.request):
                self._on_committed(version, entry.request)
            return report

        self._desk.begin(op, None, work, is_mutation=True)

    def _left_members(self) -> set[WorkerId]:
        return {worker for entry in self.journal.left_behind for worker in entry.members}

    # -- what comes after ---------------------------------------------------------------------------------------------

    def record(
        self,
        request: Any,
        name: str,
        members: Sequence[Member],
        *,
        held: Collection[WorkerId],
        version: Version | None = None,
        epoch: int | None = None,
        what: str | None = None,
        freeing: tuple[str, ...] | None = None,
    ) -> Record:
        """What writes an op down before it begins."""
        names = tuple(m.worker for m in members)
        before, fleet = tuple(_before(m, request, what) for m in members), self._registry.version
        paused = tuple(sorted(held))
        return lambda: self.journal.begin(
            request,
            name,
            names,
            fleet=fleet,
            before=before,
            held=paused,
            version=version,
            epoch=epoch,
            what=what,
            freeing=freeing,
        )

    def note_phase(self, state: UpdateState) -> None:
        """Write down the phases that tell the next leader what may be done; behind the update, which doesn't wait."""
        op_id = state.plan.request.op_id
        if state.stage in (Stage.PAUSE, Stage.RECEIVE):
            epoch = None if state.group is None else state.group.plan.epoch
            self.journal.note(op_id, state.phase, epoch=epoch)
        elif state.stage is Stage.COMMIT:
            self.journal.note(op_id, COMMIT_PHASE, verified=tuple(sorted(state.pending)))

    def keep_version(self) -> None:
        """So that the next leader knows it even if no worker lives to tell (SCENARIOS 11)."""
        if self._registry.version is not None:
            self._find_snapshot(self._registry.version)
            self.journal.set_version(self._registry.version, self._registry.rolled_back_from, self._catch_ups.snapshot)

    def _find_snapshot(self, version: Version) -> None:
        """Workers said that they have `version`, and whoever gave it to them could not: the op that did is in the
        journal, and what the trainer keeps of it is the snapshot.
        """
        known = self._catch_ups.snapshot
        if known is not None and known.version == version:
            return
        given = [e for e in self.journal.entries if e.item.version == version and not keeps_version(e.request)]
        given = [e for e in given if e.item.status is not OpStatus.REFUSED]
        # The one that says so itself; else the newest.
        given.sort(key=lambda e: e.report is not None and any(o.outcome is Outcome.OK for o in e.report.outcomes))
        if given:
            self._catch_ups.committed(version, given[-1].request)
