"""Dynamo's surface of a worker: statuses, bodies and edge cases, as Dynamo 1.6.1 has them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlbus.schemas import FaultCode, PauseGeneration, Version, WeightsState
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.fake import ROUTES, FakeEngine
from rlbus.workers.engines.fake_script import Step, failing
from rlbus.workers.system.testing import Front, on_surface
from rlbus.workers.testing import updated

pytestmark = pytest.mark.unit

V1, V7 = Version(step=1), Version(step=7)


async def ok(front: Front, route: str, body: Any = None, **headers: str) -> dict[str, Any]:
    """A call that goes well."""
    answer = await front.post(f"/engine/{route}", body, **headers)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    assert said["status"] == "ok", said
    return said


async def error(front: Front, route: str, body: Any = None, **headers: str) -> dict[str, Any]:
    """A call that a handler answers with an error, which comes with 200."""
    answer = await front.post(f"/engine/{route}", body, **headers)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    assert said["status"] == "error", said
    assert said["message"]
    return said


@pytest.fixture
def rooted(tmp_path: Path) -> AgentConfig:
    """A worker that may load below this folder."""
    FakeEngine.save(tmp_path / "step_7", V7)
    return AgentConfig(weight_roots=(str(tmp_path),))


def test_each_verb_answers_in_dynamos_words() -> None:
    """Status, message, and what it echoes."""

    async def scenario(front: Front) -> None:
        assert await ok(front, "liveness_probe") == {"status": "ok", "alive": True}
        paused = {"status": "ok", "message": "Engine paused", "mode": "keep", "clear_cache": False}
        assert await ok(front, "pause_generation", {}) == paused
        assert await ok(front, "flush_cache", {}) == {"status": "ok", "message": "Cache flushed"}
        assert await ok(front, "abort_request", {"request_id": "r"}) == {"status": "ok", "request_id": "r"}
        assert await ok(front, "resume_generation") == {"status": "ok", "message": "Engine resumed"}
        assert front.rig.agent.state.pause is None

    on_surface(scenario)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_keeps_its_mode(mode: str) -> None:
    """SCENARIOS 49: never mapped to another one."""

    async def scenario(front: Front) -> None:
        answer = await ok(front, "pause_generation", {"mode": mode, "clear_cache": True})
        assert (answer["mode"], answer["clear_cache"]) == (mode, True)
        pause = front.rig.agent.state.pause
        assert pause is not None
        assert pause.mode == mode

    on_surface(scenario)


def test_a_pause_by_http_has_an_owner_and_a_lease_and_ends_by_itself() -> None:
    """A caller from outside gets them like anybody else."""

    async def scenario(front: Front) -> None:
        answer = await front.post("/engine/pause_generation", {}, x_rlbus_caller="job-3", x_rlbus_lease_s="5")
        assert answer.headers["x-rlbus-op-id"]
        status = (await front.get("/status")).json()["status"]
        assert status["pause"]["owner"] == "http:job-3"
        await asyncio.sleep(3.0)
        await ok(front, "pause_generation", {}, x_rlbus_caller="job-3", x_rlbus_lease_s="5")
        await asyncio.sleep(4.0)
        assert front.rig.agent.state.pause is not None
        await asyncio.sleep(2.0)
        assert front.rig.agent.state.pause is None

    on_surface(scenario)


def test_without_a_header_a_pause_holds_ten_minutes() -> None:
    """Nobody's crash keeps an engine paused for ever."""

    async def scenario(front: Front) -> None:
        await ok(front, "pause_generation")
        await asyncio.sleep(599.0)
        assert front.rig.agent.state.pause is not None
        await asyncio.sleep(2.0)
        assert front.rig.agent.state.pause is None

    on_surface(scenario)


@pytest.mark.parametrize("prefix", ["/engine/", "/engine/control/"])
def test_both_paths_lead_to_the_same(prefix: str) -> None:
    """`/engine/control/<route>`, too."""

    async def scenario(front: Front) -> None:
        assert (await front.post(f"{prefix}pause_generation", {})).json()["status"] == "ok"
        assert front.rig.agent.state.pause is not None

    on_surface(scenario)


