"""The adapters of the torch engine: real LoRA on its projections, chosen by each request's model name.

They are applied where tokens are generated, in the first rank; the other ranks hold the base model only, for transfers.
"""

from collections.abc import Mapping
from pathlib import Path

from rlbus.adapter import AdapterError
from rlbus.errors import refused
from rlbus.schemas import FaultCode
from rlbus.transfer.bounded import run_in_thread
from rlbus.workers.engines.lora import LoraInfo, Resident
from rlbus.workers.torch_lm.adapter import read_adapter
from rlbus.workers.torch_lm.generate import Generation


class TorchLoras:
    """What makes the torch engine a `LoraEngine`; mixed into it."""

    _generator: Generation | None
    _projections: Mapping[str, tuple[int, int]]
    _max_loras: int

    @property
    def lora_info(self) -> LoraInfo:
        """See `LoraEngine`."""
        return LoraInfo(self._max_loras, can_drain=True, can_hot_swap=True)

    async def load_lora(self, name: str, revision: int, folder: Path, replaces: int | None = None) -> None:
        """See `LoraEngine`. The files are read before anything changes."""
        generator = self._with_loras()
        if generator.drain_adapter(name, revision, is_draining=False):
            return
        projections = self._projections
        try:
            adapter = await run_in_thread(lambda: read_adapter(folder, projections), name="rlbus adapter")
        except AdapterError as exc:
            raise refused(FaultCode.MANIFEST_MISMATCH, str(exc), path=exc.path) from exc
        if replaces is None and generator.adapters.is_full:
            capacity = self._max_loras
            raise refused(FaultCode.NO_CAPACITY, f"all {capacity} places are taken", capacity=capacity)
        await generator.add_adapter(name, revision, adapter, replaces)

    async def drain_lora(self, name: str, revision: int) -> None:
        """See `LoraEngine`."""
        self._with_loras().drain_adapter(name, revision, is_draining=True)

    async def unload_lora(self, name: str, revision: int) -> int | None:
        """See `LoraEngine`."""
        return await self._with_loras().remove_adapter(name, revision)

    async def list_loras(self) -> tuple[Resident, ...]:
        """See `LoraEngine`."""
        counts = self._with_loras().adapter_counts()
        return tuple(Resident(a.name, a.revision, count, is_draining=a.is_draining) for a, count in counts)

    def _with_loras(self) -> Generation:
        assert self._generator is not None, "the engine isn't started"
        self._generator.check_alive()
        return self._generator
