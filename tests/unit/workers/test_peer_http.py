"""The sidecars' HTTP client: credentials on every call, every end is an error of rlbus, nothing of a secret in it."""

import asyncio
import contextlib
import gzip
import pickle
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest

from rlbus.errors import ConfigError, EngineDeadError
from rlbus.schemas import FaultCode
from rlbus.testing import run
from rlbus.workers import peer_http
from rlbus.workers.peer_http import MAX_PROBLEM_CHARS, Peer, PeerClient, PeerError, words_of

pytestmark = pytest.mark.unit

Answer = Callable[[httpx.Request], httpx.Response]
PEER = Peer.of("http://engine:8000/", api_key="sesame-key", headers={"X-Tenant": "blue-team"})


def on_peer(answer: Answer, check: Callable[[PeerClient], Awaitable[None]], peer: Peer = PEER) -> None:
    """Run a check with a client of a peer that answers so."""

    async def main() -> None:
        client = PeerClient(peer, what="vLLM", transport=httpx.MockTransport(answer))
        try:
            await check(client)
        finally:
            await client.aclose()

    run(main())


def fails(answer: Answer) -> PeerError:
    """How a call of `GET /x` fails then."""
    caught: list[PeerError] = []

    async def check(client: PeerClient) -> None:
        with pytest.raises(PeerError) as error:
            await client.get("/x", limit_s=5.0)
        caught.append(error.value)

    on_peer(answer, check)
    return caught[0]


def test_credentials_and_headers_go_with_every_call() -> None:
    """SCENARIOS 43: admin calls, not only the ones that are known to be guarded."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"ok": 1})

    async def check(client: PeerClient) -> None:
        assert await client.get("/is_paused", limit_s=1.0) == {"ok": 1}
        assert await client.post("/pause", params={"mode": "keep"}, limit_s=1.0) == {"ok": 1}
        assert await client.post("/update_weights", body={"update_info": {}}, limit_s=1.0) == {"ok": 1}

    on_peer(answer, check)
    assert [str(r.url) for r in seen] == [
        "http://engine:8000/is_paused",
        "http://engine:8000/pause?mode=keep",
        "http://engine:8000/update_weights",
    ]
    assert {r.headers["authorization"] for r in seen} == {"Bearer sesame-key"}
    assert {r.headers["x-tenant"] for r in seen} == {"blue-team"}


def test_compressed_answers_are_not_asked_for_and_not_unpacked() -> None:
    """A few bytes may become any number; so the bound of an answer is of what comes in."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, headers={"content-encoding": "gzip"}, content=gzip.compress(b" " * 1_000_000))

    assert "gzip" in fails(answer).fault.message
    assert seen[0].headers["accept-encoding"] == "identity"


def test_given_authorization_replaces_the_api_key() -> None:
    """Two of them would be an error of the peer's."""
    peer = Peer.of("http://h:1", api_key="k", headers={"authorization": "Basic abcd"})
    assert dict(peer.headers) == {"authorization": "Basic abcd"}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("engine:8000", "use http://"),
        ("nats://engine:4222", "use http://"),
        ("http://", "use http://"),
        ("http://::1:8000", "in brackets"),
        ("http://[::1:8000", "in brackets"),
        ("http://h:99999", "in brackets"),
        ("http://xn--gpu_1:8000", "no name"),
        ("http://\u2603.lan:8000", "no name"),
        ("http://me:secret@h:1", "credentials don't belong into a URL"),
        ("http://h:1/x?y=1", "without"),
        ("http://0.0.0.0:8000", "an address to listen on"),
        ("http://[::]:8000", "an address to listen on"),
    ],
)
def test_url_that_cannot_be_a_peers_is_refused(url: str, problem: str) -> None:
    """SCENARIOS 58: before anything is called; a password in it isn't shown."""
    with pytest.raises(ConfigError, match=problem) as caught:
        Peer.of(url)
    assert "secret" not in str(caught.value)


def test_ipv6_in_brackets_and_a_path_are_kept() -> None:
    """SCENARIOS 58: as they were given, without the last slash."""
    peer = Peer.of("http://[::1]:8000/engines/7/")
    assert (peer.url, peer.host, peer.port) == ("http://[::1]:8000/engines/7", "::1", 8000)
    assert Peer.of("https://h").port == 443


