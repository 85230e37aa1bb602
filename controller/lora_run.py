"""Carries out what `lora_load` and `lora_unload` decide, for one op: asks workers, waits, looks at the frontend."""

import asyncio
import contextlib
from collections.abc import Callable

from rlbus.controller import lora_load, lora_unload
from rlbus.controller.answers import StepAnswer
from rlbus.controller.asking import Asker
from rlbus.controller.causes import fault
from rlbus.controller.frontend import Frontend
from rlbus.controller.leases import renewing
from rlbus.controller.line import Line
from rlbus.controller.lora_state import (
    Answered,
    Ask,
    Began,
    Done,
    LoadAction,
    LoadEvent,
    LoadPlan,
    LoadState,
    Seat,
    Wait,
    Waited,
    Watch,
    Watched,
)
from rlbus.controller.lora_unload import UnloadPlan, UnloadState
from rlbus.controller.op import PROGRESS_S, Op
from rlbus.controller.report import verb_report
from rlbus.schemas import (
    Fault,
    FaultCode,
    LoraResult,
    LorasData,
    Outcome,
    PauseGeneration,
    Report,
    ResumeGeneration,
    WorkerId,
    WorkerOutcome,
    lora_id,
)


class LoadRun:
    """One load. `on_committed` is called once everybody shows it, before anybody is let go."""

    def __init__(
        self,
        op: Op,
        line: Line,
        plan: LoadPlan,
        frontend: Frontend | None,
        on_committed: Callable[[LoadState], None],
    ) -> None:
        self.state = lora_load.initial(plan)
        self._op = op
        self._line = line
        self._frontend = frontend
        self._on_committed = on_committed
        self._asker = Asker(op, line)
        self._loop = asyncio.get_running_loop()
        # Whom this op has paused and not let go.
        self._holding: set[WorkerId] = set()
        self._paused_at_s: float | None = None

    async def run(self) -> Report:
        """Do it. Cancel: workers go on with what they were sent; `Op.stop` is the way to take it back."""
        plan = self.state.plan
        async with renewing(self._line, self._op.op_id, plan.owner, lambda: sorted(self._holding)):
            action = self._decide(Began())
            while not isinstance(action, Done):
                action = self._decide(await self._do(action))
        if self._paused_at_s is not None:
            self._op.timings.paused_s = self._loop.time() - self._paused_at_s
        return self._report()

    def _decide(self, event: LoadEvent) -> LoadAction:
        was_committed = self.state.is_committed
        self.state, action = lora_load.decide(self.state, event)
        if self.state.is_committed and not was_committed:
            self._on_committed(self.state)
        return action

    async def _do(self, action: Ask | Wait | Watch) -> LoadEvent:
        match action:
            case Ask():
                if isinstance(action.body, PauseGeneration):
                    self._paused_at_s = self._loop.time()
                answers = await ask_step(self._asker, action, self._heard(action))
                return Answered(answers, stop_of(self._op), is_late=self._loop.time() >= self._op.ending_until_s)
            case Wait():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(action.wait_s):
                        await self._op.stopped.wait()
                self._op.tick()
                return Waited(stop_of(self._op))
            case Watch():
                problem = await self._watch(action.model)
                return Watched(problem, stop_of(self._op))

    def _heard(self, action: Ask) -> Callable[[WorkerId, StepAnswer], None]:
        def on_answer(worker: WorkerId, answer: StepAnswer) -> None:
            if answer.is_ok and isinstance(action.body, PauseGeneration):
                self._holding.add(worker)
            elif answer.is_ok and isinstance(action.body, ResumeGeneration):
                self._holding.discard(worker)

        return on_answer

    async def _watch(self, model: str) -> Fault | None:
        assert self._frontend is not None
        op = self._op
        op.enter("frontend", total=1, unit="frontends")
        watching = self._loop.create_task(
            self._frontend.until_shown(model, op.forward_until_s, is_stopped=op.stopped.is_set)
        )
        try:
            while not watching.done() and not op.stopped.is_set():
                await asyncio.wait({watching}, timeout=PROGRESS_S)
                op.tick()
        finally:
            watching.cancel()
            (problem,) = await asyncio.gather(watching, return_exceptions=True)
        if isinstance(problem, Exception):
            raise problem
        return problem if isinstance(problem, Fault) else None

    def _report(self) -> Report:
        self._op.finish()
        state, plan = self.state, self.state.plan
        result = LoraResult(
            ids=(plan.id,),
            checksum=plan.checksum,
            hot_swap=plan.is_hot_swap and state.is_committed,
            evicted=tuple(sorted(evicted(state))),
        )
        outcomes: dict[str, WorkerOutcome] = {w: outcome_of(state, seat) for w, seat in state.seats.items()}
        op = self._op
        return verb_report(op.op_id, op.name, outcomes, op.timings, state.causes, lora=result)


