"""The parties of a simulated run: processes that can die, each with a connection, a clock and a source of ids.

A crash is abrupt: the connection is dead before the process notices anything, so that nothing it does on its way out
is seen by anybody.
"""

import asyncio
import random
from dataclasses import replace
from typing import Any, cast

from rlbus._memory import NO_FAULTS, MemoryTransport
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.errors import RLBusError
from rlbus.schemas import Command, GroupPlan, JoinedData, RankSpan, TensorSpec, Version, WorkerId, route_of
from rlbus.testing import LoopClock, MemoryBroker, sequential_ids
from rlbus.trainer import Trainer
from rlbus.transfer.fake import FakePlane, FakePlaneScript
from rlbus.transfer.plane import ProgressFn, Sent, WeightSource
from rlbus.workers.agent import Agent
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.base import ReceiveOrder
from rlbus.workers.engines.fake import INITIAL, FakeEngine
from rlbus.workers.engines.fake_requests import FakeRequest
from rlbus.workers.engines.fake_script import FakeScript
from rlbus.workers.journal import Record
from tests.simulation.engine_faults import DrawnScript
from tests.simulation.scenario import HEARTBEAT_S, Scenario
from tests.simulation.stopping import GATE, Gate, gated
from tests.simulation.truth import CURRENT, Boot, Truth

NAMESPACE = "sim"
COMPONENT = "backend"
TENSORS = (
    TensorSpec(name="a", dtype="float32", shape=(4, 4)),
    TensorSpec(name="b", dtype="float32", shape=(4,)),
    TensorSpec(name="c", dtype="float32", shape=(2, 2)),
)
# How long a step of a simulated engine takes, in seconds.
STEP_S = 0.2
# Part of the crashes of a trainer in mid-send after which receivers hang instead of noticing.
HANG_PART = 0.5
# How long the end of a process is waited for, in seconds.
END_LIMIT_S = 60.0


class TracedBroker(MemoryBroker):
    """A broker that notes every message in the run's trace."""

    def __init__(self, truth: Truth, seed: int) -> None:
        super().__init__(seed=seed)
        self._truth = truth

    def _route(self, publisher: MemoryTransport, message: Message) -> None:
        self._truth.message(message.subject, message.data)
        super()._route(publisher, message)

    def _schedule(self) -> None:
        # The server goes on when whoever published last stands still.
        token = GATE.set(None)
        try:
            super()._schedule()
        finally:
            GATE.reset(token)


class SkewedClock:
    """A party's clock, some seconds off."""

    def __init__(self, skew_s: float) -> None:
        self._skew_s = skew_s
        self._clock = LoopClock()

    def now(self) -> float:
        """Unix time as this party believes it to be."""
        return self._clock.now() + self._skew_s


class Fabric:
    """The data plane between trainer and engines: by group and op, what is sent; engines wait for it."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], asyncio.Future[tuple[Version, int | None]]] = {}

    def stream(self, group_id: str, op_id: str) -> asyncio.Future[tuple[Version, int | None]]:
        """(the version that is sent, how many tensors until the sender gives up; None: all)."""
        key = (group_id, op_id)
        if key not in self._streams:
            self._streams[key] = asyncio.get_running_loop().create_future()
        return self._streams[key]

    def end(self, group_id: str, op_id: str, version: Version, num_tensors: int | None) -> None:
        """What was sent, in the end."""
        stream = self.stream(group_id, op_id)
        if not stream.done():
            stream.set_result((version, num_tensors))


class SimPlane(FakePlane):
    """The trainer's end of the fabric."""

    def __init__(self, fabric: Fabric, sender_id: str, send_s: float, rng: random.Random) -> None:
        super().__init__(FakePlaneScript(send_s=send_s, send_parts=2), sender_id=sender_id)
        self._fabric = fabric
        self._rng = rng

    async def send(
        self,
        source: WeightSource,
        specs: Any,
        *,
        bucket_bytes: int,
        version: Version,
        stream_id: str,
        on_progress: ProgressFn,
    ) -> Sent:
        """As FakePlane; one that is cut off leaves receivers with a part, or hanging."""
        group_id = "" if self.plan is None else self.plan.group_id
        op_id = stream_id
        try:
            sent = await super().send(
                source, specs, bucket_bytes=bucket_bytes, version=version, stream_id=stream_id, on_progress=on_progress
            )
        except BaseException:
            if self._rng.random() >= HANG_PART:
                self._fabric.end(group_id, op_id, version, self._rng.randrange(len(TENSORS)))
            raise
        self._fabric.end(group_id, op_id, version, None)
        return sent


