"""What the contract suite needs of an engine that lists the LoRA routes, beyond `rlbus.workers.engines.contract`.

The `opened` of such a case also has the two methods below; tests/engines/test_contract_lora.py runs on it.
"""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol, cast

from rlbus.schemas import lora_id
from rlbus.workers.engines.contract import PROMPT, Generated, OpenedEngine
from rlbus.workers.engines.lora import LoraEngine, Resident

# The name under which the suite loads.
NAME = "policy"
_requests = itertools.count(1)


class OpenedLoraEngine(OpenedEngine, Protocol):
    """An opened engine that takes adapters. Cancel, of every coroutine: see `OpenedEngine`."""

    async def save_adapter(self, folder: Path, number: int) -> Path:
        """Write an adapter for the engine's model; different numbers, different weights. Returns its folder."""
        ...

    async def generate_as(
        self,
        model: str,
        prompt: tuple[int, ...],
        num_tokens: int,
        request_id: str,
        on_token: Callable[[], None] | None = None,
    ) -> Generated:
        """Decode greedily as a request that names `model`. Raises LookupError if the engine refuses that name."""
        ...


def takes_loras(opened: OpenedEngine) -> OpenedLoraEngine | None:
    """The same, if it is an engine that takes adapters."""
    return cast(OpenedLoraEngine, opened) if "load_lora" in opened.engine.info.routes else None


def loras(opened: OpenedEngine) -> LoraEngine:
    """Its engine's LoRA side."""
    return cast(LoraEngine, opened.engine)


def newest(opened: OpenedEngine, revision: int) -> str:
    """How a request names the newest revision, which is `revision`: by the plain name, if that is served."""
    return NAME if loras(opened).lora_info.has_short_names else lora_id(NAME, revision)


async def tokens_as(opened: OpenedLoraEngine, model: str, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """What the engine generates now for that model name. Cancel: the request is dropped, or goes on in the engine."""
    generated = await opened.generate_as(model, prompt, 12, f"lora-request-{next(_requests)}")
    assert generated.finish == "length"
    return generated.tokens


def key_of(resident: Resident) -> str:
    """How a request names it."""
    return resident.name if resident.revision is None else lora_id(resident.name, resident.revision)


async def listed(opened: OpenedEngine) -> dict[str, Resident]:
    """The engine's own list by name. Cancel: leaves nothing."""
    return {key_of(resident): resident for resident in await loras(opened).list_loras()}


@asynccontextmanager
async def loaded(opened: OpenedLoraEngine, folder: Path, *revisions: int) -> AsyncIterator[None]:
    """These revisions, each with weights of its own, are loaded inside; outside nothing of NAME is.

    Cancel: inside they are unloaded; while they are loaded, some may stay.
    """
    engine = loras(opened)
    try:
        for revision in revisions:
            files = await opened.save_adapter(folder / str(revision), revision)
            await engine.load_lora(NAME, revision, files)
        yield
    finally:
        for resident in await engine.list_loras():
            if resident.name == NAME and resident.revision is not None:
                await engine.unload_lora(NAME, resident.revision)
