"""What goes wrong, in vLLM's shape of an error and with a status that its clients and prime-rl's understand.

A client that retries on 5xx only (prime-rl does) is told 503 for whatever passes by itself: a running op, no worker
yet, no controller, a place that a request still keeps; and 4xx for what another try doesn't help.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

from rlbus._vllm_words import RETRY_AFTER_S, error_body
from rlbus.adapter import AdapterError
from rlbus.errors import (
    BrokenError,
    ConfigError,
    DeadlineError,
    FaultError,
    PartialError,
    PayloadTooLargeError,
    RLBusError,
    UnansweredError,
)
from rlbus.schemas import Fault, FaultCode, Outcome, Report

# Response headers: which op it was, and the version that it gave the fleet.
OP_ID = "x-rlbus-op-id"
VERSION = "x-rlbus-version"
RETRY_AFTER = "retry-after"

# Fault code -> status. Any other is 500.
STATUS_OF: Mapping[FaultCode, HTTPStatus] = {
    FaultCode.BAD_MESSAGE: HTTPStatus.BAD_REQUEST,
    FaultCode.TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    FaultCode.NO_ROUTE: HTTPStatus.NOT_IMPLEMENTED,
    FaultCode.UNKNOWN_OP: HTTPStatus.NOT_FOUND,
    FaultCode.WRONG_STATE: HTTPStatus.CONFLICT,
    FaultCode.NOT_A_MEMBER: HTTPStatus.CONFLICT,
    FaultCode.STALE_EPOCH: HTTPStatus.CONFLICT,
    FaultCode.ASLEEP: HTTPStatus.CONFLICT,
    FaultCode.DIRTY: HTTPStatus.CONFLICT,
    FaultCode.VERSION_REGRESSION: HTTPStatus.CONFLICT,
    FaultCode.NO_CAPACITY: HTTPStatus.CONFLICT,
    FaultCode.REVISION_TAKEN: HTTPStatus.CONFLICT,
    FaultCode.CANCELLED: HTTPStatus.CONFLICT,
    FaultCode.MANIFEST_UNKNOWN: HTTPStatus.UNPROCESSABLE_ENTITY,
    FaultCode.MANIFEST_MISMATCH: HTTPStatus.UNPROCESSABLE_ENTITY,
    FaultCode.BUSY: HTTPStatus.SERVICE_UNAVAILABLE,
    FaultCode.NO_WORKER: HTTPStatus.SERVICE_UNAVAILABLE,
    FaultCode.NOT_RECORDED: HTTPStatus.SERVICE_UNAVAILABLE,
    FaultCode.CONTROLLER_LOST: HTTPStatus.SERVICE_UNAVAILABLE,
    FaultCode.STALE_TERM: HTTPStatus.SERVICE_UNAVAILABLE,
    FaultCode.EXPIRED: HTTPStatus.GATEWAY_TIMEOUT,
    FaultCode.DEADLINE: HTTPStatus.GATEWAY_TIMEOUT,
}
# Outcomes of workers on which nothing changed, or no longer is changed.
UNCHANGED = frozenset({Outcome.REFUSED, Outcome.UNDONE, Outcome.SKIPPED})


class BadRequestError(RLBusError):
    """The HTTP request itself is wrong, and nothing was begun. `param` is the field, None if it is none."""

    def __init__(self, problem: str, param: str | None = None, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(problem, param, status)
        self.problem = problem
        self.param = param
        self.status = status

    def __str__(self) -> str:
        return self.problem


def error(
    status: HTTPStatus,
    message: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    details: Mapping[str, Any] | None = None,
) -> JSONResponse:
    """An error as vLLM's server words it; `details` stand beside it as `rlbus`, for who wants to know more."""
    body = error_body(status, message, param)
    if details is not None:
        body["rlbus"] = dict(details)
    given = dict(headers or {})
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        given[RETRY_AFTER] = str(RETRY_AFTER_S)
    return JSONResponse(body, status_code=status, headers=given)


def error_of(
    exc: RLBusError, what: str, op_id: str | None = None, *, later: HTTPStatus = HTTPStatus.SERVICE_UNAVAILABLE
) -> JSONResponse:
    """The answer to a request that ended with `exc`; `what` is what was tried, as in "pause generation".

    `later` is the status of what passes by itself, for a route whose clients ask again after another one only; what
    took too long is meant, too, since they would give up.
    """
    if isinstance(exc, BadRequestError):
        return error(exc.status, exc.problem, param=exc.param)
    details: dict[str, Any] | None = None
    ended = exc if isinstance(exc, PartialError) else exc.__cause__  # see `rlbus.reports.raise_for_report`
    if isinstance(ended, PartialError):
        details, op_id = details_of(ended.report), ended.report.op_id
    elif isinstance(exc, FaultError):
        details = {"op_id": op_id, **_fault(exc.fault)}
    headers = {} if op_id is None else {OP_ID: op_id}
    status = status_of(exc)
    is_late = status is HTTPStatus.GATEWAY_TIMEOUT and later is not HTTPStatus.SERVICE_UNAVAILABLE
    if is_late or status is HTTPStatus.SERVICE_UNAVAILABLE:
        status, headers = later, {**headers, RETRY_AFTER: str(RETRY_AFTER_S)}
    return error(status, f"Failed to {what}: {exc}", headers=headers, details=details)


def status_of(exc: RLBusError) -> HTTPStatus:
    """The status that says who has to do something, and whether the same request may succeed later."""
    match exc:
        case PartialError():
            return _status_of_report(exc.report)
        case FaultError() if exc.fault.code is FaultCode.TOO_LARGE and not isinstance(exc.__cause__, PartialError):
            return HTTPStatus.INTERNAL_SERVER_ERROR  # what the controller has to say, not what was sent
        case FaultError():
            return _status_of_fault(exc.fault)
        case UnansweredError():
            return HTTPStatus.SERVICE_UNAVAILABLE  # whoever leads next answers
        case DeadlineError():
            return HTTPStatus.GATEWAY_TIMEOUT
        case PayloadTooLargeError():
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        case BrokenError():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case ConfigError():
            return HTTPStatus.BAD_REQUEST
        case AdapterError():
            return HTTPStatus.NOT_FOUND  # as vLLM of a folder that isn't there, or not yet: a shared one may lag
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR


def _status_of_report(report: Report) -> HTTPStatus:
    """A report's first cause decides where nothing changed on anybody; else it is a failure of the server's."""
    is_unchanged = all(outcome.outcome in UNCHANGED for outcome in report.outcomes)
    if not is_unchanged or report.fault is None:
        return HTTPStatus.INTERNAL_SERVER_ERROR
    return _status_of_fault(report.fault)


def _status_of_fault(fault: Fault) -> HTTPStatus:
    status = STATUS_OF.get(fault.code, HTTPStatus.INTERNAL_SERVER_ERROR)
    # A conflict that ends by itself, as of places that only requests in flight keep.
    return HTTPStatus.SERVICE_UNAVAILABLE if status is HTTPStatus.CONFLICT and fault.retryable else status


def details_of(report: Report) -> dict[str, Any]:
    """A report in short: one outcome per worker, and why."""
    outcomes = [
        {"worker": o.worker, "outcome": o.outcome.value, "phase": o.phase}
        | ({} if o.fault is None else _fault(o.fault))
        for o in report.outcomes
    ]
    found: dict[str, Any] = {"op_id": report.op_id, "status": report.status.value, "outcomes": outcomes}
    return found if report.fault is None else found | _fault(report.fault)


def _fault(fault: Fault) -> dict[str, Any]:
    return {"code": fault.code.value, "message": fault.message, "retryable": fault.retryable}
