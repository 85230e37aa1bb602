"""An engine of one's own on the bus. It can only be paused and resumed, says so, and is refused everything else.

`rlbus up` in one terminal; export the RLBUS_URL that it prints in another; `python examples/custom_engine.py`. Then
`rlbus status`, `rlbus pause`, `rlbus resume`.
"""

import asyncio
from collections.abc import Sequence

from rlbus.config import BusConfig
from rlbus.errors import refused
from rlbus.schemas import (
    ChecksumsData,
    FaultCode,
    Generation,
    GroupPlan,
    JoinedData,
    PausedData,
    PauseMode,
    RankSpan,
    ReceivedData,
    TensorSpec,
    Version,
)
from rlbus.workers.engines.base import EngineInfo, Observed, ProgressFn, ReadyFn, ReceiveOrder
from rlbus.workers.run import serve


class Ticker:
    """ "Generates" one token every 10 ms."""

    def __init__(self) -> None:
        self._may_run = asyncio.Event()
        self._is_stepping = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.num_tokens = 0

    @property
    def info(self) -> EngineInfo:
        """What it is, and the only two routes that it serves."""
        routes = frozenset({"pause_generation", "resume_generation"})
        return EngineInfo(engine="ticker", model="none", world_size=1, routes=routes)

    async def start(self) -> None:
        """Begin to generate."""
        self._may_run.set()
        self._task = asyncio.create_task(self._generate())

    async def aclose(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def observe(self) -> Observed:
        """What it really does."""
        return Observed(Generation.RUNNING if self._may_run.is_set() else Generation.PAUSED)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> PausedData:
        """All modes are the same here: there is no request that could be kept or ended."""
        self._may_run.clear()
        async with self._is_stepping:  # a step that had begun is over
            return PausedData()

    async def resume(self) -> None:
        """Go on."""
        self._may_run.set()

    async def _generate(self) -> None:
        while True:
            await self._may_run.wait()
            async with self._is_stepping:
                await asyncio.sleep(0.01)
                self.num_tokens += 1

    # The agent never calls what isn't in `routes`; these say so to everybody else.

    async def flush_cache(self) -> None:
        """Not served."""
        raise refused(FaultCode.NO_ROUTE, "a ticker has no cache")

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """Not served."""
        raise refused(FaultCode.NO_ROUTE, "a ticker has no requests")

    def check_manifest(self, tensors: Sequence[TensorSpec]) -> None:
        """Not served."""
        raise refused(FaultCode.NO_ROUTE, "a ticker has no weights")

    async def join_group(self, plan: GroupPlan, span: RankSpan) -> JoinedData:
        """Not served."""
        raise refused(FaultCode.NO_ROUTE, "a ticker has no weights")

    async def leave_group(self) -> None:
        """Nothing to leave."""

    async def receive_weights(self, order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
        """Not served."""
        raise refused(FaultCode.NO_ROUTE, "a ticker has no weights")

    async def finish_update(self, version: Version) -> None:
        """Not served."""
        raise refused(FaultCode.NO_ROUTE, "a ticker has no weights")

    async def abort_update(self) -> None:
        """Nothing to abort."""

    async def check_checkpoint(self, path: str) -> None:
        """Not served."""
        raise refused(FaultCode.NO_ROUTE, "a ticker has no weights")

    async def load_weights(self, path: str, version: Version) -> None:
        """Not served."""
        raise refused(FaultCode.NO_ROUTE, "a ticker has no weights")

    async def checksums(self) -> ChecksumsData:
        """Not served."""
        raise refused(FaultCode.NO_ROUTE, "a ticker has no weights")


if __name__ == "__main__":
    asyncio.run(serve(Ticker(), BusConfig.from_env(), on_ready=lambda agent: print("ready", flush=True)))