def test_a_version_is_read_as_it_was_written(rooted: AgentConfig) -> None:
    """Undeclared at first; what an update of rlbus brings is named by its version."""

    async def scenario(front: Front) -> None:
        step_7 = {"model_path": str(Path(rooted.weight_roots[0]) / "step_7")}
        nothing = {"status": "ok", "version": None, "version_declared": False}
        assert await ok(front, "get_weight_version") == nothing
        await ok(front, "pause_generation")
        for label, version in ((3, "0.3"), ("4", "0.4"), ("v5", "0.5"), ("step-6", "0.6"), ("1.2", "1.2"), (3, "1.3")):
            await ok(front, "update_weights_from_disk", step_7)
            assert await ok(front, "set_weight_version", {"weight_version": label, "allow_rollback": True}) == {
                "status": "ok",
                "version": label,
            }
            assert (await ok(front, "get_weight_version"))["version"] == label
            assert str(front.rig.agent.state.weights.version) == version
        await updated(front.rig, Version(incarnation=1, step=9))
        assert await ok(front, "get_weight_version") == {"status": "ok", "version": "1.9", "version_declared": False}

    on_surface(scenario, config=rooted)


@pytest.mark.parametrize(
    "label", [None, True, -1, 1.5, "", "latest", "-1", "1.2.3", "v", [], {}, 2**60, "9" * 17, "7\n", "٣"]
)
def test_what_is_no_version_is_refused(label: Any) -> None:
    """It couldn't be compared."""

    async def scenario(front: Front) -> None:
        assert "weight_version" in (await error(front, "set_weight_version", {"weight_version": label}))["message"]
        assert front.rig.agent.state.weights.version is None

    on_surface(scenario)


def test_a_version_is_named_once_and_goes_back_only_if_that_is_meant(rooted: AgentConfig) -> None:
    """`allow_rollback` is rlbus' own. Weights whose version somebody has named keep it."""

    async def scenario(front: Front) -> None:
        body = {"model_path": str(Path(rooted.weight_roots[0]) / "step_7")}
        assert (await error(front, "set_weight_version", {"weight_version": "5.9999"}))["code"] == "wrong_state"
        await ok(front, "pause_generation")
        await ok(front, "update_weights_from_disk", {**body, "weight_version": 5})
        assert (await error(front, "set_weight_version", {"weight_version": 6}))["code"] == "wrong_state"
        await ok(front, "update_weights_from_disk", body)
        assert (await error(front, "set_weight_version", {"weight_version": 4}))["code"] == "version_regression"
        await ok(front, "set_weight_version", {"weight_version": 4, "allow_rollback": True})
        assert (await error(front, "set_weight_version", {"weight_version": 9}))["code"] == "wrong_state"

    on_surface(scenario, config=rooted)


def test_a_folder_is_loaded_while_paused_and_the_caches_are_emptied(rooted: AgentConfig) -> None:
    """The version is the body's."""

    async def scenario(front: Front) -> None:
        path = str(Path(rooted.weight_roots[0]) / "step_7")
        await ok(front, "pause_generation")
        answer = await ok(front, "update_weights_from_disk", {"model_path": path, "weight_version": "step_7"})
        assert answer == {"status": "ok", "version": "step_7", "version_declared": True}
        weights = front.rig.agent.state.weights
        assert (weights.state, weights.version) == (WeightsState.CLEAN, V7)
        assert not front.rig.agent.state.owes_flush
        assert front.rig.engine.calls[-1] == "flush_cache"
        await ok(front, "resume_generation")

    on_surface(scenario, config=rooted)


def test_an_update_without_a_version_gets_the_next_one(rooted: AgentConfig) -> None:
    """And says that nobody has declared it; a repeat of the call changes nothing."""

    async def scenario(front: Front) -> None:
        body = {"model_path": str(Path(rooted.weight_roots[0]) / "step_7")}
        await updated(front.rig, Version(step=6))
        await ok(front, "pause_generation")
        for _ in range(2):
            answer = await ok(front, "update_weights_from_disk", body, x_rlbus_op_id="it")
            assert answer == {"status": "ok", "version": "unknown", "version_declared": False}
            assert front.rig.agent.state.weights.version == V7
        assert await ok(front, "get_weight_version") == {"status": "ok", "version": "0.7", "version_declared": False}
        assert list(front.rig.engine.calls).count("load_weights") == 1

    on_surface(scenario, config=rooted)


def test_updates_are_refused_unless_paused(rooted: AgentConfig) -> None:
    """As Dynamo does."""

    async def scenario(front: Front) -> None:
        path = str(Path(rooted.weight_roots[0]) / "step_7")
        for route, field in (
            ("update_weights_from_disk", "model_path"),
            ("update_weights_from_distributed", "weight_dir"),
        ):
            said = await error(front, route, {field: path, "weight_version": 7})
            assert "paused" in said["message"]
        assert "load_weights" not in front.rig.engine.calls

    on_surface(scenario, config=rooted)


