"""Nobody stays paused because somebody else died: real agents and trainer, and a controller that is killed."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from rlbus.controller.leases import KEPT_S, LEASE_S, RENEW_S
from rlbus.controller.testing import controller_on_bus
from rlbus.errors import PartialError, RefusedError, RLBusError
from rlbus.schemas import (
    CommitWeights,
    FlushCache,
    GenerationResumed,
    InitGroup,
    Liveness,
    OpStatus,
    PauseGeneration,
    PauseView,
    PrepareWeightsUpdate,
    ReceiveWeights,
    RenewLease,
    ResumeGeneration,
    Target,
    Version,
    WeightsState,
)
from rlbus.testing import Faults, MemoryTransport
from rlbus.transfer.fake import FakePlaneScript
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import Step, failing
from rlbus.workers.testing import Rig
from tests.unit.controller.scene import PAUSED, RUNNING, Scene, Steps, outcomes, play, w, worker
from tests.unit.controller.test_update import MANY
from tests.unit.controller.test_verbs import rooted

pytestmark = pytest.mark.unit

# What the end of a lease may take on top of it: the transfer that is taken back, flush, and resume.
BOUND_S = 6.0
V6, V7 = Version(step=6), Version(step=7)


async def update_that_nobody_ends(scene: Scene, **options: Any) -> None:
    """The trainer's side of an update whose controller dies."""
    with contextlib.suppress(RLBusError):  # it is told so, or gives up; here the workers count
        await scene.update(7, deadline_s=300.0, **options)


def states(scene: Scene) -> list[tuple[WeightsState, Version | None, PauseView | None]]:
    return [(r.agent.state.weights.state, r.agent.state.weights.version, r.agent.state.pause) for r in rigs(scene)]


def rigs(scene: Scene) -> list[Rig]:
    return scene.fleet.workers


def lease_ends(scene: Scene) -> list[str | None]:
    """Owners of pauses that ended for want of renewal, as the workers' events say."""
    events = [e for rig in rigs(scene) for e in rig.events]
    return [e.owner for e in events if isinstance(e, GenerationResumed) and e.lease_ended]


# The first update forms a group, the next one uses it.
KILLS: list[tuple[str, type[Any], Version | None, int]] = [
    ("prepare", PrepareWeightsUpdate, V6, 0),
    ("group", InitGroup, None, 0),
    ("pause", PauseGeneration, V6, 2),
    ("receivers stand, nobody is told to send", ReceiveWeights, V6, 2),
    ("commit", CommitWeights, V7, 2),
    ("flush", FlushCache, V7, 2),
    ("resume", ResumeGeneration, V7, 0),
]


@pytest.mark.parametrize(("kind", "version", "num_ended"), [k[1:] for k in KILLS], ids=[k[0] for k in KILLS])
def test_a_controller_killed_in_an_update_leaves_nobody_clean_paused(
    kind: type[Any], version: Version | None, num_ended: int
) -> None:
    """SCENARIOS 54: at each command, within lease and bound, everybody runs on whole weights, and says why."""

    async def scenario(scene: Scene) -> None:
        if version is not None:
            assert (await scene.update(6)).status is OpStatus.OK
        scene.at(kind, scene.kill_controller)
        updating = asyncio.create_task(update_that_nobody_ends(scene))
        await asyncio.sleep(LEASE_S + BOUND_S)
        assert states(scene) == [(WeightsState.CLEAN, version, None)] * 2
        assert await scene.generations() == [RUNNING] * 2
        assert len(lease_ends(scene)) == num_ended
        assert [rig.agent.state.owes_flush for rig in rigs(scene)] == [False, False]
        updating.cancel()
        await asyncio.wait({updating})

    play([worker(1), worker(2)], scenario)


@pytest.mark.parametrize(("transfer_s", "bound_s"), [(1.0, LEASE_S + BOUND_S), (60.0, 60.0 + BOUND_S)])
def test_what_was_received_and_never_committed_stays_paused_and_says_so(transfer_s: float, bound_s: float) -> None:
    """Touched weights are dirty; a lease that ends in the middle of a transfer doesn't cut it off."""

    async def scenario(scene: Scene) -> None:
        updating = asyncio.create_task(update_that_nobody_ends(scene))
        await asyncio.sleep(0.9)
        assert rigs(scene)[0].agent.state.weights.state is WeightsState.UPDATING
        scene.kill_controller()
        await asyncio.sleep(min(transfer_s, bound_s) / 2)
        assert rigs(scene)[0].agent.state.weights.state is WeightsState.UPDATING
        await asyncio.sleep(bound_s)
        for state, _, pause in states(scene):
            assert state is WeightsState.DIRTY
            assert pause is not None
            assert pause.owner.endswith("-pause")
            assert pause.expires_at is not None
            assert pause.expires_at < rigs(scene)[0].bus.clock.now()
        assert await scene.generations() == [PAUSED]
        assert rigs(scene)[0].agent.state.session is None
        updating.cancel()
        await asyncio.wait({updating})

    steps: Steps = {"receive_weights": {1: Step(transfer_s=transfer_s, num_parts=100)}}
    play([worker(1, steps)], scenario, plane=FakePlaneScript(send_s=transfer_s, send_parts=10))


