"""What workers have of adapters beyond what their status names, by their own lists.

A status names MAX_STATUS_IDS of them at most. Whether a worker has one beyond those its own list tells: it is asked
once for each boot, after each op about adapters, and now and then. Invariant: one question at a time, to MAX_AT_ONCE
workers at most.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
# How long a worker may take to list its adapters, and how long one that didn't isn't asked again, in seconds.
ASK_S = 5.0
AGAIN_S = 5.0
# How long a list counts that no op of the fleet has changed, in seconds: an engine may lose one by itself.
KEEP_S = 300.0


@dataclass(frozen=True, slots=True)
class Listed:
    """What one boot of a worker has: id -> the first digits of the checksum ("": nobody knows its bytes).

    `turn`: that in which it was asked. `until_s`: how long it counts, in loop time.
    """

    boot_id: str
    turn: int
    until_s: float
    sums: Mapping[str, str] | None = None


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
        self._asking: asyncio.Task[None] | None = None

    def sums_of(self, member: Member) -> Mapping[str, str] | None:
        """What it has, as far as it was heard last; None: it never said."""
        listed = self._listed.get(member.worker)
        return None if listed is None or listed.boot_id != member.boot_id else listed.sums

    def is_new(self, member: Member) -> bool:
        """Whether what it said last still counts."""
        listed = self._listed.get(member.worker)
        if listed is None or listed.boot_id != member.boot_id or listed.turn != self._turn:
            return False
        return asyncio.get_running_loop().time() < listed.until_s

    def changed(self) -> None:
        """An op runs that may change what workers have."""
        self._turn += 1

    def refresh(self, members: Iterable[Member]) -> None:
        """Ask those of `members` whose list doesn't count any more, unless some are being asked."""
        if self._asking is not None and not self._asking.done():
            return
        old = [m for m in members if not self.is_new(m)][:MAX_AT_ONCE]
        if old:
            self._asking = asyncio.get_running_loop().create_task(
                self._ask({m.worker: m.boot_id for m in old}, self._turn)
            )

    async def aclose(self) -> None:
        """Ask nobody any more. Cancel: leaves nothing."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self, boots: Mapping[WorkerId, str], turn: int) -> None:
        loop = asyncio.get_running_loop()
        limits = limits_until(loop.time() + ASK_S, loop.time())
        try:
            answers = await self._line.ask(GetLoras(), list(boots), op_id=self._line.bus.new_id(), limits=limits)
        except RLBusError as exc:
            _log.info("the lists of adapters of %d workers weren't read: %s", len(boots), exc)
            answers = {}
        now_s = loop.time()
        self._listed = {w: one for w, one in self._listed.items() if self._line.registry.get(w) is not None}
        for worker, boot_id in boots.items():
            answer = answers.get(worker)
            if answer is not None and isinstance(answer.data, LorasData):
                self._listed[worker] = Listed(boot_id, turn, now_s + KEEP_S, loaded_sums(answer.data))
            else:
                before = self._listed.get(worker)
                sums = None if before is None or before.boot_id != boot_id else before.sums
                self._listed[worker] = Listed(boot_id, turn, now_s + AGAIN_S, sums)
