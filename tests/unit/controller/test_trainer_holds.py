"""Trainers that take each other's place: whose pauses a step ends, whose updates it gives up, and who is refused."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from rlbus.client import FleetClient
from rlbus.controller.leases import KEPT_S
from rlbus.controller.transfers import HOLD_S
from rlbus.errors import WrongStateError
from rlbus.schemas import ShutdownTransfer, StartUpdate, Target, Version, WeightsState
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.failover_stage import Stage
from tests.unit.controller.failover_stage import play as play_failover
from tests.unit.controller.scene import PAUSED, RUNNING, Scene, Steps, outcomes, play, w, worker
from tests.unit.controller.test_transfer_takeover import killing

pytestmark = pytest.mark.unit

V1, V2 = Version(step=1), Version(step=2)
CLEAN, DIRTY = WeightsState.CLEAN, WeightsState.DIRTY
BOTH_OK = {"1": "ok", "2": "ok"}
INIT = {"rank_offset": 1, "world_size": 3}
PART = {"step": 1, "names": [DEFAULT_TENSORS[0].name]}
# Worker 1 is left at the version before by the second update, and could generate on it.
BEHIND: Steps = {"receive_weights": {2: failing(after_parts=0)}}


def trainers(scene: Scene | Stage) -> tuple[FleetClient, FleetClient]:
    """Two processes on one host."""
    bus = scene.fleet.client.bus if isinstance(scene, Scene) else scene.client.bus
    namespace = scene.fleet.client.namespace if isinstance(scene, Scene) else scene.client.namespace
    return FleetClient(bus, namespace, caller="python:host:1"), FleetClient(bus, namespace, caller="python:host:2")


async def take(trainer: FleetClient, step: str, info: Any = None) -> dict[str, str]:
    """One step; outcomes by instance id, whatever they are."""
    text = None if info is None else json.dumps(info)
    return outcomes(await trainer.transfer(step, text, check=False, deadline_s=60.0))


async def goes_through(trainer: FleetClient, number: int, steps: Sequence[str] = ("start", "update", "finish")) -> None:
    """The next update of everybody; of every tensor, named, so that it heals torn ones."""
    names = {
        "names": [spec.name for spec in DEFAULT_TENSORS],
        "dtype_names": [spec.dtype for spec in DEFAULT_TENSORS],
        "shapes": [spec.shape for spec in DEFAULT_TENSORS],
    }
    infos = {"init": INIT, "update": {"step": number, **names}}
    for step in steps:
        assert await take(trainer, step, infos.get(step)) == BOTH_OK, step


def weights(scene: Scene) -> list[tuple[WeightsState, Version | None]]:
    """Of the workers, in order."""
    return [(r.agent.state.weights.state, r.agent.state.weights.version) for r in scene.fleet.workers]


async def leave_one_behind(scene: Scene) -> None:
    """Worker 1 stays at 0.1, paused for a day; worker 2 generates at 0.2."""
    await scene.update(1)
    await scene.update(2)
    assert weights(scene) == [(CLEAN, V1), (CLEAN, V2)]
    assert await scene.generations() == [PAUSED, RUNNING]


def test_a_trainer_that_died_after_its_start_is_in_nobodys_way() -> None:
    """The next process has another name: its init lets the fleet go on, and its finishes let it generate."""

    async def scenario(scene: Scene) -> None:
        first, second = trainers(scene)
        await goes_through(first, 1, ("init", "start"))
        await goes_through(second, 1, ("init",))
        assert await scene.generations() == [RUNNING] * 2
        for number in (1, 2):
            await goes_through(second, number)
            assert await scene.generations() == [RUNNING] * 2
            assert weights(scene) == [(CLEAN, Version(step=number))] * 2
            await asyncio.sleep(HOLD_S - 60.0)
        assert await take(second, "start") == BOTH_OK
        await asyncio.sleep(HOLD_S - 60.0)  # the lease of the one that died ends in this time
        await goes_through(second, 3, ("update", "finish"))

    play([worker(1), worker(2)], scenario)


def test_a_start_takes_over_whom_a_trainer_before_has_paused() -> None:
    """Also without an init that lets them go, which a controller that has just taken over knows nothing of."""

    async def scenario(stage: Stage) -> None:
        first, second = trainers(stage)
        await goes_through(first, 1, ("init", "start"))
        stage.kill(stage.processes[0])
        await goes_through(second, 1)
        assert await stage.generations() == [RUNNING] * 2
        with pytest.raises(WrongStateError, match="python:host:2"):
            await first.transfer("start")

    play_failover([worker(1), worker(2)], scenario)


def test_a_shutdown_frees_whom_a_trainer_before_has_paused() -> None:
    """It ends what is there, whoever began it."""

    async def scenario(scene: Scene) -> None:
        first, second = trainers(scene)
        await goes_through(first, 1, ("init", "start", "update"))
        assert await take(second, "shutdown") == BOTH_OK
        assert {state for state, _ in weights(scene)} == {DIRTY}
        assert await scene.generations() == [PAUSED] * 2
        await goes_through(first, 1, ("init", "start", "update", "finish", "start"))
        assert await take(second, "shutdown") == BOTH_OK
        assert await scene.generations() == [RUNNING] * 2
        with pytest.raises(WrongStateError, match="start one first"):
            await first.transfer("update", json.dumps({"step": 2}))

    play([worker(1), worker(2)], scenario)


def test_a_successor_of_the_same_name_is_not_refused_either() -> None:
    """As over HTTP, where a trainer is called after its host."""

    async def scenario(scene: Scene) -> None:
        first, _ = trainers(scene)
        await goes_through(first, 1, ("init", "start", "init"))
        assert await scene.generations() == [RUNNING] * 2
        await goes_through(first, 1)

    play([worker(1), worker(2)], scenario)


def test_an_open_update_of_whom_a_person_holds_is_given_up_too() -> None:
    """No lease of a trainer's ends that one; the hold stays."""

    async def scenario(scene: Scene) -> None:
        first, second = trainers(scene)
        await scene.fleet.client.pause(Target(workers=(w(1),)))
        await goes_through(first, 1, ("init", "start"))
        await goes_through(second, 1, ("init",))
        assert await scene.generations() == [PAUSED, RUNNING]
        await goes_through(second, 1)
        assert await scene.generations() == [PAUSED, RUNNING]

    play([worker(1), worker(2)], scenario)


