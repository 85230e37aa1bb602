"""Bodies of HTTP callers: what is read as it is, and what is refused."""

import contextlib

import msgspec
import pytest

from rlbus._json_body import BodyError, read_json

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "data",
    [
        b"null",
        b' {"a": 1, "A": 1.5e300} ',
        b'[{"a": 1}, {"a": 1}]',
        b'{"a": {"a": [{"a": "\\ud83d\\ude00\\n"}]}}',
        b"-123456789012345678",
        b'{"a":' * 200 + b"1" + b"}" * 200,
    ],
)
def test_what_is_meant_in_one_way_is_read_as_it_is(data: bytes) -> None:
    """The same name in two objects is two fields."""
    assert read_json(data) == msgspec.json.decode(data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"a": 1, "a": 1}', "field 'a' is given twice"),
        (b'{"a": 1, "\\u0061": 2}', "field 'a' is given twice"),
        (b'{"x": [{"b": {}, "b": 2}]}', "field 'b' is given twice"),
        (b'{"' + b"a" * 100 + b'": 1, "' + b"a" * 100 + b'": 2}', f"field '{'a' * 64}' is given twice"),
        (b'{"a": 1, "a"', "no JSON"),
        (b"", "no JSON"),
        (b"\xff", "no JSON"),
        (b'"\xff"', "no JSON"),
        (b'{"a": NaN}', "no JSON"),
        (b"[" * 100_000, "no JSON"),
    ],
)
def test_what_is_no_json_or_says_two_things_is_refused_by_name(data: bytes, says: str) -> None:
    """Whichever of the two a reader would take."""
    with pytest.raises(BodyError) as caught:
        read_json(data)
    assert says in str(caught.value)


@pytest.mark.parametrize("depth", range(250, 1250, 25))
def test_what_is_deep_is_read_or_refused(depth: int) -> None:
    """Where two readers give up at different depths, there is no third way out."""
    with contextlib.suppress(BodyError):
        read_json(b'{"a":[' * depth + b"1" + b"]}" * depth)
