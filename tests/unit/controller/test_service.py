"""The controller on the bus: what it answers to which message, and what it does when the world shakes."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from rlbus import subjects
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.codec import decode
from rlbus.controller.service import Controller, Settings
from rlbus.controller.testing import TENSORS, Fleet, announcement, controller_on_bus, fleet_on_bus, request_of
from rlbus.errors import BusyError, PartialError, RefusedError
from rlbus.schemas import (
    CancelOp,
    Command,
    ControllerEvent,
    ControlReply,
    FaultCode,
    FleetView,
    FlushFleet,
    GetFleet,
    Liveness,
    OpAccepted,
    OpEnded,
    OpProgress,
    OpResult,
    OpStatus,
    PauseFleet,
    PutManifestPage,
    Refusal,
    Request,
    ResumeFleet,
    SenderSignal,
    SenderStep,
    Target,
    Version,
    WaitReady,
    WeightsState,
    WeightsView,
    WorkerId,
    WorkerLeft,
)
from rlbus.testing import LoopClock, MemoryBroker, MemoryTransport, run
from rlbus.transfer.manifest import pages
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.testing import Rig, worker_on_bus

pytestmark = pytest.mark.unit


class Caller:
    """Anybody on the bus: sends requests and keeps every reply."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = Bus(broker.connect(), clock=LoopClock())
        self.replies: list[Any] = []
        self._inbox = self.bus.open_inbox(self._on_reply)

    def _on_reply(self, message: Message, _: str) -> None:
        self.replies.append(decode(message.data, ControlReply, message.subject))

    async def send(self, request: Request, *, subject: str | None = None, wait_s: float = 0.05) -> list[Any]:
        """Send; the replies after `wait_s`."""
        op = str(request.__struct_config__.tag)
        self.bus.publish(subject or subjects.control("test", op), request, self._inbox.reply)
        self.replies.clear()
        await asyncio.sleep(wait_s)
        return list(self.replies)

    async def send_raw(self, subject: str, data: bytes) -> list[Any]:
        """Send what is no request."""
        self.bus.transport.publish(subject, data, self._inbox.reply)
        self.replies.clear()
        await asyncio.sleep(0.05)
        return list(self.replies)

    def announce(self, message: Any) -> None:
        """Speak for a worker."""
        d = message.descriptor
        self.bus.publish(subjects.worker("test", d.component, d.instance_id), message)


