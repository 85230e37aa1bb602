"""Dynamo's surface of a worker with the torch engine: real sockets, a real model, and what it generates."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")

from rlbus.config import BusConfig
from rlbus.server import EmbeddedServer
from rlbus.workers.agent import Agent
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.torch_engine import TorchEngine
from rlbus.workers.run import serve
from rlbus.workers.torch_lm.make import make_tiny_model

pytestmark = pytest.mark.integration

LIMIT_S = 120.0


async def call(client: httpx.AsyncClient, route: str, body: Any = None, status: str = "ok") -> dict[str, Any]:
    """A call, and how it is to go."""
    answer = await client.post(f"/engine/{route}", **({} if body is None else {"json": body}))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["status"] == status, found
    return found


async def tokens(url: str) -> list[int]:
    """A greedy rollout."""
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        answer = await client.post(f"{url}/v1/completions", json=body)
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


async def steer(agent: Agent, folder: Path) -> None:
    """What an orchestrator of Dynamo's does in a step, and what it mustn't."""
    system_url, completions_url = agent.descriptor.system_url, agent.descriptor.completions_url
    assert system_url is not None
    assert completions_url is not None
    async with httpx.AsyncClient(base_url=system_url, timeout=LIMIT_S) as client:
        before = await tokens(completions_url)
        path = str(folder / "step_7")
        await call(client, "update_weights_from_disk", {"model_path": path, "weight_version": 7}, "error")
        await call(client, "pause_generation", {"mode": "keep", "clear_cache": False})
        waiting = asyncio.create_task(tokens(completions_url))
        for bad in ("/etc", str(folder / "nothing"), f"{folder}/../.."):
            await call(client, "update_weights_from_disk", {"model_path": bad, "weight_version": 7}, "error")
        await call(client, "update_weights_from_disk", {"model_path": path, "weight_version": "v7"})
        assert not waiting.done()
        await call(client, "resume_generation")
        after = await waiting
        assert after != before
        assert await tokens(completions_url) == after
        assert (await call(client, "get_weight_version"))["version"] == "v7"
        unpaused = {"weight_dir": str(folder / "model"), "allow_unpaused": True, "reset_prefix_cache": False}
        await call(client, "update_weights_from_distributed", unpaused)
        assert await tokens(completions_url) == before
        await call(client, "set_weight_version", {"weight_version": 9})
        await call(client, "flush_cache", {})
        await call(client, "abort_request", {"request_id": "nobody"})
        status = (await client.get("/status")).json()["status"]
        assert (status["weights"]["version"], status["drift"], status["pause"]) == ([0, 9], None, None)
        metrics = (await client.get("/metrics")).text
        assert "rlbus_worker_weights_step 9" in metrics


def test_a_step_by_http_changes_what_the_model_generates(tmp_path: Path) -> None:
    """Pause, load, name, resume; a rollout waits meanwhile."""
    make_tiny_model(tmp_path / "model", seed=1)
    make_tiny_model(tmp_path / "step_7", seed=2)

    async def main() -> None:
        async with EmbeddedServer(jetstream=False) as server:
            ready: asyncio.Future[Agent] = asyncio.get_running_loop().create_future()
            engine = TorchEngine(tmp_path / "model", num_ranks=1, port=0, roots=(str(tmp_path),))
            config = AgentConfig(weight_roots=(str(tmp_path),))
            running = asyncio.create_task(
                serve(
                    engine,
                    BusConfig(url=server.url),
                    config=config,
                    on_ready=ready.set_result,
                    handle_signals=False,
                )
            )
            either: set[asyncio.Future[Any]] = {running, ready}
            await asyncio.wait(either, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            agent = ready.result()
            try:
                await steer(agent, tmp_path)
            finally:
                agent.stop()
                await asyncio.wait_for(running, LIMIT_S)

    asyncio.run(main())
