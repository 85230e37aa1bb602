"""The trainer's half of one update: what the controller tells it to do, and what it tells back.

`decide` is the pure part: (state, event) -> (state, actions). `SenderHalf` does the I/O. Invariants: at most one of
joining and sending runs; nothing is sent in a group other than the one the controller named; a task that comes twice
is done once and signalled twice; a LeaveTask is obeyed at any time, also beside a send that is stuck. From the first
reply to the end of the op the controller hears that we live: engines stand still for us, whatever is waited for.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from rlbus._conversation import ask
from rlbus.bus import Bus
from rlbus.errors import FaultError, GroupBrokenError, RLBusError
from rlbus.schemas import (
    NO_EPOCH,
    ControlReply,
    Fault,
    FaultCode,
    GroupPlan,
    JoinTask,
    LeaveTask,
    SenderSignal,
    SenderStep,
    SendTask,
    TensorSpec,
    Version,
)
from rlbus.transfer.plane import SenderPlane, Sent, WeightSource

_log = logging.getLogger("rlbus.trainer")

# How often a sender says that it lives; the controller wants at least one a second.
ALIVE_S = 0.5
# How long one signal waits for its answer, and how often one that matters is repeated before the op's end settles it.
SIGNAL_LIMIT_S = 2.0
SIGNAL_TRIES = 10
SIGNAL_RETRY_S = 0.5
# How long a join or send that was told to stop may take to end, before it is left behind.
STOP_LIMIT_S = 10.0
# Tasks of the controller that wait here; it sends a handful per update, repeats included.
MAX_QUEUED_TASKS = 256


class Stage(Enum):
    """Where the trainer stands with the group of an update."""

    OUT = "out"
    JOINING = "joining"
    IN = "in"
    SENDING = "sending"
    SENT = "sent"


@dataclass(frozen=True, slots=True)
class SenderState:
    """Stage, and the group that it is about (None before the first)."""

    stage: Stage = Stage.OUT
    epoch: int | None = None
    group_id: str | None = None

    @property
    def is_working(self) -> bool:
        """Whether a join or a send runs."""
        return self.stage in (Stage.JOINING, Stage.SENDING)

    def at_next_op(self) -> "SenderState":
        """Where the next op begins: in the same group if it still stands, with nothing sent yet."""
        if self.stage in (Stage.IN, Stage.SENT):
            return replace(self, stage=Stage.IN)
        return SenderState()


@dataclass(frozen=True, slots=True)
class WorkEnded:
    """A join or send of `epoch` ended well."""

    epoch: int


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """A join or send of `epoch` failed; `fault` says why."""

    epoch: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class Join:
    """Join the group of `plan`, leaving any other first."""

    plan: GroupPlan


@dataclass(frozen=True, slots=True)
class Send:
    """Send everything in the group of `epoch`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the group, abandoning whatever runs in it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Signal:
    """Tell the controller."""

    step: SenderStep
    epoch: int
    fault: Fault | None = None


Event = JoinTask | SendTask | LeaveTask | WorkEnded | WorkFailed
Action = Join | Send | Leave | Signal


def decide(state: SenderState, event: Event) -> tuple[SenderState, tuple[Action, ...]]:
    """What the trainer does about `event`. Repeats and late arrivals change nothing."""
    match event:
        case JoinTask():
            return _on_join(state, event.plan)
        case SendTask():
            return _on_send(state, event.epoch)
        case LeaveTask():
            if event.epoch != state.epoch or state.stage is Stage.OUT:
                return state, ()
            return replace(state, stage=Stage.OUT), (Leave(event.reason),)
        case WorkEnded() | WorkFailed() if event.epoch != state.epoch or not state.is_working:
            return state, ()
        case WorkEnded():
            if state.stage is Stage.JOINING:
                return replace(state, stage=Stage.IN), (Signal(SenderStep.JOINED, event.epoch),)
            return replace(state, stage=Stage.SENT), (Signal(SenderStep.SENT, event.epoch),)
        case WorkFailed():
            actions = (Signal(SenderStep.FAILED, event.epoch, event.fault), Leave(event.fault.message))
            return replace(state, stage=Stage.OUT), actions


