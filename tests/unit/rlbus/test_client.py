"""FleetClient against a scripted controller, on the in-memory bus under virtual time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from rlbus import subjects
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.client import EventStream, FleetClient
from rlbus.errors import BrokenError, BusyError, ConfigError, DeadlineError, NoWorkerError, PartialError
from rlbus.schemas import (
    AbortFleet,
    CancelOp,
    ControllerEvent,
    ControlReply,
    ControlRequest,
    Fault,
    FaultCode,
    FleetView,
    FlushFleet,
    GetFleet,
    OpAccepted,
    OpEnded,
    OpProgress,
    OpResult,
    OpStatus,
    Outcome,
    PauseFleet,
    PauseMode,
    Refusal,
    ReloadFleet,
    Report,
    SleepFleet,
    Target,
    Version,
    WaitReady,
    WakeFleet,
    WorkerId,
    WorkerOutcome,
)
from rlbus.testing import LoopClock, MemoryBroker, run, sequential_ids

pytestmark = pytest.mark.unit

NAMESPACE = "test"
VIEW = FleetView(namespace=NAMESPACE, term=1, version=None, epoch=None, op_id=None, members=())


def report_of(op_id: str, status: OpStatus = OpStatus.OK, fault: Fault | None = None) -> Report:
    """A report of one worker that ended as the whole did."""
    outcome = Outcome.OK if status is OpStatus.OK else Outcome.FAILED
    worker = WorkerOutcome(worker=WorkerId("backend/1"), outcome=outcome, phase="pause", fault=fault)
    return Report(op_id=op_id, op="pause", status=status, outcomes=(worker,), phases_s={"pause": 0.1}, took_s=0.1)


class ScriptedController:
    """Takes every request, remembers it, and answers with what `script` yields: replies, or floats to sleep."""

    def __init__(self, bus: Bus, script: Callable[[ControlRequest, int], list[ControlReply | float]]) -> None:
        self.bus = bus
        self.requests: list[ControlRequest] = []
        self._script = script
        self._tasks: set[asyncio.Task[None]] = set()
        bus.subscribe(subjects.all_control(NAMESPACE), ControlRequest, self._on_request)

    def _on_request(self, request: ControlRequest, message: Message) -> None:
        self.requests.append(request)
        assert message.reply is not None
        steps = self._script(request, len(self.requests))
        self._tasks.add(asyncio.create_task(self._play(steps, message.reply)))

    async def _play(self, steps: list[ControlReply | float], reply: str) -> None:
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                self.bus.publish(reply, step)

    async def aclose(self) -> None:
        """End the answers that still play."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


Script = Callable[[ControlRequest, int], list[ControlReply | float]]


def play(script: Script | None, scenario: Callable[[FleetClient, ScriptedController], Awaitable[None]]) -> None:
    """Run `scenario` with a client, and a controller that follows `script` (None: no controller at all)."""

    async def body() -> None:
        broker = MemoryBroker()
        async with Bus(broker.connect(), clock=LoopClock()) as theirs, Bus(broker.connect(), clock=LoopClock()) as ours:
            ours.new_id = sequential_ids("op")
            if script is None:
                await scenario(FleetClient(ours, NAMESPACE, caller="me"), None)  # type: ignore[arg-type]
                return
            controller = ScriptedController(theirs, script)
            await scenario(FleetClient(ours, NAMESPACE, caller="me"), controller)
            await controller.aclose()

    run(body())


def answer_ok(request: ControlRequest, _nth: int) -> list[ControlReply | float]:
    """The script of a controller where everything is well."""
    if isinstance(request, GetFleet | WaitReady):
        return [VIEW]
    if isinstance(request, CancelOp):
        return [OpAccepted(op_id=request.op_id)]
    return [OpAccepted(op_id=request.op_id), OpResult(report=report_of(request.op_id))]