def test_a_path_outside_the_roots_is_refused(rooted: AgentConfig) -> None:
    """Whatever it leads to; nothing is touched."""

    async def scenario(front: Front) -> None:
        root = rooted.weight_roots[0]
        await ok(front, "pause_generation")
        for path in ("/etc", f"{root}/../..", "relative", f"{root}x", "\x00", "file:///etc"):
            await error(front, "update_weights_from_disk", {"model_path": path, "weight_version": 7})
            await error(front, "update_weights_from_distributed", {"weight_dir": path, "weight_version": 7})
        assert "load_weights" not in front.rig.engine.calls
        assert front.rig.agent.state.weights.version is None

    on_surface(scenario, config=rooted)


def test_what_the_trainer_wrote_is_loaded_by_dynamos_rpc_of_that_name(rooted: AgentConfig) -> None:
    """prime-rl's way through Dynamo: `update_weights_from_path` with `weight_dir`."""

    async def scenario(front: Front) -> None:
        body = {
            "engine_rpc": "update_weights_from_path",
            "weight_dir": str(Path(rooted.weight_roots[0]) / "step_7"),
            "weight_version": 7,
        }
        await ok(front, "pause_generation", {"mode": "keep", "clear_cache": False})
        answer = await ok(front, "update_weights_from_distributed", body)
        assert answer == {"status": "ok", "version": 7, "version_declared": True}
        await ok(front, "resume_generation", {})
        assert front.rig.agent.state.weights.version == V7

    on_surface(scenario, config=rooted)


def test_an_unpaused_update_stands_still_for_as_long_as_it_takes(rooted: AgentConfig) -> None:
    """The flag is the agent's business: it never reaches the engine, which must not step meanwhile."""

    async def scenario(front: Front) -> None:
        body = {
            "weight_dir": str(Path(rooted.weight_roots[0]) / "step_7"),
            "weight_version": 7,
            "allow_unpaused": True,
            "reset_prefix_cache": False,
        }
        await ok(front, "update_weights_from_distributed", body)
        verbs = [c for c in front.rig.engine.calls if c not in ("observe", "start", "check_checkpoint")]
        assert verbs == ["pause", "load_weights", "flush_cache", "resume"]
        assert front.rig.agent.state.pause is None

    on_surface(scenario, config=rooted)


def test_an_unpaused_update_that_fails_untouched_leaves_the_worker_running(rooted: AgentConfig) -> None:
    """And says why."""

    async def scenario(front: Front) -> None:
        body = {"weight_dir": "/etc", "allow_unpaused": True, "reset_prefix_cache": False}
        await error(front, "update_weights_from_distributed", body)
        assert front.rig.agent.state.pause is None
        assert front.rig.agent.state.weights.state is WeightsState.CLEAN

    on_surface(scenario, config=rooted)


def test_an_unpaused_update_of_a_paused_worker_leaves_it_paused(rooted: AgentConfig) -> None:
    """Whoever holds the pause ends it."""

    async def scenario(front: Front) -> None:
        body = {
            "weight_dir": str(Path(rooted.weight_roots[0]) / "step_7"),
            "allow_unpaused": True,
            "reset_prefix_cache": False,
        }
        await front.rig.send(PauseGeneration(owner="ann"))
        await ok(front, "update_weights_from_distributed", body)
        pause = front.rig.agent.state.pause
        assert pause is not None
        assert pause.owner == "ann"

    on_surface(scenario, config=rooted)


@pytest.mark.parametrize(
    "flags",
    [
        {"allow_unpaused": True},
        {"allow_unpaused": True, "reset_prefix_cache": True},
        {"allow_unpaused": "true"},
        {"allow_unpaused": 1},
        {"allow_unpaused": None},
        {"reset_prefix_cache": 0},
        {"reset_prefix_cache": "false"},
        {"reset_prefix_cache": []},
    ],
)
def test_flags_are_boolean_and_do_not_contradict_each_other(flags: dict[str, Any], rooted: AgentConfig) -> None:
    """Refused before anything is done."""

    async def scenario(front: Front) -> None:
        path = str(Path(rooted.weight_roots[0]) / "step_7")
        said = await error(front, "update_weights_from_distributed", {"weight_dir": path, **flags})
        assert "reset" in said["message"] or "boolean" in said["message"]
        assert "pause" not in front.rig.engine.calls

    on_surface(scenario, config=rooted)


