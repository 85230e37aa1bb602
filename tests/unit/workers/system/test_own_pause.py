"""The pause of an unpaused update: it holds as long as its trainer lives, and ends with the update, whatever comes in
between.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlbus.errors import refused
from rlbus.schemas import (
    ApplyUpdate,
    Fault,
    FaultCode,
    FinishUpdate,
    Generation,
    GetChecksums,
    LoadWeights,
    PauseGeneration,
    ResultStatus,
    StartUpdate,
    Version,
    WeightsState,
)
from rlbus.workers.config import AgentConfig
from rlbus.workers.disk import DISK
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step, failing
from rlbus.workers.moves import Action, Event, Released
from rlbus.workers.system.calls import TURN_S
from rlbus.workers.system.testing import Front, on_surface
from tests.unit.workers.system.test_dynamo_session import GROUP, UPDATE, WHOLE, Naming, ok, said, state

pytestmark = pytest.mark.unit

UNPAUSED = {"allow_unpaused": True, "reset_prefix_cache": False}
START = {**UNPAUSED, "engine_rpc": "start_weight_update"}
PART: dict[str, Any] = {**UNPAUSED, "engine_rpc": "update_weights", "update_info": {}}
FINISH = {**UNPAUSED, "engine_rpc": "finish_weight_update"}


async def generation(front: Front) -> Generation:
    """By the engine's own word."""
    return (await front.rig.engine.observe()).generation


def expires_in_s(front: Front) -> float | None:
    """What is left of the pause's lease; None: a hold."""
    pause = front.rig.agent.state.pause
    assert pause is not None
    return None if pause.expires_at is None else pause.expires_at - front.rig.bus.clock.now()


# --- it holds


def test_an_unpaused_update_in_many_parts_may_take_longer_than_its_lease() -> None:
    """Each part is a sign of life, and so is its finish."""

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, UPDATE, START)
        for _ in range(5):
            await ok(front, UPDATE, PART)
            await asyncio.sleep(200.0)
        await ok(front, UPDATE, FINISH)
        assert state(front)[0] is WeightsState.CLEAN
        assert await generation(front) is Generation.RUNNING

    on_surface(scenario, engine=Naming({"update_native": {0: Step(latency_s=150.0)}}))


@pytest.mark.parametrize("hangs_up", [False, True])
def test_one_part_may_take_longer_than_the_lease(hangs_up: bool) -> None:
    """Also if its client doesn't wait for it: what has begun goes on to its end."""

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, UPDATE, START)
        part = asyncio.create_task(ok(front, UPDATE, PART, x_rlbus_limit_s="3000"))
        await asyncio.sleep(1.0)
        if hangs_up:
            part.cancel()
            await asyncio.sleep(2000.0)
        else:
            await part
        await ok(front, UPDATE, FINISH)
        assert state(front)[0] is WeightsState.CLEAN

    on_surface(scenario, engine=Naming({"update_native": {0: Step(latency_s=1900.0)}}))


def test_a_whole_update_in_one_call_may_take_longer_than_the_lease() -> None:
    """It isn't torn in its middle."""

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, UPDATE, {**WHOLE, **UNPAUSED, "weight_version": 7}, x_rlbus_limit_s="3000")
        assert state(front) == (WeightsState.CLEAN, Version(step=7))
        assert await generation(front) is Generation.RUNNING

    on_surface(scenario, engine=Naming({"update_native": {0: Step(latency_s=1900.0)}}))


@pytest.mark.parametrize("who", ["http:127.0.0.1", "its successor"])
def test_a_start_takes_over_the_pause_that_an_earlier_one_left_with_a_whole_lease(who: str) -> None:
    """That of the dead trainer ends in the middle of its successor's update, else."""

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, UPDATE, START)
        await asyncio.sleep(550.0)
        headers = {} if who.startswith("http:") else {"x_rlbus_caller": who}
        await ok(front, UPDATE, START, **headers)
        pause = front.rig.agent.state.pause
        assert pause is not None
        assert pause.owner == f"http:{who.removeprefix('http:')}"
        assert expires_in_s(front) == pytest.approx(600.0, abs=1.0)
        await ok(front, UPDATE, PART, **headers)
        await asyncio.sleep(500.0)
        await ok(front, UPDATE, FINISH, **headers)
        assert state(front)[0] is WeightsState.CLEAN
        assert await generation(front) is Generation.RUNNING

    on_surface(scenario, engine=Naming())


