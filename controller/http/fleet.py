"""vLLM's RL verbs, and prime-rl's admin plane, on the whole fleet: each call is one op of the controller.

Every route is a client of the bus like any other (`rlbus.client`), so that HTTP has no rules of its own: one mutation
at a time, a half pause undone, op ids that join, leases, dirty weights that stay paused. Answers have vLLM's bodies;
the op id and the version come in headers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlbus.bus import Bus
from rlbus.client import FleetClient, as_pause_mode
from rlbus.controller.http import reading
from rlbus.controller.http.answers import OP_ID, VERSION, BadRequestError, error, error_of
from rlbus.controller.http.shared import SharedOps
from rlbus.errors import ConfigError, NoWorkerError, PartialError, RLBusError
from rlbus.schemas import AbortedData, Fault, FaultCode, Generation, Liveness, MemberView, Report, Target

# How long a pause over HTTP holds unless the caller says otherwise, in seconds. Longer than an update of a large model
# takes; a dead orchestrator must not leave the fleet paused for ever.
DEFAULT_LEASE_S = 600.0
MAX_LIMIT_S = 86_400.0
# How long ops may take unless the caller says otherwise, in seconds. A client that hears nothing for its own time-out
# and asks again joins the op that runs, so these may be longer than any such. Reading the weights of a large model may
# take over an hour (prime-rl#3599).
PAUSE_S = 300.0
RESUME_S = 60.0
FLUSH_S = 60.0
ABORT_S = 30.0
UPDATE_S = 7200.0
QUESTION_S = 10.0

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class NoBody(msgspec.Struct):
    """Of verbs that are told everything in the query."""


class AbortBody(msgspec.Struct):
    """As vLLM's: no or empty `request_ids` aborts all."""

    request_ids: list[str] | None = None


class UpdateBody(msgspec.Struct):
    """As prime-rl's. Caches are always emptied, so `skip_prefix_cache_reset` changes nothing."""

    weight_dir: str | None
    skip_prefix_cache_reset: bool = False


class FleetRoutes:
    """The verbs of one namespace. `aclose` takes back what still runs."""

    def __init__(self, bus: Bus, namespace: str) -> None:
        self._bus = bus
        self._namespace = namespace
        self._ops = SharedOps()

    def routes(self) -> list[Route]:
        """To be mounted at the root, as vLLM has them."""
        return [
            Route("/pause", self._verb("pause generation", self._pause), methods=["POST"]),
            Route("/resume", self._verb("resume generation", self._resume), methods=["POST"]),
            Route("/abort_requests", self._verb("abort requests", self._abort), methods=["POST"]),
            Route("/reset_prefix_cache", self._verb("reset the caches", self._flush), methods=["POST"]),
            Route("/update_weights", self._verb("update weights", self._update), methods=["POST"]),
            Route("/init_broadcaster", self._verb("form a group", self._no_broadcaster), methods=["POST"]),
            Route("/is_paused", self._verb("fetch pause status", self._is_paused), methods=["GET"]),
            Route("/get_world_size", self._verb("get the world size", self._world_size), methods=["GET"]),
            Route("/weight_info", self._verb("get the weight version", self._weight_info), methods=["GET"]),
        ]

    async def aclose(self) -> None:
        """Take back what still runs. Idempotent. Cancel: it is left to the controller."""
        await self._ops.aclose()

    # -- verbs --------------------------------------------------------------------------------------------------------

    async def _pause(self, request: Request) -> Response:
        query = request.query_params
        reading.check_query(query, {"mode", "clear_cache", "component"}, {"component"})
        mode = as_pause_mode(query.get("mode", "abort"))  # vLLM's default
        clear_cache = reading.flag(query, "clear_cache", True)
        lease_s = _lease_of(request)
        await reading.read_body(request, NoBody)
        call = _Call(self, request, PAUSE_S)
        report = await call.run(
            ("pause", mode, clear_cache, lease_s),
            lambda fleet, **op: fleet.pause(mode=mode, clear_cache=clear_cache, lease_s=lease_s, **op),
        )
        return _done({"status": "paused"}, report)

    async def _resume(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"component"}, {"component"})
        await reading.read_body(request, NoBody)
        report = await _Call(self, request, RESUME_S).run(("resume",), lambda fleet, **op: fleet.resume(**op))
        return _done({"status": "resumed"}, report)

    async def _abort(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"component"}, {"component"})
        body = await reading.read_body(request, AbortBody)
        ids = tuple(body.request_ids) if body.request_ids else None
        report = await _Call(self, request, ABORT_S).run(None, lambda fleet, **op: fleet.abort(request_ids=ids, **op))
        counts = [o.data.num_aborted for o in report.outcomes if isinstance(o.data, AbortedData)]
        return _done({"status": "aborted", "aborted": sum(counts)}, report)

    async def _flush(self, request: Request) -> Response:
        query = request.query_params
        reading.check_query(query, {"reset_running_requests", "reset_external", "component"}, {"component"})
        for name in ("reset_running_requests", "reset_external"):
            if reading.flag(query, name, False):
                problem = f"{name}=true isn't served: rlbus empties the engines' own caches, and preempts nobody"
                raise BadRequestError(problem, name, HTTPStatus.NOT_IMPLEMENTED)
        await reading.read_body(request, NoBody)
        try:
            report = await _Call(self, request, FLUSH_S).run(None, lambda fleet, **op: fleet.flush(**op))
        except PartialError as exc:
            if not _only_blocked(exc.report):
                raise
            return _done({"success": False}, exc.report)
        return _done({"success": True}, report)

    async def _update(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"component"}, {"component"})
        body = await reading.read_body(request, UpdateBody)
        path = body.weight_dir
        if path is None:
            problem = (
                "weight_dir is null: an update over prime-rl's own NCCL group isn't served; use its filesystem one"
            )
            raise BadRequestError(problem, "weight_dir", HTTPStatus.NOT_IMPLEMENTED)
        report = await _Call(self, request, UPDATE_S).run(
            ("update", path), lambda fleet, **op: fleet.reload(path, **op)
        )
        return _done({"status": "ok"}, report)

    async def _no_broadcaster(self, _request: Request) -> Response:
        # Not left out: prime-rl takes a 404 for "needs none", and its trainer would wait in the group for ever.
        problem = "prime-rl's own NCCL group isn't served; set its weight broadcast to filesystem, or use rlbus.Trainer"
        return error(HTTPStatus.NOT_IMPLEMENTED, problem)

    # -- questions ----------------------------------------------------------------------------------------------------

    async def _is_paused(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"component"}, {"component"})
        members = await self._living(request)
        # Who asks wants to know whether all stand still: one that runs means no.
        is_paused = all(m.status.generation is Generation.PAUSED for m in members)
        return JSONResponse({"is_paused": is_paused})

    async def _world_size(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"include_dp", "component"}, {"component"})
        if not reading.flag(request.query_params, "include_dp", True):
            problem = "include_dp=false isn't served: a worker's world size here is that of all of its ranks"
            raise BadRequestError(problem, "include_dp", HTTPStatus.NOT_IMPLEMENTED)
        members = await self._living(request)
        return JSONResponse({"world_size": sum(m.descriptor.world_size for m in members)})

    async def _weight_info(self, request: Request) -> Response:
        reading.check_query(request.query_params, ())
        view = await self.client("http").status(deadline_s=QUESTION_S)
        # "default" is what vLLM says of weights that no update has named.
        return JSONResponse({"weight_version": "default" if view.version is None else str(view.version)})

    async def _living(self, request: Request) -> list[MemberView]:
        components = reading.components_of(request.query_params)
        view = await self.client("http").status(deadline_s=QUESTION_S)
        there = (Liveness.ALIVE, Liveness.SUSPECT)
        members = [m for m in view.members if m.liveness in there]
        if components is not None:
            members = [m for m in members if m.descriptor.component in components]
        if not members:
            raise NoWorkerError(Fault(code=FaultCode.NO_WORKER, message="no worker is there", retryable=True))
        return members

    # -- around them --------------------------------------------------------------------------------------------------

    def client(self, caller: str) -> FleetClient:
        """Asks the controller as `caller`."""
        return FleetClient(self._bus, self._namespace, caller=caller)

    def new_id(self) -> str:
        """An op id."""
        return self._bus.new_id()

    @property
    def ops(self) -> SharedOps:
        """What runs for callers of these routes."""
        return self._ops

    def _verb(self, what: str, handler: Handler) -> Handler:
        """A handler whose errors are answers; `what` is what couldn't be done."""

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except ConfigError as exc:
                return error(HTTPStatus.BAD_REQUEST, str(exc))
            except RLBusError as exc:
                return error_of(exc, what, request.scope.get(OP_ID))

        return handle


