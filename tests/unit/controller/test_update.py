"""Driving an update: time, silence, lost messages, and a bus that goes away in the middle."""

import asyncio
from typing import Any

import pytest

from rlbus import subjects
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.codec import decode
from rlbus.controller.causes import fault
from rlbus.errors import PartialError
from rlbus.schemas import (
    ControlReply,
    FaultCode,
    JoinTask,
    LeaveTask,
    OpAccepted,
    OpProgress,
    OpResult,
    OpStatus,
    PutManifestPage,
    Refusal,
    Rendezvous,
    Request,
    SenderSignal,
    SenderStep,
    SendTask,
    TensorSpec,
    TensorSum,
    UpdateWeights,
    Version,
)
from rlbus.testing import LoopClock, MemoryTransport
from rlbus.transfer.fake import FakePlaneScript, fake_sum
from rlbus.transfer.manifest import digest, pages
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller.scene import PAUSED, RUNNING, Scene, outcomes, play, source, stand_still, w, worker

pytestmark = pytest.mark.unit

# As many tensors as a slow transfer has seconds, so that every second brings one.
MANY = tuple(TensorSpec(name=f"t{n:03}", dtype="float32", shape=(256,)) for n in range(60))
SLOW = Step(transfer_s=60.0, num_parts=60)


class HandTrainer:
    """A trainer that does nothing by itself: the test decides which signal it sends, and when."""

    def __init__(self, scene: Scene) -> None:
        self.plane = scene.plane
        self.bus = Bus(scene.fleet.broker.connect(), clock=LoopClock())
        self.replies: list[Any] = []
        self.inbox = self.bus.open_inbox(self._on_reply)

    def _on_reply(self, message: Message, _: str) -> None:
        self.replies.append(decode(message.data, ControlReply, message.subject))

    def post(self, request: Request) -> None:
        """Send, wherever the replies go."""
        op = str(request.__struct_config__.tag)
        self.bus.publish(subjects.control("test", op), request, self.inbox.reply)

    async def begin(self, **changes: Any) -> UpdateWeights:
        """Announce the manifest, and ask for an update to version 7."""
        (page,) = pages(MANY, 500_000)
        self.post(PutManifestPage(op_id="page", page=page))
        fields: dict[str, Any] = {
            "op_id": "u",
            "version": Version(step=7),
            "manifest_digest": digest(MANY),
            "backend": "fake",
            "rendezvous": Rendezvous(host="127.0.0.1", port=1, prefix="p"),
            "sender_id": "hand",
            "bucket_bytes": 1024,
            "deadline_s": 600.0,
        }
        request = UpdateWeights(**{**fields, **changes})
        self.post(request)
        await asyncio.sleep(0.1)
        return request

    async def signal(self, step: SenderStep, *, epoch: int = 1, **fields: Any) -> None:
        """One signal, and a moment for what follows."""
        self.post(SenderSignal(op_id="s", of_op_id="u", epoch=epoch, step=step, **fields))
        await asyncio.sleep(0.1)

    async def send_all(self) -> None:
        """Send everything, and say so, as the fake engines count it."""
        self.plane.begin("u")
        await asyncio.sleep(0.1)
        sums = tuple(TensorSum(name=s.name, checksum=fake_sum(s.name, Version(step=7), s.shape)) for s in MANY)
        await self.signal(SenderStep.SENT, sums=sums, num_bytes=10)

    def got(self, kind: type[Any]) -> list[Any]:
        """Replies of one kind."""
        return [r for r in self.replies if isinstance(r, kind)]


def test_a_trainer_by_hand_hears_its_tasks_in_order() -> None:
    """Accepted, progress, join, send, result."""

    async def scenario(scene: Scene) -> None:
        trainer = HandTrainer(scene)
        await trainer.begin()
        await trainer.signal(SenderStep.JOINED)
        await trainer.send_all()
        kinds = [type(r) for r in trainer.replies if not isinstance(r, OpProgress)]
        # The first is the page's, and each signal is answered.
        assert kinds == [OpAccepted, OpAccepted, JoinTask, OpAccepted, SendTask, OpAccepted, OpResult]
        assert trainer.replies[-1].report.status is OpStatus.OK
        await trainer.bus.aclose()

    play([worker(1, tensors=MANY)], scenario)


