"""Tensors over real Gloo groups between real processes, and what is left when one of them dies, hangs or fails."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed

from rlbus.errors import TransferError
from rlbus.schemas import GroupPlan, RankSpan, Rendezvous, TensorSpec, Version
from rlbus.transfer.plane import Sent, WeightSource
from rlbus.transfer.source import weight_source
from rlbus.transfer.torch_plane import TorchPlane

pytestmark = [pytest.mark.integration, pytest.mark.alone]

RECEIVER = Path(__file__).parent / "gloo_receiver.py"
BUCKET_BYTES = 64 * 1024
# A receiver that lives ends in a fraction of it; importing torch takes most of it on a busy machine.
END_S = 120.0

WEIGHTS = {
    "embed": torch.arange(50_000, dtype=torch.float32).view(500, 100),
    "turned": torch.arange(60_000, dtype=torch.int32).view(200, 300).t(),
    "half": torch.arange(999, dtype=torch.float32).to(torch.bfloat16),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(1.5, dtype=torch.float64),
}


class Receivers:
    """Receiver processes for the ranks 1 and up, each answering by lines of JSON."""

    def __init__(
        self, plan: GroupPlan, specs: tuple[TensorSpec, ...], stream_ids: tuple[str, ...], ends: dict[int, str]
    ) -> None:
        self.processes: dict[int, subprocess.Popen[str]] = {}
        for rank in range(1, plan.world_size):
            order = {"plan": plan, "rank": rank, "specs": specs, "stream_ids": stream_ids, "ends": ends.get(rank, "")}
            self.processes[rank] = subprocess.Popen(
                [sys.executable, str(RECEIVER), msgspec.json.encode(order).decode()], stdout=subprocess.PIPE, text=True
            )

    def answers(self, rank: int) -> list[dict[str, object]]:
        """Everything it said, once it has ended by itself."""
        out, _ = self.processes[rank].communicate(timeout=END_S)
        return [json.loads(line) for line in out.splitlines()]

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


def plan_for(place: Rendezvous, *ranks_of_workers: int, timeout_s: float = END_S, epoch: int = 1) -> GroupPlan:
    spans, first = [], 1
    for instance, num_ranks in enumerate(ranks_of_workers):
        spans.append(RankSpan(component="backend", instance_id=str(instance), first=first, num_ranks=num_ranks))
        first += num_ranks
    return GroupPlan(
        epoch=epoch,
        group_id=f"group-{epoch}",
        backend="gloo",
        num_trainer_ranks=1,
        world_size=first,
        spans=tuple(spans),
        rendezvous=place,
        bucket_bytes=BUCKET_BYTES,
        timeout_s=timeout_s,
    )


@asynccontextmanager
async def fleet(
    *ranks_of_workers: int,
    weights: dict[str, torch.Tensor] = WEIGHTS,
    stream_ids: tuple[str, ...] = ("op-1",),
    ends: dict[int, str] | None = None,
) -> AsyncIterator[tuple[TorchPlane, Receivers, WeightSource]]:
    """A plane that has joined with its receivers, all of which are gone afterwards."""
    plane = TorchPlane("gloo")
    source = weight_source(weights)
    plan = plan_for(await plane.rendezvous(), *ranks_of_workers)
    receivers = Receivers(plan, source.specs(), stream_ids, ends or {})
    try:
        await plane.join(plan)
        yield plane, receivers, source
    finally:
        receivers.end()
        await plane.aclose()


async def send(plane: TorchPlane, source: WeightSource, stream_id: str = "op-1") -> Sent:
    return await plane.send(
        source,
        source.specs(),
        bucket_bytes=BUCKET_BYTES,
        version=Version(step=1),
        stream_id=stream_id,
        on_progress=lambda _done, _total: None,
    )


def hashes(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    flat = {name: tensor.contiguous().flatten().view(torch.uint8) for name, tensor in weights.items()}
    return {name: hashlib.sha256(bytes(row.numpy())).hexdigest() for name, row in flat.items()}


def test_workers_of_unequal_ranks_receive_the_same_bytes_twice_over_one_group() -> None:
    """SCENARIOS 17: two workers with one and two ranks; two updates; nothing global is left in torch.distributed."""

    async def scenario() -> None:
        async with fleet(1, 2, stream_ids=("op-1", "op-2")) as (plane, receivers, source):
            sent = [await send(plane, source, "op-1"), await send(plane, source, "op-2")]
            assert sent[0].sums == sent[1].sums
            sums = {s.name: s.checksum for s in sent[0].sums}
            assert list(sums) == list(WEIGHTS)
            for rank in (1, 2, 3):
                joined, *received = receivers.answers(rank)
                assert joined == {"joined": [rank, 4, 1]}
                expected = {"hashes": hashes(WEIGHTS), "num_bytes": sent[0].num_bytes, "sums": sums}
                assert received == [expected, expected]
        assert not torch.distributed.is_initialized()

    asyncio.run(scenario())


def test_a_stale_stream_is_refused_and_nobody_dies() -> None:
    """Receivers that wait for another update say so and live; the sender is told by a broken group."""

    async def scenario() -> None:
        async with fleet(1, 1, stream_ids=("op-2",)) as (plane, receivers, source):
            with pytest.raises(TransferError):
                await send(plane, source, "op-1")
            answers = [receivers.answers(rank)[1]["error"] for rank in (1, 2)]
            assert "receive: a bucket of another update came (stale stream); nothing of it was taken" in answers
            assert [receivers.processes[rank].returncode for rank in (1, 2)] == [0, 0]

    asyncio.run(scenario())


class Failing:
    """Announces WEIGHTS, and fails to read the second of them."""

    def specs(self) -> tuple[TensorSpec, ...]:
        return weight_source(WEIGHTS).specs()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed", WEIGHTS["embed"]
        raise OSError("the shard is gone")


def test_a_sender_that_gives_up_is_named_by_all_and_the_group_serves_the_next_update() -> None:
    """No time-out, no broken group: the same one carries the retry."""

    async def scenario() -> None:
        async with fleet(1, 1, stream_ids=("op-1", "op-2")) as (plane, receivers, source):
            with pytest.raises(TransferError, match="the source raised OSError: the shard is gone"):
                await send(plane, Failing(), "op-1")
            await send(plane, source, "op-2")
            for rank in (1, 2):
                _, failed, received = receivers.answers(rank)
                expected = "receive: the sender gave up: the source raised OSError: the shard is gone"
                assert failed == {"error": expected}
                assert received["hashes"] == hashes(WEIGHTS)

    asyncio.run(scenario())


def test_a_receiver_that_can_not_load_does_not_keep_the_others_from_theirs() -> None:
    """It drops the rest and reports its own error; the others and the sender end well."""

    async def scenario() -> None:
        async with fleet(1, 1, ends={1: "fail"}) as (plane, receivers, source):
            await send(plane, source)
            assert receivers.answers(1)[1] == {"error": "no such parameter"}
            assert receivers.answers(2)[1]["hashes"] == hashes(WEIGHTS)

    asyncio.run(scenario())


# More than the kernel's socket buffers take, so that a dead or stopped receiver is felt.
LARGE = {f"layer{i}": torch.zeros(4 * 1024 * 1024) for i in range(4)}


def test_a_receiver_that_is_killed_half_way_ends_the_transfer_for_all_at_once() -> None:
    """SCENARIOS 6 and 57: the sender and the other receiver notice long before the time-out, and live."""

    async def scenario() -> None:
        async with fleet(1, 1, weights=LARGE, ends={1: "kill"}) as (plane, receivers, source):
            began = time.monotonic()
            with pytest.raises(TransferError):
                await send(plane, source)
            assert time.monotonic() - began < END_S / 2
            assert receivers.answers(1) == [{"joined": [1, 3, 1]}]
            assert receivers.processes[1].returncode == -signal.SIGKILL
            assert "error" in receivers.answers(2)[1]
            assert receivers.processes[2].returncode == 0

    asyncio.run(scenario())


def test_leaving_releases_a_sender_whose_receiver_hangs() -> None:
    """A stopped receiver blocks the send; `leave` ends it at once with the reason, and the next group forms."""

    async def scenario() -> None:
        async with fleet(1, weights=LARGE, ends={1: "stop"}) as (plane, receivers, source):
            sending = asyncio.create_task(send(plane, source))
            stopped = receivers.processes[1].pid
            await asyncio.to_thread(os.waitid, os.P_PID, stopped, os.WSTOPPED)
            done, _ = await asyncio.wait({sending}, timeout=0.5)
            assert not done
            began = time.monotonic()
            await plane.leave("the receiver hangs")
            assert time.monotonic() - began < END_S / 2
            with pytest.raises(TransferError, match="the receiver hangs"):
                await sending
            plan = plan_for(await plane.rendezvous(), 1, epoch=2)
            successors = Receivers(plan, weight_source(WEIGHTS).specs(), ("op-2",), {})
            try:
                await plane.join(plan)
                await send(plane, weight_source(WEIGHTS), "op-2")
                assert successors.answers(1)[1]["hashes"] == hashes(WEIGHTS)
            finally:
                successors.end()

    asyncio.run(scenario())


def test_a_send_that_is_cancelled_leaves_no_thread_behind() -> None:
    """The group is broken, so the blocked thread comes back by itself."""

    async def scenario() -> None:
        async with fleet(1, weights=LARGE, ends={1: "stop"}) as (plane, receivers, source):
            sending = asyncio.create_task(send(plane, source))
            await asyncio.to_thread(os.waitid, os.P_PID, receivers.processes[1].pid, os.WSTOPPED)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            began = time.monotonic()
            await plane.leave("cancelled")
            assert time.monotonic() - began < END_S / 2
            with pytest.raises(TransferError, match="no group was joined"):
                await send(plane, source)

    asyncio.run(scenario())
