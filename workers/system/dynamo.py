"""Dynamo's surface of a worker: `POST /engine/<route>`, with Dynamo's bodies, statuses and words.

Source: Dynamo 1.6.1, `dynamo/vllm/handlers.py` and the system status server. What a handler has to say comes with 200,
as `{"status": "ok" | "error", "message": ...}`; what isn't a call at all has an HTTP status of its own.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from rlbus._engine_routes import engine_routes, has_engine_route
from rlbus.schemas import (
    AbortRequest,
    FlushCache,
    PauseGeneration,
    PauseMode,
    Result,
    ResumeGeneration,
    Sleep,
    SleepTag,
    WakeUp,
)
from rlbus.workers.system.base import health_problem
from rlbus.workers.system.calls import Call, CallError, Endpoint, Handler, Shape, pause
from rlbus.workers.system.dynamo_bodies import Abort, Empty, Pause, SleepLevel, Tags, parsed, said
from rlbus.workers.system.dynamo_loras import list_loras, load_lora, unload_by_path, unload_lora
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
        routes = call.agent.descriptor.routes
        if not has_engine_route(route, frozenset(routes)):
            text = f"Route {call.request.url.path} not found; this worker has {', '.join(engine_routes(routes))}"
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
            "init_weights_update_group": weights.session.init,
            "destroy_weights_update_group": weights.session.destroy,
            "load_lora": load_lora,
            "unload_lora": unload_lora,
            "sleep": _sleep,
            "wake_up": _wake_up,
        }
    )
    return [
        Endpoint("/v1/loras", "GET", _as_json("list_loras", list_loras), DYNAMO_SHAPE),
        Endpoint("/v1/loras", "POST", _as_json("load_lora", load_lora), DYNAMO_SHAPE),
        Endpoint("/v1/loras/{lora_name:path}", "DELETE", _as_json("unload_lora", unload_by_path), DYNAMO_SHAPE),
        Endpoint("/engine/{route:path}", "POST", surface.post, DYNAMO_SHAPE),
        Endpoint("/engine/{route:path}", "GET", surface.get, DYNAMO_SHAPE),
    ]


def _as_json(needs: str, handler: RouteHandler) -> Handler:
    """The same for a path of its own; 404 where the engine hasn't what it needs."""

    async def handle(call: Call) -> Response:
        if needs not in call.agent.descriptor.routes:
            raise CallError(404, "Route not found", f"Route {call.request.url.path} not found: no adapters here")
        return JSONResponse(await handler(call))

    return handle


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
    await pause(call, PauseGeneration(mode=PauseMode(body.mode), clear_cache=body.clear_cache))
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


async def _sleep(call: Call) -> Reply:
    """All of the memory; requests in flight are ended, as Dynamo does."""
    body = parsed(call, SleepLevel)
    was_asleep = bool(call.agent.state.asleep)
    await call.do(Sleep(tags=_tags(body.tags), level=body.level, mode=PauseMode.ABORT))
    return {
        "status": "ok",
        "message": "Engine already sleeping" if was_asleep else f"Engine slept (level={body.level})",
    }


async def _wake_up(call: Call) -> Reply:
    """It never ends a pause: who paused resumes."""
    body = parsed(call, Tags)
    was_asleep = bool(call.agent.state.asleep)
    await call.do(WakeUp(tags=_tags(body.tags)))
    return {"status": "ok", "message": "Engine woke" if was_asleep else "Engine already awake"}


def _tags(names: tuple[str, ...] | None) -> tuple[SleepTag, ...] | None:
    unknown = [name for name in names or () if name not in tuple(SleepTag)]
    if unknown:
        raise said(f"there is no tag {unknown[0]!r}; use {', '.join(SleepTag)}")
    return None if names is None else tuple(SleepTag(name) for name in names)
