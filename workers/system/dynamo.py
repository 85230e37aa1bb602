"""Dynamo's surface of a worker: `POST /engine/<route>`, with Dynamo's bodies, statuses and words.

Source: Dynamo 1.6.1, `dynamo/vllm/handlers.py` and the system status server. What a handler has to say comes with 200,
as `{"status": "ok" | "error", "message": ...}`; what isn't a call at all has an HTTP status of its own.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from rlbus._engine_routes import engine_routes
from rlbus.schemas import AbortRequest, FlushCache, PauseGeneration, PauseMode, Result, ResumeGeneration
from rlbus.workers.system.base import health_problem
from rlbus.workers.system.calls import Call, CallError, Endpoint, Shape
from rlbus.workers.system.dynamo_bodies import Abort, Empty, Pause, parsed, said
from rlbus.workers.system.dynamo_weights import Weights

Reply = dict[str, Any]
RouteHandler = Callable[[Call], Awaitable[Reply]]
# Routes that change nothing, and may be asked for by GET.
READING = frozenset({"liveness_probe", "get_weight_version"})


class DynamoShape:
    """How Dynamo's system server and its handlers spell what goes wrong."""

    def error(self, error: CallError) -> Response:
        """With 200 it is a handler's word, else the server's, which has a title."""
        body: Reply = {"status": "error", "message": error.message}
        if error.status != 200:
            body["error"] = error.title
        return JSONResponse(body, status_code=error.status)

    def fault(self, result: Result) -> Response:
        """An op that was refused, or failed: 200, as Dynamo does. `code` and `detail` are rlbus' own."""
        fault = result.fault
        body: Reply = {"status": "error", "message": "no reason was given" if fault is None else fault.message}
        if fault is not None:
            body |= {"code": fault.code.value, "detail": dict(fault.detail)}
        return JSONResponse(body)


DYNAMO_SHAPE: Shape = DynamoShape()


@dataclass(frozen=True, slots=True)
class _Surface:
    """The routes by name."""

    handlers: Mapping[str, RouteHandler]

    async def post(self, call: Call) -> Response:
        """Any route."""
        return JSONResponse(await self._find(call)(call))

    async def get(self, call: Call) -> Response:
        """One that only reads."""
        handler = self._find(call)
        if _route(call) not in READING:
            raise CallError(405, "Method not allowed", f"use POST on {call.request.url.path}")
        return JSONResponse(await handler(call))

    def _find(self, call: Call) -> RouteHandler:
        route = _route(call)
        if route == "update_weights_from_tensor":
            # Dynamo advertises it and then says this; here it isn't advertised.
            raise said("update_weights_from_tensor is not implemented")
        served = engine_routes(call.agent.descriptor.routes)
        if route not in served or route not in self.handlers:
            has = ", ".join(name for name in served if name in self.handlers)
            text = f"Route {call.request.url.path} not found; this worker has {has}"
            raise CallError(404, "Route not found", text)
        return self.handlers[route]


def dynamo_endpoints() -> list[Endpoint]:
    """`/engine/<route>`, and the same as `/engine/control/<route>`."""
    weights = Weights()
    surface = _Surface(
        {
            "liveness_probe": _liveness_probe,
            "pause_generation": _pause_generation,
            "resume_generation": _resume_generation,
            "flush_cache": _flush_cache,
            "abort_request": _abort_request,
            "get_weight_version": weights.get_version,
            "set_weight_version": weights.set_version,
            "update_weights_from_disk": weights.from_disk,
            "update_weights_from_distributed": weights.from_distributed,
        }
    )
    return [
        Endpoint("/engine/{route:path}", "POST", surface.post, DYNAMO_SHAPE),
        Endpoint("/engine/{route:path}", "GET", surface.get, DYNAMO_SHAPE),
    ]


def _route(call: Call) -> str:
    return str(call.request.path_params["route"]).removeprefix("control/")


async def _liveness_probe(call: Call) -> Reply:
    parsed(call, Empty)
    await call.agent.observe()
    problem = health_problem(call.agent)
    if problem is not None:
        return {"status": "error", "alive": False, "message": problem}
    return {"status": "ok", "alive": True}


async def _pause_generation(call: Call) -> Reply:
    """The pause is the caller's, and ends by itself unless it is renewed by another one."""
    body = parsed(call, Pause)
    if body.mode not in tuple(PauseMode):
        raise said(f"Invalid mode {body.mode!r}; expected keep|wait|abort")
    await call.do(PauseGeneration(mode=PauseMode(body.mode), clear_cache=body.clear_cache))
    return {"status": "ok", "message": "Engine paused", "mode": body.mode, "clear_cache": body.clear_cache}


async def _resume_generation(call: Call) -> Reply:
    parsed(call, Empty)
    await call.do(ResumeGeneration())
    return {"status": "ok", "message": "Engine resumed"}


async def _flush_cache(call: Call) -> Reply:
    parsed(call, Empty)
    await call.do(FlushCache())
    return {"status": "ok", "message": "Cache flushed"}


async def _abort_request(call: Call) -> Reply:
    body = parsed(call, Abort)
    if not body.request_id:
        raise said("Missing 'request_id' in body")
    await call.do(AbortRequest(request_ids=(body.request_id,)))
    return {"status": "ok", "request_id": body.request_id}
