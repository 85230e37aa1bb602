"""Updates that another trainer drives, on a whole fleet: rank offsets, one failure that ends it for all, leases."""

import asyncio
import json
from typing import Any

import pytest

from rlbus.controller.limits import ENDING_S
from rlbus.controller.registry import Member
from rlbus.controller.testing import announcement
from rlbus.controller.transfers import HOLD_S, bodies_of
from rlbus.errors import PartialError, RefusedError, VersionRegressionError, WrongStateError
from rlbus.schemas import (
    ApplyUpdate,
    Fault,
    FaultCode,
    InitTransfer,
    PauseMode,
    Target,
    TransferFleet,
    TransferStep,
    Version,
    WeightsState,
    WorkerId,
)
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.scene import PAUSED, RUNNING, Scene, outcomes, play, w, worker

pytestmark = pytest.mark.unit

V1, V2 = Version(step=1), Version(step=2)
INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3}


def member(name: str, world_size: int) -> Member:
    """Somebody in the registry."""
    said = announcement(name, world_size=world_size)
    return Member(
        worker=WorkerId(name),
        boot_id="boot",
        seq=1,
        descriptor=said.descriptor,
        status=said.status,
        interval_s=5.0,
        heard_at_s=0.0,
    )


def spread(step: TransferStep, info: Any, *sizes: int) -> Any:
    """What workers of these sizes are told."""
    members = [member(f"backend/{n}", size) for n, size in enumerate(sizes, start=1)]
    bodies = bodies_of(TransferFleet(op_id="o", step=step, info=json.dumps(info)), members)
    if isinstance(bodies, Fault):
        return bodies.code
    found = []
    for body in bodies.values():
        assert isinstance(body, InitTransfer | ApplyUpdate)
        found.append(json.loads(body.info))
    return found


async def take(scene: Scene, step: str, info: Any = None, **options: Any) -> dict[str, str]:
    """One step; outcomes by instance id, whatever they are."""
    text = None if info is None else json.dumps(info)
    return outcomes(await scene.fleet.client.transfer(step, text, check=False, **options))


async def states(scene: Scene) -> list[tuple[WeightsState, Version | None]]:
    """Of the workers' weights, in order."""
    return [(r.agent.state.weights.state, r.agent.state.weights.version) for r in scene.fleet.workers]


def test_rank_offsets_come_from_real_world_sizes() -> None:
    """SCENARIOS 17: no gap and no overlap, whatever the trainer would have guessed."""
    infos = spread(TransferStep.INIT, {"rank_offset": 1, "world_size": 9, "port": 5}, 1, 2, 4, 1)
    assert [i["rank_offset"] for i in infos] == [1, 2, 4, 8]
    assert all((i["world_size"], i["port"]) == (9, 5) for i in infos)
    assert [i["rank_offset"] for i in spread(TransferStep.INIT, {"rank_offset": 2}, 3, 1)] == [2, 5]
    assert spread(TransferStep.INIT, {"packed": True}, 2, 2) == [{"packed": True}, {"packed": True}]


@pytest.mark.parametrize(
    ("info", "code"),
    [
        ({"rank_offset": 1, "world_size": 3}, FaultCode.WRONG_STATE),
        ({"rank_offset": "1"}, FaultCode.BAD_MESSAGE),
        ({"rank_offset": True}, FaultCode.BAD_MESSAGE),
        ({"rank_offset": -1}, FaultCode.BAD_MESSAGE),
        ([{"rank_offset": 1}], FaultCode.BAD_MESSAGE),
        ("text", FaultCode.BAD_MESSAGE),
        ([], FaultCode.BAD_MESSAGE),
    ],
)
def test_an_init_that_could_not_come_together_is_refused(info: Any, code: FaultCode) -> None:
    """A world size that doesn't add up would be waited for for ever."""
    assert spread(TransferStep.INIT, info, 1, 2) is code


def test_a_list_is_split_by_ranks() -> None:
    """One entry per rank of the fleet, or one for all."""
    items = [{"n": n} for n in range(4)]
    assert spread(TransferStep.UPDATE, items, 1, 2, 1) == [items[:1], items[1:3], items[3:]]
    assert spread(TransferStep.UPDATE, {"n": 1}, 1, 2) == [{"n": 1}, {"n": 1}]
    assert spread(TransferStep.UPDATE, items, 1, 2) is FaultCode.BAD_MESSAGE


