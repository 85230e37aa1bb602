"""More adapters than a worker's status names: its own list tells which it lacks."""

import asyncio
from pathlib import Path

import pytest

from rlbus.controller import lora_lists
from rlbus.schemas import GetLoras, LoadLora
from rlbus.workers import loras
from tests.unit.controller.lora_stage import adapter, on_fleet, taker, takers
from tests.unit.controller.scene import Scene, w

pytestmark = pytest.mark.unit

NAMES = ("a", "b", "c", "d", "e")
ALL = [(name, 1) for name in NAMES]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status names two adapters."""
    monkeypatch.setattr(loras, "MAX_STATUS_IDS", 2)
    monkeypatch.setattr(lora_lists, "MAX_STATUS_IDS", 2)


async def loaded(scene: Scene, tmp_path: Path) -> None:
    for name in NAMES:
        await scene.fleet.client.load_lora(name, adapter(tmp_path / name, name))


def test_a_worker_that_comes_later_is_given_all_of_them(tmp_path: Path) -> None:
    """Also those beyond what its status names; who has all of them is given none, and asked no more than needed."""

    async def scenario(scene: Scene) -> None:
        await loaded(scene, tmp_path)
        scene.commands.clear()
        async with taker(2, capacity=9)(scene.fleet.broker) as late:
            await scene.fleet.client.wait_ready(num_workers=2)
            await asyncio.sleep(30.0)
            assert sorted(late.engine.loras.sums) == ALL
            assert (await scene.fleet.members())[w(2)].loras_behind == ()
            assert await scene.addressed(LoadLora) == ["2"]
            scene.commands.clear()
            await asyncio.sleep(200.0)
            assert await scene.addressed(GetLoras) == []

    on_fleet(takers(1, capacity=9), scenario)


def test_what_it_can_t_be_given_is_named(tmp_path: Path) -> None:
    """No room, and bytes that aren't the fleet's, among those that its status doesn't name."""

    async def scenario(scene: Scene) -> None:
        await loaded(scene, tmp_path)
        async with taker(2, capacity=4)(scene.fleet.broker) as late:
            late.engine.loras.sums["d", 1] = "e" * 64
            await scene.fleet.client.wait_ready(num_workers=2)
            await asyncio.sleep(30.0)
            assert sorted(late.engine.loras.sums) == ALL[:4]
            foreign, full = (await scene.fleet.members())[w(2)].loras_behind
            assert (foreign.id, full.id) == ("d@1", "e@1")
            assert foreign.note.endswith("aren't known to be the fleet's: unload it there")
            assert "room for 4 adapters" in full.note

    on_fleet(takers(1, capacity=9), scenario)


def test_one_that_loses_them_by_itself_is_seen_to_after_a_while(tmp_path: Path) -> None:
    """Its status says nothing of it: its list is read again now and then."""

    async def scenario(scene: Scene) -> None:
        await loaded(scene, tmp_path)
        await asyncio.sleep(10.0)
        (engine,) = [rig.engine for rig in scene.fleet.workers]
        del engine.loras.sums["e", 1]
        await asyncio.sleep(lora_lists.KEEP_S + 30.0)
        assert sorted(engine.loras.sums) == ALL

    on_fleet(takers(1, capacity=9), scenario)


def test_a_list_that_can_t_be_read_is_asked_for_again(tmp_path: Path) -> None:
    """A worker that is cut off for a moment is given them afterwards."""

    async def scenario(scene: Scene) -> None:
        await loaded(scene, tmp_path)
        async with taker(2, capacity=9)(scene.fleet.broker) as late:
            await scene.fleet.client.wait_ready(num_workers=2)
            scene.fleet.workers.append(late)
            scene.at(GetLoras, lambda: scene.cut(2))
            await asyncio.sleep(8.0)
            scene.heal(2)
            await asyncio.sleep(90.0)
            scene.fleet.workers.remove(late)
            assert sorted(late.engine.loras.sums) == ALL

    on_fleet(takers(1, capacity=9), scenario)
