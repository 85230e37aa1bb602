"""Faults as the controller makes and weighs them. Pure."""

from collections.abc import Sequence

import msgspec

from rlbus.schemas import Fault, FaultCode, WorkerId

# What tends to be the echo of another failure: a broken group breaks everybody in it. Smaller is nearer the cause.
_RANK = {
    FaultCode.SENDER_FAILED: 1,
    FaultCode.CANCELLED: 1,
    FaultCode.DEADLINE: 1,
    FaultCode.TRANSFER_FAILED: 2,
    FaultCode.GROUP_FAILED: 2,
    FaultCode.STALLED: 2,
}


def fault(code: FaultCode, message: str, *, retryable: bool = False, **detail: object) -> Fault:
    """A fault with its values as text."""
    return Fault(code=code, message=message, retryable=retryable, detail={k: str(v) for k, v in detail.items()})


def named(cause: Fault, worker: WorkerId) -> Fault:
    """The same fault, saying which worker it is about, for where no worker stands beside it."""
    if cause.detail.get("worker") == worker:
        return cause
    message = cause.message if worker in cause.message else f"{worker}: {cause.message}"
    return msgspec.structs.replace(cause, message=message, detail={**cause.detail, "worker": worker})


def root_cause(causes: Sequence[Fault]) -> Fault | None:
    """The one to show of several, in order of appearance: the first that isn't likely the echo of another.

    A killed worker shows first as a sender that lost its connection; its own silence is noticed only later.
    """
    return min(causes, key=lambda cause: _RANK.get(cause.code, 0), default=None)
