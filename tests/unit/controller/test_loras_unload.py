"""Unloads that half succeed, or name all workers in another way: nothing of them comes back by itself."""

import asyncio
from pathlib import Path

import pytest

from rlbus.errors import WrongStateError
from rlbus.schemas import LoadLora, Target
from rlbus.workers.engines.fake_loras import UnknownModelError
from rlbus.workers.engines.fake_script import failing
from tests.unit.controller.lora_stage import adapter, on_fleet, serving, taker, takers
from tests.unit.controller.scene import Scene, outcomes, w

pytestmark = pytest.mark.unit

# Above all after which a catch-up gives what is lacking.
LONG_S = 60.0


def test_what_a_half_failed_unload_took_is_given_to_nobody_again(tmp_path: Path) -> None:
    """Neither to who let it go, nor to one that comes later; the next unload finishes it."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", folder)
        scene.commands.clear()
        report = await client.unload_lora("policy", check=False)
        assert outcomes(report) == {"1": "ok", "2": "failed"}
        assert report.lora is not None
        assert (report.lora.ids, report.lora.partly) == ((), ("policy@1",))
        async with taker(3)(scene.fleet.broker) as late:
            await client.wait_ready(num_workers=3)
            await asyncio.sleep(LONG_S)
            assert serving(scene) == [[], ["policy@1"]]
            assert late.engine.loras.sums == {}
            assert await scene.addressed(LoadLora) == []
        finished = await client.unload_lora("policy", target=Target(workers=(w(1), w(2))))
        assert finished.lora is not None
        assert finished.lora.ids == ("policy@1",)
        assert serving(scene) == [[], []]

    on_fleet([taker(1), taker(2, {"drain_lora": {1: failing()}})], scenario)


def test_a_worker_that_is_silent_in_an_unload_gives_the_others_nothing_back(tmp_path: Path) -> None:
    """Whatever became of it there."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.load_lora("policy", folder)
        scene.cut(3)
        report = await scene.fleet.client.unload_lora("policy", check=False)
        assert outcomes(report) == {"1": "ok", "2": "ok", "3": "unknown"}
        await asyncio.sleep(LONG_S)
        assert serving(scene)[:2] == [[], []]

    on_fleet(takers(1, 2, 3), scenario)


def test_a_drain_is_not_taken_back_because_another_worker_failed(tmp_path: Path) -> None:
    """New requests stay refused there."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.load_lora("policy", folder)
        engine = scene.fleet.workers[0].engine
        engine.submit("long", [1, 2], num_tokens=100_000, model="policy@1")
        await scene.fleet.client.unload_lora("policy", check=False)
        await asyncio.sleep(LONG_S)
        with pytest.raises(UnknownModelError, match="policy@1"):
            engine.submit("late", [1], num_tokens=1, model="policy@1")

    on_fleet([taker(1), taker(2, {"drain_lora": {1: failing()}})], scenario)


def test_an_unload_that_nobody_carried_out_changes_nothing(tmp_path: Path) -> None:
    """All say that they serve it as before: it is still the fleet's."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.load_lora("policy", folder)
        report = await scene.fleet.client.unload_lora("policy", check=False)
        assert outcomes(report) == {"1": "failed", "2": "failed"}
        assert [x.revision for x in (await scene.fleet.client.status()).loras] == [1]
        async with taker(3)(scene.fleet.broker) as late:
            await scene.fleet.client.wait_ready(num_workers=3)
            await asyncio.sleep(LONG_S)
            assert list(late.engine.loras.sums) == [("policy", 1)]

    on_fleet(takers(1, 2, steps={"drain_lora": {1: failing()}}), scenario)


@pytest.mark.parametrize("target", [Target(components=("backend",)), Target(workers=(w(1), w(2)))])
def test_what_was_unloaded_from_all_workers_by_name_stays_away(tmp_path: Path, target: Target) -> None:
    """As if nobody had been named."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", folder)
        await client.unload_lora("policy", target=target)
        assert (await client.status()).loras == ()
        await asyncio.sleep(LONG_S)
        assert serving(scene) == [[], []]
        with pytest.raises(WrongStateError):
            await client.unload_lora("policy")

    on_fleet(takers(1, 2), scenario)


def test_what_was_unloaded_from_one_worker_stays_with_the_others_alone(tmp_path: Path) -> None:
    """Until it is loaded there again."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", folder)
        await client.unload_lora("policy", target=Target(workers=(w(1),)))
        await asyncio.sleep(LONG_S)
        assert serving(scene) == [[], ["policy@1"]]
        assert [m.loras_behind for m in (await client.status()).members] == [(), ()]
        await client.load_lora("policy", folder, revision=1)
        scene.fleet.workers[0].engine.loras.sums.clear()
        await asyncio.sleep(LONG_S)
        assert serving(scene) == [["policy@1"], ["policy@1"]]

    on_fleet(takers(1, 2), scenario)
