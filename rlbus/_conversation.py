"""One request to the controller, from its first send to its last reply.

A long op is a stream of replies that can lose its way: the server restarts, a reply is dropped, the controller is
replaced. So the same request, with the same `op_id`, is sent again after a silence, and joins the op that runs. Four
limits apart, none of them endless: the first answer, silence in between, a controller that was there and is gone, and
the op's own deadline. Where engines stand still for the caller, it says all the while that it lives.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from rlbus import subjects
from rlbus._deadline import MIN_LEFT_S, check_seconds
from rlbus.bus import Bus, ReplyStream
from rlbus.errors import BrokenError, ConfigError, DeadlineError, RLBusError, UnansweredError, error_from_fault
from rlbus.schemas import (
    NEEDS_CALLER,
    NO_EPOCH,
    CancelOp,
    ControlReply,
    ControlRequest,
    Fault,
    FaultCode,
    FleetView,
    HistoryView,
    OpProgress,
    OpResult,
    Refusal,
    SenderSignal,
    SenderStep,
    TransferFleet,
)

CONTROLLER = "controller"

ProgressHandler = Callable[[OpProgress], None]
_log = logging.getLogger("rlbus.client")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long which kind of silence is borne, in seconds.

    `silence_s`: without any reply, then the request is sent again (the controller speaks at least every second). Before
    the first reply it begins with `first_silence_s` and doubles: a controller that doesn't lead says nothing.
    `first_answer_s`: until the first reply; `lost_s`: since the last one, when the controller had spoken before, or
    since our connection was back: a controller that couldn't be heard isn't gone.
    `grace_s`: beyond the request's deadline, in which the controller finishes or undoes what was begun (at most 90 s,
    see rlbus.controller.limits; it tells progress all the while). `retry_s`: between two sends.
    `nobody_s`: that nobody listens before the first reply, for programs that outlive a controller; a person is told at
    once. `awaits_controller`: that it is no error until the deadline (whoever waits for a fleet to come up).
    """

    silence_s: float = 5.0
    first_silence_s: float = 1.0
    first_answer_s: float = 15.0
    lost_s: float = 30.0
    grace_s: float = 95.0
    retry_s: float = 0.5
    nobody_s: float = 0.0
    awaits_controller: bool = False


DEFAULT_PATIENCE = Patience()
# How long a trainer bears that there is no controller when it asks for something: a standby needs less than 5 s to take
# over from a leader that died (rlbus.controller.leader).
FAILOVER_S = 8.0
# How long a trainer bears that the server itself is away, or that whoever is there doesn't lead: a server that is gone
# for 20 s (issue 3) and what it takes everybody to connect and lead again. Its own deadline may be shorter.
OUTAGE_S = 40.0
# How long taking an op back may hold up whoever was cancelled, and how soon an unanswered try is repeated.
CANCEL_LIMIT_S = 5.0
CANCEL_SILENCE_S = 1.0
CANCEL_RETRY_S = 0.25
# How often a caller for whom engines stand still says that it lives, in seconds. Source: rlbus.controller.callers gives
# it up after 30 s without, or 10 s when somebody else would take its place.
ALIVE_S = 2.0


def op_name(request: ControlRequest) -> str:
    """The tag of a request, which is also the last token of its subject."""
    return str(request.__struct_config__.tag)


def check_finite(name: str, number: object) -> None:
    """Raises: ConfigError: nan or infinity. JSON has neither: it would arrive as null, which means something else. Or a
    field of seconds that has none: the controller could not read the message, and nobody would be told why.
    """
    is_left_out = number is None and name == "lease_s"  # a hold
    if name.endswith("_s") and not is_left_out:
        check_seconds(name, number)
    if isinstance(number, float) and not math.isfinite(number):
        raise ConfigError(name, number, "use a number of seconds that ends")


def _check_numbers(request: ControlRequest) -> None:
    for name in request.__struct_fields__:
        check_finite(name, getattr(request, name))


def show_progress(handler: ProgressHandler | None, progress: OpProgress) -> None:
    """Call a user's handler; one that raises is logged, since a broken display must not end an op."""
    if handler is None:
        return
    try:
        handler(progress)
    except Exception:  # noqa: BLE001 - the user's own code; the log has it, and the op goes on
        _log.exception("the progress handler raised; op %s goes on", progress.op_id)


def no_controller(namespace: str) -> BrokenError:
    """What everybody is told when nobody takes requests in `namespace`."""
    problem = "no controller answers; start one with `rlbus controller` or `rlbus up`, or check the namespace"
    return BrokenError(f"namespace {namespace}", problem)


def error_of_refusal(refusal: Refusal, request: ControlRequest) -> RLBusError:
    """The exception for a refusal; one about the op's own deadline is a DeadlineError."""
    return error_of_fault(refusal.fault, op_name(request), request.deadline_s)


def error_of_fault(fault: Fault, op: str, deadline_s: float) -> RLBusError:
    """The exception for a fault that ended `op` before it began; a passed deadline is a DeadlineError."""
    if fault.code is FaultCode.DEADLINE:
        return DeadlineError(op, deadline_s, fault.message)
    return error_from_fault(fault, CONTROLLER)


