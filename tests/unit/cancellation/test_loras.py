"""A load of an adapter that is cancelled at any turn of the loop: all have it or nobody, and everybody generates."""

import asyncio
from pathlib import Path

import pytest

from rlbus.schemas import Generation, OpStatus
from rlbus.workers.engines.fake_script import Step
from tests.unit.cancellation.steps import World, cancelled_at, turns
from tests.unit.controller.lora_stage import adapter, taker

pytestmark = pytest.mark.unit

# What a verb promises of its own end, and the controller of the op's, in seconds.
ENDS_S = 5.01
OP_ENDS_S = 40.0
LATE_S = 1.0


def serving(world: World) -> list[list[str]]:
    return [sorted(f"{n}@{r}" for n, r in rig.engine.loras.sums) for rig in world.fleet.workers]


def test_a_load_that_is_cancelled_leaves_it_on_all_or_on_nobody(tmp_path: Path) -> None:
    """Worker 2 takes its time; what the controller says that the fleet has is what the engines have."""
    folder = adapter(tmp_path / "a")
    seen: set[int] = set()

    async def round_of(world: World, turn: int) -> bool:
        client = world.fleet.client
        end = await cancelled_at(turn, client.load_lora("policy", folder))
        assert end.took_s <= ENDS_S, f"turn {turn}"
        await world.until_idle(OP_ENDS_S)
        now = serving(world)
        assert now in ([[], []], [["policy@1"], ["policy@1"]]), f"turn {turn}: {now}"
        seen.add(len(now[0]))
        fleet = [f"{x.name}@{x.revision}" for x in (await client.status()).loras]
        assert fleet == now[0], f"turn {turn}"
        assert [g for _, _, g in await world.states()] == [Generation.RUNNING] * 2, f"turn {turn}"
        report = await client.load_lora("policy", folder)
        assert report.status is OpStatus.OK, f"turn {turn}"
        return end.was_asked

    slow = {"load_lora": {1: Step(latency_s=LATE_S)}}
    assert turns(lambda: [taker(1), taker(2, slow)], round_of, step=11, is_new=True) > 3
    assert seen == {0, 1}


def test_an_unload_that_is_cancelled_is_finished_by_the_next_one(tmp_path: Path) -> None:
    """It only goes forward."""
    folder = adapter(tmp_path / "a")

    async def round_of(world: World, turn: int) -> bool:
        client = world.fleet.client
        await client.load_lora("policy", folder, revision=1)
        end = await cancelled_at(turn, client.unload_lora("policy", revision=1))
        assert end.took_s <= ENDS_S, f"turn {turn}"
        await world.until_idle(OP_ENDS_S)
        await asyncio.sleep(LATE_S)  # what a worker was sent goes on; until it has ended it is busy
        report = await client.unload_lora("policy", revision=1)
        assert report.status is OpStatus.OK, f"turn {turn}"
        assert serving(world) == [[], []], f"turn {turn}"
        assert (await client.status()).loras == ()
        return end.was_asked

    slow = {"unload_lora": {1: Step(latency_s=LATE_S)}}
    assert turns(lambda: [taker(1), taker(2, slow)], round_of, step=7, is_new=True) > 3
