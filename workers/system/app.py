"""The application: endpoints of all surfaces behind one door, which checks who comes and watches whether he stays.

Invariants: a request without the token reaches no handler and says in its surface's shape why; a caller that hangs up
ends nothing but its own wait (`Entrance`).
"""

import asyncio
import hmac
import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rlbus._addresses import is_loopback
from rlbus.errors import ClosedError, DeadlineError
from rlbus.schemas import Fault, FaultCode, Result
from rlbus.workers.system.calls import OP_ID, STATUS_OF, CallError, Endpoint, OpError, Provider, Shape, read_call

_log = logging.getLogger("rlbus.workers")
T = TypeVar("T")

# Status of an answer that nobody reads any more. Source: nginx; it shows only in metrics and logs.
GONE = 499
# At most one log line about refused requests in this many seconds; the counter has them all.
REFUSAL_LOG_S = 1.0
# Requests at the same time, each with a body of at most 16 MiB. Probes are answered all the same.
MAX_REQUESTS = 64
PROBED = ("/health", "/live")
# Of a refused request's path in it.
MAX_SHOWN_CHARS = 200


class Door:
    """Lets requests in, or not. Counts `num_requests` by path as registered and status, and those without right.

    Args:
        provider: finds the agent.
        tokens: one of them has to come as bearer token; empty lets everybody in who isn't a page in a browser.
    """

    def __init__(self, provider: Provider, tokens: Sequence[str] = ()) -> None:
        self.provider = provider
        self._tokens = tuple(tokens)
        self.num_requests: Counter[tuple[str, int]] = Counter()
        self.num_refused = 0
        self.num_running = 0
        self._logged_at_s = float("-inf")

    def check(self, request: Request) -> None:
        """Raises CallError for a request that has no right to be here."""
        problem = self._problem(request)
        if problem is None:
            return
        self.num_refused += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_at_s >= REFUSAL_LOG_S:
            self._logged_at_s = now_s
            who = "?" if request.client is None else request.client.host
            text = "refused %s %r from %s: %s; %d refused so far"
            path = request.url.path[:MAX_SHOWN_CHARS]
            _log.warning(text, request.method, path, who, problem.message, self.num_refused)
        raise problem

    def _problem(self, request: Request) -> CallError | None:
        if not self._tokens:
            # A page that a user of this machine has open may send, too; it can't leave this header out.
            if request.headers.get("origin") is not None:
                return CallError(403, "Forbidden", "requests from web pages need a token; set RLBUS_SYSTEM_TOKEN")
            # Nor by a name that was made to point here. A Unix socket has no address, and no such names.
            host = request.headers.get("host", "")
            if request.client is not None and not _is_own_name(host):
                text = f"the request is for host {host[:MAX_SHOWN_CHARS]!r}; use 127.0.0.1 or localhost, or a token"
                return CallError(403, "Forbidden", f"{text} (RLBUS_SYSTEM_TOKEN)")
            return None
        if has_key(request.headers, self._tokens):
            return None
        return CallError(401, "Unauthorized", "send the worker's token: Authorization: Bearer <RLBUS_SYSTEM_TOKEN>")