def test_another_trainers_update_goes_through_on_everybody() -> None:
    """Init, start, updates in parts, finish: paused in between, at the fleet's next version and running then."""

    async def scenario(scene: Scene) -> None:
        assert await take(scene, "init", INIT | {"world_size": 4}) == {"1": "ok", "2": "ok"}
        told = [r.engine.native_info for r in scene.fleet.workers]
        assert [i["rank_offset"] for i in told if i is not None] == [1, 2]
        for number in (1, 2):
            assert await take(scene, "start") == {"1": "ok", "2": "ok"}
            assert await scene.generations() == [PAUSED] * 2
            for spec in DEFAULT_TENSORS:
                assert await take(scene, "update", {"names": [spec.name], "step": number}) == {"1": "ok", "2": "ok"}
            assert {s for s, _ in await states(scene)} == {WeightsState.UPDATING}
            assert await take(scene, "finish") == {"1": "ok", "2": "ok"}
            assert await states(scene) == [(WeightsState.CLEAN, Version(step=number))] * 2
            assert await scene.generations() == [RUNNING] * 2
        members = await scene.fleet.members()
        assert all(m.admitted for m in members.values())
        assert (await scene.fleet.client.status()).version == V2
        assert await take(scene, "shutdown") == {"1": "ok", "2": "ok"}

    play([worker(1), worker(2, world_size=2)], scenario)


def test_an_update_that_all_refuse_leaves_the_group_as_it_is() -> None:
    """Nothing was begun, so nothing has to be formed again."""

    async def scenario(scene: Scene) -> None:
        await take(scene, "init", INIT)
        with pytest.raises(WrongStateError, match="start one first"):
            await scene.fleet.client.transfer("update", json.dumps({"step": 1}))
        assert all(r.engine.native_info is not None for r in scene.fleet.workers)
        for step, info in (("start", None), ("update", {"step": 1}), ("finish", None)):
            assert await take(scene, step, info) == {"1": "ok", "2": "ok"}, step

    play([worker(1), worker(2)], scenario)


def test_an_update_without_init_is_the_engines_to_refuse() -> None:
    """A controller that has just taken over doesn't know of the group, which the engines are in all the same."""

    async def scenario(scene: Scene) -> None:
        assert await take(scene, "start") == {"1": "ok"}
        assert await take(scene, "update", {"step": 1}) == {"1": "failed"}
        assert (await states(scene))[0][0] is WeightsState.CLEAN

    play([worker(1)], scenario)


def test_an_init_that_fails_on_one_ends_on_all_at_once() -> None:
    """SCENARIOS 46: named at once, and the others don't wait for the rest of their time-out."""

    async def scenario(scene: Scene) -> None:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(PartialError, match="backend/2") as caught:
            await scene.fleet.client.transfer("init", json.dumps(INIT | {"world_size": 4}))
        assert asyncio.get_running_loop().time() - began_s < 5.0
        assert outcomes(caught.value.report) == {"1": "undone", "2": "failed", "3": "undone"}
        assert [r.engine.native_info for r in scene.fleet.workers] == [None] * 3
        assert await scene.generations() == [RUNNING] * 3

    slow = {"init_native": {1: Step(latency_s=500.0)}}
    play([worker(1), worker(2, {"init_native": {1: failing()}}), worker(3, slow)], scenario)


def test_an_update_that_fails_on_one_ends_on_all_and_nobody_generates() -> None:
    """SCENARIOS 6: the others would wait in the collective; who has received is torn, and the next update heals."""

    async def scenario(scene: Scene) -> None:
        await take(scene, "init", INIT)
        await take(scene, "start")
        began_s = asyncio.get_running_loop().time()
        found = await take(scene, "update", {"step": 1})
        assert asyncio.get_running_loop().time() - began_s < 40.0
        assert found == {"1": "failed", "2": "failed"}
        assert {s for s, _ in await states(scene)} == {WeightsState.DIRTY}
        assert await scene.generations() == [PAUSED] * 2
        assert await take(scene, "finish") == {"1": "refused", "2": "refused"}
        report = await scene.update(1)
        assert outcomes(report) == {"1": "ok", "2": "ok"}
        assert await scene.generations() == [RUNNING] * 2

    slow = {"update_native": {1: Step(hangs=True, after_parts=1)}}
    play([worker(1, {"update_native": {1: failing(after_parts=1)}}), worker(2, slow)], scenario)