def test_a_trainer_that_falls_silent_while_sending_is_given_up_after_the_stall_limit() -> None:
    """SCENARIOS 5: not after the deadline; each `alive` begins the limit anew."""

    async def scenario(scene: Scene) -> None:
        trainer = HandTrainer(scene)
        await trainer.begin(stall_s=5.0)
        await trainer.signal(SenderStep.JOINED)
        trainer.plane.begin("u")
        for _ in range(4):
            await trainer.signal(SenderStep.ALIVE, num_bytes=1)
            await asyncio.sleep(3.0)
        assert trainer.got(OpResult) == []
        await asyncio.sleep(8.0)
        report = trainer.got(OpResult)[0].report
        assert 14.0 < report.took_s < 18.0
        assert report.fault.code is FaultCode.SENDER_FAILED
        assert report.fault.message == "the trainer was silent for 5 s while sending"
        assert [t.epoch for t in trainer.got(LeaveTask)] == [1]
        await trainer.bus.aclose()

    # It waits for bytes that don't come, and says so by its progress.
    play([worker(1, {"receive_weights": {1: SLOW}}, tensors=MANY)], scenario)


def test_a_trainer_is_not_given_up_because_the_controller_stood_still() -> None:
    """Stopped for a while, it looks at the time before it has read what the trainer said; silent after that, it is."""

    async def scenario(scene: Scene) -> None:
        trainer = HandTrainer(scene)
        await trainer.begin(stall_s=5.0)
        await trainer.signal(SenderStep.JOINED)
        trainer.plane.begin("u")
        await trainer.signal(SenderStep.ALIVE, num_bytes=1)
        stand_still(20.0)
        await asyncio.sleep(0.1)
        await trainer.signal(SenderStep.ALIVE, num_bytes=2)
        await asyncio.sleep(4.0)
        assert trainer.got(OpResult) == []
        await asyncio.sleep(8.0)
        report = trainer.got(OpResult)[0].report
        assert report.fault.message == "the trainer was silent for 5 s while sending"
        await trainer.bus.aclose()

    play([worker(1, {"receive_weights": {1: SLOW}}, tensors=MANY)], scenario)


def test_a_trainer_that_dies_while_it_joins_is_given_up_by_its_silence() -> None:
    """Not after the time that a group may take to form: in another attempt engines stand still meanwhile."""

    async def scenario(scene: Scene) -> None:
        trainer = HandTrainer(scene)
        await trainer.begin()
        for _ in range(4):
            await trainer.signal(SenderStep.ALIVE)
            await asyncio.sleep(3.0)
        assert trainer.got(OpResult) == []
        await asyncio.sleep(5.0)
        report = trainer.got(OpResult)[0].report
        assert 14.0 < report.took_s < 17.0
        assert report.fault.message == "the trainer was silent for 5 s while joining"
        await trainer.bus.aclose()

    play([worker(1, tensors=MANY)], scenario)


def test_an_apply_of_an_hour_passes_as_long_as_bytes_come() -> None:
    """SCENARIOS 15: nothing counts but progress, however slow."""

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.update(7, MANY, stall_s=100.0, deadline_s=7200.0)
        assert report.status is OpStatus.OK
        assert report.took_s == pytest.approx(3600.0, abs=60.0)

    slow = Step(transfer_s=3600.0, num_parts=60)
    sending = FakePlaneScript(send_s=3590.0, send_parts=59)
    play([worker(1, {"receive_weights": {1: slow}}, tensors=MANY)], scenario, plane=sending)


def test_a_transfer_without_progress_ends_at_the_stall_limit_and_one_with_progress_does_not() -> None:
    """SCENARIOS 15: 60 s of work under a stall limit of 5 s is fine as long as bytes come."""

    async def good(scene: Scene) -> None:
        report = await scene.fleet.update(7, MANY, stall_s=5.0, deadline_s=120.0)
        assert report.status is OpStatus.OK
        assert report.took_s == pytest.approx(60.0, abs=1.0)

    async def bad(scene: Scene) -> None:
        report = await scene.update(7, stall_s=5.0, deadline_s=120.0)
        assert outcomes(report) == {"1": "unknown"}
        assert report.fault is not None
        assert report.fault.code is FaultCode.STALLED
        assert report.took_s < 30.0

    sending = FakePlaneScript(send_s=59.0, send_parts=59)
    play([worker(1, {"receive_weights": {1: SLOW}}, tensors=MANY)], good, plane=sending)
    play([worker(1, {"receive_weights": {1: Step(hangs=True, after_parts=1)}})], bad)


