"""Identifiers: what may stand in a subject, and what may not."""

import msgspec
import pytest

from rlbus.schemas import (
    MAX_INSTANCE_ID,
    Goodbye,
    InstanceId,
    OpAccepted,
    is_instance_id,
    is_token,
    split_worker_id,
    worker_id,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("text", ["a", "A-z_0", "x" * 64, "0"])
def test_tokens_are_letters_digits_dash_and_underscore(text: str) -> None:
    """One to 64 of them, in a function as on the wire."""
    assert is_token(text)
    assert msgspec.json.decode(msgspec.json.encode(OpAccepted(op_id=text)), type=OpAccepted).op_id == text


@pytest.mark.parametrize("text", ["", "x" * 65, "a.b", "a b", "*", ">", "ä", "a\n", "\n", "a/b"])
def test_anything_else_is_no_token(text: str) -> None:
    """A newline at the end included, which a plain `$` would let pass."""
    assert not is_token(text)


@pytest.mark.parametrize("text", ["", "x" * 65, "a.b", "a b", "*", ">", "ä", "a/b"])
def test_the_wire_refuses_what_is_no_token(text: str) -> None:
    """Before anybody builds a subject of it."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(OpAccepted(op_id=text)), type=OpAccepted)


@pytest.mark.parametrize("text", ["0", "7", "14487131679317648894", str(MAX_INSTANCE_ID)])
def test_instance_ids_are_unsigned_64_bit_integers_in_text(text: str) -> None:
    """Dynamo's own ids fit, unrounded."""
    assert is_instance_id(text)
    message = Goodbye(boot_id="b", component="c", instance_id=text)
    assert msgspec.json.decode(msgspec.json.encode(message), type=Goodbye) == message


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", "01", "1.0", "1e3", " 1", "1\n", "x", str(MAX_INSTANCE_ID + 1), "1" * 21]
)
def test_anything_else_is_no_instance_id(text: str) -> None:
    """No signs, zeros in front, or numbers beyond 64 bits."""
    assert not is_instance_id(text)


def test_instance_ids_never_travel_as_json_numbers() -> None:
    """JavaScript would round them."""
    with pytest.raises(msgspec.ValidationError, match="instance_id"):
        msgspec.json.decode(b'{"kind":"goodbye","boot_id":"b","component":"c","instance_id":7}', type=Goodbye)


def test_a_worker_id_splits_into_what_it_was_made_of() -> None:
    """Component first."""
    worker = worker_id("decode", "7")
    assert worker == "decode/7"
    assert split_worker_id(worker) == ("decode", "7")


@pytest.mark.parametrize("text", ["18446744073709551616", "18446744073709551615\n", "99999999999999999999", "01", ""])
def test_the_wire_refuses_what_is_no_instance_id(text: str) -> None:
    """The pattern on the field is as strict as `is_instance_id`."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(text, InstanceId)


@pytest.mark.parametrize(
    "text", ["0", "9", "10", "18446744073709551615", "18446744073709551609", "17999999999999999999"]
)
def test_the_wire_takes_every_unsigned_64_bit_number(text: str) -> None:
    """Up to the largest."""
    assert msgspec.convert(text, InstanceId) == text
