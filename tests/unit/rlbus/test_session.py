"""A session with a real controller and real agents on fake engines, on the in-memory bus under virtual time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.config import BusConfig
from rlbus.controller.service import Controller
from rlbus.errors import (
    BrokenError,
    BusyError,
    ClosedError,
    ManifestError,
    PartialError,
    VersionRegressionError,
    WrongStateError,
)
from rlbus.schemas import (
    Generation,
    OpEnded,
    OpProgress,
    OpStatus,
    Outcome,
    Target,
    TensorSpec,
    Version,
    WeightsData,
    WeightsState,
    WorkerId,
)
from rlbus.session import Session, _address_towards, connect
from rlbus.testing import LoopClock, MemoryBroker, run
from rlbus.trainer import Trainer
from rlbus.transfer.fake import FakePlane, FakePlaneScript, FakeSource
from rlbus.workers.agent import Agent
from rlbus.workers.engines.fake import DEFAULT_TENSORS, FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, failing

pytestmark = pytest.mark.unit

NAMESPACE = "test"
TRUE = FakeSource(DEFAULT_TENSORS)


@dataclass
class Fleet:
    """A session, its trainer and plane, and the engines behind it (workers `backend/1`, `backend/2`, ...)."""

    session: Session
    trainer: Trainer
    plane: FakePlane
    broker: MemoryBroker
    engines: Sequence[FakeEngine]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def versions(self) -> dict[WorkerId, Version | None]:
        """What each worker says."""
        report = await self.session.fleet.versions()
        return {o.worker: o.data.weights.version for o in report.outcomes if isinstance(o.data, WeightsData)}


@asynccontextmanager
async def fleet_of(*engines: FakeEngine, plane: FakePlaneScript | None = None) -> AsyncIterator[Fleet]:
    """Start a controller and one agent per engine; everything is stopped at the end."""
    broker = MemoryBroker()
    async with asyncio.TaskGroup() as group:
        tasks = []
        controller = Controller(Bus(broker.connect(), clock=LoopClock()), NAMESPACE)
        tasks.append(group.create_task(controller.run()))
        for n, engine in enumerate(engines, start=1):
            await engine.start()
            bus = Bus(broker.connect(), clock=LoopClock())
            agent = Agent(engine, bus, namespace=NAMESPACE, component="backend", instance_id=str(n))
            tasks.append(group.create_task(agent.run()))
        session = Session(Bus(broker.connect(), clock=LoopClock()), NAMESPACE, caller="test")
        used = FakePlane(plane)
        fleet = Fleet(session, session.trainer(plane=used), used, broker, engines, tasks)
        await fleet.trainer.wait_ready(num_workers=len(engines), deadline_s=30.0)
        yield fleet
        await session.aclose()
        for task in tasks:
            task.cancel()
    for engine in engines:
        assert engine.violations == []


def play(
    scenario: Callable[[Fleet], Awaitable[None]], *engines: FakeEngine, plane: FakePlaneScript | None = None
) -> None:
    """Run `scenario` on a fleet."""

    async def body() -> None:
        async with fleet_of(*(engines or (FakeEngine(), FakeEngine(world_size=2))), plane=plane) as fleet:
            await scenario(fleet)

    run(body())


def test_three_updates_reach_every_worker_and_use_one_group() -> None:
    """Versions agree after each; the group is formed once; nobody is left paused."""

    async def scenario(fleet: Fleet) -> None:
        for step in (1, 2, 3):
            report = await fleet.trainer.update_weights(TRUE, version=step)
            assert report.ok
            assert {o.outcome for o in report.outcomes.values()} == {Outcome.OK}
            version = Version(step=step)
            assert await fleet.versions() == {WorkerId("backend/1"): version, WorkerId("backend/2"): version}
        assert [call.split()[0] for call in fleet.plane.calls] == ["join", "send", "send", "send"]
        view = await fleet.session.fleet.status()
        assert view.version == Version(step=3)
        assert [m.status.generation for m in view.members] == [Generation.RUNNING, Generation.RUNNING]
        assert [m.admitted for m in view.members] == [True, True]

    play(scenario)


def test_an_update_reports_progress_phases_and_bytes() -> None:
    """What a user pays is in the report: phases, pause, bytes."""
    phases: list[str] = []

    async def scenario(fleet: Fleet) -> None:
        report = await fleet.trainer.update_weights(TRUE, version=1, on_progress=_collect(phases))
        assert report.num_bytes > 0
        assert 3.0 <= report.send_s <= report.took_s
        assert 0 < report.paused_s <= report.took_s
        assert sum(report.phases_s.values()) <= report.took_s + 0.01
        assert phases

    play(scenario, plane=FakePlaneScript(send_s=3.0, send_parts=6))


def _collect(phases: list[str]) -> Callable[[OpProgress], None]:
    return lambda progress: phases.append(progress.phase)


def test_a_manifest_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    """The first bad tensor is named, before any pause; the right weights still go."""
    wrong = FakeSource([*DEFAULT_TENSORS[:-1], TensorSpec(name="extra", dtype="float32", shape=(1,))])

    async def scenario(fleet: Fleet) -> None:
        with pytest.raises(ManifestError) as caught:
            await fleet.trainer.update_weights(wrong, version=1)
        assert caught.value.tensor in ("extra", DEFAULT_TENSORS[-1].name)
        assert all("pause" not in engine.calls for engine in fleet.engines)
        assert set((await fleet.versions()).values()) == {None}
        assert (await fleet.trainer.update_weights(TRUE, version=1)).ok

    play(scenario)


def test_a_worker_that_fails_in_the_transfer_is_dirty_and_healed_by_the_next_update() -> None:
    """Partial with one outcome per worker; the good one serves the new version; the next update makes both whole."""
    bad = FakeEngine(FakeScript({"receive_weights": {1: failing(after_parts=2)}}))

    async def scenario(fleet: Fleet) -> None:
        with pytest.raises(PartialError) as caught:
            await fleet.trainer.update_weights(TRUE, version=1, on_failure="stop")
        outcomes = {o.worker: o.outcome for o in caught.value.report.outcomes}
        assert outcomes[WorkerId("backend/2")] is Outcome.FAILED
        view = {m.worker: m for m in (await fleet.session.fleet.status()).members}
        dirty = view[WorkerId("backend/2")]
        assert dirty.status.weights.state is WeightsState.DIRTY
        assert dirty.status.generation is Generation.PAUSED
        with pytest.raises((PartialError, WrongStateError)):
            await fleet.session.fleet.resume(Target(workers=(WorkerId("backend/2"),)))
        assert (await fleet.trainer.update_weights(TRUE, version=2)).ok
        assert set((await fleet.versions()).values()) == {Version(step=2)}

    play(scenario, FakeEngine(), bad)


def test_a_sender_that_fails_ends_the_update_and_the_next_one_works() -> None:
    """Our plane breaks: the error has our own exception as its cause; a new group is formed afterwards."""

    async def scenario(fleet: Fleet) -> None:
        with pytest.raises(PartialError) as caught:
            await fleet.trainer.update_weights(TRUE, version=1)
        assert "cable unplugged" in str(caught.value.__cause__)
        fleet.plane.script.fail_send = None
        assert (await fleet.trainer.update_weights(TRUE, version=2)).ok
        assert set((await fleet.versions()).values()) == {Version(step=2)}

    play(scenario, plane=FakePlaneScript(fail_send="cable unplugged"))


def test_an_old_version_is_refused_by_the_controller_too() -> None:
    """A second trainer that doesn't know the history gets the refusal from the fleet."""

    async def scenario(fleet: Fleet) -> None:
        await fleet.trainer.update_weights(TRUE, version=5)
        other = fleet.session.trainer(plane=FakePlane(sender_id="other"))
        with pytest.raises(VersionRegressionError):
            await other.update_weights(TRUE, version=5)
        assert (await other.update_weights(TRUE, version=4, allow_rollback=True)).ok
        assert set((await fleet.versions()).values()) == {Version(step=4)}

    play(scenario)


