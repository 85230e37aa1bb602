"""Controllers that die: a standby takes over, and finishes or takes back what it finds (SCENARIOS 11, 54)."""

import asyncio
from typing import Any

import pytest

from rlbus.bus import Bus
from rlbus.controller.leader import STEP_DOWN_S
from rlbus.controller.leases import LEASE_S
from rlbus.controller.service import Controller
from rlbus.errors import BrokenError, PartialError, VersionRegressionError
from rlbus.schemas import (
    Command,
    CommitWeights,
    FaultCode,
    FlushCache,
    Generation,
    InitGroup,
    OpStatus,
    PauseGeneration,
    PrepareWeightsUpdate,
    ReceiveWeights,
    Report,
    ResumeGeneration,
    SenderStep,
    Version,
    WeightsState,
)
from rlbus.testing import Faults, LoopClock, MemoryTransport
from rlbus.trainer import Trainer
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller import scene
from tests.unit.controller.failover_stage import Stage, play
from tests.unit.controller.scene import outcomes, source, worker

pytestmark = pytest.mark.unit

RUNNING, PAUSED = Generation.RUNNING, Generation.PAUSED
# The promise of issue 3, in seconds: from the leader's death to a standby that answers.
FAILOVER_S = 5.0


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_a_standby_serves_in_under_5_s_after_the_leader_was_killed() -> None:
    """Its term is above the old one's, the version is kept, and nobody was disturbed."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(6)).status is OpStatus.OK
        before = await stage.client.status()
        stage.kill(stage.processes[0])
        killed_s = now_s()
        leader = await stage.leader()
        assert (leader.name, leader.num_standbys) == ("b", 1)
        view = await stage.client.status()
        assert now_s() - killed_s < FAILOVER_S
        assert view.term > before.term
        assert (view.version, [m.admitted for m in view.members]) == (Version(step=6), [True, True])
        assert (await stage.update(7)).status is OpStatus.OK

    play([worker(1), worker(2)], scenario)


def test_after_a_clean_stop_the_standby_takes_over_at_once() -> None:
    """The lease is released, not left to end."""

    async def scenario(stage: Stage) -> None:
        stage.processes[0].running.cancel()
        stopped_s = now_s()
        await asyncio.wait({stage.processes[0].running})
        assert (await stage.leader()).name == "b"
        assert now_s() - stopped_s < 1.0

    play([worker(1)], scenario)


def test_a_leader_that_is_cut_off_steps_down_before_anybody_else_leads_and_stands_by_afterwards() -> None:
    """Two never lead at the same time; the old one comes back as a standby, and can lead again."""

    async def scenario(stage: Stage) -> None:
        old = stage.processes[0]
        stage.broker.partition(old.transport)
        stage.cut.append(old)
        cut_s = now_s()
        controller = old.led[0]
        while controller._bus.transport.is_connected:  # noqa: ASYNC110 - the state is what is watched
            await asyncio.sleep(0.01)
        with pytest.raises(BrokenError, match="lease"):
            controller._bus.transport.publish("dyn.test.x", b"")
        assert now_s() - cut_s <= STEP_DOWN_S + 0.1
        assert stage.processes[1].led == []
        new = await stage.leader()
        assert (new.name, now_s() - cut_s < FAILOVER_S) == ("b", True)
        stage.broker.heal(old.transport)
        stage.cut.clear()
        await asyncio.sleep(2.0)
        assert (len(old.led), old.num_standbys) == (1, 1)
        stage.kill(new)
        assert (await stage.leader()).name == "a"
        assert old.led[1].term > new.led[0].term > old.led[0].term

    play([worker(1)], scenario)


def test_an_old_leader_that_wakes_up_is_refused_by_every_worker() -> None:
    """Even one without any fence: the workers have seen the new term, from the first hello on."""

    async def scenario(stage: Stage) -> None:
        old_term = stage.processes[0].led[0].term
        stage.kill(stage.processes[0])
        await stage.leader()
        zombie = Controller(Bus(stage.broker.connect(), clock=LoopClock()), "test", term=old_term)
        for rig in stage.workers:
            body = PauseGeneration()
            command = Command(
                op_id=f"z-{rig.agent.descriptor.instance_id}", term=zombie.term, expires_at=2e9, body=body
            )
            replies: asyncio.Queue[Any] = asyncio.Queue(8)
            inbox = stage._spy.open_inbox(lambda m, _, q=replies: q.put_nowait(m.data))  # type: ignore[misc]
            subject = f"dyn.test.backend.rl.pause_generation.{rig.agent.descriptor.instance_id}"
            stage._spy.publish(subject, command, inbox.reply)
            assert FaultCode.STALE_TERM.value.encode() in await replies.get()
        assert await stage.generations() == [RUNNING, RUNNING]

    play([worker(1), worker(2)], scenario)


async def killed_at(stage: Stage, at: type[Any] | SenderStep, after_s: float = 0.0) -> Report:
    """An update to version 7 whose leader is killed when this is on the bus; its report."""
    leader = stage.processes[0]

    def kill() -> None:
        stage.on_command = lambda _: None
        stage.on_signal = lambda _: None
        asyncio.get_running_loop().call_later(after_s, stage.kill, leader)

    if isinstance(at, SenderStep):
        stage.on_signal = lambda signal: kill() if signal.step is at else None
    else:
        stage.on_command = lambda command: kill() if isinstance(command.body, at) else None
    report = await stage.update(7)
    assert leader.is_killed
    return report


async def check_recovered(stage: Stage) -> None:
    """The next update finds a fleet that takes it, all of it."""
    assert (await stage.update(8)).status is OpStatus.OK
    assert await stage.generations() == [RUNNING] * len(stage.workers)
    assert stage.weights() == [(WeightsState.CLEAN, Version(step=8))] * len(stage.workers)
    view = await stage.client.status()
    assert [m.admitted for m in view.members] == [True] * len(stage.workers)


@pytest.mark.parametrize("at", [PrepareWeightsUpdate, InitGroup, PauseGeneration, ReceiveWeights])
def test_an_update_whose_leader_dies_before_the_first_byte_is_taken_back(at: type[Any]) -> None:
    """SCENARIOS 54, "between all paused and update" among them: everybody generates again with what was, in seconds."""

    async def scenario(stage: Stage) -> None:
        if at is not InitGroup:  # the second update would use the group of the first
            assert (await stage.update(6)).status is OpStatus.OK
        before = stage.weights()
        report = await killed_at(stage, at)
        assert (report.status, report.took_s < 10.0) == (OpStatus.FAILED, True)
        assert outcomes(report) == {"1": "undone", "2": "undone"}
        assert report.fault is not None
        assert report.fault.code is FaultCode.CONTROLLER_LOST
        assert await stage.generations() == [RUNNING, RUNNING]
        assert stage.weights() == before
        await check_recovered(stage)

    play([worker(1), worker(2)], scenario)


def test_an_engine_that_is_still_pausing_for_a_dead_leader_is_let_go() -> None:
    """It would take 50 s to pause: the resume of the next leader ends that, and the worker isn't waited for."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(6)).status is OpStatus.OK
        report = await killed_at(stage, PauseGeneration, after_s=1.0)
        assert (outcomes(report), report.took_s < 10.0) == ({"1": "undone", "2": "undone"}, True)
        assert await stage.generations() == [RUNNING, RUNNING]
        await check_recovered(stage)

    slow: scene.Steps = {"pause": {2: Step(latency_s=50.0)}}
    play([worker(1), worker(2, slow)], scenario)


