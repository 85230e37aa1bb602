"""For tests of the controller: a plan, a played update without any I/O, and a controller on a bus in memory.

```python
play = Play(plan_of("backend/1", "backend/2"))
play.to(Stage.PAUSE)
play.answer({"backend/2": failed()})   # the others are fine
assert play.asked(Stage.FREE) == ["backend/1"]
```
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import msgspec

from rlbus._snapshots import Snapshots
from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.connecting import open_objects
from rlbus.controller.answers import StepAnswer
from rlbus.controller.causes import fault
from rlbus.controller.report import Timings, update_report
from rlbus.controller.service import Controller, Settings
from rlbus.controller.transaction import decide
from rlbus.controller.update_state import (
    Action,
    Ask,
    Began,
    Candidate,
    Drop,
    Event,
    Plan,
    Sender,
    SenderJoined,
    SenderSent,
    Stage,
    Tell,
    UpdateState,
    WorkerAccepted,
    WorkersAnswered,
    initial,
)
from rlbus.schemas import (
    Announcement,
    Descriptor,
    FaultCode,
    Generation,
    JoinedData,
    MemberView,
    Outcome,
    ReceivedData,
    Rendezvous,
    Report,
    ResultData,
    TensorSpec,
    TensorSum,
    UpdateWeights,
    Version,
    WeightsData,
    WeightsState,
    WeightsView,
    WorkerId,
    WorkerStatus,
    split_worker_id,
)
from rlbus.testing import LoopClock, MemoryBroker, sequential_ids
from rlbus.trainer import Trainer
from rlbus.transfer.fake import FakePlane, FakeSource
from rlbus.transfer.manifest import digest, num_bytes, pages

W = TypeVar("W")

TENSORS = (
    TensorSpec(name="a", dtype="float32", shape=(4,)),
    TensorSpec(name="b", dtype="float32", shape=(2, 2)),
)
SUMS = (TensorSum(name="a", checksum="a" * 16), TensorSum(name="b", checksum="b" * 16))
V6, V7 = Version(step=6), Version(step=7)


def request_of(**changes: Any) -> UpdateWeights:
    """An update to version 7 over a fake group."""
    request = UpdateWeights(
        op_id="u",
        version=V7,
        manifest_digest=digest(TENSORS),
        backend="fake",
        rendezvous=Rendezvous(host="127.0.0.1", port=1, prefix="p"),
        sender_id="sender",
        bucket_bytes=1024,
    )
    return msgspec.structs.replace(request, **changes)


def plan_of(*workers: str, sizes: Mapping[str, int] | None = None, held: Sequence[str] = (), **changes: Any) -> Plan:
    """A plan over `workers`, each of world size 1 and of boot "boot" unless said otherwise."""
    plan_fields = {k: changes.pop(k) for k in ("current", "is_whole", "leavers", "next_epoch") if k in changes}
    candidates = tuple(Candidate(WorkerId(w), "boot", (sizes or {}).get(w, 1), is_held=w in held) for w in workers)
    plan = Plan(
        request=request_of(**changes),
        tensors=TENSORS,
        total_bytes=sum(num_bytes(spec) for spec in TENSORS),
        pages=pages(TENSORS, 100_000),
        candidates=candidates,
        next_epoch=1,
        group_timeout_s=60.0,
    )
    return replace(plan, **plan_fields)


def failed(code: FaultCode = FaultCode.ENGINE_FAILED, data: ResultData | None = None) -> StepAnswer:
    """The worker tried and failed."""
    return StepAnswer(Outcome.FAILED, fault(code, f"scripted {code.value}"), data)


def refused(code: FaultCode = FaultCode.WRONG_STATE) -> StepAnswer:
    """The worker refused."""
    return StepAnswer(Outcome.REFUSED, fault(code, f"scripted {code.value}"))


def silent(code: FaultCode = FaultCode.NO_ACK) -> StepAnswer:
    """Nobody can say."""
    return StepAnswer(Outcome.UNKNOWN, fault(code, f"scripted {code.value}"))


def weights_are(state: WeightsState, version: Version | None = None) -> StepAnswer:
    """The worker says what its weights are."""
    return StepAnswer(Outcome.OK, None, WeightsData(weights=WeightsView(state=state, version=version)))


def received(sums: tuple[TensorSum, ...] = SUMS) -> StepAnswer:
    """The worker has everything, with these sums."""
    data = ReceivedData(num_bytes=32, num_tensors=len(sums), sums=sums, receive_s=0.0, load_s=0.0)
    return StepAnswer(Outcome.OK, None, data)


class Play:
    """One update, decided step by step without I/O; the trainer and the workers do what they are asked unless told
    otherwise. `actions` has everything that was decided, in order.
    """

    def __init__(self, plan: Plan) -> None:
        self.state: UpdateState = initial(plan)
        self.actions: list[Action] = []
        self.feed(Began())

    def feed(self, event: Event) -> tuple[Action, ...]:
        """One event; what was decided."""
        self.state, actions = decide(self.state, event)
        self.actions.extend(actions)
        return actions

    def answer(self, special: Mapping[str, StepAnswer] | None = None) -> None:
        """Everybody who is pending answers: ok, or as `special` says."""
        step, special = self.state.step, special or {}
        assert step is not None
        pending = sorted(self.state.pending)
        self.feed(WorkersAnswered(step, {w: special.get(w, self._ok(w)) for w in pending}))

    def accept(self) -> None:
        """Everybody who is pending says that it runs."""
        step = self.state.step
        for worker in sorted(self.state.pending):
            assert step is not None
            self.feed(WorkerAccepted(step, worker))

    def trainer(self) -> None:
        """The trainer does what it was told."""
        epoch = 0 if self.state.group is None else self.state.group.plan.epoch
        if self.state.sender is Sender.JOINING:
            self.feed(SenderJoined(epoch))
        elif self.state.sender is Sender.SENDING:
            self.feed(SenderSent(epoch, SUMS, 32))

    def go(self) -> None:
        """One round in which everybody does what is asked."""
        if self.state.stage in (Stage.JOIN, Stage.RECEIVE):
            self.accept()
            self.trainer()
        if self.state.pending:
            self.answer()

    def to(self, stage: Stage) -> None:
        """Go on until `stage` is reached."""
        for _ in range(40):
            if self.state.stage is stage:
                return
            self.go()
        raise AssertionError(f"{stage} isn't reached; the update is in {self.state.stage}")

    def asks(self, stage: Stage) -> list[Ask]:
        """What was asked of workers in this stage."""
        return [a for a in self.actions if isinstance(a, Ask) and a.step.startswith(stage.value)]

    def asked(self, stage: Stage) -> list[WorkerId]:
        """Whom, in the first fan-out of this stage; empty: nobody."""
        asks = self.asks(stage)
        return list(asks[0].workers) if asks else []

    def told(self, kind: type[Any]) -> list[Any]:
        """What the trainer was told of this kind."""
        return [a.message for a in self.actions if isinstance(a, Tell) and isinstance(a.message, kind)]

    def report(self) -> Report:
        """How it ended, after everybody did what was asked."""
        self.to(Stage.DONE)
        return update_report(self.state, Timings())

    def steps(self) -> list[str]:
        """Everything that was decided, in order and in short."""
        return [_short(action) for action in self.actions]

    def _ok(self, worker: WorkerId) -> StepAnswer:
        if self.state.stage is Stage.JOIN:
            assert self.state.group is not None
            plan, span = self.state.group.plan, self.state.group.spans[worker]
            ranks = tuple(range(span.first, span.first + span.num_ranks))
            return StepAnswer(Outcome.OK, None, JoinedData(epoch=plan.epoch, ranks=ranks, world_size=plan.world_size))
        if self.state.stage is Stage.RECEIVE:
            return received()
        if self.state.stage is Stage.SETTLE:
            return weights_are(WeightsState.DIRTY)
        return StepAnswer(Outcome.OK)


def _short(action: Action) -> str:
    match action:
        case Ask():
            return action.step
        case Drop():
            return f"drop {action.step}"
        case Tell():
            return f"tell {action.message.__struct_config__.tag}"


def outcomes_of(report: Report) -> dict[str, tuple[str, str]]:
    """Per worker: how it ended, and in which phase."""
    return {o.worker: (o.outcome.value, o.phase) for o in report.outcomes}


def announcement(worker: str, *, boot_id: str = "boot", seq: int = 1, **changes: Any) -> Announcement:
    """What a healthy worker says of itself; `changes` go to its descriptor, status or the announcement itself."""
    component, instance_id = split_worker_id(WorkerId(worker))
    descriptor = Descriptor(
        namespace="test",
        component=component,
        instance_id=instance_id,
        engine="fake",
        model="m",
        world_size=1,
        routes=("pause_generation", "resume_generation", "update_weights_from_distributed"),
        backends=("fake",),
    )
    status = WorkerStatus(generation=Generation.RUNNING, weights=WeightsView(state=WeightsState.CLEAN))
    message = Announcement(boot_id=boot_id, seq=seq, interval_s=5.0, descriptor=descriptor, status=status)
    for name, value in changes.items():
        if name in Descriptor.__struct_fields__:
            descriptor = msgspec.structs.replace(descriptor, **{name: value})
        elif name in WorkerStatus.__struct_fields__:
            status = msgspec.structs.replace(status, **{name: value})
        else:
            message = msgspec.structs.replace(message, **{name: value})
    return msgspec.structs.replace(message, descriptor=descriptor, status=status)


@asynccontextmanager
async def controller_on_bus(
    broker: MemoryBroker, namespace: str = "test", *, settings: Settings | None = None, term: int | None = None
) -> AsyncIterator[Controller]:
    """A running controller on a bus in memory; it is stopped, and what it runs taken back, with the context.

    Cancel: likewise.
    """
    async with Bus(broker.connect(), clock=LoopClock(), new_id=sequential_ids("ctl")) as bus:
        objects = open_objects(bus, namespace)
        controller = Controller(bus, namespace, settings=settings, term=term, objects=objects)
        running = asyncio.get_running_loop().create_task(controller.run())
        await asyncio.sleep(0)
        try:
            yield controller
        finally:
            running.cancel()
            await asyncio.wait({running})
            if not running.cancelled():
                running.result()


@dataclass(slots=True)
class Fleet(Generic[W]):
    """A controller, workers, and who asks: all on one bus in memory. `plane` is the trainer's data plane."""

    broker: MemoryBroker
    controller: Controller
    workers: list[W]
    client: FleetClient
    trainer: Trainer
    plane: FakePlane

    async def update(self, step: int, tensors: Sequence[TensorSpec], **options: Any) -> Report:
        """Give the fleet version 0.`step`; a report that isn't ok is returned. Cancel: see `Trainer.update_weights`."""
        update = await self.trainer.update_weights(FakeSource(tensors), version=step, check=False, **options)
        return update.report

    async def members(self) -> dict[WorkerId, MemberView]:
        """The controller's view, by worker. Cancel: leaves nothing."""
        view = await self.client.status()
        return {m.worker: m for m in view.members}


@asynccontextmanager
async def fleet_on_bus(
    workers: Sequence[Callable[[MemoryBroker], AbstractAsyncContextManager[W]]],
    *,
    namespace: str = "test",
    settings: Settings | None = None,
    plane: FakePlane | None = None,
    snapshots: Snapshots | None = None,
) -> AsyncIterator[Fleet[W]]:
    """Start a controller and then `workers` (each a function from the broker to a context), and wait for all.

    `snapshots` is what the trainer keeps; None: nothing.
    Cancel: all of them are stopped.
    """
    broker = MemoryBroker()
    plane = FakePlane() if plane is None else plane
    async with AsyncExitStack() as stack:
        controller = await stack.enter_async_context(controller_on_bus(broker, namespace, settings=settings))
        bus = Bus(broker.connect(), clock=LoopClock(), new_id=sequential_ids("op"))
        await stack.enter_async_context(bus)
        running = [await stack.enter_async_context(worker(broker)) for worker in workers]
        client = FleetClient(bus, namespace, caller="test")
        fleet = Fleet(broker, controller, running, client, Trainer(bus, namespace, plane, snapshots=snapshots), plane)
        if running:
            await client.wait_ready(num_workers=len(running), deadline_s=30.0)
        yield fleet
