"""Which of several faults is shown as the cause, and op ids of steps."""

import pytest

from rlbus.controller.answers import answer_of
from rlbus.controller.causes import fault, named, root_cause
from rlbus.controller.op_ids import derive, is_pause_of_op
from rlbus.fanout import Gathered
from rlbus.schemas import Fault, FaultCode, Outcome, Result, ResultStatus, WorkerId, is_token

pytestmark = pytest.mark.unit

W1 = WorkerId("backend/1")


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], None),
        (["engine_failed", "no_ack"], "engine_failed"),
        (["sender_failed", "transfer_failed", "worker_lost"], "worker_lost"),
        (["transfer_failed", "sender_failed"], "sender_failed"),
        (["stalled", "transfer_failed"], "stalled"),
        (["cancelled", "transfer_failed"], "cancelled"),
    ],
)
def test_the_cause_is_the_first_fault_that_is_no_echo_of_another(codes: list[str], expected: str | None) -> None:
    """A dead worker is shown, not the broken group that it left."""
    found = root_cause([fault(FaultCode(c), c) for c in codes])
    assert (None if found is None else found.code.value) == expected


def test_a_fault_is_named_after_its_worker_once() -> None:
    """Where no worker stands beside it."""
    once = named(fault(FaultCode.ENGINE_FAILED, "it broke", tensor="x"), W1)
    assert (once.message, once.detail) == ("backend/1: it broke", {"tensor": "x", "worker": "backend/1"})
    assert named(once, W1) == once
    assert named(fault(FaultCode.NO_ACK, "backend/1 is silent"), W1).message == "backend/1 is silent"


@pytest.mark.parametrize("op_id", ["a", "0" * 32, "x" * 64])
def test_the_op_id_of_a_step_is_a_token_and_the_same_each_time(op_id: str) -> None:
    """Also when the op's own id leaves no room."""
    step = derive(op_id, "prepare-again")
    assert is_token(step)
    assert step == derive(op_id, "prepare-again")
    assert step != derive(op_id, "page-12")
    assert step.endswith("-prepare-again")


def test_a_pause_of_an_op_is_told_from_a_persons() -> None:
    """By the step in its owner."""
    assert [is_pause_of_op(o) for o in (derive("u", "pause"), "ann", "cli:bob")] == [True, False, False]


def result(status: ResultStatus, why: Fault | None = None) -> Result:
    return Result(op_id="o", component="backend", instance_id="1", boot_id="b", status=status, fault=why, took_s=0.5)


@pytest.mark.parametrize(
    ("gathered", "outcome", "code"),
    [
        (Gathered(W1, result=result(ResultStatus.OK)), Outcome.OK, None),
        (
            Gathered(W1, result=result(ResultStatus.REFUSED, fault(FaultCode.BUSY, "b"))),
            Outcome.REFUSED,
            FaultCode.BUSY,
        ),
        (
            Gathered(W1, result=result(ResultStatus.FAILED, fault(FaultCode.ENGINE_DEAD, "d"))),
            Outcome.FAILED,
            FaultCode.ENGINE_DEAD,
        ),
        (Gathered(W1, result=result(ResultStatus.FAILED)), Outcome.FAILED, FaultCode.INTERNAL),
        (Gathered(W1, fault=fault(FaultCode.NO_ACK, "silent")), Outcome.UNKNOWN, FaultCode.NO_ACK),
        (
            Gathered(W1, fault=fault(FaultCode.NO_ACK, "silent", settled="not_begun")),
            Outcome.REFUSED,
            FaultCode.NO_ACK,
        ),
        (Gathered(W1), Outcome.UNKNOWN, FaultCode.INTERNAL),
    ],
)
def test_an_answer_is_ok_refused_failed_or_unknown(
    gathered: Gathered, outcome: Outcome, code: FaultCode | None
) -> None:
    """A worker that never got the command has refused nothing and done nothing: nothing changed there."""
    answer = answer_of(gathered)
    assert (answer.outcome, None if answer.fault is None else answer.fault.code) == (outcome, code)
