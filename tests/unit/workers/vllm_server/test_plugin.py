"""The endpoint plugin: its agent lives in the application's life span."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from rlbus.testing import run
from rlbus.workers.vllm_server import plugin as plugin_module
from rlbus.workers.vllm_server.about import ABOUT
from rlbus.workers.vllm_server.lora_routes import LIST
from rlbus.workers.vllm_server.plugin import EndpointPlugin

pytestmark = pytest.mark.unit


class Recorder:
    """Stands for an attachment, and notes what happens in which order."""

    who = "backend/7"

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, _app: object) -> None:
        self.events.append("start")

    async def aclose(self) -> None:
        self.events.append("stop")


def application(events: list[str]) -> Any:
    """An application with a life span of its own."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: object) -> AsyncIterator[dict[str, int]]:
        events.append("up")
        yield {"state": 1}
        events.append("down")

    def add_middleware(_cls: object, *, guards: object) -> None:
        events.append("guarded")

    return SimpleNamespace(router=SimpleNamespace(lifespan_context=lifespan), add_middleware=add_middleware)


def live(recorder: Recorder, *, is_attached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build an application with the plugin, as vLLM does, and run its life span."""
    found = SimpleNamespace(from_env=lambda *_, guards: recorder if is_attached else None)
    monkeypatch.setattr(plugin_module, "Attachment", found)

    async def main() -> None:
        app = application(recorder.events)
        plugin = EndpointPlugin()
        plugin.attach_router(app)
        await plugin.init_state(object(), object(), SimpleNamespace(api_key=None))
        async with app.router.lifespan_context(app) as state:
            assert state == {"state": 1}
            await asyncio.sleep(0)
            recorder.events.append("serving")

    run(main())


def test_agent_lives_inside_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts after vLLM's own start, and ends before vLLM's own end."""
    recorder = Recorder()
    live(recorder, is_attached=True, monkeypatch=monkeypatch)
    assert recorder.events == ["guarded", "up", "start", "serving", "stop", "down"]


def test_server_without_an_agent_lives_as_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second API server, or one without RLBUS_URL."""
    recorder = Recorder()
    live(recorder, is_attached=False, monkeypatch=monkeypatch)
    assert recorder.events == ["guarded", "up", "serving", "down"]


@pytest.mark.parametrize(
    ("api_key", "sent", "status"),
    [
        (None, None, 401),
        (None, "Bearer wrong", 401),
        (None, "Bearer right", 200),
        (["key"], "Bearer right", 200),
        (["key"], "Bearer key", 200),
    ],
)
def test_rlbus_token_guards_its_own_routes_also_without_a_key_of_the_servers(
    api_key: list[str] | None, sent: str | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SCENARIOS 43: whoever set it wants nobody to see whose requests run here, or to load an adapter."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("RLBUS_SYSTEM_TOKEN", "right")
    monkeypatch.setattr(plugin_module, "Attachment", SimpleNamespace(from_env=lambda *_, guards: None))
    routes: dict[str, Any] = {}

    async def main() -> None:
        app = application([])
        app.add_api_route = lambda path, endpoint, **_: routes.update({path: endpoint})
        plugin = EndpointPlugin()
        plugin.attach_router(app)
        await plugin.init_state(None, object(), SimpleNamespace(api_key=api_key))
        headers = [] if sent is None else [(b"authorization", sent.encode())]
        for path in (ABOUT, LIST):
            request = Request({"type": "http", "headers": headers, "path": path})
            is_refused = (await routes[path](request)).status_code == 401
            assert is_refused == (status == 401)
        assert (await routes[ABOUT](request)).status_code == status

    run(main())


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.endpoint_plugins"])
def test_both_entry_points_are_named_as_vllm_plugins_selects_them(group: str) -> None:
    """One name switches both on."""
    (found,) = [e for e in entry_points(group=group) if e.name == "rlbus"]
    assert found.load().__module__ == plugin_module.__name__


def test_endpoint_plugin_logs_where_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sets up its own logger only."""
    ours = logging.getLogger("rlbus")
    monkeypatch.setattr(ours, "parent", ours.parent)
    plugin = plugin_module.endpoint_plugin()
    assert (plugin.name, plugin.required_tasks) == ("rlbus", ("generate",))
    assert ours.parent is logging.getLogger("vllm")
