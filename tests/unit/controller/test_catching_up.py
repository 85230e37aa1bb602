"""Catch-up from a trainer's memory, on a fleet of real agents with fake engines: SCENARIOS 8, 59, and relatives."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from rlbus._snapshots import Snapshots
from rlbus.bus import Bus
from rlbus.controller.catching_up import ASK_S
from rlbus.controller.giving_way import GIVE_WAY_S
from rlbus.errors import PartialError
from rlbus.schemas import (
    CancelOp,
    CommitWeights,
    DestroyGroup,
    Generation,
    InitGroup,
    MemberView,
    OpStatus,
    PauseGeneration,
    ReceiveWeights,
    ResumeGeneration,
    SnapshotKind,
    Target,
    Version,
    WeightsState,
)
from rlbus.testing import MemoryTransport, sequential_ids
from rlbus.trainer import Trainer
from rlbus.transfer.fake import FakePlaneScript, FakeRecording
from rlbus.workers.engines.fake_script import Step, failing
from rlbus.workers.testing import Rig
from tests.unit.controller.scene import RUNNING, Scene, outcomes, play, source, w, worker

pytestmark = pytest.mark.unit

V6, V7, V8 = Version(step=6), Version(step=7), Version(step=8)


def memory() -> Snapshots:
    """A trainer that keeps what it sent last."""
    return Snapshots(SnapshotKind.MEMORY, lambda _, specs: FakeRecording(specs))


async def until(scene: Scene, number: int, is_true: Callable[[MemberView], bool], limit_s: float = 30.0) -> MemberView:
    """Wait until the controller's view of a worker is so."""
    async with asyncio.timeout(limit_s):
        while not is_true(member := (await scene.fleet.members())[w(number)]):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.1)
    return member


async def until_admitted(scene: Scene, number: int, limit_s: float = 30.0) -> MemberView:
    """Wait until a worker is admitted."""
    return await until(scene, number, lambda member: member.admitted, limit_s)


async def until_sending(scene: Scene) -> None:
    """Wait until somebody is told to receive."""
    async with asyncio.timeout(10.0):
        while not await scene.addressed(ReceiveWeights):  # noqa: ASYNC110 - in virtual time, by its messages
            await asyncio.sleep(0.1)


@asynccontextmanager
async def reborn(scene: Scene, number: int, boot: str = "again", **how: object) -> AsyncIterator[Rig]:
    """SIGKILL a worker, and start it again under the same id."""
    scene.cut(number)
    await asyncio.sleep(0.2)
    scene.commands.clear()
    async with worker(number, boot=boot, **how)(scene.fleet.broker) as rig:  # type: ignore[arg-type]
        await asyncio.sleep(0.2)
        yield rig


async def pausing(scene: Scene) -> list[str]:
    """Whom anything was sent to that pauses, loads, or changes a group."""
    touched: set[str] = set()
    for body in (PauseGeneration, ReceiveWeights, InitGroup, DestroyGroup, ResumeGeneration, CommitWeights):
        touched.update(await scene.addressed(body))
    return sorted(touched)


def test_a_restarted_worker_is_caught_up_and_nobody_else_is_touched() -> None:
    """SCENARIOS 8: it is admitted at the fleet's version without another update; the others get no command at all."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        async with reborn(scene, 2) as again:
            member = (await scene.fleet.members())[w(2)]
            assert not member.admitted
            began_s = asyncio.get_running_loop().time()
            member = await until_admitted(scene, 2)
            assert asyncio.get_running_loop().time() - began_s < 3.0
            assert member.status.weights.version == V7
            assert member.status.generation is RUNNING
            assert set(again.engine.held.values()) == {V7}
            assert await pausing(scene) == ["2"]
            assert (await scene.fleet.client.status()).version == V7
            # The next update has everybody in its group again.
            report = await scene.update(8)
            assert (report.status, outcomes(report)) == (OpStatus.OK, {"1": "ok", "2": "ok", "3": "ok"})

    play([worker(1), worker(2), worker(3)], scenario, snapshots=memory())


def test_several_that_are_back_are_caught_up_together() -> None:
    """One group, one transfer."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        async with reborn(scene, 2), reborn(scene, 3):
            await until_admitted(scene, 2)
            await until_admitted(scene, 3)
            assert await pausing(scene) == ["2", "3"]
            assert [c for c in scene.plane.calls if c.startswith("join")] == ["join 1", "join 2"]

    play([worker(1), worker(2), worker(3)], scenario, snapshots=memory())


def test_a_new_worker_is_caught_up() -> None:
    """One that was never there before counts as much as one that is back."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        scene.commands.clear()
        async with worker(2)(scene.fleet.broker):
            await asyncio.sleep(0.1)
            await until_admitted(scene, 2)
            assert await pausing(scene) == ["2"]

    play([worker(1)], scenario, snapshots=memory())


def test_a_fleet_without_a_version_has_nothing_to_catch_up_to() -> None:
    """Nobody has updated anything: what a worker was started with is the fleet's weights."""

    async def scenario(scene: Scene) -> None:
        async with reborn(scene, 2):
            await asyncio.sleep(20.0)
            assert await pausing(scene) == []

    play([worker(1), worker(2)], scenario, snapshots=memory())