def test_a_restarted_controller_sees_the_pauses_and_them_end() -> None:
    """SCENARIOS 54: owner, age and expiry of each in its view; when the leases have ended all are admitted."""

    async def scenario(scene: Scene) -> None:
        scene.at(ReceiveWeights, scene.kill_controller)
        updating = asyncio.create_task(update_that_nobody_ends(scene))
        await asyncio.sleep(2.0)
        async with controller_on_bus(scene.fleet.broker, term=int(rigs(scene)[0].bus.clock.now() * 1000) + 5) as second:
            await asyncio.sleep(2.0)
            now = rigs(scene)[0].bus.clock.now()
            for member in second.view().members:
                pause = member.status.pause
                assert pause is not None
                assert pause.owner.endswith("-pause")
                assert pause.expires_at is not None
                assert 20.0 < pause.expires_at - now < LEASE_S
                assert not member.admitted
            await asyncio.sleep(LEASE_S + BOUND_S)
            assert [(m.admitted, m.status.pause) for m in second.view().members] == [(True, None)] * 2
        updating.cancel()
        await asyncio.wait({updating})

    play([worker(1), worker(2)], scenario)


def test_an_update_of_ten_minutes_keeps_its_own_pauses_alive() -> None:
    """About every third of a lease, on exactly the workers that it paused, until it ends."""

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.pause(Target(workers=(w(3),)))
        report = await scene.fleet.update(7, MANY, deadline_s=900.0, stall_s=60.0)
        assert (report.status, outcomes(report)) == (OpStatus.OK, {"1": "ok", "2": "ok", "3": "ok"})
        assert report.paused_s > 599.0
        assert lease_ends(scene) == []
        await asyncio.sleep(0.1)
        renewals = [c for c, _ in scene.commands if isinstance(c.body, RenewLease) and c.op_id.startswith(report.op_id)]
        assert len(renewals) == pytest.approx(600.0 / RENEW_S, abs=2)
        assert {member for c in renewals for member in c.members or ()} == {"1", "2"}
        assert await scene.generations() == [RUNNING, RUNNING, PAUSED]
        await asyncio.sleep(3 * RENEW_S)
        assert len([c for c, _ in scene.commands if isinstance(c.body, RenewLease)]) == len(renewals) + 1

    slow: Steps = {"receive_weights": {1: Step(transfer_s=600.0, num_parts=60)}}
    workers = [worker(n, slow, tensors=MANY) for n in (1, 2, 3)]
    play(workers, scenario, plane=FakePlaneScript(send_s=600.0, send_parts=60))


def test_who_has_everything_already_is_held_for_the_slow_ones() -> None:
    """Nothing runs on the first for 100 s; without renewal its open session would be given up after 30."""

    async def scenario(scene: Scene) -> None:
        updating = asyncio.create_task(scene.fleet.update(7, MANY, deadline_s=300.0, stall_s=60.0))
        await asyncio.sleep(90.0)
        session = rigs(scene)[0].agent.state.session
        assert session is not None
        assert session.is_received
        assert (await updating).status is OpStatus.OK
        assert lease_ends(scene) == []

    fast: Steps = {"receive_weights": {1: Step(transfer_s=1.0)}}
    slow: Steps = {"receive_weights": {1: Step(transfer_s=100.0, num_parts=60)}}
    workers = [worker(1, fast, tensors=MANY), worker(2, slow, tensors=MANY)]
    play(workers, scenario, plane=FakePlaneScript(send_s=100.0, send_parts=60))


def test_who_has_loaded_already_is_held_for_the_slow_ones(tmp_path: Path) -> None:
    """The same for a reload: versions change together."""
    FakeEngine.save(tmp_path / "ckpt", Version(step=1))

    async def scenario(scene: Scene) -> None:
        loading = asyncio.create_task(scene.fleet.client.reload(str(tmp_path / "ckpt")))
        await asyncio.sleep(90.0)
        assert await scene.generations() == [PAUSED, PAUSED]
        assert (await loading).status is OpStatus.OK
        assert (await scene.generations(), lease_ends(scene)) == ([RUNNING, RUNNING], [])

    play([rooted(1, tmp_path), rooted(2, tmp_path, load_weights={1: Step(latency_s=100.0)})], scenario)


