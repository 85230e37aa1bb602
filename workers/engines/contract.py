"""What the engine contract suite (tests/engines/test_contract.py) needs to know of an engine to run on it.

An adapter's author writes one module `tests/engines/cases_<name>.py` with a constant `CASE = EngineCase(...)`; the
suite finds it there. One opened engine serves all tests of a session, on one event loop, so a test leaves it running,
without a group, and with clean weights.
"""

import asyncio
import importlib.util
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlbus.schemas import GroupPlan, PauseMode, ReceivedData, TensorSpec, TensorSum, Version
from rlbus.workers.engines.base import Engine, ReceiveOrder


@dataclass(frozen=True, slots=True)
class Generated:
    """A finished simulated or real request. `finish` is "length", "stop" or "abort"."""

    tokens: tuple[int, ...]
    finish: str


class OpenedEngine(Protocol):
    """A started engine with the other side of its data plane, and with a way to let it generate.

    `version` arguments select weights: equal versions mean equal weights, different ones different weights, and in
    every case the manifest is `tensors()`.

    Cancel, of every coroutine: what it began may stand; whoever opened the engine closes all of it.
    """

    @property
    def engine(self) -> Engine:
        """Started."""
        ...

    def tensors(self) -> tuple[TensorSpec, ...]:
        """The manifest that fits the engine's model, in the order in which the sender sends."""
        ...

    async def plan(self, epoch: int) -> GroupPlan:
        """A plan with one trainer rank and the engine's span (component "backend", instance id "1") after it."""
        ...

    async def join_sender(self, plan: GroupPlan) -> None:
        """Join as rank 0. Called beside `engine.join_group`, which waits for it."""
        ...

    async def send(self, order: ReceiveOrder, num_tensors: int | None = None) -> tuple[TensorSum, ...]:
        """Send the weights of `order.version`: all, or the first `num_tensors` and then give up, as a dying trainer.

        Called once the receiver is ready. Returns the sums of all tensors, in the order of `tensors()`.
        """
        ...

    async def leave_sender(self) -> None:
        """Drop the sender's group, in whatever state it is. Idempotent."""
        ...

    async def save(self, folder: Path, version: Version) -> None:
        """Write the weights of `version` in the form that `engine.load_weights` takes."""
        ...

    async def generate(
        self, prompt: tuple[int, ...], num_tokens: int, request_id: str, on_token: Callable[[], None] | None = None
    ) -> Generated:
        """Decode greedily. `on_token` is called for each token as it appears (several may appear at once)."""
        ...


@dataclass(frozen=True, slots=True)
class EngineCase:
    """One engine in the contract suite.

    Args:
        open: starts the engine, given a folder for its files. Entered and left in one task, on the loop that all tests
            of the case share.
        requires: modules that must be installed; without one of them the case is skipped, and says so.
        missing: what else isn't there, in words, None if nothing is missing.
        loop_factory: makes that loop (None: asyncio's own).
        long_tokens: length of a request that is sure to run still when the suite pauses or aborts it.
        settle_s: how long to watch that a paused engine stays still.
        open_s, limit_s: bounds of the start and of each test, in seconds of that loop.
        counts_requests: whether pause and abort say how many requests they ended or hold.
        is_peer: its program is one of others' that `make test-peers` fetches, and `make test` leaves it to that.
        takes_other_dtypes: whether a float16 tensor may be sent for a float32 one.
    """

    name: str
    open: Callable[[Path], AbstractAsyncContextManager[OpenedEngine]]
    requires: tuple[str, ...] = ()
    missing: Callable[[], str | None] = lambda: None
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    long_tokens: int = 200
    settle_s: float = 0.1
    open_s: float = 120.0
    limit_s: float = 60.0
    counts_requests: bool = True
    takes_other_dtypes: bool = True
    is_peer: bool = False

    def needs(self) -> str:
        """What the case lacks here, in words; empty if nothing."""
        missing = [name for name in self.requires if importlib.util.find_spec(name) is None]
        missing += [what] if (what := self.missing()) is not None else []
        return f"needs {', '.join(missing)}" if missing else ""