class _Call:
    """One request for an op: who asks, of whom, and for how long. Raises BadRequestError."""

    def __init__(self, owner: FleetRoutes, request: Request, limit_s: float) -> None:
        self._owner = owner
        self._request = request
        self._caller = reading.caller_of(request)
        self._op_id = reading.op_id_of(request)
        self._limit_s = reading.seconds_of(request, reading.LIMIT_HEADER, limit_s, MAX_LIMIT_S)
        components = reading.components_of(request.query_params)
        self._target = Target(components=components)

    async def run(self, what: Hashable | None, verb: Callable[..., Awaitable[Report]]) -> Report:
        """The report, once it is ok. Whoever asks for the same `what` while it runs joins it; None: nobody does, since
        doing it twice isn't the same as once (requests and cache entries that came in between).

        Raises: what the verbs of `FleetClient` raise.
        Cancel: it goes on for `shared.GRACE_S`.
        """
        op_id = self._owner.new_id() if self._op_id is None else self._op_id
        self._request.scope[OP_ID] = op_id
        fleet = self._owner.client(self._caller)

        def begin() -> Awaitable[Report]:
            return verb(fleet, target=self._target, op_id=op_id, deadline_s=self._limit_s)

        key = op_id if what is None else (self._caller, self._op_id, self._target, self._limit_s, what)
        joined = asyncio.ensure_future(self._owner.ops.join(key, begin))
        gone = asyncio.ensure_future(_gone(self._request))
        try:
            await asyncio.wait({joined, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not joined.done():
                raise BadRequestError("the client went away", None, HTTPStatus.REQUEST_TIMEOUT)
            return joined.result()
        finally:
            for task in (joined, gone):
                task.cancel()
            await asyncio.gather(joined, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Return when the client closes the connection; only after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _lease_of(request: Request) -> float | None:
    if request.headers.get(reading.LEASE_HEADER, "").lower() == reading.HOLD:
        return None
    return reading.seconds_of(request, reading.LEASE_HEADER, DEFAULT_LEASE_S, MAX_LIMIT_S)


def _only_blocked(report: Report) -> bool:
    """Whether the one thing that went wrong is that caches couldn't be emptied, which vLLM answers with `success`."""
    faults = [o.fault.code for o in report.outcomes if o.fault is not None]
    return bool(faults) and set(faults) == {FaultCode.FLUSH_FAILED}


def _done(body: dict[str, Any], report: Report) -> Response:
    headers = {OP_ID: report.op_id} | ({} if report.version is None else {VERSION: str(report.version)})
    return JSONResponse(body, headers=headers)
