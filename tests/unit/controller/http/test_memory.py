"""vLLM's sleep and wake over HTTP, on a whole fleet."""

import httpx
import pytest

from rlbus.workers.engines.fake_script import failing
from tests.unit.controller.http.side import code_of, over_http
from tests.unit.controller.scene import Scene, worker

pytestmark = pytest.mark.unit


def test_a_fleet_sleeps_and_wakes_part_by_part() -> None:
    """Golden: vLLM's bodies; a partial wake leaves it sleeping."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        assert (await client.get("/is_sleeping")).content == b'{"is_sleeping":false}'
        assert (await client.post("/sleep?level=1")).content == b'{"status":"sleeping","level":1}'
        assert (await client.get("/is_sleeping")).content == b'{"is_sleeping":true}'
        assert (await client.get("/v1/models")).json()["data"] == []  # nobody may be sent rollouts
        part = await client.post("/wake_up?tags=weights")
        assert part.content == b'{"status":"sleeping","tags":["weights"]}'
        assert (await client.post("/wake_up")).content == b'{"status":"awake","tags":null}'
        assert (await client.get("/is_sleeping")).content == b'{"is_sleeping":false}'

    over_http([worker(1), worker(2)], check)


def test_a_sleep_that_fails_on_one_is_undone_on_the_others() -> None:
    """As over the bus."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        status, message = code_of(await client.post("/sleep"))
        assert status == 500
        assert "backend/2" in message
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}

    over_http([worker(1), worker(2, {"sleep": {1: failing()}})], check)


def test_engines_without_it_are_named() -> None:
    """vLLM on a CPU has none."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        status, message = code_of(await client.post("/sleep"))
        assert status == 501
        assert "backend/1" in message

    routes = frozenset({"pause_generation", "resume_generation"})
    over_http([worker(1, routes=routes)], check)


@pytest.mark.parametrize(
    ("target", "status", "part"),
    [
        ("/sleep?level=0", 400, "level"),
        ("/sleep?level=x", 400, "level"),
        ("/sleep?mode=now", 400, "keep, wait or abort"),
        ("/sleep?tags=weights", 400, "'tags'"),
        ("/wake_up?tags=everything", 400, "everything"),
        ("/wake_up?level=1", 400, "'level'"),
    ],
)
def test_a_wrong_request_is_named_and_nobody_sleeps(target: str, status: int, part: str) -> None:
    """Unknown names and words."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        found, message = code_of(await client.post(target))
        assert found == status
        assert part in message
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}

    over_http([worker(1)], check)
