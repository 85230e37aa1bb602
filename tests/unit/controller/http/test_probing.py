"""Probes of workers' addresses: bounded, shared, and harmless."""

import asyncio
from collections import OrderedDict
from typing import Any

import httpx
import pytest

from rlbus.controller.http import probing
from rlbus.controller.http.probing import FRESH_S, MAX_CONCURRENT, PASS_S, PROBE_S, Prober
from rlbus.testing import run

pytestmark = pytest.mark.unit


class Answers(httpx.AsyncBaseTransport):
    """Hosts of which each answers in its own way; counts, and how many were asked at once."""

    def __init__(self) -> None:
        self.asked: list[httpx.Request] = []
        self.at_once = 0
        self.most_at_once = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """By host name."""
        self.asked.append(request)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0.01)
            match request.url.host:
                case "refused":
                    raise httpx.ConnectError("connection refused")
                case "silent":
                    await asyncio.sleep(3600)
                case "down":
                    return httpx.Response(503)
                case "elsewhere":
                    return httpx.Response(307, headers={"location": "http://well/live"})
                case "closed":
                    return httpx.Response(401)
            return httpx.Response(200)
        finally:
            self.at_once -= 1


def test_each_address_is_told_how_it_answers() -> None:
    """Anything below 500 is an answer: also one that asks for a token, and a redirect, which isn't followed."""

    async def main() -> None:
        answers = Answers()
        prober = Prober(answers)
        hosts = ("well", "refused", "silent", "down", "elsewhere", "closed")
        found = await prober.probe([f"http://{host}" for host in hosts])
        assert found == {
            "http://well": None,
            "http://refused": "http://refused doesn't answer: connection refused",
            "http://silent": f"http://silent doesn't answer within {PROBE_S:g} s",
            "http://down": "http://down answers with status 503",
            "http://elsewhere": None,
            "http://closed": None,
        }
        assert {(r.method, r.url.path) for r in answers.asked} == {("GET", "/live")}
        assert all("authorization" not in r.headers for r in answers.asked)
        await prober.aclose()

    run(main())


@pytest.mark.parametrize("host", ["xn--gpu_1", "a" * 70, "a..b", "ß" * 64, "\u2488"])
def test_an_address_that_no_client_can_ask_is_told_as_one_that_does_not_answer(host: str) -> None:
    """Whatever the client makes of it: the other workers' rows have nothing to do with it."""

    async def main() -> None:
        prober = Prober(Answers())
        odd = f"http://{host}:8000"
        found = await prober.probe([odd, "http://well"])
        assert found["http://well"] is None
        problem = found[odd]
        assert problem is None or problem.startswith(f"{odd} doesn't answer: ")
        await prober.aclose()

    run(main())


def test_many_who_ask_cost_one_probe_each() -> None:
    """And a fresh answer none at all."""

    async def main() -> None:
        answers = Answers()
        prober = Prober(answers)
        await asyncio.gather(*(prober.probe(["http://well"]) for _ in range(20)))
        await prober.probe(["http://well"])
        assert len(answers.asked) == 1
        await asyncio.sleep(FRESH_S)
        await prober.probe(["http://well"])
        assert len(answers.asked) == 2
        await prober.aclose()

    run(main())


def test_a_whole_fleet_that_is_silent_costs_a_bounded_time() -> None:
    """At most so many at once; who wasn't asked in time is said to be so."""

    async def main() -> None:
        answers = Answers()
        prober = Prober(answers)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        found = await prober.probe([f"http://silent:{port}" for port in range(1, 200)])
        assert loop.time() - began_s == pytest.approx(PASS_S)
        assert answers.most_at_once == MAX_CONCURRENT
        problems = [text for text in found.values() if text is not None]
        assert len(problems) == 199
        assert sum("not probed within" in text for text in problems) == 199 - 2 * MAX_CONCURRENT
        await prober.aclose()

    run(main())


def test_a_new_address_costs_no_walk_over_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet's list is asked for in time that grows with the fleet, and not with its square."""
    monkeypatch.setattr(probing, "MAX_KNOWN", 50)
    num_looks = 0

    class Known(OrderedDict[str, Any]):
        """Counts what is looked at."""

        def __getitem__(self, key: str) -> Any:
            nonlocal num_looks
            num_looks += 1
            return super().__getitem__(key)

        def items(self) -> Any:
            nonlocal num_looks
            num_looks += len(self)
            return super().items()

    async def main() -> None:
        prober = Prober(Answers())
        prober._known = Known()
        for batch in range(4):
            await prober.probe([f"http://well:{1 + batch * 100 + i}" for i in range(100)])
        assert num_looks <= 2 * 400
        await prober.aclose()

    run(main())


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses that nobody announces any more go."""
    monkeypatch.setattr(probing, "MAX_KNOWN", 3)

    async def main() -> None:
        prober = Prober(Answers())
        for port in range(1, 10):
            await prober.probe([f"http://well:{port}"])
        assert len(prober._known) == 3
        await prober.aclose()
        await prober.aclose()

    run(main())