@pytest.mark.parametrize(
    ("steps", "states", "status"),
    [
        ({"join_group": {1: Step(latency_s=100.0)}}, [RUNNING, RUNNING], OpStatus.FAILED),
        ({"pause": {1: Step(latency_s=100.0)}}, [RUNNING, RUNNING], OpStatus.FAILED),
        # The other one has everything, so it is committed; this one has nothing, and doesn't generate beside it.
        ({"receive_weights": {1: Step(hangs=True)}}, [PAUSED, RUNNING], OpStatus.PARTIAL),
        ({"receive_weights": {1: Step(transfer_s=200.0)}}, [PAUSED, RUNNING], OpStatus.PARTIAL),
    ],
)
def test_the_deadline_ends_an_update_at_any_step_while_the_caller_listens(
    steps: Any, states: Any, status: OpStatus
) -> None:
    """With a report within deadline and grace, and everybody where their damage leaves them."""

    async def scenario(scene: Scene) -> None:
        began_s = asyncio.get_running_loop().time()
        report = await scene.update(7, deadline_s=20.0)
        assert asyncio.get_running_loop().time() - began_s <= 25.0
        assert report.status is status
        assert report.fault is not None
        assert report.fault.code in (FaultCode.DEADLINE, FaultCode.STALLED, FaultCode.NO_ACK)
        await asyncio.sleep(90.0)
        assert await scene.generations() == states
        assert (await scene.fleet.client.status()).op_id is None

    play([worker(1, steps), worker(2)], scenario)


def test_a_lost_task_is_told_again() -> None:
    """The trainer that never heard of its task hears it a moment later; doing it twice is no harm."""

    async def scenario(scene: Scene) -> None:
        trainer = HandTrainer(scene)
        await trainer.begin()
        await asyncio.sleep(4.0)
        assert len(trainer.got(JoinTask)) >= 2
        await trainer.signal(SenderStep.JOINED)
        await asyncio.sleep(5.0)
        assert len(trainer.got(SendTask)) >= 2
        await trainer.send_all()
        assert trainer.got(OpResult)[0].report.status is OpStatus.OK
        await trainer.bus.aclose()

    play([worker(1, tensors=MANY)], scenario)


def test_a_repeated_request_joins_and_hears_the_present_task() -> None:
    """A trainer that lost its reply address asks again under the same op_id."""

    async def scenario(scene: Scene) -> None:
        trainer, again = HandTrainer(scene), HandTrainer(scene)
        request = await trainer.begin()
        again.post(request)
        await asyncio.sleep(0.1)
        assert [type(r) for r in again.replies] == [OpAccepted, OpProgress, JoinTask]
        await again.signal(SenderStep.JOINED)
        await again.send_all()
        assert again.got(OpResult) == trainer.got(OpResult)
        assert list(scene.fleet.workers[0].engine.calls).count("join_group") == 1
        await trainer.bus.aclose()
        await again.bus.aclose()

    play([worker(1, tensors=MANY)], scenario)


def test_a_signal_about_another_group_is_refused() -> None:
    """It is that of an earlier update, and changes nothing in this one."""

    async def scenario(scene: Scene) -> None:
        trainer = HandTrainer(scene)
        await trainer.begin()
        await trainer.signal(SenderStep.JOINED, epoch=9)
        assert trainer.got(Refusal)[0].fault.code is FaultCode.STALE_EPOCH
        assert await scene.generations() == [RUNNING]
        await trainer.signal(SenderStep.FAILED)
        assert trainer.got(OpResult)[0].report.status is OpStatus.FAILED
        await trainer.bus.aclose()

    play([worker(1, tensors=MANY)], scenario)


def test_a_cancelled_update_gives_everybody_back() -> None:
    """The trainer's caller goes away in the middle of a long pause."""

    async def scenario(scene: Scene) -> None:
        updating = asyncio.create_task(scene.update(7))
        await asyncio.sleep(1.0)
        assert await scene.generations() == [PAUSED, RUNNING]
        updating.cancel()
        await asyncio.wait({updating})
        await asyncio.sleep(10.0)
        assert await scene.generations() == [RUNNING, RUNNING]
        assert (await scene.fleet.client.status()).op_id is None

    play([worker(1), worker(2, {"pause": {1: Step(latency_s=5.0)}})], scenario)


def test_nothing_is_expected_of_a_trainer_whose_update_is_being_undone() -> None:
    """Undoing takes longer than the stall limit, since a worker is silent; it is neither hurried nor a busy loop."""

    async def scenario(scene: Scene) -> None:
        scene.plane.script = FakePlaneScript(send_s=100.0)
        updating = asyncio.create_task(scene.update(7, stall_s=1.5))
        await asyncio.sleep(0.5)
        scene.cut(2)
        mutation = scene.fleet.controller._desk.mutation
        assert mutation is not None
        mutation.op.stop(fault(FaultCode.CANCELLED, "by the test"))
        report = await updating
        assert report.took_s > 2.0
        assert report.status is OpStatus.FAILED
        assert [o.outcome.value for o in report.outcomes] == ["failed", "unknown"]

    slow = {"receive_weights": {1: Step(transfer_s=100.0, num_parts=100)}}
    play([worker(1, slow), worker(2, slow)], scenario)


