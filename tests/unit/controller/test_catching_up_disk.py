"""Catch-up from a folder that the trainer wrote: the controller does it without the trainer."""

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from rlbus._snapshots import Snapshots
from rlbus.controller.giving_way import GIVE_WAY_S
from rlbus.schemas import (
    Generation,
    LoadWeights,
    OpStatus,
    SnapshotKind,
    TensorSpec,
    Version,
    WeightsState,
)
from rlbus.transfer.fake import FakeRecording
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.scene import RUNNING, Scene, Worker, outcomes, play, w
from tests.unit.controller.scene import worker as plain_worker
from tests.unit.controller.test_catching_up import pausing, reborn, until, until_admitted

pytestmark = pytest.mark.unit

V6, V7, V8 = Version(step=6), Version(step=7), Version(step=8)


class FolderRecording(FakeRecording):
    """Writes what fake engines load."""

    def __init__(self, folder: Path, version: Version, specs: Sequence[TensorSpec]) -> None:
        super().__init__(specs)
        self._folder, self._version = folder, version

    def finish(self) -> None:  # type: ignore[override]
        """Write it."""
        super().finish()
        FakeEngine.save(self._folder / str(self._version), self._version)


def disk(folder: Path) -> Snapshots:
    """A trainer that writes what it sends."""
    return Snapshots(SnapshotKind.DISK, lambda version, specs: FolderRecording(folder, version, specs), folder)


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    """Workers that may load from there."""
    return AgentConfig(weight_roots=(str(tmp_path),))


def test_a_restarted_worker_is_caught_up_from_a_folder_without_a_trainer(tmp_path: Path, config: AgentConfig) -> None:
    """The trainer is gone; the others get no command at all."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        await scene.fleet.trainer.aclose()
        async with reborn(scene, 2, config=config) as again:
            member = await until_admitted(scene, 2)
            assert (member.status.weights.version, member.status.generation) == (V7, RUNNING)
            assert set(again.engine.held.values()) == {V7}
            assert await scene.addressed(LoadWeights) == ["2"]
            assert await pausing(scene) == ["2"]
            assert (await scene.fleet.client.status()).version == V7

    play([plain_worker(1), plain_worker(2), plain_worker(3)], scenario, snapshots=disk(tmp_path))


def test_a_folder_with_other_weights_under_the_same_version_is_never_admitted(
    tmp_path: Path, config: AgentConfig
) -> None:
    """Its checksums aren't those that were committed: the worker isn't even paused for it."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        FakeEngine.save(tmp_path / "0.7", V6)
        async with reborn(scene, 2, config=config) as again:
            why = "isn't what the fleet has: its checksums are others"
            member = await until(scene, 2, lambda member: why in (member.reason or ""))
            assert not member.admitted
            assert not {"load_weights", "pause"} & set(again.engine.calls)

    play([plain_worker(1), plain_worker(2)], scenario, snapshots=disk(tmp_path))


