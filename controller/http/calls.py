"""One HTTP request as an op of the controller: who asks, of whom, for how long; and what is answered."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.controller.http import reading
from rlbus.controller.http.answers import OP_ID, VERSION, BadRequestError, error_of
from rlbus.controller.http.shared import SharedOps
from rlbus.errors import BusyError, DeadlineError, RLBusError, UnansweredError
from rlbus.schemas import Fault, FaultCode, GetFleet, Report, Target

# The name of what `FleetClient.status` asks, and some verbs do before they begin.
QUESTION = str(GetFleet.__struct_config__.tag)
MAX_LIMIT_S = 86_400.0

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Calls:
    """Ops for HTTP callers of one namespace. `aclose` takes back what still runs."""

    def __init__(self, bus: Bus, namespace: str) -> None:
        self._bus = bus
        self._namespace = namespace
        self._ops = SharedOps()

    def client(self, caller: str = "http") -> FleetClient:
        """Asks the controller as `caller`."""
        return FleetClient(self._bus, self._namespace, caller=caller)

    async def aclose(self) -> None:
        """Take back what still runs. Idempotent. Cancel: it is left to the controller."""
        await self._ops.aclose()

    async def run(
        self,
        request: Request,
        limit_s: float,
        what: Hashable,
        verb: Callable[..., Awaitable[Report]],
        *,
        is_repeatable: bool = True,
    ) -> Report:
        """Have `verb` run for this request: `verb(fleet, target=..., op_id=..., deadline_s=...)`; the report, if ok.

        `what` is the verb and all that it is told: whoever asks for the same while it runs joins it. `is_repeatable`
        False: only under the op's own name, since doing it twice isn't the same as once (requests and cache entries
        that came in between). `limit_s` counts unless the caller says otherwise.

        Raises: BadRequestError. What the verbs of `FleetClient` raise; UnansweredError (ask again) only of an op that
            the caller has named, or that wasn't begun.
        Cancel: it goes on for `shared.GRACE_S`.
        """
        caller = reading.caller_of(request)
        given = reading.op_id_of(request)
        used_s = reading.seconds_of(request, reading.LIMIT_HEADER, limit_s, MAX_LIMIT_S)
        target = Target(components=reading.components_of(request.query_params))
        op_id = self._bus.new_id() if given is None else given
        request.scope[OP_ID] = op_id
        fleet = self.client(caller)

        def begin() -> Awaitable[Report]:
            return verb(fleet, target=target, op_id=op_id, deadline_s=used_s)

        # Another request under the same name is no repeat: the controller refuses it.
        key = (caller, given if is_repeatable else op_id, target, used_s, what)
        joined = asyncio.ensure_future(self._ops.join(key, begin))
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({joined, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not joined.done():
                raise BadRequestError("the client went away", None, HTTPStatus.REQUEST_TIMEOUT)
            if joined.cancelled():  # the op, that is: we aren't, or `wait` would have raised
                message = "the op is being taken back; ask again"
                raise BusyError(Fault(code=FaultCode.BUSY, message=message, retryable=True))
            return joined.result()
        except UnansweredError as exc:
            # The same again joins what may have been begun; or only a question was asked until then.
            if given is not None or exc.operation == QUESTION:
                raise
            problem = f"{exc.problem}; send {reading.OP_ID_HEADER} to be able to ask again"
            raise DeadlineError(exc.operation, exc.limit_s, problem) from exc
        finally:
            for task in (joined, gone):
                task.cancel()
            await asyncio.gather(joined, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Return when the client closes the connection; only after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def answered(what: str, handler: Handler) -> Handler:
    """A handler whose errors are answers; `what` is what couldn't be done, as in "pause generation"."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except RLBusError as exc:
            return error_of(exc, what, request.scope.get(OP_ID))

    return handle


def done(body: dict[str, Any], report: Report) -> Response:
    """The answer to an op that is ok: vLLM's body, and what rlbus knows in headers."""
    headers = {OP_ID: report.op_id} | ({} if report.version is None else {VERSION: str(report.version)})
    return JSONResponse(body, headers=headers)
