"""The controller's HTTP side over a fleet in memory: real agents, fake engines, a real controller, virtual time."""

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from rlbus.bus import Bus
from rlbus.controller.http.app import ControllerHttp
from rlbus.testing import LoopClock, MemoryBroker, sequential_ids
from tests.unit.controller.scene import Scene, Worker, play

Check = Callable[[httpx.AsyncClient, Scene], Coroutine[Any, Any, None]]
ALL_WELL = httpx.MockTransport(lambda _: httpx.Response(200))


@asynccontextmanager
async def http_side(
    broker: MemoryBroker,
    *,
    token: str | None = None,
    probes: httpx.AsyncBaseTransport = ALL_WELL,
    base_url: str = "http://127.0.0.1",
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a side of its own, over a connection of its own."""
    async with Bus(broker.connect(), clock=LoopClock(), new_id=sequential_ids("http")) as bus:
        side = ControllerHttp(bus, "test", token=token, probes=probes)
        transport = httpx.ASGITransport(side.app, raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
                yield client
        finally:
            await side.aclose()


def over_http(workers: Sequence[Worker], check: Check, **options: Any) -> None:
    """Run `check` against a fleet."""

    async def scenario(scene: Scene) -> None:
        async with http_side(scene.fleet.broker, **options) as client:
            await check(client, scene)

    play(workers, scenario)


def code_of(answer: httpx.Response) -> tuple[int, str]:
    """Status and message of an error in vLLM's shape; checks the shape."""
    body = answer.json()
    assert set(body) <= {"error", "rlbus"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == answer.status_code
    return answer.status_code, body["error"]["message"]