@pytest.mark.parametrize("came", ["start", "init"])
def test_a_trainer_whose_place_another_took_is_refused_and_nothing_is_mixed(came: str) -> None:
    """It lives, and somebody started another by mistake: what it sends must not get into that one's update."""

    async def scenario(scene: Scene) -> None:
        first, second = trainers(scene)
        await goes_through(first, 1, ("init", "start"))
        assert await take(first, "update", PART) == BOTH_OK
        with pytest.raises(WrongStateError, match="python:host:1 has formed the group"):
            await second.transfer("start")
        await goes_through(second, 2, ("init", "start") if came == "start" else ("init",))
        assert {state for state, _ in weights(scene)} == {DIRTY}
        for step, info in (("start", None), ("update", json.dumps(PART)), ("finish", None)):
            with pytest.raises(WrongStateError, match=r"python:host:2 has formed the group.*init_weight_transfer"):
                await first.transfer(step, info)
        await goes_through(second, 2)
        assert weights(scene) == [(CLEAN, V1)] * 2
        assert await scene.generations() == [RUNNING] * 2
        await goes_through(first, 3, ("init", "start", "update", "finish"))

    play([worker(1), worker(2)], scenario)


def test_a_new_leader_refuses_a_trainer_for_whom_nobody_stands_still() -> None:
    """It knows of no init; the workers say for whom they wait."""

    async def scenario(stage: Stage) -> None:
        first, second = trainers(stage)
        await goes_through(first, 1, ("init", "start"))
        await goes_through(second, 1, ("init", "start"))
        stage.kill(stage.processes[0])
        with pytest.raises(WrongStateError, match="stands still for python:host:2-pause"):
            await first.transfer("update", json.dumps(PART))
        await goes_through(second, 1, ("update", "finish"))

    play_failover([worker(1), worker(2)], scenario)