def test_what_was_received_and_not_verified_is_torn_and_never_committed() -> None:
    """Killed when the sender said that all is sent: nobody compared checksums, so nobody may serve it."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(6)).status is OpStatus.OK
        report = await killed_at(stage, SenderStep.SENT)
        assert (report.status, outcomes(report)) == (OpStatus.FAILED, {"1": "failed", "2": "failed"})
        assert [state for state, _ in stage.weights()] == [WeightsState.DIRTY] * 2
        assert await stage.generations() == [PAUSED, PAUSED]
        assert (await stage.client.status()).version == Version(step=6)
        await check_recovered(stage)

    play([worker(1), worker(2)], scenario)


def test_a_commit_that_had_begun_is_completed_on_whoever_was_verified() -> None:
    """Worker 1 was committed, worker 2 didn't hear of it: after the take-over both are at the new version and run."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(6)).status is OpStatus.OK
        deaf = stage.workers[1].worker_bus.transport
        assert isinstance(deaf, MemoryTransport)
        deaf.faults = Faults(drop=1.0, only="dyn.test.backend.rl.commit_weights_update")

        def hear_again() -> None:
            deaf.faults = Faults()

        asyncio.get_running_loop().call_later(3.0, hear_again)
        report = await killed_at(stage, CommitWeights, after_s=0.5)
        assert (report.status, outcomes(report)) == (OpStatus.OK, {"1": "ok", "2": "ok"})
        assert stage.weights() == [(WeightsState.CLEAN, Version(step=7))] * 2
        assert await stage.generations() == [RUNNING, RUNNING]
        assert [r.engine.calls.count("finish_update") for r in stage.workers] == [2, 2]
        await check_recovered(stage)

    play([worker(1), worker(2)], scenario)


