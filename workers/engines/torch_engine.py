"""The small torch model as an engine: generates, takes weights over Gloo or from disk, serves completions.

With N ranks there are N copies of the model, the first in this process, which generates, and N - 1 in processes of
their own. Every rank joins the group, receives the same bytes and loads them into its live model while generation
stands still (see `rlbus.workers.torch_lm.rank` for why live): a transfer that fails after its first tensor leaves the
weights torn. A reload from disk reads everything, on every rank, before it changes anything.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlbus.errors import EngineDeadError, EngineError, FaultError, RLBusError, error_from_fault
from rlbus.schemas import (
    ChecksumsData,
    Fault,
    FaultCode,
    Generation,
    GroupPlan,
    JoinedData,
    PausedData,
    PauseMode,
    RankSpan,
    ReceivedData,
    TensorSpec,
    TensorSum,
    Version,
)
from rlbus.transfer.bounded import run_in_thread
from rlbus.transfer.group import JOIN_GRACE_S
from rlbus.transfer.manifest import num_bytes
from rlbus.workers.engines.base import EngineInfo, Observed, ProgressFn, ReadyFn, ReceiveOrder, UpdateFailedError
from rlbus.workers.engines.torch_rank import ChildRank, EngineRank, OwnRank, Seat
from rlbus.workers.torch_lm.completions import find_tokenizer
from rlbus.workers.torch_lm.generate import Finished, Sampling
from rlbus.workers.torch_lm.generate import Generation as Generator
from rlbus.workers.torch_lm.model import CausalLM, load_model
from rlbus.workers.torch_lm.rank import Rank, limit_threads
from rlbus.workers.torch_lm.server import HttpServer, make_app

_log = logging.getLogger("rlbus.workers")
T = TypeVar("T")

ROUTES = frozenset(
    {
        "pause_generation",
        "resume_generation",
        "flush_cache",
        "abort_request",
        "update_weights_from_distributed",
        "update_weights_from_disk",
        "get_weight_checksums",
    }
)
# The label of weights that an update has touched and not finished.
TORN = "torn"
ALGORITHM = "rlbus"
# How long the other ranks may take to fail by themselves when one has, before the group is broken.
SETTLE_S = 1.0
# How long a rank whose group was broken may take to answer, before it is given up.
RELEASE_S = 5.0
# A call that isn't bounded by the group: reading and copying a model on every rank, or summing it up.
LOCAL_S = 300.0
# What a join may take beyond the bounds of the group itself.
JOIN_MARGIN_S = 2.0


@dataclass(slots=True)
class _Session:
    """An update that was received, or failed, and awaits finish or abort."""

    version: Version
    is_complete: bool = False


class TorchEngine:
    """See the module and `Engine`.

    Args:
        model_path: a folder with config.json, safetensors and, for prompts as text, tokenizer.json.
        num_ranks: the world size.
        host, port: where `/v1/completions` is served; port 0 takes a free one.
        roots: folders below which `load_weights` may read; empty means the folder that `model_path` lies in.
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        num_ranks: int = 1,
        host: str = "127.0.0.1",
        port: int = 0,
        roots: Sequence[Path | str] = (),
    ) -> None:
        self._path = Path(model_path)
        self._num_ranks = num_ranks
        self._roots = tuple(Path(root).resolve() for root in roots) or (self._path.resolve().parent,)
        self._server = HttpServer(host, port)
        self._info: EngineInfo | None = None
        self._rank: Rank | None = None
        self._ranks: list[EngineRank] = []
        self._generator: Generator | None = None
        self._session: _Session | None = None
        # Work of a call that was cancelled, until it is over.
        self._stray: set[asyncio.Future[object]] = set()

    @property
    def info(self) -> EngineInfo:
        """See `Engine`."""
        assert self._info is not None
        return self._info

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Process ids of the ranks beyond the first."""
        return tuple(rank.pid for rank in self._ranks if isinstance(rank, ChildRank))

    async def start(self) -> None:
        """See `Engine`. Raises: ConfigError, CheckpointError: the model can't be read. EngineDeadError: a rank ended."""
        children = []
        for number in range(1, self._num_ranks):
            children.append(await ChildRank.start(f"rank {number}", str(self._path)))
            self._ranks.append(children[-1])
        model = await run_in_thread(self._load, name="rlbus load")
        self._generator = Generator(model)
        self._rank = Rank(model, on_touch=lambda: self._generating.relabel(TORN))
        self._ranks.insert(0, OwnRank(self._rank))
        self._generator.start()
        for child in children:
            await child.wait_loaded()
        tokenizer = await asyncio.to_thread(find_tokenizer, self._path)
        await self._server.start(make_app(self._generator, str(self._path), tokenizer))
        self._info = EngineInfo(
            "torch", str(self._path), self._num_ranks, ROUTES, ("gloo",), completions_url=self._server.url
        )

    def _load(self) -> CausalLM:
        limit_threads()
        return load_model(self._path)

    async def aclose(self) -> None:
        """See `Engine`."""
        if self._generator is not None:
            await asyncio.to_thread(self._generator.close)
        await asyncio.gather(self._server.aclose(), *(rank.aclose() for rank in self._ranks))
        for stray in tuple(self._stray):
            stray.cancel()

    async def observe(self) -> Observed:
        """See `Engine`. Raises: EngineDeadError."""
        self._check_alive()
        generator = self._generating
        generation = Generation.PAUSED if generator.is_still else Generation.RUNNING
        return Observed(generation, generator.version, generator.num_requests)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str | None = None,
        on_token: Callable[[], None] | None = None,
    ) -> Finished:
        """What the completions route does, for those who embed the engine. See `Generation.generate`."""
        return await self._generating.generate(prompt, sampling, request_id=request_id, on_token=on_token)

    # --- requests

    async def pause(self, mode: PauseMode, clear_cache: bool) -> PausedData:
        """See `Engine`."""
        self._check_alive()
        return await self._generating.pause(mode, clear_cache)

    async def resume(self) -> None:
        """See `Engine`."""
        self._check_alive()
        self._generating.resume()

    async def flush_cache(self) -> None:
        """See `Engine`."""
        await self._generating.flush()

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """See `Engine`."""
        return self._generating.abort(request_ids)

    # --- group

    async def join_group(self, plan: GroupPlan, span: RankSpan) -> JoinedData:
        """See `Engine`."""
        await self.leave_group()
        self._check_alive()
        if span.num_ranks != self._num_ranks:
            raise _group_failed(f"the plan has {span.num_ranks} ranks for an engine of {self._num_ranks}")
        if plan.backend not in self.info.backends:
            raise _group_failed(f"the plan's backend is {plan.backend!r}, this engine has {self.info.backends}")
        joins = [rank.join(plan, span.first + index) for index, rank in enumerate(self._ranks)]
        limit_s = plan.timeout_s + JOIN_GRACE_S + JOIN_MARGIN_S
        seats = await self._together(joins, limit_s, "the group could not be joined")
        first_bad = next((seat for seat in seats if isinstance(seat, BaseException)), None)
        if first_bad is None and any(isinstance(s, Seat) and s.size != plan.world_size for s in seats):
            first_bad = _group_failed(f"the ranks see groups of {seats}, not of {plan.world_size}")
        if first_bad is not None:
            self._leave("the group could not be joined")
            raise first_bad
        ranks = tuple(seat.rank for seat in seats if isinstance(seat, Seat))
        return JoinedData(epoch=plan.epoch, ranks=ranks, world_size=plan.world_size)

    async def leave_group(self) -> None:
        """See `Engine`. Whatever is stuck in the group ends by it, and is awaited for a short while."""
        self._leave("the group was left")
        if self._stray:
            await asyncio.wait(tuple(self._stray), timeout=RELEASE_S)

    def _leave(self, reason: str) -> None:
        for rank in self._ranks:
            rank.leave(reason)

    # --- weights

    def check_manifest(self, tensors: Sequence[TensorSpec]) -> None:
        """See `Engine`."""
        assert self._rank is not None
        self._rank.check_manifest(tensors)

    async def receive_weights(self, order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
        """See `Engine`."""
        self._check_may_change()
        session = self._session = _Session(order.version)
        standing = _Standing(len(self._ranks), on_ready)
        progress = _Slowest(len(self._ranks), sum(num_bytes(spec) for spec in order.tensors), on_progress)
        calls = [
            rank.receive(order, standing.stands, lambda done, _, index=index: progress.advance(index, done))  # type: ignore[misc]
            for index, rank in enumerate(self._ranks)
        ]
        received = await self._together(calls, None, "another rank of the engine failed to receive")
        data = _agreed(received)
        session.is_complete = True
        return data

    async def finish_update(self, version: Version) -> None:
        """See `Engine`. The weights are in place since they came; from here on they have their name."""
        session = self._session
        if session is None or not session.is_complete or session.version != version:
            raise UpdateFailedError(_fault(f"no complete update to {version} was received"), weights_touched=False)
        self._session = None
        self._generating.relabel(str(version))

    async def abort_update(self) -> None:
        """See `Engine`. What was written stays, labelled torn."""
        self._session = None

    async def load_weights(self, path: str, version: Version) -> None:
        """See `Engine`. Untouched unless every rank could read everything."""
        self._check_may_change()
        if not any(Path(path).resolve().is_relative_to(root) for root in self._roots):
            where = ", ".join(str(root) for root in self._roots)
            fault = Fault(code=FaultCode.WRONG_STATE, message=f"{path} is not below {where}", detail={"path": path})
            raise UpdateFailedError(fault, weights_touched=False)
        self._session = None
        staged = await self._together([rank.stage(path) for rank in self._ranks], LOCAL_S, "a rank could not read")
        bad = _first_bad(staged)
        if bad is not None:
            with contextlib.suppress(EngineDeadError):
                await asyncio.gather(*(rank.discard() for rank in self._ranks))
            raise UpdateFailedError(bad, weights_touched=False)
        self._generating.relabel(TORN)
        applied = await self._together([rank.apply() for rank in self._ranks], LOCAL_S, "a rank could not load")
        bad = _first_bad(applied)
        if bad is not None:
            raise UpdateFailedError(bad, weights_touched=True)
        self._generating.relabel(str(version))

    async def checksums(self) -> ChecksumsData:
        """See `Engine`. Raises: EngineError (checksum_mismatch): the ranks hold different weights."""
        sums = await self._together([rank.checksums() for rank in self._ranks], LOCAL_S, "a rank can't sum up")
        bad = _first_bad(sums)
        if bad is not None:
            raise error_from_fault(bad)
        tables = [s for s in sums if not isinstance(s, BaseException)]
        _check_equal(tables)
        return ChecksumsData(algorithm=ALGORITHM, sums=tables[0])

    # --- within

    @property
    def _generating(self) -> Generator:
        assert self._generator is not None
        return self._generator

    def _check_alive(self) -> None:
        self._generating.check_alive()
        for rank in self._ranks:
            rank.check_alive()

    def _check_may_change(self) -> None:
        """Weights are written in place, so no step may run."""
        self._check_alive()
        if not self._generating.is_still:
            fault = Fault(code=FaultCode.WRONG_STATE, message="the engine isn't paused")
            raise UpdateFailedError(fault, weights_touched=False)

    async def _together(
        self, calls: Sequence[Awaitable[T]], limit_s: float | None, reason: str
    ) -> list[T | BaseException]:
        """Make a call on every rank; what each came to. When one fails, the others get SETTLE_S to fail alike, then the
        group is broken; a rank that doesn't answer after that is killed.

        Cancel: the group is broken, and the calls awaited for RELEASE_S.
        """
        tasks: list[asyncio.Future[T]] = [asyncio.ensure_future(call) for call in calls]
        try:
            _, pending = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                await asyncio.wait(pending, timeout=SETTLE_S)
                await self._release(tasks, reason)
        except asyncio.CancelledError:
            await self._release(tasks, "the call was cancelled")
            raise
        return [_result(task, reason) for task in tasks]

    async def _release(self, tasks: Sequence["asyncio.Future[T]"], reason: str) -> None:
        if all(task.done() for task in tasks):
            return
        self._leave(reason)
        for task in tasks:
            self._stray.add(task)  # type: ignore[arg-type]
            task.add_done_callback(self._forget)  # type: ignore[arg-type]
        await asyncio.wait(tasks, timeout=RELEASE_S)
        for index, task in enumerate(tasks):
            if not task.done():
                _log.error("rank %d of the engine does not answer: %s", index, reason)
                self._ranks[index].kill()

    def _forget(self, task: "asyncio.Future[object]") -> None:
        self._stray.discard(task)
        if not task.cancelled():
            task.exception()


class _Standing:
    """Calls `on_ready` once every rank stands. From any thread."""

    def __init__(self, num_ranks: int, on_ready: ReadyFn) -> None:
        self._missing = num_ranks
        self._on_ready = on_ready
        self._lock = threading.Lock()

    def stands(self) -> None:
        """One more."""
        with self._lock:
            self._missing -= 1
            is_last = self._missing == 0
        if is_last:
            self._on_ready()


class _Slowest:
    """Progress of several ranks: that of the slowest. From any thread."""

    def __init__(self, num_ranks: int, total: int, on_progress: ProgressFn) -> None:
        self._done = [0] * num_ranks
        self._told = 0
        self._total = total
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def advance(self, index: int, done: int) -> None:
        """A rank has so many bytes."""
        with self._lock:  # held while telling, so that counts come in order
            self._done[index] = done
            slowest = min(self._done)
            if slowest > self._told:
                self._told = slowest
                self._on_progress(slowest, self._total)


def _result(task: "asyncio.Future[T]", reason: str) -> T | BaseException:
    if not task.done():
        return EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=f"a rank does not answer ({reason})"))
    return task.exception() or task.result()