def test_a_pause_returns_its_report_and_carries_its_arguments() -> None:
    """The request has op id, caller, deadline, target, mode and lease; the report is the controller's."""

    async def scenario(fleet: FleetClient, controller: ScriptedController) -> None:
        target = Target(components=("decode",))
        report = await fleet.pause(target, mode="abort", clear_cache=False, lease_s=60.0, deadline_s=7.0)
        [request] = controller.requests
        assert request == PauseFleet(
            op_id=report.op_id,
            deadline_s=7.0,
            caller="me",
            target=target,
            mode=PauseMode.ABORT,
            clear_cache=False,
            lease_s=60.0,
        )
        assert report.status is OpStatus.OK

    play(answer_ok, scenario)


@pytest.mark.parametrize("seconds", [float("inf"), float("nan")])
def test_a_number_that_json_does_not_have_is_refused_before_it_is_sent(seconds: float) -> None:
    """It would arrive as null: a lease of it as a hold for ever, a deadline of it as nothing that anybody can read."""

    async def scenario(fleet: FleetClient, controller: ScriptedController) -> None:
        asked: list[tuple[str, Awaitable[object]]] = [
            ("lease_s", fleet.pause(lease_s=seconds)),
            ("deadline_s", fleet.resume(deadline_s=seconds)),
            ("deadline_s", fleet.status(deadline_s=seconds)),
            ("deadline_s", fleet.wait_ready(num_workers=1, deadline_s=seconds)),
            ("deadline_s", fleet.cancel("op", deadline_s=seconds)),
            ("deadline_s", fleet.load_lora("policy", "/nonexistent", deadline_s=seconds)),
            ("drain_s", fleet.unload_lora("policy", drain_s=seconds)),
        ]
        for name, verb in asked:
            with pytest.raises(ConfigError, match=f"{name}=(inf|nan)"):
                await verb
        assert controller.requests == []

    play(answer_ok, scenario)


def test_every_verb_sends_its_own_request() -> None:
    """resume, flush, abort, reload, versions, status, sleep and wake reach the subjects of their ops."""

    async def scenario(fleet: FleetClient, controller: ScriptedController) -> None:
        await fleet.resume(force=True)
        await fleet.flush()
        await fleet.abort(request_ids=["a", "b"])
        await fleet.reload("/weights", version=Version(step=3), allow_rollback=True)
        await fleet.versions()
        assert await fleet.status() == VIEW
        await fleet.sleep(tags=["weights", "kv_cache", "weights"], level=2, mode="keep")
        await fleet.wake(tags=["kv_cache"])
        assert [type(r).__name__ for r in controller.requests] == [
            "ResumeFleet",
            "FlushFleet",
            "AbortFleet",
            "ReloadFleet",
            "GetVersions",
            "GetFleet",
            "SleepFleet",
            "WakeFleet",
        ]
        sleep, wake = controller.requests[6], controller.requests[7]
        assert isinstance(sleep, SleepFleet)
        assert (sleep.tags, sleep.level, sleep.mode) == (("kv_cache", "weights"), 2, "keep")
        assert isinstance(wake, WakeFleet)
        assert wake.tags == ("kv_cache",)
        abort, reload = controller.requests[2], controller.requests[3]
        assert isinstance(controller.requests[1], FlushFleet)
        assert isinstance(abort, AbortFleet)
        assert abort.request_ids == ("a", "b")
        assert isinstance(reload, ReloadFleet)
        assert (reload.path, reload.version, reload.allow_rollback) == ("/weights", Version(step=3), True)

    play(answer_ok, scenario)


def test_no_controller_is_one_clear_error_at_once() -> None:
    """Nobody listens: BrokenError that says what to start, without waiting."""

    async def scenario(fleet: FleetClient, _controller: ScriptedController) -> None:
        started = asyncio.get_running_loop().time()
        with pytest.raises(BrokenError) as caught:
            await fleet.status()
        assert asyncio.get_running_loop().time() - started < 1.0
        assert str(caught.value) == (
            "namespace test: no controller answers; start one with `rlbus controller` or `rlbus up`, "
            "or check the namespace"
        )

    play(None, scenario)


