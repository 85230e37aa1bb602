"""vLLM's RL verbs of a worker: vLLM's bodies and answers, the agent's rules."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus.adapter import WEIGHTS_FILE
from rlbus.schemas import Fault, FaultCode, Generation, Version, WeightsState
from rlbus.testing import hangs
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.fake import ROUTES, FakeEngine
from rlbus.workers.engines.fake_script import Step, failing
from rlbus.workers.engines.lora import LoraInfo
from rlbus.workers.engines.native import NATIVE_ROUTES
from rlbus.workers.lora_testing import config_for, fake_adapter
from rlbus.workers.system import dynamo_loras
from rlbus.workers.system.testing import Front, on_surface
from rlbus.workers.system.vllm import vllm_endpoints

pytestmark = pytest.mark.unit

INIT = {"init_info": {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3}}


async def ok(front: Front, path: str, body: Any = None, **headers: str) -> Any:
    """A call that goes well; what it answers."""
    answer = await front.post(path, body, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def begun(front: Front) -> None:
    """Up to an open update."""
    await ok(front, "/pause?mode=keep")
    await ok(front, "/init_weight_transfer_engine", INIT)
    await ok(front, "/start_weight_update")


def message(answer: httpx.Response, status: int) -> str:
    """What an error says, in vLLM's shape."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    return str(error["message"])


def test_a_step_of_vllms_client_has_vllms_answers() -> None:
    """As `HTTPVLLMWeightSyncClient` sends it: no body where there is nothing to say."""

    async def scenario(front: Front) -> None:
        assert (await front.get("/weight_info")).json() == {"weight_version": "default"}
        assert (await front.get("/is_paused")).json() == {"is_paused": False}
        assert await ok(front, "/pause?mode=wait&clear_cache=true") == {"status": "paused"}
        assert (await front.get("/is_paused")).json() == {"is_paused": True}
        assert await ok(front, "/init_weight_transfer_engine", INIT) == {"message": "Weight transfer initialized"}
        assert front.rig.engine.native_info == INIT["init_info"]
        assert await ok(front, "/start_weight_update") == {"message": "Weight update started"}
        assert await ok(front, "/update_weights", {"update_info": {"step": 3}}) == {"message": "Weights updated"}
        done = await ok(front, "/finish_weight_update", {"weight_version": "v3"})
        assert done == {"message": "Weight update finished"}
        assert await ok(front, "/resume") == {"status": "resumed"}
        assert (await front.get("/weight_info")).json() == {"weight_version": "v3"}
        assert await ok(front, "/shutdown_weight_transfer_engine") == {"message": "Weight transfer shut down"}
        assert str(front.rig.agent.state.weights.version) == "0.3"
        assert "flush_cache" in front.rig.engine.calls

    on_surface(scenario)


def test_an_update_without_a_name_is_the_next_step() -> None:
    """vLLM's trainer engines finish without one."""

    async def scenario(front: Front) -> None:
        await begun(front)
        await ok(front, "/update_weights", {"update_info": [{"step": 1}]})
        await ok(front, "/finish_weight_update")
        assert (await front.get("/weight_info")).json() == {"weight_version": "0.1"}
        await ok(front, "/update_weight_version", {"new_version": "v4"})
        assert (await front.get("/weight_info")).json() == {"weight_version": "v4"}

    on_surface(scenario)


def test_it_is_refused_unless_paused_and_nothing_changes() -> None:
    """409 in vLLM's shape, with rlbus' code beside it."""

    async def scenario(front: Front) -> None:
        await ok(front, "/init_weight_transfer_engine", INIT)
        answer = await front.post("/start_weight_update")
        assert "pause" in message(answer, 409)
        assert answer.json()["rlbus"]["code"] == FaultCode.WRONG_STATE
        assert "start_native" not in front.rig.engine.calls

    on_surface(scenario)


def test_a_pause_over_http_has_an_owner_and_a_lease() -> None:
    """Nobody renews it: the worker generates again."""

    async def scenario(front: Front) -> None:
        await ok(front, "/pause", x_rlbus_caller="prime", x_rlbus_lease_s="5")
        pause = front.rig.agent.state.pause
        assert pause is not None
        assert pause.owner == "http:prime"
        await asyncio.sleep(20.0)
        assert (await front.get("/is_paused")).json() == {"is_paused": False}

    on_surface(scenario)


