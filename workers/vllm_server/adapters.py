"""The half of `LoraEngine` that all engines with a vLLM behind them share: what holds the adapters does it."""

from pathlib import Path
from typing import Generic, Protocol, TypeVar

from rlbus.workers.engines.lora import LoraInfo, Resident


class Adapters(Protocol):
    """What holds an engine's adapters; each method as the one of `LoraEngine` with the longer name."""

    info: LoraInfo

    async def load(self, name: str, revision: int, folder: Path) -> None:
        """See `LoraEngine.load_lora`."""
        ...

    async def drain(self, name: str, revision: int) -> None:
        """See `LoraEngine.drain_lora`."""
        ...

    async def unload(self, name: str, revision: int) -> int | None:
        """See `LoraEngine.unload_lora`."""
        ...

    async def residents(self) -> tuple[Resident, ...]:
        """See `LoraEngine.list_loras`."""
        ...


A = TypeVar("A", bound=Adapters)


class TakesLoras(Generic[A]):
    """Base of an adapter of an engine. `_loras` is None where the routes aren't advertised."""

    _loras: A | None = None

    @property
    def lora_info(self) -> LoraInfo:
        """See `LoraEngine`."""
        return self._with_loras().info

    async def load_lora(self, name: str, revision: int, folder: Path, replaces: int | None = None) -> None:
        """See `LoraEngine`. The engine has to find the folder under the same path."""
        assert replaces is None, "vLLM has no hot swap that keeps revisions apart, and the info says so"
        await self._with_loras().load(name, revision, folder)

    async def drain_lora(self, name: str, revision: int) -> None:
        """See `LoraEngine`."""
        await self._with_loras().drain(name, revision)

    async def unload_lora(self, name: str, revision: int) -> int | None:
        """See `LoraEngine`."""
        return await self._with_loras().unload(name, revision)

    async def list_loras(self) -> tuple[Resident, ...]:
        """See `LoraEngine`."""
        return await self._with_loras().residents()

    def _with_loras(self) -> A:
        assert self._loras is not None, "the routes aren't advertised without it"
        return self._loras
