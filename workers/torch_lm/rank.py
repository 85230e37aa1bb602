"""One rank of a torch engine: its copy of the model, and its seat in the process group. Blocking; no asyncio.

Weights are loaded tensor by tensor into the live model, which is paused meanwhile, as vLLM does it: a second copy
would double the memory of the engine. So a transfer that fails after its first tensor leaves the model torn, and says
so. From disk, where that costs nothing while nobody waits, everything is read before anything is changed.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from rlbus.errors import FaultError, RLBusError, error_from_fault, refused
from rlbus.schemas import Fault, FaultCode, GroupPlan, ReceivedData, TensorSpec, TensorSum
from rlbus.transfer.bounded import GiveUp
from rlbus.transfer.checksum import tensor_checksum
from rlbus.transfer.group import Group, open_group, prove
from rlbus.transfer.manifest import compare
from rlbus.transfer.receiver import receive
from rlbus.workers.checkpoint import CheckpointError, accepts
from rlbus.workers.engines.base import ProgressFn, ReadyFn, ReceiveOrder, UpdateFailedError
from rlbus.workers.torch_lm.checkpoint import check_tensors, read_tensors, specs_of
from rlbus.workers.torch_lm.model import CausalLM
from rlbus.workers.torch_lm.sleeping import SleepingTensors

_log = logging.getLogger("rlbus.workers")

# What one collective may take beyond its own time-out, before the group is broken.
WATCHDOG_GRACE_S = 2.0
_WATCH_S = 0.5


class Seat(msgspec.Struct, frozen=True):
    """A rank's place in the group, by the group's own count."""

    rank: int
    size: int


@dataclass(slots=True)
class _Transfer:
    """One receive. `is_touched` once a tensor was written; `give_up` forbids a thread that is left behind to write."""

    give_up: GiveUp
    is_touched: bool = False


class Rank:
    """See the module. One of join, receive, stage, apply and checksums runs at a time; `leave` may come beside them.

    Args:
        on_touch: called before the first tensor of a transfer or a load is written.
    """

    def __init__(self, model: CausalLM, on_touch: Callable[[], None] = lambda: None) -> None:
        self._specs = specs_of(model)
        self._tensors: dict[str, Tensor] = model.state_dict()
        self._sleeping = SleepingTensors(self._tensors)
        self._on_touch = on_touch
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._group: Group | None = None
        self._give_up = GiveUp()
        self._staged: dict[str, Tensor] | None = None

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The model's tensors, by checkpoint name."""
        return self._specs

    def check_manifest(self, tensors: Sequence[TensorSpec]) -> None:
        """Raise ManifestError naming the first tensor that doesn't fit."""
        compare(self._specs, tensors, accepts=accepts)

    def begin_join(self) -> GiveUp:
        """Leave any group; what `join` needs. In the order in which joins and leaves are asked for; never blocks."""
        self.leave("another group is joined")
        with self._lock:
            self._give_up = GiveUp()
            return self._give_up

    def join(self, plan: GroupPlan, rank: int, give_up: GiveUp) -> Seat:
        """Join as `rank` and prove the group. Blocks for about plan.timeout_s at most.

        Raises: EngineError (group_failed): no group.
        """
        try:
            group = open_group(plan, rank, "cpu", give_up=give_up)
            try:
                with _watched(group, give_up):
                    prove(group)
                    self._keep(group, give_up)
            except BaseException:
                group.close()
                raise
        except RLBusError as exc:
            raise error_from_fault(Fault(code=FaultCode.GROUP_FAILED, message=str(exc))) from exc
        return Seat(group.rank, group.size)

    def _keep(self, group: Group, give_up: GiveUp) -> None:
        with self._lock:
            give_up.check(f"join group {group.epoch}")
            self._group = group

    def leave(self, reason: str) -> None:
        """Drop the group; a join or receive that is blocked in it is let go, and writes nothing more. Never blocks."""
        with self._lock:
            self._give_up.set(reason)
            group, self._group = self._group, None
        if group is not None:
            group.close()

    def receive(self, order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
        """Receive every tensor into the live model. Nothing may read the model meanwhile. Blocks.

        Raises: UpdateFailedError, touched if a tensor was written.
        """
        with self._lock:
            group, transfer = self._group, _Transfer(self._give_up)
        if group is None or group.epoch != order.epoch:
            where = "in no group" if group is None else f"in group {group.epoch}"
            raise _failed(FaultCode.TRANSFER_FAILED, f"this rank is {where}, not in group {order.epoch}", False)
        try:
            with _watched(group, transfer.give_up):
                on_ready()
                return receive(
                    group,
                    order.tensors,
                    order.bucket_bytes,
                    lambda tensors: self._load(tensors, transfer),
                    on_progress,
                    stream_id=order.update_op_id,
                )
        except FaultError as exc:
            raise UpdateFailedError(exc.fault, transfer.is_touched) from exc
        except RLBusError as exc:
            raise _failed(FaultCode.TRANSFER_FAILED, str(exc), transfer.is_touched) from exc
        except (RuntimeError, MemoryError) as exc:
            text = f"loading a tensor failed: {type(exc).__name__}: {exc}"
            raise _failed(FaultCode.ENGINE_FAILED, text, transfer.is_touched) from exc

    def _load(self, tensors: Iterator[tuple[str, Tensor]], transfer: _Transfer) -> None:
        for name, tensor in tensors:
            with self._lock:  # `leave` returns only when a write that it can't forbid any more is over
                transfer.give_up.check("receive")
                if not transfer.is_touched:
                    self._on_touch()
                transfer.is_touched = True
                self._tensors[name].copy_(tensor)

    def check_folder(self, path: str) -> None:
        """Look whether `stage` could read this folder, by its headers. Blocks on the disk.

        Raises: ManifestError: it is missing, truncated or doesn't fit the model.
        """
        try:
            check_tensors(Path(path), self._specs)
        except CheckpointError as exc:
            raise refused(FaultCode.MANIFEST_MISMATCH, str(exc), path=exc.path) from exc

    def stage(self, path: str) -> None:
        """Read a safetensors folder completely, without changing anything yet. Blocks.

        Raises: UpdateFailedError, untouched: it is missing, garbled or doesn't fit the model.
        """
        self._staged = None
        try:
            self._staged = read_tensors(Path(path), self._specs)
        except CheckpointError as exc:
            raise _failed(FaultCode.ENGINE_FAILED, str(exc), False) from exc

    def apply(self) -> None:
        """Make what `stage` read the model's. Nothing may read the model meanwhile.

        Raises: UpdateFailedError: nothing was staged.
        """
        staged, self._staged = self._staged, None
        if staged is None:
            raise _failed(FaultCode.ENGINE_FAILED, "there is nothing staged", False)
        self._on_touch()
        for name, tensor in staged.items():
            self._tensors[name].copy_(tensor)

    def discard(self) -> None:
        """Forget what `stage` read."""
        self._staged = None

    def sleep(self, keeps: bool) -> int:
        """See `SleepingTensors.sleep`. Nothing may read the model until `wake`."""
        return self._sleeping.sleep(keeps=keeps)

    def wake(self) -> int:
        """See `SleepingTensors.wake`."""
        return self._sleeping.wake()

    def forget(self) -> None:
        """Drop what is kept of weights that sleep. The model isn't used any more."""
        self._sleeping.close()

    def checksums(self) -> tuple[TensorSum, ...]:
        """Of what the model holds now, in its order."""
        return tuple(TensorSum(name=name, checksum=tensor_checksum(t)) for name, t in self._tensors.items())


@contextmanager
def _watched(group: Group, give_up: GiveUp) -> Iterator[None]:
    """While inside, the group is broken if it is given up, or if a collective ignores its time-out."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_WATCH_S):
            if give_up.reason is not None:
                group.abort(give_up.reason)
            elif group.busy_s() > group.timeout_s + WATCHDOG_GRACE_S:
                group.abort("a collective ignored its time-out")

    threading.Thread(target=watch, name="rlbus watch of a group", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _failed(code: FaultCode, message: str, weights_touched: bool) -> UpdateFailedError:
    return UpdateFailedError(Fault(code=code, message=message), weights_touched)
