"""What an agent does beside a mutation: answers to queries, aborts of requests. None shares its task or lock."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from rlbus._clock import Clock
from rlbus.errors import EngineError, FaultError
from rlbus.schemas import (
    AbortedData,
    AbortRequest,
    Command,
    Descriptor,
    Fault,
    FaultCode,
    GetLoras,
    GetOutcome,
    GetStatus,
    GetVersion,
    Hello,
    LorasData,
    OutcomeData,
    PutManifest,
    RenewLease,
    ResultData,
    ResultStatus,
    StatusData,
    WeightsData,
    WorkerStatus,
    route_of,
)
from rlbus.transfer.manifest import ManifestBook
from rlbus.workers.answers import Answers
from rlbus.workers.checks import fault
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.aborting import CountsAborts
from rlbus.workers.engines.base import Engine, Observed
from rlbus.workers.journal import Journal, Record
from rlbus.workers.mutations import EngineCall
from rlbus.workers.state import WorkerState

# Queries and aborts that wait for the engine at the same time.
MAX_SIDE_TASKS = 64


class Host(Protocol):
    """What this needs of the agent."""

    journal: Journal
    answers: Answers
    descriptor: Descriptor

    @property
    def state(self) -> WorkerState:
        """As it is now."""
        ...

    def status(self) -> WorkerStatus:
        """Commanded state beside what the engine said last."""
        ...

    def refuse(self, command: Command, reply: str | None, why: Fault) -> None:
        """Tell who asks that nothing was done, and why."""
        ...

    def announce_soon(self) -> None:
        """Let the next heartbeat come now."""
        ...

    async def observe(self) -> Observed:
        """Ask the engine, bounded. Cancel: leaves nothing."""
        ...

    async def look_at_loras(self) -> None:
        """Ask the engine for its adapters, for the status, bounded. Cancel: leaves nothing."""
        ...

    async def list_loras(self, limit_s: float) -> LorasData:
        """Ask the engine for its adapters, bounded. Raises EngineError. Cancel: leaves nothing."""
        ...


class Beside:
    """Answers the commands that never wait for a mutation. One per agent; `aclose` ends what still runs."""

    def __init__(self, engine: Engine, host: Host, clock: Clock, config: AgentConfig, book: ManifestBook) -> None:
        self._engine = engine
        self._host = host
        self._clock = clock
        self._config = config
        self._book = book
        self._tasks: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """End the tasks, within `cancel_s`. Cancel: they are cancelled all the same."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._config.cancel_s)

    def answer(self, command: Command, reply: str | None) -> None:
        """Answer at once, or begin to; the agent has checked the command."""
        match command.body:
            case Hello():
                self._host.announce_soon()
                self._answer(command, reply, StatusData(descriptor=self._host.descriptor, status=self._host.status()))
            case GetVersion():
                state = self._host.state
                self._answer(command, reply, WeightsData(weights=state.weights, draft=state.draft))
            case GetOutcome() as body:
                self._answer_outcome(command, reply, body)
            case RenewLease():
                self._end_at_once(command, reply)
            case PutManifest() as body:
                self._put_manifest(command, reply, body)
            case GetStatus() | GetLoras() | AbortRequest() if len(self._tasks) >= MAX_SIDE_TASKS:
                busy = fault(FaultCode.BUSY, f"{MAX_SIDE_TASKS} others wait for the engine", retryable=True)
                self._host.refuse(command, reply, busy)
            case GetLoras():
                # An engine may be slow to say; the worker isn't silent meanwhile.
                self._host.answers.accepted(command.op_id, reply)
                self._own(self._answer_loras(command, reply))
            case GetStatus():
                self._own(self._answer_status(command, reply))
            case AbortRequest() as body:
                record = self._host.journal.begin(command, reply, asyncio.get_running_loop().time())
                record.is_accepted = True
                self._host.answers.accepted(command.op_id, reply)
                self._own(self._abort(command, record, body))

    def _answer(self, command: Command, reply: str | None, data: ResultData) -> None:
        self._host.answers.result(reply, self._host.answers.build(command.op_id, ResultStatus.OK, data=data))

    def _answer_outcome(self, command: Command, reply: str | None, body: GetOutcome) -> None:
        record = self._host.journal.find(body.of_op_id)
        if record is None:
            unknown = fault(FaultCode.UNKNOWN_OP, f"no record of op {body.of_op_id}", op_id=body.of_op_id)
            self._host.refuse(command, reply, unknown)
            return
        result = record.result
        data = OutcomeData(
            of_op_id=body.of_op_id,
            running=result is None,
            status=None if result is None else result.status,
            fault=None if result is None else result.fault,
        )
        self._answer(command, reply, data)

    def _put_manifest(self, command: Command, reply: str | None, body: PutManifest) -> None:
        try:
            self._book.add(body.page)
        except FaultError as exc:
            self._host.refuse(command, reply, exc.fault)
            return
        self._end_at_once(command, reply)

    def _end_at_once(self, command: Command, reply: str | None) -> None:
        """What was done on arrival is recorded as done."""
        record = self._host.journal.begin(command, reply, asyncio.get_running_loop().time(), is_kept=False)
        result = self._host.answers.build(command.op_id, ResultStatus.OK)
        self._host.journal.end(record, result)
        self._host.answers.result(reply, result)

    def _own(self, run: Coroutine[Any, Any, None]) -> None:
        """Own a task that waits for the engine beside a mutation."""
        task = asyncio.get_running_loop().create_task(run)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_status(self, command: Command, reply: str | None) -> None:
        await self._host.look_at_loras()
        await self._host.observe()  # last, so that it isn't older than what the engine was told
        self._answer(command, reply, StatusData(descriptor=self._host.descriptor, status=self._host.status()))

    async def _answer_loras(self, command: Command, reply: str | None) -> None:
        asking = asyncio.ensure_future(self._host.list_loras(command.expires_at - self._clock.now()))
        try:
            while not (await asyncio.wait({asking}, timeout=self._config.progress_s))[0]:
                self._host.answers.at_work(command.op_id, reply, route_of(command.body))
            data = await asking
        except EngineError as exc:
            failed = self._host.answers.build(command.op_id, ResultStatus.FAILED, fault=exc.fault)
            self._host.answers.result(reply, failed)
            return
        finally:
            asking.cancel()
        self._answer(command, reply, data)

    async def _abort(self, command: Command, record: Record, body: AbortRequest) -> None:
        async def abort() -> AbortedData:
            if isinstance(self._engine, CountsAborts):
                return await self._engine.abort_counted(body.request_ids)
            return AbortedData(num_aborted=await self._engine.abort(body.request_ids))

        call = EngineCall(abort(), body)
        try:
            cause = await call.wait(command.expires_at - self._clock.now())
            if cause is not None:
                await call.give_up(None, 0.0, self._config.cancel_s)
        finally:
            call.task.cancel()
        outcome = call.outcome(cause)
        status = ResultStatus.OK if outcome.fault is None else ResultStatus.FAILED
        took_s = asyncio.get_running_loop().time() - record.began_s
        result = self._host.answers.build(command.op_id, status, fault=outcome.fault, data=outcome.data, took_s=took_s)
        self._host.journal.end(record, result)
        for address in record.replies:
            self._host.answers.result(address, result)
