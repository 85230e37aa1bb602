"""Who is let in."""

import asyncio
import logging
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from rlbus.controller.http import guard
from rlbus.controller.http.guard import Guard
from rlbus.testing import run

pytestmark = pytest.mark.unit

TOKEN = "secret-token"


def ask(
    token: str | None, path: str = "/pause", headers: list[tuple[Any, Any]] | None = None, host: str = "127.0.0.1:80"
) -> httpx.Response:
    """One request to a guarded app that answers everything."""

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(Guard(PlainTextResponse("in"), token))
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.post(f"http://{host}{path}", headers=headers or [])

    return run(main())


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong",
        b"Basic secret-token",
        b"secret-token",
        b"Bearer secret-token2",
        b"Bearer s\xe9",
    ],
)
def test_a_wrong_token_is_401_in_vllms_words(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """SCENARIOS 43: refused, and an audit line that doesn't have what was sent."""
    with caplog.at_level(logging.WARNING):
        answer = ask(TOKEN, headers=[(b"authorization", value)])
    assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "refused with 401: POST '/pause'" in caplog.text
    assert "wrong" not in caplog.text


def test_refusals_write_one_line_at_a_time_and_nothing_of_the_senders(caplog: pytest.LogCaptureFixture) -> None:
    """A path may have lines and terminal escapes in it; and without a token nobody fills the log."""

    async def main() -> None:
        transport = httpx.ASGITransport(Guard(PlainTextResponse("in"), TOKEN))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            for _ in range(100):
                assert (await client.post("/a%0Aforged%1B[2J")).status_code == 401
            await asyncio.sleep(guard.REFUSAL_LOG_S)
            await client.post("/a")

    with caplog.at_level(logging.WARNING):
        run(main())
    lines = caplog.text.splitlines()
    assert len(lines) == 2
    assert "\x1b" not in caplog.text
    assert "101 refused so far" in lines[1]


def test_no_token_and_two_are_401() -> None:
    """Which of two would count isn't ours to guess."""
    assert ask(TOKEN).status_code == 401
    both = [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer x")]
    assert ask(TOKEN, headers=both).status_code == 401


def test_the_token_lets_in_from_anywhere() -> None:
    """The scheme in any case; also under another host's name, and from a page."""
    headers = [("authorization", f"bearer {TOKEN}"), ("origin", "https://example.org")]
    assert ask(TOKEN, headers=headers, host="example.org").text == "in"


@pytest.mark.parametrize("path", ["/live", "/health"])
def test_health_is_open(path: str) -> None:
    """Probes have no token."""
    assert ask(TOKEN, path).text == "in"


@pytest.mark.parametrize("path", ["/live/", "/health/x", "//live", "/v1/models", "/v1/rl/workers", "/", "/docs", "/x"])
def test_nothing_else_is_open(path: str) -> None:
    """Also what isn't there."""
    assert ask(TOKEN, path).status_code == 401


@pytest.mark.parametrize("host", ["example.org", "10.0.0.1:80", "127.0.0.1.example.org"])
def test_without_a_token_another_hosts_name_is_refused(host: str) -> None:
    """A name that was made to point at this machine, from a browser on it."""
    answer = ask(None, host=host)
    assert answer.status_code == 403
    assert "RLBUS_HTTP_TOKEN" in answer.json()["error"]["message"]


def test_without_a_token_a_page_of_another_origin_is_refused() -> None:
    """A simple POST needs no permission of the browser's; one of our own pages may."""
    assert ask(None, headers=[("origin", "http://example.org")]).status_code == 403
    assert ask(None, headers=[("origin", "null")]).status_code == 403
    assert ask(None, headers=[("origin", "http://localhost:81")], host="localhost:80").status_code == 403
    own = ask(None, headers=[("origin", "http://localhost:8080")], host="localhost:8080")
    assert own.text == "in"


@pytest.mark.parametrize("host", ["127.0.0.1:8", "localhost:8", "[::1]:8"])
def test_without_a_token_this_machine_is_let_in(host: str) -> None:
    """In each of its spellings."""
    assert ask(None, host=host).text == "in"


def test_requests_at_the_same_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is told to come later; health is answered all the same, and places become free again."""
    monkeypatch.setattr(guard, "MAX_REQUESTS", 2)

    async def main() -> None:
        release = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/pause":
                await release.wait()
            await PlainTextResponse("in")(scope, receive, send)

        transport = httpx.ASGITransport(Guard(app, None))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            slow = [asyncio.ensure_future(client.post("/pause")) for _ in range(2)]
            await asyncio.sleep(1)
            late = await client.get("/is_paused")
            assert (late.status_code, late.headers["retry-after"]) == (503, "1")
            assert (await client.get("/live")).status_code == 200
            release.set()
            assert [answer.status_code for answer in await asyncio.gather(*slow)] == [200, 200]
            assert (await client.get("/is_paused")).status_code == 200

    run(main())
