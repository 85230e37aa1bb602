"""Requests that reach a controller whose lease is over, or isn't renewed yet: it is silent, and they are repeated."""

import asyncio

import pytest

from rlbus.controller.fence import FencedTransport
from rlbus.schemas import FaultCode, Generation, OpStatus, Version, WeightsState
from rlbus.testing import Faults, MemoryTransport
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller.failover_stage import Process, Stage, play
from tests.unit.controller.scene import worker

pytestmark = pytest.mark.unit

RUNNING, PAUSED = Generation.RUNNING, Generation.PAUSED
LEASE, OPS = "$KV.state.lease", "$KV.state.op.>"
# The promise of issue 3, and a client's first silences on the way there (1 s and 2 s), in seconds.
FAILOVER_S = 5.0
AGAIN_S = 3.0


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def until_fenced(process: Process) -> None:
    """Until this process may not act as the leader, though it is connected and has not stepped down yet."""
    transport = process.led[-1]._bus.transport
    while transport.is_connected or not process.transport.is_connected:  # noqa: ASYNC110 - the state is what is watched
        await asyncio.sleep(0.005)


async def stop_standby(stage: Stage) -> None:
    stage.processes[1].running.cancel()
    await asyncio.wait({stage.processes[1].running})


def test_a_pause_that_comes_before_a_late_renewal_is_done_after_it_and_once() -> None:
    """The renewal is confirmed after the leader had to stop acting: no refusal in between, and no second leader."""

    async def scenario(stage: Stage) -> None:
        leader = stage.processes[0]
        stage.broker.disconnect(leader.transport)
        await asyncio.sleep(1.3)
        leader.transport.faults = Faults(delay_s=(0.28, 0.28), only=LEASE)
        stage.broker.reconnect(leader.transport)
        await until_fenced(leader)
        report = await stage.client.pause()
        assert report.status is OpStatus.OK
        assert leader.led[0].num_unanswerable >= 1
        assert [r.engine.calls.count("pause") for r in stage.workers] == [1, 1]
        assert ([len(p.led) for p in stage.processes], await stage.generations()) == ([1, 0], [PAUSED, PAUSED])

    play([worker(1), worker(2)], scenario)


def test_a_pause_that_was_begun_when_the_lease_is_in_doubt_waits_for_its_renewal() -> None:
    """It was written down while the lease held, and is sent when it holds again: not refused in between."""

    async def scenario(stage: Stage) -> None:
        leader, loop = stage.processes[0], asyncio.get_running_loop()
        fenced = leader.led[0]._bus.transport
        assert isinstance(fenced, FencedTransport)
        leader.transport.faults = Faults(delay_s=(0.1, 0.1), only=OPS)
        loop.call_later(0.15, setattr, fenced, "_may_publish", lambda: False)
        loop.call_later(1.0, setattr, fenced, "_may_publish", lambda: True)
        report = await stage.client.pause()
        assert (report.status, report.took_s > 0.9) == (OpStatus.OK, True)
        assert (leader.led[0].num_unanswerable, await stage.generations()) == (0, [PAUSED])

    play([worker(1)], scenario)


def test_a_pause_asked_of_a_leader_whose_lease_is_over_is_done_by_the_next_one() -> None:
    """The store is silent for the leader alone; its standby takes over, and whoever asks is told nothing else."""

    async def scenario(stage: Stage) -> None:
        old = stage.processes[0]
        old.transport.faults = Faults(drop=1.0, only="$KV.>")
        await until_fenced(old)
        asked_s = now_s()
        assert (await stage.client.pause()).status is OpStatus.OK
        assert now_s() - asked_s < FAILOVER_S + AGAIN_S
        assert [r.engine.calls.count("pause") for r in stage.workers] == [1, 1]
        (item,) = (await stage.client.history()).items
        assert (item.term, item.status) == (stage.processes[1].led[0].term, OpStatus.OK)

    play([worker(1), worker(2)], scenario)


