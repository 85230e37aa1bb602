"""The fake engine in the contract suite."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rlbus.schemas import GroupPlan, RankSpan, Rendezvous, TensorSpec, TensorSum, Version
from rlbus.testing import VirtualTimeLoop
from rlbus.transfer.fake import fake_sum
from rlbus.workers.engines.base import ReceiveOrder
from rlbus.workers.engines.contract import EngineCase, Generated
from rlbus.workers.engines.fake import DEFAULT_TENSORS, FakeEngine
from rlbus.workers.lora_testing import fake_adapter


class OpenedFake:
    """The fake engine and its sender."""

    def __init__(self) -> None:
        self._num_tensors: asyncio.Queue[int | None] = asyncio.Queue()
        self.engine = FakeEngine(world_size=2, feed=self._feed)

    async def _feed(self, order: ReceiveOrder) -> int | None:
        return await self._num_tensors.get()

    def tensors(self) -> tuple[TensorSpec, ...]:
        return DEFAULT_TENSORS

    async def plan(self, epoch: int) -> GroupPlan:
        return GroupPlan(
            epoch=epoch,
            group_id=f"g{epoch}",
            backend="fake",
            num_trainer_ranks=1,
            world_size=3,
            spans=(RankSpan(component="backend", instance_id="1", first=1, num_ranks=2),),
            rendezvous=Rendezvous(host="127.0.0.1", port=1, prefix=f"g{epoch}"),
            bucket_bytes=1024,
        )

    async def join_sender(self, plan: GroupPlan) -> None:
        pass  # the fake has no other side

    async def send(self, order: ReceiveOrder, num_tensors: int | None = None) -> tuple[TensorSum, ...]:
        self._num_tensors.put_nowait(num_tensors)
        return tuple(TensorSum(name=s.name, checksum=fake_sum(s.name, order.version, s.shape)) for s in order.tensors)

    async def leave_sender(self) -> None:
        pass

    async def save(self, folder: Path, version: Version) -> None:
        FakeEngine.save(folder, version)

    async def generate(
        self, prompt: tuple[int, ...], num_tokens: int, request_id: str, on_token: Callable[[], None] | None = None
    ) -> Generated:
        request = self.engine.submit(request_id, prompt, num_tokens, on_token)
        await request.ended.wait()
        assert request.finish is not None
        return Generated(tuple(request.tokens), request.finish)

    async def save_adapter(self, folder: Path, number: int) -> Path:
        return fake_adapter(folder, f"adapter {number}")

    async def generate_as(
        self,
        model: str,
        prompt: tuple[int, ...],
        num_tokens: int,
        request_id: str,
        on_token: Callable[[], None] | None = None,
    ) -> Generated:
        request = self.engine.submit(request_id, prompt, num_tokens, on_token, model)
        await request.ended.wait()
        assert request.finish is not None
        return Generated(tuple(request.tokens), request.finish)


@asynccontextmanager
async def _open(folder: Path) -> AsyncIterator[OpenedFake]:
    opened = OpenedFake()
    try:
        await opened.engine.start()
        yield opened
    finally:
        await opened.engine.aclose()
        assert opened.engine.violations == []


CASE = EngineCase(
    name="fake", open=_open, loop_factory=lambda: VirtualTimeLoop(1e6), counts_requests=True, takes_other_dtypes=False
)
