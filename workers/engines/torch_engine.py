"""The small torch model as an engine: generates, takes weights over Gloo or from disk, serves completions.

With N ranks there are N copies of the model, the first in this process, which generates, and N - 1 in processes of
their own. Every rank joins the group, receives the same bytes and loads them into its live model while generation
stands still (see `rlbus.workers.torch_lm.rank` for why live): a transfer that fails after its first tensor leaves the
weights torn. A reload from disk reads everything, on every rank, before it changes anything.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlbus._http_server import HttpServer, base_url
from rlbus.errors import ConfigError, EngineDeadError, EngineError, FaultError, RLBusError, error_from_fault, refused
from rlbus.schemas import (
    LORA_ROUTES,
    MAX_LORAS,
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
    SleepData,
    SleepTag,
    TensorSpec,
    TensorSum,
    Version,
)
from rlbus.transfer.bounded import run_in_thread
from rlbus.transfer.group import JOIN_GRACE_S
from rlbus.transfer.manifest import num_bytes
from rlbus.workers.addresses import WILDCARDS
from rlbus.workers.disk import DISK
from rlbus.workers.engines.base import EngineInfo, Observed, ProgressFn, ReadyFn, ReceiveOrder, UpdateFailedError
from rlbus.workers.engines.native import NATIVE_ROUTES, TakesNative
from rlbus.workers.engines.native_group import GroupedNative
from rlbus.workers.engines.sleep import in_order
from rlbus.workers.engines.torch_loras import TorchLoras
from rlbus.workers.engines.torch_rank import ChildRank, OwnRank
from rlbus.workers.engines.torch_ranks import Ranks, Slowest, Standing, agreed, check_equal, first_bad
from rlbus.workers.folder_sums import read_sums
from rlbus.workers.torch_lm.completions import find_tokenizer
from rlbus.workers.torch_lm.generate import MAX_ADAPTERS, Finished
from rlbus.workers.torch_lm.generate import Generation as Generator
from rlbus.workers.torch_lm.model import load_model
from rlbus.workers.torch_lm.rank import Rank, Seat
from rlbus.workers.torch_lm.sampling import Sampling
from rlbus.workers.torch_lm.server import make_app

ROUTES = frozenset(
    {
        "pause_generation",
        "resume_generation",
        "flush_cache",
        "abort_request",
        "update_weights_from_distributed",
        "update_weights_from_disk",
        "get_weight_checksums",
        "set_weight_version",
        "sleep",
        "wake_up",
        *LORA_ROUTES,
        *NATIVE_ROUTES,
    }
)
# The label of weights that an update has touched and not finished.
TORN = "torn"
ALGORITHM = "rlbus"
# What a join may take beyond the bounds of the group itself.
JOIN_MARGIN_S = 2.0


@dataclass(slots=True)
class _Session:
    """An update that was received, or failed, and awaits finish or abort."""

    version: Version
    is_complete: bool = False


class TorchEngine(TorchLoras, TakesNative):
    """See the module and `Engine`. Generates with one torch thread.

    Args:
        model_path: a folder with config.json, safetensors and, for prompts as text, tokenizer.json.
        num_ranks: the world size.
        host, port: where `/v1/completions` is served, without a key of its own; port 0 takes a free one.
        advertise_host: the host that others reach it at, for the descriptor; None is `host`.
        max_loras: how many adapters may be loaded at once.
        roots: folders below which `load_weights` may read; empty means the folder that `model_path` lies in.
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        num_ranks: int = 1,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str | None = None,
        roots: Sequence[Path | str] = (),
        max_loras: int = MAX_ADAPTERS,
    ) -> None:
        if num_ranks < 1:
            raise ConfigError("num_ranks", num_ranks, "use 1 or more")
        if not 1 <= max_loras <= MAX_LORAS:
            raise ConfigError("max_loras", max_loras, f"use 1 to {MAX_LORAS}")
        self._max_loras = max_loras
        self._announced = host if advertise_host is None else advertise_host
        if self._announced in WILDCARDS:
            raise ConfigError("host", host, "nobody can connect to a wildcard; give advertise_host, too")
        self._path = Path(model_path)
        self._num_ranks = num_ranks
        self._roots = tuple(Path(root).resolve() for root in roots) or (self._path.resolve().parent,)
        self._server = HttpServer(host, port)
        self._info: EngineInfo | None = None
        self._rank: Rank | None = None
        self._ranks = Ranks()
        self._generator: Generator | None = None
        self._session: _Session | None = None
        self._native = GroupedNative(self)
        self._asleep: frozenset[SleepTag] = frozenset()

    @property
    def info(self) -> EngineInfo:
        """See `Engine`."""
        assert self._info is not None
        return self._info

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Process ids of the ranks beyond the first."""
        return tuple(rank.pid for rank in self._ranks.all if isinstance(rank, ChildRank))

    async def start(self) -> None:
        """See `Engine`.

        Raises: ConfigError, CheckpointError: the model can't be read. EngineDeadError: a rank ended.
        A rank's own words on why it ended are in its log, on this process's stderr.
        """
        children = []
        for number in range(1, self._num_ranks):
            children.append(await ChildRank.start(f"rank {number}", str(self._path)))
            self._ranks.all.append(children[-1])
        model = await run_in_thread(lambda: load_model(self._path), name="rlbus load")
        self._generator = Generator(model, max_adapters=self._max_loras)
        self._projections = model.projections
        self._rank = Rank(model, on_touch=lambda: self._generating.relabel(TORN))
        self._ranks.all.insert(0, OwnRank(self._rank))
        self._generator.start()
        for child in children:
            await child.wait_loaded()
        tokenizer = await asyncio.to_thread(find_tokenizer, self._path)
        await self._server.start(make_app(self._generator, str(self._path), tokenizer))
        url = base_url(self._announced, self._server.port)
        self._info = EngineInfo("torch", str(self._path), self._num_ranks, ROUTES, ("gloo",), completions_url=url)

    async def aclose(self) -> None:
        """See `Engine`."""
        try:
            if self._generator is not None:
                await asyncio.to_thread(self._generator.close)
        finally:
            await asyncio.gather(self._server.aclose(), self._ranks.aclose())

    async def observe(self) -> Observed:
        """See `Engine`. Raises: EngineDeadError."""
        self._check_alive()
        generator = self._generating
        generation = Generation.PAUSED if generator.is_still else Generation.RUNNING
        return Observed(generation, generator.version, generator.num_requests, self._asleep)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str | None = None,
        on_token: Callable[[], None] | None = None,
        adapter: str | None = None,
    ) -> Finished:
        """What the completions route does, for those who embed the engine. See `Generation.generate`."""
        return await self._generating.generate(
            prompt, sampling, request_id=request_id, on_token=on_token, adapter=adapter
        )

    # --- requests

    async def pause(self, mode: PauseMode, clear_cache: bool) -> PausedData:
        """See `Engine`."""
        self._check_alive()
        return await self._generating.pause(mode, clear_cache)

    async def resume(self) -> None:
        """See `Engine`."""
        self._check_alive()
        if self._asleep:
            tags = ", ".join(in_order(self._asleep))
            raise refused(FaultCode.ASLEEP, f"asleep: {tags}; wake it before it generates", tags=tags)
        self._generating.resume()

    async def flush_cache(self) -> None:
        """See `Engine`."""
        await self._generating.flush()

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """See `Engine`."""
        return self._generating.abort(request_ids)

    # --- sleep

    @property
    def sleep_tags(self) -> frozenset[SleepTag]:
        """See `SleepEngine`."""
        return frozenset(SleepTag)

    async def sleep(self, tags: frozenset[SleepTag], level: int, mode: PauseMode) -> SleepData:
        """See `SleepEngine`. On level 1 the weights of each rank lie in a file meanwhile."""
        self._check_alive()
        paused = await self._generating.pause(mode, SleepTag.KV_CACHE in tags)
        num_freed = 0
        if SleepTag.KV_CACHE in tags:
            num_freed += self._generating.release_cache()
            self._asleep |= {SleepTag.KV_CACHE}
        if SleepTag.WEIGHTS in tags:
            # Counted as asleep from here on: some ranks may be when another fails.
            self._asleep |= {SleepTag.WEIGHTS}
            if level > 1:
                self._generating.relabel(TORN)
            num_freed += await self._sum_of([rank.sleep(level == 1) for rank in self._ranks.all])
        return SleepData(asleep=in_order(self._asleep), num_bytes=num_freed, num_aborted=paused.num_aborted)

    async def wake_up(self, tags: frozenset[SleepTag]) -> SleepData:
        """See `SleepEngine`."""
        self._check_alive()
        num_taken = 0
        if SleepTag.WEIGHTS in tags:
            num_taken += await self._sum_of([rank.wake() for rank in self._ranks.all])
            self._asleep -= {SleepTag.WEIGHTS}
        if SleepTag.KV_CACHE in tags:
            num_taken += self._generating.restore_cache()
            self._asleep -= {SleepTag.KV_CACHE}
        return SleepData(asleep=in_order(self._asleep), num_bytes=num_taken)

    async def _sum_of(self, calls: Sequence[Coroutine[Any, Any, int]]) -> int:
        results = await self._ranks.on_all(calls)
        if (bad := first_bad(results)) is not None:
            raise error_from_fault(bad)
        return sum(r for r in results if isinstance(r, int))

    # --- group

    async def join_group(self, plan: GroupPlan, span: RankSpan) -> JoinedData:
        """See `Engine`."""
        await self.leave_group()
        self._check_alive()
        if span.num_ranks != self._num_ranks:
            raise _group_failed(f"the plan has {span.num_ranks} ranks for an engine of {self._num_ranks}")
        if plan.backend not in self.info.backends:
            raise _group_failed(f"the plan's backend is {plan.backend!r}, this engine has {self.info.backends}")
        joins = [rank.join(plan, span.first + index) for index, rank in enumerate(self._ranks.all)]
        limit_s = plan.timeout_s + JOIN_GRACE_S + JOIN_MARGIN_S
        seats = await self._ranks.in_group(joins, limit_s, "the group could not be joined")
        first_bad = next((seat for seat in seats if isinstance(seat, BaseException)), None)
        if first_bad is None and any(isinstance(s, Seat) and s.size != plan.world_size for s in seats):
            first_bad = _group_failed(f"the ranks see groups of {seats}, not of {plan.world_size}")
        if first_bad is not None:
            self._ranks.leave("the group could not be joined")
            raise first_bad
        ranks = tuple(seat.rank for seat in seats if isinstance(seat, Seat))
        return JoinedData(epoch=plan.epoch, ranks=ranks, world_size=plan.world_size)

    async def leave_group(self) -> None:
        """See `Engine`. Whatever is stuck in the group ends by it, and is awaited for a short while."""
        self._ranks.leave("the group was left")
        await self._ranks.wait_for_stray()

    # --- weights

    def check_manifest(self, tensors: Sequence[TensorSpec]) -> None:
        """See `Engine`."""
        assert self._rank is not None
        self._rank.check_manifest(tensors)

    async def receive_weights(self, order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
        """See `Engine`."""
        self._check_may_change()
        session = self._session = _Session(order.version)
        standing = Standing(self._num_ranks, on_ready)
        progress = Slowest(self._num_ranks, sum(num_bytes(spec) for spec in order.tensors), on_progress)
        calls = [
            rank.receive(order, standing.stands, partial(progress.advance, index))
            for index, rank in enumerate(self._ranks.all)
        ]
        received = await self._ranks.in_group(calls, None, "another rank of the engine failed to receive")
        data = agreed(received)
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

    # --- an update that somebody else's trainer drives

    async def finish_native(self, version: Version) -> None:
        """See `GroupedNative`. The version is told only now."""
        if self._session is not None:
            self._session.version = version
        await super().finish_native(version)

    # --- from disk, and what there is

    async def check_checkpoint(self, path: str) -> None:
        """See `Engine`. By the first rank; the others read the same disk."""
        rank = self._rank
        assert rank is not None
        await self._check_root(path)
        await DISK.run(lambda: rank.check_folder(path), path)

    async def checkpoint_sums(self, path: str) -> tuple[TensorSum, ...]:
        """See `Engine`."""
        return await read_sums(path)

    async def load_weights(self, path: str, version: Version) -> None:
        """See `Engine`. Untouched unless every rank could read everything."""
        self._check_may_change()
        try:
            await self._check_root(path)
        except FaultError as exc:
            raise UpdateFailedError(exc.fault, weights_touched=False) from exc
        self._session = None
        bad = first_bad(await self._ranks.on_all([rank.stage(path) for rank in self._ranks.all]))
        if bad is not None:
            with contextlib.suppress(EngineDeadError):
                await asyncio.gather(*(rank.discard() for rank in self._ranks.all))
            raise UpdateFailedError(bad, weights_touched=False)
        self._generating.relabel(TORN)
        bad = first_bad(await self._ranks.on_all([rank.apply() for rank in self._ranks.all]))
        if bad is not None:
            raise UpdateFailedError(bad, weights_touched=True)
        self._generating.relabel(str(version))

    async def _check_root(self, path: str) -> None:
        if not await DISK.run(lambda: self._may_read(path), path):
            raise error_from_fault(self._not_below(path))

    def _not_below(self, path: str) -> Fault:
        where = ", ".join(str(root) for root in self._roots)
        return Fault(code=FaultCode.WRONG_STATE, message=f"{path} is not below {where}", detail={"path": path})

    def _may_read(self, path: str) -> bool:
        real = Path(path).resolve()
        return any(real.is_relative_to(root) for root in self._roots)

    async def label_weights(self, version: Version) -> None:
        """See `LabelEngine`."""
        self._generating.relabel(str(version))

    async def checksums(self) -> ChecksumsData:
        """See `Engine`. Raises: EngineError (checksum_mismatch): the ranks hold different weights."""
        sums = await self._ranks.on_all([rank.checksums() for rank in self._ranks.all])
        bad = first_bad(sums)
        if bad is not None:
            raise error_from_fault(bad)
        tables = [s for s in sums if not isinstance(s, BaseException)]
        check_equal(tables)
        return ChecksumsData(algorithm=ALGORITHM, sums=tables[0])

    # --- within

    @property
    def _generating(self) -> Generator:
        assert self._generator is not None
        return self._generator

    def _check_alive(self) -> None:
        self._generating.check_alive()
        self._ranks.check_alive()

    def _check_may_change(self) -> None:
        """Weights are written in place, so no step may run."""
        self._check_alive()
        if not self._generating.is_still:
            fault = Fault(code=FaultCode.WRONG_STATE, message="the engine isn't paused")
            raise UpdateFailedError(fault, weights_touched=False)
        if SleepTag.WEIGHTS in self._asleep:
            fault = Fault(code=FaultCode.ASLEEP, message="the weights sleep", detail={"tags": SleepTag.WEIGHTS.value})
            raise UpdateFailedError(fault, weights_touched=False)
        if self._ranks.has_stray:
            fault = Fault(
                code=FaultCode.WRONG_STATE, message="an earlier call is still stuck in a rank", retryable=True
            )
            raise UpdateFailedError(fault, weights_touched=False)


def _fault(message: str) -> Fault:
    return Fault(code=FaultCode.ENGINE_FAILED, message=message)


def _group_failed(message: str) -> RLBusError:
    return EngineError(Fault(code=FaultCode.GROUP_FAILED, message=message))
