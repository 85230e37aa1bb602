"""The adapters of one Dynamo worker: each revision is a LoRA of its own in Dynamo, named "policy@7".

Dynamo's list is asked for at its system port; loads and unloads are routes of its RL mode. What Dynamo doesn't tell is
not made up: how many adapters it has room for (the user says it), and how many requests name one. It waits for those
by itself before it unloads, so no request is ended. A plain "policy" isn't served: Dynamo knows whole names only.
Source: NVIDIA Dynamo 1.6.1, `dynamo/vllm/handlers.py` and its system status server.
"""

import os
import sys
from pathlib import Path
from typing import Any

from rlbus.errors import EngineError, refused
from rlbus.schemas import MAX_LORAS, Fault, FaultCode, lora_id, split_lora_id
from rlbus.workers.disk import DISK
from rlbus.workers.dynamo.surface import ASK_S, DynamoError, Surface
from rlbus.workers.engines.lora import LoraInfo, Resident
from rlbus.workers.vllm_server.calls import EngineCalls
from rlbus.workers.vllm_server.loras import LORA_S, check_files

LOAD, UNLOAD = "load_lora", "unload_lora"
# What a worker has to list; they are enough for all of rlbus's. The list of adapters is none of Dynamo's RL routes, and
# is asked for at the start.
NEEDED = frozenset({LOAD, UNLOAD})
# Dynamo doesn't say which ranks its vLLM takes; that refuses a larger one by itself, and keeps what it has.
_ANY_RANK = sys.maxsize
# Dynamo's words.
_NOT_THERE = "not found. Available LoRAs"
_IN_USE = "with active requests"


class DynamoLoras:
    """Loads, unloads and lists the adapters of one worker.

    Args:
        calls: through which loads go, so that the next one waits for one that was given up.
        capacity: how many the worker has room for, by the user's word.
    """

    def __init__(self, surface: Surface, calls: EngineCalls, *, capacity: int) -> None:
        self._surface = surface
        self._calls = calls
        self.info = LoraInfo(
            min(capacity, MAX_LORAS), can_drain=False, can_hot_swap=False, ends_requests=False, has_short_names=False
        )
        # Loads that Dynamo hasn't come back from; those of which nobody hears the end.
        self._open: set[str] = set()
        self._late: set[str] = set()

    async def load(self, name: str, revision: int, folder: Path) -> None:
        """See `LoraEngine.load_lora`. Dynamo finds the folder under the same path."""
        own = lora_id(name, revision)
        there = await self._names()
        if own in there:
            return
        if len(there) >= self.info.capacity:
            capacity = self.info.capacity
            raise refused(FaultCode.NO_CAPACITY, f"the worker has room for {capacity} adapters", capacity=capacity)
        await DISK.run(lambda: check_files(folder, _ANY_RANK), str(folder))
        # The path as it is: Dynamo takes what follows "file://", and decodes nothing.
        body = {"lora_name": own, "source": {"uri": f"file://{_absolute(folder)}"}}

        async def call() -> None:
            self._open.add(own)
            try:
                await self._surface.call(LOAD, body, LORA_S)
            finally:
                self._open.discard(own)
                self._late.discard(own)

        try:
            await self._calls.hold(LOAD, call, LORA_S)
        except BaseException:
            if own in self._open:
                self._late.add(own)
            raise

    async def drain(self, name: str, revision: int) -> None:
        """See `LoraEngine.drain_lora`. Refused, as the info says: Dynamo doesn't count the requests of an adapter."""
        raise refused(FaultCode.NO_ROUTE, "Dynamo doesn't count the requests of an adapter; unloading waits for them")

    async def unload(self, name: str, revision: int) -> None:
        """See `LoraEngine.unload_lora`. Returns once the requests that name it have ended; Dynamo lets no new ones in.

        Raises: a refusal (busy): the worker is paused with requests that name it. Cancel: Dynamo still does it.
        """
        try:
            await self._surface.call(UNLOAD, {"lora_name": lora_id(name, revision)}, LORA_S)
        except DynamoError as exc:
            said = exc.fault.detail.get("problem", "")
            if _NOT_THERE in said:
                return
            if _IN_USE in said:
                raise refused(FaultCode.BUSY, f"{said} (Dynamo's words)", retryable=True) from exc
            raise

    async def residents(self) -> tuple[Resident, ...]:
        """See `LoraEngine.list_loras`. Raises: also while a load whose end nobody heard is still under way: it may come
        yet.
        """
        if self._late:
            text = f"Dynamo hasn't come back from loading {', '.join(sorted(self._late))}"
            raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text, retryable=True))
        return tuple(_resident(name) for name in sorted(await self._names()))

    async def _names(self) -> frozenset[str]:
        self._calls.check_alive()
        return await self._surface.loras(ASK_S)


def _absolute(folder: Path) -> str:
    return os.path.abspath(folder)


def _resident(name: str) -> Resident:
    parts: Any = split_lora_id(name)
    return Resident(name, None) if parts is None else Resident(*parts)