def test_a_controller_that_never_answers_ends_in_a_deadline() -> None:
    """It takes requests and is silent: DeadlineError after the limit of the first answer, far below the deadline."""

    async def scenario(fleet: FleetClient, controller: ScriptedController) -> None:
        started = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineError, match="the controller of namespace test doesn't answer"):
            await fleet.pause(deadline_s=600.0)
        assert 15.0 <= asyncio.get_running_loop().time() - started <= 21.0
        assert {r.op_id for r in controller.requests} == {controller.requests[0].op_id}

    play(lambda _request, _nth: [], scenario)


def test_a_lost_reply_is_recovered_by_the_same_op_id() -> None:
    """The result is lost: the same request is sent again after the silence, and gets the recorded result."""

    def script(request: ControlRequest, nth: int) -> list[ControlReply | float]:
        if nth == 1:
            return [OpAccepted(op_id=request.op_id)]
        return [OpResult(report=report_of(request.op_id))]

    async def scenario(fleet: FleetClient, controller: ScriptedController) -> None:
        report = await fleet.pause()
        assert len(controller.requests) == 2
        assert controller.requests[0] == controller.requests[1]
        assert report.op_id == controller.requests[0].op_id

    play(script, scenario)


def test_an_op_id_of_the_caller_joins_the_op_it_names() -> None:
    """A caller that lost its process asks for the report by the op id that it kept."""

    async def scenario(fleet: FleetClient, controller: ScriptedController) -> None:
        report = await fleet.pause(op_id="kept-1")
        assert controller.requests[0].op_id == "kept-1"
        assert report.op_id == "kept-1"

    play(answer_ok, scenario)


def test_progress_is_forwarded_and_a_raising_handler_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Each OpProgress reaches the handler; one that raises is logged, and the report still comes."""

    def script(request: ControlRequest, _nth: int) -> list[ControlReply | float]:
        first = OpProgress(op_id=request.op_id, phase="pause", done=1, total=2)
        second = OpProgress(op_id=request.op_id, phase="pause", done=2, total=2)
        return [OpAccepted(op_id=request.op_id), first, 1.0, second, OpResult(report=report_of(request.op_id))]

    seen: list[int] = []

    def handler(progress: OpProgress) -> None:
        seen.append(progress.done)
        raise ValueError("display is broken")

    async def scenario(fleet: FleetClient, _controller: ScriptedController) -> None:
        assert (await fleet.pause(on_progress=handler)).status is OpStatus.OK

    with caplog.at_level(logging.ERROR, "rlbus.client"):
        play(script, scenario)
    assert seen == [1, 2]
    assert len(caplog.records) == 2


def test_a_refusal_becomes_the_error_of_its_code() -> None:
    """`busy` and `no_worker` come as their classes, with the data of the fault."""

    def script(request: ControlRequest, nth: int) -> list[ControlReply | float]:
        code = FaultCode.BUSY if nth == 1 else FaultCode.NO_WORKER
        return [Refusal(op_id=request.op_id, fault=Fault(code=code, message="no", detail={"op_id": "running-1"}))]

    async def scenario(fleet: FleetClient, _controller: ScriptedController) -> None:
        with pytest.raises(BusyError) as caught:
            await fleet.pause()
        assert caught.value.running_op_id == "running-1"
        with pytest.raises(NoWorkerError):
            await fleet.pause()

    play(script, scenario)


def test_a_partial_report_raises_with_the_report_unless_told_not_to_check() -> None:
    """check=True raises PartialError with every outcome; check=False returns the same report."""
    fault = Fault(code=FaultCode.ENGINE_FAILED, message="boom")

    def script(request: ControlRequest, _nth: int) -> list[ControlReply | float]:
        return [OpResult(report=report_of(request.op_id, OpStatus.PARTIAL, fault))]

    async def scenario(fleet: FleetClient, _controller: ScriptedController) -> None:
        with pytest.raises(PartialError) as caught:
            await fleet.pause()
        assert caught.value.report.outcomes[0].fault == fault
        assert "backend/1 failed in pause: boom" in str(caught.value)
        assert (await fleet.pause(check=False)).status is OpStatus.PARTIAL

    play(script, scenario)


def test_a_refused_report_raises_the_class_of_its_fault_with_the_report_as_cause() -> None:
    """An op that ended `refused` by report is told like a refusal, and the report isn't lost."""
    fault = Fault(code=FaultCode.BUSY, message="busy", detail={"op_id": "x"})

    def script(request: ControlRequest, _nth: int) -> list[ControlReply | float]:
        report = Report(
            op_id=request.op_id, op="pause", status=OpStatus.REFUSED, outcomes=(), phases_s={}, took_s=0.0, fault=fault
        )
        return [OpResult(report=report)]

    async def scenario(fleet: FleetClient, _controller: ScriptedController) -> None:
        with pytest.raises(BusyError) as caught:
            await fleet.pause()
        assert isinstance(caught.value.__cause__, PartialError)
        assert caught.value.__cause__.report.status is OpStatus.REFUSED

    play(script, scenario)


