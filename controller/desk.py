"""The ops of one controller: at most one mutation at a time, a repeat joins or gets the same report, all owned here."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rlbus.bus import Bus
from rlbus.controller.causes import fault
from rlbus.controller.journal import Journal
from rlbus.controller.limits import MARK_S
from rlbus.controller.op import PROGRESS_S, Op, publish, tell_event
from rlbus.controller.update import UpdateRun
from rlbus.errors import BrokenError, DeadlineError, RLBusError
from rlbus.schemas import Fault, FaultCode, OpEnded, OpResult, OpStarted, OpStatus, Report, Request

_log = logging.getLogger("rlbus.controller")

# Reports of ended ops that a repeated request still gets.
MAX_ENDED_OPS = 128
# How long an op waits to be written down, and the pause between two tries: a store that was restarted with the server
# refuses for a moment what it takes the next.
RECORD_S = 5.0
RECORD_RETRY_S = 0.25
# Ops beside the mutation at the same time: abort and versions.
MAX_QUERIES = 64

# Ops that only ask.
QUESTIONS = frozenset({"versions", "lora_list"})

Work = Callable[["Running"], Awaitable[Report]]
# Writes an op down before it begins; raises if that can't be done.
Record = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Running:
    """An op in progress. `update` is set when it is one, `dropped` when it is ended without being taken back."""

    op: Op
    is_mutation: bool
    update: UpdateRun | None = None
    task: asyncio.Task[None] | None = None
    dropped: Fault | None = None

    def join(self, reply: str | None) -> None:
        """Somebody asks (again) for this op."""
        if self.update is not None:
            self.update.join(reply)
        else:
            self.op.join(reply)


class Desk:
    """Begins, finds and ends ops. Called on the loop; only `aclose` waits."""

    def __init__(self, bus: Bus, namespace: str, journal: Journal | None = None) -> None:
        self._bus = bus
        self._journal = journal
        self._namespace = namespace
        self._running: dict[str, Running] = {}
        self._ended: OrderedDict[str, tuple[Request, Report]] = OrderedDict()
        self._is_closing = False

    @property
    def mutation(self) -> Running | None:
        """The mutation in progress."""
        return next((r for r in self._running.values() if r.is_mutation), None)

    def running(self, op_id: str) -> Running | None:
        """An op in progress."""
        return self._running.get(op_id)

    def has_ended(self, op_id: str) -> bool:
        """Whether this op ended, as far as it is remembered."""
        return op_id in self._ended

    def report_of(self, op_id: str) -> Report | None:
        """How this op ended, as far as it is remembered."""
        ended = self._ended.get(op_id)
        return None if ended is None else ended[1]

    def drop(self, op_id: str, why: Fault) -> None:
        """End an op at once, taking nothing back; its report says `why`."""
        running = self._running.get(op_id)
        if running is not None and running.task is not None:
            running.dropped = why
            running.task.cancel()

    def remember(self, request: Request, report: Report) -> None:
        """How an op of a controller before this one ended."""
        self._ended[request.op_id] = (request, report)
        if len(self._ended) > MAX_ENDED_OPS:
            self._ended.popitem(last=False)

    def repeat(self, request: Request, reply: str | None) -> Fault | bool:
        """True: the request is a repeat, and was joined or answered. False: it is new. A fault: its op_id was used."""
        running, ended = self._running.get(request.op_id), self._ended.get(request.op_id)
        first = running.op.request if running is not None else None if ended is None else ended[0]
        if first is None:
            return False
        if first != request:
            return fault(FaultCode.BAD_MESSAGE, f"op_id {request.op_id} was used for another request")
        if running is not None:
            running.join(reply)
        elif ended is not None and reply is not None:
            publish(self._bus, reply, OpResult(report=ended[1]))
        return True

    def refusal(self, *, is_mutation: bool) -> Fault | None:
        """Why no op of this kind can begin now."""
        if self._is_closing:
            return fault(FaultCode.BUSY, "the controller is stopping", retryable=True)
        current = self.mutation
        if is_mutation and current is not None:
            name, op_id = current.op.name, current.op.op_id
            message = f"op {op_id} ({name}, by {current.op.request.caller}) is running; wait for it or cancel it"
            return fault(FaultCode.BUSY, message, retryable=True, op_id=op_id, op=name)
        if not is_mutation and len(self._running) >= MAX_QUERIES:
            return fault(FaultCode.BUSY, f"{MAX_QUERIES} ops run already", retryable=True)
        return None

    def begin(self, op: Op, reply: str | None, work: Work, *, is_mutation: bool, record: Record | None = None) -> None:
        """Run `work` as this op, after `record`. It was validated; `refusal` was None."""
        running = Running(op, is_mutation)
        self._running[op.op_id] = running
        op.join(reply)
        event = OpStarted(at=self._bus.clock.now(), op_id=op.op_id, op=op.name, caller=op.request.caller)
        tell_event(self._bus, self._namespace, event)
        _log.info("op %s: %s for %s", op.op_id, op.name, op.request.caller)
        running.task = asyncio.get_running_loop().create_task(self._drive(running, work, record), name=f"op {op.op_id}")

    async def aclose(self, limit_s: float) -> None:
        """Take back what runs, give that `limit_s`, then drop it. Nothing can begin any more.

        Cancel: what still runs is dropped at once.
        """
        self._is_closing = True
        tasks = [r.task for r in self._running.values() if r.task is not None]
        for running in list(self._running.values()):
            running.op.stop(fault(FaultCode.CANCELLED, "the controller is stopping", retryable=True))
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=limit_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drive(self, running: Running, work: Work, record: Record | None) -> None:
        op = running.op
        try:
            report = await self._outcome(running, work, record)
            if self._journal is not None and running.is_mutation:
                self._journal.end(report)
                await self._until_marked(running, self._journal)
        finally:
            # Also when cancelled: the next op must not find this one in its way.
            del self._running[op.op_id]
        if op.name not in QUESTIONS:  # a question may be asked again, and its answer changes
            self.remember(op.request, report)
        op.audience.tell(OpResult(report=report))
        event = OpEnded(
            at=self._bus.clock.now(),
            op_id=op.op_id,
            op=op.name,
            status=report.status.value,
            took_s=report.took_s,
            fault=report.fault,
        )
        tell_event(self._bus, self._namespace, event)
        why = "" if report.fault is None else f": {report.fault.message}"
        _log.info("op %s: %s ended %s after %.3f s%s", op.op_id, op.name, report.status.value, report.took_s, why)

    async def _outcome(self, running: Running, work: Work, record: Record | None) -> Report:
        """The report, whatever happens. Cancel: raised, unless the op was dropped."""
        op = running.op
        try:
            problem = None if record is None else await self._try_record(op, record)
            return await work(running) if problem is None else self._unbegun(op, problem)
        except asyncio.CancelledError:
            if running.dropped is None:
                raise
            return self._empty(op, OpStatus.FAILED, running.dropped)
        except Exception:  # noqa: BLE001 - a bug of ours: the log has it, and whoever waits gets a report all the same
            _log.exception("op %s (%s)", op.op_id, op.name)
            return self._broken(op)

    async def _until_marked(self, running: Running, journal: Journal) -> None:
        """What the fleet has now is told when the next leader would know it, too: nobody acts on a version that is gone
        with this process. Engines generate meanwhile. Without the store our lease ends before MARK_S, and it is the
        next leader that reports.
        """
        until_s = asyncio.get_running_loop().time() + MARK_S
        try:
            while journal.is_behind and (left_s := until_s - asyncio.get_running_loop().time()) > 0:
                await journal.written(min(PROGRESS_S, left_s))
                running.op.tick()
        except asyncio.CancelledError:
            if running.dropped is None:
                raise

    async def _try_record(self, op: Op, record: Record) -> Fault | None:
        """Write it down; why that failed. An op that nobody could take over is better not begun."""
        loop = asyncio.get_running_loop()
        until_s = min(loop.time() + RECORD_S, op.forward_until_s)
        while True:
            try:
                await record()
                return None
            except (BrokenError, DeadlineError) as exc:
                last: RLBusError = exc
                if loop.time() + RECORD_RETRY_S >= until_s or op.stopped.is_set():
                    break
            except RLBusError as exc:
                last = exc
                break
            await asyncio.sleep(RECORD_RETRY_S)
            op.tick()
        _log.error("op %s isn't begun: %s", op.op_id, last)
        return fault(FaultCode.NOT_RECORDED, f"the journal can't be written: {last}", retryable=True)

    def _broken(self, op: Op) -> Report:
        why = fault(FaultCode.INTERNAL, "a bug in the controller; its log has the traceback")
        return self._empty(op, OpStatus.FAILED, why)

    def _unbegun(self, op: Op, why: Fault) -> Report:
        return self._empty(op, OpStatus.REFUSED, why)

    def _empty(self, op: Op, status: OpStatus, why: Fault) -> Report:
        op.finish()
        return Report(
            op_id=op.op_id,
            op=op.name,
            status=status,
            outcomes=(),
            phases_s=dict(op.timings.phases_s),
            took_s=op.timings.took_s,
            fault=why,
        )