async def converse(
    bus: Bus,
    namespace: str,
    request: ControlRequest,
    *,
    on_reply: Callable[[ControlReply], None],
    patience: Patience = DEFAULT_PATIENCE,
) -> OpResult | FleetView | HistoryView:
    """Send `request` and hear it out; `on_reply` gets everything before the last reply. It must not block.

    Raises:
        ConfigError: a number of the request is none that can be sent.
        FaultError: refused. DeadlineError: not ended within the request's deadline; UnansweredError: no answer at all.
        BrokenError: nobody listens, or the controller went away while the op ran (its outcome is unknown).
    Cancel: the op goes on at the controller; `take_back` ends it.
    """
    _check_numbers(request)
    loop = asyncio.get_running_loop()
    wait = _Wait(bus, namespace, request, patience, started=loop.time())
    async with _saying_alive(bus, namespace, request), _watching(wait):
        while True:
            try:
                last = await _attempt(wait, on_reply)
            except (DeadlineError, BrokenError) as exc:
                end = wait.give_up(exc, loop.time())
                if end is not None:
                    raise end from exc
                await asyncio.sleep(wait.retry_s(loop.time()))
                continue
            if isinstance(last, Refusal):
                raise error_of_refusal(last, request)
            return last


@contextlib.asynccontextmanager
async def _watching(wait: "_Wait") -> AsyncIterator[None]:
    """While inside, `wait` knows when our connection came back."""
    loop = asyncio.get_running_loop()

    def on_change(is_connected: bool) -> None:
        if is_connected:
            wait.back_at = loop.time()

    unwatch = wait.bus.watch_connection(on_change)
    try:
        yield
    finally:
        unwatch()


@contextlib.asynccontextmanager
async def _saying_alive(bus: Bus, namespace: str, request: ControlRequest) -> AsyncIterator[None]:
    """While inside, the controller hears that we live, if `request` is one for which that counts."""
    if not isinstance(request, TransferFleet):
        yield
        return
    saying = asyncio.create_task(_say_alive(bus, namespace, request))
    try:
        yield
    finally:
        saying.cancel()
        await asyncio.gather(saying, return_exceptions=True)


async def _say_alive(bus: Bus, namespace: str, request: TransferFleet) -> None:
    while True:
        alive = SenderSignal(
            op_id=bus.new_id(),
            deadline_s=ALIVE_S,
            caller=request.caller,
            of_op_id=request.op_id,
            epoch=NO_EPOCH,
            step=SenderStep.ALIVE,
        )
        with contextlib.suppress(RLBusError):  # the next one follows; nobody waits for an answer
            bus.publish(subjects.control(namespace, op_name(alive)), alive)
        await asyncio.sleep(ALIVE_S)


async def ask(bus: Bus, namespace: str, request: ControlRequest, *, limit_s: float) -> None:
    """Send a short request that is answered with `OpAccepted` (a manifest page, a signal, a cancel).

    Raises:
        ConfigError: a number of the request is none that can be sent.
        FaultError: refused. DeadlineError: no answer within `limit_s`. BrokenError: nobody listens, or disconnected.
    Cancel: the request may have been taken.
    """
    _check_numbers(request)
    subject = subjects.control(namespace, op_name(request))
    reply: ControlReply = await bus.request(subject, request, ControlReply, limit_s=limit_s)
    if isinstance(reply, Refusal):
        raise error_of_refusal(reply, request)


async def cancel_op(bus: Bus, namespace: str, request: CancelOp, *, most_silence_s: float) -> None:
    """Ask the controller to end an op, again while we are disconnected, or nobody leads, within the request's deadline.
    A silence is borne for CANCEL_SILENCE_S at first, and longer each time, up to `most_silence_s`.

    Raises: as `ask`. FaultError: also of an op that has ended by a request of ours whose answer was lost.
    Cancel: the request may have been taken.
    """
    loop = asyncio.get_running_loop()
    _check_numbers(request)
    until_s = loop.time() + request.deadline_s
    for silence_s in silences(CANCEL_SILENCE_S, most_silence_s):
        try:
            await ask(bus, namespace, request, limit_s=min(silence_s, until_s - loop.time()))
        except DeadlineError as exc:
            if loop.time() >= until_s:
                problem = f"the controller of namespace {namespace} doesn't answer"
                raise DeadlineError(op_name(request), request.deadline_s, problem) from exc
        except BrokenError:
            is_nobody_there = bus.transport.is_connected
            if is_nobody_there or until_s - loop.time() <= CANCEL_RETRY_S:
                raise
            await asyncio.sleep(CANCEL_RETRY_S)
        else:
            return