def test_a_cancelled_verb_takes_its_op_back() -> None:
    """The caller is cancelled while the op runs: the controller gets CancelOp for it, and CancelledError passes."""

    def script(request: ControlRequest, _nth: int) -> list[ControlReply | float]:
        return [OpAccepted(op_id=request.op_id)]

    async def scenario(fleet: FleetClient, controller: ScriptedController) -> None:
        task = asyncio.create_task(fleet.pause())
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cancel = controller.requests[-1]
        assert isinstance(cancel, CancelOp)
        assert cancel.of_op_id == controller.requests[0].op_id
        assert cancel.caller == "me"

    play(script, scenario)


def test_a_controller_that_dies_meanwhile_is_reported_as_lost() -> None:
    """It accepted, then it is gone for longer than `lost_s`: BrokenError naming the op, its outcome unknown."""

    async def body() -> None:
        broker = MemoryBroker()
        theirs = Bus(broker.connect(), clock=LoopClock())
        async with Bus(broker.connect(), clock=LoopClock(), new_id=sequential_ids("op")) as ours:
            controller = ScriptedController(theirs, lambda request, _nth: [OpAccepted(op_id=request.op_id)])
            task = asyncio.create_task(FleetClient(ours, NAMESPACE).reload("/weights"))
            await asyncio.sleep(1.0)
            await controller.aclose()
            await theirs.aclose()
            started = asyncio.get_running_loop().time()
            with pytest.raises(BrokenError, match=r"went away while op .* \(reload\) ran; its outcome is unknown"):
                await task
            assert asyncio.get_running_loop().time() - started < 40.0

    run(body())


def test_waiting_for_readiness_waits_for_the_controller_too() -> None:
    """The controller comes up after 20 s: wait_ready still gets its view."""

    async def body() -> None:
        broker = MemoryBroker()
        async with Bus(broker.connect(), clock=LoopClock()) as ours, Bus(broker.connect(), clock=LoopClock()) as theirs:
            task = asyncio.create_task(FleetClient(ours, NAMESPACE).wait_ready(world_size=4, deadline_s=60.0))
            await asyncio.sleep(20.0)
            controller = ScriptedController(theirs, answer_ok)
            assert await task == VIEW
            request = controller.requests[0]
            assert isinstance(request, WaitReady)
            assert (request.world_size, request.num_workers) == (4, None)
            assert 39.0 <= request.deadline_s <= 40.0
            await controller.aclose()

    run(body())


def test_waiting_for_readiness_without_any_controller_ends_at_its_deadline() -> None:
    """No controller in 60 s: one BrokenError that says what to start."""

    async def scenario(fleet: FleetClient, _controller: ScriptedController) -> None:
        with pytest.raises(BrokenError, match="no controller answers"):
            await fleet.wait_ready(num_workers=1, deadline_s=60.0)
        assert 60.0 <= asyncio.get_running_loop().time() <= 70.0

    play(None, scenario)