class SimEngine(FakeEngine):
    """A fake engine whose weights come from the fabric, and which notes what really happens to it."""

    def __init__(self, truth: Truth, boot: Boot, fabric: Fabric, script: DrawnScript, world_size: int) -> None:
        super().__init__(
            cast(FakeScript, script), world_size=world_size, tensors=TENSORS, step_s=STEP_S, feed=self._from_trainer
        )
        self._truth = truth
        self._boot = boot
        self._fabric = fabric
        self._group_id = ""
        self._coming: Version | None = None
        self._num_requests = 0
        # The process is gone: what its remains do is nobody's business.
        self.is_crashed = False

    @property
    def is_dead(self) -> bool:
        """Whether it died by itself."""
        return self._is_dead

    @property
    def truth_version(self) -> Version | None:
        """The version of every weight; None: torn."""
        held = set(self.held.values())
        return held.pop() if len(held) == 1 else None

    async def join_group(self, plan: GroupPlan, span: RankSpan) -> JoinedData:
        """See `Engine`."""
        self._group_id = ""
        if not self.is_crashed:
            self._truth.joined(self._boot, plan.epoch)
        joined = await super().join_group(plan, span)
        self._group_id = plan.group_id
        return joined

    async def finish_update(self, version: Version) -> None:
        """See `Engine`."""
        update_op_id = "" if self.session is None else self.session.update_op_id
        await super().finish_update(version)
        if not self.is_crashed:
            self._truth.committed(self._boot, version, self.held, update_op_id)

    def generate(self, num_tokens: int) -> None:
        """Take a request of so many tokens."""
        self._num_requests += 1
        # Few prompts, so that caches are hit.
        prompt = (self._num_requests % 3,)
        requests: list[FakeRequest] = []
        requests.append(self.submit(f"r{self._num_requests}", prompt, num_tokens, lambda: self._on_token(requests[0])))

    def _on_token(self, request: FakeRequest) -> None:
        if not self.is_crashed:
            label = INITIAL if self.label is None else self.label
            is_stale = request.prefix != request.spans[-1].signature
            self._truth.token(self._boot, label, self.held.values(), is_stale)

    def _note(self, verb: str) -> Any:
        if verb not in ("observe", "start", "check_manifest") and not self.is_crashed:
            self._truth.called(self._boot, verb)
        return super()._note(verb)

    async def _from_trainer(self, order: ReceiveOrder) -> int | None:
        stream = self._fabric.stream(self._group_id, order.update_op_id)
        self._coming, num_tensors = await asyncio.shield(stream)
        return num_tensors

    def _write(self, spec: TensorSpec, version: Version) -> None:
        super()._write(spec, version if self._coming is None else self._coming)


def counted(transport: MemoryTransport, truth: Truth) -> None:
    """Count what is drawn for the messages of `transport`."""
    draw = transport._faulty_dues

    def drawn(subject: str, *, outgoing: bool) -> list[float]:
        dues_s = draw(subject, outgoing=outgoing)
        if transport.faults == NO_FAULTS:
            return dues_s
        if not dues_s:
            truth.count("fault drop")
        elif len(dues_s) > 1:
            truth.count("fault duplicate")
        elif dues_s[0] != (transport._out_due_s if outgoing else transport._in_due_s):
            truth.count("fault reorder")
        elif dues_s[0] > truth.now_s:
            truth.count("fault delay")
        return dues_s

    transport._faulty_dues = drawn  # type: ignore[method-assign]


