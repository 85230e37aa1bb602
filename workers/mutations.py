"""One mutation against the engine: which engine calls a command means, in which order, and how their end is judged.

Invariants: the deadline is outside of the engine call, so an engine that never answers can't hold the agent; a call
that was cut off without saying what it left is judged as having touched the weights.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, cast

from rlbus.errors import FaultError, TransferError, error_from_fault, refused
from rlbus.schemas import (
    AbortWeights,
    ApplyUpdate,
    CommandBody,
    CommitWeights,
    DestroyGroup,
    Fault,
    FaultCode,
    FinishUpdate,
    FlushCache,
    Generation,
    GetChecksums,
    InitGroup,
    InitTransfer,
    LoadLora,
    LoadWeights,
    PauseGeneration,
    PauseMode,
    PrepareReload,
    PrepareWeightsUpdate,
    ReceiveWeights,
    ResultData,
    ResumeGeneration,
    SetVersion,
    ShutdownTransfer,
    Sleep,
    SleepData,
    SleepTag,
    StartUpdate,
    UnloadLora,
    Version,
    WakeUp,
    WeightsData,
    WeightsState,
    WeightsView,
    route_of,
)
from rlbus.transfer.sums import sums_digest
from rlbus.workers import lora_calls, native_calls
from rlbus.workers.checks import REFUSALS, asleep_problem, fault
from rlbus.workers.disk import DISK
from rlbus.workers.draft import after_commit, is_committed
from rlbus.workers.engines.base import Engine, Observed, ReceiveOrder, UpdateFailedError
from rlbus.workers.engines.draft import drafter
from rlbus.workers.engines.label import LabelEngine
from rlbus.workers.engines.sleep import in_order, sleeper
from rlbus.workers.lora_calls import Files, lora_engine
from rlbus.workers.moves import Action, Event, Flushed, SessionClosed, Started, Woke
from rlbus.workers.preconditions import path_problem
from rlbus.workers.sleeping import may_run, meant
from rlbus.workers.state import WorkerState

_log = logging.getLogger("rlbus.workers")

# How often the engine is asked whether it stands still: for 8 s, since of two looks that aren't answered only the first
# takes `AgentConfig.observe_s`, and the next one is told so; twice that if it clings to them. One that doesn't answer
# for seconds on a busy machine wasn't resumed by anybody; its worker says meanwhile that it is at work.
LOOKS = 16

# Commands during which the weights may change; one that was cut off leaves them in doubt.
_TOUCHING = (ReceiveWeights, CommitWeights, LoadWeights, ApplyUpdate, FinishUpdate)


def _touches(body: CommandBody) -> bool:
    return isinstance(body, _TOUCHING) or (isinstance(body, Sleep) and body.level >= 2)


class Surroundings(Protocol):
    """What a mutation needs of the agent."""

    @property
    def state(self) -> WorkerState:
        """As it is now."""
        ...

    # Folders below which weights may be loaded.
    weight_roots: tuple[str, ...]

    @property
    def lora_files(self) -> Files:
        """Where adapters come from."""
        ...

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Feed the state machine; what it wants done."""
        ...

    def accept(self) -> None:
        """Tell who waits that the command was validated and runs."""
        ...

    def on_ready(self) -> None:
        """The same for a transfer: the receiver stands; from any thread."""
        ...

    def on_progress(self, done: int, total: int) -> None:
        """Take the engine's count; from any thread."""
        ...

    async def observe(self) -> Observed:
        """Ask the engine, bounded; generation is unknown if it doesn't answer. Cancel: leaves nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the engine calls ended. With `is_refused` nothing was changed; `is_touched` counts only with a fault."""

    data: ResultData | None = None
    fault: Fault | None = None
    is_refused: bool = False
    is_touched: bool = False


async def perform(engine: Engine, op_id: str, body: CommandBody, around: Surroundings) -> ResultData | None:
    """Call the engine as `body` asks for. Raises what the engine raises. Cancel: passes on to the engine call."""
    match body:
        case PauseGeneration():
            return await engine.pause(_mode_on_top(body.mode, around.state), body.clear_cache)
        case ResumeGeneration():
            await _resume(engine, around)
        case FlushCache():
            await engine.flush_cache()
        case PrepareWeightsUpdate():
            pass  # checked before it was accepted; there is nothing to do
        case InitGroup():
            return await _join(engine, body, around)
        case DestroyGroup():
            if around.state.epoch == body.epoch:
                await engine.leave_group()
        case ReceiveWeights():
            return await _receive(engine, body, around)
        case CommitWeights():
            if not is_committed(around.state, body):
                await engine.finish_update(body.version)
            return after_commit(around.state, body)
        case AbortWeights():
            session = around.state.session
            if session is not None and session.update_op_id == body.update_op_id:
                await _close_session(engine, around)
        case PrepareReload():
            await _check_path(body.path, around)
            await engine.check_checkpoint(body.path)
            if body.sums_digest is not None:
                await _check_sums(engine, body.path, body.sums_digest)
        case LoadWeights():
            return await _load(engine, op_id, body, around)
        case SetVersion():
            return await _name(engine, body)
        case GetChecksums():
            return await (drafter(engine).draft_checksums() if body.is_draft else engine.checksums())
        case Sleep():
            return await _sleep(engine, body, around)
        case WakeUp():
            return await _wake_up(engine, body, around)
        case LoadLora():
            return await lora_calls.load(lora_engine(engine), op_id, body, around)
        case UnloadLora():
            return await lora_calls.unload(lora_engine(engine), body, around)
        case InitTransfer() | ShutdownTransfer() | StartUpdate() | ApplyUpdate() | FinishUpdate():
            return await native_calls.perform(engine, op_id, body, around, lambda: _check_stands_still(around))
        case _:
            raise refused(FaultCode.NO_ROUTE, f"{route_of(body)} is no mutation")
    return None