def test_a_leader_that_dies_in_an_init_leaves_nobody_paused_for_the_trainer_before() -> None:
    """What was given up has nobody who would let it go."""

    async def scenario(stage: Stage) -> None:
        first, second = trainers(stage)
        await goes_through(first, 1, ("init", "start"))
        stage.on_command = killing(stage, ShutdownTransfer)
        await take(second, "init", INIT)
        assert await stage.generations() == [RUNNING] * 2
        await goes_through(second, 1, ("init", "start", "update", "finish"))

    play_failover([worker(1), worker(2)], scenario)


@pytest.mark.parametrize("steps", [(), ("init",), ("init", "start"), ("init", "start", "init")])
def test_whoever_is_behind_stays_paused_whatever_a_trainer_does_short_of_an_update(steps: tuple[str, ...]) -> None:
    """SCENARIOS 2: an old version doesn't generate beside the new one, nor when the trainer is gone."""

    async def scenario(scene: Scene) -> None:
        first, second = trainers(scene)
        await leave_one_behind(scene)
        await goes_through(first, 3, steps)
        if "init" in steps[-1:]:
            assert await scene.generations() == [PAUSED, RUNNING]
        assert await take(second, "shutdown") == BOTH_OK
        assert await scene.generations() == [PAUSED, RUNNING]
        await asyncio.sleep(2 * HOLD_S)
        assert await scene.generations() == [PAUSED, RUNNING]

    play([worker(1, BEHIND), worker(2)], scenario)


def test_whoever_is_behind_stays_paused_when_its_trainer_dies_or_its_start_fails() -> None:
    """The trainer's lease is shorter than what it was left with, and a start is undone to what was."""

    async def scenario(scene: Scene) -> None:
        first, _ = trainers(scene)
        await leave_one_behind(scene)
        await goes_through(first, 3, ("init",))
        assert await take(first, "start") == {"1": "undone", "2": "failed"}
        assert await scene.generations() == [PAUSED, RUNNING]
        assert await take(first, "start") == BOTH_OK
        await asyncio.sleep(HOLD_S + 60.0)
        assert await scene.generations() == [PAUSED, RUNNING]
        pause = scene.fleet.workers[0].agent.state.pause
        assert pause is not None
        assert pause.expires_at is not None
        assert pause.expires_at - pause.since >= KEPT_S

    script = {"start_native": {1: failing(), 2: Step(latency_s=25.0)}}  # as long as two renewals
    play([worker(1, BEHIND), worker(2, script)], scenario)


@pytest.mark.parametrize(("takes_s", "found"), [(1.5, "ok"), (30.0, "undone")])
def test_whoever_is_behind_stays_paused_when_a_new_leader_settles_a_start(takes_s: float, found: str) -> None:
    """Whether it goes on with it or takes it back, nobody stands still for less than he was left with."""

    async def scenario(stage: Stage) -> None:
        await stage.update(1)
        await stage.update(2)
        assert await stage.generations() == [PAUSED, RUNNING]
        first, _ = trainers(stage)
        await goes_through(first, 3, ("init",))
        stage.on_command = killing(stage, StartUpdate, after_s=1.0)
        assert (await take(first, "start"))["2"] == found
        await asyncio.sleep(2 * HOLD_S)
        assert await stage.generations() == [PAUSED, RUNNING]

    play_failover([worker(1, BEHIND), worker(2, {"start_native": {1: Step(latency_s=takes_s)}})], scenario)


def test_whoever_is_behind_generates_when_a_trainer_has_brought_it_forward() -> None:
    """It was left paused for that, and by no person."""

    async def scenario(scene: Scene) -> None:
        first, _ = trainers(scene)
        await leave_one_behind(scene)
        await goes_through(first, 3, ("init", "start", "update", "finish"))
        assert weights(scene) == [(CLEAN, Version(step=3))] * 2
        assert await scene.generations() == [RUNNING] * 2

    play([worker(1, BEHIND), worker(2)], scenario)
