"""vLLM's RL verbs, and prime-rl's admin plane, on the whole fleet: each call is one op of the controller.

Every route is a client of the bus like any other (`rlbus.client`), so that HTTP has no rules of its own: one mutation
at a time, a half pause undone, op ids that join, leases, dirty weights that stay paused. Answers have vLLM's bodies;
the op id and the version come in headers.
"""

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlbus._vllm_words import NO_BROADCASTER
from rlbus.client import as_pause_mode
from rlbus.controller.http import reading
from rlbus.controller.http.answers import BadRequestError
from rlbus.controller.http.calls import MAX_LIMIT_S, Calls, answered, done
from rlbus.controller.http.loras import LoraRoutes
from rlbus.controller.http.memory import QUESTION_S, MemoryRoutes, living
from rlbus.controller.http.native import NativeRoutes, NoBody
from rlbus.errors import PartialError
from rlbus.schemas import AbortedData, FaultCode, Generation, Report

# How long a pause over HTTP holds unless the caller says otherwise, in seconds. Longer than an update of a large model
# takes; a dead orchestrator must not leave the fleet paused for ever.
DEFAULT_LEASE_S = 600.0
# How long ops may take unless the caller says otherwise, in seconds. A client that hears nothing for its own time-out
# and asks again joins the op that runs, so these may be longer than any such. Reading the weights of a large model may
# take over an hour (prime-rl#3599).
PAUSE_S = 300.0
RESUME_S = 60.0
FLUSH_S = 60.0
ABORT_S = 30.0
UPDATE_S = 7200.0


class AbortBody(msgspec.Struct):
    """As vLLM's: no or empty `request_ids` aborts all."""

    request_ids: list[str] | None = None


