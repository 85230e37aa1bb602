"""TorchPlane with groups that hang: what breaking them once didn't release is broken again, or left behind."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlbus.errors import TransferError
from rlbus.schemas import GroupPlan, Rendezvous, TensorSpec, Version
from rlbus.transfer import torch_plane
from rlbus.transfer.plane import Sent
from rlbus.transfer.source import weight_source
from rlbus.transfer.torch_plane import MAX_LEFT_BEHIND, TorchPlane

pytestmark = pytest.mark.unit

SPECS = (TensorSpec(name="a", dtype="float32", shape=(2,)),)


class HangingGroup:
    """Every broadcast hangs until it was aborted `num_aborts` times."""

    rank, size, epoch, timeout_s, device = 0, 2, 1, 60.0, torch.device("cpu")

    def __init__(self, num_aborts: int) -> None:
        self.is_in = threading.Event()
        self.out = threading.Event()
        self._num_aborts = num_aborts

    def broadcast(self, buffer: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> None:
        """Hang."""
        self.is_in.set()
        self.out.wait()
        raise TransferError("broadcast", "aborted")

    def all_sum(self, value: int) -> int:
        """As all ranks would."""
        return 3

    def busy_s(self) -> float:
        """Not of interest to the watchdog."""
        return 0.0

    def abort(self, reason: str) -> None:
        """Lost, until enough have come."""
        self._num_aborts -= 1
        if self._num_aborts <= 0:
            self.out.set()

    def close(self) -> None:
        """Nothing."""


async def joined(monkeypatch: pytest.MonkeyPatch, plane: TorchPlane, group: HangingGroup) -> "asyncio.Task[Sent]":
    """Join as `group`, begin to send, and return when the send hangs."""
    monkeypatch.setattr(torch_plane, "open_group", lambda *_args, **_named: group)
    place = Rendezvous(host="127.0.0.1", port=1, prefix="p")
    named: dict[str, Any] = {"epoch": 1, "group_id": "g", "num_trainer_ranks": 1, "world_size": 2, "spans": ()}
    await plane.join(GroupPlan(backend="gloo", rendezvous=place, bucket_bytes=64, **named))
    source = weight_source({"a": torch.zeros(2)})
    sending = asyncio.create_task(
        plane.send(
            source, SPECS, bucket_bytes=64, version=Version(), stream_id="op", on_progress=lambda _done, _total: None
        )
    )
    assert await asyncio.to_thread(group.is_in.wait, 60.0)
    return sending


def test_an_abort_that_is_lost_is_repeated_until_the_thread_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """`leave` waits for it, the send ends with an error, and nothing is left behind."""
    monkeypatch.setattr(torch_plane, "RELEASE_S", 30.0)

    async def scenario() -> None:
        plane = TorchPlane("gloo")
        sending = await joined(monkeypatch, plane, HangingGroup(num_aborts=4))
        await plane.leave("over")
        async with asyncio.timeout(30.0):
            with pytest.raises(TransferError, match="aborted"):
                await sending
        await plane.aclose()

    asyncio.run(scenario())


def test_a_thread_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds up the leaving of its own group, and no join or leave after that."""
    monkeypatch.setattr(torch_plane, "RELEASE_S", 0.1)

    async def scenario() -> None:
        plane, group = TorchPlane("gloo"), HangingGroup(num_aborts=1 << 30)
        sending = await joined(monkeypatch, plane, group)
        began_s = time.monotonic()
        await plane.leave("it hangs")
        assert time.monotonic() - began_s >= 0.1
        monkeypatch.setattr(torch_plane, "RELEASE_S", 3600.0)
        async with asyncio.timeout(30.0):
            for _ in range(3):
                await plane.leave("another group is joined")
        group.out.set()
        await asyncio.wait({sending})
        assert isinstance(sending.exception(), TransferError)
        await plane.aclose()

    asyncio.run(scenario())


def test_a_thread_that_never_comes_back_does_not_keep_the_next_group_from_forming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to MAX_LEFT_BEHIND of them; they end when their groups let them go, and then there is room again."""
    monkeypatch.setattr(torch_plane, "RELEASE_S", 0.05)

    async def scenario() -> None:
        plane = TorchPlane("gloo")
        groups = [HangingGroup(num_aborts=1 << 30) for _ in range(MAX_LEFT_BEHIND)]
        sends = []
        for group in groups:
            sends.append(await joined(monkeypatch, plane, group))
            await plane.leave("it hangs")
        with pytest.raises(TransferError, match=f"{MAX_LEFT_BEHIND} threads still hang in groups that were left"):
            await joined(monkeypatch, plane, HangingGroup(1))
        for group in groups:
            group.out.set()
        await asyncio.wait(sends)
        assert all(isinstance(sending.exception(), TransferError) for sending in sends)
        await joined(monkeypatch, plane, HangingGroup(1))
        await plane.aclose()

    asyncio.run(scenario())