@pytest.mark.parametrize("rpc", ["shutdown", "init_broadcaster", "collective_rpc", "__class__", "", 1, None, ["a"]])
def test_no_rpc_is_chosen_by_a_caller(rpc: Any, rooted: AgentConfig) -> None:
    """`engine_rpc` only from an allow-list."""

    async def scenario(front: Front) -> None:
        await ok(front, "pause_generation")
        path = str(Path(rooted.weight_roots[0]) / "step_7")
        said = await error(front, "update_weights_from_distributed", {"weight_dir": path, "engine_rpc": rpc})
        assert "update_weights_from_path" in said["message"]
        said = await error(front, "update_weights_from_disk", {"model_path": path, "engine_rpc": rpc})
        assert "reload_weights" in said["message"] or "str" in said["message"]
        assert "load_weights" not in front.rig.engine.calls

    on_surface(scenario, config=rooted)


def test_a_route_that_is_not_there_is_404_in_dynamos_shape() -> None:
    """Also one that this engine hasn't; those that it has are named."""

    async def scenario(front: Front) -> None:
        for route in ("nowhere", "flush_cache", "", "put_manifest", "control/", "pause_generation/x"):
            answer = await front.post(f"/engine/{route}", {})
            assert answer.status_code == 404, route
            assert answer.json()["error"] == "Route not found"
            assert "pause_generation" in answer.json()["message"]

    on_surface(scenario, engine=FakeEngine(routes=ROUTES - {"flush_cache"}))


def test_get_only_reads() -> None:
    """Dynamo takes any method; here a link can't pause an engine."""

    async def scenario(front: Front) -> None:
        assert (await front.get("/engine/get_weight_version")).json()["status"] == "ok"
        assert (await front.get("/engine/liveness_probe")).json()["alive"] is True
        answer = await front.get("/engine/pause_generation")
        assert (answer.status_code, answer.json()["error"]) == (405, "Method not allowed")
        assert (await front.client.delete("/engine/pause_generation")).status_code == 405
        assert front.rig.agent.state.pause is None

    on_surface(scenario)


def test_the_routes_query_names_what_is_served_here() -> None:
    """Each answers something else than 404."""

    async def scenario(front: Front) -> None:
        from rlbus._engine_routes import engine_routes

        for route in engine_routes(front.rig.agent.descriptor.routes):
            answer = await front.post(f"/engine/{route}", {"nonsense": 1})
            assert answer.status_code == 200, route

    on_surface(scenario)


def test_a_torn_worker_says_so_and_is_healed_by_a_full_load(rooted: AgentConfig) -> None:
    """SCENARIOS 4 over HTTP: no resume on torn weights."""

    async def scenario(front: Front) -> None:
        path = str(Path(rooted.weight_roots[0]) / "step_7")
        await front.rig.until_paused(V1, front.rig.engine.tensors, "u", 1)
        await front.rig.receive(V1, front.rig.engine.tensors).result()
        said = await error(front, "resume_generation")
        assert said["code"] == "dirty"
        assert await ok(front, "get_weight_version") == {"status": "ok", "version": None, "version_declared": False}
        assert (await error(front, "set_weight_version", {"weight_version": 3}))["code"] == "dirty"
        await ok(front, "update_weights_from_disk", {"model_path": path, "weight_version": 7})
        await ok(front, "resume_generation")

    on_surface(scenario, {"receive_weights": {1: failing(after_parts=2)}}, config=rooted)


def test_two_callers_at_once_are_told_apart() -> None:
    """The second is busy, and told with what."""

    async def scenario(front: Front) -> None:
        first = asyncio.create_task(front.post("/engine/flush_cache", {}, x_rlbus_op_id="first"))
        await asyncio.sleep(0.1)
        said = await error(front, "pause_generation", {})
        assert (said["code"], said["detail"]["op_id"]) == (FaultCode.BUSY.value, "first")
        assert await ok(front, "get_weight_version")
        assert await ok(front, "liveness_probe")
        assert (await first).json()["status"] == "ok"

    on_surface(scenario, {"flush_cache": {0: Step(latency_s=5.0)}})


def test_an_engine_that_fails_is_an_error_with_its_reason() -> None:
    """And the caller sees nothing of its inside."""

    async def scenario(front: Front) -> None:
        said = await error(front, "flush_cache")
        assert (said["code"], said["message"]) == ("engine_failed", "broken")

    on_surface(scenario, {"flush_cache": {0: failing("broken")}})


def test_a_dead_engine_is_not_alive() -> None:
    """Dynamo's words for it."""

    async def scenario(front: Front) -> None:
        front.rig.agent.lose("its process ended")
        assert await error(front, "liveness_probe") == {
            "status": "error",
            "alive": False,
            "message": "its process ended",
        }

    on_surface(scenario)