@pytest.mark.parametrize("path", ["/pause?mode=keep", "/engine/pause_generation"])
def test_another_pause_of_its_trainer_renews_the_lease_also_in_the_middle_of_a_transfer(path: str) -> None:
    """As the page on HTTP says. One of somebody else, or in another mode, would have to be done, and is busy."""

    async def scenario(front: Front) -> None:
        body = {"mode": "keep"} if path.startswith("/engine") else None
        await begun(front)
        pause = front.rig.agent.state.pause
        assert pause is not None
        sending = asyncio.create_task(front.post("/update_weights", {"update_info": {"step": 1}}))
        await asyncio.sleep(100.0)
        await ok(front, path, body, x_rlbus_lease_s="900")
        renewed = front.rig.agent.state.pause
        assert renewed is not None
        assert renewed.expires_at == front.rig.worker_bus.clock.now() + 900.0
        assert (renewed.owner, renewed.since) == (pause.owner, pause.since)
        for mode, headers in (("keep", {"x_rlbus_caller": "bob"}), ("abort", {})):
            answer = await front.post(f"/pause?mode={mode}", **headers)
            assert "update_weights" in message(answer, 503)
        assert front.rig.agent.state.pause == renewed
        assert (await sending).status_code == 200

    on_surface(scenario, {"update_native": {1: Step(latency_s=200.0)}})


def test_another_pause_in_the_middle_of_anything_else_is_busy() -> None:
    """It has to be done: what runs may leave the caches as they are."""

    async def scenario(front: Front) -> None:
        await ok(front, "/pause?mode=keep")
        flushing = asyncio.create_task(front.post("/reset_prefix_cache"))
        await asyncio.sleep(1.0)
        message(await front.post("/pause?mode=keep"), 503)
        assert (await flushing).status_code == 200

    on_surface(scenario, {"flush_cache": {1: Step(latency_s=10.0)}})


def test_a_second_mutation_meanwhile_is_busy_and_worth_a_retry() -> None:
    """503 with Retry-After, which clients try again; a repeat of the same op joins it."""

    async def scenario(front: Front) -> None:
        await begun(front)
        body = {"update_info": {"step": 1}}
        first = asyncio.create_task(front.post("/update_weights", body, x_rlbus_op_id="u1"))
        while front.rig.agent.state.running is None:  # noqa: ASYNC110 - the agent has no event for it
            await asyncio.sleep(0.1)
        busy = await front.post("/start_weight_update")
        message(busy, 503)
        assert busy.headers["retry-after"] == "1"
        joined = await front.post("/update_weights", body, x_rlbus_op_id="u1")
        assert (await first).json() == joined.json() == {"message": "Weights updated"}
        assert list(front.rig.engine.calls).count("update_native") == 1

    on_surface(scenario, {"update_native": {1: Step(latency_s=5.0)}})


def test_the_successor_of_a_dead_trainer_begins_anew() -> None:
    """As vLLM's clients do: a pause, which renews the lease of the one before, then init; its update is whole."""

    async def scenario(front: Front) -> None:
        await begun(front)
        await ok(front, "/update_weights", {"update_info": {"step": 1}})
        await asyncio.sleep(300.0)
        await begun(front)
        specs = front.rig.engine.tensors
        names = {"names": [s.name for s in specs], "dtype_names": [s.dtype for s in specs]}
        info = {**names, "shapes": [s.shape for s in specs], "step": 2}
        await ok(front, "/update_weights", {"update_info": info})
        await ok(front, "/finish_weight_update")
        await ok(front, "/resume")
        assert front.rig.agent.state.weights.state is WeightsState.CLEAN

    on_surface(scenario)


def test_a_failed_update_is_500_and_says_that_the_weights_are_torn() -> None:
    """The worker stays paused; a resume is refused."""

    async def scenario(front: Front) -> None:
        await begun(front)
        message(await front.post("/update_weights", {"update_info": {"step": 1}}), 500)
        assert front.rig.agent.state.weights.state is WeightsState.DIRTY
        assert (await front.post("/resume")).json()["rlbus"]["code"] == FaultCode.DIRTY

    on_surface(scenario, {"update_native": {1: failing(after_parts=1)}})


