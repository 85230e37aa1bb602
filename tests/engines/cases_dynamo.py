"""A real Dynamo worker in the contract suite, behind a real Dynamo front end; rlbus is installed beside its vLLM."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from rlbus.schemas import lora_id
from rlbus.workers.engines.contract import EngineCase, Generated
from tests.engines.cases_vllm import LIMIT_S, OpenedVllm
from tests.peers import dynamo
from tests.peers.programs import Programs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlbus.workers.engines.base import Engine

# A stream of tokens may be silent while the engine is paused, but not longer than a test.
_SILENCE_S = 180.0
_MAX_LORAS = 3


class _Opened(OpenedVllm):
    """Requests go through the front end, which gives them ids of its own: `engine` knows them by the suite's."""

    def __init__(self, fleet: dynamo.Dynamo, engine: "Engine", plane: Any, weights: "Mapping[str, Any]") -> None:
        self._ids: dict[str, str] = {}
        super().__init__(None, _Renamed(engine, self._ids), plane, weights)
        self._http = httpx.AsyncClient(base_url=fleet.http_url, timeout=_SILENCE_S, trust_env=False)
        self._model = str(fleet.model)

    async def generate(
        self, prompt: tuple[int, ...], num_tokens: int, request_id: str, on_token: Callable[[], None] | None = None
    ) -> Generated:
        return await self._ask(self._model, prompt, num_tokens, request_id, on_token)

    async def save_adapter(self, folder: Path, number: int) -> Path:
        from rlbus.workers.torch_lm.make import make_tiny_adapter

        return make_tiny_adapter(folder, Path(self._model), seed=number)

    async def generate_as(
        self,
        model: str,
        prompt: tuple[int, ...],
        num_tokens: int,
        request_id: str,
        on_token: Callable[[], None] | None = None,
    ) -> Generated:
        await self._until_front_end_knows()
        try:
            return await self._ask(model, prompt, num_tokens, request_id, on_token)
        except httpx.HTTPStatusError as exc:
            # The front end answers 404, or 500 for what the worker refused.
            if model in await self._loras():
                raise
            raise LookupError(model) from exc

    async def _until_front_end_knows(self) -> None:
        """It hears of adapters a moment after they came or went."""
        async with asyncio.timeout(_SILENCE_S):
            while True:
                shown = {model["id"] for model in (await self._http.get("/v1/models")).json()["data"]}
                if shown - {self._model} == await self._loras():
                    return
                await asyncio.sleep(0.1)

    async def _loras(self) -> set[str]:
        listed = await self.engine.list_loras()
        return {one.name if one.revision is None else lora_id(one.name, one.revision) for one in listed}

    async def _ask(
        self,
        model: str,
        prompt: tuple[int, ...],
        num_tokens: int,
        request_id: str,
        on_token: Callable[[], None] | None,
    ) -> Generated:
        body = dynamo.completion_body(model, prompt, num_tokens, stream=True)
        tokens: tuple[int, ...] = ()
        finish = ""
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                self._ids[request_id] = chunk["id"]
                if on_token is not None:
                    on_token()
                for choice in chunk["choices"]:
                    finish = choice.get("finish_reason") or finish
                found = ((chunk.get("nvext") or {}).get("engine_data") or {}).get("completion_token_ids")
                tokens = tokens if found is None else tuple(found)
        # With `ignore_eos` nothing stops by itself: it is Dynamo's word for what was aborted.
        return Generated(tokens, "abort" if finish == "stop" else finish)

    async def aclose(self) -> None:
        """Drop the requests' connections."""
        await self._http.aclose()


class _Renamed:
    """The engine, with the suite's names of requests for those that Dynamo gave them."""

    def __init__(self, engine: "Engine", ids: "Mapping[str, str]") -> None:
        self._engine = engine
        self._ids = ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def abort(self, request_ids: "Sequence[str] | None") -> int | None:
        """By Dynamo's ids."""
        known = None if request_ids is None else [self._ids.get(name, name) for name in request_ids]
        return await self._engine.abort(known)


@asynccontextmanager
async def _open(folder: Path) -> AsyncIterator[_Opened]:
    from safetensors.torch import load_file

    from rlbus.transfer.torch_plane import TorchPlane
    from rlbus.workers.dynamo.engine import DynamoEngine, EngineOptions
    from rlbus.workers.dynamo.listing import parse_answer
    from rlbus.workers.peer_http import Peer

    async with dynamo.dynamo(folder, Programs(folder)) as fleet:
        transfer = ("--weight-transfer-config", json.dumps({"backend": "gloo"}))
        loras = dynamo.lora_options(_MAX_LORAS + 1)  # the last place has to stay empty on a CPU
        worker, url = fleet.start_worker(*transfer, *loras, env=dynamo.LORA_ENV)
        await asyncio.to_thread(fleet.until_listed, worker, url)
        workers: list[Any] = []

        def is_listed() -> bool:
            # A probe misses a busy worker now and then.
            workers[:] = parse_answer({"protocol_version": 1, "workers": fleet.listed()}).workers
            return len(workers) == 1

        await asyncio.to_thread(worker.until, is_listed)
        (listed,) = workers
        plane = TorchPlane("gloo")
        engine = DynamoEngine(listed, Peer.of(url), EngineOptions(run_dir=str(folder), max_loras=_MAX_LORAS))
        try:
            await engine.start()
            opened = _Opened(fleet, engine, plane, load_file(fleet.model / "model.safetensors"))
            yield opened
            await opened.aclose()
        finally:
            await engine.aclose()
            await plane.aclose()


CASE = EngineCase(
    name="dynamo",
    open=_open,
    is_peer=True,
    missing=lambda: None if dynamo.is_there() else "Dynamo, which `make test-peers` fetches",
    long_tokens=1200,
    settle_s=0.3,
    open_s=300.0,
    limit_s=LIMIT_S,
    counts_requests=False,
)
