"""The trainer without asyncio: its own loop in a thread, here over the in-memory bus, in fractions of real seconds."""

import asyncio
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rlbus
from rlbus import _conversation, subjects
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.config import BusConfig
from rlbus.errors import BrokenError, ClosedError, TransferError
from rlbus.schemas import (
    CancelOp,
    ControlRequest,
    FleetView,
    GetFleet,
    GroupPlan,
    JoinTask,
    OpAccepted,
    OpProgress,
    OpResult,
    OpStatus,
    PauseFleet,
    PutManifestPage,
    Rendezvous,
    Report,
    SenderSignal,
    SenderStep,
    SendTask,
    TensorSpec,
    TensorSum,
    TransferFleet,
    UpdateWeights,
    Version,
    WaitReady,
)
from rlbus.sync import LoopThread
from rlbus.testing import MemoryBroker
from rlbus.transfer.plane import Sent

pytestmark = pytest.mark.unit

SPECS = (TensorSpec(name="a", dtype="float32", shape=(2,)),)
# What the controller is asked by an update that was interrupted, beside signals; each more often on a machine so slow
# that the answer comes late.
ENDED = [PutManifestPage, UpdateWeights, CancelOp]
VIEW = FleetView(namespace="test", term=1, version=None, epoch=None, op_id=None, members=())


class Source:
    """One announced tensor, without torch."""

    def specs(self) -> tuple[TensorSpec, ...]:
        """What it yields."""
        return SPECS

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter([("a", None)])


class Plane:
    """A data plane that sends for `send_s`."""

    backend = "fake"
    sender_id = "me"
    num_ranks = 1

    def __init__(self, send_s: float = 0.0) -> None:
        self.calls: list[str] = []
        self._send_s = send_s

    async def rendezvous(self) -> Rendezvous:
        """Where to meet."""
        return Rendezvous(host="127.0.0.1", port=1, prefix="p")

    async def join(self, plan: GroupPlan) -> None:
        """Join."""
        self.calls.append("join")

    async def send(self, source: Any, specs: Any, **_: Any) -> Sent:
        """Send, from the background thread."""
        self.calls.append(f"send on {threading.current_thread().name}")
        await asyncio.sleep(self._send_s)
        return Sent(num_bytes=8, num_tensors=1, sums=(TensorSum(name="a", checksum="0" * 16),), send_s=self._send_s)

    async def leave(self, reason: str) -> None:
        """Leave."""
        self.calls.append(f"leave: {reason}")

    async def aclose(self) -> None:
        """Close."""
        self.calls.append("aclose")


class Controller:
    """Answers everything well; an update goes join, send, report."""

    def __init__(self, bus: Bus) -> None:
        self.requests: list[ControlRequest] = []
        self.is_sending = threading.Event()
        self._bus = bus
        self._update: tuple[UpdateWeights, str] | None = None
        self._heard: set[tuple[str, SenderStep]] = set()
        bus.subscribe(subjects.all_control("test"), ControlRequest, self._on_request)

    def _on_request(self, request: ControlRequest, message: Message) -> None:
        assert message.reply is not None
        self.requests.append(request)
        match request:
            case UpdateWeights():
                self._update = (request, message.reply)
                plan = GroupPlan(
                    epoch=1,
                    group_id="g1",
                    backend="fake",
                    num_trainer_ranks=1,
                    world_size=2,
                    spans=(),
                    rendezvous=request.rendezvous,
                    bucket_bytes=1,
                )
                self._bus.publish(message.reply, JoinTask(op_id=request.op_id, plan=plan))
            case WaitReady() | GetFleet():
                self._bus.publish(message.reply, VIEW)
            case SenderSignal():
                self._bus.publish(message.reply, OpAccepted(op_id=request.op_id))
                self._on_signal(request)
            case _:
                self._bus.publish(message.reply, OpAccepted(op_id=request.op_id))

    def _on_signal(self, signal: SenderSignal) -> None:
        assert self._update is not None
        update, reply = self._update
        if signal.step is SenderStep.ALIVE and signal.epoch:
            self.is_sending.set()
        if signal.step is SenderStep.JOINED:
            # Each time: a trainer that stood still has an inbox of its own for every time that it asks.
            self._bus.publish(reply, OpProgress(op_id=update.op_id, phase="transfer"))
            self._bus.publish(reply, SendTask(op_id=update.op_id, epoch=1, version=update.version))
        if (update.op_id, signal.step) in self._heard:
            return  # its answer came late
        self._heard.add((update.op_id, signal.step))
        if signal.step is SenderStep.SENT:
            report = Report(
                op_id=update.op_id,
                op="update_weights",
                status=OpStatus.OK,
                outcomes=(),
                phases_s={},
                took_s=0.1,
                version=update.version,
                num_bytes=8,
            )
            self._bus.publish(reply, OpResult(report=report))


