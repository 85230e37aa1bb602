"""The parties of a simulated run: processes that can die, each with a connection, a clock and a source of ids.

A crash is abrupt: the connection is dead before the process notices anything, so that nothing it does on its way out
is seen by anybody.
"""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlbus._memory import NO_FAULTS, MemoryTransport
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.errors import RLBusError
from rlbus.schemas import Command, WorkerId, route_of
from rlbus.testing import LoopClock, MemoryBroker, sequential_ids
from rlbus.trainer import Trainer
from rlbus.workers.agent import Agent
from rlbus.workers.config import AgentConfig
from rlbus.workers.journal import Record
from rlbus.workers.ledger import Ledger
from tests.simulation.engine_faults import DrawnScript
from tests.simulation.scenario import HEARTBEAT_S, Scenario
from tests.simulation.stopping import GATE, Gate, gated
from tests.simulation.truth import CURRENT, Boot, Truth
from tests.simulation.weights import ROOT, Fabric, SimEngine, SimPlane, snapshots

NAMESPACE = "sim"
COMPONENT = "backend"
# What the operator calls itself.
OPERATOR = "operator"
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


def counted(transport: MemoryTransport, truth: Truth) -> None:
    """Count what is drawn for the messages of `transport`."""
    draw = transport._faulty_dues

    def drawn(subject: str, *, outgoing: bool) -> list[float]:
        dues_s = draw(subject, outgoing=outgoing)
        if transport.faults is NO_FAULTS:
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
        self.transport.faults = NO_FAULTS
        self._broker.heal(self.transport)
        if self.is_running:
            self._broker.reconnect(self.transport)

    async def _serve(self) -> None:
        raise AssertionError(f"{self.name} doesn't serve")


class WorkerProcess(Process):
    """One life of a worker. With `folder`, where its ledger lies, it comes back as itself; then `before` is its last
    life, whose ops and terms bind it too.
    """

    def __init__(
        self,
        scenario: Scenario,
        truth: Truth,
        broker: TracedBroker,
        fabric: Fabric,
        number: int,
        boot: int,
        *,
        folder: Path | None,
        before: Boot | None,
    ) -> None:
        super().__init__(scenario, truth, broker, f"w{number}-{boot}", scenario.skews_s[number])
        self.number = number
        self.worker = WorkerId(f"{COMPONENT}/{number}")
        self.boot = Boot(self.worker, boot)
        if folder is not None and before is not None:
            self.boot = Boot(self.worker, boot, ran=before.ran, term=before.term, group=before.group)
        self.ledger = None if folder is None else Ledger.open(folder, NAMESPACE, COMPONENT, str(number))
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
        if self.ledger is not None:
            # Nothing that it does on its way out is written.
            self.ledger.close()
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
            config=AgentConfig(heartbeat_s=HEARTBEAT_S, weight_roots=(ROOT,)),
            ledger=self.ledger,
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
        kept = self.kept = snapshots(scenario.snapshot, fabric)
        self.trainer = Trainer(self.bus, NAMESPACE, self.plane, caller=self.name, snapshots=kept)
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
            await self.trainer.aclose()
        except RLBusError as exc:
            self._truth.note(self.name, f"plane: {exc}")


class OperatorProcess(Process):
    """Whoever uses the fleet's verbs."""

    def __init__(self, scenario: Scenario, truth: Truth, broker: TracedBroker) -> None:
        super().__init__(scenario, truth, broker, "op", scenario.skews_s[-4])
        self.client = FleetClient(self.bus, NAMESPACE, caller=OPERATOR)

    def start(self) -> None:
        """It serves nobody by itself."""
