"""The half of `Engine` about weights that all engines with a vLLM behind them share: `Updates` does it."""

from collections.abc import Sequence

from rlbus.errors import refused
from rlbus.schemas import (
    ChecksumsData,
    FaultCode,
    GroupPlan,
    JoinedData,
    RankSpan,
    ReceivedData,
    TensorSpec,
    TensorSum,
    Version,
)
from rlbus.workers.engines.base import EngineInfo, ProgressFn, ReadyFn, ReceiveOrder
from rlbus.workers.engines.native import TakesNative
from rlbus.workers.engines.native_group import GroupedNative
from rlbus.workers.folder_sums import read_sums
from rlbus.workers.vllm_server.checkpoint import ExpectedTensors
from rlbus.workers.vllm_server.updates import Updates


class UpdatingEngine(TakesNative):
    """Base of an adapter; see `Engine` for what each method promises.

    The adapter's `start` sets `_updates`, and `_expected` if it knows what the model consists of: only then it
    advertises the routes. The same of the draft model with `_draft`. A folder is read here, so the engine has to see it
    under the same path.
    """

    def __init__(self) -> None:
        self._updates: Updates | None = None
        self._expected: ExpectedTensors | None = None
        self._draft: ExpectedTensors | None = None
        # Over rlbus' backend in the ranks it is a group like any other; an adapter may have another way.
        self._native = GroupedNative(self)

    @property
    def info(self) -> EngineInfo:
        """See `Engine`."""
        raise NotImplementedError

    def check_manifest(self, tensors: Sequence[TensorSpec]) -> None:
        """See `Engine`. RefusedError (`no_route`): it isn't known what the model consists of."""
        if self._expected is None:
            raise refused(FaultCode.NO_ROUTE, "which tensors the model has can't be told")
        self._expected.check(tensors)

    async def join_group(self, plan: GroupPlan, span: RankSpan) -> JoinedData:
        """See `Engine`."""
        return await self._ready().join(plan, span)

    async def leave_group(self) -> None:
        """See `Engine`."""
        await self._ready().leave()

    async def receive_weights(self, order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
        """See `Engine`."""
        return await self._ready().receive(order, on_ready, on_progress)

    async def finish_update(self, version: Version) -> None:
        """See `Engine`."""
        await self._ready().finish(version)

    async def abort_update(self) -> None:
        """See `Engine`. Torn weights are labelled so."""
        await self._ready().abort()

    async def check_checkpoint(self, path: str) -> None:
        """See `Engine`."""
        await self._ready().check_folder(path)

    async def checkpoint_sums(self, path: str) -> tuple[TensorSum, ...]:
        """See `Engine`."""
        return await read_sums(path)

    async def load_weights(self, path: str, version: Version) -> None:
        """See `Engine`."""
        await self._ready().load(path, version)

    async def label_weights(self, version: Version) -> None:
        """See `LabelEngine`."""
        await self._ready().label(version)

    @property
    def is_about_draft(self) -> bool:
        """Whether the update that is open is the draft's."""
        return self._ready().is_about_draft

    def check_draft_manifest(self, tensors: Sequence[TensorSpec]) -> None:
        """See `DraftEngine`."""
        assert self._draft is not None, "the route isn't advertised without it"
        self._draft.check(tensors)

    async def draft_checksums(self) -> ChecksumsData:
        """See `DraftEngine`. As vLLM's own of the target: on a CPU without the linear layers."""
        return await self._ready().draft_checksums()

    def _ready(self) -> Updates:
        assert self._updates is not None, "the engine isn't started, or is closed"
        return self._updates