def test_an_engine_without_the_routes_says_501() -> None:
    """Nothing is emulated."""

    async def scenario(front: Front) -> None:
        message(await front.post("/init_weight_transfer_engine", INIT), 501)

    on_surface(scenario, engine=FakeEngine(routes=ROUTES - NATIVE_ROUTES))


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/pause?mode=later", None, 400, "later"),
        ("/pause?clear_cach=true", None, 400, "clear_cach"),
        ("/pause?mode=keep&mode=wait", None, 400, "twice"),
        ("/pause?clear_cache=perhaps", None, 400, "perhaps"),
        ("/pause", {"mode": "keep"}, 400, "mode"),
        ("/resume", {"x": 1}, 400, "x"),
        ("/init_weight_transfer_engine", {}, 400, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": 1}, 400, "init_info"),
        ("/init_weight_transfer_engine", {**INIT, "extra": 1}, 400, "extra"),
        ("/start_weight_update?now=1", None, 400, "now"),
        ("/start_draft_weight_update", None, 501, "draft"),
        ("/update_weights", {}, 400, "update_info"),
        ("/update_weights", {"update_info": "x"}, 400, "update_info"),
        ("/update_weights", {"update_info": {}, "weight_dir": "/x"}, 400, "update_info"),
        ("/update_weights", {"weight_dir": None}, 501, "NCCL"),
        ("/finish_weight_update", {"weight_version": "latest"}, 400, "latest"),
        ("/finish_weight_update", {"weight_version": 7}, 400, "weight_version"),
        ("/update_weight_version", {"new_version": "main"}, 400, "main"),
        ("/abort_requests", {"request_ids": "a"}, 400, "request_ids"),
        ("/inference/v1/abort_requests", {}, 400, "request_ids"),
        ("/sleep?level=0", None, 400, "level"),
        ("/wake_up?tags=gpu", None, 400, "gpu"),
        ("/weight_checker", {"action": "reset"}, 501, "reset"),
        ("/weight_checker", {"action": "compare"}, 400, "baseline"),
        ("/collective_rpc", {"method": "reset_weights"}, 403, "reset_weights"),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"path": "/x"}}, 400, "path"),
        ("/collective_rpc", {"method": "reload_weights", "args": ["/x"]}, 400, "args"),
        ("/collective_rpc", {}, 400, "method"),
        ("/init_broadcaster", {}, 501, "NCCL"),
        ("/scale_elastic_ep", {"new_data_parallel_size": 2}, 501, "start it anew"),
        ("/fault_tolerance/apply", {}, 501, "its supervisor"),
        ("/v1/load_lora_adapter", {"lora_name": "a"}, 400, "lora_path"),
        ("/v1/unload_lora_adapter", {"lora_name": "a", "force": True}, 400, "force"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(path: str, body: Any, status: int, says: str) -> None:
    """In vLLM's shape; the engine isn't asked for anything."""

    async def scenario(front: Front) -> None:
        calls = [call for call in front.rig.engine.calls if call != "observe"]
        assert says in message(await front.post(path, body), status)
        assert [call for call in front.rig.engine.calls if call != "observe"] == calls
        assert (await front.rig.engine.observe()).generation is Generation.RUNNING

    on_surface(scenario)


def test_other_content_methods_and_strangers_are_told_in_vllms_shape() -> None:
    """415, 405 and 401."""

    async def scenario(front: Front) -> None:
        right = {"authorization": "Bearer right"}
        message(await front.post("/pause"), 401)
        message(await front.client.get("/pause", headers=right), 405)
        text = await front.client.post("/start_weight_update", content=b"x", headers=right)
        message(text, 415)
        garbled = await front.client.post(
            "/abort_requests", content=b"{", headers={**right, "content-type": "application/json"}
        )
        message(garbled, 400)
        doubled = await front.client.post(
            "/update_weight_version",
            content=b'{"new_version": "7", "new_version": "8"}',
            headers={**right, "content-type": "application/json"},
        )
        assert "'new_version' is given twice" in message(doubled, 400)
        assert front.rig.agent.state.pause is None

    on_surface(scenario, tokens=["right"])


def test_no_route_is_open_without_the_token() -> None:
    """All of them, by their list."""

    async def scenario(front: Front) -> None:
        for endpoint in vllm_endpoints():
            answer = await front.client.request(endpoint.method, endpoint.path)
            message(answer, 401)

    on_surface(scenario, tokens=["right"])


def test_only_listed_methods_pass_as_collective_rpc_and_mean_the_same_as_the_routes() -> None:
    """One answer a rank, as vLLM has it."""

    async def scenario(front: Front) -> None:
        await ok(front, "/pause")
        rpcs = [
            ("init_weight_transfer_engine", INIT),
            ("start_weight_update", {}),
            ("update_weights", {"update_info": {"step": 1}}),
            ("finish_weight_update", {}),
            ("shutdown_weight_transfer_engine", {}),
        ]
        num_ranks = front.rig.agent.descriptor.world_size
        for method, kwargs in rpcs:
            found = await ok(front, "/collective_rpc", {"method": method, "kwargs": kwargs})
            assert found == {"results": [None] * num_ranks}
        assert str(front.rig.agent.state.weights.version) == "0.1"

    on_surface(scenario)


def test_questions_and_caches_answer_as_vllm() -> None:
    """World size, caches, checksums, requests, sleep."""

    async def scenario(front: Front) -> None:
        size = front.rig.agent.descriptor.world_size
        assert (await front.get("/get_world_size?include_dp=true")).json() == {"world_size": size}
        message(await front.get("/get_world_size?include_dp=false"), 400)
        assert await ok(front, "/reset_prefix_cache?reset_running_requests=true") == {"success": True}
        assert (await front.post("/reset_mm_cache")).content == b""
        front.rig.engine.submit("r1", (1,), 1000)
        assert await ok(front, "/abort_requests", {"request_ids": ["r1"]}) == {"status": "aborted", "aborted": 1}
        assert await ok(front, "/abort_requests") == {"status": "aborted", "aborted": 0}
        await ok(front, "/pause")
        message(await front.post("/update_weight_version", {"new_version": "v4"}), 409)
        sums = (await ok(front, "/weight_checker", {"action": "checksum"}))["checksums"]
        assert sums
        same = await ok(front, "/weight_checker", {"action": "compare", "baseline": sums})
        assert same == {"match": True, "mismatches": []}
        name = next(iter(sums))
        other = await ok(front, "/weight_checker", {"action": "compare", "baseline": {**sums, name: "0"}})
        assert other == {"match": False, "mismatches": [name]}

    on_surface(scenario)


def test_requests_are_aborted_by_name_as_where_servers_hand_them_on() -> None:
    """`/inference/v1/abort_requests`: vLLM's empty answer, by the agent's abort; an empty list is nobody."""

    async def scenario(front: Front) -> None:
        path = "/inference/v1/abort_requests"
        front.rig.engine.submit("r1", (1,), 1000)
        front.rig.engine.submit("r2", (1,), 1000)
        for names in ([], ["r1"]):
            answer = await front.post(path, {"request_ids": names})
            assert (answer.status_code, answer.content) == (200, b"")
        assert await ok(front, "/abort_requests") == {"status": "aborted", "aborted": 1}

    on_surface(scenario)


def test_sagemakers_routes_for_adapters_are_refused_and_the_others_named() -> None:
    """vLLM's load any folder of the machine, past adapter roots, revisions and the engine's capacity."""

    async def scenario(front: Front) -> None:
        added = await front.post("/adapters", {"name": "policy", "src": "/etc"})
        removed = await front.client.delete("/adapters/policy")
        for answer in (added, removed):
            assert "/v1/load_lora_adapter" in message(answer, 501)

    on_surface(scenario)


def test_a_cache_that_cannot_be_emptied_is_no_success() -> None:
    """`{"success": false}`, as vLLM says it."""

    async def scenario(front: Front) -> None:
        assert await ok(front, "/reset_prefix_cache") == {"success": False}
        assert await ok(front, "/reset_prefix_cache") == {"success": True}

    on_surface(scenario, {"flush_cache": {1: Step(fault=Fault(code=FaultCode.FLUSH_FAILED, message="busy"))}})


def test_sleep_and_wake_have_vllms_tags() -> None:
    """A wake of one tag leaves it asleep; it never ends a pause."""

    async def scenario(front: Front) -> None:
        assert await ok(front, "/sleep?level=1&mode=keep") == {"status": "sleeping", "level": 1}
        assert (await front.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert await ok(front, "/wake_up?tags=weights") == {"status": "sleeping", "tags": ["weights"]}
        assert await ok(front, "/wake_up") == {"status": "awake", "tags": None}
        assert await ok(front, "/release_kv_cache_memory") == {"status": "kv_cache_released"}
        assert (await front.get("/is_paused")).json() == {"is_paused": True}
        message(await front.post("/resume"), 409)

    on_surface(scenario)


def test_prime_rls_folder_is_loaded_and_the_caches_emptied(tmp_path: Any) -> None:
    """`weight_dir`, below the roots only."""
    FakeEngine.save(tmp_path / "step_1", Version(step=1))

    async def scenario(front: Front) -> None:
        await ok(front, "/pause")
        outside = await front.post("/update_weights", {"weight_dir": "/etc"})
        assert outside.status_code in (400, 409), outside.text
        assert await ok(front, "/update_weights", {"weight_dir": str(tmp_path / "step_1")}) == {"status": "ok"}
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "step_1")}}
        await ok(front, "/collective_rpc", rpc)
        assert str(front.rig.agent.state.weights.version) == "0.2"

    on_surface(scenario, config=AgentConfig(weight_roots=(str(tmp_path),)))


