"""Fault codes: a closed set, spelled as on the wire."""

import msgspec
import pytest

from rlbus.schemas import Fault, FaultCode

pytestmark = pytest.mark.unit


def test_codes_are_spelled_on_the_wire_as_in_python() -> None:
    """Lower-case name, no surprises for whoever greps a log."""
    assert all(code.value == code.name.lower() for code in FaultCode)


def test_a_fault_needs_only_code_and_message() -> None:
    """Not retryable and without detail, unless it says so; details aren't shared."""
    a = msgspec.json.decode(b'{"code":"busy","message":"m"}', type=Fault)
    b = Fault(code=FaultCode.BUSY, message="m")
    assert a == b
    assert (a.retryable, a.detail) == (False, {})
    assert a.detail is not b.detail


def test_a_code_that_nobody_knows_does_not_parse() -> None:
    """The set is closed: a new one is a new schema version."""
    with pytest.raises(msgspec.ValidationError, match="code"):
        msgspec.json.decode(b'{"code":"gremlins","message":"m"}', type=Fault)
