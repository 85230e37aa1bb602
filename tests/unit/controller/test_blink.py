"""The bus blinks: the server is gone for everybody at once, for a while, and is back (issue 3, point 8)."""

import asyncio
from typing import Any

import pytest

from rlbus.schemas import (
    CommitWeights,
    ControllerEvent,
    Generation,
    InitGroup,
    Liveness,
    OpStatus,
    PauseGeneration,
    PrepareWeightsUpdate,
    ReceiveWeights,
    Report,
    ResumeGeneration,
    Version,
    WeightsState,
    WorkerLeft,
)
from rlbus.testing import MemoryTransport
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller import scene
from tests.unit.controller.failover_stage import Stage, play
from tests.unit.controller.scene import outcomes, worker

pytestmark = pytest.mark.unit

RUNNING, PAUSED = Generation.RUNNING, Generation.PAUSED
OLD = (WeightsState.CLEAN, Version(step=6), RUNNING)
# As workers are started: no version yet.
BLANK = (WeightsState.CLEAN, None, RUNNING)
NEW = (WeightsState.CLEAN, Version(step=7), RUNNING)
TORN = (WeightsState.DIRTY, None, PAUSED)
# From the server's return until a verb is done: the lease of before runs out and is taken, workers say hello, and the
# client asks again after at most 5 s.
BACK_S = 8.0
TRANSFER_S = 4.0


def now_s() -> float:
    return asyncio.get_running_loop().time()


def transports(stage: Stage) -> list[MemoryTransport]:
    """Every connection there is."""
    buses = [stage.client.bus, stage._spy]
    buses += [bus for rig in stage.workers for bus in (rig.bus, rig.worker_bus)]
    found = [bus.transport for bus in buses] + [process.transport for process in stage.processes]
    return [transport for transport in found if isinstance(transport, MemoryTransport)]


async def blink(stage: Stage, length_s: float) -> None:
    """The server is gone for `length_s`; everybody is connected again within half a second after it, in any order."""
    for transport in transports(stage):
        stage.broker.disconnect(transport)
    await asyncio.sleep(length_s)
    for number, transport in enumerate(transports(stage)):
        delay_s = 0.5 * (number * 7 % 10) / 10
        asyncio.get_running_loop().call_later(delay_s, stage.broker.reconnect, transport)


def blink_at(stage: Stage, at: type[Any], after_s: float, length_s: float) -> "asyncio.Future[None]":
    """Blink `after_s` after this command is first on the bus; done when it has."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    tasks: list[asyncio.Task[None]] = []

    async def soon() -> None:
        await asyncio.sleep(after_s)
        await blink(stage, length_s)
        done.set_result(None)

    def look(command: Any) -> None:
        if isinstance(command.body, at) and not tasks:
            tasks.append(loop.create_task(soon()))

    stage.on_command = look
    return done


def watch_losses(stage: Stage) -> list[WorkerLeft]:
    """Who is declared dead by a controller from now on."""
    left: list[WorkerLeft] = []

    def take(event: ControllerEvent, _: object) -> None:
        if isinstance(event, WorkerLeft):
            left.append(event)

    stage._spy.subscribe("dyn.test.controller.event.>", ControllerEvent, take)
    return left


async def states(stage: Stage) -> set[tuple[WeightsState, Version | None, Generation]]:
    """What the workers are in."""
    pairs = zip(stage.weights(), await stage.generations(), strict=True)
    return {(state, version, generation) for (state, version), generation in pairs}


def engine_calls(stage: Stage) -> list[int]:
    """How often the engines were asked for anything but how they are."""
    return [sum(call != "observe" for call in rig.engine.calls) for rig in stage.workers]


async def check_usable(stage: Stage) -> None:
    """An update, a pause and a resume of everybody go well, soon."""
    asked_s = now_s()
    assert (await stage.update(8)).status is OpStatus.OK
    assert now_s() - asked_s < BACK_S + TRANSFER_S
    assert (await stage.client.pause()).status is OpStatus.OK
    assert (await stage.client.resume()).status is OpStatus.OK
    assert await states(stage) == {(WeightsState.CLEAN, Version(step=8), RUNNING)}
    assert len([p for p in stage.processes if p.leads and p.led[-1]._bus.transport.is_connected]) == 1


@pytest.mark.parametrize("length_s", [0.5, 1.9, 2.5, 4.0, 20.0, 300.0])
def test_nobody_is_declared_dead_for_a_silence_that_everyone_shared(length_s: float) -> None:
    """An idle fleet looks afterwards as it did before, in the eyes of whoever leads then, and takes orders at once."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(6)).status is OpStatus.OK
        before = {m.worker: (m.admitted, m.status.weights) for m in (await stage.client.status()).members}
        num_calls = engine_calls(stage)
        left = watch_losses(stage)
        await blink(stage, length_s)
        view = await stage.client.status()
        assert {m.worker: (m.admitted, m.status.weights) for m in view.members} == before
        assert (view.version, view.op_id, left) == (Version(step=6), None, [])
        assert engine_calls(stage) == num_calls
        await check_usable(stage)
        assert left == []

    play([worker(1), worker(2), worker(3)], scenario)