def _fault(message: str) -> Fault:
    return Fault(code=FaultCode.ENGINE_FAILED, message=message)


def _group_failed(message: str) -> RLBusError:
    return EngineError(Fault(code=FaultCode.GROUP_FAILED, message=message))


def _fault_of(error: BaseException) -> Fault:
    if isinstance(error, FaultError | UpdateFailedError):
        return error.fault
    return _fault(f"{type(error).__name__}: {error}")


def _first_bad(results: Sequence[object]) -> Fault | None:
    return next((_fault_of(r) for r in results if isinstance(r, BaseException)), None)


def _agreed(received: Sequence[ReceivedData | BaseException]) -> ReceivedData:
    """The first rank's data, if every rank has the same; else UpdateFailedError, touched if any may have been."""
    bad = _first_bad(received)
    good = [r for r in received if isinstance(r, ReceivedData)]
    if bad is not None:
        errors = [r for r in received if isinstance(r, BaseException)]
        touched = bool(good) or any(not isinstance(e, UpdateFailedError) or e.weights_touched for e in errors)
        raise UpdateFailedError(bad, touched)
    try:
        _check_equal([r.sums for r in good])
    except FaultError as exc:
        raise UpdateFailedError(exc.fault, weights_touched=True) from exc
    return good[0]


def _check_equal(tables: Sequence[tuple[TensorSum, ...]]) -> None:
    """Raise TornWeightsError naming the first tensor that two ranks have different sums of."""
    for index, table in enumerate(tables):
        for first, other in zip(tables[0], table, strict=True):
            if first != other:
                message = f"rank {index} of the engine holds other bytes of {first.name!r} than rank 0"
                fault = Fault(code=FaultCode.CHECKSUM_MISMATCH, message=message, detail={"tensor": first.name})
                raise error_from_fault(fault)
