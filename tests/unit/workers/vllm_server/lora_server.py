"""The plugin's routes for adapters on a stand-in of a vLLM server, for a client in memory."""

from types import SimpleNamespace
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.routing import Route

from rlbus.workers.vllm_server.lora_routes import LoraRoutes
from tests.unit.workers.vllm_server.fake_loras import LoraLLM, models_of

BOOT_ID = "b1"


class LoraServer:
    """One server with `--enable-lora --max-loras 3 --max-cpu-loras 2`, on a CPU."""

    def __init__(self, *, keys: tuple[str, ...] = (), worker: str | None = None, dev_mode: str = "1") -> None:
        self.llm = LoraLLM(world_size=1)
        self.models = models_of(self.llm)
        self.routes = LoraRoutes(BOOT_ID, lambda: keys)
        self.app = Starlette()
        self.app.state.openai_serving_models = self.models
        self.routes.attach(SimpleNamespace(add_api_route=self._add), {"VLLM_SERVER_DEV_MODE": dev_mode})
        self.routes.serve(self.llm, worker)

    def _add(self, path: str, endpoint: Any, *, methods: list[str], include_in_schema: bool) -> None:
        """As FastAPI's."""
        assert not include_in_schema
        self.app.router.routes.append(Route(path, endpoint, methods=methods))

    @property
    def transport(self) -> httpx.ASGITransport:
        """For a client."""
        return httpx.ASGITransport(self.app)
