"""A load that one worker fails costs the others a retry: they get back what had to go, and none of their requests."""

import asyncio
from pathlib import Path

import pytest

from rlbus.schemas import Report
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import failing
from tests.unit.controller.lora_stage import adapter, on_fleet, serving, taker
from tests.unit.controller.scene import Scene, outcomes, w

pytestmark = pytest.mark.unit

FOREIGN = "e" * 64


def message_of(report: Report, number: int) -> str:
    """What the report says of a worker that it didn't go well on."""
    why = next(o.fault for o in report.outcomes if o.worker == w(number))
    assert why is not None
    return why.message


def engines(scene: Scene) -> list[FakeEngine]:
    return [rig.engine for rig in scene.fleet.workers]


def test_a_worker_that_evicts_and_then_fails_gets_back_what_had_to_go(tmp_path: Path) -> None:
    """Within the op, as everybody whose load is taken back."""

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.load_lora("policy", adapter(tmp_path / "1", "1"))
        second = adapter(tmp_path / "2", "2")
        report = await scene.fleet.client.load_lora("policy", second, evict_idle=True, check=False)
        assert outcomes(report) == {"1": "failed", "2": "undone"}
        assert message_of(report, 1) == "scripted failure"
        assert serving(scene) == [["policy@1"], ["policy@1"]]

    on_fleet([taker(1, {"load_lora": {2: failing()}}, capacity=1), taker(2, capacity=1)], scenario)


def test_what_nobody_can_give_back_to_a_worker_that_failed_is_named(tmp_path: Path) -> None:
    """It isn't the fleet's: the report says what is lost, and what went wrong before."""

    async def scenario(scene: Scene) -> None:
        engines(scene)[0].loras.sums["policy", 1] = FOREIGN
        await asyncio.sleep(6)  # a heartbeat says so
        second = adapter(tmp_path / "2", "2")
        report = await scene.fleet.client.load_lora("policy", second, evict_idle=True, check=False)
        assert outcomes(report) == {"1": "failed", "2": "undone"}
        assert message_of(report, 1) == (
            "scripted failure; policy@1 had to go for policy@2, and nobody knows where it came from: load it again"
        )

    on_fleet([taker(1, {"load_lora": {1: failing()}}, capacity=1), taker(2, capacity=1)], scenario)


def test_a_hot_swap_that_fails_on_one_ends_no_request_of_the_others(tmp_path: Path) -> None:
    """Those in flight moved on to the new revision: it goes when they have ended, and the old one is back at once."""

    async def scenario(scene: Scene) -> None:
        client, (first, _) = scene.fleet.client, engines(scene)
        await client.load_lora("policy", adapter(tmp_path / "1", "1"))
        rollout = first.submit("long", [1, 2], num_tokens=500, model="policy@1")
        report = await client.load_lora("policy", adapter(tmp_path / "2", "2"), hot_swap=True, check=False)
        assert outcomes(report) == {"1": "undone", "2": "failed"}
        assert serving(scene) == [["policy@1"], ["policy@1"]]
        assert rollout.finish is None
        await asyncio.sleep(60)
        assert rollout.finish == "length"
        assert list(first.loras.sums) == [("policy", 1)]

    swapper = taker(2, {"load_lora": {2: failing()}}, can_hot_swap=True)
    on_fleet([taker(1, can_hot_swap=True), swapper], scenario)


def test_a_full_engine_gets_the_old_revision_back_when_the_requests_have_ended(tmp_path: Path) -> None:
    """They hold the only place: the report says so, and a catch-up gives it back."""

    async def scenario(scene: Scene) -> None:
        client, (first, _) = scene.fleet.client, engines(scene)
        await client.load_lora("policy", adapter(tmp_path / "1", "1"))
        rollout = first.submit("long", [1, 2], num_tokens=500, model="policy@1")
        report = await client.load_lora("policy", adapter(tmp_path / "2", "2"), hot_swap=True, check=False)
        assert outcomes(report) == {"1": "failed", "2": "failed"}
        assert message_of(report, 1).startswith("policy@1 had to go for policy@2, and a catch-up gives it back")
        await asyncio.sleep(200)
        assert rollout.finish == "length"
        assert serving(scene) == [["policy@1"], ["policy@1"]]

    swapper = taker(2, {"load_lora": {2: failing()}}, can_hot_swap=True)
    on_fleet([taker(1, can_hot_swap=True, capacity=1), swapper], scenario)


def test_what_drained_before_a_load_that_fails_drains_on(tmp_path: Path) -> None:
    """Loaded again while requests still held it: they were promised their time, and have it."""

    async def scenario(scene: Scene) -> None:
        client, (first, _) = scene.fleet.client, engines(scene)
        folder = adapter(tmp_path / "1", "1")
        await client.load_lora("policy", folder)
        rollout = first.submit("long", [1, 2], num_tokens=500, model="policy@1")
        await client.unload_lora("policy", drain_s=300)
        report = await client.load_lora("policy", folder, revision=1, check=False)
        assert outcomes(report) == {"1": "undone", "2": "failed"}
        assert (serving(scene), rollout.finish) == ([[], []], None)
        await asyncio.sleep(60)
        assert rollout.finish == "length"
        assert first.loras.sums == {}

    on_fleet([taker(1), taker(2, {"load_lora": {2: failing()}})], scenario)
