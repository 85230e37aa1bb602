"""A fleet of fake engines that take adapters: real files, the bus's store in memory, a real controller and client."""

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from rlbus.adapter import CONFIG_FILE, WEIGHTS_FILE
from rlbus.adapter_objects import fetch_object
from rlbus.schemas import LorasData, LoraState, Report
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.lora import LoraInfo
from tests.unit.controller.scene import Scene, Steps, Worker, play, worker


def adapter(folder: Path, text: str = "1") -> Path:
    """A PEFT folder whose bytes are told apart by `text`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text('{"peft_type": "LORA"}')
    (folder / WEIGHTS_FILE).write_bytes(text.encode() * 1000)
    return folder


def taker(
    number: int,
    steps: Steps | None = None,
    *,
    roots: Sequence[Path] = (),
    boot: str = "boot",
    config: dict[str, Any] | None = None,
    **info: Any,
) -> Worker:
    """The worker "backend/<number>" with room for adapters; `info` is what its engine says of that."""
    lora_info = LoraInfo(**{"capacity": 4, **info})
    made = AgentConfig(fetch_object=fetch_object, lora_roots=tuple(map(str, roots)), **(config or {}))
    return worker(number, steps, boot=boot, config=made, loras=lora_info)


def takers(*numbers: int, **options: Any) -> list[Worker]:
    return [taker(number, **options) for number in numbers]


def on_fleet(workers: list[Worker], scenario: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    """Run it in virtual time."""
    play(workers, scenario)


def serving(scene: Scene) -> list[list[str]]:
    """What each engine itself serves, worker by worker."""
    return [
        sorted(f"{n}@{r}" for n, r in rig.engine.loras.sums if (n, r) not in rig.engine.loras.draining)
        for rig in scene.fleet.workers
    ]


def listed(report: Report) -> dict[str, list[str]]:
    """Per worker: the adapters in its list, with their state unless it is loaded."""
    found: dict[str, list[str]] = {}
    for outcome in report.outcomes:
        assert isinstance(outcome.data, LorasData)
        found[outcome.worker.partition("/")[2]] = [
            f"{v.name}@{v.revision}" + ("" if v.state is LoraState.LOADED else f" {v.state.value}")
            for v in outcome.data.loras
        ]
    return found