@pytest.mark.parametrize("length_s", [0.5, 20.0, 300.0])
def test_a_controller_without_a_lease_declares_nobody_dead_either(length_s: float) -> None:
    """`rlbus controller --single` leads on, with all that it knew."""

    async def scenario(scene_: scene.Scene) -> None:
        fleet = scene_.fleet
        assert (await scene_.update(6)).status is OpStatus.OK
        before = await fleet.members()
        buses = [fleet.controller._bus, fleet.client.bus, *(rig.worker_bus for rig in fleet.workers)]
        cut = [bus.transport for bus in buses if isinstance(bus.transport, MemoryTransport)]
        for transport in cut:
            fleet.broker.disconnect(transport)
        await asyncio.sleep(length_s)
        assert [m.liveness for m in fleet.controller.view().members] == [Liveness.ALIVE] * 2
        for number, transport in enumerate(cut):
            asyncio.get_running_loop().call_later(5.0 * number / len(cut), fleet.broker.reconnect, transport)
        await asyncio.sleep(10.0)
        after = await fleet.members()
        assert [(m.liveness, m.admitted) for m in after.values()] == [(m.liveness, m.admitted) for m in before.values()]
        assert (await scene_.update(7)).status is OpStatus.OK

    scene.play([worker(1), worker(2)], scenario)


@pytest.mark.parametrize("length_s", [0.5, 1.5, 2.5, 20.0])
@pytest.mark.parametrize(
    ("at", "after_s"),
    [
        (PrepareWeightsUpdate, 0.0),
        (InitGroup, 0.0),
        (PauseGeneration, 0.0),
        (ReceiveWeights, 0.0),
        (ReceiveWeights, 2.5),
        (CommitWeights, 0.0),
        (ResumeGeneration, 0.0),
    ],
)
def test_an_update_that_runs_when_the_server_goes_survives_or_ends_with_a_report(
    at: type[Any], after_s: float, length_s: float
) -> None:
    """One outcome per worker; nothing was done twice; whoever is torn is healed by the next update."""

    async def scenario(stage: Stage) -> None:
        if at is not InitGroup:  # the group of the first update would be used again
            assert (await stage.update(6)).status is OpStatus.OK
        stage.trainer._plane.script.send_s = TRANSFER_S  # type: ignore[attr-defined]
        gone = blink_at(stage, at, after_s, length_s)
        asked_s = now_s()
        updating = asyncio.ensure_future(stage.update(7))
        await gone
        report: Report = await updating
        assert now_s() - asked_s < length_s + 60.0
        assert set(outcomes(report)) == {"1", "2"}
        assert "unknown" not in outcomes(report).values()
        assert await states(stage) <= {BLANK if at is InitGroup else OLD, NEW, TORN}
        for rig in stage.workers:
            assert max(rig.engine.calls.count(call) for call in ("receive_weights", "finish_update")) <= 2
        if length_s <= 1.5:
            assert report.status is OpStatus.OK
        assert ((await stage.client.status()).op_id, watch_losses(stage)) == (None, [])
        await check_usable(stage)

    slow: scene.Steps = {"receive_weights": {2: Step(transfer_s=TRANSFER_S)}}
    play([worker(1, slow), worker(2, slow)], scenario)


def test_a_pause_with_a_lease_ends_in_an_outage_that_is_longer_and_a_persons_hold_stays() -> None:
    """Worker 1 is held by a lease of 10 s, worker 2 by a person; both are as they should be after 20 s."""

    async def scenario(stage: Stage) -> None:
        await stage.client.pause(target=target(1), lease_s=10.0)
        await stage.client.pause(target=target(2))
        blinking = asyncio.ensure_future(blink(stage, 20.0))
        await asyncio.sleep(9.0)
        assert await stage.generations() == [PAUSED, PAUSED]
        await asyncio.sleep(2.0)
        assert await stage.generations() == [RUNNING, PAUSED]
        await blinking
        await asyncio.sleep(BACK_S)
        assert await stage.generations() == [RUNNING, PAUSED]
        shown = {m.worker: m.status.pause for m in (await stage.client.status()).members}
        leased, held = shown[scene.w(1)], shown[scene.w(2)]
        assert (leased, held is not None) == (None, True)
        assert held is not None
        assert (held.owner, held.expires_at) == ("test", None)
        assert (await stage.client.resume()).status is OpStatus.OK

    play([worker(1), worker(2)], scenario)


@pytest.mark.parametrize("length_s", [1.0, 20.0])
def test_a_pause_that_runs_when_the_server_goes_ends_with_a_report_and_holds_all_or_nobody(length_s: float) -> None:
    """Worker 2 needs 10 s to pause. A short outage is outlived; after a long one the next leader settles it."""

    async def scenario(stage: Stage) -> None:
        asking = asyncio.ensure_future(stage.client.pause(deadline_s=120.0, check=False))
        await asyncio.sleep(1.0)
        await blink(stage, length_s)
        report = await asking
        assert set(outcomes(report)) == {"1", "2"}
        is_ok = report.status is OpStatus.OK
        assert await stage.generations() == ([PAUSED, PAUSED] if is_ok else [RUNNING, RUNNING])
        assert is_ok or length_s > 2.0
        assert [rig.engine.calls.count("pause") for rig in stage.workers] == [1, 1]
        await stage.client.resume()
        await check_usable(stage)

    play([worker(1), worker(2, {"pause": {1: Step(latency_s=10.0)}})], scenario)


def target(number: int) -> Any:
    """One worker."""
    from rlbus.schemas import Target

    return Target(workers=(scene.w(number),))


@pytest.mark.parametrize("length_s", [3.0, 20.0])
def test_an_update_that_is_asked_for_in_an_outage_waits_for_its_end(length_s: float) -> None:
    """A training loop doesn't end because the server was away for 20 s, in whatever moment it asks."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(6)).status is OpStatus.OK
        blinking = asyncio.create_task(blink(stage, length_s))
        await asyncio.sleep(1.0)
        report = await stage.update(7)
        assert blinking.done()
        assert (report.status, outcomes(report)) == (OpStatus.OK, {"1": "ok", "2": "ok"})

    play([worker(1), worker(2)], scenario)
