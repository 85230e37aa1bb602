"""Process groups that carry tensors from rank 0 to all others, and how one is joined.

Nothing here touches torch.distributed's global state: several groups, and a trainer's own `init_process_group`, live
side by side. A group that failed once is over; the next transfer needs a new one, under the next epoch.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rlbus.errors import ConfigError, TransferError
from rlbus.schemas import GroupPlan
from rlbus.transfer.bounded import GiveUp, call_bounded
from rlbus.transfer.meeting import Meeting

# What a join may take beyond plan.timeout_s when a native call ignores its time-out; then its thread is left behind.
JOIN_GRACE_S = 2.0


class Group(Protocol):
    """A formed group, seen by one rank. The collectives block, are made in the same order by every rank, and end with
    TransferError after plan.timeout_s at the latest; `abort` and `busy_s` may be called beside them from any thread.
    """

    @property
    def rank(self) -> int:
        """This member's rank."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def epoch(self) -> int:
        """The plan's number of this group."""
        ...

    @property
    def timeout_s(self) -> float:
        """How long one collective may take."""
        ...

    @property
    def device(self) -> torch.device:
        """Where buffers have to lie."""
        ...

    def broadcast(self, buffer: Tensor, meanwhile: Callable[[], None] | None = None) -> None:
        """Send a contiguous uint8 row from rank 0 into the buffers of all others, which have the same size.

        A receiver must know the size for certain: Gloo ends the process when more comes than fits. `meanwhile` is
        called while the bytes travel; rank 0 may read `buffer` in it.
        Raises: TransferError: a member went away, the time is over, or the group was aborted.
        """
        ...

    def all_sum(self, value: int) -> int:
        """The sum of every rank's `value`, on every rank. Raises: as broadcast."""
        ...

    def busy_s(self) -> float:
        """For how long the running collective has been blocked; 0.0 when none runs."""
        ...

    def abort(self, reason: str) -> None:
        """Break the group at once, releasing whoever is blocked in it, here and on the other members. Idempotent."""
        ...

    def close(self) -> None:
        """Leave: free what the group holds. A blocked collective is aborted. Idempotent."""
        ...


def open_group(
    plan: GroupPlan, rank: int, device: torch.device | str = "cpu", *, give_up: GiveUp | None = None
) -> Group:
    """Join the group of `plan` as `rank`; returns when every rank is there and connected. Blocks.

    Every rank calls it at about the same time, and `prove` after it. It returns or raises within plan.timeout_s plus
    JOIN_GRACE_S, whatever the others do.

    Args:
        device: the CUDA device for "nccl"; "gloo" works on the CPU whatever it is.
        give_up: `give_up.set(reason)`, from another thread, ends the wait.

    Raises:
        ConfigError: a rank outside the plan, or a backend that this torch or device doesn't have.
        TransferError: not formed; names the ranks that never came. DeadlineError: a native call didn't return.
    """
    if not 0 <= rank < plan.world_size:
        raise ConfigError("rank", rank, f"group {plan.epoch} has the ranks 0 to {plan.world_size - 1}")
    wanted = GiveUp() if give_up is None else give_up
    form = _former(plan, torch.device(device))
    deadline = time.monotonic() + plan.timeout_s
    return call_bounded(
        lambda: form(Meeting(plan, rank, deadline, wanted), rank),
        operation=f"join group {plan.epoch}",
        limit_s=plan.timeout_s + JOIN_GRACE_S,
        give_up=wanted,
        discard=lambda group: group.close(),
    )


def prove(group: Group) -> None:
    """One tiny collective that shows that every rank is there, once, and that bytes pass. Every rank calls it.

    Raises:
        TransferError: it failed or the sum is wrong.
    """
    expected = group.size * (group.size + 1) // 2
    actual = group.all_sum(group.rank + 1)
    if actual != expected:
        group.abort("the proof failed")
        raise TransferError(f"prove group {group.epoch}", f"the ranks sum to {actual}, not {expected}")


def _former(plan: GroupPlan, device: torch.device) -> Callable[[Meeting, int], Group]:
    """How a group of the plan's backend is formed. Each backend is imported when it is wanted."""
    if plan.backend == "gloo":
        from rlbus.transfer.gloo_group import GlooGroup

        return lambda meeting, rank: GlooGroup(plan, rank, meeting)
    if plan.backend == "nccl":
        from rlbus.transfer.nccl_group import NcclGroup, check_nccl

        check_nccl(device)
        return lambda meeting, rank: NcclGroup(plan, rank, device, meeting)
    raise ConfigError("backend", plan.backend, "groups are formed over gloo or nccl")