def test_a_part_renews_the_lease_that_the_start_asked_for() -> None:
    """Whoever asked for a short one wants a dead trainer to be noticed soon, whichever of its parts came last."""

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, UPDATE, START, x_rlbus_lease_s="20")
        await asyncio.sleep(15.0)
        await ok(front, UPDATE, PART)
        assert expires_in_s(front) == pytest.approx(20.0, abs=1.0)
        await asyncio.sleep(30.0)
        assert front.rig.agent.state.session is None
        assert state(front)[0] is WeightsState.DIRTY

    on_surface(scenario, engine=Naming())


@pytest.mark.parametrize("lease_s", [None, 60.0])
def test_a_part_leaves_a_pause_that_somebody_has_taken_over_as_it_is(lease_s: float | None) -> None:
    """Neither renewed nor ended: it is an operator's."""

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, UPDATE, START)
        await front.rig.send(PauseGeneration(owner="ops@host", lease_s=lease_s))
        await asyncio.sleep(30.0)
        await ok(front, UPDATE, PART)
        await ok(front, UPDATE, FINISH)
        assert expires_in_s(front) == (None if lease_s is None else pytest.approx(30.0, abs=1.0))

    on_surface(scenario, engine=Naming())


def test_a_pause_that_its_trainer_makes_over_it_is_that_trainers_to_end() -> None:
    """A pause by name is meant, also within an unpaused update."""

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, UPDATE, START)
        await asyncio.sleep(1.0)
        await ok(front, "pause_generation")
        await ok(front, UPDATE, PART)
        await ok(front, UPDATE, FINISH)
        assert await generation(front) is Generation.PAUSED

    on_surface(scenario, engine=Naming())


# --- it ends


def coming_between(front: Front, after: type[Any], statuses: list[ResultStatus]) -> None:
    """Another client's question takes the one place for ops as soon as the first `after` has left it."""
    agent = front.rig.agent
    apply = agent.apply
    asking: list[asyncio.Future[None]] = []

    async def ask() -> None:
        result = await agent.entrance.submit(GetChecksums(), caller="http:monitor", limit_s=60.0)
        statuses.append(result.status)

    def watching(event: Event) -> tuple[Action, ...]:
        running = agent.state.running
        actions = apply(event)
        if isinstance(event, Released) and running is not None and isinstance(running.body, after) and not asking:
            asking.append(asyncio.ensure_future(ask()))
        return actions

    agent.apply = watching  # type: ignore[method-assign]


@pytest.mark.parametrize("after", [PauseGeneration, StartUpdate, ApplyUpdate, FinishUpdate])
def test_an_op_that_comes_between_those_of_a_whole_update_is_waited_for(after: type[Any]) -> None:
    """Half of an update would be left open, or the worker paused; and the answer would be `ok`."""
    statuses: list[ResultStatus] = []

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        coming_between(front, after, statuses)
        await ok(front, UPDATE, {**WHOLE, **UNPAUSED, "weight_version": 7})
        assert statuses == [ResultStatus.OK]
        assert state(front) == (WeightsState.CLEAN, Version(step=7))
        assert await generation(front) is Generation.RUNNING

    on_surface(scenario, engine=Naming({"checksums": {0: Step(latency_s=30.0)}}))


@pytest.mark.parametrize("after", [PauseGeneration, FinishUpdate])
def test_an_op_that_comes_between_those_of_one_step_is_waited_for(after: type[Any]) -> None:
    """The same where start and finish are calls of their own."""
    statuses: list[ResultStatus] = []

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        coming_between(front, after, statuses)
        for body in (START, PART, FINISH):
            await ok(front, UPDATE, body)
        assert statuses == [ResultStatus.OK]
        assert state(front)[0] is WeightsState.CLEAN
        assert await generation(front) is Generation.RUNNING

    on_surface(scenario, engine=Naming({"checksums": {0: Step(latency_s=30.0)}}))


