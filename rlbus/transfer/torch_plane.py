"""The trainer's data plane over torch process groups: an asyncio face in front of blocking work in threads.

Every join and send runs in a daemon thread of its own. `leave` breaks the group, which releases that thread, and
abandons it if it isn't back in time. A watchdog on the loop breaks a group whose collective ignores its time-out.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rlbus.errors import ClosedError, ConfigError, TransferError
from rlbus.schemas import GroupPlan, Rendezvous, TensorSpec, Version
from rlbus.transfer.bounded import GiveUp, run_in_thread
from rlbus.transfer.group import Group, open_group, prove
from rlbus.transfer.meeting import host_store
from rlbus.transfer.plane import ProgressFn, Sent, WeightSource
from rlbus.transfer.sender import send

_log = logging.getLogger("rlbus.transfer")
T = TypeVar("T")

LOOPBACK = "127.0.0.1"
# How long a thread whose group was broken may take to come back, before it is left behind.
RELEASE_S = 5.0
# What a collective may take beyond its own time-out, before the watchdog breaks the group.
WATCHDOG_GRACE_S = 2.0
_WATCH_S = 0.5
# A broken group is broken again this often until its thread is out, since one that comes beside the start of a
# collective can be lost.
ABORT_AGAIN_S = 0.05
# Threads that may hang in groups that were left, before no more is begun.
MAX_LEFT_BEHIND = 4


class TorchPlane:
    """A SenderPlane over Gloo or NCCL, for a trainer with one rank in the group.

    A trainer of several ranks (FSDP) makes a plane on its rank 0 only; the others take part by reading the source once
    in each update, which gathers, and aren't in the group.

    Args:
        backend: "gloo", "nccl", or "auto": nccl if there is a CUDA device and this torch has it, else gloo.
        host: the address at which workers reach this machine (a name, IPv4 or IPv6); None is 127.0.0.1, which only
            workers on this machine can use.
        device: where buckets lie; None is the current CUDA device for nccl. Gloo always uses the CPU.
    """

    def __init__(
        self, backend: str = "auto", *, host: str | None = None, device: torch.device | str | None = None
    ) -> None:
        has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
        self._backend = ("nccl" if has_nccl else "gloo") if backend == "auto" else backend
        if self._backend not in ("gloo", "nccl"):
            raise ConfigError("backend", backend, 'use "gloo", "nccl" or "auto"')
        if self._backend == "nccl" and not has_nccl:
            raise ConfigError("backend", backend, "there is no CUDA device, or this torch has no NCCL; use gloo")
        if device is None:
            # With its index: joins and sends run in threads of their own, and the current device belongs to a thread.
            device = torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else "cpu"
        self._device = torch.device(device)
        self._host = LOOPBACK if host is None else host
        self._sender_id = secrets.token_hex(16)
        self._store: TCPStore | None = None
        self._group: Group | None = None
        self._give_up = GiveUp()
        # Ends when the thread of the join or send that runs does. None: nothing runs.
        self._work: asyncio.Task[object] | None = None
        # The group that it is about, which also a thread that was left behind keeps for itself.
        self._work_group: list[Group] = []
        # Work that was left while it ran, with what goes on breaking its group; at most MAX_LEFT_BEHIND.
        self._left: dict[asyncio.Task[object], asyncio.Task[None]] = {}
        # Those of them that `leave` has waited for in vain.
        self._given_up: set[asyncio.Task[object]] = set()
        self._is_closed = False

    @property
    def backend(self) -> str:
        """ "gloo" or "nccl"."""
        return self._backend

    @property
    def sender_id(self) -> str:
        """A random token, this plane's for its life."""
        return self._sender_id

    @property
    def num_ranks(self) -> int:
        """One: rank 0, which sends."""
        return 1

    async def rendezvous(self) -> Rendezvous:
        """Where members meet; bound at the first call and kept open until `aclose`.

        Raises: ConfigError: `host` is a wildcard. TransferError: it can't be bound. ClosedError: after aclose.
        Cancel: not bound, or bound and kept.
        """
        self._check_open()
        if self._store is None:
            store = await run_in_thread(lambda: host_store(self._host), name="rlbus rendezvous")
            self._store = store if self._store is None else self._store
        return Rendezvous(host=self._host.strip("[]"), port=self._store.port, prefix=f"rlbus/{self._sender_id}")

    async def join(self, plan: GroupPlan) -> None:
        """Join as rank 0 and prove the group. See SenderPlane.join.

        Cancel: no group; the thread is released, or left behind after RELEASE_S.
        """
        self._check_open()
        await self.leave("another group is joined")
        if plan.backend != self._backend:
            raise ConfigError("backend", plan.backend, f"this trainer's data plane is {self._backend}")
        give_up = self._give_up = GiveUp()

        formed: list[Group] = []

        def work() -> None:
            group = open_group(plan, 0, self._device, give_up=give_up)
            try:
                give_up.check(f"join group {plan.epoch}")
                # Known before the proof, which can block: `leave` has to be able to break it.
                formed.append(group)
                give_up.check(f"join group {plan.epoch}")
                prove(group)
            except BaseException:
                group.abort("the join failed")
                group.close()
                raise

        try:
            await self._run(work, f"join group {plan.epoch}", formed)
            give_up.check(f"join group {plan.epoch}")
        except BaseException as exc:
            if give_up is self._give_up:  # else a later join has begun, and left this one
                self._drop(f"the join failed: {exc}")
            raise
        self._group = formed[0]

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
        """Send everything over the group. See SenderPlane.send; `version` doesn't travel in the data.

        Cancel: the group is broken and the thread released, or left behind after RELEASE_S.
        """
        self._check_open()
        group = self._group
        if group is None:
            raise TransferError("send", "no group was joined")
        watchdog = asyncio.create_task(_watch(group))
        try:
            return await self._run(
                lambda: send(group, source, specs, bucket_bytes, on_progress, stream_id=stream_id), "send", [group]
            )
        except asyncio.CancelledError:
            if self._group is group:
                self._drop("the send was cancelled")
            raise
        finally:
            watchdog.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watchdog

    async def leave(self, reason: str) -> None:
        """Drop the group. A join or send that runs is released and awaited for at most RELEASE_S.

        Cancel: the group is broken, its thread may still run.
        """
        self._drop(reason)
        left = set(self._left) - self._given_up - {asyncio.current_task()}
        if left:
            _, pending = await asyncio.wait(left, timeout=RELEASE_S)
            if pending:
                _log.error("%d threads of the data plane are left behind, stuck in a group: %s", len(pending), reason)
            # Waited for once: a thread that hangs must not hold up every group after its own.
            self._given_up |= pending

    async def aclose(self) -> None:
        """Leave, and close the rendezvous. Idempotent. Cancel: as leave."""
        self._is_closed = True
        await self.leave("closed")
        self._store = None
        for breaking in self._left.values():
            breaking.cancel()
        await asyncio.gather(*self._left.values(), return_exceptions=True)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the data plane")

    def _drop(self, reason: str) -> None:
        self._give_up.set(reason)
        group, self._group = self._group, None
        work, self._work = self._work, None
        if work is not None and not work.done():
            self._left[work] = asyncio.create_task(_break_until_out(work, self._work_group, reason))
            work.add_done_callback(self._left.pop)
            work.add_done_callback(self._given_up.discard)
        for broken in self._work_group if work is not None else ():
            broken.abort(reason)
        if group is not None:
            group.close()

    async def _run(self, work: Callable[[], T], name: str, group: list[Group]) -> T:
        """Run blocking work on `group`, one at a time, in a thread whose end `leave` can await."""
        if self._work is not None and not self._work.done():
            raise TransferError(name, "this data plane is still busy with a join or send")
        if len(self._left) >= MAX_LEFT_BEHIND:
            raise TransferError(name, f"{len(self._left)} threads still hang in groups that were left")
        task: asyncio.Task[T] = asyncio.ensure_future(run_in_thread(work, name=f"rlbus {name}"))
        self._work, self._work_group = task, group
        task.add_done_callback(self._ended)
        # Shielded, so that `leave` can await the thread also after its caller was cancelled.
        return await asyncio.shield(task)

    def _ended(self, task: "asyncio.Task[T]") -> None:
        if self._work is task:
            self._work = None
        if not task.cancelled():
            task.exception()  # seen here if the caller was cancelled


async def _break_until_out(work: "asyncio.Task[object]", groups: list[Group], reason: str) -> None:
    """Break the group of `work` again and again until its thread is out; the group can also appear only now."""
    while not work.done():
        for group in groups:
            group.abort(reason)
        await asyncio.sleep(ABORT_AGAIN_S)


async def _watch(group: Group) -> None:
    """Break the group when one collective takes longer than it may. Torch's own time-out normally comes first."""
    while True:
        await asyncio.sleep(_WATCH_S)
        if group.busy_s() > group.timeout_s + WATCHDOG_GRACE_S:
            group.abort("the watchdog: a collective ignored its time-out")
