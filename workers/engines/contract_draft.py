"""What the contract suite needs of an engine that lists DRAFT_ROUTE, beyond `rlbus.workers.engines.contract`.

The `opened` of such a case also has the methods below; tests/engines/test_contract_draft.py runs on it.
"""

import asyncio
from typing import Any, Protocol

from rlbus.schemas import ReceivedData, TensorSpec, TensorSum, Version
from rlbus.workers.engines.base import ReceiveOrder
from rlbus.workers.engines.contract import BUCKET_BYTES, OpenedEngine, grouped, paused
from rlbus.workers.engines.draft import DraftEngine, drafter


class OpenedDraftEngine(OpenedEngine, Protocol):
    """An opened engine with a draft model. Its `send` takes orders with `is_draft`, too.

    Cancel, of every coroutine: see `OpenedEngine`.
    """

    def draft_tensors(self) -> tuple[TensorSpec, ...]:
        """The manifest that fits the draft model, in the order in which the sender sends; not that of the target."""
        ...

    def sums_of(self, version: Version) -> dict[str, str]:
        """Of the draft's tensors at `version` that the engine holds as they were sent: its own checksums of them, by
        its own names. At least one.
        """
        ...


def draft(opened: OpenedEngine) -> DraftEngine:
    """Its engine's draft side."""
    return drafter(opened.engine)


def draft_order(opened: OpenedDraftEngine, epoch: int, version: Version) -> ReceiveOrder:
    """The transfer of the draft's `version`."""
    return ReceiveOrder(f"draft-{epoch}", epoch, version, opened.draft_tensors(), BUCKET_BYTES, is_draft=True)


async def transfer_draft(
    opened: OpenedDraftEngine, epoch: int, version: Version, num_tensors: int | None = None
) -> tuple[ReceivedData, tuple[TensorSum, ...]]:
    """Send and receive; what was received, and the sent sums. Cancel: the receive may go on."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    order = draft_order(opened, epoch, version)

    def on_ready() -> None:
        loop.call_soon_threadsafe(ready.set_result, None)

    receiving = loop.create_task(opened.engine.receive_weights(order, on_ready, lambda done, total: None))
    waited: set[asyncio.Future[Any]] = {receiving, ready}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        await receiving
    sent = await opened.send(order, num_tensors)
    return await receiving, sent


async def update_draft(opened: OpenedDraftEngine, version: Version) -> None:
    """A whole update of the draft to `version`, flushed, running afterwards. Cancel: running, it may be torn."""
    async with paused(opened):
        async with grouped(opened) as epoch:
            received, sent = await transfer_draft(opened, epoch, version)
            assert received.sums == sent
            await opened.engine.finish_update(version)
        await opened.engine.flush_cache()
