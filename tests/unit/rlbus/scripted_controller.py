"""For test_trainer: a controller and a data plane that follow a script, on the in-memory bus."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from rlbus import subjects
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.schemas import (
    NO_EPOCH,
    ControlReply,
    ControlRequest,
    Fault,
    GroupPlan,
    JoinTask,
    OpAccepted,
    OpProgress,
    OpResult,
    OpStatus,
    Refusal,
    Rendezvous,
    Report,
    SenderSignal,
    SenderStep,
    SendTask,
    TensorSpec,
    TensorSum,
    UpdateWeights,
)
from rlbus.testing import LoopClock, MemoryBroker, run, sequential_ids
from rlbus.trainer import Trainer
from rlbus.transfer.plane import Sent

NAMESPACE = "test"
SPECS = (
    TensorSpec(name="a", dtype="float32", shape=(2, 2)),
    TensorSpec(name="b", dtype="float32", shape=(4,)),
)
SUMS = tuple(TensorSum(name=spec.name, checksum="0123456789abcdef") for spec in SPECS)


class Source:
    """Announced tensors without torch."""

    def __init__(self, specs: Sequence[TensorSpec] = SPECS) -> None:
        self._specs = tuple(specs)

    def specs(self) -> tuple[TensorSpec, ...]:
        """What it yields."""
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter((spec.name, None) for spec in self._specs)


class ScriptedPlane:
    """A data plane that joins, sends and leaves for so many seconds, fails as told, and remembers its calls."""

    backend = "fake"
    sender_id = "me"
    num_ranks = 1

    def __init__(
        self,
        *,
        join_s: float = 0.0,
        send_s: float = 0.0,
        leave_s: float = 0.0,
        join_error: Exception | None = None,
        send_error: Exception | None = None,
    ):
        self.calls: list[str] = []
        self._join_s = join_s
        self._send_s = send_s
        self._leave_s = leave_s
        self._join_error = join_error
        self._send_error = send_error

    async def rendezvous(self) -> Rendezvous:
        """Where to meet."""
        return Rendezvous(host="127.0.0.1", port=1, prefix="p")

    async def join(self, plan: GroupPlan) -> None:
        """Join as told."""
        self.calls.append(f"join {plan.epoch}")
        await asyncio.sleep(self._join_s)
        if self._join_error is not None:
            raise self._join_error

    async def send(self, source: Any, specs: Any, **_: Any) -> Sent:
        """Send as told."""
        self.calls.append("send")
        await asyncio.sleep(self._send_s)
        if self._send_error is not None:
            raise self._send_error
        return Sent(num_bytes=32, num_tensors=2, sums=SUMS, send_s=self._send_s)

    async def leave(self, reason: str) -> None:
        """Leave."""
        self.calls.append(f"leave: {reason}")
        await asyncio.sleep(self._leave_s)

    async def aclose(self) -> None:
        """Close."""
        self.calls.append("aclose")


class Controller:
    """Takes every request and answers the short ones; `on_update` plays an update on its reply subject."""

    def __init__(self, bus: Bus, on_update: "OnUpdate") -> None:
        self.bus = bus
        self.log: list[str] = []
        self.requests: list[ControlRequest] = []
        self.refuse: dict[type[ControlRequest], Fault] = {}
        self._on_update = on_update
        self._steps: asyncio.Queue[SenderSignal] = asyncio.Queue(64)
        self._tasks: set[asyncio.Task[None]] = set()
        bus.subscribe(subjects.all_control(NAMESPACE), ControlRequest, self._on_request)

    def _on_request(self, request: ControlRequest, message: Message) -> None:
        reply = message.reply
        assert reply is not None
        self.requests.append(request)
        if isinstance(request, SenderSignal):
            if request.epoch != NO_EPOCH:  # else it only lives, as all along
                self.log.append(request.step.value)
            if request.step is not SenderStep.ALIVE:
                self._steps.put_nowait(request)
        else:
            self.log.append(type(request).__name__)
        if isinstance(request, UpdateWeights):
            self._tasks.add(asyncio.create_task(self._play(request, lambda m: self.bus.publish(reply, m))))
            return
        fault = self.refuse.get(type(request))
        answer = OpAccepted(op_id=request.op_id) if fault is None else Refusal(op_id=request.op_id, fault=fault)
        self.bus.publish(reply, answer)

    async def _play(self, request: UpdateWeights, tell: "Tell") -> None:
        """The script, with the progress every second that a controller owes."""

        async def tick() -> None:
            while True:
                await asyncio.sleep(1.0)
                tell(OpProgress(op_id=request.op_id, phase="running"))

        ticking = asyncio.create_task(tick())
        try:
            await self._on_update(self, request, tell)
        finally:
            ticking.cancel()

    async def signal(self) -> SenderSignal:
        """The trainer's next step that isn't a sign of life."""
        async with asyncio.timeout(30.0):
            return await self._steps.get()

    def updates(self) -> list[UpdateWeights]:
        """Every update that was asked for."""
        return [r for r in self.requests if isinstance(r, UpdateWeights)]

    async def aclose(self) -> None:
        """End the scripts; one that failed an assertion fails the test."""
        for task in self._tasks:
            task.cancel()
        for error in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(error, Exception):
                raise error


Tell = Callable[[ControlReply], None]
OnUpdate = Callable[[Controller, UpdateWeights, Tell], Awaitable[None]]


def plan_of(request: UpdateWeights, epoch: int = 1) -> GroupPlan:
    """The group of an update."""
    return GroupPlan(
        epoch=epoch,
        group_id=f"g{epoch}",
        backend=request.backend,
        num_trainer_ranks=1,
        world_size=2,
        spans=(),
        rendezvous=request.rendezvous,
        bucket_bytes=request.bucket_bytes,
    )


def report_of(request: UpdateWeights, status: OpStatus = OpStatus.OK, fault: Fault | None = None) -> OpResult:
    """The end of an update."""
    report = Report(
        op_id=request.op_id,
        op="update_weights",
        status=status,
        outcomes=(),
        phases_s={"group": 0.1, "transfer": 0.2},
        took_s=0.5,
        fault=fault,
        version=request.version,
        epoch=1,
        num_bytes=32,
        paused_s=0.3,
    )
    return OpResult(report=report)


async def well(controller: Controller, request: UpdateWeights, tell: Tell) -> None:
    """An update that ends well in group 1, formed anew when the trainer isn't in it."""
    tell(OpAccepted(op_id=request.op_id))
    if "joined" not in controller.log:
        tell(JoinTask(op_id=request.op_id, plan=plan_of(request)))
        assert (await controller.signal()).step is SenderStep.JOINED
    tell(OpProgress(op_id=request.op_id, phase="transfer", done=0, total=32, unit="bytes"))
    tell(SendTask(op_id=request.op_id, epoch=1, version=request.version))
    sent = await controller.signal()
    assert (sent.step, sent.num_bytes, sent.sums, sent.of_op_id) == (SenderStep.SENT, 32, SUMS, request.op_id)
    tell(report_of(request))


def play(
    scenario: Callable[[Trainer, Controller], Awaitable[None]],
    on_update: OnUpdate = well,
    plane: ScriptedPlane | None = None,
) -> list[str]:
    """Run `scenario`; returns the plane's calls."""
    used = ScriptedPlane() if plane is None else plane

    async def body() -> None:
        broker = MemoryBroker()
        async with Bus(broker.connect(), clock=LoopClock()) as theirs, Bus(broker.connect(), clock=LoopClock()) as ours:
            ours.new_id = sequential_ids("id")
            controller = Controller(theirs, on_update)
            trainer = Trainer(ours, NAMESPACE, used, caller="me")
            await scenario(trainer, controller)
            await trainer.aclose()
            await controller.aclose()

    run(body())
    return used.calls
