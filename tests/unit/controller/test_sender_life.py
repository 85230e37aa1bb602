"""A trainer's silence in an update: engines stand still for it, whatever is waited for."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rlbus.bus import Bus
from rlbus.controller.sender_life import JOINING_SILENCE_S, SenderLife, limit_s, silence
from rlbus.controller.testing import Play, plan_of
from rlbus.controller.update_state import Sender, SenderFailed, Stage, initial
from rlbus.errors import RLBusError
from rlbus.schemas import NO_EPOCH, Fault, FaultCode, OpResult, OpStatus, SenderStep
from rlbus.session import Session
from rlbus.testing import LoopClock, MemoryTransport, sequential_ids
from rlbus.trainer import Trainer
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller.scene import PAUSED, RUNNING, Scene, play, source, worker
from tests.unit.controller.test_update import MANY, HandTrainer

pytestmark = pytest.mark.unit

STALL_S = 20.0
LIFE = SenderLife(told_s=10.0, task_heard_s=12.0, heard_s=30.0, is_steady=True)


@pytest.mark.parametrize(
    ("stage", "sender", "life", "until_s"),
    [
        (Stage.PREPARE, Sender.IDLE, LIFE, 30.0 + STALL_S),
        (Stage.JOIN, Sender.JOINING, LIFE, 12.0 + JOINING_SILENCE_S),
        (Stage.JOIN, Sender.JOINING, replace(LIFE, task_heard_s=None), 10.0 + JOINING_SILENCE_S),
        (Stage.JOIN, Sender.JOINING, replace(LIFE, task_heard_s=69.0), 70.0),
        (Stage.PAUSE, Sender.IN, LIFE, 30.0 + STALL_S),
        (Stage.PAUSE, Sender.IN, replace(LIFE, deaf_s=40.0), 40.0 + STALL_S),
        (Stage.PAUSE, Sender.IN, replace(LIFE, is_steady=False), None),
        (Stage.RECEIVE, Sender.IN, LIFE, 30.0 + STALL_S),
        (Stage.RECEIVE, Sender.SENDING, LIFE, 12.0 + STALL_S),
        (Stage.RECEIVE, Sender.SENT, LIFE, None),
        (Stage.COMMIT, Sender.SENT, LIFE, None),
        (Stage.RESUME, Sender.SENT, LIFE, None),
        (Stage.ABORT, Sender.IN, LIFE, None),
    ],
)
def test_a_trainers_silence_counts_wherever_it_is_needed(
    stage: Stage, sender: Sender, life: SenderLife, until_s: float | None
) -> None:
    """Until it has sent all; of an older one only while it has a task."""
    state = replace(initial(plan_of("backend/1", stall_s=STALL_S)), stage=stage, sender=sender)
    assert limit_s(state, life) == until_s


def test_a_trainers_silence_is_told_with_what_was_waited_for() -> None:
    """Its task, or the phase."""
    state = replace(initial(plan_of("backend/1")), stage=Stage.PAUSE, sender=Sender.IN)
    assert silence(state, LIFE, 60.0) == "the trainer was silent for 30 s in phase pause"
    state = replace(state, stage=Stage.RECEIVE, sender=Sender.SENDING)
    assert silence(state, LIFE, 60.0) == "the trainer was silent for 48 s while sending"


def test_a_stall_limit_below_its_signs_of_life_does_not_end_a_trainer_that_waits() -> None:
    """One lost message is no death."""
    state = replace(initial(plan_of("backend/1", stall_s=0.5)), stage=Stage.PAUSE, sender=Sender.IN)
    assert limit_s(state, LIFE) == 30.0 + JOINING_SILENCE_S


def test_before_its_task_only_a_trainers_silence_ends_an_update() -> None:
    """What it still says of the attempt before doesn't."""
    said = Fault(code=FaultCode.SENDER_FAILED, message="no")
    running = Play(plan_of("backend/1"))
    assert running.state.phase == "prepare"
    running.feed(SenderFailed(1, said))
    assert running.state.phase == "prepare"
    running.feed(SenderFailed(None, said))
    assert running.state.phase == "done"


