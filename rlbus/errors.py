"""Every error that rlbus raises, as a tree, and the table between wire codes and classes.

```
RLBusError
  ConfigError(ValueError)        name, value
  ClosedError                    you closed it
  BrokenError                    the world did; __cause__ says how
  DeadlineError(TimeoutError)    operation, limit_s
    UnansweredError              nobody ever answered
  PayloadTooLargeError           what, size_bytes, limit_bytes
  DecodeError                    subject, expected
  TransferError                  operation
  ConflictError                  key, revision
  FaultError                     fault: somebody answered with a Fault
    RefusedError                 nothing changed
      BusyError                  running_op_id
      NoWorkerError
      StaleError                 an old term, epoch or expiry
      WrongStateError
      VersionRegressionError
      ManifestError              tensor
      CapacityError              capacity
    EngineError
      EngineDeadError
      TornWeightsError
  PartialError                   report: one outcome per worker
```

Errors carry data in attributes, build their text from it, and can be pickled. Foreign errors are mapped at the seam
where they appear. `asyncio.CancelledError` always passes.
"""

from typing import Any

from rlbus.schemas.faults import Fault, FaultCode


class RLBusError(Exception):
    """Base of all errors of rlbus."""


class ConfigError(RLBusError, ValueError):
    """A setting is wrong. `name` is the setting, `value` what it was, `problem` what to do about it."""

    def __init__(self, name: str, value: object, problem: str) -> None:
        super().__init__(name, value, problem)
        self.name = name
        self.value = value
        self.problem = problem

    def __str__(self) -> str:
        if self.value is None or isinstance(self.value, bool):  # an option that wasn't given, or that takes no value
            return f"{self.name}: {self.problem}"
        return f"{self.name}={self.value!r}: {self.problem}"


class ClosedError(RLBusError):
    """The object was closed by its own user. `what` names it."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} is closed"


class BrokenError(RLBusError):
    """The other end went away, or was never there. `what` names it, `problem` says how; `__cause__` has the cause."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(what, problem)
        self.what = what
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.what}: {self.problem}"


class DeadlineError(RLBusError, TimeoutError):
    """`operation` did not end within `limit_s` seconds. `problem` says what was still missing, if known."""

    def __init__(self, operation: str, limit_s: float, problem: str = "") -> None:
        super().__init__(operation, limit_s, problem)
        self.operation = operation
        self.limit_s = limit_s
        self.problem = problem

    def __str__(self) -> str:
        tail = f": {self.problem}" if self.problem else ""
        return f"{self.operation} did not end within {self.limit_s:g} s{tail}"


class UnansweredError(DeadlineError):
    """Nothing was ever heard of the request: nobody leads yet, or we are cut off. Somebody who couldn't answer any more
    may have begun it; the same `op_id` again joins that.
    """


class PayloadTooLargeError(RLBusError):
    """A message would exceed what the server takes. Nothing was sent."""

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(what, size_bytes, limit_bytes)
        self.what = what
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes

    def __str__(self) -> str:
        return f"{self.what} has {self.size_bytes} bytes, the limit is {self.limit_bytes}"


class DecodeError(RLBusError):
    """A message doesn't parse as `expected`. `problem` names the field."""

    def __init__(self, subject: str, expected: str, problem: str) -> None:
        super().__init__(subject, expected, problem)
        self.subject = subject
        self.expected = expected
        self.problem = problem

    def __str__(self) -> str:
        return f"message on {self.subject} is no {self.expected}: {self.problem}"


class TransferError(RLBusError):
    """Forming or using a process group failed on this side. `operation` says which, `problem` how."""

    def __init__(self, operation: str, problem: str) -> None:
        super().__init__(operation, problem)
        self.operation = operation
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.operation}: {self.problem}"


class GroupBrokenError(TransferError):
    """A collective failed, or was left: somebody else's end may be the cause, so that another try can succeed."""


class ConflictError(RLBusError):
    """Something else stands under `key` than the write of `revision` (None: nothing). Nothing was written."""

    def __init__(self, key: str, revision: int | None) -> None:
        super().__init__(key, revision)
        self.key = key
        self.revision = revision

    def __str__(self) -> str:
        expected = "nothing" if self.revision is None else f"revision {self.revision}"
        return f"{self.key}: somebody else wrote it; expected {expected}"


