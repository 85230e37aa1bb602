"""For tests of adapters at an agent: a worker that may load from a folder, publications, and what it answers."""

import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from rlbus.schemas import (
    GetLoras,
    LoadLora,
    LorasData,
    LoraState,
    Result,
    lora_id,
)
from rlbus.testing import run
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.engines.lora import LoraInfo
from rlbus.workers.lora_testing import config_for, fake_adapter, load_of
from rlbus.workers.testing import Rig, worker_on_bus

PROMPT = (1, 2, 3)
LONG = 10_000


def play(
    root: Path,
    scenario: Callable[[Rig], Coroutine[Any, Any, None]],
    steps: Mapping[str, Mapping[int, Step]] | None = None,
    loras: LoraInfo | None = None,
    **settings: float,
) -> None:
    """Run a scenario against a worker that may load from `root`."""

    async def main() -> None:
        info = LoraInfo(4, can_hot_swap=True) if loras is None else loras
        engine = FakeEngine(FakeScript({} if steps is None else steps), loras=info)
        async with worker_on_bus(engine, config=config_for(root, **settings)) as rig:
            await scenario(rig)
        assert engine.violations == []

    run(main())


def publish(root: Path, revision: int, name: str = "policy", **options: bool) -> LoadLora:
    """The load of a revision with bytes of its own."""
    return load_of(fake_adapter(root / f"{name}-{revision}", f"{name} {revision}"), revision, name, **options)


def threads_end() -> None:
    """Wait for those that work on files, also for nobody."""
    for thread in threading.enumerate():
        if thread.name == "rlbus disk":
            thread.join()


def data_of(result: Result) -> LorasData:
    """What an answer says of the adapters."""
    assert isinstance(result.data, LorasData), result.fault
    return result.data


def ids(data: LorasData) -> dict[str, LoraState]:
    """The adapters of an answer."""
    return {v.name if v.revision is None else lora_id(v.name, v.revision): v.state for v in data.loras}


async def listed(rig: Rig) -> LorasData:
    """What the engine has now."""
    return data_of(await rig.send(GetLoras()))


def told(rig: Rig) -> tuple[int, tuple[str, ...]]:
    """Capacity and adapters in the last heartbeat."""
    view = rig.last.status.loras
    assert view is not None
    return view.capacity, view.ids
