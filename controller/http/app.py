"""The HTTP side of a controller process, put together: discovery, health, models, and the verbs, behind the guard.

It asks whoever leads over the bus, so a controller that stands by answers as the leader does. While nobody leads, a
request waits for whoever leads next.
"""

import contextlib
import time
from collections.abc import AsyncIterator
from http import HTTPStatus

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rlbus._http_server import HttpServer
from rlbus._vllm_words import RETRY_AFTER_S
from rlbus.bus import Bus
from rlbus.controller.http import discovery, reading
from rlbus.controller.http.answers import BadRequestError, error, error_of, status_of
from rlbus.controller.http.calls import Calls
from rlbus.controller.http.config import HttpConfig
from rlbus.controller.http.fleet import FleetRoutes
from rlbus.controller.http.guard import Guard
from rlbus.controller.http.health import Health
from rlbus.controller.http.loras import cards
from rlbus.controller.http.probing import Prober
from rlbus.errors import RLBusError
from rlbus.schemas import FleetView

# How long a question to the leader may take, in seconds; of a health check less: it must not wait for a failover.
QUESTION_S = 10.0
HEALTH_S = 2.0


class ControllerHttp:
    """The application over one connection to the bus. `app` serves it; `aclose` takes back what still runs."""

    def __init__(
        self, bus: Bus, namespace: str, *, token: str | None = None, probes: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._namespace = namespace
        self._calls = Calls(bus, namespace)
        self._client = self._calls.client()
        self._prober = Prober(probes)
        self._leading = Health(lambda: self._client.glance(deadline_s=HEALTH_S))
        self._created = int(time.time())
        routes = [
            Route("/live", self._live),
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/rl/workers", self._workers),
            *FleetRoutes(self._calls).routes(),
        ]
        handlers = {404: _no_route, 405: _no_method, 500: _internal}
        self.app: ASGIApp = Guard(Starlette(routes=routes, exception_handlers=handlers), token)

    async def aclose(self) -> None:
        """Take back what still runs, and end probes. Idempotent. Cancel: it is left to the controller."""
        try:
            await self._calls.aclose()
        finally:
            try:
                await self._leading.aclose()
            finally:
                await self._prober.aclose()

    async def _live(self, _request: Request) -> Response:
        """This process runs."""
        return Response()

    async def _health(self, _request: Request) -> Response:
        """Somebody leads, and answers."""
        return Response(status_code=HTTPStatus.OK if await self._leading.is_well() else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _models(self, request: Request) -> Response:
        """Models and adapters; see `loras.cards`."""
        try:
            reading.check_query(request.query_params, ())
            view = await self._view()
        except RLBusError as exc:
            return error_of(exc, "list the models")
        return JSONResponse({"object": "list", "data": cards(view, self._created)})

    async def _workers(self, request: Request) -> Response:
        """Who is there, as Dynamo says it."""
        query = request.query_params
        try:
            reading.check_query(query, {"namespace", "component"}, {"namespace", "component"})
            components = reading.components_of(query)
            view = await self._view()
        except BadRequestError as exc:
            return _discovery_failed(exc.status, exc)
        except RLBusError as exc:
            # Dynamo's clients try again on 5xx only, and the size of the fleet isn't theirs to change.
            return _discovery_failed(max(status_of(exc), HTTPStatus.INTERNAL_SERVER_ERROR), exc)
        members = discovery.listed(view, components, query.getlist("namespace"))
        probed = await self._prober.probe(discovery.urls_of(members))
        return JSONResponse(discovery.answer(view, members, probed))

    async def _view(self) -> FleetView:
        return await self._client.status(deadline_s=QUESTION_S)


@contextlib.asynccontextmanager
async def serving(bus: Bus, namespace: str, config: HttpConfig) -> AsyncIterator[str]:
    """Serve while inside; gives the base URL, with the real port.

    Raises: ConfigError: it can't listen there. DeadlineError: it didn't start. Cancel: it ends, and takes ops back.
    """
    side = ControllerHttp(bus, namespace, token=config.token)
    server = HttpServer(config.host, config.port)
    try:
        await server.start(side.app)
        yield server.url
    finally:
        try:
            await server.aclose()
        finally:
            await side.aclose()


def _discovery_failed(status: HTTPStatus, exc: RLBusError) -> Response:
    headers = {"retry-after": str(RETRY_AFTER_S)} if status is HTTPStatus.SERVICE_UNAVAILABLE else None
    body = {"error": "discovery_failed", "message": discovery.plain(str(exc))}
    return JSONResponse(body, status_code=status, headers=headers)


async def _no_route(request: Request, _exc: Exception) -> Response:
    return error(HTTPStatus.NOT_FOUND, f"there is no route {request.url.path}")


async def _no_method(request: Request, exc: Exception) -> Response:
    headers = exc.headers if isinstance(exc, HTTPException) else None
    return error(
        HTTPStatus.METHOD_NOT_ALLOWED, f"{request.method} isn't allowed on {request.url.path}", headers=headers
    )


async def _internal(_request: Request, _exc: Exception) -> Response:
    return error(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed; its log says why")
