"""The receiving end: takes buckets, checks that each is the one due, and hands out tensors that own their memory.

Memory: the tensor being assembled and one bucket, in which small tensors come; a large tensor is received straight
into its own memory. Nothing that was handed out is ever written again, since vLLM's layerwise reload keeps tensors
until their layer is complete (facts/vllm-cpu.md 12).
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlbus.errors import TransferError
from rlbus.schemas import ReceivedData, TensorSpec, TensorSum
from rlbus.transfer.buckets import Bucket, Piece, capacity, padded_bytes, plan_buckets
from rlbus.transfer.checksum import RunningChecksum
from rlbus.transfer.flat import dtype_of, new_row
from rlbus.transfer.group import Group
from rlbus.transfer.manifest import num_bytes
from rlbus.transfer.plane import ProgressFn
from rlbus.transfer.stream import HEADER_BYTES, Header, check_header, parse_header, stream_token

_log = logging.getLogger("rlbus.transfer")

LoadFn = Callable[[Iterator[tuple[str, Tensor]]], Any]


def receive(
    group: Group,
    specs: Sequence[TensorSpec],
    bucket_bytes: int,
    load: LoadFn,
    on_progress: ProgressFn,
    *,
    stream_id: str,
) -> ReceivedData:
    """Receive every tensor of `specs` from rank 0 and feed it to `load`, which is called once, in this thread.

    `load` takes the iterator of (name, tensor), in manifest order, and reads it to its end; tensors lie on the group's
    device and are `load`'s to keep. When it raises, the rest is still received, and dropped, so that the other members
    get theirs; then its error is raised. `specs`, `bucket_bytes` and `stream_id` (the op id of the update) are the
    sender's.

    Args:
        on_progress: called after each bucket, in this thread, with bytes done and in all (without padding).

    Raises:
        TransferError: the group broke, the stream isn't the expected one, the sender gave up, or `load` stopped early.
            Except after a sender that gave up, the group is aborted then. Whatever `load` raises, as it is.
    """
    began = time.monotonic()
    incoming = _Incoming(group, specs, bucket_bytes, on_progress, stream_token(stream_id, group.epoch))
    failure: Exception | None = None
    try:
        load(incoming)
    except Exception as exc:  # noqa: BLE001 - raised again below, when the others have what they need
        failure = exc
    if incoming.broken is None and not incoming.is_complete:
        if failure is None:
            text = f"it stopped after {incoming.num_taken} of {len(specs)} tensors"
            failure = TransferError("load", text)
        _drain(incoming)
    if incoming.broken is not None and (failure is None or _came_from(failure, incoming.broken)):
        raise incoming.broken from incoming.broken.__cause__
    if failure is not None:
        raise failure
    return ReceivedData(
        num_bytes=incoming.total,
        num_tensors=len(specs),
        sums=tuple(incoming.sums),
        receive_s=incoming.receive_s,
        load_s=max(0.0, time.monotonic() - began - incoming.receive_s),
    )


def _drain(incoming: "_Incoming") -> None:
    """Take what still comes, for the sake of the other members."""
    try:
        while next(incoming, None) is not None:  # not a for loop, whose variable would keep each a tensor too long
            pass
    except TransferError as exc:
        _log.warning("while dropping the rest of a transfer that can't be loaded: %s", exc)


def _came_from(failure: BaseException | None, broken: TransferError) -> bool:
    """Whether what `load` raised is only the broken transfer, perhaps wrapped."""
    for _ in range(16):
        if failure is None:
            return False
        if failure is broken:
            return True
        failure = failure.__cause__ or failure.__context__
    return False


class _Incoming(Iterator[tuple[str, Tensor]]):
    """The tensors as they come. Not a generator, so that a `load` that drops it half-way doesn't end it."""

    def __init__(
        self, group: Group, specs: Sequence[TensorSpec], bucket_bytes: int, on_progress: ProgressFn, token: bytes
    ) -> None:
        sizes = [num_bytes(spec) for spec in specs]
        # Why nothing more can come, None while all is well.
        self.broken: TransferError | None = None
        self.num_taken = 0
        # In manifest order, of what was handed out.
        self.sums: list[TensorSum] = []
        self.total = sum(sizes)
        # Seconds spent in here rather than in `load`.
        self.receive_s = 0.0
        self._done = 0
        self._group = group
        self._specs = specs
        self._dtypes = [dtype_of(spec.dtype) for spec in specs]
        self._on_progress = on_progress
        self._token = token
        self._buffer_bytes = min(capacity(bucket_bytes), padded_bytes(sizes))
        self._buffer: Tensor | None = None
        # The tensor that is being assembled, as bytes; how many are in its checksum, and how many came after those.
        self._row = torch.empty(0, dtype=torch.uint8, device=group.device)
        self._running = RunningChecksum(group.device)
        self._num_summed = 0
        self._num_unsummed = 0
        self._header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=group.device)
        self._tensors = self._assemble(plan_buckets(sizes, bucket_bytes))

    @property
    def is_complete(self) -> bool:
        """Whether every tensor was handed out."""
        return self.num_taken == len(self._specs)

    def __next__(self) -> tuple[str, Tensor]:
        began = time.monotonic()
        if self.broken is not None:
            raise self.broken
        try:
            pair = next(self._tensors)
        except StopIteration:
            raise
        except _SenderGaveUpError as exc:
            self.broken = exc
            raise
        except TransferError as exc:
            self._break(exc)
            raise
        except Exception as exc:
            # E.g. no memory; whoever called `receive` gets it as the cause.
            broken = TransferError("receive", f"{type(exc).__name__}: {exc}")
            self._break(broken)
            raise broken from exc
        finally:
            self.receive_s += time.monotonic() - began
        self.num_taken += 1
        return pair

    def _break(self, broken: TransferError) -> None:
        """The stream can't go on; breaking the group lets the other members know at once."""
        self.broken = broken
        self._group.abort(broken.problem)

    def _assemble(self, buckets: Iterator[Bucket]) -> Iterator[tuple[str, Tensor]]:
        for bucket in buckets:
            self._expect(bucket)
            if len(bucket.pieces) == 1:
                yield from self._take_piece(bucket)
            else:
                yield from self._take_shared(bucket)

    def _take_shared(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """Several tensors in one bucket: each is copied out of it."""
        if self._buffer is None:
            self._buffer = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self._group.device)
        row = self._buffer[: bucket.num_bytes]
        self._take(bucket, row)
        self._sum_up()  # of the tensor whose tail comes first in here
        for piece in bucket.pieces:
            self._open(piece)
            part = self._row[piece.offset : piece.offset + piece.num_bytes]
            part.copy_(row[piece.at : piece.at + piece.num_bytes])
            self._running.update(part)
            if piece.is_last:
                yield self._finish(piece)

    def _take_piece(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """A bucket that is a part of one tensor: received where it belongs."""
        piece = bucket.pieces[0]
        self._open(piece)
        self._take(bucket, self._row[piece.offset : piece.offset + piece.num_bytes])
        self._num_unsummed += piece.num_bytes
        if piece.is_last:
            self._sum_up()
            yield self._finish(piece)

    def _sum_up(self) -> None:
        """Add to the checksum what came last of a tensor that takes several buckets. While the next one travels, or,
        after the last, before the tensor is handed out.
        """
        if self._num_unsummed:
            part = self._row[self._num_summed : self._num_summed + self._num_unsummed]
            self._running.update(part)
            self._num_summed += self._num_unsummed
            self._num_unsummed = 0

    def _open(self, piece: Piece) -> None:
        """Make room for the tensor that begins with `piece`."""
        if piece.offset == 0:
            size = num_bytes(self._specs[piece.tensor])
            self._row = new_row(size, self._group.device)
            self._running = RunningChecksum(self._group.device)
            self._num_summed = self._num_unsummed = 0

    def _finish(self, piece: Piece) -> tuple[str, Tensor]:
        """The tensor that ends with `piece`; nothing here refers to its memory any more."""
        spec = self._specs[piece.tensor]
        row, self._row = self._row, self._header[:0]
        self.sums.append(TensorSum(name=spec.name, checksum=self._running.hexdigest()))
        return spec.name, row.view(self._dtypes[piece.tensor]).view(spec.shape)

    def _expect(self, bucket: Bucket) -> None:
        """Take the header, and refuse what isn't the bucket that is due."""
        self._group.broadcast(self._header)
        header = parse_header(bytes(self._header.tolist()))
        if header.token == self._token and header.give_up is not None:
            raise _SenderGaveUpError("receive", f"the sender gave up: {header.give_up}")
        check_header(header, Header(self._token, bucket.index, bucket.num_bytes))

    def _take(self, bucket: Bucket, into: Tensor) -> None:
        if into.numel():
            self._group.broadcast(into, meanwhile=self._sum_up)
        self._done += sum(piece.num_bytes for piece in bucket.pieces)
        self._on_progress(self._done, self.total)


class _SenderGaveUpError(TransferError):
    """The stream ended in order, at a bucket's boundary: the group is whole."""
