"""What anybody may ask without a token: it must not cost the leader more than it has to."""

import asyncio

import httpx
import pytest

from rlbus.controller.http.health import FRESH_S, Health
from rlbus.errors import BrokenError
from rlbus.schemas import GetFleet
from rlbus.testing import run
from tests.unit.controller.http.side import over_http
from tests.unit.controller.scene import Scene, worker

pytestmark = pytest.mark.unit


def test_many_who_ask_for_health_cost_the_leader_one_small_question() -> None:
    """Also those of the next second; the question is about one worker at most, however large the fleet."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        asked: list[GetFleet] = []
        scene.spy("dyn.test.controller.status", GetFleet, lambda request, _: asked.append(request))
        for num in (50, 50):
            answers = await asyncio.gather(*(client.get("/health") for _ in range(num)))
            assert {answer.status_code for answer in answers} == {200}
        assert [request.limit for request in asked] == [1]
        await asyncio.sleep(FRESH_S)
        await client.get("/health")
        assert len(asked) == 2

    over_http([worker(1), worker(2)], check)


def test_who_stops_waiting_for_health_leaves_the_question_to_the_others() -> None:
    """And a question that fails is one answer for all, which is asked again after a second."""

    async def main() -> None:
        num_asked = 0

        async def ask() -> None:
            nonlocal num_asked
            num_asked += 1
            await asyncio.sleep(2)
            if num_asked == 1:
                raise BrokenError("namespace test", "no controller answers")

        health = Health(ask)
        first, second = (asyncio.ensure_future(health.is_well()) for _ in range(2))
        await asyncio.sleep(1)
        first.cancel()
        assert await second is False
        assert await health.is_well() is True
        assert num_asked == 2
        left = asyncio.ensure_future(health.is_well())
        await asyncio.sleep(FRESH_S)
        await health.aclose()
        await health.aclose()
        assert await left is False

    run(main())
