"""What a receiver hands out, and how it ends when the stream or the loading goes wrong."""

from collections import deque
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlbus.errors import TransferError
from rlbus.schemas import ReceivedData, TensorSpec
from rlbus.transfer.plane import Sent
from rlbus.transfer.receiver import LoadFn, receive
from rlbus.transfer.sender import send
from rlbus.transfer.source import weight_source
from rlbus.transfer.stream import Header, pack_header, stream_token

pytestmark = pytest.mark.unit


class Tape:
    """A group of two in one thread: rank 0 writes its rows on a tape, rank 1 reads them from it afterwards."""

    size, epoch, timeout_s = 2, 9, 1.0
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.rank = 0
        self.rows: deque[Tensor] = deque()
        self.aborted: str | None = None

    def broadcast(self, buffer: Tensor, meanwhile: object = None) -> None:
        if callable(meanwhile):
            meanwhile()
        if self.rank == 0:
            self.rows.append(buffer.clone())
            return
        if not self.rows:
            raise TransferError("broadcast", "connection closed by peer")
        row = self.rows.popleft()
        assert row.numel() == buffer.numel(), "Gloo would end the process here"
        buffer.copy_(row)

    def all_sum(self, value: int) -> int:
        return value

    def busy_s(self) -> float:
        return 0.0

    def abort(self, reason: str) -> None:
        self.aborted = reason

    def close(self) -> None:
        pass


def recorded(weights: object, bucket_bytes: int = 64) -> tuple[Tape, tuple[TensorSpec, ...], Sent]:
    tape = Tape()
    source = weight_source(weights)
    specs = source.specs()
    sent = send(tape, source, specs, bucket_bytes, lambda _done, _total: None, stream_id="op")
    tape.rank = 1
    return tape, specs, sent


def take(tape: Tape, specs: tuple[TensorSpec, ...], load: LoadFn, bucket_bytes: int = 64) -> ReceivedData:
    return receive(tape, specs, bucket_bytes, load, lambda _done, _total: None, stream_id="op")


def weights_of(num: int) -> dict[str, Tensor]:
    return {f"t{i}": torch.full((16,), float(i)) for i in range(num)}


@given(
    st.lists(st.lists(st.integers(0, 6), max_size=3), max_size=8),
    st.integers(16, 200),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]),
)
def test_what_is_received_is_what_was_sent(shapes: list[list[int]], bucket_bytes: int, dtype: torch.dtype) -> None:
    """Names, values, dtypes, shapes and sums, for scalars, empty and transposed tensors, in any buckets."""
    weights = {}
    for i, shape in enumerate(shapes):
        tensor = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(i)).to(dtype)
        weights[f"t{i}"] = tensor.transpose(0, 1) if len(shape) > 1 else tensor
    tape, specs, sent = recorded(weights, bucket_bytes)
    got: list[tuple[str, Tensor]] = []
    data = take(tape, specs, got.extend, bucket_bytes)
    assert [name for name, _ in got] == list(weights)
    for name, tensor in got:
        assert tensor.dtype is dtype
        assert tensor.shape == weights[name].shape
        assert torch.equal(tensor, weights[name])
    assert (data.sums, data.num_bytes, data.num_tensors) == (sent.sums, sent.num_bytes, sent.num_tensors)


def test_tensors_own_their_memory() -> None:
    """Kept ones aren't overwritten by what comes later, and no larger buffer is kept alive by a small one."""
    tape, specs, _ = recorded(weights_of(8), bucket_bytes=128)
    kept: list[tuple[str, Tensor]] = []
    take(tape, specs, kept.extend, bucket_bytes=128)
    assert [tensor[0].item() for _, tensor in kept] == list(range(8))
    assert {tensor.untyped_storage().nbytes() for _, tensor in kept} == {64}


def test_progress_reaches_the_total() -> None:
    """Bytes without padding, after each bucket."""
    tape, specs, _ = recorded({"a": torch.zeros(40), "b": torch.zeros(3)})
    done: list[tuple[int, int]] = []
    receive(tape, specs, 64, list, lambda now, total: done.append((now, total)), stream_id="op")
    assert done == [(64, 172), (128, 172), (172, 172)]


