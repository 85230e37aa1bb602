"""The seam between a trainer and what moves its tensors. Free of torch, so that a trainer can be tested without."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rlbus.schemas import GroupPlan, Rendezvous, TensorSpec, TensorSum, Version

# Called from any thread with (bytes done, bytes total).
ProgressFn = Callable[[int, int], None]


@runtime_checkable
class WeightSource(Protocol):
    """Named tensors that can be read more than once, always in the order of `specs()`.

    One that other ranks of the trainer have to read too has an attribute `is_shared` that is true: an update reads it
    exactly once, and never tries again (`rlbus.transfer.one_pass`).
    """

    def specs(self) -> tuple[TensorSpec, ...]:
        """What iterating yields: names, dtypes and full shapes, without reading the values where possible."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor), from the start each time."""
        ...


@dataclass(frozen=True, slots=True)
class Sent:
    """What a sender sent. `num_bytes` without padding; `sums` in manifest order; `send_s` for all of it."""

    num_bytes: int
    num_tensors: int
    sums: tuple[TensorSum, ...]
    send_s: float


class SenderPlane(Protocol):
    """One trainer's end of the data plane. Used from one event loop; at most one of join and send at a time."""

    @property
    def backend(self) -> str:
        """ "gloo", "nccl" or "fake": what the group plan has to say."""
        ...

    @property
    def sender_id(self) -> str:
        """A random token that is this plane's for its life: the controller reuses a group only for the same one."""
        ...

    @property
    def num_ranks(self) -> int:
        """How many ranks the trainer has in the group. Rank 0 sends."""
        ...

    async def rendezvous(self) -> Rendezvous:
        """Where members meet; bound at the first call and kept open until `aclose`.

        Raises: TransferError: the host can't be bound. Cancel: may be bound already.
        """
        ...

    async def join(self, plan: GroupPlan) -> None:
        """Join the group of `plan` as rank 0 and prove it, leaving any other first. Bounded by plan.timeout_s.

        Raises: TransferError, naming the ranks that never came where that is known. Cancel: no group.
        """
        ...

    async def send(
        self,
        source: WeightSource,
        specs: Sequence[TensorSpec],
        *,
        bucket_bytes: int,
        version: Version,
        stream_id: str,
        on_progress: ProgressFn,
    ) -> Sent:
        """Send everything over the group that was joined. `stream_id` is the op id of the update.

        Raises: TransferError: the source isn't what `specs` announced (names the first bad tensor), or the group broke.
        Cancel: the group is aborted, and has to be left.
        """
        ...

    async def leave(self, reason: str) -> None:
        """Drop the group, in whatever state; a join or send that runs ends with TransferError. Idempotent.

        Cancel: the group is aborted, its thread may still run.
        """
        ...

    async def aclose(self) -> None:
        """Leave, and close the meeting point. Idempotent. Cancel: as `leave`."""
        ...
