"""A load of an adapter that is taken back while a worker is still at it, and how long its end may take."""

import asyncio
from pathlib import Path

import pytest

from rlbus import subjects
from rlbus._objects_memory import MemoryObjects
from rlbus.controller.limits import ENDING_S, ENDING_STEP_S, OVERRUN_S
from rlbus.errors import DeadlineError
from rlbus.fanout import OVERTIME_S
from rlbus.schemas import ControllerEvent, Generation, OpEnded
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.lora_stage import adapter, on_fleet, serving, taker, takers
from tests.unit.controller.scene import Scene, outcomes

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


def test_what_had_to_go_is_given_back_later_when_the_end_has_no_time_left(tmp_path: Path) -> None:
    """Worker 1 hangs in the unload: nobody stays paused for a load that isn't needed before the catch-up."""
    one, two = adapter(tmp_path / "1", "1"), adapter(tmp_path / "2", "2")
    hangs = Step(hangs=True)
    # The second unload is the one that takes the load back; the first evicts.
    steps = [{"unload_lora": {2: hangs, 3: hangs}}, {}, {"load_lora": {2: failing()}}]

    async def scenario(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        client = scene.fleet.client
        await client.load_lora("policy", one)
        began_s = loop.time()
        report = await client.load_lora("policy", two, evict_idle=True, deadline_s=600.0, check=False)
        took_s = loop.time() - began_s
        assert ENDING_S <= took_s < ENDING_S + 2 * (ENDING_STEP_S + OVERTIME_S) < OVERRUN_S
        assert outcomes(report) == {"1": "unknown", "2": "failed", "3": "failed"}
        why = next(o.fault for o in report.outcomes if o.worker == "backend/2")
        assert why is not None
        assert why.message == "policy@1 had to go for policy@2, and there was no time to give it back: a catch-up does"
        assert await scene.generations() == [RUNNING] * 3
        assert serving(scene)[1] == []
        await asyncio.sleep(60.0)
        assert serving(scene) == [["policy@1"]] * 3

    on_fleet([taker(n + 1, s, capacity=1) for n, s in enumerate(steps)], scenario)


def test_a_store_that_doesn_t_answer_holds_the_end_of_an_op_for_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many objects there are to delete; they end by themselves."""
    folders = [adapter(tmp_path / str(n), str(n)) for n in (1, 2, 3)]

    async def hang(self: MemoryObjects, name: str) -> None:
        await asyncio.sleep(10.0)
        raise DeadlineError("deleting", 10.0)

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        for folder in folders:
            await client.load_lora("policy", folder)
        monkeypatch.setattr(MemoryObjects, "delete", hang)
        began_s = asyncio.get_running_loop().time()
        report = await client.unload_lora("policy")
        assert ENDING_STEP_S <= asyncio.get_running_loop().time() - began_s < ENDING_STEP_S + 1.0
        assert report.lora is not None
        assert len(report.lora.ids) == 3

    on_fleet(takers(1), scenario)
