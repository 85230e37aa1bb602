"""Requests that take the place of what runs: they begin when it has ended, and it is stopped if it may be.

A catch-up is the controller's own idea, so nobody is ever told `busy` because of it. Nor is a trainer that comes in the
place of one that is gone, because of a step which that one has left running; a finish or a shutdown needs nobody, and
is waited for: cut short, it would leave engines paused between two versions.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.controller.callers import is_missing, may_take_place, needs_caller
from rlbus.controller.causes import fault
from rlbus.controller.desk import Desk, Running
from rlbus.controller.draft import is_draft
from rlbus.controller.op import publish
from rlbus.controller.registry import Member
from rlbus.schemas import (
    Fault,
    FaultCode,
    LoadLoraFleet,
    OpAccepted,
    OpProgress,
    Refusal,
    ReloadFleet,
    Target,
    UpdateWeights,
)

_log = logging.getLogger("rlbus.controller")

# How long a catch-up may take to be taken back before it is dropped as it is, in seconds: what it left on its workers
# is what the next update finds on any torn worker.
GIVE_WAY_S = 10.0
# Requests that wait at the same time; one more is refused as busy.
MAX_WAITING = 32
# Dropped catch-ups that are remembered, for who is still at one.
MAX_DROPPED = 16
# Between two signs of life to who waits. Source: clients ask again after 5 s without one (rlbus._conversation).
TELL_S = 1.0


def is_catch_up(request: object) -> bool:
    """Whether this request only gives workers what the fleet has: its version, or an adapter."""
    return isinstance(request, UpdateWeights | ReloadFleet | LoadLoraFleet) and request.is_catch_up


def keeps_version(request: object) -> bool:
    """Whether this op leaves the fleet's version as it is, whatever version it gave to workers."""
    return is_catch_up(request) or is_draft(request)


class GivingWay:
    """Who waits for what runs to end. `again` takes a request as if it came in then."""

    def __init__(self, bus: Bus, desk: Desk, again: Callable[[Any, Message], None]) -> None:
        self._bus = bus
        self._desk = desk
        self._again = again
        # By op id, in the order in which they came.
        self._waiting: dict[str, tuple[Any, Message]] = {}
        # Whose end they wait for; it was stopped, if it may be.
        self._ending: Running | None = None
        # Catch-ups that were dropped, the newest last.
        self._dropped: deque[str] = deque(maxlen=MAX_DROPPED)
        self._drop_at_s = 0.0
        self._tell_at_s = 0.0

    def takes_place(self, request: Any, message: Message) -> bool:
        """Whether this mutation has to wait for the end of what runs. It comes back through `again`."""
        current = self._desk.mutation
        if current is None or not self._gives_way(current, request):
            return False
        if request.op_id not in self._waiting and len(self._waiting) >= MAX_WAITING:
            return False
        is_first = request.op_id not in self._waiting
        self._waiting[request.op_id] = (request, message)
        if is_first and message.reply is not None:
            publish(self._bus, message.reply, OpAccepted(op_id=request.op_id))
        if current is not self._ending:
            self._end(current, request.op_id)
        return True

    def _gives_way(self, current: Running, request: object) -> bool:
        if is_catch_up(current.op.request):
            return not is_catch_up(request)
        is_ending = current is self._ending or is_missing(current.op, asyncio.get_running_loop().time())
        return is_ending and may_take_place(request, current.op.request)

    def withdraw(self, op_id: str, why: Fault) -> bool:
        """Whether this op waited here; it is refused then."""
        waited = self._waiting.pop(op_id, None)
        if waited is not None and waited[1].reply is not None:
            publish(self._bus, waited[1].reply, Refusal(op_id=op_id, fault=why))
        return waited is not None

    def without_stuck(self, members: Sequence[Member], target: Target) -> tuple[Member, ...]:
        """Whom an update addresses: not those that are still at a catch-up that was dropped, unless they are named.

        An engine that loads a folder can't be stopped, and would refuse the update for everybody. It is caught up
        again when it is done.
        """
        free = [m for m in members if m.worker in (target.workers or ()) or not self._is_stuck(m)]
        return tuple(free or members)

    def _is_stuck(self, member: Member) -> bool:
        op_id = member.status.op_id
        return op_id is not None and any(op_id.startswith(dropped) for dropped in self._dropped)

    def tick(self, now_s: float) -> None:
        """Tell those that wait; drop a catch-up that doesn't end."""
        if self._ending is None:
            return
        if now_s >= self._drop_at_s:
            op_id = self._ending.op.op_id
            why = fault(FaultCode.CANCELLED, f"it didn't end within {GIVE_WAY_S:g} s after it was told to")
            _log.error("op %s: %s", op_id, why.message)
            self._dropped.append(op_id)
            self._desk.drop(op_id, why)
        if now_s >= self._tell_at_s:
            self._tell_at_s = now_s + TELL_S
            for request, message in self._waiting.values():
                if message.reply is not None:
                    publish(self._bus, message.reply, OpProgress(op_id=request.op_id, phase="plan"))

    def _end(self, current: Running, op_id: str) -> None:
        loop = asyncio.get_running_loop()
        # The end of somebody else's step has bounds of its own, and leaves engines as they have to be.
        limit_s = GIVE_WAY_S if is_catch_up(current.op.request) else float("inf")
        self._ending, self._drop_at_s = current, loop.time() + limit_s
        if is_catch_up(current.op.request) or needs_caller(current.op.request):
            current.op.stop(fault(FaultCode.CANCELLED, f"op {op_id} takes its place"))
        assert current.task is not None
        current.task.add_done_callback(self._ended)

    def _ended(self, _: "asyncio.Task[None]") -> None:
        self._ending = None
        waiting, self._waiting = self._waiting, {}
        for request, message in waiting.values():
            self._again(request, message)
