"""Adapters that a worker still serves and the fleet doesn't have: it was away when they went. Shown with what to do."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rlbus.adapter import adapter_sum
from rlbus.schemas import MemberView, Target
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.lora_stage import adapter, on_fleet, serving, taker, takers
from tests.unit.controller.scene import Scene, outcomes, w

pytestmark = pytest.mark.unit

# Until a worker that nobody hears is given up, and until one that is there again is heard.
LONG_S = 60.0


async def away(scene: Scene, number: int, *, is_back: bool = False) -> None:
    """Cut it off, or let it come back, until everybody knows."""
    if is_back:
        scene.heal(number)
    else:
        scene.cut(number)
    await asyncio.sleep(LONG_S)


async def extra(scene: Scene) -> list[tuple[str, ...]]:
    members: tuple[MemberView, ...] = (await scene.fleet.client.status()).members
    return [m.loras_extra for m in members]


def test_a_worker_that_was_away_in_an_unload_is_shown_to_serve_it_still(tmp_path: Path) -> None:
    """An unload there is enough; what the fleet has is no such adapter."""
    one, two = adapter(tmp_path / "1", "one"), adapter(tmp_path / "2", "two")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", one)
        await client.load_lora("policy", two)
        await away(scene, 3)
        await client.unload_lora("policy", revision=2)
        assert await extra(scene) == [(), (), ()]
        await away(scene, 3, is_back=True)
        assert serving(scene)[2] == ["policy@1", "policy@2"]
        assert await extra(scene) == [(), (), ("policy@2",)]
        await client.unload_lora("policy", revision=2, target=Target(workers=(w(3),)))
        assert await extra(scene) == [(), (), ()]

    on_fleet(takers(1, 2, 3), scenario)


def test_a_worker_that_was_cut_off_in_a_load_that_was_taken_back_is_shown_to_serve_it(tmp_path: Path) -> None:
    """It has loaded it, and nobody could tell it to unload it."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        asyncio.get_running_loop().call_later(1.0, scene.cut, 3)
        report = await scene.fleet.client.load_lora("policy", folder, check=False, deadline_s=20.0)
        assert outcomes(report)["2"] == "failed"
        await away(scene, 3, is_back=True)
        assert serving(scene) == [[], [], ["policy@1"]]
        assert await extra(scene) == [(), (), ("policy@1",)]

    late = {"load_lora": {1: replace(failing(), latency_s=3.0)}}
    on_fleet([taker(1), taker(2, late), taker(3, {"load_lora": {1: Step(latency_s=2.0)}})], scenario)


def test_what_half_an_unload_left_is_shown_where_it_is(tmp_path: Path) -> None:
    """On the worker that failed."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.load_lora("policy", folder)
        await scene.fleet.client.unload_lora("policy", check=False)
        await asyncio.sleep(LONG_S)  # its engine first has to say that it is there still
        assert await extra(scene) == [(), ("policy@1",)]

    on_fleet([taker(1), taker(2, {"drain_lora": {1: failing()}})], scenario)


@pytest.mark.parametrize("is_known", [False, True])
def test_only_the_fleets_own_bytes_are_shown(tmp_path: Path, is_known: bool) -> None:
    """What somebody else put there is theirs; one that nothing is left of in the fleet is known by its checksum."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.load_lora("policy", folder)
        await scene.fleet.client.unload_lora("policy")
        async with taker(3)(scene.fleet.broker) as late:
            late.engine.loras.sums["policy", 1] = adapter_sum(folder).checksum if is_known else "e" * 64
            late.engine.loras.sums["other", 1] = "e" * 64
            await scene.fleet.client.wait_ready(num_workers=2)
            await asyncio.sleep(LONG_S)
            assert await extra(scene) == [(), ("policy@1",) if is_known else ()]

    on_fleet(takers(1), scenario)


def test_a_load_that_runs_makes_nothing_extra(tmp_path: Path) -> None:
    """One has it already, the other loads."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        loading = asyncio.ensure_future(scene.fleet.client.load_lora("policy", folder))
        await asyncio.sleep(5.0)
        assert serving(scene) == [["policy@1"], []]
        assert await extra(scene) == [(), ()]
        await loading
        assert await extra(scene) == [(), ()]

    on_fleet([taker(1), taker(2, {"load_lora": {1: Step(latency_s=10.0)}})], scenario)
