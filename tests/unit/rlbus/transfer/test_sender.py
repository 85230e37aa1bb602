"""What a sender puts on the wire, and how it ends when the source isn't what was announced."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rlbus.errors import TransferError
from rlbus.schemas import TensorSpec
from rlbus.transfer.checksum import tensor_checksum
from rlbus.transfer.plane import Sent
from rlbus.transfer.sender import send
from rlbus.transfer.source import weight_source
from rlbus.transfer.stream import HEADER_BYTES, Header, parse_header, stream_token

pytestmark = pytest.mark.unit

TOKEN = stream_token("op", 9)


class Wire:
    """A group whose rank 0 writes down what it broadcasts, and where it lay."""

    rank, size, epoch, timeout_s = 0, 2, 9, 1.0
    device = torch.device("cpu")

    def __init__(self, breaks_after: int | None = None) -> None:
        self.rows: list[bytes] = []
        self.addresses: list[int] = []
        self.aborted: str | None = None
        self._breaks_after = breaks_after

    def broadcast(self, buffer: Tensor, meanwhile: object = None) -> None:
        if len(self.rows) == self._breaks_after:
            raise TransferError("broadcast", "connection closed by peer")
        assert buffer.dtype is torch.uint8
        assert buffer.is_contiguous()
        self.rows.append(bytes(buffer.tolist()))
        self.addresses.append(buffer.data_ptr())
        if callable(meanwhile):
            meanwhile()

    def all_sum(self, value: int) -> int:
        return value

    def busy_s(self) -> float:
        return 0.0

    def abort(self, reason: str) -> None:
        self.aborted = reason

    def close(self) -> None:
        pass

    def headers(self) -> list[Header]:
        return [parse_header(row) for row in self.rows if len(row) == HEADER_BYTES]


def send_all(wire: Wire, weights: object, specs: tuple[TensorSpec, ...], bucket_bytes: int = 64) -> Sent:
    return send(wire, weight_source(weights), specs, bucket_bytes, lambda _done, _total: None, stream_id="op")


def test_every_bucket_has_its_header_and_large_tensors_go_from_their_own_memory() -> None:
    """A contiguous tensor is not copied; small ones share a bucket; the sums are of the tensors."""
    weights = {
        "large": torch.arange(40, dtype=torch.float32),
        "mixed": torch.arange(12, dtype=torch.int16).view(3, 4).t(),
        "small": torch.tensor(3, dtype=torch.int8),
    }
    wire = Wire()
    done: list[tuple[int, int]] = []
    source = weight_source(weights)
    sent = send(wire, source, source.specs(), 64, lambda now, total: done.append((now, total)), stream_id="op")
    sizes = [64, 64, 32 + 24, 1]
    assert wire.headers() == [Header(TOKEN, index, size) for index, size in enumerate(sizes)]
    assert [len(row) for row in wire.rows[1::2]] == sizes
    large = weights["large"]
    assert wire.addresses[1] == large.data_ptr()
    assert wire.addresses[3] == large.data_ptr() + 64
    assert done[-1] == (185, 185)
    assert (sent.num_bytes, sent.num_tensors) == (185, 3)
    assert {s.name: s.checksum for s in sent.sums} == {n: tensor_checksum(t) for n, t in weights.items()}
    assert [s.name for s in sent.sums] == ["large", "mixed", "small"]


class Failing:
    """Yields `pairs`, then raises."""

    def __init__(self, pairs: list[tuple[str, Tensor]], error: Exception) -> None:
        self._pairs, self._error = pairs, error

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._pairs
        raise self._error


A = TensorSpec(name="a", dtype="float32", shape=(16,))
B = TensorSpec(name="b", dtype="float32", shape=(16,))
FLOATS = torch.ones(16)


@pytest.mark.parametrize(
    ("weights", "problem", "num_buckets"),
    [
        ([("a", FLOATS), ("x", FLOATS)], "tensor 'x' came where 'b' was announced", 1),
        ([("a", FLOATS), ("b", FLOATS[:8])], r"tensor 'b' has shape \[8\], announced was \[16\]", 1),
        ([("a", FLOATS.int()), ("b", FLOATS)], "tensor 'a' has dtype int32, announced was float32", 0),
        ([("a", FLOATS)], "tensor 'b' was announced, but the source ended before it", 1),
        ([("a", FLOATS), ("b", FLOATS), ("c", FLOATS)], "tensor 'c' comes after the last that was announced", 1),
        (Failing([("a", FLOATS)], ValueError("gather failed")), "the source raised ValueError: gather failed", 1),
    ],
)
def test_a_source_that_is_not_what_was_announced_is_told_to_the_receivers(
    weights: object, problem: str, num_buckets: int
) -> None:
    """Before the bucket that would have been wrong; the group stays whole."""
    wire = Wire()
    with pytest.raises(TransferError, match=problem):
        send_all(wire, weights, (A, B))
    headers = wire.headers()
    assert len(headers) == num_buckets + 1
    assert headers[-1].token == TOKEN
    assert headers[-1].index == num_buckets
    assert headers[-1].give_up is not None
    assert wire.aborted is None


def test_what_a_source_raises_is_the_cause() -> None:
    """The user sees their own error behind ours."""
    error = ValueError("gather failed")
    with pytest.raises(TransferError) as caught:
        send_all(Wire(), Failing([], error), (A,))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("breaks_after", [0, 1, 2, 3])
def test_a_broken_group_is_aborted(breaks_after: int) -> None:
    """So that all members know at once, at whichever broadcast it came."""
    wire = Wire(breaks_after)
    with pytest.raises(TransferError, match="connection closed by peer"):
        send_all(wire, {"a": FLOATS, "b": FLOATS * 2}, (A, B))
    assert wire.aborted == "connection closed by peer"


def test_nothing_is_sent_for_an_empty_manifest() -> None:
    """And a source that has something all the same is left alone."""
    wire = Wire()
    sent = send_all(wire, {}, ())
    assert (sent.num_bytes, sent.sums, wire.rows) == (0, (), [])