def _mode_on_top(mode: PauseMode, state: WorkerState) -> PauseMode:
    """What a pause asks of an engine that stands still already: a wait would have it finish what is held, maybe on
    torn weights.
    """
    stands_still = state.pause is not None or state.asleep
    return PauseMode.KEEP if mode is PauseMode.WAIT and stands_still else mode


async def _resume(engine: Engine, around: Surroundings) -> None:
    """Forced over an open session, that one is given up first; and never on caches of older weights (rule 7)."""
    if around.state.session is not None:
        await _close_session(engine, around)
    if around.state.owes_flush:
        await engine.flush_cache()
        around.apply(Flushed())
    await engine.resume()


async def _sleep(engine: Engine, body: Sleep, around: Surroundings) -> SleepData:
    """What sleeps already, by the engine's own word, isn't put to sleep again."""
    observed = await around.observe()
    known = around.state.asleep if observed.generation is Generation.UNKNOWN else observed.asleep
    tags = meant(around.state, body) - known
    if not tags:
        return SleepData(asleep=in_order(known))
    return await sleeper(engine).sleep(tags, body.level, _mode_on_top(body.mode, around.state))


async def _wake_up(engine: Engine, body: WakeUp, around: Surroundings) -> SleepData:
    """Then it goes on if it may; a wake that failed at that does it when it is asked for again."""
    tags = meant(around.state, body)
    data = await sleeper(engine).wake_up(tags)
    around.apply(Woke(tags))
    if may_run(around.state):
        await _resume(engine, around)
    return data


async def _close_session(engine: Engine, around: Surroundings) -> None:
    await engine.abort_update()
    around.apply(SessionClosed())


async def _join(engine: Engine, body: InitGroup, around: Surroundings) -> ResultData:
    state = around.state
    span = next(s for s in body.plan.spans if (s.component, s.instance_id) == (state.component, state.instance_id))
    assert state.running is not None
    around.apply(Started(state.running.op_id))
    joined = await engine.join_group(body.plan, span)
    expected = tuple(range(span.first, span.first + span.num_ranks))
    if (joined.epoch, joined.ranks, joined.world_size) != (body.plan.epoch, expected, body.plan.world_size):
        raise TransferError(
            f"group {body.plan.epoch}",
            f"joined as ranks {joined.ranks} of {joined.world_size}, not as {expected} of {body.plan.world_size}",
        )
    return joined


async def _receive(engine: Engine, body: ReceiveWeights, around: Surroundings) -> ResultData:
    await _check_stands_still(around)
    if around.state.session is not None:
        # Whoever opened it is gone; what it brought is given up, so that this one can begin.
        await _close_session(engine, around)
    state = around.state
    assert state.prepared is not None
    assert state.running is not None
    order = ReceiveOrder(
        body.update_op_id, body.epoch, body.version, state.prepared.tensors, body.bucket_bytes, body.is_draft
    )
    around.apply(Started(state.running.op_id))
    return await engine.receive_weights(order, around.on_ready, around.on_progress)


async def _check_path(path: str, around: Surroundings) -> None:
    problem = await DISK.run(lambda: path_problem(path, around.weight_roots), path)
    if problem is not None:
        raise error_from_fault(problem)


async def _check_sums(engine: Engine, path: str, digest: str) -> None:
    """Whether the folder is what the fleet has: a name and a version prove nothing."""
    found = sums_digest(await engine.checkpoint_sums(path))
    if found != digest:
        message = f"{path} isn't what the fleet has: its checksums are others"
        raise refused(FaultCode.MANIFEST_MISMATCH, message, path=path, found=found, expected=digest)


async def _load(engine: Engine, op_id: str, body: LoadWeights, around: Surroundings) -> ResultData:
    await _check_path(body.path, around)
    await _check_stands_still(around)
    around.accept()
    if around.state.session is not None:
        await _close_session(engine, around)
    around.apply(Started(op_id))
    await engine.load_weights(body.path, body.version)
    return _clean(body.version)


async def _name(engine: Engine, body: SetVersion) -> ResultData:
    # The route says that the engine has it, and is checked before.
    await cast(LabelEngine, engine).label_weights(body.version)
    return _clean(body.version)


def _clean(version: Version) -> WeightsData:
    return WeightsData(weights=WeightsView(state=WeightsState.CLEAN, version=version, last_good=version))


