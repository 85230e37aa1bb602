"""The one place for mutations: runs them, bounds them, cleans up after a failed one, and tells who waits.

Invariants: exactly one result per op; the place is free before the result is sent, so the next command isn't refused as
busy; it isn't free while an engine call clings to life after its deadline, since a second one would run beside it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

from rlbus._clock import Clock
from rlbus.schemas import (
    RECEIVING,
    ApplyUpdate,
    Command,
    Fault,
    FaultCode,
    InitTransfer,
    LoadLora,
    ReceiveWeights,
    ResultStatus,
    SleepTag,
    UnloadLora,
    route_of,
)
from rlbus.workers.answers import Answers
from rlbus.workers.checks import fault
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.base import Engine, Observed
from rlbus.workers.engines.native import NativeEngine
from rlbus.workers.engines.sleep import sleeper
from rlbus.workers.journal import Journal, Record
from rlbus.workers.leases import RETRY_S
from rlbus.workers.lora_calls import Files, lora_engine, settle, unsettled
from rlbus.workers.lora_files import LoraFiles
from rlbus.workers.moves import (
    Action,
    Cleanup,
    Ended,
    Event,
    FirstByte,
    GroupLeft,
    MayStand,
    Released,
    SessionClosed,
    Started,
    WakeAgain,
    WakeDue,
    Woke,
)
from rlbus.workers.mutations import EngineCall, Outcome, accepts_late, perform, within
from rlbus.workers.refusals import Refusals
from rlbus.workers.sleeping import may_run
from rlbus.workers.state import WorkerState

# Engine calls that may follow one failure at most: each `Cleanup`, and waking.
NUM_CLEANUPS = len(Cleanup) + 1

_log = logging.getLogger("rlbus.workers")


class Host(Protocol):
    """What the slot needs of the agent."""

    journal: Journal
    answers: Answers
    refusals: Refusals
    lora_files: LoraFiles

    @property
    def state(self) -> WorkerState:
        """As it is now."""
        ...

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Feed the state machine; what it wants done."""
        ...

    async def observe(self) -> Observed:
        """Ask the engine, bounded. Cancel: leaves nothing."""
        ...

    def new_op_id(self) -> str:
        """One that no op has."""
        ...

    def lose(self, why: str) -> None:
        """The engine will never come back."""
        ...


