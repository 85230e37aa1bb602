"""The adapters of the fake engine: real files, simulated effect. A request that names one gets tokens of its own.

Scripted verbs are `load_lora`, `drain_lora`, `unload_lora` and `list_loras`. A step with `does_it` does what was asked
for and then fails, hangs or dies: an outcome that only the engine's list can tell.
"""

from pathlib import Path

from rlbus.adapter import AdapterError, adapter_sum
from rlbus.errors import refused
from rlbus.schemas import FaultCode, lora_id, split_lora_id
from rlbus.workers.engines.fake_requests import Scheduler
from rlbus.workers.engines.fake_script import Step
from rlbus.workers.engines.lora import LoraInfo, Resident

DEFAULT_CAPACITY = 4


class UnknownModelError(LookupError):
    """A request names a model that isn't there. Nothing was done for it."""


class FakeLoras:
    """Adapters by (name, revision), with the checksum of the files that each was loaded from."""

    def __init__(self, requests: Scheduler, info: LoraInfo) -> None:
        self._requests = requests
        self.info = info
        self.sums: dict[tuple[str, int], str] = {}
        self.draining: set[tuple[str, int]] = set()
        # Names that somebody else has put there, which aren't ours.
        self.foreign: list[str] = []
        # Whether its list says which folder each was loaded from.
        self.tells_files = True

    def load(self, name: str, revision: int, folder: Path, replaces: int | None) -> None:
        """Read the files, and take them. Raises a refusal: no room, or no adapter."""
        key = (name, revision)
        if key in self.sums:
            self.draining.discard(key)
            return
        if replaces is None and len(self.sums) + len(self.foreign) >= self.info.capacity:
            capacity = self.info.capacity
            raise refused(FaultCode.NO_CAPACITY, f"{capacity} adapters are loaded", capacity=capacity)
        try:
            checksum = adapter_sum(folder).checksum
        except AdapterError as exc:
            raise refused(FaultCode.MANIFEST_MISMATCH, str(exc), path=exc.path) from exc
        if replaces is not None:
            self.sums.pop((name, replaces))
            self._requests.move(lora_id(name, replaces), lora_id(name, revision))
        self.sums[key] = checksum

    def unload(self, name: str, revision: int) -> int:
        """Let it go, and end its requests; how many."""
        self.draining.discard((name, revision))
        if self.sums.pop((name, revision), None) is None:
            return 0
        return self._requests.abort([r.request_id for r in self._requests.naming(lora_id(name, revision))])

    def residents(self) -> tuple[Resident, ...]:
        """What there is."""
        ours = [
            Resident(
                *key,
                len(self._requests.naming(lora_id(*key))),
                is_draining=key in self.draining,
                files=checksum if self.tells_files else None,
            )
            for key, checksum in self.sums.items()
        ]
        return (*ours, *(Resident(name, None) for name in self.foreign))

    def choose(self, model: str, base: str) -> str | None:
        """The adapter that a request for `model` gets; None for the base model. Raises UnknownModelError."""
        if model == base:
            return None
        key = split_lora_id(model)
        if key is None:
            revisions = [r for n, r in self.sums if n == model and (n, r) not in self.draining]
            key = (model, max(revisions)) if revisions else None
        if key is None or key not in self.sums or key in self.draining:
            raise UnknownModelError(f"the model {model!r} does not exist")
        return lora_id(*key)


class WithLoras:
    """What makes the fake engine a `LoraEngine`; mixed into it."""

    requests: Scheduler
    loras: FakeLoras

    def _note(self, verb: str) -> Step:
        raise NotImplementedError

    async def _play_step(self, step: Step) -> None:
        raise NotImplementedError

    @property
    def lora_info(self) -> LoraInfo:
        """See `LoraEngine`."""
        return self.loras.info

    async def load_lora(self, name: str, revision: int, folder: Path, replaces: int | None = None) -> None:
        """See `LoraEngine`."""
        step = self._note("load_lora")
        if step.does_it:
            self.loras.load(name, revision, folder, replaces)
        await self._play_step(step)
        self.loras.load(name, revision, folder, replaces if (name, replaces) in self.loras.sums else None)

    async def drain_lora(self, name: str, revision: int) -> None:
        """See `LoraEngine`."""
        await self._play_step(self._note("drain_lora"))
        if (name, revision) in self.loras.sums:
            self.loras.draining.add((name, revision))

    async def unload_lora(self, name: str, revision: int) -> int | None:
        """See `LoraEngine`."""
        step = self._note("unload_lora")
        if step.does_it:
            self.loras.unload(name, revision)
        await self._play_step(step)
        return self.loras.unload(name, revision)

    async def list_loras(self) -> tuple[Resident, ...]:
        """See `LoraEngine`."""
        await self._play_step(self._note("list_loras"))
        return self.loras.residents()
