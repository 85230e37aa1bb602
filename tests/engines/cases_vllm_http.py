"""A real vLLM server in the contract suite, driven from outside over its HTTP routes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from rlbus.workers.engines.contract import EngineCase, Generated
from tests.engines.cases_vllm import LIMIT_S
from tests.engines.cases_vllm import OpenedVllm as _Weighted
from tests.peers.programs import Programs, free_port

API_KEY = "contract-key"
MAX_TOKENS = 2048


class OpenedHttp(_Weighted):
    """A server behind its sidecar."""

    def __init__(self, http: httpx.AsyncClient, engine: Any, plane: Any, weights: Any, folder: Path) -> None:
        super().__init__(None, engine, plane, weights, folder=folder)
        self._http = http

    async def generate(
        self, prompt: tuple[int, ...], num_tokens: int, request_id: str, on_token: Callable[[], None] | None = None
    ) -> Generated:
        return await self.generate_as(self.engine.info.model, prompt, num_tokens, request_id, on_token)

    async def generate_as(
        self,
        model: str,
        prompt: tuple[int, ...],
        num_tokens: int,
        request_id: str,
        on_token: Callable[[], None] | None = None,
    ) -> Generated:
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        tokens: list[int] = []
        finish = ""
        url = f"{self.engine.info.completions_url}/v1/completions"
        async with self._http.stream("POST", url, json=body, headers={"X-Request-Id": request_id}) as response:
            if response.status_code == httpx.codes.NOT_FOUND:
                raise LookupError(model)
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                (choice,) = json.loads(data)["choices"]
                for token in choice["token_ids"] or ():
                    tokens.append(token)
                    if on_token is not None:
                        on_token()
                finish = choice["finish_reason"] or finish
        return Generated(tuple(tokens), finish)


@asynccontextmanager
async def serving(folder: Path, model: Path, *options: str) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A vLLM server of its own process, with rlbus's transfer: a client with its key, and its URL."""
    programs, port = Programs(folder), free_port()
    transfer = ("--weight-transfer-config", '{"backend": "gloo"}', "--api-key", API_KEY)
    try:
        server = programs.start_vllm(model, port, *transfer, *options, "--max-model-len", str(MAX_TOKENS))
        await asyncio.to_thread(server.until_answers, f"http://127.0.0.1:{port}/health")
        headers = {"Authorization": f"Bearer {API_KEY}"}
        async with httpx.AsyncClient(headers=headers, timeout=120.0, trust_env=False) as http:
            yield http, f"http://127.0.0.1:{port}"
    finally:
        programs.close()


@asynccontextmanager
async def _open(folder: Path) -> AsyncIterator[OpenedHttp]:
    from safetensors.torch import load_file

    from rlbus.transfer.torch_plane import TorchPlane
    from rlbus.workers.peer_http import Peer
    from rlbus.workers.torch_lm.make import make_tiny_model
    from rlbus.workers.vllm_http.engine import VllmHttpEngine

    model = make_tiny_model(folder / "model", vocab_size=512, max_positions=MAX_TOKENS)
    loras = ("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "4", "--max-lora-rank", "8")
    plane = TorchPlane("gloo")
    async with serving(folder, model, *loras) as (http, url):
        engine = VllmHttpEngine(Peer.of(url, api_key=API_KEY), run_dir=str(folder))
        try:
            await engine.start()
            yield OpenedHttp(http, engine, plane, load_file(model / "model.safetensors"), folder)
        finally:
            await engine.aclose()
            await plane.aclose()


CASE = EngineCase(
    name="vllm_http", open=_open, requires=("vllm",), long_tokens=1200, settle_s=0.2, open_s=300.0, limit_s=LIMIT_S
)
