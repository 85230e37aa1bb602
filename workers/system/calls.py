"""One HTTP request to a worker: who asks, what the body says, and the agent that carries it out.

Invariants: a body is bounded, JSON, and of known fields before anything is done; whatever goes wrong is a `CallError`
or a fault, which the surface puts into its own shape; every mutation is logged with its caller.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rlbus._json_body import BodyError, read_json
from rlbus._seconds import read_seconds
from rlbus.errors import RLBusError, error_from_fault
from rlbus.schemas import (
    QUERY_ROUTES,
    CommandBody,
    FaultCode,
    PauseGeneration,
    RenewLease,
    Result,
    ResultStatus,
    is_token,
    route_of,
)
from rlbus.workers.agent import Agent
from rlbus.workers.entrance import MAX_LIMIT_S, MAX_REQUEST_BYTES
from rlbus.workers.lifecycle import is_mutation

_log = logging.getLogger("rlbus.workers")
T = TypeVar("T")

# Largest body that is read; the command that it becomes has an envelope, too.
MAX_BODY_BYTES = MAX_REQUEST_BYTES - 4096
# How long a body may take to arrive, in seconds.
BODY_S = 30.0
# How long an op of an HTTP caller may take unless it says otherwise, in seconds: what orchestrators give a reload.
DEFAULT_LIMIT_S = 300.0
# How long its pause holds unless it says otherwise, in seconds. Longer than an update of a large model takes; one that
# works for longer renews it by pausing again.
DEFAULT_LEASE_S = 600.0
# Between two looks at whether the worker is at work for somebody else, in seconds: a look costs nothing.
TURN_S = 0.1
# What is answered from what is known, changes nothing, and is asked anew each time.
QUESTIONS = QUERY_ROUTES | {"list_loras"}
MAX_CALLER_CHARS = 128
# Less than an op_id may have: the ops of one call that go with the main one have a suffix.
MAX_OP_ID_CHARS = 48

# Headers that any caller may send. An op_id makes a repeat join the first.
OP_ID = "x-rlbus-op-id"
CALLER = "x-rlbus-caller"
LEASE_S = "x-rlbus-lease-s"
LIMIT_S = "x-rlbus-limit-s"

# Fault code -> HTTP status, for surfaces that speak in statuses. Any other is 500.
STATUS_OF: Mapping[FaultCode, int] = {
    FaultCode.BAD_MESSAGE: 400,
    FaultCode.TOO_LARGE: 413,
    FaultCode.NO_ROUTE: 501,
    FaultCode.NOT_A_MEMBER: 409,
    FaultCode.EXPIRED: 504,
    FaultCode.STALE_TERM: 409,
    FaultCode.STALE_EPOCH: 409,
    FaultCode.BUSY: 409,
    FaultCode.WRONG_STATE: 409,
    FaultCode.ASLEEP: 409,
    FaultCode.NO_CAPACITY: 409,
    FaultCode.REVISION_TAKEN: 409,
    FaultCode.DIRTY: 409,
    FaultCode.VERSION_REGRESSION: 409,
    FaultCode.MANIFEST_UNKNOWN: 422,
    FaultCode.MANIFEST_MISMATCH: 422,
    FaultCode.UNKNOWN_OP: 404,
    FaultCode.DEADLINE: 504,
    FaultCode.ENGINE_DEAD: 503,
    FaultCode.CANCELLED: 409,
}


class CallError(RLBusError):
    """A request can't be carried out, and nothing was done. `title` is short and constant, `message` says why."""

    def __init__(self, status: int, title: str, message: str) -> None:
        super().__init__(status, title, message)
        self.status = status
        self.title = title
        self.message = message

    def __str__(self) -> str:
        return self.message


class Shape(Protocol):
    """How one surface spells what goes wrong."""

    def error(self, error: CallError) -> Response:
        """A request that wasn't carried out."""
        ...

    def fault(self, result: Result) -> Response:
        """An op that was refused, or failed; `result.fault` says why."""
        ...


class Provider(Protocol):
    """Where the agent is found: it may come after the server, and be replaced."""

    def __call__(self) -> Agent | None:
        """The agent that runs now."""
        ...


