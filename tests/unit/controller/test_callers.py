"""The caller of a step of somebody else's update: engines stand still for it, as long as it says that it lives."""

import asyncio
import json
from typing import Any

import pytest

from rlbus._conversation import ALIVE_S, DEFAULT_PATIENCE, Patience, converse
from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.controller.callers import MISSING_S, SILENT_S, is_silent, is_to_stop, may_take_place
from rlbus.controller.limits import ENDING_S
from rlbus.controller.transfers import HOLD_S
from rlbus.errors import BusyError
from rlbus.schemas import (
    FlushFleet,
    OpResult,
    Outcome,
    RenewLease,
    SenderSignal,
    TransferFleet,
    TransferStep,
    Version,
    WeightsState,
)
from rlbus.testing import LoopClock, MemoryTransport, sequential_ids
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller.scene import PAUSED, RUNNING, Scene, play, stand_still, worker
from tests.unit.controller.test_transfers import INIT, states, take

pytestmark = pytest.mark.unit

UPDATE = json.dumps({"step": 1})
HUNG = {"update_native": {1: Step(hangs=True, after_parts=0, claims_touched=False)}}


def step(kind: TransferStep) -> TransferFleet:
    return TransferFleet(op_id="o", step=kind)


@pytest.mark.parametrize(
    ("heard_s", "now_s", "found"),
    [(None, 1e9, False), (10.0, 9.0 + SILENT_S, False), (10.0, 10.0 + SILENT_S, True)],
)
def test_only_who_says_that_it_lives_is_silent(heard_s: float | None, now_s: float, found: bool) -> None:
    """An older client never does."""
    assert is_silent(heard_s, now_s, SILENT_S) is found


def test_a_step_without_its_caller_is_stopped_unless_it_goes_forward() -> None:
    """A finish needs nobody, nor does any other op."""
    stopped = [kind for kind in TransferStep if is_to_stop(step(kind), 0.0, SILENT_S)]
    assert stopped == [TransferStep.INIT, TransferStep.START, TransferStep.UPDATE]
    assert not is_to_stop(FlushFleet(op_id="o"), 0.0, SILENT_S)


def test_only_an_init_or_a_shutdown_takes_the_place_of_a_step() -> None:
    """As when no step runs; and of nothing but a step."""
    update = step(TransferStep.UPDATE)
    assert [k for k in TransferStep if may_take_place(step(k), update)] == [TransferStep.INIT, TransferStep.SHUTDOWN]
    assert not may_take_place(step(TransferStep.INIT), FlushFleet(op_id="f"))
    assert not may_take_place(FlushFleet(op_id="f"), update)


def test_a_caller_is_heard_often_enough_to_lose_some_messages() -> None:
    """Of each limit several signs of life, and more than what a client waits before it asks again."""
    assert 4 * ALIVE_S < MISSING_S
    assert DEFAULT_PATIENCE.silence_s < MISSING_S < SILENT_S


def client_of(scene: Scene, name: str) -> FleetClient:
    """Somebody on a connection of its own."""
    bus = Bus(scene.fleet.broker.connect(), clock=LoopClock(), new_id=sequential_ids(name))
    return FleetClient(bus, "test", caller=name)


def cut(scene: Scene, client: FleetClient) -> None:
    """Its process is gone, or its machine: nobody is told."""
    transport = client.bus.transport
    assert isinstance(transport, MemoryTransport)
    scene.fleet.broker.partition(transport)


def heal(scene: Scene, client: FleetClient) -> None:
    transport = client.bus.transport
    assert isinstance(transport, MemoryTransport)
    scene.fleet.broker.heal(transport)


async def begin(scene: Scene, client: FleetClient, kind: str, info: str | None = None) -> asyncio.Task[Any]:
    """A step that lasts, two seconds old."""
    if kind != "init":
        await client.transfer("init", json.dumps(INIT))
    if kind == "update":
        await client.transfer("start")
    running = asyncio.create_task(client.transfer(kind, info))
    await asyncio.sleep(2.0)
    assert (await scene.fleet.client.status()).op_id is not None
    return running


