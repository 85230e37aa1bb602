"""Sources of adapters: what may stand in a subject of the bus's store."""

import msgspec
import pytest

from rlbus.codec import decode, encode
from rlbus.errors import DecodeError
from rlbus.schemas import LoadLora, LoadLoraFleet, ObjectSource

pytestmark = pytest.mark.unit

SHA = "0f" * 32


def source(key: str) -> ObjectSource:
    """An object under this key."""
    return ObjectSource(bucket="test", key=key, sha256=SHA, num_bytes=1)


@pytest.mark.parametrize("key", ["*", ">", "a.b", "a/b", "k", "", SHA.upper(), f"{SHA}\n", f"{SHA}.>", SHA[:-1]])
def test_an_objects_key_is_a_checksum_and_nothing_else(key: str) -> None:
    """It names what is deleted later: a wildcard would mean every object of the fleet."""
    load = LoadLora(name="policy", revision=1, checksum=SHA, source=source(key))
    fleet = LoadLoraFleet(op_id="op", name="policy", source=source(key), checksum=SHA)
    for message in (load, fleet):
        with pytest.raises(DecodeError, match="key"):
            decode(encode(message), type(message), "test")


def test_a_checksum_is_the_key_of_an_object() -> None:
    """As whoever uploads one calls it."""
    assert msgspec.json.decode(msgspec.json.encode(source(SHA)), type=ObjectSource) == source(SHA)