def _is_own_name(host: str) -> bool:
    """Whether a Host header means this machine by itself."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def has_key(headers: Headers, keys: Sequence[str]) -> bool:
    """Whether a request brings one of `keys` as bearer token."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    sent = given.strip().encode("latin-1", "replace")
    # All of them are compared, so that the time says nothing.
    matches = [hmac.compare_digest(sent, key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(matches)


class _Path:
    """Everything that is registered under one path. An ASGI application, so that Starlette leaves methods to it."""

    def __init__(self, path: str, endpoints: Iterable[Endpoint], door: Door) -> None:
        self._path = path
        self._endpoints = {endpoint.method: endpoint for endpoint in endpoints}
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Cancel: as if the client had hung up."""
        request = Request(scope, receive)
        method = "GET" if request.method == "HEAD" else request.method
        endpoint = self._endpoints.get(method)
        shape = (endpoint or next(iter(self._endpoints.values()))).shape
        try:
            self._door.check(request)
            if endpoint is None:
                allowed = ", ".join(sorted(self._endpoints))
                text = f"{request.method} is not allowed on {request.url.path}; use {allowed}"
                raise CallError(405, "Method not allowed", text)
            response = await self._bounded(request, endpoint)
        except CallError as exc:
            response = _spelled(exc, shape)
            if exc.status == 405:
                response.headers["allow"] = ", ".join(sorted(self._endpoints))
        self._door.num_requests[self._path, response.status_code] += 1
        await response(scope, receive, send)

    async def _bounded(self, request: Request, endpoint: Endpoint) -> Response:
        door = self._door
        if self._path.endswith(PROBED):
            return await self._answer(request, endpoint)
        if door.num_running >= MAX_REQUESTS:
            raise CallError(503, "Busy", f"{MAX_REQUESTS} requests are being answered already; try again")
        door.num_running += 1
        try:
            return await self._answer(request, endpoint)
        finally:
            door.num_running -= 1

    async def _answer(self, request: Request, endpoint: Endpoint) -> Response:
        agent = self._door.provider()
        if agent is None:
            raise CallError(503, "Not ready", "the worker isn't on the bus (yet); try again")
        try:
            call = await read_call(request, agent)
        except ClientDisconnect:
            return Response(status_code=GONE)
        try:
            response = await unless_gone(request, endpoint.handler(call))
        except OpError as exc:
            response = endpoint.shape.fault(exc.result)
        except ClosedError as exc:
            raise CallError(503, "Not ready", f"{exc}; try again") from exc
        except DeadlineError as exc:
            raise CallError(504, "Deadline", str(exc)) from exc
        except CallError:
            raise
        except Exception as exc:
            _log.exception("%s %r failed", request.method, request.url.path)
            raise CallError(500, "Internal error", "the worker failed; its log says why") from exc
        if response is None:
            _log.info("%s went away before %r was done", call.caller, request.url.path)
            return Response(status_code=GONE)
        if call.has_op:
            response.headers[OP_ID] = call.name
        return response


async def unless_gone(request: Request, answering: Awaitable[T]) -> T | None:
    """What `answering` comes to; None, and it is cancelled, if the client goes away first. Raises what it raises.

    Cancel: both are cancelled.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(answering)
    watching = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _spelled(error: CallError, shape: Shape) -> Response:
    response = shape.error(error)
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


class OwnShape:
    """How rlbus' own endpoints spell errors: `{"error": {"code", "message", "detail"}}`."""

    def error(self, error: CallError) -> Response:
        """A request that wasn't carried out."""
        code = error.title.lower().replace(" ", "_")
        return JSONResponse({"error": {"code": code, "message": error.message}}, status_code=error.status)

    def fault(self, result: Result) -> Response:
        """An op that was refused, or failed."""
        fault = result.fault or Fault(code=FaultCode.INTERNAL, message="no reason was given")
        error = {"code": fault.code.value, "message": fault.message, "detail": dict(fault.detail)}
        return JSONResponse(
            {"error": error, "op_id": result.op_id, "status": result.status.value},
            status_code=STATUS_OF.get(fault.code, 500),
        )


OWN_SHAPE: Shape = OwnShape()


def make_routes(endpoints: Iterable[Endpoint], door: Door) -> list[Route]:
    """Routes that may be put before those of another application, whose paths they then replace."""
    by_path: dict[str, list[Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, []).append(endpoint)
    return [Route(path, _Path(path, group, door)) for path, group in by_path.items()]


def make_app(endpoints: Iterable[Endpoint], door: Door) -> Starlette:
    """An application of its own. What isn't there is told in rlbus' own shape."""

    async def missing(request: Request, _: Exception) -> Response:
        try:
            door.check(request)
        except CallError as refusal:
            return _spelled(refusal, OWN_SHAPE)
        return OWN_SHAPE.error(CallError(404, "Not found", f"there is no {request.url.path} here; see docs/http.md"))

    app = Starlette(routes=make_routes(endpoints, door), exception_handlers={404: missing})
    app.router.redirect_slashes = False
    return app
