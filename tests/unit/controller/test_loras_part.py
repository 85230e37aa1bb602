"""Loads for a part of the fleet: what has to go for them there stays the others'."""

import asyncio
from pathlib import Path

import pytest

from rlbus.connecting import open_objects
from rlbus.schemas import LoadLora, Target
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller import failover_stage
from tests.unit.controller.lora_stage import adapter, on_fleet, serving, taker
from tests.unit.controller.scene import Scene, w

pytestmark = pytest.mark.unit

FIRST, BOTH = Target(workers=(w(1),)), Target(workers=(w(1), w(2)))


@pytest.mark.parametrize("of", [Target(), BOTH])
def test_what_goes_for_a_load_on_one_worker_stays_the_others(tmp_path: Path, of: Target) -> None:
    """Its object, too, from which they are given it again; the one that has no room for it isn't asked again."""
    one, two = adapter(tmp_path / "1", "one"), adapter(tmp_path / "2", "two")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        first = await client.load_lora("policy", one, target=of)
        second = await client.load_lora("policy", two, target=FIRST, evict_idle=True)
        assert second.lora is not None
        assert second.lora.evicted == ("policy@1",)
        assert serving(scene) == [["policy@2"], ["policy@1"]]
        assert [x.revision for x in (await client.status()).loras] == [1, 2]
        assert first.lora is not None
        assert first.lora.checksum is not None
        assert await open_objects(client.bus, "test").look(first.lora.checksum) is not None
        scene.commands.clear()
        scene.fleet.workers[1].engine.loras.sums.clear()
        await asyncio.sleep(60.0)
        assert serving(scene) == [["policy@2"], ["policy@1"]]
        assert await scene.addressed(LoadLora) == ["2"]
        assert [m.loras_behind for m in (await client.status()).members] == [(), ()]
        await client.load_lora("policy", two, revision=2, target=Target(workers=(w(2),)), evict_idle=True)
        assert await open_objects(client.bus, "test").look(first.lora.checksum) is None or of == Target()

    on_fleet([taker(1, capacity=1), taker(2, capacity=1)], scenario)


def test_a_load_on_one_worker_that_the_next_controller_finishes_leaves_the_others_theirs(tmp_path: Path) -> None:
    """What went for it is no more given to that one."""
    one, two = adapter(tmp_path / "1", "one"), adapter(tmp_path / "2", "two")

    async def scenario(stage: failover_stage.Stage) -> None:
        await stage.client.load_lora("policy", one)

        def look(command: object) -> None:
            if isinstance(getattr(command, "body", None), LoadLora) and not stage.processes[0].is_killed:
                asyncio.get_running_loop().call_later(0.5, stage.kill, stage.processes[0])

        stage.on_command = look
        report = await stage.client.load_lora("policy", two, target=FIRST, evict_idle=True)
        assert report.lora is not None
        assert (report.lora.ids, report.lora.evicted) == (("policy@2",), ("policy@1",))
        await asyncio.sleep(60.0)
        view = await stage.client.status()
        assert [x.revision for x in view.loras] == [1, 2]
        assert [m.loras_behind for m in view.members] == [(), ()]
        served = [sorted(r for _, r in rig.engine.loras.sums) for rig in stage.workers]
        assert served == [[2], [1]]

    failover_stage.play([taker(n, {"load_lora": {2: Step(latency_s=5.0)}}, capacity=1) for n in (1, 2)], scenario)