@pytest.mark.parametrize(
    "headers",
    [{"a b": "x"}, {"": "x"}, {"a": "x\ny"}, {"a:": "x"}, {"a": "ü"}, {"a@b": "x"}, {"a": " x"}, {"a": "x "}],
)
def test_header_that_cannot_be_sent_is_refused(headers: dict[str, str]) -> None:
    """Without its value, which may be a secret."""
    with pytest.raises(ConfigError, match="header"):
        Peer.of("http://h:1", headers=headers)


def test_key_that_cannot_be_sent_is_refused() -> None:
    """As a header's value, which it becomes."""
    with pytest.raises(ConfigError, match="API key") as caught:
        Peer.of("http://h:1", api_key="sesame\n")
    assert "sesame" not in str(caught.value)


def test_refused_credentials_are_told_as_such_and_not_shown() -> None:
    """SCENARIOS 43: what to check; neither key nor header value is in the error, whatever the peer says back."""
    error = fails(lambda r: httpx.Response(401, json={"error": f"bad {r.headers['authorization']} blue-team"}))
    assert error.is_denied
    assert "check the API key" in str(error)
    assert (error.fault.code, error.fault.retryable) == (FaultCode.ENGINE_FAILED, False)
    for text in (str(error), repr(error), repr(error.fault.detail), repr(PEER)):
        assert "sesame" not in text
        assert "blue-team" not in text
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ('{"error": {"message": "no such mode", "code": 400}}', "no such mode"),
        ('{"error": "Unauthorized"}', "Unauthorized"),
        ('{"detail": "Not Found"}', "Not Found"),
        ('{"status": "error", "message": "not\\npaused"}', "not paused"),
        ("<html>bad gateway</html>", "<html>bad gateway</html>"),
        ("", ""),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * MAX_PROBLEM_CHARS),
    ],
)
def test_peers_own_words_are_found_in_every_shape(data: str, words: str) -> None:
    """vLLM's two, FastAPI's, Dynamo's, a proxy's; in one line."""
    assert words_of(data) == words


def test_failure_has_status_url_and_words_as_data() -> None:
    """So that an adapter can judge it."""
    error = fails(lambda r: httpx.Response(500, json={"error": {"message": "start it first"}}))
    assert (error.status, error.problem) == (500, "start it first")
    assert error.fault.detail["url"] == "http://engine:8000"
    assert error.fault.detail["call"] == "GET /x"
    assert "vLLM: GET http://engine:8000/x answered 500: start it first" in str(error)
    assert fails(lambda r: httpx.Response(404)).is_missing


@pytest.mark.parametrize(
    ("status", "retryable"),
    [(429, True), (502, True), (503, True), (504, True), (400, False), (404, False), (500, False)],
)
def test_what_passes_by_itself_may_be_tried_again(status: int, retryable: bool) -> None:
    """A proxy whose server is away for a moment, or somebody who is asked too much."""
    assert fails(lambda r: httpx.Response(status)).fault.retryable is retryable


def test_redirect_is_not_followed() -> None:
    """The credentials would go to whoever it names."""
    error = fails(lambda r: httpx.Response(307, headers={"location": "http://elsewhere/x"}))
    assert "give the final URL" in str(error)


def test_long_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much the peer sends, no more is kept."""
    monkeypatch.setattr(peer_http, "MAX_BODY_BYTES", 100)
    assert "more than 100 bytes" in str(fails(lambda r: httpx.Response(200, content=b"x" * 101)))


def test_answer_that_is_no_json_is_an_error() -> None:
    """A load balancer's page isn't the engine's answer."""
    assert "isn't JSON" in str(fails(lambda r: httpx.Response(200, content=b"<html>")))


@pytest.mark.parametrize("status", [200, 500])
def test_answer_that_is_nested_without_end_is_an_error(status: int) -> None:
    """Python's reader of JSON gives up on it with an error of its own, which would end a sidecar."""
    error = fails(lambda r: httpx.Response(status, content=b"[" * 100_000))
    assert error.word is None