def test_who_stays_behind_after_a_partial_reload_is_not_set_free_by_its_lease(tmp_path: Path) -> None:
    """SCENARIOS 2: until the next one, which takes the pause over."""
    FakeEngine.save(tmp_path / "ckpt", Version(step=1))

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.reload(str(tmp_path / "ckpt"), check=False)
        assert outcomes(report) == {"1": "ok", "2": "failed"}
        await asyncio.sleep(600.0)
        assert states(scene)[1][0] is WeightsState.CLEAN
        assert await scene.generations() == [RUNNING, PAUSED]
        assert (await scene.fleet.client.reload(str(tmp_path / "ckpt"))).status is OpStatus.OK
        assert await scene.generations() == [RUNNING, RUNNING]

    play([rooted(1, tmp_path), rooted(2, tmp_path, load_weights={1: failing(after_parts=0)})], scenario)


def test_a_few_lost_renewals_end_nothing() -> None:
    """The connection blinks for 15 s in the middle of a long transfer."""

    async def scenario(scene: Scene) -> None:
        updating = asyncio.create_task(scene.fleet.update(7, MANY, deadline_s=300.0, stall_s=60.0))
        await asyncio.sleep(25.0)
        scene.cut(1)
        await asyncio.sleep(15.0)
        scene.heal(1)
        assert (await updating).status is OpStatus.OK
        assert lease_ends(scene) == []

    slow: Steps = {"receive_weights": {1: Step(transfer_s=100.0, num_parts=60)}}
    play([worker(1, slow, tensors=MANY)], scenario, plane=FakePlaneScript(send_s=100.0, send_parts=60))


def test_who_stays_behind_after_a_partial_update_is_not_set_free_by_its_lease() -> None:
    """SCENARIOS 2: two versions don't generate side by side; the next update takes the pause over."""

    async def scenario(scene: Scene) -> None:
        assert (await scene.update(6)).status is OpStatus.OK
        report = await scene.update(7)
        assert outcomes(report) == {"1": "failed", "2": "ok"}
        state, version, pause = states(scene)[0]
        assert (state, version) == (WeightsState.CLEAN, V6)
        assert pause is not None
        assert pause.expires_at is not None
        assert pause.expires_at - rigs(scene)[0].bus.clock.now() > KEPT_S - 60.0
        await asyncio.sleep(600.0)
        assert await scene.generations() == [PAUSED, RUNNING]
        assert (await scene.update(8)).status is OpStatus.OK
        assert await scene.generations() == [RUNNING, RUNNING]

    untouched: Steps = {"receive_weights": {2: failing(after_parts=0)}}
    play([worker(1, untouched), worker(2)], scenario)


# -- the pause verb


def test_a_pause_with_a_lease_ends_by_itself_and_the_same_again_renews_it() -> None:
    """From the end of the verb on; the event and the log say that it was the lease."""

    async def scenario(scene: Scene) -> None:
        assert (await scene.fleet.client.pause(lease_s=60.0)).status is OpStatus.OK
        await asyncio.sleep(50.0)
        (member,) = (await scene.fleet.members()).values()
        assert member.status.pause is not None
        assert member.status.pause.owner == "test"
        assert member.status.pause.expires_at is not None
        assert member.status.pause.expires_at - rigs(scene)[0].bus.clock.now() == pytest.approx(10.0, abs=0.5)
        assert (await scene.fleet.client.pause(lease_s=60.0)).status is OpStatus.OK
        await asyncio.sleep(55.0)
        assert await scene.generations() == [PAUSED]
        await asyncio.sleep(6.0)
        assert await scene.generations() == [RUNNING]
        assert lease_ends(scene) == ["test"]
        (member,) = (await scene.fleet.members()).values()
        assert (member.admitted, member.status.pause) == (True, None)

    play([worker(1)], scenario)


def test_an_explicit_hold_holds_whatever_dies_and_shows_as_one() -> None:
    """A person's: no expiry, and not weakened by a later pause with a lease."""

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.pause()
        await scene.fleet.client.pause(lease_s=5.0)
        (member,) = (await scene.fleet.members()).values()
        assert member.status.pause is not None
        assert (member.status.pause.owner, member.status.pause.expires_at) == ("test", None)
        scene.kill_controller()
        await asyncio.sleep(3000.0)
        assert await scene.generations() == [PAUSED]

    play([worker(1)], scenario)


