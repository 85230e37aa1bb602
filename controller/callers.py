"""Whether the caller of a step of somebody else's update is there: engines stand still for it, whatever its op does.

Clients say every 2 s that they live while they wait for such a step (rlbus._conversation). One that has never said it
is older, and its silence means nothing. Decisions are pure; `Callers` hears, and looks at the time.
"""

import logging
from typing import Any

from rlbus.bus import Bus
from rlbus.controller.causes import fault
from rlbus.controller.desk import Desk
from rlbus.controller.liveness import stood_still
from rlbus.controller.op import Op
from rlbus.schemas import NEEDS_CALLER, FaultCode, SenderSignal, SenderStep, TransferFleet, TransferStep

_log = logging.getLogger("rlbus.controller")

# After so long without a sign of life, in seconds, its step is stopped. Above a server that is away for 20 s (issue 3).
SILENT_S = 30.0
# The same when another trainer is there to take its place: five signs are missing.
MISSING_S = 10.0
# Steps by which a trainer takes the place of the one before.
TAKES_PLACE = frozenset({TransferStep.INIT, TransferStep.SHUTDOWN})


def is_silent(heard_s: float | None, now_s: float, limit_s: float) -> bool:
    """Whether who was last heard at `heard_s` (None: never says anything) has been silent for so long."""
    return heard_s is not None and now_s - heard_s >= limit_s - 1e-6


def needs_caller(request: object) -> bool:
    """Whether this is a step that nobody can go on from without its trainer."""
    return isinstance(request, TransferFleet) and request.step in NEEDS_CALLER


def is_to_stop(request: object, heard_s: float | None, now_s: float) -> bool:
    """Whether this op is a step that goes on for nobody."""
    return needs_caller(request) and is_silent(heard_s, now_s, SILENT_S)


def may_take_place(request: object, running: object) -> bool:
    """Whether this request is of a trainer that takes the place of whoever drives the fleet by the step `running`."""
    return isinstance(running, TransferFleet) and isinstance(request, TransferFleet) and request.step in TAKES_PLACE


def is_missing(op: Op, now_s: float) -> bool:
    """Whether the caller of this op is silent for long enough to give way to somebody who is there."""
    return is_silent(op.caller_heard_s, now_s, MISSING_S)


class Callers:
    """Hears the callers of running ops, and stops what goes on for nobody. Called on the loop; never waits."""

    def __init__(self, bus: Bus, desk: Desk) -> None:
        self._bus = bus
        self._desk = desk
        self._ticked_s = 0.0

    def heard(self, signal: SenderSignal, now_s: float) -> bool:
        """Whether this was a sign of life of the caller of an op that runs here. Those of an update are its own."""
        running = self._desk.running(signal.of_op_id)
        if running is None or running.update is not None or signal.step is not SenderStep.ALIVE:
            return False
        running.op.caller_heard_s = now_s
        return True

    def tick(self, now_s: float) -> None:
        """Time has passed. While we are disconnected, or stand still, nobody's silence counts; then it counts anew."""
        is_deaf = stood_still(self._ticked_s, now_s) or not self._bus.transport.is_connected
        self._ticked_s = now_s
        running = self._desk.mutation
        if running is None or running.op.caller_heard_s is None:
            return
        op: Op = running.op
        request: Any = op.request
        if is_deaf:
            op.caller_heard_s = now_s
        elif is_to_stop(request, op.caller_heard_s, now_s) and op.stop_fault is None:
            why = f"its caller, {request.caller}, gave no sign of life for {SILENT_S:g} s"
            _log.warning("op %s (%s) is stopped: %s", op.op_id, op.name, why)
            op.stop(fault(FaultCode.CANCELLED, why))
