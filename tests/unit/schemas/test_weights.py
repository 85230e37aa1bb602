"""Versions are ordered and short on the wire; tensors too."""

import msgspec
import pytest

from rlbus.schemas import TensorSpec, TensorSum, Version

pytestmark = pytest.mark.unit


def test_versions_are_ordered_by_incarnation_then_step() -> None:
    """A trainer that starts over is newer, whatever its step."""
    ordered = [
        Version(),
        Version(step=1),
        Version(step=10),
        Version(incarnation=1),
        Version(incarnation=1, step=2),
        Version(incarnation=10, step=0),
    ]
    backwards = ordered[::-1]
    assert sorted(backwards) == ordered
    assert Version(incarnation=1, step=0) > Version(incarnation=0, step=999)
    assert Version(step=3) == Version(incarnation=0, step=3)
    assert not Version(step=3) > Version(step=3)
    assert max([Version(step=2), Version(step=11)]) == Version(step=11)


def test_versions_can_be_keys_and_read_well() -> None:
    """Hashable, and `incarnation.step` in text."""
    assert {Version(step=1): "a"}[Version(step=1)] == "a"
    assert str(Version(incarnation=2, step=41)) == "2.41"


@pytest.mark.parametrize(
    ("value", "wire"),
    [
        (Version(incarnation=2, step=41), b"[2,41]"),
        (TensorSpec(name="a", dtype="float32", shape=(2, 3)), b'["a","float32",[2,3]]'),
        (TensorSpec(name="scalar", dtype="int64", shape=()), b'["scalar","int64",[]]'),
        (TensorSum(name="a", checksum="00ff"), b'["a","00ff"]'),
    ],
)
def test_what_comes_in_thousands_is_an_array_on_the_wire(value: msgspec.Struct, wire: bytes) -> None:
    """Names would double a manifest."""
    assert msgspec.json.encode(value) == wire
    assert msgspec.json.decode(wire, type=type(value)) == value


def test_a_newer_peer_may_append_to_an_array() -> None:
    """Extra items are ignored like extra fields."""
    assert msgspec.json.decode(b'[2,41,"more"]', type=Version) == Version(incarnation=2, step=41)


@pytest.mark.parametrize("wire", [b'["2",41]', b"[2.5,41]", b'{"incarnation":2,"step":41}', b"null"])
def test_other_shapes_are_no_version(wire: bytes) -> None:
    """No coercion."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(wire, type=Version)
