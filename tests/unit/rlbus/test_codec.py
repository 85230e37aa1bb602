"""Structs to bytes and back."""

import pytest

from rlbus.codec import MAX_MESSAGE_BYTES, decode, encode
from rlbus.errors import DecodeError, PayloadTooLargeError
from rlbus.schemas import Accepted, Command, GetFleet, Hello, LoadWeights, Version, WorkerAnswer

pytestmark = pytest.mark.unit

COMMAND = Command(op_id="op-1", term=3, expires_at=5.5, body=Hello(), members=("7",))


def test_a_message_survives_the_way() -> None:
    """What is decoded equals what was encoded."""
    data = encode(COMMAND)
    assert data == b'{"op_id":"op-1","term":3,"expires_at":5.5,"body":{"route":"hello"},"members":["7"]}'
    assert decode(data, Command, "s") == COMMAND


def test_a_union_is_told_apart_by_its_tag() -> None:
    """Also when the fields of two members are the same."""
    accepted = Accepted(op_id="o", component="c", instance_id="1", boot_id="b")
    answer: WorkerAnswer = decode(encode(accepted), WorkerAnswer, "s")
    assert answer == accepted


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"nonsense", "malformed"),
        (b'{"op_id":"op-1"}', "missing required field"),
        (b'{"op_id":"op 1","term":1,"expires_at":1,"body":{"route":"hello"}}', "$.op_id"),
        (b'{"op_id":"o","term":1,"expires_at":1,"body":{"route":"nope"}}', "$.body.route"),
        (b'{"op_id":"o","term":"1","expires_at":1,"body":{"route":"hello"}}', "$.term"),
        (b'{"op_id":"o","term":1,"expires_at":1,"body":{"route":"hello"},"members":[7]}', "$.members"),
        (b"\xff\xfe", "malformed"),
        (b'{"op_id":"\xff"}', "UTF-8"),
        (b"[" * 100_000, ""),
    ],
)
def test_what_does_not_parse_is_a_decode_error_naming_subject_type_and_field(data: bytes, problem: str) -> None:
    """Never a foreign exception, whatever the bytes."""
    with pytest.raises(DecodeError) as caught:
        decode(data, Command, "dyn.x")
    assert (caught.value.subject, caught.value.expected) == ("dyn.x", "Command")
    assert problem in caught.value.problem


def test_a_message_over_the_limit_is_refused_both_ways() -> None:
    """With its size and the limit; exactly at the limit passes."""
    base = len(encode(LoadWeights(path="", version=Version())))
    fits = LoadWeights(path="x" * (MAX_MESSAGE_BYTES - base), version=Version())
    assert len(encode(fits)) == MAX_MESSAGE_BYTES
    with pytest.raises(PayloadTooLargeError) as caught:
        encode(LoadWeights(path=fits.path + "x", version=Version()))
    assert (caught.value.what, caught.value.size_bytes) == ("LoadWeights", MAX_MESSAGE_BYTES + 1)
    with pytest.raises(DecodeError, match="over the limit"):
        decode(b" " * (MAX_MESSAGE_BYTES + 1), GetFleet, "s")