async def until_idle(scene: Scene) -> float:
    """Seconds until no op runs, within an hour."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while (await scene.fleet.client.status()).op_id is not None:
        await asyncio.sleep(1.0)
        assert loop.time() - began_s < 3600.0
    return loop.time() - began_s


async def drop(running: asyncio.Task[Any]) -> None:
    running.cancel()
    await asyncio.wait({running})


@pytest.mark.parametrize(
    ("kind", "info", "script"),
    [
        ("init", json.dumps(INIT), {"init_native": {1: Step(latency_s=1500.0)}}),
        ("start", None, {"pause": {1: Step(latency_s=1500.0)}}),
        ("update", UPDATE, HUNG),
    ],
    ids=["init", "start", "update"],
)
def test_a_trainer_that_dies_in_a_step_leaves_nobody_paused(kind: str, info: str | None, script: Any) -> None:
    """Its step is stopped by its silence, whatever it waits for, and whoever is whole generates at once."""

    async def scenario(scene: Scene) -> None:
        client = client_of(scene, "old")
        running = await begin(scene, client, kind, info)
        cut(scene, client)
        assert SILENT_S - 5.0 < await until_idle(scene) < SILENT_S + ENDING_S
        assert await scene.generations() == [RUNNING] * 2
        assert await states(scene) == [(WeightsState.CLEAN, None)] * 2
        await drop(running)

    play([worker(1, script), worker(2, script)], scenario)


def update_of(caller: str) -> TransferFleet:
    """The step that carries the weights, as a client says it."""
    return TransferFleet(op_id="op", deadline_s=1800.0, caller=caller, step=TransferStep.UPDATE, info=UPDATE)


def test_a_client_that_is_gone_without_taking_its_step_back_is_a_trainer_that_died() -> None:
    """One that is closed takes it back; one that is killed doesn't."""

    async def scenario(scene: Scene) -> None:
        await take(scene, "init", INIT)
        await take(scene, "start")
        client = scene.fleet.client
        request = update_of(client.caller)
        running = asyncio.create_task(converse(client.bus, client.namespace, request, on_reply=lambda _: None))
        await asyncio.sleep(2.0)
        await drop(running)
        assert await until_idle(scene) < SILENT_S + ENDING_S
        assert await scene.generations() == [RUNNING] * 2

    play([worker(1, HUNG), worker(2, HUNG)], scenario)


def test_no_lease_is_renewed_for_a_trainer_whose_step_was_stopped() -> None:
    """Whoever can't be let go at once generates when the lease that it had ends, at the latest."""

    async def scenario(scene: Scene) -> None:
        client = client_of(scene, "old")
        running = await begin(scene, client, "start")
        cut(scene, client)

        def num_renewals() -> int:
            return sum(isinstance(command.body, RenewLease) for command, _ in scene.commands)

        await asyncio.sleep(SILENT_S)
        before = num_renewals()
        assert before > 0
        assert await until_idle(scene) > 20.0
        assert num_renewals() == before
        await drop(running)

    stuck = {"resume": {1: Step(latency_s=25.0)}}
    play([worker(1, {"pause": {1: Step(latency_s=1500.0)}}), worker(2, stuck)], scenario)


@pytest.mark.parametrize("kind", ["init", "shutdown"])
def test_a_trainer_that_is_started_again_takes_the_place_of_one_that_is_silent(kind: str) -> None:
    """It isn't told that the fleet is busy with a step that nobody waits for: it waits until that one is stopped."""

    async def scenario(scene: Scene) -> None:
        old, new = client_of(scene, "old"), client_of(scene, "new")
        running = await begin(scene, old, "update", UPDATE)
        cut(scene, old)
        await asyncio.sleep(MISSING_S + 1.0)
        began_s = asyncio.get_running_loop().time()
        report = await new.transfer(kind, json.dumps(INIT) if kind == "init" else None)
        assert {o.outcome for o in report.outcomes} == {Outcome.OK}
        assert asyncio.get_running_loop().time() - began_s < ENDING_S
        assert await scene.generations() == [RUNNING] * 2
        await new.transfer("init", json.dumps(INIT))
        await new.transfer("start")
        await new.transfer("update", UPDATE)
        await new.transfer("finish")
        assert await states(scene) == [(WeightsState.CLEAN, Version(step=1))] * 2
        await drop(running)

    play([worker(1, HUNG), worker(2, HUNG)], scenario)


