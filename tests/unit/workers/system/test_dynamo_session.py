"""Dynamo's routes for a trainer's own transfer: the group, the session RPCs, and everything in one call."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from rlbus.schemas import PauseGeneration, ResumeGeneration, Version, WeightsState
from rlbus.workers.engines.fake import ROUTES, FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step, failing
from rlbus.workers.engines.native import NATIVE_ROUTES
from rlbus.workers.system.calls import Call
from rlbus.workers.system.own_pause import OwnPause
from rlbus.workers.system.testing import Front, on_surface

pytestmark = pytest.mark.unit

GROUP = {
    "master_address": "127.0.0.1",
    "master_port": 1,
    "rank_offset": 1,
    "world_size": 2,
    "group_name": "g",
    "backend": "nccl",
}
UPDATE = "update_weights_from_distributed"
WHOLE = {"names": ["embed.weight"], "dtypes": ["float32"], "shapes": [[64, 16]]}


class Naming(FakeEngine):
    """Takes vLLM's own description, which has no step: everything is of step 7. Keeps what came."""

    def __init__(self, steps: dict[str, dict[int, Step]] | None = None) -> None:
        super().__init__(FakeScript({} if steps is None else steps))
        self.came: list[Any] = []

    async def update_native(self, info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """See `NativeEngine`. Cancel: as there."""
        self.came.append(info)
        items = info if isinstance(info, list) else [info]
        names = [spec.name for spec in self.tensors]
        await super().update_native([{**item, "names": names, "step": 7} for item in items])


async def said(front: Front, route: str, body: Any = None, **headers: str) -> dict[str, Any]:
    """What a handler says, with 200."""
    answer = await front.post(f"/engine/{route}", body, **headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def ok(front: Front, route: str, body: Any = None, **headers: str) -> dict[str, Any]:
    """A call that goes well."""
    found = await said(front, route, body, **headers)
    assert found["status"] == "ok", found
    return found


def state(front: Front) -> tuple[WeightsState, Version | None]:
    """Of the weights."""
    return front.rig.agent.state.weights.state, front.rig.agent.state.weights.version


def test_a_group_is_joined_and_left_in_dynamos_words() -> None:
    """By its parts, or by the transfer engine's own description."""

    async def scenario(front: Front) -> None:
        joined = {"status": "ok", "message": "Weight update group initialized"}
        assert await ok(front, "init_weights_update_group", GROUP) == joined
        parts = {k: GROUP[k] for k in ("master_address", "master_port", "rank_offset", "world_size")}
        assert front.rig.engine.native_info == parts
        body = {"engine_rpc": "init_weight_transfer_engine", "init_info": {"anything": [1]}}
        assert await ok(front, "init_weights_update_group", body) == joined
        assert front.rig.engine.native_info == {"anything": [1]}
        left = {"status": "ok", "message": "Weight update group destroyed"}
        assert await ok(front, "destroy_weights_update_group", {"group_name": "g"}) == left
        assert front.rig.engine.native_info is None

    on_surface(scenario)


@pytest.mark.parametrize("unpaused", [True, False])
def test_nemo_rls_three_calls_are_one_update(unpaused: bool) -> None:
    """Start, update, finish; unpaused, the engine stands still from start to finish all the same."""
    flags = {"allow_unpaused": True, "reset_prefix_cache": False} if unpaused else {}
    engine = Naming()

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        if not unpaused:
            await ok(front, "pause_generation")
        await ok(front, UPDATE, {**flags, "engine_rpc": "start_weight_update", "is_checkpoint_format": True})
        assert front.rig.agent.state.pause is not None
        await ok(
            front, UPDATE, {**flags, "engine_rpc": "update_weights", "update_info": {"names": ["a"], "packed": True}}
        )
        assert state(front)[0] is WeightsState.UPDATING
        await ok(front, UPDATE, {**flags, "engine_rpc": "finish_weight_update"})
        assert state(front) == (WeightsState.CLEAN, Version(step=1))
        assert (front.rig.agent.state.pause is None) is unpaused
        assert engine.came == [{"names": ["a"], "packed": True}]
        if unpaused:
            assert list(front.rig.engine.calls)[-2:] == ["flush_cache", "resume"]
        await ok(front, "set_weight_version", {"weight_version": 5})
        assert state(front)[1] == Version(step=5)

    on_surface(scenario, engine=engine)


def test_the_finish_may_name_the_version() -> None:
    """Which is read as it was written."""

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, "pause_generation")
        await ok(front, UPDATE, {"engine_rpc": "start_weight_update"})
        await ok(front, UPDATE, {"engine_rpc": "update_weights", "update_info": [{}, {}]})
        answer = await ok(front, UPDATE, {"engine_rpc": "finish_weight_update", "weight_version": "v7"})
        assert answer == {"status": "ok", "version": "v7", "version_declared": True}
        assert (await ok(front, "get_weight_version"))["version"] == "v7"
        assert not front.rig.agent.state.owes_flush

    on_surface(scenario, engine=Naming())


@pytest.mark.parametrize("unpaused", [True, False])
def test_a_whole_update_goes_in_one_call(unpaused: bool) -> None:
    """Names, dtypes and shapes; what steers the route doesn't reach the engine."""
    flags = {"allow_unpaused": True, "reset_prefix_cache": False} if unpaused else {}
    engine = Naming()

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        if not unpaused:
            assert (await said(front, UPDATE, WHOLE))["status"] == "error"
            await ok(front, "pause_generation")
        answer = await ok(front, UPDATE, {**WHOLE, **flags, "weight_version": 7}, x_rlbus_op_id="it")
        assert answer == {"status": "ok", "version": 7, "version_declared": True}
        assert state(front) == (WeightsState.CLEAN, Version(step=7))
        names = {"names": ["embed.weight"], "dtype_names": ["float32"], "shapes": [[64, 16]]}
        assert engine.came == [names]
        assert (front.rig.agent.state.pause is None) is unpaused

    on_surface(scenario, engine=engine)


def test_an_update_that_fails_in_the_middle_leaves_torn_weights_paused() -> None:
    """Also one that came unpaused; a folder heals them."""

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        flags = {"allow_unpaused": True, "reset_prefix_cache": False}
        answer = await said(front, UPDATE, {**WHOLE, **flags, "weight_version": 7})
        assert answer["status"] == "error"
        assert state(front)[0] is WeightsState.DIRTY
        assert front.rig.agent.state.pause is not None
        assert (await said(front, "resume_generation"))["code"] == "dirty"

    on_surface(scenario, engine=Naming({"update_native": {0: failing(after_parts=2)}}))


def test_a_trainer_that_dies_between_its_calls_leaves_no_open_session_for_ever() -> None:
    """The lease of its pause ends, and with it the update."""

    async def scenario(front: Front) -> None:
        flags = {"allow_unpaused": True, "reset_prefix_cache": False}
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, UPDATE, {**flags, "engine_rpc": "start_weight_update"}, x_rlbus_lease_s="20")
        assert front.rig.agent.state.session is not None
        await asyncio.sleep(30.0)
        assert front.rig.agent.state.session is None
        assert front.rig.agent.state.pause is None
        assert state(front)[0] is WeightsState.CLEAN

    on_surface(scenario, engine=Naming())


