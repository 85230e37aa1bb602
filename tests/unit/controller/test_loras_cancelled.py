"""A load of an adapter that is taken back while a worker is still at it, and how long its end may take."""

import asyncio
from pathlib import Path

import pytest

from rlbus import subjects
from rlbus.schemas import ControllerEvent, Generation, OpEnded
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller.lora_stage import adapter, on_fleet, serving, taker
from tests.unit.controller.scene import Scene

pytestmark = pytest.mark.unit

RUNNING = Generation.RUNNING


def test_a_load_that_is_cancelled_is_ended_where_it_still_runs(tmp_path: Path) -> None:
    """Worker 1 would need 100 s: nobody waits for it, and it never comes."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        ended_s: list[float] = []

        def hear(event: ControllerEvent, _: object) -> None:
            if isinstance(event, OpEnded):
                ended_s.append(loop.time())

        scene.spy(subjects.controller_events("test"), ControllerEvent, hear)
        loading = loop.create_task(scene.fleet.client.load_lora("policy", folder, deadline_s=600.0))
        await asyncio.sleep(5.0)
        cancelled_s = loop.time()
        loading.cancel()
        await asyncio.wait({loading})
        await asyncio.sleep(5.0)
        assert [s - cancelled_s < 2.0 for s in ended_s] == [True]
        assert await scene.generations() == [RUNNING, RUNNING]
        await asyncio.sleep(150.0)
        assert serving(scene) == [[], []]
        assert (await scene.fleet.client.status()).loras == ()

    on_fleet([taker(1, {"load_lora": {1: Step(latency_s=100.0)}}), taker(2)], scenario)
