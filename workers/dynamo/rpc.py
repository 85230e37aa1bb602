"""What `vllm_server.updates` asks of vLLM's AsyncLLM, asked of a Dynamo worker: its routes hand an `engine_rpc` on.

The prefix cache is left alone between the steps of an update; Dynamo empties it with the last one, and rlbus flushes
before it resumes in any case.
"""

import asyncio
from pathlib import Path
from typing import Any

from rlbus.workers.dynamo.surface import DynamoError, Surface
from rlbus.workers.vllm_server.exchange import TORN, CallFolder
from rlbus.workers.vllm_server.ranks import CALL_S
from rlbus.workers.vllm_server.updates import LOAD_S, TRANSFER_S

_GROUP, _DISTRIBUTED, _DISK = (
    "init_weights_update_group",
    "update_weights_from_distributed",
    "update_weights_from_disk",
)
# vLLM's words for a session that stands open.
_ALREADY_OPEN = "already active"


class DynamoRpc:
    """The few methods that an update needs. Raises what `Surface` raises."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    @property
    def errored(self) -> bool:
        """Whether the worker is known to be gone."""
        return self._surface.gone is not None

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        """Call a method of vLLM's worker on every rank. Cancel: Dynamo still does it."""
        match method:
            case "init_weight_transfer_engine":
                await self._surface.call(_GROUP, {"engine_rpc": method, **kwargs}, CALL_S)
            case "reload_weights":
                # Dynamo loads on when we are gone, and the label of before would then be a lie.
                await self._surface.set_label(TORN, CALL_S)
                await self._surface.call(_DISK, {"model_path": kwargs["weights_path"]}, LOAD_S)
            case _:
                info = await asyncio.to_thread(_slim, kwargs["update_info"])
                await self._step(method, TRANSFER_S, update_info=info)

    async def start_weight_update(self) -> None:
        """Open vLLM's session; one that stands open after a lost answer is as good. Cancel: it may be open."""
        try:
            await self._step("start_weight_update", CALL_S)
        except DynamoError as exc:
            if _ALREADY_OPEN not in exc.fault.message:
                raise

    async def finish_weight_update(self) -> None:
        """Close vLLM's session. Cancel: Dynamo still does it."""
        await self._step("finish_weight_update", LOAD_S, reset_prefix_cache=True)

    async def update_weight_version(self, label: str) -> None:
        """Label the weights. Cancel: Dynamo still does it."""
        await self._surface.set_label(label, CALL_S)

    async def _step(self, method: str, limit_s: float, *, reset_prefix_cache: bool = False, **kwargs: Any) -> None:
        body = {"engine_rpc": method, "reset_prefix_cache": reset_prefix_cache, **kwargs}
        await self._surface.call(_DISTRIBUTED, body, limit_s)


def _slim(info: dict[str, Any]) -> dict[str, Any]:
    """Dynamo takes bodies up to 2 MB, and a large model's manifest is more: it goes through the call's folder."""
    CallFolder(str(Path(info["folder"]))).put_tensors(info["tensors"])
    return {**info, "tensors": None}
