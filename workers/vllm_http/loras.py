"""The adapters of a vLLM server from outside: `VllmLoras` inside it, driven by routes of rlbus's plugin."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rlbus.errors import EngineDeadError, EngineError, FaultError, refused
from rlbus.schemas import Fault, FaultCode
from rlbus.workers.checks import REFUSALS
from rlbus.workers.engines.lora import LoraInfo, Resident
from rlbus.workers.peer_http import PeerError
from rlbus.workers.vllm_http.remote import RemoteCallError, RemoteLLM
from rlbus.workers.vllm_server.calls import EngineCalls
from rlbus.workers.vllm_server.lora_routes import DRAIN, LIST, LOAD, RESTORE, UNLOAD, Listed, Unloaded
from rlbus.workers.vllm_server.loras import CALL_S, LORA_S

T = TypeVar("T")


class RemoteLoras:
    """The adapters of one start of a server.

    Args:
        calls: through which everything goes that asks this server for something.
        boot_id: of that start.
        capacity: how many it takes.
    """

    def __init__(self, llm: RemoteLLM, calls: EngineCalls, *, boot_id: str, capacity: int) -> None:
        self._llm = llm
        self._calls = calls
        self._boot_id = boot_id
        self.info = LoraInfo(capacity, can_drain=True, can_hot_swap=False)

    async def load(self, name: str, revision: int, folder: Path) -> None:
        """See `LoraEngine.load_lora`. The server finds the folder under the same path."""
        await self._change(LOAD, LORA_S, name=name, revision=revision, folder=_absolute(folder))

    async def drain(self, name: str, revision: int) -> None:
        """See `LoraEngine.drain_lora`."""
        await self._change(DRAIN, CALL_S, name=name, revision=revision)

    async def unload(self, name: str, revision: int) -> int:
        """See `LoraEngine.unload_lora`."""
        return _parsed(await self._change(UNLOAD, LORA_S, name=name, revision=revision), Unloaded).num_ended

    async def restore(self) -> None:
        """See `VllmLoras.restore`. Cancel: it goes on in the server."""
        await self._change(RESTORE, LORA_S)

    async def residents(self) -> tuple[Resident, ...]:
        """See `LoraEngine.list_loras`."""
        if self._calls.is_held_paused:
            text = "the engine is inside an update, and can't list its adapters"
            raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text, retryable=True))
        return _parsed(await self._calls.ask(LIST, lambda: self._ask("GET", LIST, None, CALL_S), CALL_S), Listed).loras

    # --- within

    async def _change(self, path: str, limit_s: float, **body: Any) -> Any:
        whole = {"boot_id": self._boot_id, **body}
        return await self._calls.hold(path, lambda: self._ask("POST", path, whole, limit_s), limit_s)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float) -> Any:
        try:
            return await self._llm.plugin(method, path, body=body, limit_s=limit_s)
        except PeerError as exc:
            raise self._meant(exc) from exc

    def _meant(self, error: PeerError) -> Exception:
        """What the server's fault is here."""
        match error.word:
            case None:
                return error
            case FaultCode.STALE_EPOCH:
                self._llm.die(error.problem)
                return EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=error.problem))
            case FaultCode.ENGINE_DEAD:
                # Its ranks are out of step: `EngineCalls` judges what its own calls raise as it does in the server.
                return RemoteCallError(error.problem)
            case code if code in REFUSALS:
                return _refused(FaultCode(code), error.problem, self.info.capacity)
        return EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=error.problem))


def _absolute(folder: Path) -> str:
    """As the server, which runs elsewhere, has to be told."""
    return str(folder.absolute())


def _refused(code: FaultCode, problem: str, capacity: int) -> FaultError:
    if code is FaultCode.NO_CAPACITY:
        return refused(code, problem, capacity=capacity)
    return refused(code, problem)


def _parsed(data: Any, as_type: type[T]) -> T:
    """An answer of the plugin. Raises: EngineError: it is of another version."""
    try:
        return msgspec.convert(data, as_type)
    except msgspec.ValidationError as exc:
        text = f"{LIST} answers in another shape than this version of rlbus: {exc}"
        raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text)) from exc
