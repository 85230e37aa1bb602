"""A stand-in for Dynamo's HTTP: workers with their `/engine/*`, health and metrics, and the discovery of a front end.

It keeps Dynamo's habits: 200 with `{"status": "error"}`, one lock around what changes something, handlers that go on
when the caller hangs up, and a flush that says "ok" whatever came of it.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from safetensors.numpy import save_file

from rlbus.errors import EngineDeadError
from rlbus.schemas import Fault, FaultCode
from rlbus.testing import run
from rlbus.workers.dynamo.engine import DynamoEngine, EngineOptions
from rlbus.workers.dynamo.listing import Listed
from rlbus.workers.dynamo.surface import ROUTES, Began
from rlbus.workers.peer_http import Peer
from rlbus.workers.vllm_server.exchange import CHECKSUMS, HELLO, CallFolder, RankDraft, RankOutcome

NOT_PAUSED = "Worker must be paused via pause_generation() before updating weights."
RL_URL = "http://front:8001"
# Of the one worker that `on_engine` has.
URL = "http://worker:9000"
Check = Callable[[DynamoEngine], Awaitable[None]]


def descriptor(number: int = 1, url: str = "http://worker:9000", **other: Any) -> dict[str, Any]:
    """As Dynamo's front end writes one."""
    return {
        "namespace": "dynamo",
        "component": "backend",
        "endpoint": "rl",
        "instance_id": number,
        "transport": {"nats_tcp": f"dynamo_backend.rl-{number:x}"},
        "request_plane_url": "dyn://dynamo.backend.rl",
        "system_url": url,
        "model": "model",
        "routes": [*ROUTES, "update_weights_from_tensor"],
        "world_size": 1,
        **other,
    }


def answer_of(*workers: Any) -> dict[str, Any]:
    """The whole answer."""
    return {"protocol_version": 1, "namespace": "dynamo", "workers": list(workers)}


def listed(url: str = "http://worker:9000", **other: Any) -> Listed:
    """A worker as discovery has it."""
    values = {"component": "backend", "instance_id": "1", "model": "model", "world_size": 1, **other}
    return Listed(system_url=url, routes=values.pop("routes", frozenset(ROUTES)), **values)


def make_checkpoint(folder: Path) -> Path:
    """A checkpoint of one tensor."""
    import numpy as np

    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"w": np.zeros(2, dtype=np.float32)}, folder / "model.safetensors")
    return folder