@dataclass(slots=True)
class Call:
    """What a handler works with. `op_id` and the rest come from headers, and hold for the one op that a call makes."""

    request: Request
    agent: Agent
    body: bytes
    caller: str
    op_id: str | None = None
    lease_s: float = DEFAULT_LEASE_S
    limit_s: float = DEFAULT_LIMIT_S
    # Whether this call has made ops; they are named after `name`.
    has_op: bool = False

    @property
    def name(self) -> str:
        """The op_id of this call's main op."""
        if self.op_id is None:
            self.op_id = self.agent.new_op_id()
        return self.op_id

    def json(self) -> dict[str, Any]:
        """The body as an object; no body is an empty one.

        Raises:
            CallError: it is none.
        """
        if not self.body:
            return {}
        try:
            data = read_json(self.body)
        except BodyError as exc:
            raise CallError(400, "Invalid JSON", str(exc)) from exc
        if not isinstance(data, dict):
            raise CallError(400, "Invalid body", "request body must be a JSON object")
        return data

    def parse(self, as_type: type[T]) -> T:
        """The body as a Struct that forbids unknown fields.

        Raises:
            CallError: it isn't one; names the field.
        """
        return convert(self.json(), as_type)

    async def submit(self, body: CommandBody, part: str | None = None) -> Result:
        """Have the agent do it; the result, whatever it is. The main op has the call's name, any other is a `part`; a
        question is none, and may be asked under the name of an op.

        Cancel: the op goes on (`Entrance.submit`).
        """
        if route_of(body) in QUESTIONS:
            return await self.submit_anew(body)
        self.has_op = True
        return await self._submit(body, self.name if part is None else f"{self.name}-{part}")

    async def submit_anew(self, body: CommandBody) -> Result:
        """The same for what is done again when the call is repeated, whatever came of it before: under its own op_id.

        Cancel: see `submit`.
        """
        return await self._submit(body, self.agent.new_op_id())

    async def _submit(self, body: CommandBody, op_id: str) -> Result:
        if is_mutation(body):
            _log.info("%s asks for %s (op %s)", self.caller, route_of(body), op_id)
        return await self.agent.entrance.submit(
            body, caller=self.caller, lease_s=self.lease_s, op_id=op_id, limit_s=self.limit_s
        )

    async def do(self, body: CommandBody, part: str | None = None) -> Result:
        """The same for a handler that can go on only if it went well.

        Raises:
            OpError: it was refused, or failed. Cancel: see `submit`.
        """
        result = await self.submit(body, part)
        if result.status is not ResultStatus.OK:
            raise OpError(result)
        return result

    async def then(self, body: CommandBody, part: str | None = None) -> Result:
        """The same for what follows on another op of this call. Between the two anybody's op may take the worker's one
        place: it is waited for, as long as an op of this call may take, since half of a call is worse than a late one.

        Raises:
            OpError: see `do`. Cancel: see `submit`; what isn't begun is dropped.
        """
        until_s = asyncio.get_running_loop().time() + self.limit_s
        while True:
            is_late = asyncio.get_running_loop().time() >= until_s
            result = await self.submit(body, part)
            if result.status is ResultStatus.OK:
                return result
            if is_late or not is_busy(result):
                raise OpError(result)
            await self.turn(until_s)

    async def turn(self, until_s: float) -> None:
        """Wait for the worker to be at nobody's work, until `until_s` of the loop's time. Cancel: leaves nothing."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, min(TURN_S, until_s - loop.time())))
            if self.agent.state.running is None or loop.time() >= until_s:
                return


async def pause(call: Call, body: PauseGeneration) -> None:
    """Pause the worker in the caller's name. One that it paused so before, and that takes an update at the moment, can
    do no op: there another pause renews the lease of the first, and the caches are emptied after the update anyway.

    Raises:
        OpError: it was refused, or failed. Cancel: see `Call.submit`.
    """
    result = await call.submit(body)
    if is_busy(result) and _is_again(call, body):
        result = await call.submit_anew(RenewLease(owner=call.caller, lease_s=call.lease_s))
    if result.status is not ResultStatus.OK:
        raise OpError(result)


def _is_again(call: Call, body: PauseGeneration) -> bool:
    """Whether the worker stands still, for an update, as this caller has asked for it before."""
    state = call.agent.state
    if state.pause is None or state.session is None:
        return False
    return (state.pause.owner, state.pause.mode) == (call.caller, body.mode.value)


def is_busy(result: Result) -> bool:
    """Whether nothing was done because another op runs, which ends by itself and so is worth waiting for. An update
    that is open doesn't; and a disk or an engine that calls itself busy names no op.
    """
    if result.status is not ResultStatus.REFUSED or result.fault is None or result.fault.code is not FaultCode.BUSY:
        return False
    return "op_id" in result.fault.detail and "open" not in result.fault.detail


class OpError(RLBusError):
    """An op of a call didn't end well."""

    def __init__(self, result: Result) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        return "" if self.result.fault is None else str(error_from_fault(self.result.fault))


Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path and method of a surface. `path` as Starlette spells it."""

    path: str
    method: str
    handler: Handler
    shape: Shape


def convert(data: Mapping[str, Any], as_type: type[T]) -> T:
    """An object as a Struct that forbids unknown fields.

    Raises:
        CallError: it isn't one; names the field.
    """
    try:
        return msgspec.convert(data, as_type, strict=True)
    except msgspec.ValidationError as exc:
        raise CallError(400, "Invalid body", str(exc)) from exc


async def read_call(request: Request, agent: Agent) -> Call:
    """Read headers and body.

    Raises:
        CallError: they are too large, or wrong; names what. Cancel: nothing was done.
    """
    headers = request.headers
    op_id = headers.get(OP_ID)
    if op_id is not None and not (is_token(op_id) and len(op_id) <= MAX_OP_ID_CHARS):
        raise CallError(400, "Invalid header", f"{OP_ID}: use 1 to {MAX_OP_ID_CHARS} of A-Z a-z 0-9 _ -")
    return Call(
        request=request,
        agent=agent,
        body=await read_body(request),
        caller=_caller(request),
        op_id=op_id,
        lease_s=_seconds(request, LEASE_S, DEFAULT_LEASE_S),
        limit_s=_seconds(request, LIMIT_S, DEFAULT_LIMIT_S),
    )


def _caller(request: Request) -> str:
    """Who holds what this request makes: what the caller calls itself, else where it comes from."""
    name = request.headers.get(CALLER)
    if name is None:
        return f"http:{'local' if request.client is None else request.client.host}"
    if not 0 < len(name) <= MAX_CALLER_CHARS or not name.isprintable():
        raise CallError(400, "Invalid header", f"{CALLER}: use 1 to {MAX_CALLER_CHARS} printable characters")
    return f"http:{name}"


def _seconds(request: Request, name: str, default: float) -> float:
    text = request.headers.get(name)
    if text is None:
        return default
    value = read_seconds(text, MAX_LIMIT_S)
    if value is None:
        problem = f"{name}: use seconds above 0 and at most {MAX_LIMIT_S:g}, as plain digits such as 60 or 0.5"
        raise CallError(400, "Invalid header", problem)
    return value


async def read_body(request: Request) -> bytes:
    """The body, in bounded time and memory; one that isn't empty says that it is JSON.

    Raises:
        CallError: it is too large, too slow, or of another type. Cancel: nothing was done.
    """
    too_large = CallError(413, "Body too large", f"the body has more than {MAX_BODY_BYTES} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise too_large
    parts: list[bytes] = []
    size_bytes = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size_bytes += len(part)
                if size_bytes > MAX_BODY_BYTES:
                    raise too_large
                parts.append(part)
    except TimeoutError as exc:
        raise CallError(408, "Body too slow", f"the body didn't arrive within {BODY_S:g} s") from exc
    body = b"".join(parts)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and kind != "application/json":
        raise CallError(
            415, "Unsupported content type", f"the content type is {kind or 'missing'}; use application/json"
        )
    return body
