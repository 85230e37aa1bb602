"""The sending end: reads a source tensor by tensor, checks each against what was announced, and sends it in buckets.

Memory beyond the source: one bucket, in which small tensors are gathered. A tensor that is contiguous and already on
the group's device is sent from its own memory; any other is copied a bucket at a time, never whole. What isn't
bounded by buckets: a DTensor, which its source gathers whole, one at a time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from rlbus.errors import RLBusError, TransferError
from rlbus.schemas import TensorSpec, TensorSum
from rlbus.transfer.buckets import Bucket, Piece, capacity, padded_bytes, plan_buckets
from rlbus.transfer.checksum import RunningChecksum
from rlbus.transfer.flat import byte_view, copy_bytes, dtype_name
from rlbus.transfer.group import Group
from rlbus.transfer.manifest import num_bytes
from rlbus.transfer.plane import ProgressFn, Sent, WeightSource
from rlbus.transfer.stream import Header, pack_header, stream_token


def send(
    group: Group,
    source: WeightSource,
    specs: Sequence[TensorSpec],
    bucket_bytes: int,
    on_progress: ProgressFn,
    *,
    stream_id: str,
) -> Sent:
    """Send every tensor of `source` to all other ranks, as rank 0. Blocks; runs in a thread.

    The receivers stand ready with the same `specs`, `bucket_bytes` and `stream_id` (the op id of the update). When the
    source fails, they are told, and fail at once with the reason; the group stays whole then.

    Args:
        on_progress: called after each bucket, in this thread, with bytes done and in all (without padding).

    Raises:
        TransferError: a tensor isn't what was announced (named), the source raised (its error is the cause), or the
            group broke, which is aborted then.
    """
    began = time.monotonic()
    token = stream_token(stream_id, group.epoch)
    sizes = [num_bytes(spec) for spec in specs]
    total = sum(sizes)
    outgoing = _Outgoing(group.device, source, specs, min(capacity(bucket_bytes), padded_bytes(sizes)))
    done = 0
    for bucket in plan_buckets(sizes, bucket_bytes):
        try:
            data = outgoing.fill(bucket)
        except TransferError as exc:
            _give_up(group, token, bucket.index, exc.problem)
            raise
        header = Header(token, bucket.index, bucket.num_bytes)
        _broadcast(group, header, data, meanwhile=partial(outgoing.sum_up, bucket, data))
        done += sum(piece.num_bytes for piece in bucket.pieces)
        on_progress(done, total)
    return Sent(num_bytes=total, num_tensors=len(specs), sums=tuple(outgoing.sums), send_s=time.monotonic() - began)


def _broadcast(group: Group, header: Header, data: Tensor, meanwhile: Callable[[], None]) -> None:
    try:
        group.broadcast(_header_row(group, header))
        if data.numel():
            group.broadcast(data, meanwhile)
        else:
            meanwhile()
    except TransferError as exc:
        group.abort(exc.problem)
        raise


def _give_up(group: Group, token: bytes, index: int, reason: str) -> None:
    """Tell the receivers why nothing more comes. If even that fails, breaking the group tells them."""
    try:
        group.broadcast(_header_row(group, Header(token, index, 0, give_up=reason)))
    except TransferError:
        group.abort(reason)


def _header_row(group: Group, header: Header) -> Tensor:
    return torch.frombuffer(bytearray(pack_header(header)), dtype=torch.uint8).to(group.device)


class _Outgoing:
    """Fills buckets from the source and sums up every tensor on the way."""

    def __init__(
        self, device: torch.device, source: WeightSource, specs: Sequence[TensorSpec], buffer_bytes: int
    ) -> None:
        # In manifest order; complete when the last bucket was summed up.
        self.sums: list[TensorSum] = []
        self._device = device
        self._specs = specs
        self._tensors = _checked(source, specs)
        self._buffer_bytes = buffer_bytes
        # Made when first needed: a model of large contiguous tensors needs none.
        self._buffer: Tensor | None = None
        # The tensor that pieces are being taken of.
        self._tensor = torch.empty(0)
        self._running = RunningChecksum(device)

    def fill(self, bucket: Bucket) -> Tensor:
        """The bytes of `bucket`, valid until the next call.

        Raises: TransferError: the source isn't what was announced, or raised.
        """
        if len(bucket.pieces) == 1:
            return self._single(bucket.pieces[0])
        row = self._row(bucket.num_bytes)
        for piece in bucket.pieces:
            self._open(piece)
            part = row[piece.at : piece.at + piece.num_bytes]
            _copy(self._tensor, piece.offset, part)
        return row

    def sum_up(self, bucket: Bucket, row: Tensor) -> None:
        """Add what `fill` returned for `bucket` to the checksums: of the bytes as they are sent."""
        for piece in bucket.pieces:
            if piece.offset == 0:
                self._running = RunningChecksum(self._device)
            self._running.update(row[piece.at : piece.at + piece.num_bytes])
            if piece.is_last:
                name = self._specs[piece.tensor].name
                self.sums.append(TensorSum(name=name, checksum=self._running.hexdigest()))

    def _single(self, piece: Piece) -> Tensor:
        """A bucket of one piece: the tensor's own memory if that can be sent, else a copy of the piece."""
        self._open(piece)
        view = byte_view(self._tensor) if self._tensor.device == self._device else None
        if view is not None:
            return view[piece.offset : piece.offset + piece.num_bytes]
        row = self._row(piece.num_bytes)
        _copy(self._tensor, piece.offset, row)
        return row

    def _row(self, size: int) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.zeros(self._buffer_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer[:size]

    def _open(self, piece: Piece) -> None:
        if piece.offset == 0:
            self._tensor = next(self._tensors)


def _copy(tensor: Tensor, offset: int, out: Tensor) -> None:
    try:
        copy_bytes(tensor, offset, out)
    except RuntimeError as exc:
        raise TransferError("send", f"can't read the tensor: {exc}") from exc


def _checked(source: WeightSource, specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
    """The source's tensors, each checked against its spec. Before the last one is given out, the source must be at its
    end, so that a surplus is found while the receivers can still be told.
    """
    pairs = _guarded(source)
    held: Tensor | None = None
    for spec in specs:
        if held is not None:
            yield held
        pair = next(pairs, None)
        if pair is None:
            raise TransferError("send", f"tensor {spec.name!r} was announced, but the source ended before it")
        held = _match(spec, *pair)
    surplus = next(pairs, None)
    if surplus is not None:
        raise TransferError("send", f"tensor {surplus[0]!r} comes after the last that was announced")
    if held is not None:
        yield held


def _match(spec: TensorSpec, name: str, tensor: Tensor) -> Tensor:
    if name != spec.name:
        raise TransferError("send", f"tensor {name!r} came where {spec.name!r} was announced")
    if tuple(tensor.shape) != spec.shape:
        raise TransferError("send", f"tensor {name!r} has shape {list(tensor.shape)}, announced was {list(spec.shape)}")
    if dtype_name(tensor.dtype) != spec.dtype:
        raise TransferError("send", f"tensor {name!r} has dtype {dtype_name(tensor.dtype)}, announced was {spec.dtype}")
    return tensor


def _guarded(source: WeightSource) -> Iterator[tuple[str, Tensor]]:
    """The source's pairs; what it raises becomes a TransferError with that as its cause."""
    pairs: Iterator[tuple[str, Tensor]] | None = None
    while True:
        try:
            if pairs is None:
                pairs = iter(source)
            pair = next(pairs)
        except StopIteration:
            return
        except RLBusError as exc:
            raise TransferError("send", f"the source failed: {exc}") from exc
        except BaseException as exc:
            # User code in a thread of ours; the trainer gets it as the cause, SystemExit too.
            raise TransferError("send", f"the source raised {type(exc).__name__}: {exc}") from exc
        yield pair