def test_whoever_failed_the_check_is_never_committed_by_the_next_leader() -> None:
    """Worker 2 has everything, with other checksums: only worker 1 stands in the journal as verified."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(6)).status is OpStatus.OK
        report = await killed_at(stage, CommitWeights, after_s=0.1)
        assert (report.status, outcomes(report)) == (OpStatus.PARTIAL, {"1": "ok", "2": "failed"})
        assert stage.weights() == [(WeightsState.CLEAN, Version(step=7)), (WeightsState.DIRTY, None)]
        assert await stage.generations() == [RUNNING, PAUSED]
        await check_recovered(stage)

    bad: scene.Steps = {"receive_weights": {2: Step(wrong_sum_of=DEFAULT_TENSORS[0].name)}}
    slow: scene.Steps = {"finish_update": {2: Step(latency_s=0.5)}}
    play([worker(1, slow), worker(2, bad)], scenario)


@pytest.mark.parametrize("at", [FlushCache, ResumeGeneration])
def test_an_update_that_was_committed_is_finished(at: type[Any]) -> None:
    """Whoever has the new version is let go, and the report is that of an update that went well."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(6)).status is OpStatus.OK
        report = await killed_at(stage, at)
        assert (report.status, outcomes(report)) == (OpStatus.OK, {"1": "ok", "2": "ok"})
        assert await stage.generations() == [RUNNING, RUNNING]
        assert (await stage.client.status()).version == Version(step=7)
        await check_recovered(stage)

    play([worker(1), worker(2)], scenario)


def test_the_journal_says_who_began_it_and_who_settled_it() -> None:
    """`rlbus history`: newest first, over the leaders."""

    async def scenario(stage: Stage) -> None:
        await stage.update(6)
        first = stage.processes[0].led[0].term
        await killed_at(stage, PauseGeneration)
        view = await stage.client.history()
        second = stage.processes[1].led[0].term
        found = [(i.op, i.caller, i.term, i.status, i.version, i.settled_by) for i in view.items]
        assert found == [
            ("update_weights", "trainer", first, OpStatus.FAILED, Version(step=7), second),
            ("update_weights", "trainer", first, OpStatus.OK, Version(step=6), None),
        ]
        assert view.items[1].num_ok == view.items[1].num_workers == 2
        assert len((await stage.client.history(1)).items) == 1
        assert view.report is None

    play([worker(1), worker(2)], scenario)