class CaseRunner:
    """Holds one opened engine on one loop, for synchronous tests. `start`, any number of `run`, `close`."""

    def __init__(self, case: EngineCase, folder: Path) -> None:
        self.case = case
        self._folder = folder
        self._runner = asyncio.Runner(loop_factory=case.loop_factory)
        self._opened: asyncio.Future[OpenedEngine] | None = None
        self._stop: asyncio.Event | None = None
        self._host: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Open the engine. Raises what opening raises; `close` is due in any case."""
        self._runner.run(self._start())

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[OpenedEngine] = loop.create_future()
        stop = asyncio.Event()

        async def host() -> None:
            async with self.case.open(self._folder) as engine:
                opened.set_result(engine)
                await stop.wait()

        # Opened and closed by one task: a TaskGroup inside `open` may not be left by another one.
        self._opened, self._stop, self._host = opened, stop, loop.create_task(host())
        async with asyncio.timeout(self.case.open_s):
            waited: set[asyncio.Future[Any]] = {opened, self._host}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                await self._host

    def run(self, check: Callable[[OpenedEngine], Coroutine[Any, Any, None]]) -> None:
        """Run one check on the opened engine, bounded by `limit_s`."""

        async def bounded() -> None:
            assert self._opened is not None
            async with asyncio.timeout(self.case.limit_s):
                await check(self._opened.result())

        self._runner.run(bounded())

    def close(self) -> None:
        """Close the engine and the loop. Idempotent."""
        try:
            if self._host is not None and not self._host.done():
                self._runner.run(self._close(self._host))
        finally:
            self._host = None
            self._runner.close()

    async def _close(self, host: "asyncio.Task[None]") -> None:
        assert self._stop is not None
        self._stop.set()
        async with asyncio.timeout(self.case.open_s):
            await host


# --- steps that the tests are made of

# Two versions with different weights, a prompt, and the size of a bucket.
A, B = Version(step=1), Version(step=2)
PROMPT = (5, 6, 7, 8)
BUCKET_BYTES = 1 << 16
_epochs = itertools.count(1)
_requests = itertools.count(1)


def new_epoch() -> int:
    """Larger than all before."""
    return next(_epochs)


class Stream:
    """A request in flight."""

    def __init__(self, opened: OpenedEngine, num_tokens: int) -> None:
        self.request_id = f"request-{next(_requests)}"
        # Tokens seen so far.
        self.num_tokens = 0
        self.first = asyncio.Event()
        generating = opened.generate(PROMPT, num_tokens, self.request_id, self._on_token)
        self.task = asyncio.get_running_loop().create_task(generating)

    def _on_token(self) -> None:
        self.num_tokens += 1
        self.first.set()


async def begin(opened: OpenedEngine, num_tokens: int) -> Stream:
    """A request that has its first token. Cancel: the request goes on."""
    stream = Stream(opened, num_tokens)
    await stream.first.wait()
    return stream


async def tokens(opened: OpenedEngine, num_tokens: int = 12, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """What the engine generates now. Cancel: the request is dropped, or goes on in the engine."""
    generated = await opened.generate(prompt, num_tokens, f"request-{next(_requests)}")
    assert generated.finish == "length"
    return generated.tokens


@asynccontextmanager
async def paused(opened: OpenedEngine, mode: PauseMode = PauseMode.ABORT) -> AsyncIterator[None]:
    """Paused inside, running outside. Cancel: inside it resumes the engine; while it pauses, that may stay paused."""
    await opened.engine.pause(mode, True)
    try:
        yield
    finally:
        await opened.engine.resume()


@asynccontextmanager
async def grouped(opened: OpenedEngine) -> AsyncIterator[int]:
    """Joined inside; yields the epoch. Cancel: the group is left."""
    plan = await opened.plan(new_epoch())
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(opened.join_sender(plan))
            joined = await opened.engine.join_group(plan, plan.spans[0])
        span = plan.spans[0]
        assert joined.epoch == plan.epoch
        assert joined.ranks == tuple(range(span.first, span.first + span.num_ranks))
        assert joined.world_size == plan.world_size
        yield plan.epoch
    finally:
        await opened.engine.leave_group()
        await opened.leave_sender()


def order(opened: OpenedEngine, epoch: int, version: Version) -> ReceiveOrder:
    """The transfer of `version`."""
    return ReceiveOrder(f"update-{epoch}", epoch, version, opened.tensors(), BUCKET_BYTES)


async def transfer(
    opened: OpenedEngine, epoch: int, version: Version, num_tensors: int | None = None
) -> tuple[ReceivedData, tuple[TensorSum, ...], list[int]]:
    """Send and receive; the received data, the sent sums, and the progress. Cancel: the receive may go on."""
    progress: list[int] = []
    receiving = await begin_receive(opened, epoch, version, progress)
    sent = await opened.send(order(opened, epoch, version), num_tensors)
    return await receiving, sent, progress


async def begin_receive(
    opened: OpenedEngine, epoch: int, version: Version, progress: list[int] | None = None
) -> "asyncio.Task[ReceivedData]":
    """The receiving half, standing ready. Raises what it raised if it failed before that. Cancel: it goes on."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    counts: list[int] = [] if progress is None else progress

    def on_ready() -> None:
        loop.call_soon_threadsafe(ready.set_result, None)

    receive = opened.engine.receive_weights(
        order(opened, epoch, version), on_ready, lambda done, _: counts.append(done)
    )
    receiving = loop.create_task(receive)
    waited: set[asyncio.Future[Any]] = {receiving, ready}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        await receiving
    return receiving


async def update(opened: OpenedEngine, version: Version) -> None:
    """A whole update to `version`, flushed, running afterwards. Cancel: running again, the weights may be torn."""
    async with paused(opened):
        async with grouped(opened) as epoch:
            received, sent, _ = await transfer(opened, epoch, version)
            assert received.sums == sent
            await opened.engine.finish_update(version)
        await opened.engine.flush_cache()