def test_closing_beside_an_update_frees_the_fleet_at_once() -> None:
    """The controller hears that nobody waits for it any more; it need not find out by a deadline."""

    async def scenario(fleet: Fleet) -> None:
        task = asyncio.create_task(fleet.trainer.update_weights(TRUE, version=1))
        await asyncio.sleep(2.0)
        watching = FleetClient(Bus(fleet.broker.connect(), clock=LoopClock()), NAMESPACE)
        assert (await watching.glance()).op_id is not None
        await fleet.session.aclose()
        with pytest.raises(ClosedError, match="trainer is closed"):
            await task
        await asyncio.sleep(2.0)
        assert (await watching.glance()).op_id is None

    play(scenario, plane=FakePlaneScript(send_s=60.0))


def test_closing_a_session_ends_its_own_verbs_first() -> None:
    """A wait for a fleet that never comes is taken back, and says that the session is closed."""

    async def scenario(fleet: Fleet) -> None:
        task = asyncio.create_task(fleet.session.fleet.wait_ready(num_workers=9))
        await asyncio.sleep(2.0)
        await fleet.session.aclose()
        with pytest.raises(ClosedError, match="session is closed") as caught:
            await task
        assert "is taken back" in caught.value.__notes__[0]

    play(scenario)


def test_an_update_while_another_runs_is_busy_with_its_op_id() -> None:
    """The second trainer's error names the first one's op; the first isn't disturbed."""

    async def scenario(fleet: Fleet) -> None:
        first = asyncio.create_task(fleet.trainer.update_weights(TRUE, version=1))
        await asyncio.sleep(1.0)
        other = fleet.session.trainer(plane=FakePlane(sender_id="other"))
        with pytest.raises(BusyError) as caught:
            await other.update_weights(TRUE, version=2)
        assert caught.value.running_op_id == (await first).op_id

    play(scenario, plane=FakePlaneScript(send_s=5.0))


