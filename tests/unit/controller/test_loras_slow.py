"""Engines that take seconds to list their adapters, or never do: their heartbeats tell nothing, so they are asked."""

import asyncio
import contextlib
from itertools import groupby
from pathlib import Path

import pytest

from rlbus.controller import lora_lists
from rlbus.controller.lora_catch_up import UNSAID
from rlbus.schemas import GetLoras, LoadLora, LoraBehind
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.lora_stage import adapter, on_fleet, taker, takers
from tests.unit.controller.scene import Scene, Steps, w

pytestmark = pytest.mark.unit

# The first is more than a heartbeat waits and less than who asks is given; the second more than that, too.
SLOW: Steps = {"list_loras": {0: Step(latency_s=3.0)}}
SILENT: Steps = {"list_loras": {0: Step(latency_s=1e6)}}


async def behind(scene: Scene, number: int) -> tuple[LoraBehind, ...]:
    """What status shows that this worker lacks; its heartbeats themselves tell nothing, or what was asked last."""
    return (await scene.fleet.members())[w(number)].loras_behind


def num_asked(scene: Scene, number: int) -> int:
    """How often its list was asked for."""
    found = 0
    for command, subject in scene.commands:
        whom = command.members or (subject.rpartition(".")[2],)
        found += isinstance(command.body, GetLoras) and str(number) in whom
    return found


def test_one_that_is_started_again_is_given_what_it_lacks(tmp_path: Path) -> None:
    """It is admitted, and shown as lacking from the first on, with the reason, until it has it; nobody else is given
    it, and it isn't asked again and again.
    """
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        async with taker(2, boot="one")(scene.fleet.broker):
            await client.wait_ready(num_workers=2)
            await client.load_lora("policy", folder)
        async with taker(2, SLOW, boot="two")(scene.fleet.broker) as late:
            await client.wait_ready(num_workers=2)
            scene.commands.clear()
            assert (await scene.fleet.members())[w(2)].status.loras is None
            notes: list[str] = []
            async with asyncio.timeout(60.0):
                while found := await behind(scene, 2):
                    assert [one.id for one in found] == ["policy@1"]
                    notes.append(found[0].note)
                    await asyncio.sleep(0.1)
            assert ("policy", 1) in late.engine.loras.sums
            assert [note for note, _ in groupby(notes)] == [UNSAID, "is given it next", "is given it now"]
            assert await scene.addressed(LoadLora) == ["2"]
            await asyncio.sleep(20.0)
            scene.commands.clear()
            for _ in range(100):
                await asyncio.sleep(2.0)
                assert await behind(scene, 2) == ()
            assert num_asked(scene, 2) == 0
            assert await scene.addressed(LoadLora) == []

    on_fleet(takers(1), scenario)


def test_one_that_is_there_at_a_load_is_never_shown_as_lacking(tmp_path: Path) -> None:
    """Its answers to the load said that it has it, though its heartbeats don't."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.load_lora("policy", folder)
        for _ in range(200):
            assert await behind(scene, 2) == ()
            await asyncio.sleep(0.1)

    on_fleet([taker(1), taker(2, SLOW)], scenario)


@pytest.mark.parametrize("steps", [SILENT, {"list_loras": {0: failing()}}], ids=["silent", "fails"])
def test_one_that_never_answers_is_shown_and_asked_now_and_then(tmp_path: Path, steps: Steps) -> None:
    """As one whose engine fails at once. It is given nothing, since nobody knows what it has."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", folder)
        async with taker(2, steps)(scene.fleet.broker):
            await client.wait_ready(num_workers=2)
            scene.commands.clear()
            await asyncio.sleep(150.0)
            assert await behind(scene, 2) == (LoraBehind(id="policy@1", note=UNSAID),)
            assert num_asked(scene, 2) >= 150.0 / (lora_lists.ASK_S + lora_lists.AGAIN_S + 1.0) - 1
            assert num_asked(scene, 2) <= 150.0 / lora_lists.AGAIN_S + 1
            assert await scene.addressed(LoadLora) == []

    on_fleet(takers(1), scenario)


def test_one_that_never_answers_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither who is asked with it nor who comes while it is asked, and not if such take all places, either."""
    monkeypatch.setattr(lora_lists, "MAX_AT_ONCE", 3)
    slow: Steps = {"list_loras": {0: Step(latency_s=1.5)}}
    # Two lists, the second within the load, and what passes between looks: before one that is silent has had its time.
    own_s = 8.0
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", folder)
        async with contextlib.AsyncExitStack() as stack:

            async def comes(number: int, steps: Steps) -> dict[tuple[str, int], str]:
                return (await stack.enter_async_context(taker(number, steps)(scene.fleet.broker))).engine.loras.sums

            async def is_given(sums: dict[tuple[str, int], str], limit_s: float) -> None:
                for _ in range(round(limit_s / 0.1)):
                    await asyncio.sleep(0.1)
                    if ("policy", 1) in sums:
                        return
                pytest.fail(f"it isn't given it within {limit_s:g} s")

            await comes(2, SILENT)
            beside = await comes(3, slow)
            await client.wait_ready(num_workers=3)
            await is_given(beside, own_s)
            await comes(4, SILENT)
            await client.wait_ready(num_workers=4)
            await asyncio.sleep(1.0)
            await is_given(await comes(5, slow), own_s)
            for number in range(6, 12):
                await comes(number, SILENT)
            await client.wait_ready(num_workers=11)
            await asyncio.sleep(60.0)
            # All places may be taken now, and more are due: until those in them have had their time.
            last = await comes(99, slow)
            await is_given(last, lora_lists.ASK_S + own_s)
            # Nor when its list doesn't count any more, though many who say nothing are due before it.
            await asyncio.sleep(30.0)
            del last["policy", 1]
            await is_given(last, lora_lists.KEEP_S + lora_lists.ASK_S + own_s)

    on_fleet(takers(1), scenario)
