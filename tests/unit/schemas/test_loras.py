"""Sources of adapters: what may stand in a subject of the bus's store."""

import pytest

from rlbus.codec import decode, encode
from rlbus.schemas import FleetLora, LoraMark, ObjectSource

pytestmark = pytest.mark.unit

SHA = "0f" * 32


def source(key: str) -> ObjectSource:
    """An object under this key."""
    return ObjectSource(bucket="test", key=key, sha256=SHA, num_bytes=1)


@pytest.mark.parametrize("key", ["*", ">", "a.b", "a/b", "k", "", SHA.upper(), f"{SHA}\n", f"{SHA}.>", SHA[:-1]])
def test_only_a_checksum_is_the_key_of_an_object(key: str) -> None:
    """It names what is deleted later: a wildcard would mean every object of the fleet."""
    assert not source(key).has_good_key
    assert source(SHA).has_good_key


def test_what_was_kept_with_another_key_is_still_read() -> None:
    """A mark or op of an rlbus that took any text: whoever uses the key looks at it, and no controller ends for it."""
    one = FleetLora(name="policy", revision=1, checksum=SHA, source=source("policy/1"), since=1.0, op_id="op")
    kept = LoraMark(term=1, loras=(one,))
    assert decode(encode(kept), LoraMark, "test") == kept