def trainer_of(scene: Scene, name: str = "first") -> Trainer:
    """A trainer on a connection of its own, which can be cut."""
    bus = Bus(scene.fleet.broker.connect(), clock=LoopClock(), new_id=sequential_ids(name))
    return Session(bus, "test").trainer(plane=scene.plane)


async def die_after(scene: Scene, after_s: float, **options: Any) -> asyncio.Task[Any]:
    """A trainer begins an update, and is cut off: nothing of it is heard any more, and nobody is told."""
    trainer = trainer_of(scene)
    updating = asyncio.create_task(trainer.update_weights(source(), version=1, **options))
    await asyncio.sleep(after_s)
    transport = trainer.fleet.bus.transport
    assert isinstance(transport, MemoryTransport)
    scene.fleet.broker.partition(transport)
    return updating


async def until_idle(scene: Scene) -> float:
    """Seconds until no op runs, within 1000."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while (await scene.fleet.client.status()).op_id is not None:
        await asyncio.sleep(0.5)
        assert loop.time() - began_s < 1000.0
    return loop.time() - began_s


async def ended(updating: asyncio.Task[Any]) -> None:
    updating.cancel()
    await asyncio.wait({updating})
    assert updating.cancelled() or isinstance(updating.exception(), RLBusError)


def test_a_trainer_that_dies_while_a_pause_is_waited_for_leaves_nobody_paused() -> None:
    """It ends by the trainer's silence, not by the pause; and whoever is started in its place has its turn."""

    async def scenario(scene: Scene) -> None:
        updating = await die_after(scene, 2.0, pause_mode="wait", stall_s=STALL_S)
        assert await scene.generations() == [RUNNING, PAUSED]
        assert STALL_S - 2.0 < await until_idle(scene) < STALL_S + 5.0
        assert await scene.generations() == [RUNNING] * 2
        scene.relaunch("second")
        assert (await trainer_of(scene, "second").update_weights(source(), version=2)).ok
        await ended(updating)

    play([worker(1, {"pause": {1: Step(latency_s=400.0)}}), worker(2)], scenario)


def test_a_live_trainer_waits_for_a_pause_of_minutes() -> None:
    """It says that it lives all along, so nobody gives it up."""

    async def scenario(scene: Scene) -> None:
        report = await trainer_of(scene).update_weights(source(), version=1, pause_mode="wait", stall_s=STALL_S)
        assert report.ok
        assert report.report.took_s > 399.0

    play([worker(1, {"pause": {1: Step(latency_s=400.0)}}), worker(2)], scenario)


@pytest.mark.parametrize("is_steady", [False, True])
def test_an_older_trainer_that_is_silent_while_it_has_no_task_is_not_given_up(is_steady: bool) -> None:
    """It never says that it lives then; one that has said it, and doesn't any more, is."""

    async def scenario(scene: Scene) -> None:
        trainer = HandTrainer(scene)
        await trainer.begin(stall_s=STALL_S)
        if is_steady:
            await trainer.signal(SenderStep.ALIVE, epoch=NO_EPOCH)
        await trainer.signal(SenderStep.JOINED)
        await asyncio.sleep(60.0)
        if is_steady:
            assert trainer.got(OpResult)[0].report.status is OpStatus.FAILED
        else:
            await trainer.send_all()
            assert trainer.got(OpResult)[0].report.status is OpStatus.OK
        assert await scene.generations() == [RUNNING]
        await trainer.bus.aclose()

    play([worker(1, {"pause": {1: Step(latency_s=59.0)}}, tensors=MANY)], scenario)


def test_a_trainer_that_dies_when_all_is_sent_changes_nothing() -> None:
    """The commit takes longer than its silence may: it isn't needed any more."""

    async def scenario(scene: Scene) -> None:
        updating = await die_after(scene, 2.0, stall_s=5.0)
        assert await until_idle(scene) > 50.0
        assert await scene.generations() == [RUNNING] * 2
        assert {m.status.weights.version.step for m in (await scene.fleet.members()).values()} == {1}  # type: ignore[union-attr]
        await ended(updating)

    play([worker(1, {"finish_update": {1: Step(latency_s=60.0)}}), worker(2)], scenario)
