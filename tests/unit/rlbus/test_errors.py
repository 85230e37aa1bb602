"""The tree of errors: data in attributes, text from data, pickles, and a class for every code."""

import asyncio
import inspect
import pickle

import pytest

from rlbus import errors
from rlbus.schemas import (
    Fault,
    FaultCode,
    OpStatus,
    Outcome,
    Report,
    WorkerOutcome,
    worker_id,
)

pytestmark = pytest.mark.unit

FAULT = Fault(code=FaultCode.BUSY, message="another op runs", retryable=True, detail={"op_id": "op-9"})
REPORT = Report(
    op_id="op-1",
    op="pause",
    status=OpStatus.PARTIAL,
    outcomes=(
        WorkerOutcome(worker=worker_id("decode", "1"), outcome=Outcome.OK, phase="pause"),
        WorkerOutcome(worker=worker_id("decode", "2"), outcome=Outcome.REFUSED, phase="pause", fault=FAULT),
    ),
    phases_s={"pause": 0.5},
    took_s=0.5,
)
CAUSED = Report(
    op_id="op-1",
    op="pause",
    status=OpStatus.FAILED,
    outcomes=(WorkerOutcome(worker=worker_id("decode", "1"), outcome=Outcome.UNDONE, phase="transfer"),),
    phases_s={},
    took_s=0.5,
    fault=Fault(code=FaultCode.SENDER_FAILED, message="the sender failed:\nno disk"),
)

EXAMPLES: list[tuple[errors.RLBusError, str]] = [
    (errors.ConfigError("url", "x", "use nats://"), "url='x': use nats://"),
    (errors.ClosedError("bus"), "bus is closed"),
    (errors.BrokenError("q", "nobody listens"), "q: nobody listens"),
    (errors.DeadlineError("pause", 2.5), "pause did not end within 2.5 s"),
    (errors.DeadlineError("pause", 2.0, "decode/1 missing"), "pause did not end within 2 s: decode/1 missing"),
    (errors.UnansweredError("pause", 15.0, "silence"), "pause did not end within 15 s: silence"),
    (errors.PayloadTooLargeError("Command", 11, 10), "Command has 11 bytes, the limit is 10"),
    (errors.DecodeError("s", "Command", "no body"), "message on s is no Command: no body"),
    (errors.TransferError("join", "timed out"), "join: timed out"),
    (errors.BusyError(FAULT, "decode/1"), "decode/1: another op runs [busy]"),
    (errors.BusyError(FAULT), "another op runs [busy]"),
    (
        errors.PartialError(CAUSED),
        "pause op-1 ended failed: the sender failed: no disk; decode/1 undone in transfer",
    ),
    (errors.PartialError(REPORT), "pause op-1 ended partial: decode/2 refused in pause: another op runs"),
]

CLASS_OF_CODE = {
    FaultCode.BAD_MESSAGE: errors.RefusedError,
    FaultCode.TOO_LARGE: errors.RefusedError,
    FaultCode.NO_ROUTE: errors.RefusedError,
    FaultCode.NOT_A_MEMBER: errors.RefusedError,
    FaultCode.EXPIRED: errors.StaleError,
    FaultCode.STALE_TERM: errors.StaleError,
    FaultCode.STALE_EPOCH: errors.StaleError,
    FaultCode.NOT_RECORDED: errors.RefusedError,
    FaultCode.BUSY: errors.BusyError,
    FaultCode.WRONG_STATE: errors.WrongStateError,
    FaultCode.ASLEEP: errors.AsleepError,
    FaultCode.DIRTY: errors.WrongStateError,
    FaultCode.VERSION_REGRESSION: errors.VersionRegressionError,
    FaultCode.MANIFEST_UNKNOWN: errors.ManifestError,
    FaultCode.MANIFEST_MISMATCH: errors.ManifestError,
    FaultCode.NO_CAPACITY: errors.CapacityError,
    FaultCode.REVISION_TAKEN: errors.RefusedError,
    FaultCode.NO_WORKER: errors.NoWorkerError,
    FaultCode.UNKNOWN_OP: errors.RefusedError,
    FaultCode.ENGINE_FAILED: errors.EngineError,
    FaultCode.ENGINE_DEAD: errors.EngineDeadError,
    FaultCode.TRANSFER_FAILED: errors.EngineError,
    FaultCode.GROUP_FAILED: errors.EngineError,
    FaultCode.CHECKSUM_MISMATCH: errors.TornWeightsError,
    FaultCode.FLUSH_FAILED: errors.EngineError,
}


@pytest.mark.parametrize(("error", "text"), EXAMPLES)
def test_the_text_is_built_from_the_data(error: errors.RLBusError, text: str) -> None:
    """One line, with the values."""
    assert str(error) == text


@pytest.mark.parametrize(("error", "text"), EXAMPLES)
def test_errors_survive_pickle_with_their_data(error: errors.RLBusError, text: str) -> None:
    """They cross process boundaries."""
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == text
    assert vars(back) == vars(error)


def test_every_error_of_the_module_hangs_in_the_tree() -> None:
    """One base, names end in Error, no builtin is hidden."""
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
    assert len(classes) >= 20
    for cls in classes:
        assert issubclass(cls, errors.RLBusError)
        assert cls.__name__.endswith("Error")
        assert not hasattr(__builtins__, cls.__name__)


def test_deadline_and_config_errors_are_also_the_builtin_kind() -> None:
    """So that plain code catches them."""
    assert issubclass(errors.DeadlineError, TimeoutError)
    assert issubclass(errors.ConfigError, ValueError)
    assert not issubclass(asyncio.CancelledError, errors.RLBusError)


@pytest.mark.parametrize("code", list(FaultCode))
def test_every_code_maps_to_a_class_that_carries_the_fault(code: FaultCode) -> None:
    """Faults without a class of their own are plain FaultErrors: they promise nothing about what changed."""
    fault = Fault(code=code, message="m")
    error = errors.error_from_fault(fault, "decode/1")
    assert type(error) is CLASS_OF_CODE.get(code, errors.FaultError)
    assert (error.fault, error.code, error.who) == (fault, code, "decode/1")


def test_what_a_fault_names_is_an_attribute() -> None:
    """The running op, the first bad tensor, and how many adapters fit."""
    busy = errors.refused(FaultCode.BUSY, "m", op_id="op-9")
    assert isinstance(busy, errors.BusyError)
    assert busy.running_op_id == "op-9"
    manifest = errors.refused(FaultCode.MANIFEST_MISMATCH, "m", tensor="a.weight")
    assert isinstance(manifest, errors.ManifestError)
    assert manifest.tensor == "a.weight"
    full = errors.refused(FaultCode.NO_CAPACITY, "m", capacity=4)
    assert isinstance(full, errors.CapacityError)
    assert full.capacity == 4


def test_refused_builds_the_class_of_its_code_with_detail_as_text() -> None:
    """Values of any type become text."""
    error = errors.refused(FaultCode.STALE_TERM, "old", retryable=True, term=3)
    assert type(error) is errors.StaleError
    assert error.fault == Fault(code=FaultCode.STALE_TERM, message="old", retryable=True, detail={"term": "3"})


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "--url: why"), (True, "--url: why"), (False, "--url: why"), ("", "--url='': why"), (0, "--url=0: why")],
)
def test_a_setting_without_a_value_is_shown_without_one(value: object, text: str) -> None:
    """None and True are words of Python, which nobody typed."""
    assert str(errors.ConfigError("--url", value, "why")) == text