def on_bus(scenario: Callable[[Controller, Caller], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """A controller alone, and somebody who talks to it."""

    async def main() -> None:
        broker = MemoryBroker()
        async with controller_on_bus(broker, settings=Settings(**settings)) as controller:
            caller = Caller(broker)
            await scenario(controller, caller)
            await caller.bus.aclose()

    run(main())


def worker(number: int, **steps: dict[int, Step]) -> Callable[[MemoryBroker], AbstractAsyncContextManager[Rig]]:
    def start(broker: MemoryBroker) -> AbstractAsyncContextManager[Rig]:
        return worker_on_bus(FakeEngine(FakeScript(steps)), broker=broker, instance_id=str(number))

    return start


def on_fleet(
    workers: Sequence[Callable[[MemoryBroker], AbstractAsyncContextManager[Rig]]],
    scenario: Callable[[Fleet[Rig], Caller], Coroutine[Any, Any, None]],
) -> None:
    async def main() -> None:
        async with fleet_on_bus(workers) as fleet:
            caller = Caller(fleet.broker)
            await scenario(fleet, caller)
            await caller.bus.aclose()

    run(main())


def refusal(replies: list[Any]) -> Refusal:
    (reply,) = replies
    assert isinstance(reply, Refusal)
    return reply


def code(replies: list[Any]) -> FaultCode:
    return refusal(replies).fault.code


@pytest.mark.parametrize("data", [b"", b"{", b'{"op":"dance"}', b'{"op":"pause"}', b"[1,2]", b"\xff\xfe"])
def test_a_malformed_request_is_counted_and_refused(data: bytes) -> None:
    """And the controller lives on."""

    async def scenario(controller: Controller, caller: Caller) -> None:
        assert code(await caller.send_raw("dyn.test.controller.pause", data)) is FaultCode.BAD_MESSAGE
        assert controller.num_bad_requests == 1
        assert isinstance((await caller.send(GetFleet(op_id="x")))[0], FleetView)

    on_bus(scenario)


def test_a_request_on_the_subject_of_another_op_is_refused() -> None:
    """Permissions are by subject: a body must not smuggle another op through one that is allowed."""

    async def scenario(controller: Controller, caller: Caller) -> None:
        replies = await caller.send(PauseFleet(op_id="p"), subject="dyn.test.controller.status")
        assert code(replies) is FaultCode.BAD_MESSAGE
        assert controller.num_bad_requests == 1

    on_bus(scenario)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (PauseFleet(op_id="p"), FaultCode.NO_WORKER),
        (PauseFleet(op_id="p", target=Target(workers=(WorkerId("backend/1"),))), FaultCode.NO_WORKER),
        (ResumeFleet(op_id="p", deadline_s=0), FaultCode.BAD_MESSAGE),
        (ResumeFleet(op_id="p", deadline_s=1e9), FaultCode.BAD_MESSAGE),
        (WaitReady(op_id="p", world_size=0), FaultCode.BAD_MESSAGE),
        (WaitReady(op_id="p", deadline_s=-1), FaultCode.BAD_MESSAGE),
        (CancelOp(op_id="p", of_op_id="nothing"), FaultCode.UNKNOWN_OP),
        (SenderSignal(op_id="p", of_op_id="nothing", epoch=1, step=SenderStep.ALIVE), FaultCode.UNKNOWN_OP),
        (request_of(), FaultCode.NO_WORKER),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_begins(request_: Request, expected: FaultCode) -> None:
    """With the op_id, so that the caller knows what was refused."""

    async def scenario(controller: Controller, caller: Caller) -> None:
        reply = refusal(await caller.send(request_))
        assert (reply.fault.code, reply.op_id) == (expected, "p" if request_.op_id == "p" else "u")

    on_bus(scenario)


def test_a_wait_ends_when_the_fleet_is_complete_and_shows_progress_until_then() -> None:
    """At least every second, with how many ranks are there."""

    async def scenario(controller: Controller, caller: Caller) -> None:
        first = await caller.send(WaitReady(op_id="w", world_size=3))
        assert [type(r) for r in first] == [OpAccepted, OpProgress, OpProgress]
        caller.announce(announcement("backend/1", world_size=2))
        await asyncio.sleep(1.0)
        progress = caller.replies[-1]
        assert isinstance(progress, OpProgress)
        assert (progress.phase, progress.done, progress.total, progress.unit) == ("wait", 2, 3, "ranks")
        caller.announce(announcement("backend/2"))
        await asyncio.sleep(0.05)
        assert isinstance(caller.replies[-1], FleetView)

    on_bus(scenario)


def test_a_wait_that_runs_out_says_what_is_missing() -> None:
    """SCENARIOS 16."""

    async def scenario(controller: Controller, caller: Caller) -> None:
        replies = await caller.send(WaitReady(op_id="w", num_workers=2, deadline_s=3.0), wait_s=3.5)
        why = replies[-1].fault
        assert why.code is FaultCode.DEADLINE
        assert why.message == "the fleet isn't complete after 3 s: 0 of 2 workers are there; there: nobody"

    on_bus(scenario)


def test_a_wait_can_be_taken_back_and_joined() -> None:
    """The same op_id is one wait."""

    async def scenario(controller: Controller, caller: Caller) -> None:
        await caller.send(WaitReady(op_id="w", num_workers=1))
        again = await caller.send(WaitReady(op_id="w", num_workers=1))
        assert isinstance(again[0], OpAccepted)
        replies = await caller.send(CancelOp(op_id="c", of_op_id="w"))
        assert [type(r) for r in replies] == [Refusal, OpAccepted]
        assert replies[0].fault.code is FaultCode.CANCELLED

    on_bus(scenario)


def test_a_page_of_a_manifest_is_taken_or_refused() -> None:
    """One that contradicts itself is a bad message."""

    async def scenario(controller: Controller, caller: Caller) -> None:
        (page,) = pages(TENSORS, 100_000)
        assert isinstance((await caller.send(PutManifestPage(op_id="m", page=page)))[0], OpAccepted)
        broken = type(page)(digest="0" * 64, page=3, num_pages=2, tensors=())
        assert code(await caller.send(PutManifestPage(op_id="m2", page=broken))) is FaultCode.BAD_MESSAGE

    on_bus(scenario)


def test_an_op_runs_once_and_its_report_is_remembered() -> None:
    """Accepted, progress, one result; a repeat of the op_id gets the same report, and nothing is done again."""

    async def scenario(fleet: Fleet[Rig], caller: Caller) -> None:
        replies = await caller.send(PauseFleet(op_id="p"))
        assert [type(r) for r in replies] == [OpAccepted, OpProgress, OpProgress, OpResult]
        report = replies[-1].report
        assert (report.status, report.op) == (OpStatus.OK, "pause")
        again = await caller.send(PauseFleet(op_id="p"))
        assert again == [replies[-1]]
        assert list(fleet.workers[0].engine.calls).count("pause") == 1
        assert code(await caller.send(ResumeFleet(op_id="p"))) is FaultCode.BAD_MESSAGE

    on_fleet([worker(1)], scenario)


def test_one_mutation_at_a_time_and_busy_names_the_other() -> None:
    """Issue 2 section 4. Questions and aborts are answered beside it; status shows the op."""

    async def scenario(fleet: Fleet[Rig], caller: Caller) -> None:
        running = asyncio.create_task(fleet.client.pause(op_id="first"))
        await asyncio.sleep(1.0)
        with pytest.raises(BusyError) as caught:
            await fleet.client.flush()
        assert caught.value.running_op_id == "first"
        assert (await fleet.client.status()).op_id == "first"
        assert (await fleet.client.versions()).status is OpStatus.OK
        assert (await fleet.client.abort()).status is OpStatus.OK
        await running
        assert (await fleet.client.flush()).status is OpStatus.OK

    on_fleet([worker(1, pause={1: Step(latency_s=4.0)})], scenario)


def test_a_repeat_of_a_running_op_joins_it_on_another_address() -> None:
    """A client that lost its replies asks again, and hears the end."""

    async def scenario(fleet: Fleet[Rig], caller: Caller) -> None:
        other = Caller(fleet.broker)
        await caller.send(PauseFleet(op_id="p"), wait_s=1.0)
        joined = await other.send(PauseFleet(op_id="p"), wait_s=4.0)
        assert [type(r) for r in joined[:2]] == [OpAccepted, OpProgress]
        assert joined[-1] == caller.replies[-1]
        assert joined[-1].report.status is OpStatus.OK
        await other.bus.aclose()

    on_fleet([worker(1, pause={1: Step(latency_s=3.0)})], scenario)


def test_progress_comes_at_least_every_second() -> None:
    """While an op runs, whoever asked hears of it."""

    async def scenario(fleet: Fleet[Rig], caller: Caller) -> None:
        replies = await caller.send(FlushFleet(op_id="f"), wait_s=5.5)
        assert len([r for r in replies if isinstance(r, OpProgress)]) >= 6
        assert isinstance(replies[-1], OpResult)

    on_fleet([worker(1, flush_cache={1: Step(latency_s=5.0)})], scenario)


def test_events_tell_who_came_and_what_was_done() -> None:
    """The audit: joined, op started by whom, op ended how, left why."""

    async def scenario(controller: Controller, caller: Caller) -> None:
        events: list[Any] = []
        caller.bus.subscribe(subjects.controller_events("test"), ControllerEvent, lambda e, _: events.append(e))
        caller.announce(announcement("backend/1"))
        await asyncio.sleep(0.1)
        await caller.send(ResumeFleet(op_id="r", caller="ann", deadline_s=4.0), wait_s=40.0)
        assert [type(e).__name__ for e in events[:2]] == ["WorkerJoined", "OpStarted"]
        assert (events[1].op, events[1].caller) == ("resume", "ann")
        ended = next(e for e in events if isinstance(e, OpEnded))
        assert (ended.op_id, ended.status) == ("r", "failed")
        left = next(e for e in events if isinstance(e, WorkerLeft))
        assert (left.instance_id, left.reason) == ("1", "silent for 20 s")

    on_bus(scenario)


def test_hello_goes_to_known_components_and_to_new_ones_when_they_are_heard() -> None:
    """On start to those of the settings, on the first announcement of another, and to all after a reconnect."""

    async def main() -> None:
        broker = MemoryBroker()
        caller = Caller(broker)
        greeted: list[str] = []
        caller.bus.subscribe("dyn.test.*.rl.hello", Command, lambda _, m: greeted.append(m.subject.split(".")[2]))
        async with controller_on_bus(broker, settings=Settings(components=("backend",))) as controller:
            await asyncio.sleep(0.1)
            assert greeted == ["backend"]
            caller.announce(announcement("decode/1"))
            caller.announce(announcement("decode/2"))
            await asyncio.sleep(0.1)
            assert greeted == ["backend", "decode"]
            transport = controller._bus.transport
            assert isinstance(transport, MemoryTransport)
            broker.disconnect(transport)
            await asyncio.sleep(1.0)
            broker.reconnect(transport)
            await asyncio.sleep(0.1)
            assert greeted == ["backend", "decode", "backend", "decode"]
        await caller.bus.aclose()

    run(main())


def test_a_disconnect_of_our_own_declares_nobody_dead() -> None:
    """SCENARIOS 22: 60 s without the bus, then everybody is there, without a duplicate."""

    async def scenario(fleet: Fleet[Rig], caller: Caller) -> None:
        events: list[Any] = []
        caller.bus.subscribe(subjects.controller_events("test"), ControllerEvent, lambda e, _: events.append(e))
        transport = fleet.controller._bus.transport
        assert isinstance(transport, MemoryTransport)
        fleet.broker.disconnect(transport)
        await asyncio.sleep(60.0)
        fleet.broker.reconnect(transport)
        await asyncio.sleep(1.0)
        assert {m.liveness for m in (await fleet.members()).values()} == {Liveness.ALIVE}
        assert [e for e in events if isinstance(e, WorkerLeft)] == []

    on_fleet([worker(1), worker(2)], scenario)


def test_a_stop_takes_back_what_runs() -> None:
    """Whoever is paused by an op runs again before the controller is gone; the caller gets the report."""

    async def main() -> None:
        broker = MemoryBroker()
        async with (
            worker_on_bus(FakeEngine(), broker=broker, instance_id="1") as one,
            worker_on_bus(FakeEngine(FakeScript({"pause": {1: Step(latency_s=3.0)}})), broker=broker, instance_id="2"),
        ):
            caller = Caller(broker)
            async with controller_on_bus(broker):
                await asyncio.sleep(0.1)
                await caller.send(PauseFleet(op_id="p"), wait_s=1.0)
                began_s = asyncio.get_running_loop().time()
            assert asyncio.get_running_loop().time() - began_s < 8.0
            await asyncio.sleep(0.1)
            result = caller.replies[-1]
            assert isinstance(result, OpResult)
            assert result.report.fault is not None
            assert result.report.fault.code is FaultCode.CANCELLED
            assert (await one.engine.observe()).generation.value == "running"
            await caller.bus.aclose()

    run(main())


def test_nothing_begins_while_the_controller_stops() -> None:
    """A request then is refused at once, as busy."""

    async def scenario(controller: Controller, caller: Caller) -> None:
        caller.announce(announcement("backend/1"))
        await asyncio.sleep(0.05)
        await controller._desk.aclose(0.1)
        assert code(await caller.send(ResumeFleet(op_id="r"))) is FaultCode.BUSY

    on_bus(scenario)


def test_a_version_that_somebody_announces_is_the_fleets() -> None:
    """A new controller learns it from the workers; an update that isn't newer is refused."""

    async def scenario(controller: Controller, caller: Caller) -> None:
        (page,) = pages(TENSORS, 100_000)
        weights = WeightsView(state=WeightsState.CLEAN, version=Version(step=9))
        caller.announce(announcement("backend/1", weights=weights))
        await caller.send(PutManifestPage(op_id="m", page=page))
        assert code(await caller.send(request_of())) is FaultCode.VERSION_REGRESSION

    on_bus(scenario)


def test_an_update_without_its_manifest_asks_for_the_pages() -> None:
    """The trainer puts them and tries again."""

    async def scenario(controller: Controller, caller: Caller) -> None:
        caller.announce(announcement("backend/1"))
        reply = refusal(await caller.send(request_of()))
        assert (reply.fault.code, reply.fault.retryable) == (FaultCode.MANIFEST_UNKNOWN, True)

    on_bus(scenario)


def test_a_cancel_of_an_op_that_has_ended_says_so() -> None:
    """Rather than that it was never there."""

    async def scenario(fleet: Fleet[Rig], caller: Caller) -> None:
        await fleet.client.flush(op_id="done")
        with pytest.raises(RefusedError) as caught:
            await fleet.client.cancel("done")
        assert str(caught.value) == "controller: op done has ended [unknown_op]"

    on_fleet([worker(1)], scenario)


def test_a_wrong_announcement_is_refused_and_the_others_are_reached() -> None:
    """Neither a reserved component nor another's subject gets into the fleet, and a pause finds only who is there."""

    async def scenario(fleet: Fleet[Rig], caller: Caller) -> None:
        bus = caller.bus
        bus.publish("dyn.test.controller.worker.9", announcement("controller/9"))
        bus.publish(subjects.worker("test", "backend", "2"), announcement("backend/1", boot_id="fake", world_size=7))
        await asyncio.sleep(0.05)
        assert fleet.controller.registry.num_refused == 2
        report = await fleet.client.pause()
        assert {o.worker: o.outcome.value for o in report.outcomes} == {"backend/1": "ok"}

    on_fleet([worker(1)], scenario)


def test_a_worker_that_nobody_hears_is_left_out_of_the_next_op() -> None:
    """Found out by the first op, in its report; the second addresses who is there."""

    async def scenario(fleet: Fleet[Rig], caller: Caller) -> None:
        caller.announce(announcement("backend/2", routes=("flush_cache", "pause_generation")))
        await asyncio.sleep(0.05)
        with pytest.raises(PartialError) as caught:
            await fleet.client.flush()
        first = caught.value.report
        assert {o.worker: o.outcome.value for o in first.outcomes} == {"backend/1": "ok", "backend/2": "unknown"}
        second = await fleet.client.flush()
        assert {o.worker: o.outcome.value for o in second.outcomes} == {"backend/1": "ok"}

    on_fleet([worker(1)], scenario)