def test_a_fleet_that_is_not_ready_in_time_says_who_is_missing() -> None:
    """The controller's `deadline` refusal becomes a DeadlineError with its words."""

    def script(request: ControlRequest, _nth: int) -> list[ControlReply | float]:
        fault = Fault(code=FaultCode.DEADLINE, message="2 of 4 ranks; missing: 2")
        return [OpAccepted(op_id=request.op_id), 3.0, Refusal(op_id=request.op_id, fault=fault)]

    async def scenario(fleet: FleetClient, _controller: ScriptedController) -> None:
        with pytest.raises(DeadlineError, match="wait_ready did not end within 3 s: 2 of 4 ranks; missing: 2"):
            await fleet.wait_ready(world_size=4, deadline_s=3.0)

    play(script, scenario)


def test_a_disconnect_is_survived_within_the_deadline() -> None:
    """Our connection is down when the op is asked for, and back after 3 s: the report comes."""

    async def body() -> None:
        broker = MemoryBroker()
        transport = broker.connect()
        async with Bus(transport, clock=LoopClock()) as ours, Bus(broker.connect(), clock=LoopClock()) as theirs:
            controller = ScriptedController(theirs, answer_ok)
            broker.disconnect(transport)
            task = asyncio.create_task(FleetClient(ours, NAMESPACE).pause())
            await asyncio.sleep(3.0)
            broker.reconnect(transport)
            assert (await task).status is OpStatus.OK
            await controller.aclose()

    run(body())


def test_cancelling_an_unknown_op_is_refused() -> None:
    """`cancel` passes the controller's refusal on."""

    def script(request: ControlRequest, _nth: int) -> list[ControlReply | float]:
        return [Refusal(op_id=request.op_id, fault=Fault(code=FaultCode.UNKNOWN_OP, message="no such op"))]

    async def scenario(fleet: FleetClient, controller: ScriptedController) -> None:
        with pytest.raises(Exception, match="controller: no such op \\[unknown_op\\]"):
            await fleet.cancel("nobody")
        assert isinstance(controller.requests[0], CancelOp)

    play(script, scenario)


def test_a_word_that_is_no_pause_mode_is_a_config_error() -> None:
    """A typo is told before anything is sent."""

    async def scenario(fleet: FleetClient, controller: ScriptedController) -> None:
        with pytest.raises(ConfigError, match="use keep, wait or abort"):
            await fleet.pause(mode="stop")
        assert controller.requests == []

    play(answer_ok, scenario)


def test_watch_delivers_events_in_order_and_ends_with_its_context() -> None:
    """Events of the controller come one by one; none for a while is a DeadlineError."""

    async def scenario(fleet: FleetClient, controller: ScriptedController) -> None:
        event: ControllerEvent = OpEnded(at=1.0, op_id="a", op="pause", status="ok", took_s=0.5)
        async with fleet.watch() as events:
            controller.bus.publish(subjects.controller_event(NAMESPACE, "op_ended"), event)
            assert await events.next(1.0) == event
            with pytest.raises(DeadlineError):
                await events.next(1.0)

    play(answer_ok, scenario)


def test_a_watcher_that_does_not_read_is_told_that_events_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded; after what it held comes an error, never a silent gap."""
    monkeypatch.setattr("rlbus.client.MAX_QUEUED_EVENTS", 2)

    async def body() -> None:
        events = EventStream()
        message = Message(subject="s", data=b"")
        for n in range(3):
            events.offer(OpEnded(at=float(n), op_id="a", op="pause", status="ok", took_s=0.5), message)
        assert (await events.next(1.0)).at == 0.0
        assert (await events.next(1.0)).at == 1.0
        with pytest.raises(BrokenError, match="some are lost"):
            await events.next(1.0)

    run(body())
