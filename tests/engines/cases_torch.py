"""The torch engine in the contract suite, with two ranks: one in this process and one in a process of its own."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from rlbus.errors import TransferError
from rlbus.schemas import GroupPlan, RankSpan, TensorSpec, TensorSum, Version
from rlbus.workers.engines.base import ReceiveOrder
from rlbus.workers.engines.contract import BUCKET_BYTES, EngineCase, Generated
from tests.engines.native_side import NativeSide

if TYPE_CHECKING:
    from rlbus.transfer.torch_plane import TorchPlane
    from rlbus.workers.engines.torch_engine import TorchEngine

NUM_RANKS = 2
# Of one test. It takes seconds on a quiet machine.
LIMIT_S = 180.0


class _Dying:
    """A source that fails after some tensors, as a trainer that dies."""

    def __init__(self, weights: dict[str, Any], num_tensors: int) -> None:
        self._weights = weights
        self._num_tensors = num_tensors

    def specs(self) -> tuple[TensorSpec, ...]:
        """Everything is announced."""
        from rlbus.transfer.source import weight_source

        return weight_source(self._weights).specs()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for index, pair in enumerate(self._weights.items()):
            if index == self._num_tensors:
                raise RuntimeError("the trainer died")
            yield pair


class _Opened:
    def __init__(self, engine: "TorchEngine", plane: "TorchPlane", folder: Path) -> None:
        self.engine = engine
        self._plane = plane
        self._folder = folder
        self.native = NativeSide(self._weights, NUM_RANKS)

    def _weights(self, version: Version) -> dict[str, Any]:
        from rlbus.workers.torch_lm.model import load_model

        return load_model(self._save(self._folder / f"v{version.step}", version)).state_dict()

    def _save(self, folder: Path, version: Version) -> Path:
        from rlbus.workers.torch_lm.make import make_tiny_model

        return make_tiny_model(folder, seed=100 + version.step)

    def tensors(self) -> tuple[TensorSpec, ...]:
        from rlbus.transfer.source import weight_source

        return weight_source(self._weights(Version(step=1))).specs()

    async def plan(self, epoch: int) -> GroupPlan:
        return GroupPlan(
            epoch=epoch,
            group_id=f"g{epoch}",
            backend="gloo",
            num_trainer_ranks=1,
            world_size=1 + NUM_RANKS,
            spans=(RankSpan(component="backend", instance_id="1", first=1, num_ranks=NUM_RANKS),),
            rendezvous=await self._plane.rendezvous(),
            bucket_bytes=BUCKET_BYTES,
            timeout_s=60.0,
        )

    async def join_sender(self, plan: GroupPlan) -> None:
        await self._plane.join(plan)

    async def send(self, order: ReceiveOrder, num_tensors: int | None = None) -> tuple[TensorSum, ...]:
        from rlbus.transfer.checksum import tensor_checksum
        from rlbus.transfer.source import weight_source

        weights = self._weights(order.version)
        source = weight_source(weights) if num_tensors is None else _Dying(weights, num_tensors)
        try:
            await self._plane.send(
                source,
                order.tensors,
                bucket_bytes=order.bucket_bytes,
                version=order.version,
                stream_id=order.update_op_id,
                on_progress=lambda done, total: None,
            )
        except TransferError:
            assert num_tensors is not None
        return tuple(TensorSum(name=name, checksum=tensor_checksum(tensor)) for name, tensor in weights.items())

    async def leave_sender(self) -> None:
        await self._plane.leave("left")

    async def save(self, folder: Path, version: Version) -> None:
        self._save(folder, version)

    async def generate(
        self, prompt: tuple[int, ...], num_tokens: int, request_id: str, on_token: Callable[[], None] | None = None
    ) -> Generated:
        from rlbus.workers.torch_lm.sampling import Sampling

        sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignores_eos=True)
        finished = await self.engine.generate(prompt, sampling, request_id=request_id, on_token=on_token)
        return Generated(finished.tokens, finished.finish)

    async def save_adapter(self, folder: Path, number: int) -> Path:
        from rlbus.workers.torch_lm.make import make_tiny_adapter

        return make_tiny_adapter(folder, self._folder / "model", seed=number)

    async def generate_as(
        self,
        model: str,
        prompt: tuple[int, ...],
        num_tokens: int,
        request_id: str,
        on_token: Callable[[], None] | None = None,
    ) -> Generated:
        from rlbus.workers.torch_lm.generate import UnknownModelError
        from rlbus.workers.torch_lm.sampling import Sampling

        sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignores_eos=True)
        try:
            finished = await self.engine.generate(
                prompt, sampling, request_id=request_id, on_token=on_token, adapter=model
            )
        except UnknownModelError as exc:
            raise LookupError(model) from exc
        return Generated(finished.tokens, finished.finish)


@asynccontextmanager
async def _open(folder: Path) -> AsyncIterator[_Opened]:
    from rlbus.transfer.torch_plane import TorchPlane
    from rlbus.workers.engines.torch_engine import TorchEngine
    from rlbus.workers.torch_lm.make import make_tiny_model

    # Tests write checkpoints into folders beside this one.
    engine = TorchEngine(make_tiny_model(folder / "model"), num_ranks=NUM_RANKS, roots=(folder.parent,))
    plane = TorchPlane("gloo")
    # A rank that stands still for seconds on a slow machine isn't given up: what is stuck here is ended by a call.
    with mock.patch.multiple("rlbus.workers.engines.torch_ranks", SETTLE_S=60.0, RELEASE_S=60.0, CANCEL_S=60.0):
        try:
            await engine.start()
            yield _Opened(engine, plane, folder)
        finally:
            await plane.aclose()
            await engine.aclose()


CASE = EngineCase(name="torch", open=_open, requires=("torch", "safetensors"), long_tokens=300, limit_s=LIMIT_S)