@dataclass
class FakeWorker:
    """One worker's process. `calls` are all the calls of its routes, in order."""

    number: int = 1
    world_size: int = 1
    is_paused: bool = False
    label: str | None = None
    # Whether its vLLM has rlbus's transfer backend.
    has_transfer: bool = True
    # Its process: None is gone.
    began_s: float | None = 0.0
    # How long its answer about its health is on the way.
    late_s: float = 0.0
    # What a route answers instead: (status, content).
    broken: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    # Routes that wait for this before they answer.
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    # A keep that caches can't be emptied in.
    flush_fails: bool = False
    is_open: bool = False
    is_torn: bool = False
    # What its ranks say of the draft that they speculate with.
    draft: RankDraft | None = None
    calls: list[tuple[str, Any]] = field(default_factory=list)
    rpcs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    # Its adapters and where they came from; None: it was started without `DYN_LORA_ENABLED`.
    loras: dict[str, str] | None = None
    # Adapters with requests, which end when this is set.
    lora_requests: dict[str, asyncio.Event] = field(default_factory=dict)
    # Handlers that run.
    tasks: set["asyncio.Task[dict[str, Any]]"] = field(default_factory=set)

    @property
    def routes(self) -> list[str]:
        """The names of the calls that were made."""
        return [route for route, _ in self.calls]

    async def engine(self, route: str, body: Any) -> tuple[int, bytes]:
        """`POST /engine/<route>`."""
        self.calls.append((route, body))
        if route in self.broken:
            return self.broken[route]
        handler: Callable[[Any], Any] | None = getattr(self, f"_{route}", None)
        if route not in ROUTES or handler is None:
            return 404, b'{"error":"Route not found","message":"Route /engine/x not found"}'
        if not isinstance(body, dict):
            return 200, b'{"status":"error","message":"request body must be a JSON object"}'
        task = asyncio.get_running_loop().create_task(self._run(route, handler, body))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return 200, json.dumps(await asyncio.shield(task)).encode()

    async def _run(self, route: str, handler: Callable[[Any], Any], body: dict[str, Any]) -> dict[str, Any]:
        if route in ("liveness_probe", "get_weight_version", "set_weight_version", "abort_request"):
            return self._ok(handler(body))
        if route == "unload_lora":
            return self._ok(await self._unload(body["lora_name"]))
        async with self.lock:
            if route in self.held:
                await self.held[route].wait()
            return self._ok(handler(body))

    def _ok(self, said: Any) -> dict[str, Any]:
        return {"status": "error", "message": said} if isinstance(said, str) else {"status": "ok", **(said or {})}

    def _liveness_probe(self, body: Any) -> dict[str, Any]:
        return {"alive": True}

    def _pause_generation(self, body: Any) -> str | None:
        if body["mode"] not in ("keep", "wait", "abort"):
            return "Invalid mode"
        if body["mode"] == "keep" and self.lora_requests:
            return f"Cannot pause generation in keep mode with active LoRA requests: {', '.join(self.lora_requests)}"
        self.is_paused = True
        return "Failed to reset the KV connector cache." if body["clear_cache"] and self.flush_fails else None

    def _resume_generation(self, body: Any) -> None:
        self.is_paused = False

    def _flush_cache(self, body: Any) -> None:
        return None

    def _abort_request(self, body: Any) -> dict[str, Any]:
        return {"request_id": body["request_id"]}

    def _get_weight_version(self, body: Any) -> dict[str, Any]:
        return {"version": self.label, "version_declared": self.label is not None}

    def _set_weight_version(self, body: Any) -> None:
        self.label = body["weight_version"]

    def _update_weights_from_disk(self, body: Any) -> str | None:
        if not self.is_paused:
            return NOT_PAUSED
        if not body.get("model_path"):
            return "Missing 'model_path' in body"
        return self._rpc("reload_weights", {"weights_path": body["model_path"]})

    def _update_weights_from_distributed(self, body: Any) -> str | None:
        if not self.is_paused:
            return NOT_PAUSED
        kwargs = {k: v for k, v in body.items() if k not in ("engine_rpc", "reset_prefix_cache")}
        return self._rpc(body["engine_rpc"], kwargs)

    def _init_weights_update_group(self, body: Any) -> str | None:
        return self._rpc(body["engine_rpc"], {k: v for k, v in body.items() if k != "engine_rpc"})

    def _destroy_weights_update_group(self, body: Any) -> None:
        return None

    def _load_lora(self, body: Any) -> dict[str, Any] | str:
        assert self.loras is not None
        path = body["source"]["uri"].removeprefix("file://")
        if not Path(path).is_dir():
            return f"Failed to download LoRA: LoRA path does not exist: {path}"
        self.loras.setdefault(body["lora_name"], path)
        return {"status": "success", "lora_name": body["lora_name"], "lora_id": 7, "hot_swap": False}

    def _unload_lora(self, body: Any) -> None:
        return None  # see `_unload`

    async def _unload(self, name: str) -> str | None:
        assert self.loras is not None
        if name not in self.loras:
            return f"LoRA adapter '{name}' not found. Available LoRAs: {list(self.loras)}"
        if name in self.lora_requests:
            if self.is_paused:
                return f"Cannot unload LoRA '{name}' while generation is paused with active requests; resume"
            await self.lora_requests[name].wait()
        del self.loras[name]
        return None

    def _rpc(self, method: str, kwargs: dict[str, Any]) -> str | None:
        """What vLLM's workers do with it."""
        self.rpcs.append((method, kwargs))
        if method == "reload_weights":
            return None
        if not self.has_transfer:
            return "Weight transfer not configured."
        match method:
            case "init_weight_transfer_engine":
                self._init(kwargs["init_info"])
            case "start_weight_update":
                if self.is_open:
                    return "start_weight_update called while a weight update is already active."
                self.is_open = True
            case "finish_weight_update":
                self.is_open = False
        return None

    def _init(self, info: dict[str, Any]) -> None:
        folder = CallFolder(info["folder"])
        ranks = range(self.world_size)
        if info.get("ask") == HELLO:
            for rank in ranks:
                folder.end(
                    HELLO, rank, RankOutcome(is_open=self.is_open, weights_touched=self.is_torn, draft=self.draft)
                )
        elif info.get("ask") == CHECKSUMS:
            for rank in ranks:
                folder.end(CHECKSUMS, rank, RankOutcome(digests={f"tp{rank}:w": "ab" * 32}))

    def health(self) -> dict[str, Any]:
        """`GET /health`."""
        assert self.began_s is not None
        uptime_s = asyncio.get_running_loop().time() - self.began_s
        return {"status": "ready", "uptime": {"secs": int(uptime_s), "nanos": int(uptime_s % 1 * 1e9)}}

    def metrics(self) -> str:
        """`GET /metrics`."""
        labels = f'dynamo_component="backend",dynamo_namespace="dynamo",model="model",worker_id="{self.number:x}"'
        return f'# HELP x y\n# TYPE x gauge\nup 1\nx{{{labels},le="0.5"}} 0\n'


