"""The HTTP client of sidecars: one peer (a vLLM server, a Dynamo worker), with its credentials on every single call.

Invariants: every call has a deadline and a bounded answer; redirects and proxies of the environment are not followed,
since a credential would travel with them; no credential appears in an error, a log line or a repr. What goes wrong is
a `PeerError`, or an `EngineDeadError` where nobody listens any more.
"""

import asyncio
import json
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from rlbus.errors import ConfigError, EngineDeadError, EngineError
from rlbus.schemas import Fault, FaultCode

# An answer may be this long: checksums of 10,000 tensors are 1.5 MB.
MAX_BODY_BYTES = 16 << 20
# Length of the peer's own words in an error.
MAX_PROBLEM_CHARS = 500
MAX_CODE_CHARS = 40
# How long a connection may take, and how long to look whether anybody still listens after one was lost.
CONNECT_S = 5.0
LOOK_S = 1.0
# Calls that wait for the same peer: a mutation, a question, a few aborts.
MAX_CONNECTIONS = 32
# Shorter than a server keeps an idle connection open (uvicorn: 5 s), or a call would now and then meet a closed one.
KEEPALIVE_S = 2.0
# Answers that are about who asks.
DENIED = (401, 403)
# Answers of somebody who is asked too much, or of a proxy whose server is away: they pass by themselves.
PASSING = ("429", "502", "503", "504")
# Source: RFC 9110, 5.6.2.
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)
# Addresses to listen on, at which nobody can be reached from elsewhere.
WILDCARDS = ("0.0.0.0", "::", "*")


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a peer answers, and what every call to it carries. `url` has no trailing slash, and may have a path."""

    url: str
    # Credentials among them, so they don't show.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, url: str, *, api_key: str | None = None, headers: Mapping[str, str] | None = None) -> "Peer":
        """Check and put together. `api_key` is sent as a bearer token, which a given Authorization header replaces.

        Raises:
            ConfigError: the URL can't be one of a peer, or a header can't be sent.
        """
        found = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        for name, value in (headers or {}).items():
            if not _HEADER_NAME.fullmatch(name):
                raise ConfigError("header", name, "use NAME=VALUE; a name is of letters, digits, and -_.!#$%&'*+^`|~")
            if name.lower() == "authorization":
                found.pop("Authorization", None)
            found[name] = value
        for name, value in found.items():
            if not value.isascii() or value.strip() != value or any(c in "\r\n\0" for c in value):
                problem = "a value, and an API key, is one line of ASCII, without spaces around it"
                raise ConfigError("header", name, problem)
        return cls(_checked_url(url), found)

    @property
    def host(self) -> str:
        """Without brackets."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """Also where the URL leaves it to its scheme."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    def hide(self, text: str) -> str:
        """The text without any of our credentials in it."""
        for value in self.headers.values():
            for secret in (value, value.removeprefix("Bearer ")):
                if len(secret) > 3:
                    text = text.replace(secret, "***")
        return text


def _checked_url(url: str) -> str:
    shown = url
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
        is_name = _is_name(url)
        if "@" in parts.netloc:
            shown = url.replace(parts.netloc.rpartition("@")[0], "***")
    except ValueError as exc:
        problem = f"{exc}; use http://HOST:PORT, an IPv6 address in brackets"
        raise ConfigError("url", shown, problem) from exc
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError("url", shown, "use http://HOST:PORT, an IPv6 address in brackets")
    if "@" in parts.netloc:
        raise ConfigError("url", shown, "credentials don't belong into a URL; give a header, or the name of a variable")
    if not is_name:
        raise ConfigError("url", shown, f"{host!r} is no name that can be looked up")
    if parts.query or parts.fragment:
        raise ConfigError("url", shown, "use the base URL, without ? and #")
    if host in WILDCARDS:
        raise ConfigError("url", shown, "that is an address to listen on; name the host at which the server is reached")
    return url.rstrip("/")