def test_a_cancelled_update_leaves_a_fleet_that_the_next_update_heals() -> None:
    """Cancelled in the middle of sending: nobody hangs, and version 2 reaches everybody."""

    async def scenario(fleet: Fleet) -> None:
        task = asyncio.create_task(fleet.trainer.update_weights(TRUE, version=1))
        await asyncio.sleep(2.0)
        async with fleet.session.fleet.watch() as events:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while not isinstance(await events.next(60.0), OpEnded):
                pass
        fleet.plane.script.send_s = 0.0
        assert (await fleet.trainer.update_weights(TRUE, version=2)).ok
        assert set((await fleet.versions()).values()) == {Version(step=2)}

    play(scenario, plane=FakePlaneScript(send_s=1000.0))


def test_a_reply_path_that_is_cut_for_a_while_costs_no_update() -> None:
    """Our connection drops during the transfer and comes back: the report still arrives, by the same op."""

    async def scenario(fleet: Fleet) -> None:
        transport = fleet.session.bus.transport
        task = asyncio.create_task(fleet.trainer.update_weights(TRUE, version=1))
        await asyncio.sleep(2.0)
        fleet.broker.disconnect(transport)  # type: ignore[arg-type]
        await asyncio.sleep(4.0)
        fleet.broker.reconnect(transport)  # type: ignore[arg-type]
        assert (await task).status is OpStatus.OK
        assert [call.split()[0] for call in fleet.plane.calls] == ["join", "send"]

    play(scenario, plane=FakePlaneScript(send_s=10.0, send_parts=20))


def test_a_closed_session_makes_no_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """`connect` closes bus and trainers at its end; afterwards ClosedError."""
    broker = MemoryBroker()
    seen: list[BusConfig] = []

    async def connect_bus(config: BusConfig, *, name: str) -> Bus:
        seen.append(config)
        return Bus(broker.connect(), clock=LoopClock())

    monkeypatch.setattr("rlbus.connecting.connect_bus", connect_bus)

    async def body() -> None:
        plane = FakePlane()
        async with connect("nats://127.0.0.1:1", namespace="prod", token="secret", connect_s=2.0) as session:
            session.trainer(plane=plane)
            assert (session.namespace, session.fleet.namespace) == ("prod", "prod")
        with pytest.raises(ClosedError):
            session.trainer(plane=plane)
        with pytest.raises(ClosedError):
            await session.fleet.status()

    run(body())
    assert (seen[0].token, seen[0].connect_s) == ("secret", 2.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_bus_on_this_machine_means_workers_on_this_machine(host: str) -> None:
    """No address is announced then; the plane's own default, loopback, is right."""
    assert run(_address_towards(BusConfig(url=f"nats://{host}:4222"))) is None


def test_a_session_opens_while_the_first_server_of_the_list_has_no_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bus is connected to another one by then; workers elsewhere that nobody leads to are told of in the log."""

    def own(server: str) -> str:
        if "nats-0" in server:
            raise OSError(-2, "Name or service not known")
        return {"nats://far:4222": "10.0.0.5", "nats://me:4222": "127.0.1.1"}[server]

    monkeypatch.setattr("rlbus._addresses.own_address", own)
    assert run(_address_towards(BusConfig(url="nats://nats-0:4222,nats://far:4222"))) == "10.0.0.5"
    assert caplog.messages == []
    assert run(_address_towards(BusConfig(url="nats://nats-0:4222,nats://me:4222"))) is None
    assert "only workers on this machine reach this process" in caplog.text
    with pytest.raises(BrokenError, match=r"no way to its address: .*not known"):
        run(_address_towards(BusConfig(url="nats://nats-0:4222")))
