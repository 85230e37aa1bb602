"""The seam for engines with a draft model (speculative decoding) whose weights can be replaced by themselves.

An engine that implements it lists DRAFT_ROUTE. A draft's update is an update like any other, in the same order: a
`ReceiveOrder` with `is_draft`, then exactly one of `finish_update` and `abort_update`, which mean the session that is
open. It leaves the target's weights and the engine's label of them as they are.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rlbus.errors import refused
from rlbus.schemas import DRAFT_ROUTE, ChecksumsData, FaultCode, TensorSpec
from rlbus.workers.engines.base import Engine


@runtime_checkable
class DraftEngine(Protocol):
    """The draft model of one engine. Errors are `rlbus.errors.EngineError`."""

    def check_draft_manifest(self, tensors: Sequence[TensorSpec]) -> None:
        """As `Engine.check_manifest`, against the draft model's own tensors."""
        ...

    async def draft_checksums(self) -> ChecksumsData:
        """As `Engine.checksums`, of the draft model. Cancel: nothing changes; the engine may still compute them."""
        ...


def drafter(engine: Engine) -> DraftEngine:
    """The engine as one with a draft model. Raises a refused error (`no_route`) if it has none."""
    if not isinstance(engine, DraftEngine) or DRAFT_ROUTE not in engine.info.routes:
        text = f"{engine.info.engine} has no draft model that can be updated"
        raise refused(FaultCode.NO_ROUTE, text, route=DRAFT_ROUTE)
    return engine