def _is_name(url: str) -> bool:
    """Whether the host can be asked for. Otherwise each call would fail at its encoding, with no error of HTTP's."""
    try:
        return bool(httpx.URL(url).host)
    except (httpx.InvalidURL, ValueError):
        return False


class PeerError(EngineError):
    """A call to a peer failed. `status` is its HTTP status, None if there was no (whole) answer."""

    @property
    def status(self) -> int | None:
        """What the peer answered with."""
        text = self.fault.detail.get("status")
        return None if text is None else int(text)

    @property
    def problem(self) -> str:
        """The peer's own words, or what came in their place."""
        return self.fault.detail.get("problem", "")

    @property
    def word(self) -> str | None:
        """What a peer that is rlbus' own says that it is, in its words for faults; None from any other."""
        return self.fault.detail.get("code")

    @property
    def is_denied(self) -> bool:
        """It is about our credentials."""
        return self.status in DENIED

    @property
    def is_missing(self) -> bool:
        """The peer has no such route."""
        return self.status in (404, 405)


class PeerClient:
    """Calls one peer. `what` names it in errors. Close it with `aclose`; used on one loop.

    Args:
        transport: stands in for the network, in tests.
    """

    def __init__(
        self, peer: Peer, *, what: str = "the server", transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.peer = peer
        self._what = what
        limits = httpx.Limits(
            max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS, keepalive_expiry=KEEPALIVE_S
        )
        self._http = httpx.AsyncClient(
            # The system's authorities, or those of SSL_CERT_FILE. Plain HTTP verifies nothing; loading them takes time.
            verify=ssl.create_default_context() if peer.url.startswith("https:") else False,
            # Nothing compressed: how much a small answer becomes couldn't be bounded.
            headers={"Accept-Encoding": "identity", **peer.headers},
            limits=limits,
            transport=transport,
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # each call's own deadline is around it
        )
        self._has_network = transport is None

    async def aclose(self) -> None:
        """Drop every connection. Idempotent. Cancel: the rest is dropped when the process ends."""
        await self._http.aclose()

    async def get(self, path: str, *, params: Mapping[str, str] | None = None, limit_s: float) -> Any:
        """Ask for JSON; None for an empty answer. Raises: as `call`. Cancel: as `call`."""
        return await self.call("GET", path, params=params, limit_s=limit_s)

    async def post(
        self, path: str, *, body: Any = None, params: Mapping[str, str] | None = None, limit_s: float
    ) -> Any:
        """Send JSON, get JSON; None for an empty answer. Raises: as `call`. Cancel: as `call`."""
        return await self.call("POST", path, params=params, body=body, limit_s=limit_s)

    async def call(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: Any = None, limit_s: float
    ) -> Any:
        """Make one call, once, within `limit_s` seconds from connecting to the last byte. `path` begins with "/".

        Raises:
            EngineDeadError: nobody listens there, or not any more.
            PeerError: every other failure. With a `status` the peer has answered; without, it may have done what it was
                asked for.
        Cancel: the connection is dropped; the peer may still do it.
        """
        data = await self.text(method, path, params=params, body=body, limit_s=limit_s)
        if not data.strip():
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as exc:
            problem = f"answered with something that isn't JSON: {data[:80]!r}"
            raise self._error(method, path, problem) from exc

    async def text(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: Any = None, limit_s: float
    ) -> str:
        """As `call`, for an answer that is text. Raises: as `call`. Cancel: as `call`."""
        try:
            async with asyncio.timeout(limit_s):
                return await self._send(method, path, params, body)
        except TimeoutError as exc:
            raise self._error(method, path, f"did not answer within {limit_s:g} s", limit_s=f"{limit_s:g}") from exc
        except httpx.HTTPError as exc:
            raise await self._lost(method, path, exc) from exc

    async def _send(self, method: str, path: str, params: Mapping[str, str] | None, body: Any) -> str:
        url = f"{self.peer.url}{path}"
        async with self._http.stream(method, url, params=params, json=body) as response:
            encoding = response.headers.get("content-encoding", "identity")
            if encoding.lower() != "identity":
                raise self._error(method, path, f"answered in {encoding!r}, which wasn't asked for")
            chunks = bytearray()
            async for chunk in response.aiter_bytes():
                chunks += chunk
                if len(chunks) > MAX_BODY_BYTES:
                    raise self._error(method, path, f"answered with more than {MAX_BODY_BYTES} bytes")
            data = chunks.decode(errors="replace")
            if not response.is_success:
                raise self._refused(method, path, response, data)
            return data

    def _refused(self, method: str, path: str, response: httpx.Response, data: str) -> PeerError:
        status = response.status_code
        said = words_of(data)
        if status in DENIED:
            tail = "check the API key and the headers that this worker was given"
            problem = f"refused our credentials ({status} {said}); {tail}"
        elif response.is_redirect:
            problem = f"redirects to {response.headers.get('location', '?')!r}; give the final URL"
        else:
            problem = f"answered {status}{f': {said}' if said else ''}"
        code = _code_of(data)
        return self._error(method, path, problem, said=said, status=str(status), **({"code": code} if code else {}))

    async def _lost(self, method: str, path: str, exc: httpx.HTTPError) -> EngineError:
        """What a lost connection means: that nobody listens is a death, everything else may be only the connection."""
        problem = f"{type(exc).__name__}{f': {exc}' if str(exc) else ''}"
        if not isinstance(exc, httpx.TimeoutException) and await self._is_gone():
            message = f"{self._what} is gone: nobody listens at {self.peer.url} ({problem})"
            detail = {"url": self.peer.url, "call": f"{method} {path}"}
            return EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=self.peer.hide(message), detail=detail))
        what = "can't be reached" if isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout) else "broke off"
        return self._error(method, path, f"{what}: {problem}")

    async def _is_gone(self) -> bool:
        """Whether fresh connections are refused: by one of its addresses at least ("localhost" has two), while none
        accepts. One that merely hangs proves nothing.
        """
        if not self._has_network:
            return False
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(LOOK_S):
                found = await loop.getaddrinfo(self.peer.host, self.peer.port, type=socket.SOCK_STREAM)
                looks = await asyncio.gather(*(_refuses(family, where) for family, _, _, _, where in found))
        except (OSError, TimeoutError):
            return False
        return True in looks and False not in looks

    def _error(self, method: str, path: str, problem: str, *, said: str | None = None, **detail: str) -> PeerError:
        problem = self.peer.hide(problem)[:MAX_PROBLEM_CHARS]
        said = problem if said is None else self.peer.hide(said)
        return PeerError(
            Fault(
                code=FaultCode.ENGINE_FAILED,
                message=f"{self._what}: {method} {self.peer.url}{path} {problem}",
                retryable=detail.get("status") in (None, *PASSING),
                detail={"url": self.peer.url, "call": f"{method} {path}", "problem": said, **detail},
            )
        )


async def _refuses(family: int, address: Any) -> bool | None:
    """Whether a connection to this address is refused; None if there is no way to it, which says nothing."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, address)
    except ConnectionRefusedError:
        return True
    except OSError:
        return None
    return False


def _code_of(data: str) -> str | None:
    """The fault code that a surface of rlbus puts beside its error."""
    try:
        code = json.loads(data)["rlbus"]["code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return code[:MAX_CODE_CHARS] if isinstance(code, str) else None


def words_of(data: str) -> str:
    """What an error answer says, in one line, whatever its shape: vLLM's, FastAPI's, Dynamo's, or plain text."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = data
    for name in ("error", "detail", "message"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    text = found if isinstance(found, str) else json.dumps(found) if found else ""
    return " ".join(text.split())[:MAX_PROBLEM_CHARS]