def test_a_client_that_hangs_up_in_a_whole_update_tears_nothing() -> None:
    """Once begun, it is carried to its end."""

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, "pause_generation")
        gone = asyncio.create_task(front.post(f"/engine/{UPDATE}", {**WHOLE, "weight_version": 7}))
        await asyncio.sleep(1.0)
        gone.cancel()
        await asyncio.sleep(10.0)
        assert state(front) == (WeightsState.CLEAN, Version(step=7))
        assert not front.rig.agent.state.owes_flush

    on_surface(scenario, engine=Naming({"update_native": {0: Step(latency_s=5.0)}}))


@pytest.mark.parametrize("lease_s", [None, 60.0])
def test_an_unpaused_update_leaves_a_pause_that_somebody_has_taken_over(lease_s: float | None) -> None:
    """An operator's hold between two of its ops is his; only its own pause is ended."""

    async def scenario(front: Front) -> None:
        agent = front.rig.agent
        call = Call(request=Request({"type": "http"}), agent=agent, body=b"", caller="http:trainer")
        async with OwnPause().standing_still(call, allows_unpaused=True):
            await front.rig.send(PauseGeneration(owner="ops@host", lease_s=lease_s))
        assert agent.state.pause is not None
        assert agent.state.pause.owner == "ops@host"
        assert "resume" not in front.rig.engine.calls
        await front.rig.send(ResumeGeneration())
        call = Call(request=Request({"type": "http"}), agent=agent, body=b"", caller="http:trainer")
        async with OwnPause().standing_still(call, allows_unpaused=True):
            assert agent.state.pause is not None
        assert agent.state.pause is None

    on_surface(scenario)


def test_an_unpaused_update_leaves_a_pause_that_is_being_made() -> None:
    """A resume would take it back."""

    async def scenario(front: Front) -> None:
        agent = front.rig.agent
        call = Call(request=Request({"type": "http"}), agent=agent, body=b"", caller="http:trainer")
        async with OwnPause().standing_still(call, allows_unpaused=True):
            front.rig.post(PauseGeneration(owner="ops@host", lease_s=None))
            await asyncio.sleep(1.0)
        await asyncio.sleep(10.0)
        assert agent.state.pause is not None
        assert agent.state.pause.owner == "ops@host"

    on_surface(scenario, {"pause": {1: Step(latency_s=5.0)}})