def test_a_stale_stream_is_refused_before_anything_is_taken() -> None:
    """The group is broken then: what else is on it can't be known."""
    tape, specs, _ = recorded(weights_of(2))
    with pytest.raises(TransferError, match="stale stream"):
        receive(tape, specs, 64, list, lambda _done, _total: None, stream_id="another-op")
    assert tape.aborted is not None
    assert len(tape.rows) == 3


def test_another_manifest_is_refused_by_size() -> None:
    """Before the bucket itself is asked for, which would end the process."""
    tape, _, _ = recorded(weights_of(2))
    specs = (TensorSpec(name="t0", dtype="float32", shape=(15,)),)
    with pytest.raises(TransferError, match="bucket 0 has 64 bytes, by the manifest it has 60"):
        take(tape, specs, list)
    assert tape.aborted is not None


def test_a_sender_that_gives_up_is_named_and_the_group_lives() -> None:
    """Receivers fail at once, with its reason."""
    tape, specs, _ = recorded(weights_of(3))
    tape.rows = deque(list(tape.rows)[:2])
    reason = pack_header(Header(stream_token("op", 9), 1, 0, give_up="the disk is full"))
    tape.rows.append(torch.frombuffer(bytearray(reason), dtype=torch.uint8))
    got: list[str] = []
    with pytest.raises(TransferError, match="the sender gave up: the disk is full"):
        take(tape, specs, lambda tensors: got.extend(name for name, _ in tensors))
    assert got == ["t0"]
    assert tape.aborted is None


def test_a_broken_group_reaches_load_and_caller() -> None:
    """Also when `load` wraps what it got; and the group is aborted."""
    tape, specs, _ = recorded(weights_of(3))
    tape.rows = deque(list(tape.rows)[:3])

    def load(tensors: Iterator[tuple[str, Tensor]]) -> None:
        try:
            list(tensors)
        except TransferError as exc:
            raise RuntimeError("load failed") from exc

    with pytest.raises(TransferError, match="connection closed by peer"):
        take(tape, specs, load)
    assert tape.aborted == "connection closed by peer"


def test_a_load_that_fails_lets_the_others_have_theirs() -> None:
    """The rest of the stream is taken and dropped, then its own error is raised; the group lives."""
    tape, specs, _ = recorded(weights_of(5))

    def load(tensors: Iterator[tuple[str, Tensor]]) -> None:
        next(tensors)
        raise ValueError("no such parameter")

    with pytest.raises(ValueError, match="no such parameter"):
        take(tape, specs, load)
    assert len(tape.rows) == 0
    assert tape.aborted is None


def test_a_load_that_stops_early_is_an_error() -> None:
    """It may not pass for a complete update; exactly all of them, without asking for more, is one."""
    tape, specs, _ = recorded(weights_of(3))
    with pytest.raises(TransferError, match="load: it stopped after 2 of 3 tensors"):
        take(tape, specs, lambda tensors: (next(tensors), next(tensors)))
    tape, specs, sent = recorded(weights_of(3))
    data = take(tape, specs, lambda tensors: [next(tensors) for _ in range(3)])
    assert data.sums == sent.sums


def test_a_failed_load_keeps_its_error_when_the_rest_does_not_come() -> None:
    """What went wrong first is what is told."""
    tape, specs, _ = recorded(weights_of(5))
    tape.rows = deque(list(tape.rows)[:4])

    def load(tensors: Iterator[tuple[str, Tensor]]) -> None:
        next(tensors)
        raise ValueError("no such parameter")

    with pytest.raises(ValueError, match="no such parameter"):
        take(tape, specs, load)


def test_an_error_of_our_own_half_way_is_no_short_success() -> None:
    """A progress callback that raises ends the transfer with it as the cause."""
    tape, specs, _ = recorded(weights_of(3))

    def progress(done: int, _total: int) -> None:
        if done > 64:
            raise ZeroDivisionError("bug")

    with pytest.raises(TransferError, match="ZeroDivisionError: bug"):
        receive(tape, specs, 64, list, progress, stream_id="op")
    assert tape.aborted is not None
