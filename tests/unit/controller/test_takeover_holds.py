"""What a new leader keeps paused, asleep and at which version: as the one before would have."""

import asyncio
from pathlib import Path

import pytest

from rlbus.schemas import (
    Command,
    CommitWeights,
    Generation,
    OpStatus,
    PauseGeneration,
    ResumeGeneration,
    Sleep,
    SleepTag,
    Target,
    Version,
    worker_id,
)
from rlbus.testing import Faults, MemoryTransport
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.failover_stage import Stage, play
from tests.unit.controller.scene import outcomes, worker
from tests.unit.controller.test_takeover import loader

pytestmark = pytest.mark.unit

RUNNING, PAUSED = Generation.RUNNING, Generation.PAUSED
# Above the life of every lease that an op gives a pause.
LEASES_END_S = 60.0


def kill_at(stage: Stage, body: type) -> None:
    """The leader dies as soon as it has sent such a command."""

    def on_command(command: Command) -> None:
        if isinstance(command.body, body) and not stage.processes[0].is_killed:
            stage.kill(stage.processes[0])

    stage.on_command = on_command


def test_a_rollback_that_was_committed_is_the_fleets_version_though_its_leader_died() -> None:
    """The mark still says the newer one; everybody is admitted at the older, and the next version is no regression."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(5)).status is OpStatus.OK
        await asyncio.sleep(1.0)
        kill_at(stage, ResumeGeneration)
        assert (await stage.update(3, allow_rollback=True)).status is OpStatus.OK
        view = await stage.client.status()
        assert view.version == Version(step=3)
        assert [m.admitted for m in view.members] == [True, True]
        assert (await stage.update(4, allow_rollback=True)).status is OpStatus.OK

    play([worker(1), worker(2)], scenario)


def test_a_rollback_that_was_reported_is_known_though_it_was_never_marked() -> None:
    """The leader died between the op's end and the mark."""

    async def scenario(stage: Stage) -> None:
        kept = stage.broker.buckets["state"].kept
        assert (await stage.update(5)).status is OpStatus.OK
        await asyncio.sleep(1.0)
        before = kept["version"]
        assert (await stage.update(3, allow_rollback=True)).status is OpStatus.OK
        await asyncio.sleep(1.0)
        kept["version"] = before
        stage.kill(stage.processes[0])
        await stage.leader()
        view = await stage.client.status()
        assert view.version == Version(step=3)
        assert [m.admitted for m in view.members] == [True, True]

    play([worker(1), worker(2)], scenario)


def test_a_version_that_everybody_had_before_is_no_proof_that_it_was_given_again() -> None:
    """The same one, on purpose; the leader dies before the first byte."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(5)).status is OpStatus.OK
        kill_at(stage, PauseGeneration)
        report = await stage.update(5, allow_rollback=True)
        assert (report.status, outcomes(report)) == (OpStatus.FAILED, {"1": "undone", "2": "undone"})
        assert await stage.generations() == [RUNNING, RUNNING]

    play([worker(1), worker(2)], scenario)


def test_a_pause_that_everybody_did_outlives_the_lease_that_it_began_with() -> None:
    """A hold is for as long as was asked, whoever finished it."""

    async def scenario(stage: Stage) -> None:
        asyncio.get_running_loop().call_later(1.0, stage.kill, stage.processes[0])
        assert (await stage.client.pause(deadline_s=60.0)).status is OpStatus.OK
        await asyncio.sleep(LEASES_END_S)
        assert await stage.generations() == [PAUSED, PAUSED]
        assert (await stage.client.resume()).status is OpStatus.OK

    play([worker(1), worker(2, {"pause": {1: Step(latency_s=2.0)}})], scenario)


def test_who_was_left_at_the_old_version_stays_paused_beside_those_that_have_the_new_one() -> None:
    """One refused its bytes, the other was committed by the new leader; no lease sets the first one free."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(5)).status is OpStatus.OK
        kill_at(stage, CommitWeights)
        report = await stage.update(6)
        assert (report.status, outcomes(report)) == (OpStatus.PARTIAL, {"1": "ok", "2": "failed"})
        await asyncio.sleep(LEASES_END_S)
        assert await stage.generations() == [RUNNING, PAUSED]

    play([worker(1), worker(2, {"receive_weights": {2: failing(after_parts=0)}})], scenario)


