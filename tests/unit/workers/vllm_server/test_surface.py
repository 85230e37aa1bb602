"""rlbus' HTTP surface inside vLLM's application: where it is, what it replaces, who may use it."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from rlbus.errors import ConfigError
from rlbus.testing import run
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.testing import worker_on_bus
from rlbus.workers.vllm_server.surface import is_wanted, mount, token_of

pytestmark = pytest.mark.unit


def args(**given: Any) -> Any:
    """vLLM's options that are looked at."""
    return SimpleNamespace(**{"host": "127.0.0.1", "uds": None, "api_key": None, **given})


def application() -> Starlette:
    """What vLLM has built: routes of its own, some at our paths."""

    async def theirs(request: Request) -> PlainTextResponse:
        return PlainTextResponse("vllm")

    return Starlette(routes=[Route("/health", theirs), Route("/engine/{x}", theirs, methods=["POST"])])


def ask(app: Starlette, path: str, provider: Any = None, **headers: str) -> httpx.Response:
    """One POST to /engine, or GET to anything else."""

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            method = "POST" if path.startswith("/engine") else "GET"
            return await client.request(method, path, headers=headers)

    return run(main())


def test_our_routes_come_before_vllms_and_leave_its_others_alone() -> None:
    """Whoever asks for a verb gets it under the agent's rules; /health stays vLLM's."""

    async def main() -> None:
        app = application()
        async with worker_on_bus(FakeEngine()) as rig:
            assert mount(app, args(), None, 1, lambda: rig.agent)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
                assert (await client.post("/engine/pause_generation")).json()["status"] == "ok"
                assert (await client.get("/health")).text == "vllm"
                assert (await client.get("/rlbus/health")).json()["status"] == "ready"

    run(main())


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/adapters"), ("DELETE", "/adapters/policy"), ("POST", "/inference/v1/abort_requests")],
)
def test_vllms_side_doors_to_adapters_and_aborts_are_closed(method: str, path: str) -> None:
    """With VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-scale-out it has them, and past the agent's rules."""

    async def theirs(_: Request) -> PlainTextResponse:
        return PlainTextResponse("vllm")

    async def main() -> int:
        app = Starlette(routes=[Route(path, theirs, methods=[method])])
        assert mount(app, args(), "right", 1, lambda: None)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            return (await client.request(method, path)).status_code

    assert run(main()) == 401


def test_before_the_worker_is_on_the_bus_it_says_so() -> None:
    """503, in the surface's shape; vLLM serves meanwhile."""
    app = application()
    assert mount(app, args(), None, 1, lambda: None)
    answer = ask(app, "/engine/pause_generation")
    assert (answer.status_code, answer.json()["error"]) == (503, "Not ready")


@pytest.mark.parametrize("host", [None, "", "0.0.0.0", "::", "10.0.0.1"])
def test_a_server_that_others_reach_has_a_surface_only_with_a_token(host: str | None) -> None:
    """SCENARIOS 43: vLLM listens everywhere unless told otherwise."""
    app = application()
    assert not mount(app, args(host=host), None, 1, lambda: None)
    assert ask(app, "/engine/x").text == "vllm"
    assert mount(app, args(host=host), "right", 1, lambda: None)
    assert ask(app, "/engine/x").status_code == 401
    assert ask(app, "/engine/x", authorization="Bearer right").status_code == 503


@pytest.mark.parametrize("keys", ["key", ["key", "other"]])
def test_the_servers_own_api_keys_will_do(keys: Any) -> None:
    """Clients of vLLM send them anyway."""
    app = application()
    assert mount(app, args(host=None, api_key=keys), "right", 1, lambda: None)
    for token in ("key", "right"):
        assert ask(app, "/engine/x", authorization=f"Bearer {token}").status_code == 503
    assert ask(app, "/engine/x", authorization="Bearer wrong").status_code == 401


def test_the_key_of_vllms_variable_will_do_and_its_option_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM itself: a server that is closed to others is no open one to us."""
    monkeypatch.setenv("VLLM_API_KEY", "from-env")
    app = application()
    assert mount(app, args(host=None), None, 1, lambda: None)
    assert ask(app, "/engine/x").status_code == 401
    assert ask(app, "/engine/x", authorization="Bearer from-env").status_code == 503
    app = application()
    assert mount(app, args(host=None, api_key=["option"]), None, 1, lambda: None)
    assert ask(app, "/engine/x", authorization="Bearer from-env").status_code == 401
    assert ask(app, "/engine/x", authorization="Bearer option").status_code == 503


def test_several_servers_on_one_port_have_none() -> None:
    """SCENARIOS 50: a pause would reach one of them by chance."""
    app = application()
    assert not mount(app, args(), "right", 2, lambda: None)
    assert ask(app, "/engine/x").text == "vllm"


def test_it_can_be_left_out_and_has_no_port_of_its_own() -> None:
    """By the same variables as elsewhere."""
    assert is_wanted({})
    assert is_wanted({"RLBUS_SYSTEM_PORT": "0"})
    assert not is_wanted({"RLBUS_SYSTEM_PORT": "-1"})
    with pytest.raises(ConfigError, match="vLLM's port"):
        is_wanted({"RLBUS_SYSTEM_PORT": "9000"})
    assert token_of({"RLBUS_SYSTEM_TOKEN": "t"}) == "t"
    with pytest.raises(ConfigError):
        token_of({"RLBUS_SYSTEM_TOKEN": "a b"})
