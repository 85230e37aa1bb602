"""The ranks of a torch engine as its event loop sees them: its own, and those in processes of their own.

Both let blocking work be left behind: `leave` releases what is stuck in the group, and a rank that doesn't answer
after that is given up by its engine.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from rlbus._process import die_with_parent
from rlbus.errors import DeadlineError, EngineDeadError, error_from_fault
from rlbus.schemas import Fault, FaultCode, GroupPlan, ReceivedData, TensorSum
from rlbus.transfer.bounded import run_in_thread
from rlbus.workers.engines.base import ProgressFn, ReadyFn, ReceiveOrder, UpdateFailedError
from rlbus.workers.torch_lm import rank_messages as m
from rlbus.workers.torch_lm.rank import Rank, Seat

T = TypeVar("T")

# A process of a further rank imports torch and reads the model.
LOAD_S = 300.0
# How long a process may take to end once its input has ended, before it is killed.
STOP_S = 2.0


class EngineRank(Protocol):
    """What an engine asks of each of its ranks. Cancel, of every coroutine: the work goes on until `leave` ends it."""

    async def join(self, plan: GroupPlan, rank: int) -> Seat:
        """See `Rank.join`."""
        ...

    def leave(self, reason: str) -> None:
        """See `Rank.leave`."""
        ...

    async def receive(self, order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
        """See `Rank.receive`. `on_progress` is told bytes done, and in all 0 if that isn't known here."""
        ...

    async def stage(self, path: str) -> None:
        """See `Rank.stage`."""
        ...

    async def apply(self) -> None:
        """See `Rank.apply`."""
        ...

    async def discard(self) -> None:
        """See `Rank.discard`."""
        ...

    async def checksums(self) -> tuple[TensorSum, ...]:
        """See `Rank.checksums`."""
        ...

    async def sleep(self, keeps: bool) -> int:
        """See `Rank.sleep`."""
        ...

    async def wake(self) -> int:
        """See `Rank.wake`."""
        ...

    def check_alive(self) -> None:
        """Raise EngineDeadError if it is gone."""
        ...

    def kill(self) -> None:
        """It doesn't answer any more."""
        ...

    async def aclose(self) -> None:
        """Leave nothing behind. Idempotent."""
        ...


class OwnRank:
    """The rank in this process, each call in a thread."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        # A thread of it is stuck for good.
        self._is_lost = False

    async def join(self, plan: GroupPlan, rank: int) -> Seat:
        """See `EngineRank`."""
        give_up = self._rank.begin_join()
        return await run_in_thread(lambda: self._rank.join(plan, rank, give_up), name="rlbus join")

    def leave(self, reason: str) -> None:
        """See `EngineRank`."""
        self._rank.leave(reason)

    async def receive(self, order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
        """See `EngineRank`."""
        return await run_in_thread(lambda: self._rank.receive(order, on_ready, on_progress), name="rlbus receive")

    async def stage(self, path: str) -> None:
        """See `EngineRank`."""
        await run_in_thread(lambda: self._rank.stage(path), name="rlbus stage")

    async def apply(self) -> None:
        """See `EngineRank`."""
        await run_in_thread(self._rank.apply, name="rlbus apply")

    async def discard(self) -> None:
        """See `EngineRank`."""
        self._rank.discard()

    async def checksums(self) -> tuple[TensorSum, ...]:
        """See `EngineRank`."""
        return await run_in_thread(self._rank.checksums, name="rlbus checksums")

    async def sleep(self, keeps: bool) -> int:
        """See `EngineRank`."""
        return await run_in_thread(lambda: self._rank.sleep(keeps), name="rlbus sleep")

    async def wake(self) -> int:
        """See `EngineRank`."""
        return await run_in_thread(self._rank.wake, name="rlbus wake")

    def check_alive(self) -> None:
        """See `EngineRank`."""
        if self._is_lost:
            text = "a call is stuck in this process and can't be ended; the process has to be started again"
            raise EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=text))

    def kill(self) -> None:
        """See `EngineRank`. A thread can't be killed; `leave` has forbidden it to write, and the engine is dead."""
        self._is_lost = True

    async def aclose(self) -> None:
        """See `EngineRank`."""
        self._rank.leave("the engine is closed")
        self._rank.forget()


class _Call:
    """A request that waits for its end."""

    def __init__(self, on_ready: ReadyFn | None = None, on_progress: ProgressFn | None = None) -> None:
        self.done: asyncio.Future[m.Done] = asyncio.get_running_loop().create_future()
        self.on_ready = on_ready
        self.on_progress = on_progress