def _on_join(state: SenderState, plan: GroupPlan) -> tuple[SenderState, tuple[Action, ...]]:
    if plan.group_id != state.group_id:
        actions: tuple[Action, ...] = (Leave("another group is formed"),) if state.is_working else ()
        return SenderState(Stage.JOINING, plan.epoch, plan.group_id), (*actions, Join(plan))
    if state.stage is Stage.IN:
        return state, (Signal(SenderStep.JOINED, plan.epoch),)
    return state, ()


def _on_send(state: SenderState, epoch: int) -> tuple[SenderState, tuple[Action, ...]]:
    if epoch == state.epoch and state.stage is Stage.IN:
        return replace(state, stage=Stage.SENDING), (Send(epoch),)
    if epoch == state.epoch and state.stage is Stage.SENT:
        return state, (Signal(SenderStep.SENT, epoch),)
    if epoch == state.epoch and state.stage is Stage.SENDING:
        return state, ()
    fault = Fault(
        code=FaultCode.STALE_EPOCH,
        message=f"the trainer isn't in group {epoch} (it is {state.stage.value} of {state.epoch})",
        retryable=True,
    )
    return state, (Signal(SenderStep.FAILED, epoch, fault),)


def alive_in(state: SenderState, asked_epoch: int | None) -> int:
    """Of which group "alive" is said: the one that we were told to join last, until we are in it, or that we send in.

    NO_EPOCH beside that: an `alive` about a group says that its task was heard, which may have been lost. Pure.
    """
    if asked_epoch is not None and asked_epoch != state.epoch:
        return asked_epoch  # the one before is still left, which may take as long as STOP_LIMIT_S
    return state.epoch if state.is_working and state.epoch is not None else NO_EPOCH


@dataclass(frozen=True, slots=True)
class SendOrder:
    """What one update sends: `source` yields what `specs` announced, in that order."""

    op_id: str
    version: Version
    source: WeightSource
    specs: tuple[TensorSpec, ...]
    bucket_bytes: int