def test_a_trainer_that_is_there_is_nobodys_to_replace_in_the_middle_of_a_step() -> None:
    """Another one is told that it is busy, and a step of many minutes goes on to its end."""

    async def scenario(scene: Scene) -> None:
        old, new = client_of(scene, "old"), client_of(scene, "new")
        running = await begin(scene, old, "update", UPDATE)
        for _ in range(20):
            with pytest.raises(BusyError):
                await new.transfer("init", json.dumps(INIT))
            await asyncio.sleep(40.0)
        assert (await running).status == "ok"
        assert await scene.generations() == [PAUSED] * 2
        await old.transfer("finish")

    slow = {"update_native": {1: Step(latency_s=HOLD_S + 300.0)}}
    play([worker(1, slow), worker(2)], scenario)


def test_a_trainer_whose_bus_blinks_keeps_its_step() -> None:
    """Cut off for 20 s it is heard again in time."""

    async def scenario(scene: Scene) -> None:
        client = client_of(scene, "old")
        running = await begin(scene, client, "update", UPDATE)
        cut(scene, client)
        await asyncio.sleep(20.0)
        heal(scene, client)
        assert (await running).status == "ok"

    play([worker(1, {"update_native": {1: Step(latency_s=120.0)}}), worker(2)], scenario)


def test_nobodys_silence_counts_while_the_controller_is_disconnected() -> None:
    """It hears nobody then; afterwards everybody has the whole time."""

    async def scenario(scene: Scene) -> None:
        client = client_of(scene, "old")
        running = await begin(scene, client, "update", UPDATE)
        transport = scene.fleet.controller._bus.transport
        assert isinstance(transport, MemoryTransport)
        scene.fleet.broker.disconnect(transport)
        await asyncio.sleep(SILENT_S + 10.0)
        mutation = scene.fleet.controller._desk.mutation
        assert mutation is not None
        assert mutation.op.stop_fault is None
        scene.fleet.broker.reconnect(transport)
        await asyncio.sleep(10.0)
        assert mutation.op.stop_fault is None
        await drop(running)

    play([worker(1, {"update_native": {1: Step(latency_s=300.0)}}), worker(2)], scenario)


def test_nobodys_silence_counts_while_the_controller_stands_still() -> None:
    """Stopped for a while, it looks at the time before it has read what its caller said meanwhile."""

    async def scenario(scene: Scene) -> None:
        await take(scene, "init", INIT)
        await take(scene, "start")
        client = scene.fleet.client
        request = update_of(client.caller)
        patience = Patience(lost_s=2 * SILENT_S)  # all that runs here stands still, so it hears nothing either
        hearing = converse(client.bus, client.namespace, request, on_reply=lambda _: None, patience=patience)
        running = asyncio.create_task(hearing)
        for _ in range(2):
            await asyncio.sleep(3.0)
            stand_still(SILENT_S + 10.0)
        last = await running
        assert isinstance(last, OpResult)
        assert last.report.status == "ok"

    play([worker(1, {"update_native": {1: Step(latency_s=300.0)}}), worker(2)], scenario)


def test_a_trainer_that_dies_while_the_controller_stands_still_is_noticed_all_the_same() -> None:
    """Its silence counts anew, and then ends its step."""

    async def scenario(scene: Scene) -> None:
        client = client_of(scene, "old")
        running = await begin(scene, client, "update", UPDATE)
        cut(scene, client)
        stand_still(SILENT_S + 10.0)
        assert SILENT_S - 5.0 < await until_idle(scene) < SILENT_S + ENDING_S
        await drop(running)

    play([worker(1, HUNG), worker(2, HUNG)], scenario)


def test_an_older_client_that_never_says_that_it_lives_is_not_cut_off() -> None:
    """Nothing can be told of its silence, so its step has its whole deadline."""

    async def scenario(scene: Scene) -> None:
        client = client_of(scene, "old")
        publish = client.bus.publish

        def mute(subject: str, message: Any, reply: str | None = None) -> None:
            if not isinstance(message, SenderSignal):
                publish(subject, message, reply)

        client.bus.publish = mute  # type: ignore[method-assign]
        running = await begin(scene, client, "update", UPDATE)
        assert (await running).status == "ok"

    play([worker(1, {"update_native": {1: Step(latency_s=HOLD_S)}}), worker(2)], scenario)