@pytest.fixture
def controllers(monkeypatch: pytest.MonkeyPatch) -> list[Controller]:
    """Connect to a bus in memory that has a controller; the list gets it."""
    made: list[Controller] = []

    async def connect_bus(config: BusConfig, *, name: str) -> Bus:
        broker = MemoryBroker()
        made.append(Controller(Bus(broker.connect())))
        return Bus(broker.connect())

    monkeypatch.setattr("rlbus.connecting.connect_bus", connect_bus)
    monkeypatch.setattr(_conversation, "CANCEL_LIMIT_S", 60.0)
    return made


def trainer(plane: Plane | None = None) -> rlbus.Trainer:
    """A trainer on the namespace of the tests."""
    return rlbus.Trainer("nats://127.0.0.1:1", namespace="test", plane=Plane() if plane is None else plane)


def num_loop_threads() -> int:
    """How many background loops run."""
    return sum(thread.name == "rlbus-trainer" for thread in threading.enumerate())


def test_a_plain_script_waits_updates_and_closes(controllers: list[Controller]) -> None:
    """wait_ready, update_weights and status return values; the thread is gone afterwards, and the plane closed."""
    plane = Plane()
    phases: list[str] = []
    with trainer(plane) as t:
        assert t.wait_ready(world_size=2) == VIEW
        report = t.update_weights(Source(), version=3, on_progress=lambda progress: phases.append(progress.phase))
        assert t.status() == VIEW
        assert t.version == Version(step=3)
        assert num_loop_threads() == 1
    assert (report.ok, report.num_bytes, report.version) == (True, 8, Version(step=3))
    assert phases == ["transfer"]
    assert plane.calls == ["join", "send on rlbus-trainer", "aclose"]
    assert num_loop_threads() == 0


def test_it_can_be_called_from_another_thread(controllers: list[Controller]) -> None:
    """The thread that calls need not be the one that connected."""
    versions: list[Version | None] = []
    with trainer() as t:
        thread = threading.Thread(target=lambda: versions.append(t.update_weights(Source(), version=1).version))
        thread.start()
        thread.join(60.0)
    assert versions == [Version(step=1)]


def test_it_works_where_an_event_loop_already_runs(controllers: list[Controller]) -> None:
    """In a notebook or a coroutine it blocks, as a plain call does, and returns."""

    async def notebook() -> FleetView:
        with trainer() as t:
            return t.wait_ready(num_workers=1)

    assert asyncio.run(notebook()) == VIEW


def test_ctrl_c_takes_the_update_back_and_passes(controllers: list[Controller]) -> None:
    """KeyboardInterrupt comes out of the call after the op was cancelled and the group left; closing still works."""
    plane = Plane(send_s=60.0)

    def interrupt() -> None:
        assert controllers[0].is_sending.wait(60.0)
        signal.raise_signal(signal.SIGINT)

    with trainer(plane) as t:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            t.update_weights(Source(), version=1)
        thread.join(60.0)
        asked = [type(r) for r in controllers[0].requests if not isinstance(r, SenderSignal)]
        assert list(dict.fromkeys(asked)) == ENDED
        assert t.status() == VIEW
    assert plane.calls[-2:] == ["leave: the trainer gave the update up", "aclose"]


def test_it_is_used_in_a_with_statement_and_once(controllers: list[Controller]) -> None:
    """Before, after, and a second time are ClosedError; closing twice is fine."""
    t = trainer()
    with pytest.raises(ClosedError, match="use it in a `with` statement"):
        t.status()
    with t:
        pass
    t.close()
    with pytest.raises(ClosedError):
        t.wait_ready(num_workers=1)
    with pytest.raises(ClosedError), t:
        pass


