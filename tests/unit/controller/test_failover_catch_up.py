"""Controllers that die, and workers that are behind: what the next leader knows of the trainer's snapshot."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rlbus.errors import RLBusError
from rlbus.schemas import (
    Command,
    CommitWeights,
    InitGroup,
    MemberView,
    PauseGeneration,
    ReceiveWeights,
    SnapshotKind,
    Version,
    WeightsState,
)
from rlbus.testing import MemoryTransport
from rlbus.workers.testing import Rig
from tests.unit.controller.failover_stage import Stage, play
from tests.unit.controller.scene import w, worker
from tests.unit.controller.test_catching_up import memory

pytestmark = pytest.mark.unit

V7 = Version(step=7)


async def member_of(stage: Stage, number: int) -> MemberView:
    """What the leader says of a worker."""
    return {m.worker: m for m in (await stage.client.status()).members}[w(number)]


async def until_admitted(stage: Stage, number: int, limit_s: float = 30.0) -> MemberView:
    """Wait until a worker is admitted."""
    async with asyncio.timeout(limit_s):
        while True:
            with contextlib.suppress(RLBusError):  # nobody leads at the moment
                if (member := await member_of(stage, number)).admitted:
                    return member
            await asyncio.sleep(0.1)


@asynccontextmanager
async def reborn(stage: Stage, number: int) -> AsyncIterator[Rig]:
    """SIGKILL a worker, and start it again under the same id."""
    transport = stage.workers[number - 1].worker_bus.transport
    assert isinstance(transport, MemoryTransport)
    stage.broker.partition(transport)
    async with worker(number, boot="again")(stage.broker) as rig:
        await asyncio.sleep(0.2)
        yield rig


def test_the_next_leader_catches_up_who_is_behind() -> None:
    """The offer, and the checksums that were committed, are in the mark beside the version."""

    async def scenario(stage: Stage) -> None:
        await stage.update(7)
        await asyncio.sleep(0.5)
        first = await stage.leader()
        before = first.led[-1]._catch_ups.snapshot
        stage.kill(first)
        async with reborn(stage, 2) as again:
            member = await until_admitted(stage, 2)
            assert (member.status.weights.version, "pause" in again.engine.calls) == (V7, True)
            second = await stage.leader()
            assert second is not first
            after = second.led[-1]._catch_ups.snapshot
            assert after == before
            assert after is not None
            assert (after.version, after.offer.kind, after.sums_digest is None) == (V7, SnapshotKind.MEMORY, False)

    play([worker(1), worker(2)], scenario, memory())


@pytest.mark.parametrize("body", [InitGroup, PauseGeneration, ReceiveWeights, CommitWeights])
def test_a_catch_up_whose_leader_dies_in_it_is_done_by_the_next(body: type[object]) -> None:
    """Settled, and begun again; the fleet's version stays what it was, and nobody else is paused meanwhile."""

    async def scenario(stage: Stage) -> None:
        await stage.update(7)
        await asyncio.sleep(0.5)
        first = await stage.leader()
        paused: set[str] = set()

        def look(command: Command) -> None:
            if isinstance(command.body, PauseGeneration):
                paused.update(command.members or ("2",))
            if isinstance(command.body, body) and not first.is_killed:
                stage.kill(first)

        stage.on_command = look
        async with reborn(stage, 2) as again:
            member = await until_admitted(stage, 2, 60.0)
            assert first.is_killed
            assert (member.status.weights.state, member.status.weights.version) == (WeightsState.CLEAN, V7)
            assert set(again.engine.held.values()) == {V7}
            assert (await stage.client.status()).version == V7
            assert paused <= {"2"}

    play([worker(1), worker(2)], scenario, memory())


def test_the_offer_of_an_update_that_the_next_leader_finished_counts() -> None:
    """The first died while it committed; whoever comes back later is caught up from that update's snapshot."""

    async def scenario(stage: Stage) -> None:
        await stage.update(6)
        await asyncio.sleep(0.5)
        first = await stage.leader()

        def look(command: Command) -> None:
            if isinstance(command.body, CommitWeights) and not first.is_killed:
                stage.kill(first)

        stage.on_command = look
        await stage.update(7)
        assert (await stage.client.status()).version == V7
        async with reborn(stage, 2):
            assert (await until_admitted(stage, 2)).status.weights.version == V7

    play([worker(1), worker(2)], scenario, memory())