class _Op:
    """One running mutation, as `perform` sees its surroundings. Late calls of an abandoned thread change nothing."""

    def __init__(self, host: Host, command: Command, record: Record, weight_roots: tuple[str, ...]) -> None:
        self._host = host
        self.lora_files: Files = host.lora_files
        self.weight_roots = weight_roots
        self._loop = asyncio.get_running_loop()
        self.command = command
        self.record = record
        self.call: EngineCall | None = None
        # The engine was about to be called, so "refused" would be a lie from here on.
        self.has_started = False
        # The engine's part is judged; whatever it still says comes too late.
        self.is_over = False

    @property
    def state(self) -> WorkerState:
        return self._host.state

    def apply(self, event: Event) -> tuple[Action, ...]:
        if self.is_over:
            return ()
        self.has_started = self.has_started or isinstance(event, Started)
        return self._host.apply(event)

    def accept(self) -> None:
        if self.is_over or self.record.is_accepted:
            return
        self.record.is_accepted = True
        for reply in self.record.replies:
            self._host.answers.accepted(self.record.op_id, reply)
        if isinstance(self.command.body, ReceiveWeights):
            self.record.phase = RECEIVING

    def on_ready(self) -> None:
        self._soon(self.accept)

    def on_progress(self, done: int, total: int) -> None:
        is_first = self.record.done == 0 and done > 0
        self.record.done, self.record.total = max(done, self.record.done), total
        if is_first:
            self._soon(self._first_byte)

    def _soon(self, call: Callable[[], None]) -> None:
        """On the loop, from whichever thread the engine calls us."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def _first_byte(self) -> None:
        self.apply(FirstByte(self.record.op_id))

    async def observe(self) -> Observed:
        return await self._host.observe()


class Slot:
    """Runs one mutation at a time, and behind it at most the one that takes it back."""

    def __init__(self, engine: Engine, host: Host, clock: Clock, config: AgentConfig) -> None:
        self._engine = engine
        self._host = host
        self._clock = clock
        self._config = config
        # Of the op that runs now, or ran last.
        self._call: EngineCall | None = None
        self._op_id: str | None = None
        self._task: asyncio.Task[None] | None = None
        # Every task that hasn't ended; at most the running one, the queued one, and one that is just ending.
        self._tasks: set[asyncio.Task[None]] = set()
        # Runs while a failed sleep has left something asleep.
        self._wake_timer: asyncio.TimerHandle | None = None

    def begin(self, command: Command, record: Record, takes_back: str | None) -> None:
        """Run a mutation that the state machine has admitted; with `takes_back` end that op first."""
        op = _Op(self._host, command, record, self._config.weight_roots)
        record.phase = record.route
        if not accepts_late(command.body):
            op.accept()
        previous = self._task if takes_back is not None else None
        if takes_back is not None and self._call is not None:
            by = f"{record.route} {command.op_id}"
            self._call.take_back(fault(FaultCode.CANCELLED, f"op {takes_back} was taken back by {by}", by=by))
        if previous is None:
            self._start_call(op)
        self._task = self._own(self._run(op, previous))

    def take_back(self, op_id: str, why: Fault) -> None:
        """End the running op for `why`, if it is this one."""
        if self._call is not None and self._op_id == op_id:
            self._call.take_back(why)

    async def drain(self, limit_s: float) -> None:
        """Give what runs `limit_s` to end, then end it. Bounded. Cancel: tasks are cancelled at once."""
        try:
            await self._wait_all(limit_s)
            if self._call is not None and self._tasks:
                self._call.take_back(fault(FaultCode.CANCELLED, "the worker stops"))
            config = self._config
            await self._wait_all(config.release_s + config.cancel_s + NUM_CLEANUPS * config.undo_s)
        finally:
            if self._wake_timer is not None:
                self._wake_timer.cancel()
            for task in self._tasks:
                task.cancel()
        await self._wait_all(self._config.cancel_s)

    async def _wait_all(self, limit_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)

    def _own(self, run: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(run)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _start_call(self, op: _Op) -> None:
        body = op.command.body
        self._op_id = op.command.op_id
        op.call = self._call = EngineCall(perform(self._engine, op.command.op_id, body, op), body)

    async def _run(self, op: _Op, previous: asyncio.Task[None] | None) -> None:
        ticker = asyncio.get_running_loop().create_task(self._tick(op.record))
        try:
            if previous is not None:
                await asyncio.wait({previous}, timeout=self._left_s(op))
                if not previous.done():
                    self._give_up_waiting(op)
                    await asyncio.wait({previous})
                    if isinstance(op.command.body, UnloadLora):
                        self._host.apply(unsettled(op.command.body))
                    self._host.apply(Released(op.command.op_id, self._clock.now()))
                    return
                self._start_call(op)
            await self._execute(op)
        except Exception:  # noqa: BLE001 - a bug of ours: logged here, reported as `internal`
            _log.exception("op %s broke the agent's slot", op.command.op_id)
            self._end(op, Outcome(fault=fault(FaultCode.INTERNAL, "the agent failed; see its log")))
            self._host.apply(Released(op.command.op_id, self._clock.now()))
        finally:
            ticker.cancel()
            if op.call is not None:
                op.call.task.cancel()

    async def _execute(self, op: _Op) -> None:
        call = op.call
        assert call is not None
        cause = await call.wait(self._left_s(op))
        if cause is not None:
            await call.give_up(self._release(op), self._config.release_s, self._config.cancel_s)
        op.is_over = True
        outcome = call.outcome(cause)
        if outcome.fault is not None and isinstance(op.command.body, LoadLora | UnloadLora):
            outcome = await self._settle(op, op.command.body, call, outcome)
        if outcome.is_refused and op.has_started:
            outcome = Outcome(fault=outcome.fault, is_touched=outcome.is_touched)
        if not outcome.is_refused:
            ended = Ended(op.command.op_id, self._clock.now(), outcome.fault, outcome.is_touched)
            await self._clean_up(self._host.apply(ended), call)
        if call.task.done():
            self._host.apply(Released(op.command.op_id, self._clock.now()))
            self._end(op, outcome)
            return
        self._end(op, outcome)
        _log.error("the engine clings to op %s (%s); nothing else can run", op.command.op_id, op.record.route)
        _, pending = await asyncio.wait({call.task}, timeout=self._config.cling_s)
        if pending:
            self._host.lose(f"it doesn't come back from {op.record.route}")
            await asyncio.wait({call.task})
        self._host.apply(Released(op.command.op_id, self._clock.now()))

    async def _settle(self, op: _Op, body: LoadLora | UnloadLora, call: EngineCall, outcome: Outcome) -> Outcome:
        """A call about an adapter that failed, or was cut off, came to what the engine's own list says."""
        assert outcome.fault is not None
        if outcome.is_refused and not op.has_started:
            return outcome
        if not call.task.done():
            self._host.apply(unsettled(body))
            return outcome
        limit_s = self._config.undo_s
        engine, host = lora_engine(self._engine), self._host
        data, why = await settle(engine, body, outcome.fault, lambda: host.state, host.apply, limit_s)
        return Outcome(data=data, fault=why)

    def _left_s(self, op: _Op) -> float:
        return max(0.0, op.command.expires_at - self._clock.now())

    def _release(self, op: _Op) -> Callable[[], Coroutine[Any, Any, None]] | None:
        """A stuck receive is let go by dropping its group, and then says itself whether it touched the weights."""
        if not op.has_started:
            return None
        match op.command.body:
            case ReceiveWeights():
                return self._leave
            case ApplyUpdate() | InitTransfer():
                return cast(NativeEngine, self._engine).shutdown_native
            case _:
                return None

    async def _leave(self) -> None:
        await self._engine.leave_group()
        self._host.apply(GroupLeft())

    async def _clean_up(self, actions: tuple[Action, ...], call: EngineCall) -> None:
        config = self._config
        for action in actions:
            match action:
                case Cleanup.CLOSE_SESSION:
                    if await within(self._engine.abort_update(), config.undo_s, config.cancel_s, "closing a session"):
                        self._host.apply(SessionClosed())
                case Cleanup.LEAVE_GROUP:
                    await within(self._engine.leave_group(), config.undo_s, config.cancel_s, "leaving a group")
                    self._host.apply(GroupLeft())
                case WakeAgain(tags):
                    await self._wake_again(tags, call)
                case Cleanup.RESUME if may_run(self._host.state):
                    what = "resuming after a failure"
                    is_done = await within(self._engine.resume(), config.undo_s, config.cancel_s, what)
                    if not (is_done and call.task.done()):
                        self._host.apply(MayStand())

    async def _wake_again(self, tags: frozenset[SleepTag], call: EngineCall) -> None:
        async def wake() -> None:
            await sleeper(self._engine).wake_up(tags)

        is_done = await within(wake(), self._config.undo_s, self._config.cancel_s, "waking after a failed sleep")
        if is_done and call.task.done():
            self._host.apply(Woke(tags))
        else:
            self.wake_later()

    def wake_later(self) -> None:
        """What a failed sleep has left asleep, if anything, is woken in a moment, and again until that is done."""
        if self._wake_timer is not None:
            self._wake_timer.cancel()
        self._wake_timer = None
        if self._host.state.to_wake:
            self._wake_timer = asyncio.get_running_loop().call_later(RETRY_S, self._on_wake_due)

    def _on_wake_due(self) -> None:
        self._host.apply(WakeDue(self._host.new_op_id(), self._clock.now()))
        self.wake_later()

    def _give_up_waiting(self, op: _Op) -> None:
        # An adapter is unloaded all the same once its load has ended, so "refused" would be a lie.
        is_refused = not isinstance(op.command.body, UnloadLora)
        self._end(op, Outcome(fault=_not_let_go(op, self._op_id), is_refused=is_refused))

    def _end(self, op: _Op, outcome: Outcome) -> None:
        """Record the one result, and send it to all who wait."""
        record, host = op.record, self._host
        if record.result is not None:
            return
        took_s = asyncio.get_running_loop().time() - record.began_s
        if outcome.is_refused:
            host.journal.forget(record)
            assert outcome.fault is not None
            host.refusals.note(op.command, outcome.fault)
            host.answers.refuse(record.op_id, record.replies, outcome.fault, record.route, self._clock.now())
            return
        status = ResultStatus.OK if outcome.fault is None else ResultStatus.FAILED
        result = host.answers.build(record.op_id, status, fault=outcome.fault, data=outcome.data, took_s=took_s)
        host.journal.end(record, result)
        for reply in record.replies:
            host.answers.result(reply, result)

    async def _tick(self, record: Record) -> None:
        """A sign of life at least every second; it never claims more than the engine has counted."""
        while record.result is None:
            await asyncio.sleep(self._config.progress_s)
            self._host.answers.progress(record)


def _not_let_go(op: _Op, before: str | None) -> Fault:
    message = f"{route_of(op.command.body)}: the op before it didn't let go in time"
    return fault(FaultCode.BUSY, message, op_id=before, retryable=True)