@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.5, 2.3, 2.6, 3.0, 3.5, 6.0, 9.9])
def test_a_lone_controller_that_lost_its_lease_is_waited_for(after_s: float) -> None:
    """The store is silent for 10 s. Nobody leads meanwhile, but a controller is there: no "no controller answers"."""

    async def scenario(stage: Stage) -> None:
        await stop_standby(stage)
        alone = stage.processes[0]
        alone.transport.faults = Faults(drop=1.0, only="$KV.>")
        silent_s = now_s()
        await asyncio.sleep(after_s)
        asking = asyncio.ensure_future(stage.client.pause(check=False))
        await asyncio.sleep(10.0 - after_s)
        alone.transport.faults = Faults()
        report = await asking
        if after_s < 2.3:  # it began, or nearly, under the lease that ran out
            assert report.fault is None or report.fault.code in (FaultCode.CONTROLLER_LOST, FaultCode.NOT_RECORDED)
        else:
            assert report.status is OpStatus.OK
        assert now_s() - silent_s < 10.0 + FAILOVER_S
        assert await stage.generations() == [PAUSED if report.status is OpStatus.OK else RUNNING]

    play([worker(1)], scenario)


def test_an_op_waits_a_moment_for_a_store_that_cant_write_it_down() -> None:
    """As after a restart of the server; some tries are written, and only their answers lost. It runs once."""

    async def scenario(stage: Stage) -> None:
        leader = stage.processes[0]
        leader.transport.faults = Faults(drop=0.2, only=OPS)
        for number in range(6):
            report = await stage.client.pause(op_id=f"p{number}")
            assert report.status is OpStatus.OK
        assert [r.engine.calls.count("pause") for r in stage.workers] == [6]
        leader.transport.faults = Faults()
        items = (await stage.client.history()).items
        assert [(i.op_id, i.status) for i in items] == [(f"p{n}", OpStatus.OK) for n in reversed(range(6))]

    play([worker(1)], scenario)


def test_an_update_that_is_asked_for_while_nobody_leads_is_done_by_the_next_leader() -> None:
    """Its manifest, its request and its signals all find nobody who leads at first."""

    async def scenario(stage: Stage) -> None:
        old = stage.processes[0]
        old.transport.faults = Faults(drop=1.0, only="$KV.>")
        await until_fenced(old)
        asked_s = now_s()
        assert (await stage.update(7)).status is OpStatus.OK
        assert now_s() - asked_s < FAILOVER_S + AGAIN_S
        assert stage.weights() == [(WeightsState.CLEAN, Version(step=7))] * 2

    play([worker(1), worker(2)], scenario)


def test_an_op_can_be_taken_back_while_the_callers_connection_blinks() -> None:
    """Cancelled when nothing can be sent: it is asked again within the 5 s, and nobody stays paused."""

    async def scenario(stage: Stage) -> None:
        asking = asyncio.ensure_future(stage.client.pause(deadline_s=600.0))
        await asyncio.sleep(1.0)
        ours = stage.client.bus.transport
        assert isinstance(ours, MemoryTransport)
        stage.broker.disconnect(ours)
        asyncio.get_running_loop().call_later(2.0, stage.broker.reconnect, ours)
        asking.cancel()
        cancelled_s = now_s()
        await asyncio.wait({asking})
        assert (asking.cancelled(), now_s() - cancelled_s < 3.0) == (True, True)
        await asyncio.sleep(5.0)
        assert ((await stage.client.status()).op_id, await stage.generations()) == (None, [RUNNING, RUNNING])

    slow = {"pause": {1: Step(latency_s=300.0)}}
    play([worker(1), worker(2, slow)], scenario)


def test_an_op_can_be_taken_back_across_a_failover() -> None:
    """Its leader is killed just before: the one that takes over hears the request, and nobody stays paused."""

    async def scenario(stage: Stage) -> None:
        asking = asyncio.ensure_future(stage.client.pause(deadline_s=600.0))
        await asyncio.sleep(1.0)
        stage.kill(stage.processes[0])
        asking.cancel()
        cancelled_s = now_s()
        await asyncio.wait({asking})
        assert (asking.cancelled(), now_s() - cancelled_s <= 5.01) == (True, True)
        await asyncio.sleep(10.0)
        assert ((await stage.client.status()).op_id, await stage.generations()) == (None, [RUNNING, RUNNING])

    slow = {"pause": {1: Step(latency_s=300.0)}}
    play([worker(1), worker(2, slow)], scenario)
