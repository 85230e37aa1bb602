"""The bus's store after a load that was refused: nobody would fetch what was put for it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlbus._objects_memory import MemoryObjects
from rlbus.adapter import AdapterError, adapter_sum
from rlbus.connecting import open_objects
from rlbus.errors import BusyError, NoWorkerError, RefusedError
from rlbus.schemas import (
    FaultCode,
    FleetLora,
    FleetView,
    LoadLora,
    LoadLoraFleet,
    ObjectSource,
    PauseGeneration,
    Target,
)
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller.lora_stage import adapter, on_fleet, serving, taker, takers
from tests.unit.controller.scene import Scene, w

pytestmark = pytest.mark.unit


async def is_kept(scene: Scene, folder: Path) -> bool:
    """Whether the object of this adapter is in the store."""
    return await open_objects(scene.fleet.client.bus, "test").look(adapter_sum(folder).checksum) is not None


def test_a_refused_load_leaves_nothing_in_the_store(tmp_path: Path) -> None:
    """For what another try can't change: a number that is taken, its checksum. One that is right puts it again."""
    one, two = adapter(tmp_path / "1", "one"), adapter(tmp_path / "2", "two")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", one)
        with pytest.raises(RefusedError, match="stands for other bytes"):
            await client.load_lora("policy", two, revision=1)
        assert not await is_kept(scene, two)
        with pytest.raises(AdapterError, match="its checksum is"):
            await client.load_lora("policy", two, checksum="0" * 64)
        assert not await is_kept(scene, two)
        assert await is_kept(scene, one)
        await client.load_lora("policy", two)
        assert serving(scene) == [["policy@1", "policy@2"]]

    on_fleet(takers(1), scenario)


def test_a_refused_load_takes_nothing_that_the_fleet_comes_from(tmp_path: Path) -> None:
    """The same bytes under a number that stands for others: workers that come later are still given them."""
    one, two = adapter(tmp_path / "1", "one"), adapter(tmp_path / "2", "two")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", one)
        await client.load_lora("policy", two)
        with pytest.raises(RefusedError, match="stands for other bytes"):
            await client.load_lora("policy", one, revision=2)
        assert await is_kept(scene, one)

    on_fleet(takers(1), scenario)


def test_a_load_that_is_refused_for_another_takes_nothing_that_it_may_need(tmp_path: Path) -> None:
    """Two that publish the same bytes at once."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        started = asyncio.Event()
        scene.at(LoadLora, started.set)
        loading = asyncio.ensure_future(client.load_lora("policy", folder))
        await started.wait()
        with pytest.raises(BusyError):
            await client.load_lora("judge", folder)
        assert await is_kept(scene, folder)
        await loading

    on_fleet([taker(1, {"load_lora": {1: Step(latency_s=5.0)}})], scenario)


def test_a_load_that_may_do_next_time_takes_nothing_that_another_caller_is_about_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused since an op runs, which ends then, or since a worker isn't there yet: whoever has put the same bytes
    meanwhile, and hasn't asked yet, is seen by nobody.
    """
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        paused = asyncio.Event()
        scene.at(PauseGeneration, paused.set)
        pausing = asyncio.ensure_future(client.pause())
        await paused.wait()
        status = client.status

        async def status_when_it_has_ended(**options: Any) -> FleetView:
            await pausing
            return await status(**options)

        monkeypatch.setattr(client, "status", status_when_it_has_ended)
        with pytest.raises(BusyError):
            await client.load_lora("policy", folder)
        assert await is_kept(scene, folder)
        await pausing
        with pytest.raises(NoWorkerError):
            await client.load_lora("policy", folder, Target(workers=(w(9),)))
        assert await is_kept(scene, folder)

    on_fleet([taker(1, {"pause": {1: Step(latency_s=2.0)}})], scenario)


def of_everything() -> ObjectSource:
    """An object whose key is a wildcard."""
    return ObjectSource(bucket="test", key="*", sha256="0" * 64, num_bytes=1)


def test_a_load_of_an_object_whose_key_is_no_checksum_is_refused(tmp_path: Path) -> None:
    """What is unloaded is deleted by its key: a wildcard would mean every object of the fleet."""

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", adapter(tmp_path / "a"))
        request = LoadLoraFleet(op_id="l", name="judge", source=of_everything(), checksum="0" * 64)
        with pytest.raises(RefusedError, match="checksum") as caught:
            await client._run(request, None, check=True)
        assert caught.value.code is FaultCode.BAD_MESSAGE
        assert await scene.addressed(LoadLora) == ["1"]
        assert await is_kept(scene, tmp_path / "a")

    on_fleet(takers(1), scenario)


def test_an_adapter_that_was_kept_under_a_wildcard_deletes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller before this one took any key."""
    deleted: list[str] = []

    async def delete(_: MemoryObjects, name: str) -> None:
        deleted.append(name)

    async def scenario(scene: Scene) -> None:
        old = FleetLora(name="old", revision=1, checksum="0" * 64, source=of_everything(), since=1.0, op_id="o")
        scene.fleet.controller._loras._loras.book.add(old)
        await scene.fleet.client.unload_lora("old")
        assert deleted == []

    monkeypatch.setattr(MemoryObjects, "delete", delete)
    on_fleet(takers(1), scenario)
