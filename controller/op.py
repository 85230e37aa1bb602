"""One op while it runs: who hears of it, where it stands, and whether somebody wants it back."""

import asyncio
import logging
from collections.abc import Callable

from rlbus import subjects
from rlbus.bus import Bus
from rlbus.controller.limits import ENDING_S
from rlbus.controller.report import Timings
from rlbus.errors import PayloadTooLargeError, RLBusError
from rlbus.schemas import (
    ControllerEvent,
    Fault,
    FaultCode,
    OpAccepted,
    OpAdvanced,
    OpProgress,
    Refusal,
    Request,
    Wire,
)

_log = logging.getLogger("rlbus.controller")

# Reply addresses that one op answers to; a client that repeats a request after a silence brings a new one each time.
MAX_AUDIENCE = 16
# Progress goes out at least this often. Source: rlbus.schemas.control ("at least every second").
PROGRESS_S = 0.8
# Part of an op's deadline, and most of it in seconds, that is kept for taking it back while the caller still listens.
UNDO_PART = 0.2
MAX_UNDO_S = 5.0


def publish(bus: Bus, subject: str, message: Wire) -> None:
    """Publish what nobody may depend on: a reply that is lost is asked for again, an event is news only.

    A message over the size limit is answered with a refusal in its place, so that nobody waits in vain.
    """
    try:
        bus.publish(subject, message)
    except PayloadTooLargeError as exc:
        _log.warning("%s", exc)
        why = Fault(code=FaultCode.TOO_LARGE, message=str(exc), detail={"size_bytes": str(exc.size_bytes)})
        publish(bus, subject, Refusal(op_id=None, fault=why))
    except RLBusError as exc:
        _log.info("not published on %s: %s", subject, exc)


class Audience:
    """The reply addresses of one op."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._replies: list[str] = []

    def join(self, reply: str | None) -> None:
        """Add an address; the oldest goes when there are too many. None (nobody waits) changes nothing."""
        if reply is None or reply in self._replies:
            return
        self._replies.append(reply)
        del self._replies[:-MAX_AUDIENCE]

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._replies

    def tell(self, message: Wire) -> None:
        """Send to everybody."""
        for reply in self._replies:
            publish(self._bus, reply, message)


class Op:
    """A running op. `stopped` is set when it is to be taken back, for `stop_fault`.

    Constructed when the request was validated; `enter` and `count` are called by whoever drives it.
    """

    def __init__(self, bus: Bus, namespace: str, request: Request, name: str) -> None:
        self.bus = bus
        self.namespace = namespace
        self.request = request
        self.name = name
        self.audience = Audience(bus)
        self.timings = Timings()
        self.stopped = asyncio.Event()
        self.stop_fault: Fault | None = None
        # Since when nothing but its end is done, in loop time; None as long as it goes forward.
        self._winding_since_s: float | None = None
        self._stopped_s: float | None = None
        # When its caller last said that it lives, in loop time; None: it never did, as those that needn't be there.
        self.caller_heard_s: float | None = None
        # Called when it is to be taken back, besides setting `stopped`.
        self.on_stop: Callable[[Fault], None] | None = None
        self.phase = "plan"
        self._done = 0
        self._total: int | None = None
        self._unit = "workers"
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._entered_s = self._began_s
        self._told_s = self._began_s

    @property
    def op_id(self) -> str:
        """Its id, which is the caller's."""
        return self.request.op_id

    @property
    def deadline_s(self) -> float:
        """When its caller stops waiting, in loop time."""
        return self._began_s + self.request.deadline_s

    @property
    def forward_until_s(self) -> float:
        """Until when it may go forward, in loop time; what is left to the deadline is for taking it back."""
        return self.deadline_s - min(MAX_UNDO_S, UNDO_PART * self.request.deadline_s)

    @property
    def ending_until_s(self) -> float:
        """Until when what has to be done at its end may take, in loop time: from when it was stopped, began to take
        things back, or had to end.
        """
        begins = (self._stopped_s, self._winding_since_s)
        return ENDING_S + min((s for s in begins if s is not None), default=self.forward_until_s)

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return self._loop.time() - self._began_s

    def stop(self, why: Fault) -> None:
        """Ask for its end; only the first reason counts. It still ends with a report."""
        if self.stop_fault is None:
            self.stop_fault = why
            self._stopped_s = min(self._loop.time(), self.forward_until_s)
            self.stopped.set()
            if self.on_stop is not None:
                self.on_stop(why)

    def winds_down(self, is_winding: bool = True) -> None:
        """From now on only its end is done, whose time is limited; or (False) it goes forward. May be repeated."""
        if not is_winding:
            self._winding_since_s = None
        elif self._winding_since_s is None:
            self._winding_since_s = min(self._loop.time(), self.forward_until_s)

    def join(self, reply: str | None) -> None:
        """Somebody asks (again) for this op: they hear that it runs, and all that follows."""
        self.audience.join(reply)
        if reply is not None:
            publish(self.bus, reply, OpAccepted(op_id=self.op_id))
            publish(self.bus, reply, self._progress())

    def enter(self, phase: str, *, total: int | None = None, unit: str = "workers") -> None:
        """A phase begins (or goes on, which changes only what is counted)."""
        is_new = phase != self.phase
        if is_new:
            self._close_phase()
            self.phase = phase
        self._done, self._total, self._unit = 0, total, unit
        if is_new:
            self._tell(is_event=True)

    def count(self, done: int) -> None:
        """How much of the phase is done, in its unit."""
        self._done = done

    def tick(self) -> None:
        """Say where it stands, if it is time to. Called at least every PROGRESS_S."""
        if self._loop.time() - self._told_s >= PROGRESS_S - 1e-6:
            self._tell(is_event=True)

    def finish(self) -> None:
        """Close its book of times."""
        self._close_phase()
        self.timings.took_s = self._loop.time() - self._began_s

    def _close_phase(self) -> None:
        now_s = self._loop.time()
        phases_s = self.timings.phases_s
        phases_s[self.phase] = phases_s.get(self.phase, 0.0) + now_s - self._entered_s
        self._entered_s = now_s

    def _tell(self, *, is_event: bool) -> None:
        self._told_s = self._loop.time()
        self.audience.tell(self._progress())
        if is_event:
            event = OpAdvanced(
                at=self.bus.clock.now(),
                op_id=self.op_id,
                phase=self.phase,
                done=self._done,
                total=self._total,
                unit=self._unit,
            )
            tell_event(self.bus, self.namespace, event)

    def _progress(self) -> OpProgress:
        return OpProgress(op_id=self.op_id, phase=self.phase, done=self._done, total=self._total, unit=self._unit)


def tell_event(bus: Bus, namespace: str, event: ControllerEvent) -> None:
    """Publish one fact of the controller on the subject of its kind."""
    kind = str(event.__struct_config__.tag)
    publish(bus, subjects.controller_event(namespace, kind), event)
