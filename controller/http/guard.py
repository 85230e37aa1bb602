"""Who is let in: the bearer token on every route, and on loopback without one nobody's web page.

`/live` and `/health` are open, as in vLLM's server: what asks them (Docker, Kubernetes, a load balancer) has no token,
and they say nothing but that the process and a leader are there.
"""

import asyncio
import hmac
import logging
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rlbus._addresses import is_loopback
from rlbus.controller.http.answers import error
from rlbus.controller.http.config import TOKEN_VARIABLE

_log = logging.getLogger("rlbus.controller.http")

OPEN_PATHS = frozenset({"/live", "/health"})
# Requests at the same time. Each costs a connection and a body of at most 1 MiB, so that this bounds both.
MAX_REQUESTS = 256
# At most one log line about refused requests in this many seconds; each says how many there were.
REFUSAL_LOG_S = 1.0
# Of a refused request's path in it.
MAX_SHOWN_CHARS = 200


class Guard:
    """ASGI middleware around every route. Refusals are logged with path and peer, never with what was sent as token."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = None if token is None else token.encode("ascii")
        self._num_running = 0
        self._num_refused = 0
        self._logged_at_s = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or answer it. Cancel: as of the app behind it."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(Headers(scope=scope))
        if refusal is None and self._num_running >= MAX_REQUESTS:
            refusal = error(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_REQUESTS} requests are being answered already")
        if refusal is None:
            self._num_running += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._num_running -= 1
            return
        client = scope.get("client")
        peer = "an unknown peer" if client is None else client[0]
        self._num_refused += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_at_s >= REFUSAL_LOG_S:
            self._logged_at_s = now_s
            # Whoever sent it chose the path: no line and no escape of his comes into the log.
            text = "refused with %d: %s %r from %s; %d refused so far"
            path = scope["path"][:MAX_SHOWN_CHARS]
            _log.warning(text, refusal.status_code, scope["method"], path, peer, self._num_refused)
        await refusal(scope, receive, send)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        return _strangers_page(headers) if self._token is None else self._unauthorized(headers)

    def _unauthorized(self, headers: Headers) -> JSONResponse | None:
        assert self._token is not None
        given = headers.getlist("authorization")
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        is_same = hmac.compare_digest(token.strip().encode("utf-8", "surrogateescape"), self._token)
        if scheme.lower() == "bearer" and is_same:
            return None
        # vLLM's own words: entrypoints/serve/middleware/authenticate.py
        return JSONResponse({"error": "Unauthorized"}, status_code=401, headers={"www-authenticate": "Bearer"})


def _strangers_page(headers: Headers) -> JSONResponse | None:
    """Without a token, the browser of somebody who works on this machine must not be turned against it: neither by a
    page of another origin, nor by a name that was made to point here.
    """
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if not is_loopback(name):
        problem = f"the request is for host {host!r}; use 127.0.0.1 or localhost, or set a token in {TOKEN_VARIABLE}"
        return error(HTTPStatus.FORBIDDEN, problem)
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        problem = f"the request comes from a page of {origin}; set a token in {TOKEN_VARIABLE} if that is meant"
        return error(HTTPStatus.FORBIDDEN, problem)
    return None