def test_a_start_that_fails_on_one_is_undone_on_all() -> None:
    """Nobody stays paused, and nobody has it open."""

    async def scenario(scene: Scene) -> None:
        await take(scene, "init", INIT)
        assert await take(scene, "start") == {"1": "undone", "2": "failed"}
        assert await scene.generations() == [RUNNING] * 2
        assert [r.agent.state.session for r in scene.fleet.workers] == [None, None]
        assert await take(scene, "start") == {"1": "ok", "2": "ok"}

    play([worker(1), worker(2, {"start_native": {1: failing()}})], scenario)


def test_a_fleet_that_has_changed_since_init_is_not_started() -> None:
    """SCENARIOS 59: in both directions; a new init forms the group with whoever is there."""

    async def scenario(scene: Scene) -> None:
        await take(scene, "init", INIT)
        scene.fleet.workers[1].agent.stop()
        await asyncio.sleep(1)
        with pytest.raises(WrongStateError, match="backend/2"):
            await scene.fleet.client.transfer("start")
        assert await scene.generations() == [RUNNING] * 2
        assert await take(scene, "init", INIT | {"world_size": 2}) == {"1": "ok"}
        assert await take(scene, "start") == {"1": "ok"}

    play([worker(1), worker(2)], scenario)


def test_a_trainer_that_dies_leaves_nobody_paused() -> None:
    """Before the first byte engines go on by themselves; the next trainer starts anew."""

    async def scenario(scene: Scene) -> None:
        await take(scene, "init", INIT)
        await take(scene, "start")
        await asyncio.sleep(HOLD_S + 30.0)
        assert await scene.generations() == [RUNNING] * 2
        assert await take(scene, "init", INIT) == {"1": "ok", "2": "ok"}
        assert await take(scene, "start") == {"1": "ok", "2": "ok"}
        await asyncio.sleep(HOLD_S - 60.0)
        assert await take(scene, "update", {"step": 1}) == {"1": "ok", "2": "ok"}
        await asyncio.sleep(HOLD_S - 60.0)  # each step holds it anew
        assert await take(scene, "finish") == {"1": "ok", "2": "ok"}

    play([worker(1), worker(2)], scenario)


def test_a_transfer_that_takes_longer_than_the_lease_is_still_its_trainers() -> None:
    """Its op lives, so the fleet stands still for it: nobody's lease ends in the middle of what comes."""

    async def scenario(scene: Scene) -> None:
        await take(scene, "init", INIT)
        await take(scene, "start")
        assert await take(scene, "update", {"step": 1}, deadline_s=1800.0) == {"1": "ok", "2": "ok"}
        assert await take(scene, "finish") == {"1": "ok", "2": "ok"}
        assert await states(scene) == [(WeightsState.CLEAN, V1)] * 2

    slow = {"update_native": {1: Step(latency_s=HOLD_S + 60.0)}}
    play([worker(1, slow), worker(2)], scenario)


def test_a_pause_that_takes_longer_than_the_lease_keeps_the_others_paused() -> None:
    """A wait for long answers on one worker is no reason for another to go on."""

    async def scenario(scene: Scene) -> None:
        await take(scene, "init", INIT)
        assert await take(scene, "start", deadline_s=1800.0) == {"1": "ok", "2": "ok"}
        assert await scene.generations() == [PAUSED] * 2
        assert await take(scene, "update", {"step": 1}) == {"1": "ok", "2": "ok"}

    play([worker(1, {"pause": {1: Step(latency_s=HOLD_S + 60.0)}}), worker(2)], scenario)


def test_taking_back_a_step_takes_no_longer_because_its_deadline_is_far() -> None:
    """An engine that hangs when it is told to leave holds the report up for the budget of an end, and no more."""

    async def scenario(scene: Scene) -> None:
        await take(scene, "init", INIT)
        await take(scene, "start")
        began_s = asyncio.get_running_loop().time()
        assert await take(scene, "update", {"step": 1}, deadline_s=600.0) == {"1": "failed", "2": "failed"}
        assert asyncio.get_running_loop().time() - began_s < ENDING_S + 20.0

    script = {"update_native": {1: failing(after_parts=1)}, "shutdown_native": {1: Step(hangs=True)}}
    play([worker(1, script), worker(2, {"update_native": {1: Step(latency_s=500.0)}})], scenario)


