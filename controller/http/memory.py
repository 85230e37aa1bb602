"""vLLM's sleep and wake on the whole fleet, where its engines have them."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlbus.client import as_pause_mode, as_sleep_tags
from rlbus.controller.http import reading
from rlbus.controller.http.answers import BadRequestError
from rlbus.controller.http.calls import Calls, answered, done
from rlbus.controller.http.native import NoBody
from rlbus.errors import NoWorkerError
from rlbus.schemas import Fault, FaultCode, Liveness, MemberView

# How long an op may take unless the caller says otherwise, in seconds: weights move to host memory and back.
SLEEP_S = 600.0
QUESTION_S = 10.0
LEVELS = ("1", "2")


class MemoryRoutes:
    """`/sleep`, `/wake_up` and `/is_sleeping`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def routes(self) -> list[Route]:
        """To be mounted at the root, as vLLM has them."""
        return [
            Route("/sleep", answered("put the engines to sleep", self._sleep), methods=["POST"]),
            Route("/wake_up", answered("wake the engines up", self._wake), methods=["POST"]),
            Route("/is_sleeping", answered("fetch sleep status", self._is_sleeping), methods=["GET"]),
        ]

    async def _sleep(self, request: Request) -> Response:
        query = request.query_params
        reading.check_query(query, {"level", "mode", "component"}, {"component"})
        level = query.get("level", "1")
        if level not in LEVELS:
            raise BadRequestError(
                f"level={level[: reading.MAX_NAME_CHARS]!r}: use 1 or 2; pause does what 0 does", "level"
            )
        mode = as_pause_mode(query.get("mode", "abort"))
        await reading.read_body(request, NoBody)
        report = await self._calls.run(
            request,
            SLEEP_S,
            ("sleep", level, mode),
            lambda fleet, **op: fleet.sleep(level=int(level), mode=mode, **op),
        )
        return done({"status": "sleeping", "level": int(level)}, report)

    async def _wake(self, request: Request) -> Response:
        query = request.query_params
        reading.check_query(query, {"tags", "component"}, {"tags", "component"})
        tags = query.getlist("tags") or None
        as_sleep_tags(tags)
        await reading.read_body(request, NoBody)
        asked = None if tags is None else tuple(tags)
        report = await self._calls.run(
            request, SLEEP_S, ("wake", asked), lambda fleet, **op: fleet.wake(tags=asked, **op)
        )
        is_asleep = any(m.status.asleep for m in await self._living(request))
        return done({"status": "sleeping" if is_asleep else "awake", "tags": tags}, report)

    async def _is_sleeping(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"component"}, {"component"})
        # One that sleeps means yes: not all of the fleet can be used.
        return JSONResponse({"is_sleeping": any(m.status.asleep for m in await self._living(request))})

    async def _living(self, request: Request) -> list[MemberView]:
        return await living(self._calls, request)


async def living(calls: Calls, request: Request) -> list[MemberView]:
    """The workers that the request is about and that are there, by the leader's view.

    Raises: NoWorkerError: nobody is. What `FleetClient.status` raises. Cancel: leaves nothing.
    """
    components = reading.components_of(request.query_params)
    view = await calls.client().status(deadline_s=QUESTION_S)
    members = [m for m in view.members if m.liveness in (Liveness.ALIVE, Liveness.SUSPECT)]
    if components is not None:
        members = [m for m in members if m.descriptor.component in components]
    if not members:
        raise NoWorkerError(Fault(code=FaultCode.NO_WORKER, message="no worker is there", retryable=True))
    return members