def test_leases_are_renewed_while_a_new_leader_waits_for_a_folder_that_is_loaded(tmp_path: Path) -> None:
    """Worker 1 couldn't load it, 2 takes a minute, 3 has it."""

    async def scenario(stage: Stage) -> None:
        asyncio.get_running_loop().call_later(3.0, stage.kill, stage.processes[0])
        report = await stage.client.reload(str(tmp_path), version=Version(step=7), deadline_s=120.0, check=False)
        assert outcomes(report) == {"1": "failed", "2": "ok", "3": "ok"}
        await asyncio.sleep(LEASES_END_S)
        assert await stage.generations() == [PAUSED, RUNNING, RUNNING]

    FakeEngine().save(tmp_path, Version(step=7))
    steps = [failing(), Step(latency_s=60.0), Step()]
    play([loader(number, tmp_path, step) for number, step in enumerate(steps, start=1)], scenario)


def test_what_slept_before_sleeps_when_a_sleep_is_taken_back_by_a_new_leader() -> None:
    """And what was awake is awake: worker 1's cache was put to sleep before, worker 2 is lost."""

    async def scenario(stage: Stage) -> None:
        first = Target(workers=(worker_id("backend", "1"),))
        assert (await stage.client.sleep(first, tags=[SleepTag.KV_CACHE])).status is OpStatus.OK
        transport = stage.workers[1].worker_bus.transport
        assert isinstance(transport, MemoryTransport)

        def on_command(command: Command) -> None:
            if isinstance(command.body, Sleep):
                stage.broker.partition(transport)
                stage.kill(stage.processes[0])

        stage.on_command = on_command
        report = await stage.client.sleep(check=False)
        assert outcomes(report) == {"1": "undone", "2": "unknown"}
        assert stage.workers[0].agent.status().asleep == (SleepTag.KV_CACHE,)

    play([worker(1), worker(2)], scenario)


def test_a_mark_that_is_newer_than_the_last_rollback_stays() -> None:
    """The fleet's version came from elsewhere since: whoever leads next doesn't set the fleet back once more."""

    async def scenario(stage: Stage) -> None:
        kept = stage.broker.buckets["state"].kept
        assert (await stage.update(5)).status is OpStatus.OK
        assert (await stage.update(3, allow_rollback=True)).status is OpStatus.OK
        before = set(kept)
        assert (await stage.update(9)).status is OpStatus.OK
        await asyncio.sleep(1.0)
        for key in set(kept) - before:  # its op; the workers said so by themselves, say
            del kept[key]
        stage.kill(stage.processes[0])
        await stage.leader()
        await asyncio.sleep(1.0)
        view = await stage.client.status()
        assert view.version == Version(step=9)
        assert [m.admitted for m in view.members] == [True, True]

    play([worker(1), worker(2)], scenario)


def test_who_had_the_version_already_is_let_go_when_the_others_have_it(tmp_path: Path) -> None:
    """A folder that one of two has is loaded by both, and the leader dies: nobody at the version stays paused."""

    async def scenario(stage: Stage) -> None:
        first, version = Target(workers=(worker_id("backend", "1"),)), Version(step=7)
        assert (await stage.client.reload(str(tmp_path), version=version, target=first)).status is OpStatus.OK
        asyncio.get_running_loop().call_later(3.0, stage.kill, stage.processes[0])
        report = await stage.client.reload(
            str(tmp_path), version=version, allow_rollback=True, deadline_s=60.0, check=False
        )
        assert outcomes(report) == {"1": "unknown", "2": "ok"}
        assert await stage.generations() == [RUNNING, RUNNING]

    FakeEngine().save(tmp_path, Version(step=7))
    play([loader(1, tmp_path, Step()), loader(2, tmp_path, Step(latency_s=12.0))], scenario)


@pytest.mark.parametrize("away_s", [(3.5, 4.0, 2.2), (3.5, 5.0, 1.6)], ids=["slow", "silent at first"])
def test_a_pause_that_a_new_leader_finishes_is_as_long_as_was_asked_or_none_at_all(
    away_s: tuple[float, float, float],
) -> None:
    """Worker 2 is away and then slow, so that looks, renewals and the hold itself overtake each other."""
    leaves_s, returns_s, delay_s = away_s

    async def scenario(stage: Stage) -> None:
        loop, transport = asyncio.get_running_loop(), stage.workers[1].worker_bus.transport
        assert isinstance(transport, MemoryTransport)
        loop.call_later(1.0, stage.kill, stage.processes[0])
        loop.call_later(leaves_s, stage.broker.partition, transport)

        def returns() -> None:
            stage.broker.heal(transport)
            transport.faults = Faults(delay_s=(delay_s, delay_s))

        loop.call_later(returns_s, returns)
        report = await stage.client.pause(deadline_s=60.0, lease_s=3600.0, check=False)
        transport.faults = Faults()
        await asyncio.sleep(LEASES_END_S)
        is_held = report.status is OpStatus.OK
        assert "ok" not in outcomes(report).values() or is_held
        assert await stage.generations() == [PAUSED if is_held else RUNNING] * 2

    play([worker(1), worker(2, {"pause": {1: Step(latency_s=2.0)}})], scenario)
