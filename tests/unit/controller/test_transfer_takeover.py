"""Leaders that die in a step of another trainer's update: nobody stays paused for it, and nobody serves a part."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.controller.takeover import PHASE
from rlbus.schemas import (
    ApplyUpdate,
    Command,
    FinishUpdate,
    InitTransfer,
    PauseGeneration,
    ResumeGeneration,
    ShutdownTransfer,
    StartUpdate,
    Target,
    Version,
    WeightsState,
)
from rlbus.testing import LoopClock, MemoryTransport, sequential_ids
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.failover_stage import Stage, play
from tests.unit.controller.scene import PAUSED, RUNNING, outcomes, w, worker

pytestmark = pytest.mark.unit

INIT = {"rank_offset": 1, "world_size": 3}
V1, V5 = Version(step=1), Version(step=5)
CLEAN, DIRTY, UPDATING = WeightsState.CLEAN, WeightsState.DIRTY, WeightsState.UPDATING
BOTH_OK = {"1": "ok", "2": "ok"}
# Every tensor, named: less doesn't heal torn weights.
NAMES = {
    "names": [spec.name for spec in DEFAULT_TENSORS],
    "dtype_names": [spec.dtype for spec in DEFAULT_TENSORS],
    "shapes": [spec.shape for spec in DEFAULT_TENSORS],
}
PART = {"step": 1, "names": [DEFAULT_TENSORS[0].name]}


async def take(stage: Stage, step: str, info: Any = None, **options: Any) -> dict[str, str]:
    """One step; outcomes by instance id, whatever they are."""
    text = None if info is None else json.dumps(info)
    return outcomes(await stage.client.transfer(step, text, check=False, deadline_s=60.0, **options))


async def begin(stage: Stage, *parts: Any) -> None:
    """An update that has received these parts."""
    assert await take(stage, "init", INIT) == BOTH_OK
    assert await take(stage, "start") == BOTH_OK
    for part in parts:
        assert await take(stage, "update", part) == BOTH_OK


async def goes_through(stage: Stage, number: int) -> None:
    """The next update of everybody, from its init on."""
    for step, info in (("init", INIT), ("start", None), ("update", {"step": number, **NAMES}), ("finish", None)):
        assert await take(stage, step, info) == BOTH_OK, step
    assert {state for state, _ in stage.weights()} == {CLEAN}
    assert await stage.generations() == [RUNNING] * 2


def out_of_reach(stage: Stage) -> None:
    """What is sent to worker 2 now doesn't reach it; the next leader does."""
    transport = stage.workers[1].worker_bus.transport
    assert isinstance(transport, MemoryTransport)
    stage.broker.partition(transport)
    asyncio.get_running_loop().call_later(2.0, stage.broker.heal, transport)


def killing(stage: Stage, body: type[Any], after_s: float = 0.0) -> Callable[[Command], None]:
    """The leader dies so long after it sent this command; 0: before anything else leaves it."""

    def look(command: Command) -> None:
        if isinstance(command.body, body) and not stage.processes[0].is_killed:
            asyncio.get_running_loop().call_later(after_s, stage.kill, stage.processes[0])
            stage.on_command = lambda _: None

    return look


def test_a_finish_whose_leader_dies_before_the_resume_lets_everybody_generate() -> None:
    """They are clean at the new version, which is the fleet's then; a hold of somebody else stays."""

    async def scenario(stage: Stage) -> None:
        await stage.client.pause(Target(workers=(w(2),)))
        await begin(stage, {"step": 1})
        stage.on_command = killing(stage, FinishUpdate)
        report = await stage.client.transfer("finish", check=False, deadline_s=60.0)
        assert outcomes(report) == BOTH_OK
        assert {o.phase for o in report.outcomes} == {PHASE}
        assert stage.weights() == [(CLEAN, V1)] * 2
        assert await stage.generations() == [RUNNING, PAUSED]
        assert (await stage.client.status()).version == V1
        await stage.client.resume()
        assert await take(stage, "finish") == {"1": "refused", "2": "refused"}
        assert await take(stage, "start") == BOTH_OK

    play([worker(1), worker(2)], scenario)


def test_a_finish_that_had_not_reached_everybody_is_completed_at_the_same_version() -> None:
    """Everything was sent by then; the version is the one that the old leader wrote down, whatever is seen since."""

    async def scenario(stage: Stage) -> None:
        await stage.update(5)
        await begin(stage, {"step": 6})
        out_of_reach(stage)
        stage.on_command = killing(stage, FinishUpdate)
        assert await take(stage, "finish") == BOTH_OK
        assert stage.weights() == [(CLEAN, Version(step=6))] * 2
        assert await stage.generations() == [RUNNING] * 2
        assert (await stage.client.status()).version == Version(step=6)

    play([worker(1), worker(2)], scenario)


def test_whoever_a_finish_tore_stays_paused_and_the_others_generate() -> None:
    """Under the next leader as under the one before; the next update heals."""

    async def scenario(stage: Stage) -> None:
        await begin(stage, {"step": 1})
        stage.on_command = killing(stage, FinishUpdate)
        assert await take(stage, "finish") == {"1": "ok", "2": "failed"}
        assert stage.weights()[0] == (CLEAN, V1)
        assert stage.weights()[1][0] is DIRTY
        assert await stage.generations() == [RUNNING, PAUSED]
        assert (await stage.client.status()).version == V1
        await goes_through(stage, 2)

    play([worker(1), worker(2, {"finish_native": {1: failing(after_parts=1)}})], scenario)


