"""Which status a client gets for what went wrong, and whether it is one after which it asks again."""

from http import HTTPStatus

import pytest

from rlbus.controller.http.answers import error_of
from rlbus.errors import (
    DeadlineError,
    PartialError,
    PayloadTooLargeError,
    RLBusError,
    UnansweredError,
    error_from_fault,
)
from rlbus.schemas import Fault, FaultCode, OpStatus, Outcome, Report, WorkerId, WorkerOutcome

pytestmark = pytest.mark.unit


def fault_of(code: FaultCode, *, retryable: bool = False) -> RLBusError:
    """As the client raises it."""
    return error_from_fault(Fault(code=code, message="m", retryable=retryable))


def ended(code: FaultCode, outcome: Outcome) -> RLBusError:
    """An op that ended so on its one worker."""
    why = Fault(code=code, message="m")
    outcomes = (WorkerOutcome(worker=WorkerId("backend/1"), outcome=outcome, phase="pause", fault=why),)
    report = Report(
        op_id="x", op="load_lora", status=OpStatus.FAILED, outcomes=outcomes, phases_s={}, took_s=1.0, fault=why
    )
    return PartialError(report)


@pytest.mark.parametrize(
    ("exc", "status"),
    [
        (fault_of(FaultCode.BUSY), 503),
        (UnansweredError("load_lora", 15.0), 503),
        (fault_of(FaultCode.NO_CAPACITY, retryable=True), 503),
        (fault_of(FaultCode.CANCELLED, retryable=True), 503),
        (DeadlineError("load_lora", 120.0), 504),
        (fault_of(FaultCode.EXPIRED), 504),
        (ended(FaultCode.DEADLINE, Outcome.UNDONE), 504),
    ],
)
def test_what_passes_by_itself_has_the_one_status_after_which_a_routes_clients_ask_again(
    exc: RLBusError, status: int
) -> None:
    """What took too long, too, where they would give up after 504."""
    assert error_of(exc, "load").status_code == status
    again = error_of(exc, "load", later=HTTPStatus.INTERNAL_SERVER_ERROR)
    assert (again.status_code, again.headers["retry-after"]) == (500, "1")


@pytest.mark.parametrize(
    ("exc", "status"),
    [
        (fault_of(FaultCode.NO_CAPACITY), 409),
        (fault_of(FaultCode.CANCELLED), 409),
        (fault_of(FaultCode.REVISION_TAKEN), 409),
        (fault_of(FaultCode.MANIFEST_MISMATCH), 422),
        (ended(FaultCode.NO_CAPACITY, Outcome.REFUSED), 409),
    ],
)
def test_what_waiting_does_not_end_is_never_answered_as_if_it_did(exc: RLBusError, status: int) -> None:
    """On no route."""
    for later in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.INTERNAL_SERVER_ERROR):
        answer = error_of(exc, "load", later=later)
        assert (answer.status_code, answer.headers.get("retry-after")) == (status, None)


def test_an_answer_of_the_controllers_that_is_too_large_is_no_fault_of_the_request() -> None:
    """Least of all of a GET, which sends nothing; a report's own cause, and a body that doesn't fit on, stay 413."""
    assert error_of(fault_of(FaultCode.TOO_LARGE), "list the models").status_code == 500
    assert error_of(ended(FaultCode.TOO_LARGE, Outcome.REFUSED), "load").status_code == 413
    refused = fault_of(FaultCode.TOO_LARGE)
    refused.__cause__ = ended(FaultCode.TOO_LARGE, Outcome.REFUSED)
    assert error_of(refused, "load").status_code == 413
    assert error_of(PayloadTooLargeError("message", 2, 1), "update the weights").status_code == 413
