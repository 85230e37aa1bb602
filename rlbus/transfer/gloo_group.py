"""Groups over Gloo, for tensors in host memory. Stateless: a ProcessGroupGloo of our own, over the meeting's store.

torch 2.13's `abort` and `shutdown` of a Gloo group don't release a thread that is blocked in it (FACTS, "Gloo, one
host"); shutting down the group's connected sockets does. They are found by address: a Gloo device takes connections
at one port of its own, so a socket is this group's if its local end is ours or its far end one that a member announced.
The listening socket is left alone, since Gloo ends the process when that one is shut.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroupGloo

from rlbus.errors import GroupBrokenError, TransferError
from rlbus.schemas import GroupPlan
from rlbus.transfer.meeting import Address, Meeting, local_host

# Devices are made one at a time, so that each one's listening socket can be told from the next one's.
_device_lock = threading.Lock()
_DEVICE_TRIES = 3
_MAX_PROBLEM_CHARS = 200


class GlooGroup:
    """A group over Gloo; see `rlbus.transfer.group.Group` for what each part promises."""

    def __init__(self, plan: GroupPlan, rank: int, meeting: Meeting) -> None:
        """Form it; called by `open_group`, in a thread that can be left behind."""
        self._rank = rank
        self._size = plan.world_size
        self._epoch = plan.epoch
        self._timeout_s = plan.timeout_s
        self._aborted: str | None = None
        self._busy_since: float | None = None
        device, own = _open_device(plan)
        meeting.appear(own)
        self._own = own
        self._peers = {address for peer, address in meeting.wait_for_all().items() if peer != rank}
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._timeout = timedelta(seconds=meeting.remaining_s())
        try:
            group = ProcessGroupGloo(meeting.store_for_group(), rank, self._size, options)
        except RuntimeError as exc:
            raise TransferError(f"join group {plan.epoch}", _short(exc)) from exc
        group._set_default_timeout(timedelta(seconds=plan.timeout_s))
        self._group: ProcessGroupGloo | None = group

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
        """The CPU."""
        return torch.device("cpu")

    def broadcast(self, buffer: Tensor, meanwhile: Callable[[], None] | None = None) -> None:
        """Send `buffer` from rank 0 into everybody's. Raises: TransferError."""
        with self._collective("broadcast") as group:
            options = BroadcastOptions()
            options.rootRank = 0
            options.rootTensor = 0
            options.timeout = timedelta(seconds=self._timeout_s)
            work = group.broadcast([buffer], options)  # type: ignore[attr-defined]
            try:
                if meanwhile is not None:
                    meanwhile()
            finally:
                work.wait()  # also when `meanwhile` raised: nobody may touch the buffer before

    def all_sum(self, value: int) -> int:
        """The sum of every rank's `value`. Raises: TransferError."""
        total = torch.tensor([value], dtype=torch.int64)
        with self._collective("all_sum") as group:
            group.allreduce([total]).wait()  # type: ignore[attr-defined]
        return int(total.item())

    def busy_s(self) -> float:
        """For how long the running collective has been blocked."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def abort(self, reason: str) -> None:
        """Shut the group's connections down. Idempotent; never blocks."""
        if self._aborted is None:
            self._aborted = reason
        for fd in _socket_fds():
            _shut_if(fd, self._is_ours)

    def close(self) -> None:
        """Leave. Idempotent."""
        if self._busy_since is not None:
            self.abort("closed")
        elif self._aborted is None:
            self._aborted = "closed"
        self._group = None

    @contextlib.contextmanager
    def _collective(self, operation: str) -> Iterator[ProcessGroupGloo]:
        name = f"{operation} in group {self._epoch}"
        self._busy_since = time.monotonic()
        try:
            # After busy_since is set: a close that comes now aborts, one that came before is seen here.
            group = self._group
            if self._aborted is not None or group is None:
                raise GroupBrokenError(name, f"the group was left: {self._aborted}")
            yield group
        except RuntimeError as exc:
            why = _short(exc) if self._aborted is None else f"the group was left: {self._aborted}"
            raise GroupBrokenError(name, why) from exc
        finally:
            self._busy_since = None

    def _is_ours(self, local: Address, far: Address) -> bool:
        return local == self._own or far in self._peers


def _open_device(plan: GroupPlan) -> tuple[ProcessGroupGloo.Device, Address]:
    """A Gloo device, and the address at which it takes connections.

    GLOO_SOCKET_IFNAME, torch's own setting for machines with several networks, names the interface if it is set.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    where = {"interface": interface} if interface else {"hostname": local_host(plan)}
    operation = f"join group {plan.epoch}"
    with _device_lock:
        for _ in range(_DEVICE_TRIES):
            before = _listening()
            try:
                device = ProcessGroupGloo.create_device(**where, lazy_init=False)
            except RuntimeError as exc:
                raise TransferError(operation, _short(exc)) from exc
            added = _listening() - before
            if len(added) == 1:
                return device, added.pop()
            del device  # another thread opened a listening socket meanwhile; which one is ours can't be told
    raise TransferError(
        operation, "the listening socket of Gloo can't be told from others that are opened all the time"
    )


def _listening() -> set[Address]:
    """The addresses at which this process takes TCP connections."""
    found: set[Address] = set()
    for fd in _socket_fds():
        with _borrowed(fd) as sock:
            if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            with contextlib.suppress(OSError):
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(_address(sock.getsockname()))
    return found


def _socket_fds() -> list[int]:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return [int(name) for name in os.listdir(folder)]


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket | None]:
    """A duplicate of `fd` as a socket, None if it is none. What it is gets asked of the duplicate, so a number that is
    closed and taken again meanwhile can't mislead.
    """
    try:
        own = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        sock = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        yield None
        return
    with sock:
        yield sock


def _shut_if(fd: int, is_ours: Callable[[Address, Address], bool]) -> None:
    with _borrowed(fd) as sock:
        if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return
        with contextlib.suppress(OSError):  # not connected, or closed meanwhile
            if is_ours(_address(sock.getsockname()), _address(sock.getpeername())):
                sock.shutdown(socket.SHUT_RDWR)


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    return name[0].removeprefix("::ffff:"), name[1]


def _short(exc: BaseException) -> str:
    """The first line of what torch says, without the source position in front."""
    text = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
    if text.startswith("["):
        text = text.partition("] ")[2] or text
    return text[:_MAX_PROBLEM_CHARS]
