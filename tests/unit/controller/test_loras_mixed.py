"""Adapters in a fleet in which some engines take none."""

from pathlib import Path

import pytest

from rlbus.errors import RefusedError
from rlbus.schemas import Generation, Target
from rlbus.workers.engines.fake import ROUTES
from tests.unit.controller.lora_stage import adapter, listed, on_fleet, taker
from tests.unit.controller.scene import Scene, w, worker

pytestmark = pytest.mark.unit


def test_in_a_fleet_where_some_take_no_adapters_who_can_is_addressed_and_listed(tmp_path: Path) -> None:
    """A load for all is refused with nobody touched; a list is of those that take any, and of nobody else."""
    folder = adapter(tmp_path / "a")
    plain = ROUTES - {"load_lora", "unload_lora", "list_loras"}

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        with pytest.raises(RefusedError, match=r"backend/2 \(fake\) doesn't serve load_lora; .*: backend/1"):
            await client.load_lora("policy", folder)
        assert await scene.generations() == [Generation.RUNNING] * 2
        await client.load_lora("policy", folder, target=Target(workers=(w(1),)))
        assert listed(await client.loras()) == {"1": ["policy@1"]}
        with pytest.raises(RefusedError, match="doesn't serve list_loras"):
            await client.loras(Target(workers=(w(2),)))

    on_fleet([taker(1), worker(2, routes=plain)], scenario)