class SenderHalf:
    """Obeys the controller's tasks for one op over `plane`. Use as `async with`; hand it replies with `on_reply`.

    `state` is where the op before ended; afterwards, where this one did. Then `sent` is what was sent (None: nothing,
    or not all), and `cause` the exception that made this side fail (None: it didn't).
    """

    def __init__(
        self, bus: Bus, namespace: str, plane: SenderPlane, order: SendOrder, state: SenderState, caller: str
    ) -> None:
        self.state = state.at_next_op()
        self.sent: Sent | None = None
        self.cause: BaseException | None = None
        self._bus = bus
        self._namespace = namespace
        self._plane = plane
        self._order = order
        self._caller = caller
        self._events: asyncio.Queue[Event] = asyncio.Queue(MAX_QUEUED_TASKS)
        self._num_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._work: asyncio.Task[None] | None = None
        # Says that we live; None: the controller hasn't answered yet.
        self._alive: asyncio.Task[None] | None = None
        self._is_leaving = False
        # The group that we were told to join last.
        self._asked_epoch: int | None = None

    async def __aenter__(self) -> "SenderHalf":
        self._start(self._obey())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        """End everything. A join or send that still runs has no op any more: its group is left.

        Cancel: the tasks are cancelled, the group may still stand.
        """
        if self.state.is_working or self._is_leaving:
            await self.leave("the update has ended")
        for task in self._tasks:
            task.cancel()
        ended, _ = await asyncio.wait(self._tasks, timeout=STOP_LIMIT_S)
        for task in ended:
            if not task.cancelled() and task.exception() is not None:
                _log.error("the trainer's half of op %s crashed", self._order.op_id, exc_info=task.exception())

    def on_reply(self, reply: ControlReply) -> None:
        """Take a task of the controller; any reply says that it has the op, and awaits signs of life. Never blocks."""
        if self._alive is None:
            self._alive = self._start(self._say_alive())
        if isinstance(reply, JoinTask):
            self._asked_epoch = reply.plan.epoch
        if isinstance(reply, JoinTask | SendTask | LeaveTask):
            self._post(reply)

    async def leave(self, reason: str) -> None:
        """Leave the group, whatever runs in it (the op was taken back, or the controller is gone).

        Cancel: the group may still stand.
        """
        self.state = replace(self.state, stage=Stage.OUT)
        await self._leave(reason)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    def _post(self, event: Event) -> None:
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            _log.error("over %d tasks wait in op %s; %s is dropped", MAX_QUEUED_TASKS, self._order.op_id, event)

    async def _obey(self) -> None:
        while True:
            self.state, actions = decide(self.state, await self._events.get())
            for action in actions:
                await self._act(action)

    async def _act(self, action: Action) -> None:
        match action:
            case Join():
                self._work = self._start(self._join(action.plan))
            case Send():
                self._work = self._start(self._send(action.epoch))
            case Leave():
                await self._leave(action.reason)
            case Signal():
                self._start(self._signal(action))

    async def _join(self, plan: GroupPlan) -> None:
        self._num_bytes = 0  # of the attempt before
        self._start(self._tell_alive())
        await self._try(plan.epoch, FaultCode.GROUP_FAILED, self._plane.join(plan))

    async def _send(self, epoch: int) -> None:
        self._start(self._tell_alive())
        await self._try(epoch, FaultCode.SENDER_FAILED, self._send_all(), FaultCode.TRANSFER_FAILED)

    async def _send_all(self) -> None:
        order = self._order
        self.sent = await self._plane.send(
            order.source,
            order.specs,
            bucket_bytes=order.bucket_bytes,
            version=order.version,
            stream_id=order.op_id,
            on_progress=self._count,
        )
        self._num_bytes = self.sent.num_bytes

    def _count(self, done: int, _total: int) -> None:
        self._num_bytes = done  # called from the plane's thread; one store is atomic

    async def _try(
        self, epoch: int, code: FaultCode, work: Coroutine[Any, Any, None], broken: FaultCode = FaultCode.GROUP_FAILED
    ) -> None:
        """Do it and post how it ended: as `code`, or as `broken` if that is the group's doing and not ours."""
        try:
            await work
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as exc:  # noqa: BLE001 - a source is the user's code; `cause` is chained to what they get
            self.cause = exc
            if isinstance(exc, GroupBrokenError):
                code = broken
            fault = exc.fault if isinstance(exc, FaultError) else Fault(code=code, message=_describe(exc))
            self._post(WorkFailed(epoch, fault))
        else:
            self.cause = None  # what broke an attempt before is over
            self._post(WorkEnded(epoch))

    async def _leave(self, reason: str) -> None:
        """Release whatever runs in the group, then see its task end."""
        self._is_leaving = True
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await self._plane.leave(reason)
        except (RLBusError, TimeoutError) as exc:
            _log.warning("leaving the group of op %s: %s", self._order.op_id, _describe(exc))
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait({self._work}, timeout=STOP_LIMIT_S)
        self._is_leaving = False

    async def _say_alive(self) -> None:
        while True:
            await self._tell_alive()
            await asyncio.sleep(ALIVE_S)

    async def _tell_alive(self) -> None:
        alive = Signal(SenderStep.ALIVE, alive_in(self.state, self._asked_epoch))
        with contextlib.suppress(RLBusError):  # the next one follows; the controller's limits judge silence
            await self._tell(alive, self._bus.new_id())

    async def _signal(self, signal: Signal) -> None:
        """Say a step until it was heard; a refusal or the op's end settles it as well."""
        op_id = self._bus.new_id()
        for _ in range(SIGNAL_TRIES):
            try:
                await self._tell(signal, op_id)
                return
            except FaultError as exc:
                _log.info("signal %s of op %s: %s", signal.step.value, self._order.op_id, exc)
                return
            except RLBusError as exc:
                _log.info("signal %s of op %s isn't heard yet: %s", signal.step.value, self._order.op_id, exc)
            await asyncio.sleep(SIGNAL_RETRY_S)

    async def _tell(self, signal: Signal, op_id: str) -> None:
        has_sent = signal.step is SenderStep.SENT and self.sent is not None
        message = SenderSignal(
            op_id=op_id,
            deadline_s=SIGNAL_LIMIT_S,
            caller=self._caller,
            of_op_id=self._order.op_id,
            epoch=signal.epoch,
            step=signal.step,
            num_bytes=self._num_bytes,
            sums=self.sent.sums if has_sent and self.sent is not None else (),
            fault=signal.fault,
        )
        await ask(self._bus, self._namespace, message, limit_s=SIGNAL_LIMIT_S)


def _describe(exc: BaseException) -> str:
    text = str(exc)
    return text if isinstance(exc, RLBusError) else f"{type(exc).__name__}: {text}"
