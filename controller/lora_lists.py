"""What workers have of adapters beyond what their status tells, by their own lists.

A status names MAX_STATUS_IDS of them at most, and none of an engine that takes longer to list them than a heartbeat
waits. Whether a worker has one beyond those its own list tells: it is asked once for each boot, after each op about
adapters, and now and then. Invariants: MAX_AT_ONCE workers are asked at a time at most, each by one question; who
doesn't answer holds up nobody else, comes last, and isn't asked again before AGAIN_S.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlbus.controller.answers import StepAnswer
from rlbus.controller.catch_up import MAX_AT_ONCE
from rlbus.controller.learning import loaded_sums
from rlbus.controller.limits import limits_until
from rlbus.controller.line import Line
from rlbus.controller.registry import Member
from rlbus.errors import RLBusError
from rlbus.schemas import GetLoras, LorasData, LorasView, WorkerId

_log = logging.getLogger("rlbus.controller")

# Adapters that a worker's status names at most, in the order of their names. Source: rlbus.workers.loras.
MAX_STATUS_IDS = 64
# How long a worker may take to list its adapters, and how long one that didn't isn't asked again, in seconds. The first
# is above what its agent gives the engine. Source: rlbus.workers.config.AgentConfig.list_s, 8 s.
ASK_S = 10.0
AGAIN_S = 5.0
# How long a list counts that no op of the fleet has changed, in seconds: an engine may lose one by itself.
KEEP_S = 300.0


@dataclass(frozen=True, slots=True)
class Listed:
    """What one boot of a worker has: id -> the first digits of the checksum ("": nobody knows its bytes).

    `turn`: that in which it was asked. `until_s`: how long it counts, in loop time, or how long it isn't asked again if
    it said nothing: `is_silent`; `sums` are what it said before then.
    """

    boot_id: str
    turn: int
    until_s: float
    sums: Mapping[str, str] | None = None
    is_silent: bool = False


def tells_of(loras: LorasView, key: str) -> bool:
    """Whether a status says if its worker has this adapter: it would be named if it had. Pure."""
    return len(loras.ids) < MAX_STATUS_IDS or key <= loras.ids[-1]


class LoraLists:
    """The lists of one controller's workers. Called on the loop; only `aclose` waits."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._listed: dict[WorkerId, Listed] = {}
        # Grows with each op that may have changed what workers have.
        self._turn = 0
        self._asked: set[WorkerId] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def sums_of(self, member: Member) -> Mapping[str, str] | None:
        """What it has, as far as it was heard last; None: it never said."""
        listed = self._of(member)
        return None if listed is None else listed.sums

    def is_new(self, member: Member) -> bool:
        """Whether what it said last still counts."""
        listed = self._of(member)
        return listed is not None and not listed.is_silent and self._counts(listed)

    def changed(self) -> None:
        """An op runs that may change what workers have."""
        self._turn += 1

    def learn(self, members: Iterable[Member]) -> None:
        """Keep what statuses tell completely, for heartbeats that tell nothing: those of an engine that is slow."""
        until_s = asyncio.get_running_loop().time() + AGAIN_S
        for member in members:
            loras = member.status.loras
            if loras is None or len(loras.ids) >= MAX_STATUS_IDS or len(loras.sums) != len(loras.ids):
                continue
            sums = dict(zip(loras.ids, loras.sums, strict=True))
            before = self._of(member)
            if before is not None and self._counts(before) and before.sums == sums and before.until_s > until_s:
                continue  # its list says the same, and counts for longer
            self._listed[member.worker] = Listed(member.boot_id, self._turn, until_s, sums)

    def refresh(self, members: Iterable[Member]) -> None:
        """Ask those of `members` whose list doesn't count any more, and who aren't being asked."""
        old = [m for m in members if m.worker not in self._asked and self._is_due(m)]
        chosen = sorted(old, key=self._rank)[: MAX_AT_ONCE - len(self._asked)]
        if chosen:
            boots = {m.worker: m.boot_id for m in chosen}
            self._asked |= boots.keys()
            task = asyncio.get_running_loop().create_task(self._ask(boots, self._turn))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Ask nobody any more. Cancel: leaves nothing."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _of(self, member: Member) -> Listed | None:
        listed = self._listed.get(member.worker)
        return None if listed is None or listed.boot_id != member.boot_id else listed

    def _counts(self, listed: Listed) -> bool:
        return listed.turn == self._turn and asyncio.get_running_loop().time() < listed.until_s

    def _is_due(self, member: Member) -> bool:
        listed = self._of(member)
        if listed is not None and listed.is_silent:
            return asyncio.get_running_loop().time() >= listed.until_s  # also after an op: it has said nothing yet
        return listed is None or not self._counts(listed)

    def _rank(self, member: Member) -> tuple[bool, float]:
        """Who didn't answer comes last, whatever the number of such."""
        listed = self._of(member)
        return (False, float("-inf")) if listed is None else (listed.is_silent, listed.until_s)

    async def _ask(self, boots: Mapping[WorkerId, str], turn: int) -> None:
        loop = asyncio.get_running_loop()
        limits = limits_until(loop.time() + ASK_S, loop.time())
        silent = dict(boots)

        def hear(worker: WorkerId, answer: StepAnswer) -> None:
            """At once: it doesn't wait for those that were asked with it."""
            if worker in silent and isinstance(answer.data, LorasData):
                boot_id = silent.pop(worker)
                self._listed[worker] = Listed(boot_id, turn, loop.time() + KEEP_S, loaded_sums(answer.data))
                self._asked.discard(worker)

        try:
            await self._line.ask(GetLoras(), list(boots), op_id=self._line.bus.new_id(), limits=limits, on_outcome=hear)
        except RLBusError as exc:
            _log.info("the lists of adapters of %d workers weren't read: %s", len(silent), exc)
        finally:
            self._asked -= silent.keys()
        self._forget()
        for worker, boot_id in silent.items():
            before = self._listed.get(worker)
            sums = None if before is None or before.boot_id != boot_id else before.sums
            self._listed[worker] = Listed(boot_id, turn, loop.time() + AGAIN_S, sums, is_silent=True)

    def _forget(self) -> None:
        self._listed = {w: one for w, one in self._listed.items() if self._line.registry.get(w) is not None}