def test_a_second_start_that_is_refused_leaves_the_firsts_pause_to_its_finish() -> None:
    """Else nobody would end it before its lease does."""
    flags = {"allow_unpaused": True, "reset_prefix_cache": False}

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        await ok(front, UPDATE, {**flags, "engine_rpc": "start_weight_update"})
        update = {**flags, "engine_rpc": "update_weights", "update_info": {}}
        updating = asyncio.create_task(ok(front, UPDATE, update))
        await asyncio.sleep(1.0)
        assert (await said(front, UPDATE, {**flags, "engine_rpc": "start_weight_update"}))["code"] == "busy"
        await updating
        await ok(front, UPDATE, {**flags, "engine_rpc": "finish_weight_update"})
        assert front.rig.agent.state.pause is None

    on_surface(scenario, engine=Naming({"update_native": {0: Step(latency_s=5.0)}}))


def test_a_client_that_hangs_up_in_its_start_leaves_no_pause_without_an_update() -> None:
    """Once begun, it is carried to its end; and the finish of whoever comes back ends the pause."""
    flags = {"allow_unpaused": True, "reset_prefix_cache": False}
    start = {**flags, "engine_rpc": "start_weight_update"}

    async def scenario(front: Front) -> None:
        await ok(front, "init_weights_update_group", GROUP)
        gone = asyncio.create_task(front.post(f"/engine/{UPDATE}", start, x_rlbus_op_id="it"))
        await asyncio.sleep(1.0)
        gone.cancel()
        await asyncio.sleep(10.0)
        assert front.rig.agent.state.session is not None
        await ok(front, UPDATE, start, x_rlbus_op_id="it")
        await ok(front, UPDATE, {**flags, "engine_rpc": "update_weights", "update_info": {}})
        await ok(front, UPDATE, {**flags, "engine_rpc": "finish_weight_update"})
        assert front.rig.agent.state.pause is None

    on_surface(scenario, engine=Naming({"pause": {0: Step(latency_s=5.0)}}))


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("init_weights_update_group", {}),
        ("init_weights_update_group", {**GROUP, "engine_rpc": "init_broadcaster"}),
        ("init_weights_update_group", {**GROUP, "master_port": "1"}),
        ("init_weights_update_group", {**GROUP, "world_size": True}),
        ("init_weights_update_group", {**GROUP, "more": 1}),
        ("init_weights_update_group", {"init_info": []}),
        ("init_weights_update_group", {"init_info": {}, "more": 1}),
        ("destroy_weights_update_group", {"engine_rpc": "destroy_broadcaster"}),
        ("destroy_weights_update_group", {"group_name": 1}),
        (UPDATE, {"engine_rpc": "start_weight_update", "is_checkpoint_format": False}),
        (UPDATE, {"engine_rpc": "start_weight_update", "more": 1}),
        (UPDATE, {"engine_rpc": "update_weights"}),
        (UPDATE, {"engine_rpc": "update_weights", "update_info": "x"}),
        (UPDATE, {"engine_rpc": "finish_weight_update", "weight_version": "newest"}),
        (UPDATE, {"engine_rpc": ""}),
        (UPDATE, {**WHOLE, "shapes": []}),
        (UPDATE, {**WHOLE, "dtypes": ["a", "b"]}),
        (UPDATE, {"names": [], "dtypes": [], "shapes": []}),
        (UPDATE, {**WHOLE, "weight_version": "newest"}),
        (UPDATE, {**WHOLE, "method": "shutdown"}),
    ],
)
def test_bodies_are_strict_and_rpcs_are_those_of_the_list(route: str, body: Any) -> None:
    """Refused before anything reaches the engine."""

    async def scenario(front: Front) -> None:
        assert (await said(front, route, body))["status"] == "error"
        assert set(front.rig.engine.calls) <= {"start", "observe"}
        assert front.rig.agent.state.pause is None

    on_surface(scenario)


def test_an_update_without_a_start_or_a_group_is_an_error_and_touches_nothing() -> None:
    """In any order."""

    async def scenario(front: Front) -> None:
        await ok(front, "pause_generation")
        for body in (
            {"engine_rpc": "update_weights", "update_info": {"step": 1}},
            {"engine_rpc": "finish_weight_update"},
        ):
            assert (await said(front, UPDATE, body))["status"] == "error"
        assert state(front) == (WeightsState.CLEAN, None)
        await ok(front, "resume_generation")

    on_surface(scenario)


def test_an_engine_without_it_has_no_such_routes() -> None:
    """Only the way over a folder is left, and it says so."""

    async def scenario(front: Front) -> None:
        assert (await front.post("/engine/init_weights_update_group", GROUP)).status_code == 404
        answer = await said(front, UPDATE, {"engine_rpc": "start_weight_update"})
        assert "use update_weights_from_path" in answer["message"]
        assert "weight_dir" in (await said(front, UPDATE, {}))["message"]

    on_surface(scenario, engine=FakeEngine(routes=ROUTES - NATIVE_ROUTES))
