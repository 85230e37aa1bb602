"""Who waits for the fleet to have a certain size, and is told as soon as it has, or what it lacks (SCENARIOS 16)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rlbus.controller.causes import fault
from rlbus.controller.op import Op
from rlbus.controller.registry import Registry
from rlbus.schemas import Fault, FaultCode, FleetView, Liveness, Refusal, WaitReady

# Waits at the same time, in all.
MAX_WAITERS = 256


@dataclass(frozen=True, slots=True)
class Waiter:
    """One `WaitReady`; its `op` is only used to talk to who asked."""

    op: Op
    request: WaitReady


class WaitingRoom:
    """All waits. `view` makes the answer, of at most so many workers (None: all). Called on the loop; never waits."""

    def __init__(self, registry: Registry, view: Callable[[int | None], FleetView]) -> None:
        self._registry = registry
        self._view = view
        self._waiters: dict[str, Waiter] = {}

    def get(self, op_id: str) -> Waiter | None:
        """A wait in progress."""
        return self._waiters.get(op_id)

    def refusal(self, request: WaitReady) -> Fault | None:
        """Why this can't be waited for."""
        sizes = (request.world_size, request.num_workers)
        if any(size is not None and size < 1 for size in sizes):
            return fault(FaultCode.BAD_MESSAGE, "wait for a world size or number of workers of at least 1")
        if len(self._waiters) >= MAX_WAITERS:
            return fault(FaultCode.BUSY, f"{MAX_WAITERS} others wait already", retryable=True)
        return None

    def add(self, waiter: Waiter) -> None:
        """Begin to wait; call `check` next."""
        self._waiters[waiter.op.op_id] = waiter

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._waiters

    def check(self) -> None:
        """The fleet changed, or time passed: answer whoever has what they wait for, and whose time is over."""
        now_s = asyncio.get_running_loop().time()
        for op_id, waiter in list(self._waiters.items()):
            request, op = waiter.request, waiter.op
            # Without a number, one worker is what makes a fleet.
            num_workers = 1 if request.world_size is None and request.num_workers is None else request.num_workers
            missing = self._registry.missing(request.target, world_size=request.world_size, num_workers=num_workers)
            if missing is None:
                self._end(op_id, self._view(request.limit))
            elif now_s >= op.deadline_s:
                why = f"the fleet isn't complete after {request.deadline_s:g} s: {missing}"
                self.refuse(op_id, fault(FaultCode.DEADLINE, why, limit_s=f"{request.deadline_s:g}"))
            else:
                self._count(waiter)
                op.tick()

    def refuse(self, op_id: str, why: Fault) -> None:
        """End a wait without what it waited for."""
        self._end(op_id, Refusal(op_id=op_id, fault=why))

    def refuse_all(self, why: Fault) -> None:
        """End all waits."""
        for op_id in list(self._waiters):
            self.refuse(op_id, why)

    def _count(self, waiter: Waiter) -> None:
        there = [m for m in self._registry.addressable(waiter.request.target) if m.liveness is Liveness.ALIVE]
        is_by_ranks = waiter.request.world_size is not None
        total = waiter.request.world_size if is_by_ranks else waiter.request.num_workers
        waiter.op.enter("wait", total=total, unit="ranks" if is_by_ranks else "workers")
        waiter.op.count(sum(m.descriptor.world_size for m in there) if is_by_ranks else len(there))

    def _end(self, op_id: str, answer: FleetView | Refusal) -> None:
        self._waiters.pop(op_id).op.audience.tell(answer)
