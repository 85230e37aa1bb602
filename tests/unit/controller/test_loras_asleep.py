"""Adapters and sleeping weights: none is loaded, unloaded or caught up there."""

import asyncio
from pathlib import Path

import pytest

from rlbus.errors import AsleepError
from rlbus.schemas import LoadLora, PauseGeneration, Target
from tests.unit.controller.lora_stage import adapter, on_fleet, takers
from tests.unit.controller.scene import Scene, w

pytestmark = pytest.mark.unit


def test_nothing_is_loaded_onto_weights_that_sleep(tmp_path: Path) -> None:
    """Audit of issue 4, 2: a load of the whole fleet is refused, naming the sleeper, and so is an unload."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", folder)
        await client.sleep(Target(workers=(w(2),)))
        await asyncio.sleep(0.3)
        scene.commands.clear()
        with pytest.raises(AsleepError, match="backend/2"):
            await client.load_lora("policy", adapter(tmp_path / "b", "2"))
        with pytest.raises(AsleepError, match="backend/2"):
            await client.unload_lora("policy")
        assert await scene.addressed(PauseGeneration) == []
        assert await scene.addressed(LoadLora) == []

    on_fleet(takers(1, 2), scenario)


def test_a_sleeper_is_given_what_it_lacks_when_it_is_awake(tmp_path: Path) -> None:
    """Audit of issue 4, 2: the catch-up doesn't write into memory that somebody else was given."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", folder)
        await client.sleep(Target(workers=(w(2),)))
        engine = scene.fleet.workers[1].engine
        engine.loras.sums.clear()
        scene.commands.clear()
        await asyncio.sleep(10.0)
        assert (await scene.fleet.members())[w(2)].loras_behind == ()
        assert await scene.addressed(LoadLora) == []
        await client.wake(Target(workers=(w(2),)))
        await asyncio.sleep(10.0)
        assert sorted(engine.loras.sums) == [("policy", 1)]

    on_fleet(takers(1, 2), scenario)
