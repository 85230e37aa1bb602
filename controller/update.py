"""Drives one update: does what the transaction decides, and tells it what happened.

Invariants: one fan-out at a time, owned by this run and ended with it; events are handled in the order of arrival;
whatever happens, the run ends within the op's deadline plus the bounds of winding down.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from rlbus.controller.answers import StepAnswer, unknown
from rlbus.controller.attempts import STILL_S, housekeeping_s, stall_s
from rlbus.controller.causes import fault
from rlbus.controller.leases import keep, renewing
from rlbus.controller.limits import RETRY_S, ending_step_until_s, limits_until, overdue_at_s
from rlbus.controller.line import Line
from rlbus.controller.liveness import stood_still
from rlbus.controller.op import PROGRESS_S, Op
from rlbus.controller.op_ids import PAUSE_STEP, derive, derive_step
from rlbus.controller.sender_life import SenderLife, limit_s, silence
from rlbus.controller.stillness import Stillness
from rlbus.controller.transaction import decide
from rlbus.controller.update_state import (
    COMPLETING,
    FORWARD,
    Action,
    Ask,
    Began,
    Drop,
    Event,
    Hold,
    Plan,
    Sender,
    SenderFailed,
    SenderJoined,
    SenderSent,
    Stage,
    StepOverdue,
    StopAsked,
    Tell,
    TimeUp,
    UpdateState,
    WorkerAccepted,
    WorkerGone,
    WorkersAnswered,
    WorkerSilent,
    initial,
)
from rlbus.controller.winding import to_keep
from rlbus.errors import BrokenError, PayloadTooLargeError, RLBusError
from rlbus.schemas import (
    NO_EPOCH,
    RECEIVING,
    Accepted,
    Fault,
    FaultCode,
    JoinTask,
    LeaveTask,
    OnFailure,
    Outcome,
    Progress,
    ReceiveWeights,
    SenderSignal,
    SenderStep,
    SendTask,
    WorkerAnswer,
    WorkerId,
)

_log = logging.getLogger("rlbus.controller")

# Events that may wait: far above what one update of the largest fleet brings between two turns of the loop.
MAX_QUEUED_EVENTS = 65_536
# A task that the trainer shows no sign of having heard is told again after this long, in seconds.
REPEAT_TASK_S = 2.0


class UpdateRun:
    """One update. `run` once; the other methods are called on the loop while it runs, and never wait."""

    def __init__(self, op: Op, line: Line, plan: Plan) -> None:
        self.state = initial(plan)
        # Called on each new phase with the state at its begin, before anything of it is sent.
        self.on_phase: Callable[[UpdateState], None] | None = None
        self._op = op
        self._line = line
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self._steps: dict[str, asyncio.Task[None]] = {}
        self._batch: dict[str, dict[WorkerId, StepAnswer]] = {}
        # What the trainer was last told to do, for who joins the op later and for a task that was lost.
        self._tasks: list[JoinTask | SendTask | LeaveTask] = []
        # When the newest step of workers began, in loop time.
        self._step_begun_s = 0.0
        self._sender = SenderLife()
        # When time was last looked at, in loop time: at least every PROGRESS_S.
        self._looked_s = self._loop.time()
        self._sent_bytes = 0
        self._stillness = Stillness(STILL_S)
        self._paused_since_s: float | None = None
        self._released_s: float | None = None
        self._num_released = 0
        op.on_stop = self._on_stop

    async def run(self) -> UpdateState:
        """Drive the update to its end; the state then says how it ended.

        Cancel: the fan-out in progress is dropped and nothing is undone; `Op.stop` is the way to take an update back.
        """
        self._post(Began())
        if self._op.stop_fault is not None:  # taken back while it was being written down
            self._on_stop(self._op.stop_fault)
        try:
            op_id, owner = self._op.op_id, derive(self._op.op_id, PAUSE_STEP)
            async with renewing(self._line, op_id, owner, self._holding):
                await self._drive()
            await keep(self._line, op_id, owner, to_keep(self.state))
        finally:
            await self._end_steps()
            self._op.timings.paused_s = self._paused_s()
        return self.state

    async def _drive(self) -> None:
        next_tick_s = self._loop.time() + PROGRESS_S
        while self.state.stage is not Stage.DONE:
            event = await self._next_event(min(next_tick_s, self._next_limit_s()))
            if event is not None:
                self._handle(event)
            self._check_limits()
            if self._loop.time() >= next_tick_s - 1e-6:
                next_tick_s = self._loop.time() + PROGRESS_S
                self._tick()

    def _holding(self) -> list[WorkerId]:
        """Whom this update has paused and not let go."""
        return [w for w, seat in self.state.seats.items() if seat.hold is Hold.PAUSED and not seat.is_gone]

    def join(self, reply: str | None) -> None:
        """Somebody asks (again) for this update: the trainer after a lost reply. It is told its task again."""
        self._op.join(reply)
        for task in self._tasks:
            self._op.audience.tell(task)

    def on_signal(self, signal: SenderSignal) -> Fault | None:
        """A step of the trainer; a fault if it is about another group than this update's."""
        now_s = self._loop.time()
        self._sender = replace(self._sender, heard_s=now_s)
        if signal.step is SenderStep.ALIVE and signal.epoch == NO_EPOCH:
            self._sender = replace(self._sender, is_steady=True)
            return None
        group = self.state.group
        if group is None or signal.epoch != group.plan.epoch:
            current = None if group is None else group.plan.epoch
            return fault(
                FaultCode.STALE_EPOCH,
                f"group {signal.epoch} is not that of the update, which is {current}",
                epoch=signal.epoch,
                current=current,
            )
        self._sender = replace(self._sender, task_heard_s=now_s)
        self._stillness.heard(None, now_s)
        match signal.step:
            case SenderStep.JOINED:
                self._post(SenderJoined(signal.epoch))
            case SenderStep.ALIVE:
                self._moved(signal.num_bytes)
            case SenderStep.SENT:
                self._post(SenderSent(signal.epoch, signal.sums, signal.num_bytes))
            case SenderStep.FAILED:
                why = signal.fault or fault(FaultCode.SENDER_FAILED, "the trainer gave up and didn't say why")
                self._post(SenderFailed(signal.epoch, why))
        return None

    def on_gone(self, worker: WorkerId, reason: str) -> None:
        """A worker died, left or restarted."""
        if worker in self.state.seats:
            self._post(WorkerGone(worker, fault(FaultCode.WORKER_LOST, f"the worker is gone: {reason}")))

    def on_heard(self, worker: WorkerId) -> None:
        """A worker, of this update or not, announced itself: it lives, and we can hear."""
        self._stillness.heard(worker, self._loop.time())

    # -- events -------------------------------------------------------------------------------------------------------

    def _on_stop(self, why: Fault) -> None:
        self._post(StopAsked(why))

    def _post(self, event: Event) -> None:
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            _log.error("op %s: over %d events wait; %s is lost", self._op.op_id, MAX_QUEUED_EVENTS, event)

    async def _next_event(self, until_s: float) -> Event | None:
        try:
            async with asyncio.timeout_at(until_s):
                return await self._events.get()
        except TimeoutError:
            return None

    def _handle(self, event: Event) -> None:
        before = self.state.stage
        self.state, actions = decide(self.state, event)
        if self.state.phase != self._op.phase and self.state.stage is not Stage.DONE:
            is_transfer = self.state.stage is Stage.RECEIVE
            total = self.state.plan.total_bytes if is_transfer else len(self.state.pending)
            if self.on_phase is not None:
                self.on_phase(self.state)
            self._op.enter(self.state.phase, total=total, unit="bytes" if is_transfer else "workers")
            _log.info("op %s: %s (after %s)", self._op.op_id, self.state.phase, before.value)
        self._watch_pauses()
        self._op.winds_down(self.state.stage not in FORWARD | COMPLETING)
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Ask():
                self._step_begun_s = self._loop.time() + action.after_s
                if isinstance(action.body, ReceiveWeights):
                    self._stillness.begin(self._loop.time())  # also who doesn't accept holds the others up
                self._steps[action.step] = self._loop.create_task(self._ask(action), name=f"step {action.step}")
            case Drop():
                self._steps[action.step].cancel()
            case Tell():
                self._tell(action.message)

    # -- workers ------------------------------------------------------------------------------------------------------

    async def _ask(self, ask: Ask) -> None:
        """One step on its workers; every one of them gets an answer, whatever breaks here."""
        told: set[WorkerId] = set()

        def on_outcome(worker: WorkerId, answer: StepAnswer) -> None:
            told.add(worker)
            self._batch_answer(ask.step, worker, answer)

        def on_answer(worker: WorkerId, answer: WorkerAnswer) -> None:
            self._stillness.heard(worker, self._loop.time())
            if isinstance(answer, Accepted):
                self._post(WorkerAccepted(ask.step, worker))
            elif isinstance(answer, Progress):
                is_standing = answer.phase == RECEIVING or self.state.stage is Stage.JOIN
                if is_standing and worker not in self.state.accepted:  # its `Accepted` was lost
                    self._post(WorkerAccepted(ask.step, worker))
                if self.state.stage is Stage.RECEIVE:
                    self._moved(answer.done)

        await asyncio.sleep(ask.after_s)
        last: StepAnswer | None = None
        until_s = self._op.forward_until_s
        if ask.is_ending:
            until_s = ending_step_until_s(self._op.ending_until_s, self._loop.time())
        while last is None:
            try:
                limits = limits_until(
                    until_s,
                    self._loop.time(),
                    stall_s=stall_s(self.state) if isinstance(ask.body, ReceiveWeights) else None,
                    is_ending=ask.is_ending,
                )
                if ask.ack_s is not None:
                    limits = replace(limits, ack_s=min(limits.ack_s, ask.ack_s))
                await self._line.ask(
                    ask.body,
                    ask.workers,
                    op_id=derive_step(self._op.op_id, self._line.term, ask.step),
                    limits=limits,
                    housekeeping_s=housekeeping_s(self.state, limits),
                    is_wanted=lambda: self.state.step == ask.step,
                    on_answer=on_answer,
                    on_outcome=on_outcome,
                )
                return
            except BrokenError as exc:
                if self._loop.time() < until_s:
                    await asyncio.sleep(RETRY_S)
                    continue
                last = StepAnswer(Outcome.REFUSED, fault(FaultCode.NO_ACK, f"nothing was sent: {exc}", retryable=True))
            except PayloadTooLargeError as exc:
                last = StepAnswer(Outcome.REFUSED, fault(FaultCode.TOO_LARGE, str(exc)))
            except RLBusError as exc:
                last = unknown(fault(FaultCode.INTERNAL, str(exc)))
            except Exception:  # noqa: BLE001 - a bug of ours: the log has it, and the update ends like any failed one
                _log.exception("op %s, step %s", self._op.op_id, ask.step)
                last = unknown(fault(FaultCode.INTERNAL, "a bug in the controller; its log has the traceback"))
        for worker in ask.workers:
            if worker not in told:
                self._batch_answer(ask.step, worker, last)

    def _batch_answer(self, step: str, worker: WorkerId, answer: StepAnswer) -> None:
        """Collect what arrives in one turn of the loop, so that a large fleet costs few events."""
        batch = self._batch.get(step)
        if batch is None:
            batch = self._batch[step] = {}
            self._loop.call_soon(self._post_batch, step)
        batch[worker] = answer

    def _post_batch(self, step: str) -> None:
        self._post(WorkersAnswered(step, self._batch.pop(step)))

    async def _end_steps(self) -> None:
        for task in self._steps.values():
            task.cancel()
        await asyncio.gather(*self._steps.values(), return_exceptions=True)

    # -- the trainer --------------------------------------------------------------------------------------------------

    def _tell(self, message: JoinTask | SendTask | LeaveTask) -> None:
        if isinstance(message, LeaveTask):
            self._tasks = [message]
        else:
            self._tasks = [t for t in self._tasks if type(t) is not type(message) and not isinstance(t, LeaveTask)]
            self._tasks.append(message)
        if isinstance(message, JoinTask):
            self._sent_bytes = 0  # another attempt sends everything again
        elif isinstance(message, SendTask):
            self._stillness.begin(self._loop.time())
        self._sender = replace(self._sender, told_s=self._loop.time(), task_heard_s=None)
        self._op.audience.tell(message)

    # -- time ---------------------------------------------------------------------------------------------------------

    def _next_limit_s(self) -> float:
        sender_s = limit_s(self.state, self._sender)
        deadline_s = self._op.forward_until_s if self._op.stop_fault is None else float("inf")
        return deadline_s if sender_s is None else min(deadline_s, sender_s)

    def _check_limits(self) -> None:
        now_s = self._loop.time()
        self._excuse_silence(now_s)
        if now_s >= self._op.forward_until_s and self._op.stop_fault is None:
            given_s = self._op.request.deadline_s
            why = f"not done within {given_s:g} s; it was in phase {self.state.phase}"
            self._op.stop(fault(FaultCode.DEADLINE, why, limit_s=f"{given_s:g}", phase=self.state.phase))
        if now_s >= self._op.ending_until_s and not self.state.is_out_of_time:
            self._handle(TimeUp())
        self._check_overdue(now_s)
        self._check_stillness(now_s)
        sender_s = limit_s(self.state, self._sender)
        if sender_s is not None and now_s >= sender_s - 1e-6:
            why = silence(self.state, self._sender, now_s)
            self._handle(SenderFailed(None, fault(FaultCode.SENDER_FAILED, why)))

    def _excuse_silence(self, now_s: float) -> None:
        has_stood_still = stood_still(self._looked_s, now_s)
        self._looked_s = now_s
        if has_stood_still or not self._line.bus.transport.is_connected:
            self._sender = replace(self._sender, deaf_s=now_s)
        if has_stood_still:
            self._stillness.begin(now_s)

    def _check_overdue(self, now_s: float) -> None:
        """A step that had the time up to the deadline, and lost it since somebody wants the op to end."""
        step = self.state.step
        if self._op.stop_fault is None or self.state.stage in FORWARD or step is None or not self.state.pending:
            return
        if now_s >= overdue_at_s(self._op.ending_until_s, self._step_begun_s):
            self._handle(StepOverdue(step, self._op.stop_fault))

    def _moved(self, num_bytes: int) -> None:
        """The transfer is so far, by the trainer's or a worker's word."""
        if num_bytes > self._sent_bytes:
            self._sent_bytes = num_bytes
            self._stillness.moved(self._loop.time())

    def _check_stillness(self, now_s: float) -> None:
        if self.state.stage is not Stage.RECEIVE or self.state.plan.request.on_failure is not OnFailure.RETRY:
            return
        for worker in self._stillness.lost(sorted(self.state.pending), now_s):
            why = f"no byte moves, and it gives no sign of life for over {STILL_S:g} s"
            self._handle(WorkerSilent(worker, fault(FaultCode.NO_ACK, why, retryable=True)))

    def _tick(self) -> None:
        if self.state.stage is Stage.RECEIVE:
            self._op.count(self._sent_bytes)
        else:
            self._op.count(len(self.state.seats) - len(self.state.pending))
        self._op.tick()
        is_expected = self.state.sender in (Sender.JOINING, Sender.SENDING)
        is_unheard = is_expected and self._sender.task_heard_s is None
        if is_unheard and self._loop.time() - self._sender.told_s >= REPEAT_TASK_S:
            self._op.audience.tell(self._tasks[-1])

    def _watch_pauses(self) -> None:
        """Note when engines began to stand still for this update, and when the last was let go."""
        holds = [seat.hold for seat in self.state.seats.values()]
        if self._paused_since_s is None and Hold.ASKED in holds:
            self._paused_since_s = self._loop.time()
        num_released = holds.count(Hold.RELEASED)
        if num_released > self._num_released:
            self._num_released, self._released_s = num_released, self._loop.time()

    def _paused_s(self) -> float:
        if self._paused_since_s is None:
            return 0.0
        until_s = self._loop.time() if self._released_s is None else self._released_s
        return until_s - self._paused_since_s