def test_a_finish_whose_trainer_died_goes_on_to_its_end() -> None:
    """All was sent by then."""

    async def scenario(scene: Scene) -> None:
        client = client_of(scene, "old")
        for kind, info in (("init", json.dumps(INIT)), ("start", None), ("update", UPDATE)):
            await client.transfer(kind, info)
        running = asyncio.create_task(client.transfer("finish"))
        await asyncio.sleep(2.0)
        cut(scene, client)
        await until_idle(scene)
        assert await states(scene) == [(WeightsState.CLEAN, Version(step=1))] * 2
        assert await scene.generations() == [RUNNING] * 2
        await drop(running)

    play([worker(1, {"finish_native": {1: Step(latency_s=100.0)}}), worker(2)], scenario)


async def sent_to_finish(scene: Scene, client: FleetClient) -> asyncio.Task[Any]:
    """Everything was sent; the finish that follows is two seconds old."""
    for kind, info in (("init", json.dumps(INIT)), ("start", None), ("update", UPDATE)):
        await client.transfer(kind, info)
    running = asyncio.create_task(client.transfer("finish"))
    await asyncio.sleep(2.0)
    return running


SLOW_FINISH = {"finish_native": {1: Step(latency_s=100.0)}}


@pytest.mark.parametrize("kind", ["init", "shutdown"])
def test_a_trainer_that_is_started_again_waits_for_the_end_of_a_finish(kind: str) -> None:
    """Nothing cuts that short, or a worker would stand still beside others at the new version."""

    async def scenario(scene: Scene) -> None:
        old, new = client_of(scene, "old"), client_of(scene, "new")
        running = await sent_to_finish(scene, old)
        cut(scene, old)
        await asyncio.sleep(MISSING_S + 1.0)
        report = await new.transfer(kind, json.dumps(INIT) if kind == "init" else None)
        assert {o.outcome for o in report.outcomes} == {Outcome.OK}
        assert await states(scene) == [(WeightsState.CLEAN, Version(step=1))] * 2
        assert await scene.generations() == [RUNNING] * 2
        await drop(running)

    play([worker(1, SLOW_FINISH), worker(2)], scenario)


def test_a_trainer_that_is_started_again_waits_for_the_end_of_a_shutdown() -> None:
    """Also of one that takes longer than what is left to an op that is stopped."""

    async def scenario(scene: Scene) -> None:
        old, new = client_of(scene, "old"), client_of(scene, "new")
        await old.transfer("init", json.dumps(INIT))
        running = asyncio.create_task(old.transfer("shutdown"))
        await asyncio.sleep(2.0)
        cut(scene, old)
        await asyncio.sleep(MISSING_S + 1.0)
        report = await new.transfer("init", json.dumps(INIT))
        assert {o.outcome for o in report.outcomes} == {Outcome.OK}
        await drop(running)

    play([worker(1, {"shutdown_native": {1: Step(latency_s=100.0)}}), worker(2)], scenario)


@pytest.mark.parametrize(("kind", "goes_on"), [("finish", True), ("update", False)])
def test_a_finish_whose_caller_leaves_is_not_taken_back(kind: str, goes_on: bool) -> None:
    """As one whose HTTP connection ended; nobody waits for it any more, and it needs nobody."""

    async def scenario(scene: Scene) -> None:
        client = client_of(scene, "old")
        running = await (sent_to_finish(scene, client) if goes_on else begin(scene, client, kind, UPDATE))
        await drop(running)
        assert (await until_idle(scene) > 90.0) is goes_on
        version = Version(step=1) if goes_on else None
        assert await states(scene) == [(WeightsState.CLEAN, version)] * 2
        assert await scene.generations() == [RUNNING] * 2

    play([worker(1, SLOW_FINISH if goes_on else HUNG), worker(2, {} if goes_on else HUNG)], scenario)


def test_a_finish_can_be_cancelled_by_its_name() -> None:
    """By somebody who wants it: an engine that hangs in it holds the fleet no longer."""

    async def scenario(scene: Scene) -> None:
        client = client_of(scene, "old")
        running = await sent_to_finish(scene, client)
        op_id = (await client.status()).op_id
        assert op_id is not None
        await client.cancel(op_id)
        assert await until_idle(scene) < ENDING_S + 5.0
        await drop(running)

    play([worker(1, SLOW_FINISH), worker(2)], scenario)