def test_info_travels_as_it_is() -> None:
    """Whatever a trainer's backend says, nested or not."""

    async def scenario(front: Front) -> None:
        info = {"a": [1, {"b": None}], "c": "ü"}
        await ok(front, "/init_weight_transfer_engine", {"init_info": info})
        assert front.rig.engine.native_info == json.loads(json.dumps(info))

    on_surface(scenario)


# --- adapters


def adapter(folder: Path, name: str = "policy") -> dict[str, Any]:
    """A body of vLLM's load."""
    return {"lora_name": name, "lora_path": str(folder)}


def test_a_folder_that_is_no_adapter_yet_is_404_as_in_vllm(tmp_path: Path) -> None:
    """A shared folder may lag: prime-rl's client asks again then. What isn't there is named."""
    root = tmp_path / "root"
    half = fake_adapter(root / "half", "x")
    (half / WEIGHTS_FILE).unlink()

    async def scenario(front: Front) -> None:
        for folder in (root / "none", half, root / ("a" * 300)):
            assert str(folder) in message(await front.post("/v1/load_lora_adapter", adapter(folder)), 404)
        assert "adapter root" in message(await front.post("/v1/load_lora_adapter", adapter(tmp_path)), 400)
        assert "not found" in message(await front.post("/v1/unload_lora_adapter", {"lora_name": "policy"}), 404)
        # What a caller calls things doesn't decide.
        strange = await front.post("/v1/load_lora_adapter", adapter(half, "a not found"))
        assert "use letters" in message(strange, 400)

    on_surface(scenario, engine=FakeEngine(loras=LoraInfo(4)), config=config_for(root))


def test_a_folder_that_is_read_for_too_long_is_504(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another try may help; 400 would say that none does."""
    folder = fake_adapter(tmp_path / "a", "x")
    goes_on = threading.Event()

    def hung(path: Path) -> None:
        with hangs():
            goes_on.wait(60.0)

    monkeypatch.setattr(dynamo_loras, "adapter_sum", hung)

    async def scenario(front: Front) -> None:
        try:
            answer = await front.post("/v1/load_lora_adapter", adapter(folder), x_rlbus_limit_s="0.05")
            assert str(folder) in message(answer, 504)
        finally:
            goes_on.set()

    on_surface(scenario, engine=FakeEngine(loras=LoraInfo(4)), config=config_for(tmp_path))