@pytest.mark.parametrize("lease_s", [0.0, -3.0, 1e9])
def test_a_lease_beyond_reason_is_refused(lease_s: float) -> None:
    """Before anybody is paused."""

    async def scenario(scene: Scene) -> None:
        with pytest.raises(RefusedError):
            await scene.fleet.client.pause(lease_s=lease_s)
        assert await scene.addressed(PauseGeneration) == []

    play([worker(1)], scenario)


@pytest.mark.parametrize("how", ["answers error", "is at it for long"])
def test_a_pause_whose_controller_dies_half_way_is_undone_by_the_workers(how: str) -> None:
    """SCENARIOS 1 with a dead controller: what was to be a hold is none before everybody is paused."""

    async def scenario(scene: Scene) -> None:
        pausing = asyncio.create_task(scene.fleet.client.pause(deadline_s=60.0))
        if how == "answers error":
            scene.at(PauseGeneration, scene.kill_controller)
        else:
            await asyncio.sleep(15.0)
            assert (await scene.generations())[0] is PAUSED
            scene.kill_controller()
        await asyncio.sleep(LEASE_S + BOUND_S)
        assert await scene.generations() == [RUNNING] * 3
        assert [pause for _, _, pause in states(scene)] == [None] * 3
        pausing.cancel()
        await asyncio.wait({pausing})

    third: Steps = {"pause": {1: failing() if how == "answers error" else Step(latency_s=18.0)}}
    play([worker(1), worker(2), worker(3, third)], scenario)


def test_a_worker_that_loses_its_pause_before_the_verb_ends_fails_it_for_all() -> None:
    """The engine of one is resumed behind the verb's back, so the others are let go."""

    async def scenario(scene: Scene) -> None:
        pausing = asyncio.create_task(scene.fleet.client.pause(deadline_s=60.0))
        await asyncio.sleep(2.0)
        await rigs(scene)[0].send(ResumeGeneration(), term=scene.fleet.controller.term)
        with pytest.raises(PartialError) as caught:
            await pausing
        assert outcomes(caught.value.report)["2"] == "undone"
        assert await scene.generations() == [RUNNING] * 2

    play([worker(1), worker(2, {"pause": {1: Step(latency_s=5.0)}})], scenario)


# -- declared work


def mute(scene: Scene, *, is_muted: bool = True) -> None:
    """Worker 1 can't get to its heartbeats; what it runs goes on and is answered for."""
    transport = rigs(scene)[0].worker_bus.transport
    assert isinstance(transport, MemoryTransport)
    transport.faults = Faults(drop=1.0, only="dyn.test.*.worker.>") if is_muted else Faults()


def test_silence_during_declared_work_is_no_death() -> None:
    """SCENARIOS 21: silent for 20 s at its transfer it is alive; the update goes on when it is heard again."""

    async def scenario(scene: Scene) -> None:
        updating = asyncio.create_task(scene.fleet.update(7, MANY, deadline_s=300.0, stall_s=60.0))
        await asyncio.sleep(10.0)
        mute(scene)
        await asyncio.sleep(21.0)
        member = (await scene.fleet.members())[w(1)]
        assert member.liveness is Liveness.ALIVE
        assert member.status.work is not None
        assert (member.status.work.route, member.status.work.lease_s) == ("update_weights_from_distributed", 30.0)
        assert member.status.weights.state is WeightsState.UPDATING
        assert not member.admitted
        mute(scene, is_muted=False)
        report = await updating
        assert report.status is OpStatus.OK
        await asyncio.sleep(1.0)
        assert (await scene.fleet.members())[w(1)].status.work is None

    slow: Steps = {"receive_weights": {1: Step(transfer_s=60.0, num_parts=60)}}
    play([worker(1, slow, tensors=MANY)], scenario, plane=FakePlaneScript(send_s=60.0, send_parts=60))


def test_silence_beyond_the_lease_of_the_work_is_suspect_and_then_dead() -> None:
    """SCENARIOS 21: the update hears of the loss."""

    async def scenario(scene: Scene) -> None:
        updating = asyncio.create_task(scene.fleet.update(7, MANY, deadline_s=300.0, stall_s=200.0))
        await asyncio.sleep(10.0)
        mute(scene)
        await asyncio.sleep(32.0)
        assert (await scene.fleet.members())[w(1)].liveness is Liveness.SUSPECT
        await asyncio.sleep(6.0)
        assert (await scene.fleet.members())[w(1)].liveness is Liveness.DEAD
        report = await updating
        assert outcomes(report) == {"1": "failed"}

    slow: Steps = {"receive_weights": {1: Step(transfer_s=200.0, num_parts=60)}}
    play([worker(1, slow, tensors=MANY)], scenario, plane=FakePlaneScript(send_s=200.0, send_parts=60))