def test_a_worker_that_restarts_in_the_middle_is_lost_to_the_update() -> None:
    """SCENARIOS 7: with on_failure "stop" its goodbye ends the update at once, the other one generates again."""

    async def scenario(scene: Scene) -> None:
        updating = asyncio.create_task(scene.update(7, on_failure="stop"))
        await asyncio.sleep(1.0)
        scene.fleet.workers[1].agent.stop("scaled down")
        report = await updating
        assert outcomes(report) == {"1": "undone", "2": "failed"}
        assert report.fault is not None
        assert report.fault.code is FaultCode.WORKER_LOST
        assert (await scene.generations())[0] is RUNNING

    play([worker(1), worker(2, {"pause": {1: Step(latency_s=3.0)}})], scenario)


def test_a_bus_that_is_away_for_a_moment_costs_nothing() -> None:
    """The controller is cut off for 3 s in the middle of a pause: commands go again, nothing runs twice."""

    async def scenario(scene: Scene) -> None:
        transport = scene.fleet.controller._bus.transport
        assert isinstance(transport, MemoryTransport)
        updating = asyncio.create_task(scene.update(7))
        await asyncio.sleep(1.0)
        scene.fleet.broker.disconnect(transport)
        await asyncio.sleep(3.0)
        scene.fleet.broker.reconnect(transport)
        report = await updating
        assert report.status is OpStatus.OK
        assert list(scene.fleet.workers[0].engine.calls).count("pause") == 1

    play([worker(1, {"pause": {1: Step(latency_s=2.0)}}), worker(2)], scenario)


def test_an_undo_waits_for_a_bus_that_is_away() -> None:
    """Cut off between the last pause and its undo: nobody stays paused for it."""

    async def scenario(scene: Scene) -> None:
        transport = scene.fleet.controller._bus.transport
        assert isinstance(transport, MemoryTransport)
        scene.fleet.plane.script = FakePlaneScript(send_s=60.0)
        updating = asyncio.create_task(scene.update(7))
        await asyncio.sleep(1.0)
        assert await scene.generations() == [PAUSED, PAUSED]
        scene.fleet.broker.disconnect(transport)
        mutation = scene.fleet.controller._desk.mutation
        assert mutation is not None
        mutation.op.stop(fault(FaultCode.CANCELLED, "by the test"))
        await asyncio.sleep(5.0)
        scene.fleet.broker.reconnect(transport)
        report = await updating
        assert report.status is OpStatus.FAILED
        assert await scene.generations() == [RUNNING, RUNNING]

    waiting = {"receive_weights": {1: Step(hangs=True)}}
    play([worker(1, waiting), worker(2, waiting)], scenario)


def test_phases_and_the_pause_are_measured() -> None:
    """What a user pays for is how long engines stood still."""

    async def scenario(scene: Scene) -> None:
        report = await scene.update(7)
        phases_s = report.phases_s
        assert list(phases_s) == ["plan", "prepare", "group", "pause", "transfer", "commit", "flush", "resume"]
        measured = [phases_s[p] for p in ("group", "pause", "transfer", "commit", "flush", "resume")]
        assert measured == pytest.approx([1.0, 2.0, 4.0, 0.5, 0.25, 0.125], abs=0.05)
        assert report.paused_s == pytest.approx(6.875, abs=0.05)
        assert report.took_s == pytest.approx(7.875, abs=0.05)

    steps = {
        "join_group": {1: Step(latency_s=1.0)},
        "pause": {1: Step(latency_s=2.0)},
        "receive_weights": {1: Step(transfer_s=4.0)},
        "finish_update": {1: Step(latency_s=0.5)},
        "flush_cache": {1: Step(latency_s=0.25)},
        "resume": {1: Step(latency_s=0.125)},
    }
    play([worker(1, steps)], scenario)


def test_a_report_that_is_not_ok_raises_and_carries_the_outcomes() -> None:
    """What a trainer script sees."""

    async def scenario(scene: Scene) -> None:
        with pytest.raises(PartialError) as caught:
            await scene.fleet.trainer.update_weights(source(), version=7)
        assert [o.worker for o in caught.value.report.outcomes] == [w(1)]

    play([worker(1, {"finish_update": {1: Step(dies=True)}})], scenario)