class MissingError(RLBusError):
    """What was asked for isn't there. `what` names it, `problem` says since when or why."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(what, problem)
        self.what = what
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.what}: {self.problem}"


class FaultError(RLBusError):
    """Somebody answered with a fault. `fault` is what they said, `who` who said it ("" if unknown)."""

    def __init__(self, fault: Fault, who: str = "") -> None:
        super().__init__(fault, who)
        self.fault = fault
        self.who = who

    @property
    def code(self) -> FaultCode:
        """The code of the fault."""
        return self.fault.code

    def __str__(self) -> str:
        head = f"{self.who}: " if self.who else ""
        return f"{head}{self.fault.message} [{self.fault.code.value}]"


class RefusedError(FaultError):
    """The request was refused before anything changed."""


class BusyError(RefusedError):
    """Another op is running."""

    @property
    def running_op_id(self) -> str | None:
        """The op that runs, if the refusal named it."""
        return self.fault.detail.get("op_id")


class NoWorkerError(RefusedError):
    """The request addresses no worker."""


class StaleError(RefusedError):
    """It came from an old controller, an old process group, or too late."""


class WrongStateError(RefusedError):
    """The worker is in no state for it (not paused, dirty, ...)."""


class AsleepError(WrongStateError):
    """Memory that it needs sleeps; `detail["tags"]` of the fault names what to wake."""


class VersionRegressionError(RefusedError):
    """The version isn't newer than what is served."""


class ManifestError(RefusedError):
    """The announced tensors don't fit the model."""

    @property
    def tensor(self) -> str | None:
        """The first tensor that doesn't fit, if named."""
        return self.fault.detail.get("tensor")


class CapacityError(RefusedError):
    """Every place for an adapter is taken: unload one, or let the load evict an idle older revision."""

    @property
    def capacity(self) -> int | None:
        """How many places there are, if the refusal says so."""
        text = self.fault.detail.get("capacity")
        return int(text) if text is not None and text.isdecimal() else None


class EngineError(FaultError):
    """The engine failed; the worker's status says what it left."""


class EngineDeadError(EngineError):
    """The engine is gone and has to be restarted by what supervises it."""


class TornWeightsError(EngineError):
    """The weights are dirty: an update failed after its first byte, or its checksum differs."""


class PartialError(RLBusError):
    """An op didn't end well on every worker that it needed. `report` has one outcome per worker.

    The type is `rlbus.schemas.Report`; it is `Any` here only because exceptions are rebuilt from `args` by pickle.
    """

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        bad = [o for o in self.report.outcomes if o.outcome.value != "ok"]
        parts = [f"{o.worker} {o.outcome.value} in {o.phase}{f': {o.fault.message}' if o.fault else ''}" for o in bad]
        # The op's own fault is the cause of what has none; where every worker has its own, it would only repeat them.
        if self.report.fault is not None and not (bad and all(o.fault for o in bad)):
            parts.insert(0, self.report.fault.message)
        text = f"{self.report.op} {self.report.op_id} ended {self.report.status.value}: " + "; ".join(parts)
        return " ".join(text.splitlines())


_CLASS_OF_CODE: dict[FaultCode, type[FaultError]] = {
    FaultCode.BAD_MESSAGE: RefusedError,
    FaultCode.TOO_LARGE: RefusedError,
    FaultCode.NO_ROUTE: RefusedError,
    FaultCode.NOT_A_MEMBER: RefusedError,
    FaultCode.UNKNOWN_OP: RefusedError,
    FaultCode.NOT_RECORDED: RefusedError,
    FaultCode.BUSY: BusyError,
    FaultCode.NO_WORKER: NoWorkerError,
    FaultCode.EXPIRED: StaleError,
    FaultCode.STALE_TERM: StaleError,
    FaultCode.STALE_EPOCH: StaleError,
    FaultCode.WRONG_STATE: WrongStateError,
    FaultCode.ASLEEP: AsleepError,
    FaultCode.DIRTY: WrongStateError,
    FaultCode.VERSION_REGRESSION: VersionRegressionError,
    FaultCode.MANIFEST_MISMATCH: ManifestError,
    FaultCode.MANIFEST_UNKNOWN: ManifestError,
    FaultCode.NO_CAPACITY: CapacityError,
    FaultCode.REVISION_TAKEN: RefusedError,
    FaultCode.ENGINE_FAILED: EngineError,
    FaultCode.ENGINE_DEAD: EngineDeadError,
    FaultCode.CHECKSUM_MISMATCH: TornWeightsError,
    FaultCode.FLUSH_FAILED: EngineError,
    FaultCode.TRANSFER_FAILED: EngineError,
    FaultCode.GROUP_FAILED: EngineError,
}


def error_from_fault(fault: Fault, who: str = "") -> FaultError:
    """The exception for a fault that somebody answered with. Its class says whether something may have changed: only a
    RefusedError promises that nothing has.
    """
    return _CLASS_OF_CODE.get(fault.code, FaultError)(fault, who)


def refused(code: FaultCode, message: str, *, retryable: bool = False, **detail: object) -> FaultError:
    """Build the exception of `code` in place: `raise refused(FaultCode.BUSY, "...", op_id=running)`."""
    return error_from_fault(
        Fault(code=code, message=message, retryable=retryable, detail={k: str(v) for k, v in detail.items()})
    )