async def take_back(bus: Bus, namespace: str, op_id: str, caller: str) -> bool:
    """Ask the controller to end `op_id`, for whoever no longer waits for it; whether it said that it will.

    Within CANCEL_LIMIT_S. That nobody takes it is no error here: the caller is leaving, with an error of its own.
    Cancel: the request may have been taken.
    """
    request = CancelOp(op_id=bus.new_id(), deadline_s=CANCEL_LIMIT_S, caller=caller, of_op_id=op_id)
    try:
        await cancel_op(bus, namespace, request, most_silence_s=CANCEL_SILENCE_S)
    except RLBusError:  # silent, nobody is there, or it has ended, or never began
        return False
    return True


def goes_on(request: ControlRequest) -> bool:
    """Whether an op is left to its own end when its caller leaves: a step of somebody else's update that needs nobody.
    Cut short, a finish would leave engines paused between two versions.
    """
    return isinstance(request, TransferFleet) and request.step not in NEEDS_CALLER


def fate_of(op: str, op_id: str, *, is_taken_back: bool) -> str:
    """What became of an op whose caller left, in words: a note for the exception that the caller leaves with."""
    if is_taken_back:
        return f"{op} op {op_id} is taken back"
    return f"{op} op {op_id} could not be taken back: it had ended, or no controller answers; see `rlbus status`"


def silences(first_s: float, most_s: float) -> Iterator[float]:
    """How long to wait for each of several tries, in seconds: doubling up to `most_s`, for ever."""
    silence_s = min(first_s, most_s)
    while True:
        yield silence_s
        silence_s = min(2 * silence_s, most_s)


@dataclass(slots=True)
class _Wait:
    """Where a conversation stands; decides when it is over."""

    bus: Bus
    namespace: str
    request: ControlRequest
    patience: Patience
    started: float
    heard_at: float | None = None
    # When our connection last came back, in loop time.
    back_at: float = -math.inf
    silences: Iterator[float] = field(init=False)

    def __post_init__(self) -> None:
        self.silences = silences(self.patience.first_silence_s, self.patience.silence_s)

    @property
    def end(self) -> float:
        """When the request's own deadline and its grace are over, in loop time."""
        return self.started + self.request.deadline_s + self.patience.grace_s

    def limit_s(self, now: float) -> float:
        """How long the next reply may take. Called once for each send before the first."""
        if self.heard_at is None:
            return max(0.001, min(next(self.silences), self.started + self.first_answer_s - now))
        return max(0.001, min(self.patience.silence_s, self.end - now))

    @property
    def first_answer_s(self) -> float:
        """How long the first reply may take, from the start."""
        deadline_s = self.request.deadline_s
        return deadline_s if self.patience.awaits_controller else min(deadline_s, self.patience.first_answer_s)

    def retry_s(self, now: float) -> float:
        """How long to wait before it is sent again."""
        until_s = self.end if self.heard_at is not None else self.started + self.first_answer_s
        return max(0.0, min(self.patience.retry_s, until_s - now))

    def request_at(self, now: float) -> ControlRequest:
        """What to send now. A repeat equals the first, or the controller would refuse it; but whoever waits for the
        controller itself has only the rest of the deadline once it is there.
        """
        if self.heard_at is not None or not self.patience.awaits_controller:
            return self.request
        left_s = self.started + self.request.deadline_s - now
        return msgspec.structs.replace(self.request, deadline_s=max(MIN_LEFT_S, round(left_s, 1)))

    def give_up(self, exc: DeadlineError | BrokenError, now: float) -> RLBusError | None:
        """The error that ends it all, or None: send again."""
        op, deadline_s = op_name(self.request), self.request.deadline_s
        nobody = isinstance(exc, BrokenError) and self.bus.transport.is_connected
        if self.heard_at is None:
            limit_s = self.first_answer_s
            is_over = now >= self.started + limit_s
            has_no_hope = not self.patience.awaits_controller and now >= self.started + self.patience.nobody_s
            if nobody and (is_over or has_no_hope):
                return no_controller(self.namespace)
            if is_over:
                problem = f"the controller of namespace {self.namespace} doesn't answer: {exc}"
                return UnansweredError(op, limit_s, problem)
            return None
        if now >= self.end:
            return DeadlineError(op, deadline_s, f"op {self.request.op_id} may still run; last: {exc}")
        if now - max(self.heard_at, self.back_at) >= self.patience.lost_s:
            problem = f"went away while op {self.request.op_id} ({op}) ran; its outcome is unknown"
            return BrokenError(f"controller of namespace {self.namespace}", problem)
        return None


async def _attempt(
    wait: _Wait, on_reply: Callable[[ControlReply], None]
) -> OpResult | FleetView | HistoryView | Refusal:
    """One send, and its replies until the last one or a silence."""
    loop = asyncio.get_running_loop()
    subject = subjects.control(wait.namespace, op_name(wait.request))
    replies: ReplyStream[ControlReply] = wait.bus.stream(subject, wait.request_at(loop.time()), ControlReply)
    async with replies as stream:
        while True:
            reply = await stream.next(wait.limit_s(loop.time()))
            wait.heard_at = loop.time()
            if isinstance(reply, OpResult | FleetView | HistoryView | Refusal):
                return reply
            on_reply(reply)