def test_without_a_snapshot_a_worker_that_is_back_waits_unadmitted_for_the_next_update() -> None:
    """A healthy heartbeat never admits it; status says what it waits for."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        async with reborn(scene, 2):
            await asyncio.sleep(30.0)
            member = (await scene.fleet.members())[w(2)]
            assert not member.admitted
            assert member.reason is not None
            assert "waits for the next update: the trainer keeps no snapshot of this version" in member.reason
            assert await pausing(scene) == []
            await scene.update(8)
            assert (await scene.fleet.members())[w(2)].admitted

    play([worker(1), worker(2)], scenario)


def test_a_torn_worker_is_healed_and_generates_again() -> None:
    """Its update failed after the first byte; the others have the new version, and it gets it from the snapshot."""

    async def scenario(scene: Scene) -> None:
        report = await scene.update(7)
        assert outcomes(report) == {"1": "ok", "2": "failed"}
        assert (await scene.fleet.members())[w(2)].status.weights.state is WeightsState.DIRTY
        scene.commands.clear()
        member = await until_admitted(scene, 2)
        assert (member.status.weights.version, member.status.generation) == (V7, RUNNING)
        assert await pausing(scene) == ["2"]

    play([worker(1), worker(2, {"finish_update": {1: failing()}})], scenario, snapshots=memory())


def test_a_worker_that_an_update_left_paused_at_the_old_version_is_caught_up_and_resumed() -> None:
    """Its pause, kept by the update for up to a day, is taken over."""

    async def scenario(scene: Scene) -> None:
        await scene.update(6)
        report = await scene.update(7)
        assert outcomes(report) == {"1": "ok", "2": "failed"}
        member = (await scene.fleet.members())[w(2)]
        assert (member.status.weights.version, member.status.generation) == (V6, Generation.PAUSED)
        scene.commands.clear()
        member = await until_admitted(scene, 2)
        assert (member.status.weights.version, member.status.generation, member.status.pause) == (V7, RUNNING, None)
        assert await pausing(scene) == ["2"]

    untouched = failing(after_parts=0)
    play([worker(1), worker(2, {"receive_weights": {2: untouched}})], scenario, snapshots=memory())


def test_a_worker_left_paused_is_never_let_go_at_the_old_version() -> None:
    """The first catch-up fails before its first byte: others have the new version, so it stays paused for the next."""

    async def scenario(scene: Scene) -> None:
        await scene.update(6)
        assert outcomes(await scene.update(7)) == {"1": "ok", "2": "failed"}
        seen: set[tuple[Generation, Version | None]] = set()
        async with asyncio.timeout(20.0):
            while not (member := (await scene.fleet.members())[w(2)]).admitted:
                seen.add((member.status.generation, member.status.weights.version))
                await asyncio.sleep(0.01)
        assert (Generation.PAUSED, V6) in seen
        assert (RUNNING, V6) not in seen

    untouched = failing(after_parts=0)
    play([worker(1), worker(2, {"receive_weights": {2: untouched, 3: untouched}})], scenario, snapshots=memory())


def test_a_worker_that_a_person_holds_is_caught_up_and_stays_paused() -> None:
    """Weights are the controller's, the pause is that person's."""

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.pause(target_of(2))
        await scene.update(7)
        await until(scene, 2, lambda member: member.status.weights.version == V7)
        await asyncio.sleep(5.0)
        member = (await scene.fleet.members())[w(2)]
        assert member.status.generation is Generation.PAUSED
        assert member.status.pause is not None
        assert (member.status.pause.owner, member.admitted) == ("test", False)
        await scene.fleet.client.resume(target_of(2))
        assert (await scene.fleet.members())[w(2)].admitted

    play([worker(1), worker(2, {"finish_update": {1: failing()}})], scenario, snapshots=memory())


def test_an_update_takes_the_place_of_a_catch_up_of_its_own_trainer() -> None:
    """The catch-up is taken back and the update is done on everybody, without a word of busy."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        scene.plane.script.send_s = 20.0
        async with reborn(scene, 2):
            await until_sending(scene)
            scene.plane.script.send_s = 0.0
            taken_back: list[str] = []
            scene.spy("dyn.test.controller.cancel", CancelOp, lambda c, _: taken_back.append(c.of_op_id))
            began_s = asyncio.get_running_loop().time()
            report = await scene.update(8)
            assert [op_id.endswith("-catch-up") for op_id in taken_back] == [True]
            assert asyncio.get_running_loop().time() - began_s < 5.0
            assert outcomes(report) == {"1": "ok", "2": "ok"}
            assert (await until_admitted(scene, 2)).status.weights.version == V8

    play([worker(1), worker(2)], scenario, snapshots=memory())


