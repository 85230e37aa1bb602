"""Adapters that are there already, under the fleet's names and not by it: never served as the fleet's in silence."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from rlbus.adapter import adapter_sum
from rlbus.controller import lora_catch_up
from rlbus.errors import RefusedError
from rlbus.schemas import FaultCode, LoadLora, Target
from tests.unit.controller.lora_stage import adapter, on_fleet, serving, taker, takers
from tests.unit.controller.scene import Scene, w

pytestmark = pytest.mark.unit

FOREIGN = "e" * 64


@pytest.mark.parametrize("tells_files", [False, True])
def test_a_load_is_never_done_by_an_adapter_of_an_earlier_run(tmp_path: Path, tells_files: bool) -> None:
    """Refused before anything changes, naming the worker and what to do; once it is unloaded the load goes through."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client, loras = scene.fleet.client, scene.fleet.workers[1].engine.loras
        loras.sums["policy", 7], loras.tells_files = FOREIGN, tells_files
        with pytest.raises(RefusedError, match=r"backend/2 has policy@7 with .*: unload it there, or take") as caught:
            await client.load_lora("policy", folder, revision=7)
        assert caught.value.code is FaultCode.REVISION_TAKEN
        assert serving(scene) == [[], ["policy@7"]]
        await client.unload_lora("policy", revision=7)
        await client.load_lora("policy", folder, revision=7)
        assert [rig.engine.loras.sums["policy", 7] for rig in scene.fleet.workers] == [adapter_sum(folder).checksum] * 2

    on_fleet(takers(1, 2), scenario)


@pytest.mark.parametrize("tells_files", [False, True])
def test_a_worker_that_comes_with_other_bytes_under_the_fleets_name_is_behind(
    tmp_path: Path, tells_files: bool
) -> None:
    """Named with the reason and what to do; an unload there is enough, and it is given the fleet's."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", folder)
        async with taker(3)(scene.fleet.broker) as late:
            late.engine.loras.sums["policy", 1], late.engine.loras.tells_files = FOREIGN, tells_files
            await client.wait_ready(num_workers=3)
            await asyncio.sleep(20.0)
            (behind,) = (await scene.fleet.members())[w(3)].loras_behind
            assert behind.id == "policy@1"
            assert behind.note.endswith("aren't known to be the fleet's: unload it there")
            await client.unload_lora("policy", revision=1, target=Target(workers=(w(3),)))
            await asyncio.sleep(90.0)
            assert late.engine.loras.sums["policy", 1] == adapter_sum(folder).checksum
            assert (await scene.fleet.members())[w(3)].loras_behind == ()

    on_fleet(takers(1, 2), scenario)


def test_a_worker_that_comes_with_the_fleets_bytes_is_given_nothing(tmp_path: Path) -> None:
    """Its agent was started again beside its engine, which says from which folder it loaded them."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.load_lora("policy", folder)
        scene.commands.clear()
        async with taker(3)(scene.fleet.broker) as late:
            late.engine.loras.sums["policy", 1] = adapter_sum(folder).checksum
            await scene.fleet.client.wait_ready(num_workers=3)
            await asyncio.sleep(20.0)
            assert (await scene.fleet.members())[w(3)].loras_behind == ()
            assert await scene.addressed(LoadLora) == []

    on_fleet(takers(1, 2), scenario)


def test_workers_that_can_t_be_given_it_keep_nobody_else_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many have other bytes under its name: they take no place among those that are given it at once."""
    monkeypatch.setattr(lora_catch_up, "MAX_AT_ONCE", 2)
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.load_lora("policy", folder)
        async with contextlib.AsyncExitStack() as stack:
            for number in (2, 3):
                foreign = await stack.enter_async_context(taker(number)(scene.fleet.broker))
                foreign.engine.loras.sums["policy", 1] = FOREIGN
            await scene.fleet.client.wait_ready(num_workers=3)
            await asyncio.sleep(10.0)
            late = await stack.enter_async_context(taker(4)(scene.fleet.broker))
            await scene.fleet.client.wait_ready(num_workers=4)
            await asyncio.sleep(10.0)
            assert sorted(late.engine.loras.sums) == [("policy", 1)]
            behind = {worker: [b.id for b in m.loras_behind] for worker, m in (await scene.fleet.members()).items()}
            assert behind == {w(1): [], w(2): ["policy@1"], w(3): ["policy@1"], w(4): []}

    on_fleet(takers(1), scenario)