@pytest.mark.parametrize("after", [PauseGeneration, LoadWeights])
@pytest.mark.parametrize("unpaused", [True, False])
def test_an_op_that_comes_between_those_of_a_load_is_waited_for(
    tmp_path: Path, unpaused: bool, after: type[Any]
) -> None:
    """On every route that loads a folder: the flush, or the resume, is as much a part of it."""
    FakeEngine.save(tmp_path / "step_1", Version(step=1))
    statuses: list[ResultStatus] = []

    async def scenario(front: Front) -> None:
        if not unpaused:
            await ok(front, "pause_generation")
        coming_between(front, after, statuses)
        body: dict[str, Any] = {"weight_dir": str(tmp_path / "step_1"), "weight_version": 1}
        await ok(front, UPDATE, {**body, **(UNPAUSED if unpaused else {})})
        assert state(front) == (WeightsState.CLEAN, Version(step=1))
        assert await generation(front) is (Generation.RUNNING if unpaused else Generation.PAUSED)
        assert unpaused or not front.rig.agent.state.owes_flush

    steps = {"checksums": {0: Step(latency_s=30.0)}}
    config = AgentConfig(weight_roots=(str(tmp_path),))
    on_surface(scenario, config=config, engine=FakeEngine(FakeScript(steps)))


def test_vllms_route_for_folders_waits_for_an_op_that_comes_before_its_flush(tmp_path: Path) -> None:
    """`/update_weights` with `weight_dir`: it answered 503, with the weights loaded."""
    FakeEngine.save(tmp_path / "step_1", Version(step=1))
    statuses: list[ResultStatus] = []

    async def scenario(front: Front) -> None:
        await front.post("/pause")
        coming_between(front, LoadWeights, statuses)
        answer = await front.post("/update_weights", {"weight_dir": str(tmp_path / "step_1")})
        assert answer.status_code == 200, answer.text
        assert not front.rig.agent.state.owes_flush

    steps = {"checksums": {0: Step(latency_s=30.0)}}
    config = AgentConfig(weight_roots=(str(tmp_path),))
    on_surface(scenario, config=config, engine=FakeEngine(FakeScript(steps)))


FAILS_ONCE = Step(fault=Fault(code=FaultCode.ENGINE_FAILED, message="scripted failure"))


@pytest.mark.parametrize("op_id", [{}, {"x_rlbus_op_id": "it"}], ids=["anew", "same op"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_resume_that_fails_is_said_and_the_same_call_again_ends_the_pause(
    is_whole: bool, op_id: dict[str, str]
) -> None:
    """`ok` would say that the worker generates; and the pause that stands is still the update's own."""
    last = {**WHOLE, **UNPAUSED} if is_whole else FINISH

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        if not is_whole:
            await ok(front, UPDATE, START)
            await ok(front, UPDATE, PART)
        assert (await said(front, UPDATE, last, **op_id))["code"] == FaultCode.ENGINE_FAILED
        assert state(front)[0] is WeightsState.CLEAN
        if is_whole or op_id:
            await ok(front, UPDATE, last, **op_id)
        else:
            # It is finished; only a new update can be.
            assert (await said(front, UPDATE, last))["code"] == FaultCode.WRONG_STATE
            for body in (START, PART, FINISH):
                await ok(front, UPDATE, body)
        assert await generation(front) is Generation.RUNNING

    on_surface(scenario, engine=Naming({"resume": {1: FAILS_ONCE}}))


def test_a_worker_that_stays_busy_is_said_and_the_next_unpaused_update_ends_the_pause() -> None:
    """It is waited for as long as the call may take."""
    statuses: list[ResultStatus] = []

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        coming_between(front, FinishUpdate, statuses)
        answer = await said(front, UPDATE, {**WHOLE, **UNPAUSED}, x_rlbus_limit_s="10")
        assert answer["code"] == FaultCode.BUSY
        assert front.rig.agent.state.running is not None
        await asyncio.sleep(60.0)
        await ok(front, UPDATE, {**WHOLE, **UNPAUSED})
        assert await generation(front) is Generation.RUNNING

    on_surface(scenario, engine=Naming({"checksums": {0: Step(latency_s=30.0)}}))


def test_a_flush_that_fails_at_the_finish_leaves_no_pause() -> None:
    """The resume empties the caches by itself; the answer says what failed."""

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, UPDATE, START)
        await ok(front, UPDATE, PART)
        answer = await said(front, UPDATE, {"engine_rpc": "finish_weight_update"})
        assert answer["code"] == FaultCode.FLUSH_FAILED
        assert await generation(front) is Generation.RUNNING
        assert not front.rig.agent.state.owes_flush

    on_surface(
        scenario, engine=Naming({"flush_cache": {1: Step(fault=Fault(code=FaultCode.FLUSH_FAILED, message=""))}})
    )


def test_a_part_that_fails_before_it_touched_anything_lets_the_worker_go_on() -> None:
    """Its update is closed, so nothing else would end the pause before its lease does."""

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, UPDATE, START)
        assert (await said(front, UPDATE, PART))["status"] == "error"
        assert state(front)[0] is WeightsState.CLEAN
        assert await generation(front) is Generation.RUNNING

    on_surface(scenario, engine=Naming({"update_native": {1: failing(after_parts=0)}}))