def test_silent_peer_ends_the_call_at_its_deadline() -> None:
    """It may still do what it was asked for: no status, and it may be tried again."""

    async def silent(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def check(client: PeerClient) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(PeerError, match="did not answer within 7 s") as caught:
            await client.post("/pause", limit_s=7.0)
        assert loop.time() - began_s == pytest.approx(7.0)
        assert caught.value.status is None
        assert caught.value.fault.retryable

    async def main() -> None:
        client = PeerClient(PEER, transport=httpx.MockTransport(silent))
        await check(client)
        await client.aclose()

    run(main())


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real sockets answer or refuse, however long a slow machine takes over it."""
    monkeypatch.setattr(peer_http, "CONNECT_S", 60.0)
    monkeypatch.setattr(peer_http, "LOOK_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_refused_connection_is_a_death_and_a_lost_one_only_if_nobody_listens() -> None:
    """On real sockets: nobody there; one that hangs up and listens on; one that hangs up and is gone."""

    async def main() -> None:
        is_last = False

        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            if is_last:
                server.close()
            writer.close()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = PeerClient(Peer.of(f"http://127.0.0.1:{port}"))
        try:
            with pytest.raises(PeerError, match="broke off") as caught:
                await client.get("/x", limit_s=60.0)
            assert caught.value.status is None
            is_last = True
            with pytest.raises(EngineDeadError, match="nobody listens"):
                await client.get("/x", limit_s=60.0)
            with pytest.raises(EngineDeadError) as dead:
                await client.get("/x", limit_s=60.0)
            assert dead.value.code is FaultCode.ENGINE_DEAD
        finally:
            await client.aclose()
            server.close()

    asyncio.run(main())


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the name "engine.test" these addresses; without any it is unknown."""
    resolve = socket.getaddrinfo

    def patch(*addresses: str) -> None:
        def found(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
            if host not in ("engine.test", b"engine.test"):
                return resolve(host, port, *args, **kwargs)
            if not addresses:
                raise socket.gaierror(-2, "Name or service not known")
            families = [socket.AF_INET6 if ":" in one else socket.AF_INET for one in addresses]
            return [
                (family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (one, int(port)))
                for family, one in zip(families, addresses, strict=True)
            ]

        monkeypatch.setattr(socket, "getaddrinfo", found)

    return patch


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """At which nobody listens, nor will: it is bound, at every address that the tests ask."""
    with contextlib.ExitStack() as stack:
        port = 0
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::1")):
            with contextlib.suppress(OSError):  # a machine without IPv6
                sock = stack.enter_context(socket.socket(family))
                sock.bind((address, port))
                port = port or int(sock.getsockname()[1])
        yield port


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("addresses", [("127.0.0.1", "127.0.0.2"), ("::1", "127.0.0.1"), ("127.0.0.1",)])
def test_server_with_several_addresses_is_gone_when_one_refuses_and_none_accepts(
    addresses: tuple[str, ...], resolved: Callable[..., None]
) -> None:
    """As "localhost" has two on most machines, one of which may not be there at all."""
    resolved(*addresses)

    async def main(port: int) -> None:
        client = PeerClient(Peer.of(f"http://engine.test:{port}"))
        try:
            with pytest.raises(EngineDeadError, match="nobody listens"):
                await client.get("/x", limit_s=60.0)
        finally:
            await client.aclose()

    with deaf_port() as port:
        asyncio.run(main(port))


@pytest.mark.usefixtures("patient")
def test_server_that_still_accepts_at_one_of_its_addresses_is_not_gone(resolved: Callable[..., None]) -> None:
    """Whatever the other ones say."""
    resolved("127.0.0.1", "127.0.0.2")

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(hang_up, "127.0.0.2", 0)
        client = PeerClient(Peer.of(f"http://engine.test:{server.sockets[0].getsockname()[1]}"))
        try:
            with pytest.raises(PeerError, match="broke off"):
                await client.get("/x", limit_s=60.0)
        finally:
            await client.aclose()
            server.close()

    asyncio.run(main())


def test_name_that_is_unknown_is_no_death(resolved: Callable[..., None]) -> None:
    """A typing error, or a name server that is down, says nothing of the engine."""
    resolved()

    async def main() -> None:
        client = PeerClient(Peer.of("http://engine.test:1"))
        try:
            with pytest.raises(PeerError, match="can't be reached"):
                await client.get("/x", limit_s=60.0)
        finally:
            await client.aclose()

    asyncio.run(main())