class FakeDynamo(httpx.AsyncBaseTransport):
    """All of Dynamo's HTTP, by the host and port of the URL. `listing` is the answer of its discovery."""

    def __init__(self, workers: dict[str, FakeWorker] | None = None, listing: Any = None) -> None:
        self.workers = {} if workers is None else workers
        self.listing = answer_of() if listing is None else listing
        # The front end is gone.
        self.is_deaf = False
        self.num_listed = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer. Raises: EngineDeadError where the connection would be refused."""
        path, base = request.url.path, f"{request.url.scheme}://{request.url.netloc.decode()}"
        if base == RL_URL and not self.is_deaf:
            self.num_listed += 1
            return httpx.Response(200, content=json.dumps(self.listing))
        worker = self.workers.get(base)
        if worker is None or worker.began_s is None:
            # What `PeerClient` makes of a refused connection, which it looks for on the network itself.
            raise EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=f"nobody listens at {base}"))
        if path == "/health":
            health = worker.health()
            await asyncio.sleep(worker.late_s)
            return httpx.Response(200, json=health)
        if path == "/metrics":
            return httpx.Response(200, text=worker.metrics())
        if path == "/v1/loras" and request.method == "GET":
            ids = None if worker.loras is None else dict.fromkeys(worker.loras, 7)
            said = {"status": "success", "loras": ids, "count": len(ids or ())}
            return httpx.Response(404) if ids is None else httpx.Response(200, json=said)
        body = json.loads(await request.aread() or b"{}")
        status, content = await worker.engine(path.removeprefix("/engine/"), body)
        return httpx.Response(status, content=content)


def on_engine(
    worker: FakeWorker,
    tmp_path: Path,
    check: Check,
    who: Listed | None = None,
    outlived: Began | None = None,
    **options: Any,
) -> None:
    """Run a check on a started engine; nothing of it stays on the disk."""
    model, run_dir = tmp_path / "model", tmp_path / "run"
    if not model.exists():
        make_checkpoint(model)
    run_dir.mkdir(exist_ok=True)

    async def main() -> None:
        engine = DynamoEngine(
            listed() if who is None else who,
            Peer.of(URL),
            EngineOptions(**{"model_dir": model, "run_dir": str(run_dir), **options}),
            outlived=outlived,
            transport=FakeDynamo({URL: worker}),
        )
        try:
            await engine.start()
            await check(engine)
        finally:
            await engine.aclose()

    run(main())
    assert list(run_dir.iterdir()) == []