async def _check_stands_still(around: Surroundings) -> None:
    """What was commanded isn't enough before the first byte: somebody may have resumed the engine behind our back."""
    for _ in range(LOOKS):
        observed = await around.observe()
        if observed.generation is not Generation.UNKNOWN:
            break
    if SleepTag.WEIGHTS in observed.asleep:
        raise error_from_fault(asleep_problem(observed.asleep & {SleepTag.WEIGHTS}, "an update"))
    if observed.generation is not Generation.PAUSED:
        raise refused(
            FaultCode.WRONG_STATE,
            f"the engine says that it is {observed.generation.value}, though it was paused; pause it again",
            observed=observed.generation.value,
        )


def accepts_late(body: CommandBody) -> bool:
    """Whether `perform` says itself when the command counts as accepted."""
    return isinstance(body, ReceiveWeights | LoadWeights | LoadLora)


# --- bounds


class EngineCall:
    """A task around engine calls that can be given up: at a deadline, or when somebody takes the op back.

    `task` may outlive `settle` if the engine clings to it; its owner waits for it before the next mutation.
    """

    def __init__(self, call: Coroutine[Any, Any, ResultData | None], body: CommandBody) -> None:
        self.task = asyncio.get_running_loop().create_task(call)
        self._body = body
        self._taken_back: asyncio.Future[Fault] = asyncio.get_running_loop().create_future()

    def take_back(self, cause: Fault) -> None:
        """End it soon, with `cause` as the reason. Only the first reason counts."""
        if not self._taken_back.done():
            self._taken_back.set_result(cause)

    async def wait(self, limit_s: float) -> Fault | None:
        """Until the task is done (None), or `limit_s` has passed or somebody took it back (why).

        Cancel: the task goes on; its owner ends it.
        """
        waited: set[asyncio.Future[Any]] = {self.task, self._taken_back}
        await asyncio.wait(waited, timeout=max(limit_s, 0), return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            return None
        if self._taken_back.done():
            return self._taken_back.result()
        limit = f"{limit_s:.3g}"
        return fault(FaultCode.DEADLINE, f"{route_of(self._body)} did not end within {limit} s", limit_s=limit)

    async def give_up(
        self, release: Callable[[], Coroutine[Any, Any, None]] | None, release_s: float, cancel_s: float
    ) -> None:
        """Let it end by itself after `release` if there is one, else cancel it. Returns even if it clings.

        Cancel: the task may go on; its owner ends it.
        """
        if release is not None:

            async def let_go() -> None:  # here and not before, since what is cancelled before it began never calls it
                await within(release(), release_s, cancel_s, "releasing a stuck transfer")

            await asyncio.gather(let_go(), asyncio.wait({self.task}, timeout=release_s))
        if not self.task.done():
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=cancel_s)

    def outcome(self, cause: Fault | None) -> Outcome:
        """What it came to. `cause` is why it was given up, if it was."""
        if not self.task.done() or self.task.cancelled():
            stopped = cause or fault(FaultCode.CANCELLED, f"{route_of(self._body)} was cancelled inside the engine")
            return Outcome(fault=stopped, is_touched=_touches(self._body))
        error = self.task.exception()
        if error is None:
            return Outcome(data=self.task.result())
        judged = judge(error, self._body)
        if cause is not None and not judged.is_refused:
            said = judged.fault.message if judged.fault else ""
            because = Fault(code=cause.code, message=cause.message, detail={**cause.detail, "engine": said})
            return Outcome(fault=because, is_touched=judged.is_touched)
        return judged


async def within(call: Coroutine[Any, Any, None], limit_s: float, cancel_s: float, what: str) -> bool:
    """Make an engine call that follows a failure; whether it succeeded. Bounded, and never raises for the engine.

    Cancel: the call is cancelled too.
    """
    task = asyncio.get_running_loop().create_task(call)
    try:
        await asyncio.wait({task}, timeout=limit_s)
    finally:
        task.cancel()
    await asyncio.wait({task}, timeout=cancel_s)
    if not task.done() or task.cancelled():
        _log.error("%s did not end within %g s", what, limit_s)
        return False
    if (error := task.exception()) is not None:
        _log.error("%s failed", what, exc_info=error)
    return error is None


def judge(error: BaseException, body: CommandBody) -> Outcome:
    """What an engine's error means. The traceback of one that isn't ours goes to the log, never over the wire."""
    touching = _touches(body)
    match error:
        case UpdateFailedError():
            return Outcome(fault=error.fault, is_touched=error.weights_touched)
        case FaultError():
            return Outcome(fault=error.fault, is_refused=error.code in REFUSALS, is_touched=touching)
        case TransferError():
            code = FaultCode.GROUP_FAILED if isinstance(body, InitGroup) else FaultCode.TRANSFER_FAILED
            return Outcome(fault=fault(code, str(error)), is_touched=touching)
    _log.error("the engine raised in %s", route_of(body), exc_info=error)
    name = type(error).__name__
    failed = fault(FaultCode.ENGINE_FAILED, f"the engine raised {name} in {route_of(body)}; see its log", error=name)
    return Outcome(fault=failed, is_touched=touching)