class ChildRank:
    """A rank in a process of its own, which ends with this one. Create it with `start`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process
        self._ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._loaded = asyncio.Event()
        # Set when it can't answer any more.
        self._is_gone = False
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(cls, name: str, folder: str) -> "ChildRank":
        """Start the process; `wait_loaded` says when it is ready. Cancel: no process is left."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rlbus.workers.torch_lm.rank_process",
            folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
            limit=m.MAX_LINE_BYTES,
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def wait_loaded(self) -> None:
        """Until it has its model. Raises: EngineDeadError, DeadlineError. Cancel: it loads on; `aclose` ends it."""
        loaded = asyncio.ensure_future(self._loaded.wait())
        try:
            waited: set[asyncio.Future[object]] = {loaded, self._reading}  # type: ignore[arg-type]
            await asyncio.wait(waited, timeout=LOAD_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loaded.cancel()
        self.check_alive()
        if not self._loaded.is_set():
            raise DeadlineError(f"loading the model in {self._name}", LOAD_S)

    async def join(self, plan: GroupPlan, rank: int) -> Seat:
        """See `EngineRank`."""
        done = await self._ask(lambda i: m.Join(id=i, plan=plan, rank=rank))
        assert done.seat is not None
        return done.seat

    def leave(self, reason: str) -> None:
        """See `EngineRank`."""
        self._write(m.Leave(id=next(self._ids), reason=reason))

    async def receive(self, order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
        """See `EngineRank`."""

        def ask(number: int) -> m.AnyAsk:
            return m.Receive(
                id=number,
                update_op_id=order.update_op_id,
                epoch=order.epoch,
                version=order.version,
                tensors=order.tensors,
                bucket_bytes=order.bucket_bytes,
            )

        done = await self._ask(ask, _Call(on_ready, on_progress))
        assert done.received is not None
        return done.received

    async def stage(self, path: str) -> None:
        """See `EngineRank`."""
        await self._ask(lambda i: m.Stage(id=i, path=path))

    async def apply(self) -> None:
        """See `EngineRank`."""
        await self._ask(lambda i: m.Apply(id=i))

    async def discard(self) -> None:
        """See `EngineRank`."""
        await self._ask(lambda i: m.Discard(id=i))

    async def checksums(self) -> tuple[TensorSum, ...]:
        """See `EngineRank`."""
        done = await self._ask(lambda i: m.Sum(id=i))
        assert done.sums is not None
        return done.sums

    async def sleep(self, keeps: bool) -> int:
        """See `EngineRank`."""
        done = await self._ask(lambda i: m.Sleep(id=i, keeps=keeps))
        assert done.num_bytes is not None
        return done.num_bytes

    async def wake(self) -> int:
        """See `EngineRank`."""
        done = await self._ask(lambda i: m.Wake(id=i))
        assert done.num_bytes is not None
        return done.num_bytes

    def check_alive(self) -> None:
        """See `EngineRank`."""
        if self._is_gone or self._process.returncode is not None:
            raise EngineDeadError(self._gone())

    def kill(self) -> None:
        """See `EngineRank`."""
        self._is_gone = True
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def aclose(self) -> None:
        """See `EngineRank`. Its input ends, then it; Cancel: it is killed."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._reading), STOP_S)
        finally:
            self.kill()
        await self._process.wait()
        await self._reading

    async def _ask(self, make: Callable[[int], m.AnyAsk], call: _Call | None = None) -> m.Done:
        self.check_alive()
        number = next(self._ids)
        call = self._calls[number] = _Call() if call is None else call
        try:
            self._write(make(number))
            done = await call.done
        finally:
            self._calls.pop(number, None)
        if done.fault is None:
            return done
        if done.touched is not None:
            raise UpdateFailedError(done.fault, done.touched)
        raise error_from_fault(done.fault)

    def _write(self, ask: m.AnyAsk) -> None:
        """Without waiting: what is asked is small, and a manifest at most MAX_LINE_BYTES."""
        if not self._is_gone and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(m.line(ask))

    async def _read(self) -> None:
        """Give every answer to who waits for it; at the end tell them all that nothing more comes."""
        assert self._process.stdout is not None
        try:
            while data := await self._process.stdout.readline():
                self._hear(m.say_of(data))
        except (ValueError, msgspec.MsgspecError):
            self.kill()  # what it says can't be understood
        finally:
            self._is_gone = True
            for call in self._calls.values():
                if not call.done.done():
                    call.done.set_exception(EngineDeadError(self._gone()))

    def _hear(self, say: m.AnySay) -> None:
        if isinstance(say, m.Loaded):
            self._loaded.set()
            return
        call = self._calls.get(say.id)
        if call is None:
            return  # whoever asked was cancelled
        match say:
            case m.Standing():
                if call.on_ready is not None:
                    call.on_ready()
            case m.Advanced():
                if call.on_progress is not None:
                    call.on_progress(say.done, 0)
            case m.Done():
                if not call.done.done():
                    call.done.set_result(say)

    def _gone(self) -> Fault:
        return Fault(code=FaultCode.ENGINE_DEAD, message=f"the process of {self._name} has ended; see its log")