@pytest.mark.parametrize("route", ["init_weights_update_group", "destroy_weights_update_group"])
@pytest.mark.parametrize("touched", [True, False])
def test_whoever_gives_an_unpaused_update_up_ends_its_pause_unless_it_is_torn(route: str, touched: bool) -> None:
    """As the controller does for a fleet: whoever is whole generates again."""

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, UPDATE, START)
        if touched:
            await ok(front, UPDATE, PART)
        await ok(front, route, GROUP if route.startswith("init") else {})
        assert front.rig.agent.state.session is None
        assert await generation(front) is (Generation.PAUSED if touched else Generation.RUNNING)

    on_surface(scenario, engine=Naming())


def test_a_stranger_whose_part_is_refused_ends_no_pause_of_a_start_that_is_under_way() -> None:
    """No update was open, so he has closed none."""

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        starting = asyncio.create_task(ok(front, UPDATE, START))
        await asyncio.sleep(1.0)
        assert (await said(front, UPDATE, PART))["status"] == "error"
        await starting
        await ok(front, UPDATE, PART)
        await ok(front, UPDATE, FINISH)
        assert await generation(front) is Generation.RUNNING

    on_surface(scenario, engine=Naming({"start_native": {1: Step(latency_s=5.0)}}))


# --- only somebody's op is waited for


def test_a_disk_that_hangs_stops_no_engine_that_is_to_be_updated_unpaused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of anybody's runs there that could be waited for: the load is refused, and the engine goes on at once."""

    async def refuses(work: Any, path: str) -> Any:
        raise refused(FaultCode.BUSY, "a disk hangs", retryable=True, path=path)

    monkeypatch.setattr(DISK, "run", refuses)

    async def scenario(front: Front) -> None:
        began_s = asyncio.get_running_loop().time()
        answer = await said(front, UPDATE, {**UNPAUSED, "weight_dir": "/weights/step_7", "weight_version": 7})
        assert (answer["code"], answer["message"]) == (FaultCode.BUSY, "a disk hangs")
        assert asyncio.get_running_loop().time() - began_s < TURN_S
        assert await generation(front) is Generation.RUNNING

    on_surface(scenario, config=AgentConfig(weight_roots=("/weights",)))


def test_an_engine_that_is_busy_by_itself_is_not_asked_for_a_flush_again_and_again() -> None:
    """Its own word for busy names no op that would end."""
    busy = Step(fault=Fault(code=FaultCode.BUSY, message="(the engine's words)", retryable=True))
    engine = Naming({"flush_cache": {1: busy}})

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, "pause_generation")
        answer = await said(front, UPDATE, {**WHOLE, "reset_prefix_cache": True})
        assert answer["code"] == FaultCode.BUSY
        assert list(engine.calls).count("flush_cache") == 1

    on_surface(scenario, engine=engine)
