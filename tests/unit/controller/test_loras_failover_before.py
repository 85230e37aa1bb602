"""Ops about adapters whose controller dies: what members had before them stays, and so do the requests on it."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlbus.adapter import adapter_sum
from rlbus.schemas import LoadLora, Target, UnloadLora
from rlbus.testing import MemoryKv
from rlbus.workers.engines.fake_script import failing
from tests.unit.controller.failover_stage import Stage, play
from tests.unit.controller.lora_stage import adapter, taker, takers
from tests.unit.controller.scene import outcomes, w
from tests.unit.controller.test_loras_failover import killing, serving, settled

pytestmark = pytest.mark.unit

THIRD = Target(workers=(w(3),))


def forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals are those of a controller that wrote nothing down of what members had."""

    def cut(key: str, value: bytes) -> bytes:
        if not key.startswith("op."):
            return value
        entry = json.loads(value)
        entry.pop("freeing", None)
        for before in entry.get("before", ()):
            before.pop("has_lora", None)
        return json.dumps(entry).encode()

    create, update = MemoryKv.create, MemoryKv.update

    async def create_less(self: MemoryKv, key: str, value: bytes, **options: Any) -> int:
        return await create(self, key, cut(key, value), **options)

    async def update_less(self: MemoryKv, key: str, value: bytes, revision: int, **options: Any) -> int:
        return await update(self, key, cut(key, value), revision, **options)

    monkeypatch.setattr(MemoryKv, "create", create_less)
    monkeypatch.setattr(MemoryKv, "update", update_less)


def test_requests_that_a_hot_swap_has_moved_outlive_its_controller(tmp_path: Path) -> None:
    """It is taken back, since another engine fails it; they end by themselves, and the old revision comes back."""
    one, two = adapter(tmp_path / "1", "1"), adapter(tmp_path / "2", "2")

    async def scenario(stage: Stage) -> None:
        await stage.client.load_lora("policy", one)
        request = stage.workers[0].engine.submit("long", [1, 2], num_tokens=1500, model="policy@1")
        stage.on_command = killing(stage, LoadLora, 1.0)
        report = await stage.client.load_lora("policy", two, hot_swap=True, check=False)
        await settled(stage)
        assert outcomes(report) == {"1": "undone", "2": "undone"}
        await asyncio.sleep(300.0)
        assert request.finish == "length"
        assert serving(stage) == [["policy@1"]] * 2

    broken = {"load_lora": {2: replace(failing(), latency_s=3.0)}}
    play([taker(1, can_hot_swap=True), taker(2, broken, can_hot_swap=True)], scenario)


def test_requests_of_an_adapter_that_was_on_its_way_out_outlive_a_load_whose_controller_dies(tmp_path: Path) -> None:
    """The load took it back to the living on one worker, and another fails it."""
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        await stage.client.load_lora("policy", folder)
        request = stage.workers[0].engine.submit("long", [1, 2], num_tokens=900, model="policy@1")
        await stage.client.unload_lora("policy", drain_s=300.0)
        stage.on_command = killing(stage, LoadLora, 1.0)
        report = await stage.client.load_lora("policy", folder, revision=1, check=False)
        await settled(stage)
        assert outcomes(report) == {"1": "undone", "2": "undone"}
        await asyncio.sleep(300.0)
        assert request.finish == "length"
        assert serving(stage) == [[], []]

    play([taker(1), taker(2, {"load_lora": {2: replace(failing(), latency_s=3.0)}})], scenario)


@pytest.mark.parametrize(("is_written_down", "left"), [(True, ["policy@1"]), (False, [])])
def test_a_load_that_is_taken_back_leaves_what_a_worker_is_written_down_to_have_had_of_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_written_down: bool, left: list[str]
) -> None:
    """Its agent was started beside an engine that had it: the load did nothing there, so there is nothing to undo. The
    entry of a controller of before doesn't say who had it: it goes everywhere, and requests end by themselves.
    """
    if not is_written_down:
        forgetting(monkeypatch)
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        engine = stage.workers[1].engine
        engine.loras.sums["policy", 1] = adapter_sum(folder).checksum
        await asyncio.sleep(10.0)
        request = engine.submit("long", [1, 2], num_tokens=900, model="policy@1")
        stage.on_command = killing(stage, LoadLora, 1.0)
        report = await stage.client.load_lora("policy", folder, revision=1, check=False)
        await settled(stage)
        assert outcomes(report) == {"1": "undone", "2": "undone"}
        await asyncio.sleep(300.0)
        assert request.finish == "length"
        assert serving(stage) == [[], left]

    play([taker(1, {"load_lora": {1: replace(failing(), latency_s=3.0)}}), taker(2)], scenario)


@pytest.mark.parametrize("is_written_down", [True, False])
def test_a_worker_whose_other_bytes_were_unloaded_is_given_the_fleets_also_by_the_next_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_written_down: bool
) -> None:
    """They were gone when it came: the journal says whose they were, and nobody else's may be meant without it."""
    if not is_written_down:
        forgetting(monkeypatch)
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        await stage.client.load_lora("policy", folder)
        async with taker(3)(stage.broker) as late:
            late.engine.loras.sums["policy", 1] = "e" * 64
            await stage.client.wait_ready(num_workers=3)
            await asyncio.sleep(20.0)
            stage.on_command = killing(stage, UnloadLora)
            report = await stage.client.unload_lora("policy", revision=1, target=THIRD, check=False)
            await settled(stage)
            assert outcomes(report) == {"3": "ok"}
            await asyncio.sleep(90.0)
            assert late.engine.loras.sums["policy", 1] == adapter_sum(folder).checksum
            view = await stage.client.status()
            assert [x.not_on for x in view.loras] == [()]
            assert [m.loras_behind for m in view.members] == [()] * 3

    play(takers(1, 2), scenario)


def test_a_worker_that_let_the_fleets_own_go_is_not_given_it_again_by_the_next_controller(tmp_path: Path) -> None:
    """The unload was done when it came; the journal says that it took the fleet's."""
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        await stage.client.load_lora("policy", folder)
        stage.on_command = killing(stage, UnloadLora)
        report = await stage.client.unload_lora("policy", target=THIRD, check=False)
        await settled(stage)
        assert outcomes(report) == {"3": "ok"}
        await asyncio.sleep(90.0)
        assert serving(stage) == [["policy@1"], ["policy@1"], []]
        assert [x.not_on for x in (await stage.client.status()).loras] == [(w(3),)]

    play(takers(1, 2, 3), scenario)
