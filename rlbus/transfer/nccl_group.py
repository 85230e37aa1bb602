"""Groups over NCCL, for tensors in GPU memory. Stateless, like those over Gloo, and behind the same seam.

This module has not been run on a GPU: it is written after torch 2.13's ProcessGroupNCCL and vLLM 0.32's use of it,
type-checked, and its choice and refusals are tested, but no byte has passed through it yet.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed
from torch import Tensor

from rlbus.errors import ConfigError, GroupBrokenError, TransferError
from rlbus.schemas import GroupPlan
from rlbus.transfer.meeting import Meeting, local_host

# Between two looks whether a collective has completed, in seconds.
_POLL_S = 0.0005


def check_nccl(device: torch.device) -> None:
    """Refuse what NCCL can't do here.

    Raises:
        ConfigError: no CUDA device was given, or torch was built without NCCL.
    """
    if device.type != "cuda":
        raise ConfigError("device", str(device), "nccl needs a CUDA device; use the backend gloo on the CPU")
    if not torch.distributed.is_nccl_available():
        raise ConfigError("backend", "nccl", "this build of torch has no NCCL; use gloo")


class NcclGroup:
    """A group over NCCL; see `rlbus.transfer.group.Group` for what each part promises.

    NCCL doesn't bound a collective by itself: the thread polls for completion, and aborts the group at the time-out.
    """

    def __init__(self, plan: GroupPlan, rank: int, device: torch.device, meeting: Meeting) -> None:
        """Form it; called by `open_group`, in a thread that can be left behind. NCCL connects at the first collective,
        which is `prove`.
        """
        self._rank = rank
        self._size = plan.world_size
        self._epoch = plan.epoch
        self._timeout_s = plan.timeout_s
        self._device = device
        self._aborted: str | None = None
        self._busy_since: float | None = None
        # NCCL's own connections can't be told by this address; it only says where a member is.
        meeting.appear((local_host(plan), 0))
        meeting.wait_for_all()
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=plan.timeout_s)
        try:
            self._group: torch.distributed.ProcessGroupNCCL | None = torch.distributed.ProcessGroupNCCL(
                meeting.store_for_group(), rank, plan.world_size, options
            )
        except RuntimeError as exc:
            raise TransferError(f"join group {plan.epoch}", str(exc)) from exc

    @property
    def rank(self) -> int:
        """This member's rank."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    @property
    def epoch(self) -> int:
        """The plan's number of this group."""
        return self._epoch

    @property
    def timeout_s(self) -> float:
        """How long one collective may take."""
        return self._timeout_s

    @property
    def device(self) -> torch.device:
        """The CUDA device."""
        return self._device

    def broadcast(self, buffer: Tensor, meanwhile: Callable[[], None] | None = None) -> None:
        """Send `buffer` from rank 0 into everybody's; returns when it has arrived here. Raises: TransferError."""
        with self._collective("broadcast") as group, torch.cuda.device(self._device):
            work = group.broadcast(buffer, 0)  # type: ignore[attr-defined]
            try:
                if meanwhile is not None:
                    meanwhile()
            finally:
                self._finish(work)

    def all_sum(self, value: int) -> int:
        """The sum of every rank's `value`. Raises: TransferError."""
        total = torch.tensor([value], dtype=torch.int64, device=self._device)
        with self._collective("all_sum") as group, torch.cuda.device(self._device):
            self._finish(group.allreduce([total]))  # type: ignore[attr-defined]
        return int(total.item())

    def busy_s(self) -> float:
        """For how long the running collective has been blocked."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def abort(self, reason: str) -> None:
        """Abort the communicator. Idempotent."""
        if self._aborted is not None:
            return
        self._aborted = reason
        group = self._group
        if group is not None:
            with contextlib.suppress(RuntimeError):  # a communicator that is broken already says so here
                group.abort()

    def close(self) -> None:
        """Leave. Idempotent."""
        self.abort("closed")
        self._group = None

    def _finish(self, work: torch.distributed.Work) -> None:
        """Wait until the collective has completed on the device, not only been queued."""
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if self._aborted is not None or time.monotonic() > deadline:
                self.abort(f"no end within {self._timeout_s:g} s")
                raise RuntimeError(f"aborted: {self._aborted}")
            time.sleep(_POLL_S)
        work.wait()
        torch.cuda.current_stream(self._device).synchronize()

    @contextlib.contextmanager
    def _collective(self, operation: str) -> Iterator["torch.distributed.ProcessGroupNCCL"]:
        name = f"{operation} in group {self._epoch}"
        self._busy_since = time.monotonic()
        try:
            group = self._group
            if self._aborted is not None or group is None:
                raise GroupBrokenError(name, f"the group was left: {self._aborted}")
            yield group
        except RuntimeError as exc:
            raise GroupBrokenError(name, str(exc).partition("\n")[0]) from exc
        finally:
            self._busy_since = None
