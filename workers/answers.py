"""How a worker speaks: answers to `<reply>.<instance_id>`, facts on its event subject, refusals counted and logged.

Invariant: nothing here raises for the bus's sake. An answer that can't leave now is lost on purpose: who asked asks
again with the same op_id, and the journal has it.
"""

import asyncio
import itertools
import logging
import re
from collections.abc import Callable, Sequence

import msgspec

from rlbus import subjects
from rlbus.bus import Bus
from rlbus.codec import MAX_MESSAGE_BYTES, encode
from rlbus.errors import PayloadTooLargeError, RLBusError
from rlbus.schemas import (
    Accepted,
    CommandRefused,
    Fault,
    FaultCode,
    OpId,
    Progress,
    Result,
    ResultData,
    ResultStatus,
    Wire,
    WorkerAnswer,
    WorkerEvent,
)
from rlbus.workers.checks import fault
from rlbus.workers.journal import Record

_log = logging.getLogger("rlbus.workers")

# At most one log line and one event about refused messages in this many seconds; the counter has them all.
REFUSAL_LOG_S = 1.0
# How far into an undecodable message its op_id is looked for.
OP_ID_SEARCH_BYTES = 4096
# What reply addresses within this process begin with. Source: no NATS subject has a space.
LOCAL = "local "
_OP_ID = re.compile(rb'"op_id"\s*:\s*"([A-Za-z0-9_-]{1,64})"')


class _OpIdOnly(Wire, frozen=True):
    op_id: OpId


class Answers:
    """Publishes what one worker has to say."""

    def __init__(self, bus: Bus, namespace: str, component: str, instance_id: str, boot_id: str) -> None:
        self._bus = bus
        self._component = component
        self._instance_id = instance_id
        self._boot_id = boot_id
        self._event_subject = subjects.worker_event(namespace, component, instance_id)
        # Messages that were refused, for whatever reason. Only grows.
        self.num_refused = 0
        # The `seq` of the last announcement.
        self.num_announced = 0
        self._logged_at_s = float("-inf")
        self._listeners: dict[str, Callable[[WorkerAnswer], None]] = {}
        self._numbers = itertools.count(1)

    def listen(self, on_answer: Callable[[WorkerAnswer], None]) -> str:
        """A reply address within this process: answers to it are handed to `on_answer`, which neither waits nor raises.

        `unlisten` gives it up.
        """
        reply = f"{LOCAL}{next(self._numbers)}"
        self._listeners[reply] = on_answer
        return reply

    @property
    def num_listeners(self) -> int:
        """Reply addresses within this process that stand."""
        return len(self._listeners)

    def unlisten(self, reply: str) -> None:
        """Answers to it are dropped from now on. Idempotent."""
        self._listeners.pop(reply, None)

    def accepted(self, op_id: str, reply: str | None) -> None:
        """The command was validated and runs."""
        self._answer(
            reply,
            Accepted(op_id=op_id, component=self._component, instance_id=self._instance_id, boot_id=self._boot_id),
        )

    def progress(self, record: Record) -> None:
        """How far a running op is, to all who wait for it."""
        for reply in record.replies:
            self.at_work(record.op_id, reply, record.phase, done=record.done, total=record.total)

    def at_work(self, op_id: str, reply: str | None, phase: str, *, done: int = 0, total: int | None = None) -> None:
        """A command runs, and is so far; in bytes."""
        self._answer(
            reply,
            Progress(
                op_id=op_id,
                component=self._component,
                instance_id=self._instance_id,
                boot_id=self._boot_id,
                phase=phase,
                done=done,
                total=total,
                unit="bytes",
            ),
        )

    def build(
        self,
        op_id: str,
        status: ResultStatus,
        *,
        fault: Fault | None = None,
        data: ResultData | None = None,
        took_s: float = 0.0,
    ) -> Result:
        """A result of this worker that fits into a message; data that doesn't becomes a failure that says so."""
        result = Result(
            op_id=op_id,
            component=self._component,
            instance_id=self._instance_id,
            boot_id=self._boot_id,
            status=status,
            fault=fault,
            data=data,
            took_s=took_s,
            seq=self.num_announced,
        )
        limit = self.max_bytes
        try:
            size = len(encode(result))
        except PayloadTooLargeError as exc:
            size = exc.size_bytes
        if size <= limit:
            return result
        too_large = Fault(code=FaultCode.TOO_LARGE, message=f"the result takes {size} bytes, a message at most {limit}")
        return msgspec.structs.replace(result, status=ResultStatus.FAILED, fault=too_large, data=None)

    @property
    def max_bytes(self) -> int:
        """What a message may have at most here."""
        return min(MAX_MESSAGE_BYTES, self._bus.transport.max_payload_bytes)

    def result(self, reply: str | None, result: Result) -> None:
        """The end of a command, to one who waits for it."""
        self._answer(reply, result)

    def refuse(self, op_id: str | None, replies: Sequence[str], why: Fault, route: str | None, at: float) -> None:
        """Tell whoever can be reached, count it, and log it at most once per REFUSAL_LOG_S.

        `manifest_unknown` is neither counted nor logged: it is how a worker asks for a manifest that is new to it.
        """
        if op_id is not None:
            refusal = self.build(op_id, ResultStatus.REFUSED, fault=why)
            for reply in replies:
                self._answer(reply, refusal)
        if why.code is FaultCode.MANIFEST_UNKNOWN:
            return
        self.num_refused += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_at_s < REFUSAL_LOG_S:
            return
        self._logged_at_s = now_s
        _log.warning(
            "%s/%s refused %s (op %s): %s [%s], %d refused so far",
            self._component,
            self._instance_id,
            route or "a message",
            op_id,
            why.message,
            why.code.value,
            self.num_refused,
        )
        self.event(
            CommandRefused(
                component=self._component, instance_id=self._instance_id, at=at, op_id=op_id, fault=why, route=route
            )
        )

    def event(self, event: WorkerEvent) -> None:
        """Publish a fact."""
        self.publish(self._event_subject, event)

    def publish(self, subject: str, message: Wire) -> None:
        """Publish if the bus lets us."""
        try:
            self._bus.publish(subject, message)
        except RLBusError as exc:
            _log.info("%s to %s was not sent: %s", type(message).__name__, subject, exc)

    def _answer(self, reply: str | None, message: WorkerAnswer) -> None:
        if reply is not None and reply.startswith(LOCAL):
            if (on_answer := self._listeners.get(reply)) is not None:
                on_answer(message)
        elif reply is not None:
            self.publish(f"{reply}.{self._instance_id}", message)


def find_op_id(data: bytes) -> str | None:
    """The op_id of a message that doesn't parse as a command, if one can be read out of it."""
    if len(data) <= MAX_MESSAGE_BYTES:
        try:
            return msgspec.json.decode(data, type=_OpIdOnly).op_id
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            pass  # not even JSON: look for the text
    found = _OP_ID.search(data[:OP_ID_SEARCH_BYTES])
    return None if found is None else found.group(1).decode()


def bad_message(problem: str, size_bytes: int) -> Fault:
    """The fault for a message that doesn't parse."""
    if size_bytes > MAX_MESSAGE_BYTES:
        return fault(
            FaultCode.TOO_LARGE,
            f"the message has {size_bytes} bytes, the limit is {MAX_MESSAGE_BYTES}",
            size_bytes=size_bytes,
            limit_bytes=MAX_MESSAGE_BYTES,
        )
    return fault(FaultCode.BAD_MESSAGE, problem)