@pytest.mark.parametrize("body", [PauseGeneration, StartUpdate])
def test_a_start_whose_leader_dies_half_way_leaves_nobody_paused(body: type[Any]) -> None:
    """Nothing was sent yet; the next start works."""

    async def scenario(stage: Stage) -> None:
        assert await take(stage, "init", INIT) == BOTH_OK
        stage.on_command = killing(stage, body, 1.0)
        assert await take(stage, "start") == {"1": "undone", "2": "undone"}
        assert await stage.generations() == [RUNNING] * 2
        assert [rig.agent.state.session for rig in stage.workers] == [None] * 2
        await goes_through(stage, 1)

    slow = {"pause": {1: Step(latency_s=5.0)}, "start_native": {1: Step(latency_s=8.0)}}
    play([worker(1), worker(2, slow if body is PauseGeneration else {"start_native": slow["start_native"]})], scenario)


@pytest.mark.parametrize(("step", "body"), [("init", InitTransfer), ("start", StartUpdate), ("update", ApplyUpdate)])
def test_a_step_that_everybody_has_taken_is_done_whoever_leads(step: str, body: type[Any]) -> None:
    """The leader died before it heard so; the trainer goes on with its next step."""

    async def scenario(stage: Stage) -> None:
        for name, info in (("init", INIT), ("start", None), ("update", {"step": 1}), ("finish", None)):
            if name == step:
                stage.on_command = killing(stage, body)
            assert await take(stage, name, info) == BOTH_OK, name
        assert stage.processes[0].is_killed
        assert stage.weights() == [(CLEAN, V1)] * 2
        assert await stage.generations() == [RUNNING] * 2

    play([worker(1), worker(2)], scenario)


def test_an_update_that_did_not_reach_everybody_can_not_be_finished() -> None:
    """Who missed a part of it would serve a mixture as clean; what came is torn, and the next update heals."""

    async def scenario(stage: Stage) -> None:
        await stage.update(5)
        await begin(stage, PART)
        out_of_reach(stage)
        stage.on_command = killing(stage, ApplyUpdate)
        assert await take(stage, "update", {"step": 6}) == {"1": "failed", "2": "failed"}
        assert await take(stage, "finish") == {"1": "refused", "2": "refused"}
        assert stage.weights() == [(DIRTY, None)] * 2
        assert await stage.generations() == [PAUSED] * 2
        await goes_through(stage, 7)

    play([worker(1), worker(2)], scenario)


def test_an_update_of_which_nothing_had_come_leaves_nobody_paused() -> None:
    """A worker that failed before its first byte, and one that hadn't heard of it, go on as they were."""

    async def scenario(stage: Stage) -> None:
        await stage.update(5)
        await begin(stage)
        out_of_reach(stage)
        stage.on_command = killing(stage, ApplyUpdate)
        assert await take(stage, "update", {"step": 6}) == {"1": "undone", "2": "undone"}
        assert stage.weights() == [(CLEAN, V5)] * 2
        assert await stage.generations() == [RUNNING] * 2
        await goes_through(stage, 7)

    play([worker(1, {"update_native": {1: failing(after_parts=0)}}), worker(2)], scenario)


def test_a_transfer_whose_trainer_is_gone_too_is_given_up() -> None:
    """Nobody asks for it again, so nobody sends: the collective is left, and the next trainer can begin."""

    async def scenario(stage: Stage) -> None:
        await begin(stage)
        transport = stage.broker.connect("trainer")
        async with Bus(transport, clock=LoopClock(), new_id=sequential_ids("other")) as bus:
            other = FleetClient(bus, "test", caller="test")
            update = asyncio.ensure_future(other.transfer("update", json.dumps({"step": 1}), deadline_s=600.0))
            await asyncio.sleep(1.0)
            stage.broker.partition(transport)
            stage.kill(stage.processes[0])
            await asyncio.sleep(40.0)
            assert {state for state, _ in stage.weights()} == {DIRTY}
            assert await stage.generations() == [PAUSED] * 2
            await goes_through(stage, 2)
            update.cancel()
            await asyncio.wait({update})

    hung = {"update_native": {1: Step(hangs=True, after_parts=1)}}
    play([worker(1, hung), worker(2, hung)], scenario)


def test_an_init_that_still_waits_for_its_trainer_is_left_by_all() -> None:
    """One failed, so the others wait in vain: at once, and the next init works."""

    async def scenario(stage: Stage) -> None:
        stage.on_command = killing(stage, InitTransfer)
        began_s = asyncio.get_running_loop().time()
        assert await take(stage, "init", INIT) == {"1": "undone", "2": "undone"}
        assert asyncio.get_running_loop().time() - began_s < 15.0
        assert await stage.generations() == [RUNNING] * 2
        await goes_through(stage, 1)

    slow = {"init_native": {1: Step(latency_s=500.0)}}
    play([worker(1, {"init_native": {1: failing()}}), worker(2, slow)], scenario)


@pytest.mark.parametrize("body", [ShutdownTransfer, ResumeGeneration])
def test_a_shutdown_is_completed(body: type[Any]) -> None:
    """Everybody leaves, and whoever is whole generates."""

    async def scenario(stage: Stage) -> None:
        await begin(stage)
        stage.on_command = killing(stage, body)
        assert await take(stage, "shutdown") == BOTH_OK
        assert [rig.engine.native_info for rig in stage.workers] == [None] * 2
        assert await stage.generations() == [RUNNING] * 2
        await goes_through(stage, 1)

    play([worker(1), worker(2)], scenario)