def test_the_journal_says_of_a_resume_that_it_was_forced() -> None:
    """Whoever let torn weights generate is in `rlbus history`."""

    async def scenario(stage: Stage) -> None:
        await stage.client.pause()
        await stage.client.resume()
        await stage.client.pause()
        await stage.client.resume(force=True)
        found = [(i.op, i.what) for i in (await stage.client.history()).items]
        assert found == [("resume", "forced"), ("pause", None), ("resume", None), ("pause", None)]

    play([worker(1)], scenario)


def test_a_repeated_request_gets_the_recorded_report_from_the_next_leader() -> None:
    """A pause that ended before its controller died isn't done again."""

    async def scenario(stage: Stage) -> None:
        done = await stage.client.pause(op_id="p1")
        await asyncio.sleep(0.5)
        stage.kill(stage.processes[0])
        await stage.leader()
        again = await stage.client.pause(op_id="p1")
        assert (again.took_s, again.status) == (done.took_s, OpStatus.OK)
        assert [r.engine.calls.count("pause") for r in stage.workers] == [1]
        assert await stage.generations() == [PAUSED]

    play([worker(1)], scenario)


def test_a_pause_whose_leader_dies_half_way_is_undone_and_a_whole_one_is_kept() -> None:
    """Worker 2 takes its time to pause: killed meanwhile, everybody is let go."""

    async def scenario(stage: Stage) -> None:
        asyncio.get_running_loop().call_later(1.0, stage.kill, stage.processes[0])
        with pytest.raises(PartialError) as caught:
            await stage.client.pause(deadline_s=60.0)
        assert outcomes(caught.value.report) == {"1": "undone", "2": "undone"}
        assert await stage.generations() == [RUNNING, RUNNING]

    slow: scene.Steps = {"pause": {1: Step(latency_s=20.0)}}
    play([worker(1), worker(2, slow)], scenario)


def test_a_pause_that_everybody_did_is_kept_and_reported_as_done() -> None:
    """Killed after the last worker paused and before anybody was told: the hold is the caller's, and stays."""

    async def scenario(stage: Stage) -> None:
        stage.processes[0].transport.faults = Faults(drop=1.0, only="_INBOX.>")  # it never hears that they did
        asyncio.get_running_loop().call_later(1.0, stage.kill, stage.processes[0])
        report = await stage.client.pause(deadline_s=60.0)
        assert (report.status, outcomes(report)) == (OpStatus.OK, {"1": "ok", "2": "ok"})
        assert await stage.generations() == [PAUSED, PAUSED]
        assert (await stage.client.resume()).status is OpStatus.OK

    play([worker(1), worker(2)], scenario)


def test_a_member_that_is_gone_when_the_op_is_settled_is_reported_as_unknown() -> None:
    """The controller and worker 2 die together; the others are let go all the same, within a bound."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(6)).status is OpStatus.OK
        transport = stage.workers[1].worker_bus.transport
        assert isinstance(transport, MemoryTransport)
        before_s = now_s()
        stage.on_command = lambda c: stage.broker.partition(transport) if isinstance(c.body, ReceiveWeights) else None
        asyncio.get_running_loop().call_later(0.5, stage.kill, stage.processes[0])
        report = await stage.update(7)
        assert (report.status, outcomes(report)) == (OpStatus.FAILED, {"1": "undone", "2": "unknown"})
        assert now_s() - before_s < 30.0
        assert (await stage.generations())[0] is RUNNING

    play([worker(1), worker(2)], scenario)


def test_a_member_that_is_back_after_the_new_leader_is_waited_for() -> None:
    """The server was away for all of them: the worker connects last, and is let go with the others."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(6)).status is OpStatus.OK
        transport = stage.workers[1].worker_bus.transport
        assert isinstance(transport, MemoryTransport)

        def lose(command: Command) -> None:
            if isinstance(command.body, PauseGeneration):
                loop = asyncio.get_running_loop()
                loop.call_later(0.2, stage.kill, stage.processes[0])
                loop.call_later(0.2, stage.broker.disconnect, transport)
                loop.call_later(8.0, stage.broker.reconnect, transport)

        stage.on_command = lose
        before_s = now_s()
        report = await stage.update(7)
        assert (report.status, outcomes(report)) == (OpStatus.FAILED, {"1": "undone", "2": "undone"})
        assert now_s() - before_s < LEASE_S / 2
        assert await stage.generations() == [RUNNING, RUNNING]

    slow: scene.Steps = {"pause": {2: Step(latency_s=1.0)}}
    play([worker(1, slow), worker(2, slow)], scenario)


