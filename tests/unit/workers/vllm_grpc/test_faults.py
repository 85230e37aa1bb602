"""What a gRPC status means: codes, classes, what may be tried again, and who is dead."""

import pytest

from rlbus.errors import EngineDeadError, EngineError, RefusedError
from rlbus.schemas import Fault, FaultCode
from rlbus.workers.checks import REFUSALS
from rlbus.workers.vllm_grpc.faults import MAX_PROBLEM_CHARS, as_engine_error, dead, error_of, fault_of, is_engine_gone

pytestmark = pytest.mark.unit

# Source: grpc.StatusCode, all but OK.
TABLE = {
    "CANCELLED": (FaultCode.ENGINE_FAILED, True),
    "UNKNOWN": (FaultCode.ENGINE_FAILED, False),
    "INVALID_ARGUMENT": (FaultCode.BAD_MESSAGE, False),
    "DEADLINE_EXCEEDED": (FaultCode.ENGINE_FAILED, True),
    "NOT_FOUND": (FaultCode.WRONG_STATE, False),
    "ALREADY_EXISTS": (FaultCode.WRONG_STATE, False),
    "PERMISSION_DENIED": (FaultCode.ENGINE_FAILED, False),
    "RESOURCE_EXHAUSTED": (FaultCode.TOO_LARGE, False),
    "FAILED_PRECONDITION": (FaultCode.WRONG_STATE, False),
    "ABORTED": (FaultCode.ENGINE_FAILED, True),
    "OUT_OF_RANGE": (FaultCode.BAD_MESSAGE, False),
    "UNIMPLEMENTED": (FaultCode.NO_ROUTE, False),
    "INTERNAL": (FaultCode.ENGINE_FAILED, False),
    "UNAVAILABLE": (FaultCode.ENGINE_FAILED, True),
    "DATA_LOSS": (FaultCode.ENGINE_FAILED, False),
    "UNAUTHENTICATED": (FaultCode.ENGINE_FAILED, False),
}


@pytest.mark.parametrize("status", TABLE)
def test_each_status_has_its_code(status: str) -> None:
    """And the fault names the call, the status, and what the server said."""
    fault = fault_of(status, "PauseGeneration", "some\n words", 3.0)
    assert (fault.code, fault.retryable) == TABLE[status]
    assert fault.detail == {"grpc_status": status, "method": "PauseGeneration"}
    assert "PauseGeneration" in fault.message
    assert "\n" not in fault.message


def test_a_status_that_nobody_knows_is_a_failure() -> None:
    """Never a refusal, which would promise that nothing has changed."""
    assert fault_of("SOMETHING_NEW", "Sleep", "", 1.0).code is FaultCode.ENGINE_FAILED


@pytest.mark.parametrize("status", TABLE)
def test_only_what_the_server_turned_down_is_a_refusal(status: str) -> None:
    """What may have begun is an EngineError; a code that promises that nothing has changed is a RefusedError."""
    error = error_of(status, "UpdateWeights", "", 1.0)
    assert isinstance(error, RefusedError if error.code in REFUSALS else EngineError)


def test_passed_deadline_says_how_long_it_was() -> None:
    """Whatever the server's text is."""
    assert fault_of("DEADLINE_EXCEEDED", "IsPaused", "Deadline Exceeded", 2.5).message == (
        "IsPaused did not return within 2.5 s"
    )


def test_text_of_the_server_is_cut() -> None:
    """A traceback of a page is no message."""
    assert len(fault_of("INTERNAL", "UpdateWeights", "x" * 5000, 1.0).message) < MAX_PROBLEM_CHARS + 100


@pytest.mark.parametrize(
    ("status", "details", "is_gone"),
    [
        ("INTERNAL", "is_paused failed: transport error: Destination client not found by identity", True),
        ("INTERNAL", "is_paused failed: engine core reported fatal failure", True),
        ("UNAVAILABLE", "pause_generation failed: engine-core client is closed: engine died", True),
        ("INTERNAL", "update_weights failed: utility call `collective_rpc` failed (call_id=3): boom", False),
        ("INVALID_ARGUMENT", "engine core reported fatal failure", False),
    ],
)
def test_dead_engine_is_told_by_the_words_of_its_server(status: str, details: str, is_gone: bool) -> None:
    """Seen: the server of a killed EngineCore goes on, healthy, and answers so."""
    assert is_engine_gone(status, details) is is_gone


def test_a_refusal_within_an_update_is_a_failure() -> None:
    """The code must not promise that nothing has changed; the words stay."""
    refusal = error_of("FAILED_PRECONDITION", "FinishWeightUpdate", "no session", 1.0)
    error = as_engine_error(refusal)
    assert error.code is FaultCode.ENGINE_FAILED
    assert error.fault.message == refusal.fault.message
    failure = EngineError(Fault(code=FaultCode.GROUP_FAILED, message="x"))
    assert as_engine_error(failure) is failure


def test_dead_is_dead() -> None:
    """With the reason."""
    assert isinstance(dead("why"), EngineDeadError)
    assert dead("why").fault.message == "why"
