"""Discovery, models and health over a fleet, and the token in front of all of it."""

import asyncio

import httpx
import msgspec
import pytest

from rlbus import subjects
from rlbus.controller.http.app import ControllerHttp
from rlbus.schemas import Announcement
from rlbus.testing import MemoryBroker
from rlbus.workers.engines.fake import FakeEngine
from tests.unit.controller.http.side import http_side, over_http
from tests.unit.controller.scene import Scene, w, worker

pytestmark = pytest.mark.unit

ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/rl/workers"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/abort_requests"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/update_weights"),
    ("POST", "/init_broadcaster"),
    ("POST", "/init_weight_transfer_engine"),
    ("POST", "/start_weight_update"),
    ("POST", "/finish_weight_update"),
    ("POST", "/shutdown_weight_transfer_engine"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/load_lora_adapter"),
    ("GET", "/is_paused"),
    ("GET", "/get_world_size"),
    ("GET", "/weight_info"),
]


def test_workers_are_listed_as_dynamo_lists_them() -> None:
    """Live ones, in order, each with the routes of its engine."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        answer = await client.get("/v1/rl/workers")
        assert answer.status_code == 200
        body = answer.json()
        assert (body["protocol_version"], body["namespace"]) == (1, "test")
        assert [(r["instance_id"], r["world_size"]) for r in body["workers"]] == [(2, 1), (10, 2)]
        assert all(r["routes"] == sorted(r["routes"]) and "pause_generation" in r["routes"] for r in body["workers"])
        assert (await client.get("/v1/rl/workers")).content == answer.content

    over_http([worker(10, world_size=2), worker(2)], check)


def test_filters_name_components_and_namespaces() -> None:
    """Repeated or with commas; another namespace has nobody, and the answer says whose it is."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        async def num(query: str) -> int:
            body = (await client.get(f"/v1/rl/workers?{query}")).json()
            assert body["namespace"] == "test"
            return len(body["workers"])

        assert await num("component=backend") == 1
        assert await num("component=x,backend") == 1
        assert await num("component=x&component=y") == 0
        assert await num("namespace=test") == 1
        assert await num("namespace=other") == 0
        assert await num("namespace=other&namespace=test&component=backend") == 1

    over_http([worker(1)], check)


@pytest.mark.parametrize("query", ["components=backend", "component=", "component=a%0Ab", "instance=1"])
def test_a_wrong_filter_is_refused_in_dynamos_shape(query: str) -> None:
    """A typo must not list everybody."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        answer = await client.get(f"/v1/rl/workers?{query}")
        assert answer.status_code == 400
        assert set(answer.json()) == {"error", "message"}
        assert answer.json()["error"] == "discovery_failed"

    over_http([worker(1)], check)


def test_a_worker_that_falls_silent_gets_an_error() -> None:
    """SCENARIOS 16: it isn't left out at once, so that nobody takes the rest for all."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        scene.cut(2)
        await asyncio.sleep(15)
        [one, two] = (await client.get("/v1/rl/workers")).json()["workers"]
        assert "error" not in one
        assert "heartbeat" in two["error"]
        await asyncio.sleep(120)
        [left] = (await client.get("/v1/rl/workers")).json()["workers"]
        assert left["instance_id"] == 1

    over_http([worker(1), worker(2)], check)


def test_one_workers_odd_address_is_an_error_in_its_own_row() -> None:
    """It announces itself, so nobody has checked what it calls its address."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        one = scene.fleet.workers[0].agent
        odd = msgspec.structs.replace(one.descriptor, instance_id="99", system_url="http://xn--gpu_1:8000")
        status = one.status()
        said = Announcement(boot_id="b" * 32, seq=1, interval_s=5.0, descriptor=odd, status=status)
        scene.fleet.client.bus.publish(subjects.worker("test", odd.component, "99"), said)
        await asyncio.sleep(1)
        answer = await client.get("/v1/rl/workers")
        assert answer.status_code == 200
        first, second = answer.json()["workers"]
        assert "error" not in first
        assert (second["instance_id"], second["routes"]) == (99, [])
        assert "xn--gpu_1" in second["error"]

    over_http([worker(1)], check)


def test_models_are_those_of_admitted_workers() -> None:
    """Each once, in OpenAI's shape; who is paused serves nobody."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        body = (await client.get("/v1/models")).json()
        assert set(body) == {"object", "data"}
        [model] = body["data"]
        assert (model["object"], model["owned_by"], body["object"]) == ("model", "rlbus", "list")
        assert model["id"] == scene.fleet.workers[0].agent.descriptor.model
        await client.post("/pause")
        assert (await client.get("/v1/models")).json()["data"] == []

    over_http([worker(1), worker(2)], check)


def test_health_is_that_of_whoever_leads() -> None:
    """The process lives without a leader; bodies say nothing."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        assert [(a.status_code, a.content) for a in (await client.get("/live"), await client.get("/health"))] == [
            (200, b""),
            (200, b""),
        ]
        async with http_side(MemoryBroker(), token="t") as alone:
            assert (await alone.get("/live")).status_code == 200
            assert ((await alone.get("/health")).status_code, (await alone.get("/health")).content) == (503, b"")

    over_http([worker(1)], check)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_the_token(method: str, path: str) -> None:
    """SCENARIOS 43: none, and a wrong one, change nothing; the right one is let in."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            assert (await client.request(method, path, headers=headers)).status_code == 401
        await asyncio.sleep(0.1)
        assert scene.commands == []
        answer = await client.request(method, path, headers={"authorization": "Bearer secret"})
        assert answer.status_code != 401

    over_http([worker(1)], check, token="secret", base_url="http://example.org")


def test_the_routes_above_are_all_routes() -> None:
    """A new one has to be in the list of those that need the token."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        side = ControllerHttp(scene.fleet.client.bus, "test")
        inner = side.app._app  # type: ignore[attr-defined]
        found = {(m, r.path) for r in inner.routes for m in r.methods if m != "HEAD"}
        assert found == {*ROUTES, ("GET", "/live"), ("GET", "/health")}
        await side.aclose()

    over_http([worker(1)], check)


def test_without_a_leader_discovery_fails_as_dynamos_does() -> None:
    """503, since it passes."""

    async def check(_: httpx.AsyncClient, scene: Scene) -> None:
        async with http_side(MemoryBroker()) as alone:
            answer = await alone.get("/v1/rl/workers")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"] == "discovery_failed"
            assert (await alone.get("/v1/models")).status_code == 503

    over_http([worker(1)], check)


def test_a_side_of_its_own_answers_as_the_leader_does() -> None:
    """A controller that stands by has one too, and asks over the bus."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        async with http_side(scene.fleet.broker) as other:
            await other.post("/pause")
            assert (await client.get("/is_paused")).json() == {"is_paused": True}
        assert w(1) in await scene.fleet.members()
        assert isinstance(scene.fleet.workers[0].engine, FakeEngine)

    over_http([worker(1)], check)