def test_an_update_that_is_asked_for_while_nobody_leads_waits_for_the_standby() -> None:
    """A training loop doesn't notice a failover between two of its updates."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(6)).status is OpStatus.OK
        old = stage.processes[0]
        stage.broker.disconnect(old.transport)
        stage.kill(old)
        assert (await stage.update(7)).status is OpStatus.OK

    play([worker(1), worker(2)], scenario)


def test_the_version_never_goes_backwards_over_controllers_even_if_no_worker_lives_to_tell() -> None:
    """SCENARIOS 11: fleet at v57, everybody is gone; the next controller refuses v1 unless it is a new incarnation."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(57)).status is OpStatus.OK
        await asyncio.sleep(0.5)
        transport = stage.workers[0].worker_bus.transport
        assert isinstance(transport, MemoryTransport)
        stage.broker.partition(transport)
        stage.kill(stage.processes[0])
        await stage.leader()
        assert (await stage.client.status()).version == Version(step=57)
        async with worker(2)(stage.broker):
            await stage.client.wait_ready(num_workers=1, deadline_s=30.0)
            fresh = Trainer(stage.client.bus, "test", scene._planes[-1])
            with pytest.raises(VersionRegressionError):
                await fresh.update_weights(source(), version=1)
            report = await fresh.update_weights(source(), version=1, incarnation=1)
            assert report.report.version == Version(incarnation=1, step=1)

    play([worker(1)], scenario)


def test_a_single_controller_that_is_restarted_does_the_same() -> None:
    """SCENARIOS 54 without a standby: killed when all were paused, started again 10 s later."""

    async def scenario(stage: Stage) -> None:
        stage.processes[1].running.cancel()
        await asyncio.wait({stage.processes[1].running})
        asyncio.get_running_loop().call_later(10.0, stage.start, "c")
        report = await killed_at(stage, ReceiveWeights)
        assert outcomes(report) == {"1": "undone", "2": "undone"}
        assert await stage.generations() == [RUNNING, RUNNING]
        await check_recovered(stage)

    play([worker(1), worker(2)], scenario)


def test_an_op_that_cant_be_written_down_isnt_begun() -> None:
    """The store is unreachable and the bus isn't: refused, retryable, nothing done."""

    async def scenario(stage: Stage) -> None:
        stage.processes[0].transport.faults = Faults(drop=1.0, only="$KV.state.op.>")
        report = await stage.client.pause(check=False)
        assert report.fault is not None
        assert (report.status, report.fault.code, report.fault.retryable) == (
            OpStatus.REFUSED,
            FaultCode.NOT_RECORDED,
            True,
        )
        assert await stage.generations() == [RUNNING]
        stage.processes[0].transport.faults = Faults()
        assert (await stage.client.pause()).status is OpStatus.OK

    play([worker(1)], scenario)


def test_updates_go_on_while_answers_of_the_store_are_lost() -> None:
    """A fifth of the store's calls is lost: the lease holds, or is taken again, and the fleet gets all versions."""

    async def scenario(stage: Stage) -> None:
        for process in stage.processes:
            process.transport.faults = Faults(drop=0.1, only="$KV.>")
        step = 0
        while step < 10:
            report = await stage.update(step + 1)
            step += report.status is OpStatus.OK
            await asyncio.sleep(1.0)
        assert stage.weights() == [(WeightsState.CLEAN, Version(step=10))] * 2
        assert await stage.generations() == [RUNNING, RUNNING]

    play([worker(1), worker(2)], scenario)