def test_a_worker_that_may_not_read_the_folder_says_so(tmp_path: Path) -> None:
    """Without a weight root nothing is loaded; the reason is in its status, and the next update has it in."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        async with reborn(scene, 2):
            why = "catching it up failed once (this worker has no weight root"
            await until(scene, 2, lambda member: why in (member.reason or ""))
            await scene.update(8)
            assert (await until_admitted(scene, 2)).status.weights.version == V8

    play([plain_worker(1), plain_worker(2)], scenario, snapshots=disk(tmp_path))


def two(config: AgentConfig, steps: dict[str, dict[int, Step]]) -> list[Worker]:
    """Two workers, of which the second is scripted."""
    return [plain_worker(1, config=config), plain_worker(2, steps, config=config)]


def test_a_torn_worker_is_healed_from_the_folder(tmp_path: Path, config: AgentConfig) -> None:
    """And generates again."""

    async def scenario(scene: Scene) -> None:
        assert outcomes(await scene.update(7)) == {"1": "ok", "2": "failed"}
        member = await until_admitted(scene, 2)
        assert (member.status.weights.version, member.status.generation) == (V7, RUNNING)

    play(two(config, {"finish_update": {1: failing()}}), scenario, snapshots=disk(tmp_path))


def test_a_worker_left_paused_is_never_let_go_at_the_old_version(tmp_path: Path, config: AgentConfig) -> None:
    """The first try fails before it loads anything: others have the new version, so it stays paused for the next."""

    async def scenario(scene: Scene) -> None:
        await scene.update(6)
        assert outcomes(await scene.update(7)) == {"1": "ok", "2": "failed"}
        seen: set[tuple[Generation, Version | None]] = set()
        async with asyncio.timeout(20.0):
            while not (member := (await scene.fleet.members())[w(2)]).admitted:
                seen.add((member.status.generation, member.status.weights.version))
                await asyncio.sleep(0.01)
        assert (RUNNING, V6) not in seen
        assert "catching it up failed" not in (member.reason or "")
        assert (member.status.weights.version, member.status.pause) == (V7, None)

    steps = {"receive_weights": {2: failing(after_parts=0)}, "load_weights": {1: failing(after_parts=0)}}
    play(two(config, steps), scenario, snapshots=disk(tmp_path))


def test_an_update_waits_for_a_short_load_and_then_has_the_worker_in(tmp_path: Path, config: AgentConfig) -> None:
    """A load can't be stopped; one that ends in time costs only that."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        async with reborn(scene, 2, config=config, steps={"load_weights": {1: Step(latency_s=3.0)}}):
            await until(scene, 2, lambda member: (member.status.op_id or "").endswith("-load"))
            began_s = asyncio.get_running_loop().time()
            assert outcomes(await scene.update(8)) == {"1": "ok", "2": "ok"}
            assert 2.0 < asyncio.get_running_loop().time() - began_s < 4.0

    play([plain_worker(1), plain_worker(2)], scenario, snapshots=disk(tmp_path))


def test_an_update_goes_on_without_a_worker_whose_load_takes_long(tmp_path: Path, config: AgentConfig) -> None:
    """It isn't refused as busy, and doesn't wait for longer than GIVE_WAY_S; the worker is caught up afterwards."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        async with reborn(scene, 2, config=config, steps={"load_weights": {1: Step(latency_s=60.0)}}):
            await until(scene, 2, lambda member: (member.status.op_id or "").endswith("-load"))
            began_s = asyncio.get_running_loop().time()
            report = await scene.update(8)
            assert asyncio.get_running_loop().time() - began_s < GIVE_WAY_S + 2.0
            assert outcomes(report) == {"1": "ok"}
            member = await until_admitted(scene, 2, 120.0)
            assert (member.status.weights.state, member.status.weights.version) == (WeightsState.CLEAN, V8)
            assert "1" not in await scene.addressed(LoadWeights)

    play([plain_worker(1), plain_worker(2)], scenario, snapshots=disk(tmp_path))


def test_a_committed_update_is_reported_though_old_snapshots_can_not_be_tidied(
    tmp_path: Path, config: AgentConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder is named in the log, the trainer knows what it sent, and the next update isn't hindered."""

    def tidy(_: Collection[Version]) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "0.1"))

    async def scenario(scene: Scene) -> None:
        assert (await scene.update(6)).status is OpStatus.OK
        assert scene.fleet.trainer.version == V6
        assert outcomes(await scene.update(7)) == {"1": "ok", "2": "ok"}

    kept = Snapshots(
        SnapshotKind.DISK, lambda version, specs: FolderRecording(tmp_path, version, specs), tmp_path, tidy
    )
    play(two(config, {}), scenario, snapshots=kept)
    assert f"old snapshots stay in {tmp_path}: [Errno 13] Permission denied" in caplog.text