async def ask_step(
    asker: Asker, action: Ask, on_answer: Callable[[WorkerId, StepAnswer], None] | None = None
) -> dict[WorkerId, StepAnswer]:
    """One command to some workers, as it was decided. Cancel: what was sent goes on."""
    phase, step, body, workers = action.phase, action.step, action.body, action.workers
    if action.until_free:
        return await asker.until_free(phase, step, body, workers, on_answer=on_answer)
    return await asker.ask(phase, step, body, workers, is_final=action.is_final, on_answer=on_answer)


def stop_of(op: Op) -> Fault | None:
    """Why an op is to be taken back: somebody wants that, or its time is over."""
    if op.stop_fault is not None:
        return op.stop_fault
    if asyncio.get_running_loop().time() < op.forward_until_s:
        return None
    limit_s = op.request.deadline_s
    message = f"{op.name} didn't end within {limit_s:g} s, of which the last part is for taking it back"
    return fault(FaultCode.DEADLINE, message, limit_s=f"{limit_s:g}")


def evicted(state: LoadState) -> set[str]:
    """What had to go for it, by the engines' own lists."""
    gone: set[str] = set()
    for seat in state.seats.values():
        if seat.data is not None and state.is_committed and not seat.had:
            gone |= set(seat.data.evicted) | (seat.before - _ids(seat.data) - {state.plan.id})
    return gone


def _ids(data: LorasData) -> set[str]:
    return {lora_id(v.name, v.revision) for v in data.loras if v.revision is not None}


def outcome_of(state: LoadState, seat: Seat) -> WorkerOutcome:
    """How a load ended on one worker. Pure."""
    worker, blame = seat.worker, seat.blame
    if blame is not None:
        return WorkerOutcome(worker=worker, outcome=blame.outcome, phase=blame.phase, fault=blame.fault)
    if state.is_committed:
        data = None if seat.data is None else _only(seat.data, state.plan)
        return WorkerOutcome(
            worker=worker, outcome=Outcome.OK, phase="load" if seat.was_touched else "check", data=data
        )
    phase = state.failed_in or str(state.stage)
    return WorkerOutcome(worker=worker, outcome=Outcome.UNDONE if seat.was_touched else Outcome.SKIPPED, phase=phase)


def _only(data: LorasData, plan: LoadPlan) -> LorasData:
    """What a report keeps of an engine's list: this adapter."""
    views = tuple(v for v in data.loras if v.name == plan.name and v.revision == plan.revision)
    return LorasData(
        loras=views, capacity=data.capacity, hot_swap=data.hot_swap, evicted=data.evicted, cause=data.cause
    )


class UnloadRun:
    """One unload."""

    def __init__(self, op: Op, line: Line, plan: UnloadPlan) -> None:
        self.plan = plan
        self._op = op
        self._asker = Asker(op, line)

    async def run(self) -> Report:
        """Do it. Cancel: workers go on with what they got."""
        state, action = lora_unload.begin(self.plan)
        while isinstance(action, Ask):
            answers = await ask_step(self._asker, action)
            state, action = lora_unload.decide(state, Answered(answers, stop_of(self._op)))
        return self._report(state)

    def _report(self, state: UnloadState) -> Report:
        op = self._op
        op.finish()
        gone = tuple(lora_id(self.plan.name, revision) for revision in state.gone)
        causes = [blame.fault for blame in state.blames.values()]
        if not causes and len(gone) < len(self.plan.revisions) and state.stop is not None:
            causes = [state.stop]
        outcomes: dict[str, WorkerOutcome] = {w: self._outcome(state, w) for w in self.plan.workers}
        partly = tuple(lora_id(self.plan.name, revision) for revision in state.partly)
        result = LoraResult(ids=gone, num_draining=state.num_draining, partly=partly)
        return verb_report(op.op_id, op.name, outcomes, op.timings, causes, lora=result)

    def _outcome(self, state: UnloadState, worker: WorkerId) -> WorkerOutcome:
        blame, data = state.blames.get(worker), state.data.get(worker)
        if blame is not None:
            return WorkerOutcome(worker=worker, outcome=blame.outcome, phase=blame.phase, fault=blame.fault)
        if data is None or state.place + 1 < len(self.plan.revisions):
            return WorkerOutcome(worker=worker, outcome=Outcome.SKIPPED, phase="unload", fault=state.stop)
        data = LorasData(loras=tuple(v for v in data.loras if v.name == self.plan.name), capacity=data.capacity)
        return WorkerOutcome(worker=worker, outcome=Outcome.OK, phase="unload", data=data)