def test_undoing_a_start_takes_no_longer_because_its_deadline_is_far() -> None:
    """As for an update: an abort that hangs on one worker doesn't keep the others for the rest of the deadline."""

    async def scenario(scene: Scene) -> None:
        await take(scene, "init", INIT | {"world_size": 4})
        began_s = asyncio.get_running_loop().time()
        found = await take(scene, "start", deadline_s=600.0)
        assert asyncio.get_running_loop().time() - began_s < ENDING_S + 20.0
        assert found["2"] == "failed"
        assert (await scene.generations())[2] is RUNNING

    stuck = {"abort_update": {1: Step(hangs=True, clings_s=300.0)}}
    play([worker(1, stuck), worker(2, {"start_native": {1: failing()}}), worker(3)], scenario)


def test_who_is_held_by_somebody_stays_so() -> None:
    """A person's hold outlives the update."""

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.pause(Target(workers=(w(1),)))
        await take(scene, "init", INIT)
        for step, info in (("start", None), ("update", {"step": 1}), ("finish", None)):
            assert await take(scene, step, info) == {"1": "ok", "2": "ok"}, step
        assert await scene.generations() == [PAUSED, RUNNING]

    play([worker(1), worker(2)], scenario)


def test_a_version_that_is_not_newer_is_refused_before_anything_is_finished() -> None:
    """SCENARIOS 12: and the update can still be finished under a better one."""

    async def scenario(scene: Scene) -> None:
        await scene.update(5)
        await take(scene, "init", INIT)
        await take(scene, "start")
        await take(scene, "update", {"step": 6})
        with pytest.raises(VersionRegressionError):
            await scene.fleet.client.transfer("finish", version=Version(step=5))
        assert await take(scene, "finish", version=Version(step=9)) == {"1": "ok", "2": "ok"}
        assert (await scene.fleet.client.status()).version == Version(step=9)

    play([worker(1), worker(2)], scenario)


def test_shutdown_gives_up_what_is_open_and_frees_whoever_is_whole() -> None:
    """Torn ones stay paused."""

    async def scenario(scene: Scene) -> None:
        await take(scene, "init", INIT)
        await take(scene, "start", pause_mode=PauseMode.ABORT)
        assert await take(scene, "shutdown") == {"1": "ok", "2": "ok"}
        assert await scene.generations() == [RUNNING] * 2
        await take(scene, "init", INIT)
        await take(scene, "start")
        await take(scene, "update", {"step": 1, "names": [DEFAULT_TENSORS[0].name]})
        assert await take(scene, "shutdown") == {"1": "ok", "2": "ok"}
        assert await scene.generations() == [PAUSED] * 2
        assert {s for s, _ in await states(scene)} == {WeightsState.DIRTY}

    play([worker(1), worker(2)], scenario)


def test_a_cancelled_update_leaves_the_collective() -> None:
    """The caller hears at once; nobody waits on."""

    async def scenario(scene: Scene) -> None:
        await take(scene, "init", INIT)
        await take(scene, "start")
        running = asyncio.ensure_future(take(scene, "update", {"step": 1}))
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(30)
        assert (await scene.fleet.client.status()).op_id is None
        assert [r.agent.state.running for r in scene.fleet.workers] == [None] * 2

    hung = {"update_native": {1: Step(hangs=True)}}
    play([worker(1, hung), worker(2, hung)], scenario)


def test_an_update_that_its_trainer_takes_back_leaves_nobody_whole_paused() -> None:
    """Whoever had a byte of it is torn and stays so; the others don't stand still for a trainer that is gone."""

    async def scenario(scene: Scene) -> None:
        await take(scene, "init", INIT)
        await take(scene, "start")
        running = asyncio.ensure_future(take(scene, "update", {"step": 1}))
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.wait({running})
        await asyncio.sleep(30)
        assert [state for state, _ in await states(scene)] == [WeightsState.CLEAN, WeightsState.DIRTY]
        assert await scene.generations() == [RUNNING, PAUSED]

    untouched = {"update_native": {1: Step(hangs=True, after_parts=0, claims_touched=False)}}
    play([worker(1, untouched), worker(2, {"update_native": {1: Step(hangs=True, after_parts=1)}})], scenario)


def test_an_engine_without_it_is_named_and_nothing_is_begun() -> None:
    """As any route."""

    async def scenario(scene: Scene) -> None:
        with pytest.raises(RefusedError, match="init_weight_transfer_engine"):
            await scene.fleet.client.transfer("init", json.dumps(INIT))

    play([worker(1), worker(2, routes=frozenset({"pause_generation", "resume_generation"}))], scenario)