def test_failing_to_connect_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of connecting comes out as it is."""

    async def connect_bus(config: BusConfig, *, name: str) -> Bus:
        raise BrokenError("nats://127.0.0.1:1", "no server there")

    monkeypatch.setattr("rlbus.connecting.connect_bus", connect_bus)
    with pytest.raises(BrokenError, match="no server there"), trainer():
        pass
    assert num_loop_threads() == 0


def test_a_call_from_its_own_thread_is_an_error_not_a_deadlock() -> None:
    """A callback that calls back would wait for itself for ever."""
    loop = LoopThread("rlbus-test")

    async def outer() -> str:
        async def inner() -> None: ...

        with pytest.raises(RuntimeError, match="would wait for itself"):
            loop.call(inner())
        return "told"

    assert loop.call(outer()) == "told"
    loop.stop()
    with pytest.raises(ClosedError):
        loop.call(outer())


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_ctrl_c_that_comes_while_a_call_is_handed_to_the_loop_ends_the_call(
    monkeypatch: pytest.MonkeyPatch, is_scheduled: bool
) -> None:
    """The loop may have run far ahead by then, or have heard nothing."""
    steps: list[str] = []
    is_begun = threading.Event()

    async def work() -> None:
        steps.append("begun")
        is_begun.set()
        try:
            await asyncio.sleep(60.0)
        finally:
            await asyncio.sleep(0.01)
            steps.append("undone")

    loop = LoopThread("rlbus-test")
    schedule = loop._schedule

    def interrupted(step: Callable[[], None]) -> None:
        monkeypatch.undo()
        if is_scheduled:
            schedule(step)
            assert is_begun.wait(60.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "_schedule", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.call(work())
    assert steps == (["begun", "undone"] if is_scheduled else [])
    loop.stop()


def test_a_call_that_finds_the_loop_gone_at_its_hand_over_leaves_no_coroutine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was alive when the call began."""
    loop = LoopThread("rlbus-test")
    schedule = loop._schedule

    def late(step: Callable[[], None]) -> None:
        loop.stop()
        schedule(step)

    async def work() -> None: ...

    monkeypatch.setattr(loop, "_schedule", late)
    coroutine = work()
    with pytest.raises(ClosedError):
        loop.call(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


class Exiting(Source):
    """A source that ends the process, or would."""

    def specs(self) -> tuple[TensorSpec, ...]:
        """Never."""
        raise SystemExit(3)


def test_a_source_that_exits_fails_its_update_and_nothing_else(controllers: list[Controller]) -> None:
    """SystemExit in a thread of ours is an error with that cause; the next update goes well."""
    with trainer() as t:
        with pytest.raises(TransferError, match="the source raised SystemExit: 3") as caught:
            t.update_weights(Exiting(), version=1)
        assert isinstance(caught.value.__cause__, SystemExit)
        assert t.update_weights(Source(), version=1).ok


def test_calls_after_the_loop_has_died_are_broken_at_once_and_closing_is_clean(controllers: list[Controller]) -> None:
    """Also the call in which it died."""

    def exit_now(_progress: object) -> None:
        raise SystemExit(4)

    with trainer(Plane(send_s=60.0)) as t:
        for _ in range(2):
            with pytest.raises(BrokenError, match=r"it has ended by SystemExit\(4\)"):
                t.update_weights(Source(), version=1, on_progress=exit_now)
    assert num_loop_threads() == 0


@pytest.mark.parametrize("call", ["update", "verb", "step"])
def test_closing_beside_a_call_takes_its_op_back_and_the_call_says_closed(
    controllers: list[Controller], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """What runs on another thread when the `with` statement is left, by an exception, say, holds no fleet."""

    def begins(self: Controller, request: ControlRequest, message: Message) -> None:
        if not isinstance(request, PauseFleet | TransferFleet):
            return hears(self, request, message)
        assert message.reply is not None
        self.requests.append(request)
        self._bus.publish(message.reply, OpProgress(op_id=request.op_id, phase="receive"))
        self.is_sending.set()
        return None

    hears = Controller._on_request
    monkeypatch.setattr(Controller, "_on_request", begins)
    plane, problems = Plane(send_s=60.0), list[Exception]()
    t, client = trainer(plane), rlbus.BusWeightSyncClient("nats://127.0.0.1:1", namespace="test")
    made: dict[str, tuple[Any, Callable[[], object]]] = {
        "update": (t, lambda: t.update_weights(Source(), version=1)),
        "verb": (t, t.pause),
        "step": (client, lambda: client.update_weights({})),
    }
    owner, make = made[call]

    def caught() -> None:
        try:
            make()
        except Exception as exc:  # noqa: BLE001 - it is looked at below
            problems.append(exc)

    thread = threading.Thread(target=caught)
    with owner:
        thread.start()
        assert controllers[0].is_sending.wait(60.0)
    thread.join(60.0)
    [problem] = problems
    assert isinstance(problem, ClosedError)
    assert "is taken back" in problem.__notes__[0]
    begun = next(r for r in controllers[0].requests if isinstance(r, UpdateWeights | PauseFleet | TransferFleet))
    assert {r.of_op_id for r in controllers[0].requests if isinstance(r, CancelOp)} == {begun.op_id}
    if call == "update":
        assert plane.calls[-2:] == ["leave: the trainer gave the update up", "aclose"]


def test_a_call_that_runs_when_the_loop_is_stopped_says_closed() -> None:
    """Whatever it was: its caller waits for what will never be."""
    loop = LoopThread("rlbus-test")
    is_begun = threading.Event()

    async def work() -> None:
        is_begun.set()
        await asyncio.sleep(60.0)

    def stop() -> None:
        assert is_begun.wait(60.0)
        loop.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(ClosedError):
        loop.call(work())
    thread.join(60.0)