class Process:
    """One process of the run: a connection and a task that serves. Subclasses say what it does in `_serve`."""

    def __init__(self, scenario: Scenario, truth: Truth, broker: TracedBroker, name: str, skew_s: float) -> None:
        self.name = name
        self.gate = Gate()
        self._scenario = scenario
        self._truth = truth
        self._broker = broker
        self.transport = broker.connect(name, faults=scenario.faults)
        gated(self.transport, self.gate)
        counted(self.transport, truth)
        self.bus = Bus(self.transport, clock=SkewedClock(skew_s), new_id=sequential_ids(name))
        self.is_running = True
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to serve."""
        self._truth.note(self.name, "starts")
        with self.gate.inside():
            self._task = asyncio.get_running_loop().create_task(self._serve(), name=self.name)
        self._task.add_done_callback(self._on_end)

    async def crash(self) -> None:
        """Die at once. Returns when nothing of it runs any more, or after a while."""
        if not self.is_running:
            return
        self._truth.note(self.name, "crashes")
        self.is_running = False
        self._broker.disconnect(self.transport)
        # One that stands still would not even end.
        self.gate.open()
        await self.bus.aclose()
        if self._task is not None:
            self._task.cancel()
            await asyncio.sleep(0)
            self._task.cancel()
            await self._wait_end()

    async def _wait_end(self) -> None:
        assert self._task is not None
        await asyncio.wait({self._task}, timeout=END_LIMIT_S)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self.is_running:
            self._truth.broken("I0", f"{self.name} ended: {error!r}")

    def lag(self, delay_s: tuple[float, float]) -> None:
        """What it says and hears is late from now on, by so many seconds."""
        self.transport.faults = replace(self.transport.faults, delay_s=delay_s)

    def unlag(self) -> None:
        """As it was drawn."""
        self.transport.faults = self._scenario.faults

    def calm(self) -> None:
        """The faults end: it runs, messages arrive, and the connection stands."""
        self.gate.open()
        self.transport.faults = type(self.transport.faults)()
        self._broker.heal(self.transport)
        if self.is_running:
            self._broker.reconnect(self.transport)

    async def _serve(self) -> None:
        raise AssertionError(f"{self.name} doesn't serve")


class WorkerProcess(Process):
    """One life of a worker."""

    def __init__(
        self, scenario: Scenario, truth: Truth, broker: TracedBroker, fabric: Fabric, number: int, boot: int
    ) -> None:
        super().__init__(scenario, truth, broker, f"w{number}-{boot}", scenario.skews_s[number])
        self.number = number
        self.worker = WorkerId(f"{COMPONENT}/{number}")
        self.boot = Boot(self.worker, boot)
        rng = random.Random(f"engine/{scenario.seed}/{number}/{boot}")
        self.script = DrawnScript(scenario, rng, truth.count)
        self.engine = SimEngine(truth, self.boot, fabric, self.script, scenario.sizes[number])
        self.agent: Agent | None = None
        # When what is announced of it stopped being true, as far as is known.
        self.wrong_since_s: float | None = None
        # Its next boot is on its way.
        self.is_leaving = False
        # The controller whose belief that is about.
        self.judge: object = None

    async def crash(self) -> None:
        """See Process."""
        self.engine.is_crashed = True
        await self.engine.aclose()
        await super().crash()

    async def leave(self) -> None:
        """End as it does when it is asked to (SIGTERM): with a goodbye."""
        if self.agent is None or self._task is None or not self.is_running:
            return
        self._truth.note(self.name, "is stopped")
        self.agent.stop()
        await self._wait_end()
        await self.crash()

    def calm(self) -> None:
        """See Process; the engine also does as it is told."""
        super().calm()
        self.script.is_calm = True

    async def _serve(self) -> None:
        await self.engine.start()
        self.agent = agent = Agent(
            self.engine,
            self.bus,
            namespace=NAMESPACE,
            component=COMPONENT,
            instance_id=str(self.number),
            config=AgentConfig(heartbeat_s=HEARTBEAT_S),
        )
        begin = agent._slot.begin

        def noted(command: Command, record: Record, takes_back: str | None) -> None:
            if self.engine.is_crashed:
                begin(command, record, takes_back)
                return
            late_s = self.bus.clock.now() - command.expires_at
            begun = self._truth.begun(self.boot, command.op_id, command.term, route_of(command.body), late_s)
            token = CURRENT.set(begun)
            try:
                begin(command, record, takes_back)
            finally:
                CURRENT.reset(token)

        agent._slot.begin = noted  # type: ignore[method-assign]
        await agent.run()


class TrainerProcess(Process):
    """One life of a trainer; its calls are made by whoever plays the run."""

    def __init__(self, scenario: Scenario, truth: Truth, broker: TracedBroker, fabric: Fabric, boot: int) -> None:
        super().__init__(scenario, truth, broker, f"t{boot}", scenario.skews_s[-3])
        rng = random.Random(f"trainer/{scenario.seed}/{boot}")
        self.plane = SimPlane(fabric, f"sender-{boot}", scenario.send_s, rng)
        self.trainer = Trainer(self.bus, NAMESPACE, self.plane, caller=self.name)
        self.calls: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """It serves nobody by itself."""
        self._truth.note(self.name, "starts")

    async def crash(self) -> None:
        """See Process; calls in progress die with it."""
        for call in sorted(self.calls, key=lambda task: task.get_name()):
            call.cancel()
        await super().crash()
        try:
            await self.plane.aclose()
        except RLBusError as exc:
            self._truth.note(self.name, f"plane: {exc}")


class OperatorProcess(Process):
    """Whoever uses the fleet's verbs."""

    def __init__(self, scenario: Scenario, truth: Truth, broker: TracedBroker) -> None:
        super().__init__(scenario, truth, broker, "op", scenario.skews_s[-4])
        self.client = FleetClient(self.bus, NAMESPACE, caller="operator")

    def start(self) -> None:
        """It serves nobody by itself."""