class UpdateBody(msgspec.Struct):
    """As prime-rl's (`weight_dir`) or vLLM's (`update_info`), one of them.

    Caches are always emptied, so `skip_prefix_cache_reset` changes nothing.
    """

    weight_dir: str | msgspec.UnsetType | None = msgspec.UNSET
    skip_prefix_cache_reset: bool = False
    update_info: dict[str, Any] | list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class FleetRoutes:
    """The verbs of one namespace."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._native = NativeRoutes(calls)

    def routes(self) -> list[Route]:
        """To be mounted at the root, as vLLM has them."""
        return [
            Route("/pause", answered("pause generation", self._pause), methods=["POST"]),
            Route("/resume", answered("resume generation", self._resume), methods=["POST"]),
            Route("/abort_requests", answered("abort requests", self._abort), methods=["POST"]),
            Route("/reset_prefix_cache", answered("reset the caches", self._flush), methods=["POST"]),
            Route("/update_weights", answered("update weights", self._update), methods=["POST"]),
            Route("/init_broadcaster", answered("form a group", self._no_broadcaster), methods=["POST"]),
            Route("/is_paused", answered("fetch pause status", self._is_paused), methods=["GET"]),
            Route("/get_world_size", answered("get the world size", self._world_size), methods=["GET"]),
            Route("/weight_info", answered("get the weight version", self._weight_info), methods=["GET"]),
            *self._native.routes(),
            *MemoryRoutes(self._calls).routes(),
            *LoraRoutes(self._calls).routes(),
        ]

    # -- verbs --------------------------------------------------------------------------------------------------------

    async def _pause(self, request: Request) -> Response:
        query = request.query_params
        reading.check_query(query, {"mode", "clear_cache", "component"}, {"component"})
        mode = as_pause_mode(query.get("mode", "abort"))  # vLLM's default
        clear_cache = reading.flag(query, "clear_cache", True)
        lease_s = _lease_of(request)
        await reading.read_body(request, NoBody)
        report = await self._calls.run(
            request,
            PAUSE_S,
            ("pause", mode, clear_cache, lease_s),
            lambda fleet, **op: fleet.pause(mode=mode, clear_cache=clear_cache, lease_s=lease_s, **op),
        )
        return done({"status": "paused"}, report)

    async def _resume(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"component"}, {"component"})
        await reading.read_body(request, NoBody)
        report = await self._calls.run(request, RESUME_S, ("resume",), lambda fleet, **op: fleet.resume(**op))
        return done({"status": "resumed"}, report)

    async def _abort(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"component"}, {"component"})
        body = await reading.read_body(request, AbortBody)
        ids = tuple(body.request_ids) if body.request_ids else None
        report = await self._calls.run(
            request,
            ABORT_S,
            ("abort", ids),
            lambda fleet, **op: fleet.abort(request_ids=ids, **op),
            is_repeatable=False,
        )
        # Those that end at their first token are aborted, too; an engine may not count.
        told = [o.data for o in report.outcomes if isinstance(o.data, AbortedData)]
        num = sum((data.num_aborted or 0) + data.num_deferred for data in told)
        return done({"status": "aborted", "aborted": num}, report)

    async def _flush(self, request: Request) -> Response:
        query = request.query_params
        reading.check_query(query, {"reset_running_requests", "reset_external", "component"}, {"component"})
        for name in ("reset_running_requests", "reset_external"):
            if reading.flag(query, name, False):
                problem = f"{name}=true isn't served: rlbus empties the engines' own caches, and preempts nobody"
                raise BadRequestError(problem, name, HTTPStatus.NOT_IMPLEMENTED)
        await reading.read_body(request, NoBody)
        try:
            report = await self._calls.run(
                request, FLUSH_S, ("flush",), lambda fleet, **op: fleet.flush(**op), is_repeatable=False
            )
        except PartialError as exc:
            if not _only_blocked(exc.report):
                raise
            return done({"success": False}, exc.report)
        return done({"success": True}, report)

    async def _update(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"component"}, {"component"})
        body = await reading.read_body(request, UpdateBody)
        if (body.weight_dir is msgspec.UNSET) is (body.update_info is msgspec.UNSET):
            raise BadRequestError("give weight_dir (a folder) or update_info (vLLM's weight transfer)", "weight_dir")
        if not isinstance(body.update_info, msgspec.UnsetType):
            return await self._native.update(request, body.update_info)
        path = body.weight_dir
        if not isinstance(path, str):
            problem = (
                "weight_dir is null: an update over prime-rl's own NCCL group isn't served; use its filesystem one"
            )
            raise BadRequestError(problem, "weight_dir", HTTPStatus.NOT_IMPLEMENTED)
        report = await self._calls.run(
            request, UPDATE_S, ("update", path), lambda fleet, **op: fleet.reload(path, **op)
        )
        return done({"status": "ok"}, report)

    async def _no_broadcaster(self, _request: Request) -> Response:
        raise BadRequestError(NO_BROADCASTER, None, HTTPStatus.NOT_IMPLEMENTED)

    # -- questions ----------------------------------------------------------------------------------------------------

    async def _is_paused(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"component"}, {"component"})
        members = await living(self._calls, request)
        # Who asks wants to know whether all stand still: one that runs means no.
        is_paused = all(m.status.generation is Generation.PAUSED for m in members)
        return JSONResponse({"is_paused": is_paused})

    async def _world_size(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"include_dp", "component"}, {"component"})
        if not reading.flag(request.query_params, "include_dp", True):
            problem = "include_dp=false isn't served: a worker's world size here is that of all of its ranks"
            raise BadRequestError(problem, "include_dp", HTTPStatus.NOT_IMPLEMENTED)
        members = await living(self._calls, request)
        return JSONResponse({"world_size": sum(m.descriptor.world_size for m in members)})

    async def _weight_info(self, request: Request) -> Response:
        reading.check_query(request.query_params, ())
        view = await self._calls.client().status(deadline_s=QUESTION_S)
        # "default" is what vLLM says of weights that no update has named.
        return JSONResponse({"weight_version": "default" if view.version is None else str(view.version)})


def _lease_of(request: Request) -> float | None:
    if request.headers.get(reading.LEASE_HEADER, "").lower() == reading.HOLD:
        return None
    return reading.seconds_of(request, reading.LEASE_HEADER, DEFAULT_LEASE_S, MAX_LIMIT_S)


def _only_blocked(report: Report) -> bool:
    """Whether the one thing that went wrong is that caches couldn't be emptied, which vLLM answers with `success`."""
    faults = [o.fault.code for o in report.outcomes if o.fault is not None]
    return bool(faults) and set(faults) == {FaultCode.FLUSH_FAILED}
