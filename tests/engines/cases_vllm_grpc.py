"""The gRPC sidecar in the contract suite: a real `vllm-rs` server with its engine, tiny random weights."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from rlbus.workers.engines.contract import EngineCase, Generated
from tests.engines.cases_vllm import LIMIT_S, OpenedVllm
from tests.peers import vllm_rs
from tests.peers.programs import Programs, free_port

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlbus.workers.engines.base import Engine

# Long enough that a request still runs when a machine under load comes to abort it.
MAX_TOKENS = 2048
# A stream of tokens may be silent while the engine is paused, but not longer than a test.
_SILENCE_S = 180.0


class OpenedGrpc(OpenedVllm):
    """Requests go through the server's OpenAI routes, whose ids are those of `abort`."""

    def __init__(self, url: str, model: str, engine: "Engine", plane: Any, weights: "Mapping[str, Any]") -> None:
        super().__init__(None, engine, plane, weights)
        self._http = httpx.AsyncClient(base_url=url, timeout=_SILENCE_S, trust_env=False)
        self._model = model

    async def generate(
        self, prompt: tuple[int, ...], num_tokens: int, request_id: str, on_token: Callable[[], None] | None = None
    ) -> Generated:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        tokens: list[int] = []
        finish = ""
        headers = {"X-Request-Id": request_id}
        async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    new = choice.get("token_ids") or []
                    finish = choice.get("finish_reason") or finish
                    tokens += new
                    for _ in new:
                        if on_token is not None:
                            on_token()
        return Generated(tuple(tokens), finish)

    async def aclose(self) -> None:
        """Drop the requests' connections."""
        await self._http.aclose()


@asynccontextmanager
async def serving(folder: Path, model: Path, *options: str) -> AsyncIterator[tuple[str, str]]:
    """A vllm-rs server with rlbus's transfer: the URLs of its OpenAI routes, and of its gRPC service."""
    http_port, grpc_port = free_port(), free_port()
    programs = Programs(folder)
    try:
        transfer = ("--weight-transfer-config", json.dumps({"backend": "gloo"}))
        server = programs.start_vllm_rs(model, http_port, grpc_port, *transfer, *options, max_model_len=MAX_TOKENS)
        await asyncio.to_thread(server.until_answers, f"http://127.0.0.1:{http_port}/health")
        yield f"http://127.0.0.1:{http_port}", f"http://127.0.0.1:{grpc_port}"
    finally:
        programs.close()


def missing() -> str | None:
    """What isn't here."""
    return None if vllm_rs.is_there() else "vllm-rs, which `make test-peers` fetches"


@asynccontextmanager
async def _open(folder: Path) -> AsyncIterator[OpenedGrpc]:
    from safetensors.torch import load_file

    from rlbus.transfer.torch_plane import TorchPlane
    from rlbus.workers.peer_http import Peer
    from rlbus.workers.torch_lm.make import make_tiny_model
    from rlbus.workers.vllm_grpc.control import Control
    from rlbus.workers.vllm_grpc.engine import VllmGrpcEngine

    model = make_tiny_model(folder / "model", vocab_size=512, max_positions=MAX_TOKENS)
    async with contextlib.AsyncExitStack() as stack:
        url, grpc_url = await stack.enter_async_context(serving(folder, model))
        plane = TorchPlane("gloo")
        stack.push_async_callback(plane.aclose)
        engine = VllmGrpcEngine(Control(Peer.of(grpc_url)), completions_url=url, run_dir=str(folder))
        stack.push_async_callback(engine.aclose)
        await engine.start()
        opened = OpenedGrpc(url, str(model), engine, plane, load_file(model / "model.safetensors"))
        stack.push_async_callback(opened.aclose)
        yield opened


CASE = EngineCase(
    name="vllm_grpc",
    open=_open,
    requires=("vllm", "grpc"),
    is_peer=True,
    missing=missing,
    long_tokens=1000,
    limit_s=LIMIT_S,
    settle_s=0.2,
    open_s=300.0,
    counts_requests=False,
)
