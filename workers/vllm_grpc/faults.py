"""What a gRPC status of `vllm.Control` means in rlbus. Pure; codes by name, so that nothing here needs grpc.

Source: vLLM 0.32, rust/src/server/src/grpc/control.rs, for what vllm-rs answers with which code; the rest is gRPC's own
(https://grpc.github.io/grpc/core/md_doc_statuscodes.html).
"""

from rlbus.errors import EngineDeadError, EngineError, FaultError, error_from_fault
from rlbus.schemas import Fault, FaultCode

# Length of the server's text in a fault.
MAX_PROBLEM_CHARS = 500

# status -> (code, whether the same request may succeed later by itself). What isn't here is ENGINE_FAILED.
_CODES: dict[str, tuple[FaultCode, bool]] = {
    # Refused: the server's handler didn't begin, or turned down what it was asked.
    "INVALID_ARGUMENT": (FaultCode.BAD_MESSAGE, False),
    "OUT_OF_RANGE": (FaultCode.BAD_MESSAGE, False),
    "NOT_FOUND": (FaultCode.WRONG_STATE, False),
    "ALREADY_EXISTS": (FaultCode.WRONG_STATE, False),
    "FAILED_PRECONDITION": (FaultCode.WRONG_STATE, False),
    "UNIMPLEMENTED": (FaultCode.NO_ROUTE, False),
    "RESOURCE_EXHAUSTED": (FaultCode.TOO_LARGE, False),
    # Failed: it may have begun.
    "UNAUTHENTICATED": (FaultCode.ENGINE_FAILED, False),
    "PERMISSION_DENIED": (FaultCode.ENGINE_FAILED, False),
    "ABORTED": (FaultCode.ENGINE_FAILED, True),
    "UNAVAILABLE": (FaultCode.ENGINE_FAILED, True),
    "DEADLINE_EXCEEDED": (FaultCode.ENGINE_FAILED, True),
    "CANCELLED": (FaultCode.ENGINE_FAILED, True),
    "INTERNAL": (FaultCode.ENGINE_FAILED, False),
    "UNKNOWN": (FaultCode.ENGINE_FAILED, False),
    "DATA_LOSS": (FaultCode.ENGINE_FAILED, False),
}
# What to do about it, where the server's own text doesn't say.
_ADVICE = {
    "UNIMPLEMENTED": "this server's gRPC service has no such call; it needs vLLM 0.32 or newer",
    "UNAUTHENTICATED": "the server wants other credentials; see --header",
    "PERMISSION_DENIED": "the server refuses these credentials; see --header",
    "RESOURCE_EXHAUSTED": "the message is larger than the server takes, or the server is at its limit",
    "UNAVAILABLE": "the connection broke, so it may or may not have been done",
}

# Words of an engine that is gone, in the texts with which its server, which goes on, answers for it.
# Source: seen with vllm-rs 0.32 after the end of its EngineCore (the first), and its error.rs (the others).
_GONE = (
    "client not found by identity",
    "engine core reported fatal failure",
    "engine-core client is closed",
    "engine control channel closed",
)


def is_engine_gone(status: str, details: str) -> bool:
    """Whether the server says that the engine behind it is dead."""
    return status in ("INTERNAL", "UNKNOWN", "UNAVAILABLE") and any(words in details for words in _GONE)


def fault_of(status: str, method: str, details: str, limit_s: float) -> Fault:
    """The fault for a call that ended with this status (gRPC's name of it).

    Args:
        method: the RPC's name. `details` is the server's text; `limit_s` the call's own deadline.
    """
    code, is_retryable = _CODES.get(status, (FaultCode.ENGINE_FAILED, False))
    if status == "DEADLINE_EXCEEDED":
        text = f"{method} did not return within {limit_s:g} s"
    else:
        said = " ".join(details.split())[:MAX_PROBLEM_CHARS]
        text = ": ".join(part for part in (f"{method} failed", said, _ADVICE.get(status, "")) if part)
    detail = {"grpc_status": status, "method": method}
    return Fault(code=code, message=text, retryable=is_retryable, detail=detail)


def error_of(status: str, method: str, details: str, limit_s: float) -> FaultError:
    """The exception of `fault_of`."""
    return error_from_fault(fault_of(status, method, details, limit_s))


def dead(why: str) -> EngineDeadError:
    """The engine is gone, or isn't the one any more that it was."""
    return EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=why))


def as_engine_error(exc: FaultError) -> EngineError:
    """The same fault as a failure, for steps in which a refusal by the server can't promise that nothing changed."""
    if isinstance(exc, EngineError):
        return exc
    return EngineError(
        Fault(code=FaultCode.ENGINE_FAILED, message=exc.fault.message, retryable=False, detail=exc.fault.detail)
    )
