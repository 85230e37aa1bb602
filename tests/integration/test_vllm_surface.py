"""Dynamo's surface inside a real vLLM server: it steers the engine that the server serves."""

import asyncio
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus import subjects
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.schemas import Announcement, WorkerMessage
from rlbus.server import EmbeddedServer
from rlbus.workers.system.vllm import vllm_endpoints
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.vllm_server.guards import GUARDED_PATHS

# A start takes 25 s on 2 cores, and 80 s when others use them, too.
LIMIT_S = 240.0
TOKEN = "right"
# Routes of vLLM 0.32 by other methods than GET that neither generate nor change the engine, with all that can be
# switched on.
LEFT_TO_VLLM = {
    "/tokenize",
    "/detokenize",
    "/ping",
    "/is_scaling_elastic_ep",
    "/v1/messages/count_tokens",
    "/v1/responses/{response_id}/cancel",
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions/render",
    "/v1/completions/derender",
    "/v1/messages/render",
    "/v1/responses/render",
}
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--kv-cache-memory-bytes", str(32 << 20))
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_an_orchestrator_of_dynamos_steers_a_real_vllm(tmp_path: Path) -> None:
    """Pause, load, name, resume; a rollout waits meanwhile; nobody without the token."""
    model = make_tiny_model(tmp_path / "model", seed=1)
    other = make_tiny_model(tmp_path / "step_7", seed=2)

    async def main() -> None:
        async with EmbeddedServer() as server, await connect_bus(BusConfig(url=server.url), name="test") as bus:
            heard: list[Announcement] = []
            subject = subjects.worker("default", "backend", "7")
            bus.subscribe(subject, WorkerMessage, lambda m, _: heard.append(m) if isinstance(m, Announcement) else None)
            env = {k: v for k, v in os.environ.items() if not k.startswith("RLBUS_")}
            env |= {"RLBUS_URL": server.url, "XDG_STATE_HOME": str(tmp_path / "state"), "CUDA_VISIBLE_DEVICES": ""}
            env |= {"RLBUS_SYSTEM_TOKEN": TOKEN, "RLBUS_WEIGHT_ROOTS": str(tmp_path)}
            # With all of vLLM's own routes.
            env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
            command = ["worker", "vllm", str(model), "--small", "--instance-id", "7", *OPTIONS, "--enable-scale-out"]
            with (tmp_path / "log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "rlbus", *command, env=env, stdout=log, stderr=log
                )
                try:
                    async with asyncio.timeout(LIMIT_S):
                        while not heard:  # noqa: ASYNC110 - another process has no Event
                            await asyncio.sleep(0.05)
                    url = heard[-1].descriptor.system_url
                    assert url is not None
                    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
                        await steer(client)
                finally:
                    process.terminate()
                    await asyncio.wait_for(process.wait(), 60.0)

    async def steer(client: httpx.AsyncClient) -> None:
        assert (await client.post("/engine/pause_generation", json={})).status_code == 401
        client.headers["authorization"] = f"Bearer {TOKEN}"
        schema = (await client.get("/openapi.json")).json()
        theirs = {(verb.upper(), path) for path, verbs in schema["paths"].items() for verb in verbs if verb != "get"}
        opened = {("POST", "/pause"), ("DELETE", "/adapters/{adapter_name}"), ("POST", "/inference/v1/abort_requests")}
        assert opened <= theirs
        left = theirs - {(e.method, e.path) for e in vllm_endpoints()}
        assert left <= {("POST", path) for path in GUARDED_PATHS | LEFT_TO_VLLM}
        assert (await client.post("/adapters", json={"name": "a", "src": "/etc"})).status_code == 501
        assert (await client.delete("/adapters/a")).status_code == 501
        before = await tokens(client)
        await ok(client, "liveness_probe")
        await ok(client, "pause_generation", {"mode": "keep"})
        waiting = asyncio.create_task(tokens(client))
        body = {"engine_rpc": "update_weights_from_path", "weight_dir": str(other), "weight_version": "v7"}
        await ok(client, "update_weights_from_distributed", body)
        assert not waiting.done()
        await ok(client, "resume_generation")
        after = await waiting
        assert after != before
        assert await tokens(client) == after
        assert (await ok(client, "get_weight_version"))["version"] == "v7"
        await ok(client, "set_weight_version", {"weight_version": "step-7"})
        status = (await client.get("/rlbus/status")).json()["status"]
        assert (status["weights"]["version"], status["drift"]) == ([0, 7], None)
        outside = await client.post("/engine/update_weights_from_disk", json={"model_path": "/etc"})
        assert outside.json()["status"] == "error"

    asyncio.run(main())


async def ok(client: httpx.AsyncClient, route: str, body: Any = None) -> dict[str, Any]:
    """A call that goes well."""
    given: dict[str, Any] = {} if body is None else {"json": body}
    answer = await client.post(f"/engine/{route}", **given)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["status"] == "ok", found
    return found


async def tokens(client: httpx.AsyncClient) -> list[int]:
    """A greedy rollout."""
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found
