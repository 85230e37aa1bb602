"""What a leader writes down so that the next one can finish it: its ops, and the fleet's version.

Invariants: an op is written before it begins, and isn't begun if that fails; everything later is written behind it, in
order, the newest state of each key. Engines never wait for the store; only reports do, as long as a version or adapters
that the fleet got aren't written. So what is here may lag the fleet by a write, always in the direction
that is safe: an op that had gone further, and wasn't reported, is taken back rather than completed. A write that fails
is tried again while we lead. One that finds another leader's ends our leadership.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from rlbus._clock import Clock
from rlbus._kv import Entry, Kv
from rlbus.codec import decode, encode
from rlbus.errors import BrokenError, ConflictError, DeadlineError, DecodeError, PayloadTooLargeError
from rlbus.schemas import (
    FleetMark,
    FleetSnapshot,
    HistoryItem,
    JournalEntry,
    LoraMark,
    MemberBefore,
    MutationRequest,
    Outcome,
    Report,
    Version,
    WorkerId,
)

_log = logging.getLogger("rlbus.controller")

_T = TypeVar("_T")

OPS = "op"
VERSION_KEY = "version"
LORAS_KEY = "loras"
# Ops that are kept; the oldest goes first.
MAX_ENTRIES = 256
# Entries that are read at once when a leader begins.
READ_BATCH = 32
# Before a write that failed is tried again, in seconds.
RETRY_S = 0.25
# How long what is still unwritten may hold up a clean stop.
FLUSH_S = 1.0


@dataclass(slots=True)
class _Kept:
    """One op here and in the store; `revision` None: not there yet."""

    entry: JournalEntry
    revision: int | None


class Journal:
    """The journal of one leader. `open` it, run `run` beside the controller; the rest is called on the loop."""

    def __init__(self, kv: Kv, clock: Clock, term: int) -> None:
        self.term = term
        self.mark: FleetMark | None = None
        self._kv = kv
        self._clock = clock
        # What was read of a journal that isn't open yet.
        self._found: dict[str, Entry | None] = {}
        # By op id, oldest first.
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._mark_revision: int | None = None
        self.lora_mark: LoraMark | None = None
        self._lora_revision: int | None = None
        self._unwritten: dict[str, None] = {}
        self._to_delete: list[tuple[str, int]] = []
        self._has_work = asyncio.Event()
        self._is_written = asyncio.Event()
        self._is_written.set()

    # -- reading ------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Read everything; if it failed, called again it asks for the rest. Raises: as `Kv`. Cancel: leaves nothing."""
        keys = await self._kv.keys(OPS)
        for start in range(0, len(keys), READ_BATCH):
            await self._read(keys[start : start + READ_BATCH])
        await self._read((VERSION_KEY, LORAS_KEY))
        kept: list[_Kept] = []
        for key in keys:
            there = self._found[key]
            if there is not None and (entry := _readable(there.value, JournalEntry, key)) is not None:
                kept.append(_Kept(entry, there.revision))
        self._kept.clear()
        for one in sorted(kept, key=lambda k: (k.entry.item.term, k.entry.item.began_at)):
            self._kept[one.entry.item.op_id] = one
        mark, loras = self._found[VERSION_KEY], self._found[LORAS_KEY]
        if mark is not None:
            self.mark, self._mark_revision = _readable(mark.value, FleetMark, VERSION_KEY), mark.revision
        if loras is not None:
            self.lora_mark, self._lora_revision = _readable(loras.value, LoraMark, LORAS_KEY), loras.revision
        self._found.clear()

    async def _read(self, keys: Sequence[str]) -> None:
        missing = [key for key in keys if key not in self._found]
        answers = await asyncio.gather(*map(self._kv.get, missing), return_exceptions=True)
        for key, answer in zip(missing, answers, strict=True):
            if not isinstance(answer, BaseException):
                self._found[key] = answer
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    @property
    def entries(self) -> tuple[JournalEntry, ...]:
        """All, oldest first."""
        return tuple(kept.entry for kept in self._kept.values())

    @property
    def left_behind(self) -> tuple[JournalEntry, ...]:
        """Ops of leaders before this one that have no end, oldest first."""
        return tuple(e for e in self.entries if e.item.status is None and e.item.term < self.term)

    @property
    def newest_term(self) -> int:
        """The largest term of a leader that wrote here; 0: none did."""
        marks = [mark.term for mark in (self.mark, self.lora_mark) if mark is not None]
        return max((*marks, *(max(e.item.term, e.item.settled_by or 0) for e in self.entries)), default=0)

    def newest(self, limit: int) -> tuple[HistoryItem, ...]:
        """For people, newest first."""
        return tuple(entry.item for entry in reversed(self.entries[-limit:]))

    # -- writing ------------------------------------------------------------------------------------------------------

    async def begin(
        self,
        request: MutationRequest,
        name: str,
        members: tuple[WorkerId, ...],
        *,
        fleet: Version | None = None,
        before: tuple[MemberBefore, ...] = (),
        held: tuple[WorkerId, ...] = (),
        version: Version | None = None,
        epoch: int | None = None,
        what: str | None = None,
        freeing: tuple[str, ...] | None = None,
    ) -> None:
        """Write down that this op begins, before it does. It may be called again if it failed, before `end`.

        Raises: BrokenError, DeadlineError: it may or may not be written; don't begin, and `end` it. ConflictError:
            another leader wrote it. PayloadTooLargeError: it has too many members. Cancel: as for the first.
        """
        item = HistoryItem(
            op_id=request.op_id,
            op=name,
            caller=request.caller,
            term=self.term,
            began_at=self._clock.now(),
            phase="plan",
            num_workers=len(members),
            version=version,
            epoch=epoch,
            what=what,
        )
        entry = JournalEntry(
            item=item, request=request, members=members, fleet=fleet, before=before, held=held, freeing=freeing
        )
        kept = _Kept(entry, None)
        self._kept[request.op_id] = kept
        self._forget_oldest()
        key = _key(request.op_id)
        try:
            kept.revision = await self._kv.create(key, encode(kept.entry))
        except ConflictError:
            # Ours, of a try whose answer was lost? Anything else is another op, or another leader's.
            there = await self._kv.get(key)
            if there is None or not self._is_begun_here(there.value, request):
                raise
            kept.revision = there.revision

    def take_over(self, op_id: str) -> None:
        """An op that was left behind is ours now. A leader that wakes up and writes about it finds that out."""
        kept = self._kept[op_id]
        item = msgspec.structs.replace(kept.entry.item, settled_by=self.term)
        kept.entry = msgspec.structs.replace(kept.entry, item=item)
        self._soon(_key(op_id))

    def note(
        self, op_id: str, phase: str, *, epoch: int | None = None, verified: tuple[WorkerId, ...] | None = None
    ) -> None:
        """The op came this far."""
        kept = self._kept.get(op_id)
        if kept is None:
            return
        entry = kept.entry
        item = msgspec.structs.replace(entry.item, phase=phase, epoch=entry.item.epoch if epoch is None else epoch)
        kept.entry = msgspec.structs.replace(
            entry, item=item, verified=entry.verified if verified is None else verified
        )
        self._soon(_key(op_id))

    def end(self, report: Report) -> None:
        """The op ended, with this report."""
        kept = self._kept.get(report.op_id)
        if kept is None:
            return
        item = msgspec.structs.replace(
            kept.entry.item,
            ended_at=self._clock.now(),
            status=report.status,
            num_ok=sum(o.outcome is Outcome.OK for o in report.outcomes),
            epoch=kept.entry.item.epoch if report.epoch is None else report.epoch,
            fault=report.fault,
        )
        kept.entry = msgspec.structs.replace(kept.entry, item=item, report=report)
        self._soon(_key(report.op_id))

    def set_version(
        self, version: Version, rolled_back_from: Version | None, snapshot: FleetSnapshot | None = None
    ) -> None:
        """The fleet's version is this now, and `snapshot` what there is of it."""
        mark = FleetMark(term=self.term, version=version, rolled_back_from=rolled_back_from, snapshot=snapshot)
        if self.mark is None or msgspec.structs.replace(self.mark, term=self.term) != mark:
            self.mark = mark
            self._soon(VERSION_KEY)

    def set_loras(self, mark: LoraMark) -> None:
        """The fleet's adapters are these now."""
        self.lora_mark = mark
        self._soon(LORAS_KEY)

    @property
    def is_behind(self) -> bool:
        """Whether what the fleet has now, its version and adapters, is still to be written."""
        return VERSION_KEY in self._unwritten or LORAS_KEY in self._unwritten

    async def written(self, limit_s: float) -> bool:
        """Return when all is written (True), or after `limit_s`. Cancel: leaves the rest unwritten."""
        try:
            async with asyncio.timeout(limit_s):
                await self._is_written.wait()
        except TimeoutError:
            return False
        return True

    async def flush(self) -> None:
        """Return when all is written, or after FLUSH_S. Cancel: leaves the rest unwritten."""
        if not await self.written(FLUSH_S):
            _log.warning("journal: %d entries weren't written in time", len(self._unwritten))

    async def run(self) -> str:
        """Write what changes, until another leader's write is found; says so. Cancel: the rest stays unwritten."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self._unwritten or self._to_delete:
                try:
                    await self._write_next()
                except ConflictError as exc:
                    return f"somebody else writes the journal: {exc}"
                except (BrokenError, DeadlineError) as exc:
                    _log.warning("journal: %s; trying again", exc)
                    await asyncio.sleep(RETRY_S)
            self._is_written.set()

    def _soon(self, key: str) -> None:
        self._unwritten[key] = None
        self._is_written.clear()
        self._has_work.set()

    def _forget_oldest(self) -> None:
        """Only what has ended, or its end would never be written."""
        while len(self._kept) > MAX_ENTRIES:
            op_id = next((o for o, k in self._kept.items() if k.entry.item.status is not None), None)
            if op_id is None:
                return
            gone = self._kept.pop(op_id)
            self._unwritten.pop(_key(op_id), None)
            if gone.revision is not None:
                self._to_delete.append((_key(op_id), gone.revision))
                self._has_work.set()

    async def _write_next(self) -> None:
        if not self._unwritten:
            key, revision = self._to_delete[0]
            await self._kv.delete(key, revision)
            self._to_delete.pop(0)
            return
        key = next(iter(self._unwritten))
        if key == VERSION_KEY:
            assert self.mark is not None
            mark = self.mark
            self._mark_revision = await self._put(key, encode(mark), self._mark_revision)
            if mark is self.mark:
                self._unwritten.pop(key, None)
            return
        if key == LORAS_KEY:
            loras = self.lora_mark
            assert loras is not None
            try:
                self._lora_revision = await self._put(key, encode(loras), self._lora_revision)
            except PayloadTooLargeError as exc:  # hundreds of adapters from folders with very long paths
                _log.error("journal: %s; the fleet's adapters aren't written", exc)
            if loras is self.lora_mark:
                self._unwritten.pop(key, None)
            return
        kept = self._kept.get(key.removeprefix(f"{OPS}."))
        if kept is None:
            self._unwritten.pop(key, None)
            return
        entry = kept.entry
        try:
            kept.revision = await self._put(key, _encoded(entry), kept.revision)
        except PayloadTooLargeError as exc:
            _log.error("journal: %s; op %s isn't written", exc, entry.item.op_id)
        if entry is kept.entry:
            self._unwritten.pop(key, None)

    async def _put(self, key: str, value: bytes, revision: int | None) -> int:
        """Write over `revision`; over another one if that is our own, of a try whose answer was lost.

        Raises: ConflictError: another leader's write stands there.
        """
        try:
            if revision is None:
                return await self._kv.create(key, value)
            return await self._kv.update(key, value, revision)
        except ConflictError:
            there = await self._kv.get(key)
            if there is None:
                if revision is None:
                    raise
                return await self._kv.create(key, value)
            if self._is_foreign(key, there.value):
                raise
            return await self._kv.update(key, value, there.revision)

    def _is_begun_here(self, value: bytes, request: MutationRequest) -> bool:
        """Whether it says that this leader began this op, and nothing more."""
        try:
            entry: JournalEntry = decode(value, JournalEntry, OPS)
        except DecodeError:
            return False
        return entry.item.term == self.term and entry.item.status is None and entry.request == request

    def _is_foreign(self, key: str, value: bytes) -> bool:
        """Whether a leader after this one wrote it."""
        try:
            if key == VERSION_KEY:
                mark: FleetMark = decode(value, FleetMark, key)
                return mark.term > self.term
            if key == LORAS_KEY:
                loras: LoraMark = decode(value, LoraMark, key)
                return loras.term > self.term
            entry: JournalEntry = decode(value, JournalEntry, key)
        except DecodeError:
            return True
        return max(entry.item.term, entry.item.settled_by or 0) > self.term


def _key(op_id: str) -> str:
    return f"{OPS}.{op_id}"


def _readable(value: bytes, as_type: type[_T], key: str) -> _T | None:
    """What stands there; None, and the log says so, if it can't be read: an op is left alone, a mark written anew with
    the next change. No leader ends for it, since the next one would, too.
    """
    try:
        found: _T = decode(value, as_type, key)
    except DecodeError as exc:
        _log.error("journal: %s; going on without it", exc)
        return None
    return found


def _encoded(entry: JournalEntry) -> bytes:
    """An entry whose report fits no message keeps the outcomes that aren't ok without their data, or none."""
    try:
        return encode(entry)
    except PayloadTooLargeError:
        report = entry.report
        if report is None:
            raise
    bad = tuple(msgspec.structs.replace(o, data=None) for o in report.outcomes if o.outcome is not Outcome.OK)
    try:
        return encode(msgspec.structs.replace(entry, report=msgspec.structs.replace(report, outcomes=bad)))
    except PayloadTooLargeError:
        return encode(msgspec.structs.replace(entry, report=msgspec.structs.replace(report, outcomes=())))