def test_an_update_of_another_trainer_takes_the_place_of_a_catch_up() -> None:
    """The controller stops the catch-up and begins the update when it has ended; it is never refused as busy."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        scene.plane.script.send_s = 20.0
        async with reborn(scene, 2):
            await until_sending(scene)
            other = Trainer(Bus(scene.fleet.broker.connect(), new_id=sequential_ids("o")), "test", scene.relaunch("o"))
            began_s = asyncio.get_running_loop().time()
            report = await other.update_weights(source(), version=8)
            assert asyncio.get_running_loop().time() - began_s < 5.0
            assert outcomes(report.report) == {"1": "ok", "2": "ok"}
            history = (await scene.fleet.members())[w(2)]
            assert history.admitted

    play([worker(1), worker(2)], scenario, snapshots=memory())


def test_a_pause_of_a_person_takes_the_place_of_a_catch_up_that_does_not_end() -> None:
    """A worker that answers nothing any more holds it up for GIVE_WAY_S, no longer."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        scene.plane.script.send_s = 20.0
        async with reborn(scene, 2) as again:
            await until_sending(scene)
            transport = again.worker_bus.transport
            assert isinstance(transport, MemoryTransport)
            scene.fleet.broker.partition(transport)
            began_s = asyncio.get_running_loop().time()
            report = await scene.fleet.client.pause(target_of(1))
            assert asyncio.get_running_loop().time() - began_s < GIVE_WAY_S + 2.0
            assert outcomes(report) == {"1": "ok"}

    play([worker(1), worker(2)], scenario, snapshots=memory())


def test_a_catch_up_that_fails_is_tried_again_later_and_later() -> None:
    """Back-off per worker, and the reason in status; what failed is not admitted meanwhile."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        async with reborn(scene, 2, steps={"receive_weights": {n: failing("no room") for n in (1, 2, 3)}}) as again:
            why = "catching it up failed 2 times (no room); tried again in "
            member = await until(scene, 2, lambda member: why in (member.reason or ""))
            assert not member.admitted
            assert (await until_admitted(scene, 2)).status.weights.version == V7
            assert list(again.engine.calls).count("receive_weights") == 4

    play([worker(1), worker(2)], scenario, snapshots=memory())


def test_one_that_can_not_be_caught_up_holds_up_nobody_else() -> None:
    """After a failure they are tried one by one."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        bad = {"join_group": {0: failing("no way in")}}
        async with reborn(scene, 2, steps=bad), reborn(scene, 3):
            await until_admitted(scene, 3, 10.0)
            assert not (await scene.fleet.members())[w(2)].admitted

    play([worker(1), worker(2), worker(3)], scenario, snapshots=memory())


def test_a_trainer_that_is_gone_is_named_as_the_reason() -> None:
    """Nothing happens to the worker, and the next update of whoever comes next takes it in."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        await scene.fleet.trainer.aclose()
        async with reborn(scene, 2):
            await asyncio.sleep(2 * ASK_S + 3.0)
            member = (await scene.fleet.members())[w(2)]
            assert not member.admitted
            assert member.reason is not None
            assert "the trainer that keeps version 0.7" in member.reason
            assert await pausing(scene) == []

    play([worker(1), worker(2)], scenario, snapshots=memory())


def test_wrong_sums_are_never_admitted() -> None:
    """What the trainer sends again isn't what it sent before: not even a worker that received just that takes it."""

    async def scenario(scene: Scene) -> None:
        await scene.update(7)
        scene.plane.script.wrong_sum_of = "embed.weight"
        # Both ends agree on the wrong sum, so that only what the fleet has can tell.
        steps = {"receive_weights": {0: Step(wrong_sum_of="embed.weight")}}
        async with reborn(scene, 2, steps=steps) as again:
            await asyncio.sleep(20.0)
            assert "receive_weights" in again.engine.calls
            assert "finish_update" not in again.engine.calls
            member = (await scene.fleet.members())[w(2)]
            assert (member.admitted, member.status.weights.state) == (False, WeightsState.DIRTY)

    play([worker(1), worker(2)], scenario, snapshots=memory())


def test_the_snapshot_of_a_failed_update_does_not_replace_that_of_the_fleet() -> None:
    """Everybody's update failed: the torn ones are healed with the version that the fleet has."""

    async def scenario(scene: Scene) -> None:
        await scene.update(6)
        with pytest.raises(PartialError):
            await scene.fleet.trainer.update_weights(source(), version=7)
        assert (await until_admitted(scene, 1)).status.weights.version == V6
        assert (await until_admitted(scene, 2)).status.weights.version == V6

    steps = {"finish_update": {2: failing()}}
    play([worker(1, steps), worker(2, steps)], scenario, FakePlaneScript(), snapshots=memory())


def target_of(number: int) -> Target:
    """One worker."""
    return Target(workers=(w(number),))
