"""Requests that meet the end of an op: of one that is taken back, or of the process."""

import asyncio

import httpx
import pytest

from rlbus.controller.http.app import ControllerHttp
from rlbus.controller.http.shared import GRACE_S
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller.http.side import code_of, over_http
from tests.unit.controller.scene import Scene, worker

pytestmark = pytest.mark.unit


def test_a_retry_that_meets_an_op_being_taken_back_is_told_to_come_later() -> None:
    """Not that the server failed: an orchestrator would take the op for failed. Later it succeeds."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await client.post("/pause")
        statuses: list[int] = []
        await asyncio.sleep(GRACE_S)
        for _ in range(100):
            answer = await client.post("/pause")
            statuses.append(answer.status_code)
            if answer.status_code == 200:
                break
            assert answer.headers["retry-after"] == "1"
            await asyncio.sleep(1)
        assert set(statuses[:-1]) == {503}
        assert statuses[-1] == 200

    over_http([worker(1, {"pause": {1: Step(latency_s=20.0)}})], check)


def test_requests_that_are_in_flight_when_the_side_closes_may_come_later() -> None:
    """Their ops are taken back, and another process may serve the same soon."""

    async def check(_: httpx.AsyncClient, scene: Scene) -> None:
        side = ControllerHttp(scene.fleet.client.bus, "test")
        transport = httpx.ASGITransport(side.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            pausing = asyncio.ensure_future(client.post("/pause"))
            await asyncio.sleep(1)
            await side.aclose()
            answer = await pausing
        assert code_of(answer)[0] == 503
        assert "taken back" in code_of(answer)[1]

    over_http([worker(1, {"pause": {1: Step(latency_s=20.0)}})], check)
