"""Two controller processes, workers with fake engines and a trainer on a bus in memory: for the failover tests."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from rlbus._kv import Kv
from rlbus._snapshots import Snapshots
from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.controller.reign import reign
from rlbus.controller.service import Controller
from rlbus.schemas import Command, Generation, Report, SenderSignal, Version, WeightsState
from rlbus.testing import LoopClock, MemoryBroker, MemoryKv, MemoryTransport, run, sequential_ids
from rlbus.trainer import Trainer
from rlbus.workers.testing import Rig
from tests.unit.controller import scene
from tests.unit.controller.scene import FedPlane, Worker, source


@dataclass
class Process:
    """One controller process: its connection, and its life."""

    name: str
    transport: MemoryTransport
    running: "asyncio.Task[None]"
    led: list[Controller] = field(default_factory=list)
    num_standbys: int = 0
    leads: bool = False
    is_killed: bool = False


class Stage:
    """Workers with fake engines, a trainer, and as many controller processes as are started."""

    def __init__(
        self, broker: MemoryBroker, workers: list[Rig], bus: Bus, plane: FedPlane, snapshots: Snapshots | None
    ) -> None:
        self.broker = broker
        self.workers = workers
        self.client = FleetClient(bus, "test", caller="test")
        self.trainer = Trainer(bus, "test", plane, snapshots=snapshots)
        self.processes: list[Process] = []
        self.cut: list[Process] = []
        self.on_command: Callable[[Command], None] = lambda _: None
        self.on_signal: Callable[[SenderSignal], None] = lambda _: None
        self._spy = Bus(broker.connect())
        self._spy.subscribe("dyn.test.*.rl.>", Command, lambda c, _: self.on_command(c))
        self._spy.subscribe("dyn.test.controller.sender", SenderSignal, lambda s, _: self.on_signal(s))

    def start(self, name: str) -> Process:
        """One more controller process."""
        transport = self.broker.connect(name)
        bus = Bus(transport, clock=LoopClock(), new_id=sequential_ids(name))
        kv: Kv = MemoryKv(transport)

        async def live() -> None:
            await reign(bus, kv, "test", name=name, on_ready=on_ready, on_standby=on_standby)

        def on_ready(controller: Controller) -> None:
            process.led.append(controller)
            process.leads = True

        def on_standby(_: object) -> None:
            process.num_standbys += 1
            process.leads = False

        process = Process(name, transport, asyncio.get_running_loop().create_task(live()))
        self.processes.append(process)
        return process

    def kill(self, process: Process) -> None:
        """SIGKILL: nothing leaves it any more, not even a goodbye."""
        self.broker.partition(process.transport)
        process.is_killed = True
        for controller in process.led:
            controller.abandon()
        process.running.cancel()

    async def leader(self) -> Process:
        """Whoever leads, once somebody does."""
        while True:
            leading = [p for p in self.processes if p.leads and p not in self.cut and not p.is_killed]
            leading = [p for p in leading if not p.running.done()]
            if leading:
                return leading[0]
            await asyncio.sleep(0.01)

    async def update(self, step: int, **options: Any) -> Report:
        """Give the fleet version 0.`step`; the report, whatever it says."""
        options = {"deadline_s": 60.0, **options}
        return (await self.trainer.update_weights(source(), version=step, check=False, **options)).report

    async def generations(self) -> list[Generation]:
        """What the engines themselves say."""
        return [(await r.engine.observe()).generation for r in self.workers]

    def weights(self) -> list[tuple[WeightsState, Version | None]]:
        """What the workers say of their weights."""
        return [(r.agent.status().weights.state, r.agent.status().weights.version) for r in self.workers]


def play(
    workers: Sequence[Worker],
    scenario: Callable[[Stage], Coroutine[Any, Any, None]],
    snapshots: Snapshots | None = None,
) -> None:
    """Run a scenario with two controller processes, of which "a" leads. `snapshots` is what the trainer keeps."""

    async def main() -> None:
        broker, plane = MemoryBroker(), FedPlane()
        scene._planes.append(plane)
        async with AsyncExitStack() as stack:
            rigs = [await stack.enter_async_context(start(broker)) for start in workers]
            bus = await stack.enter_async_context(Bus(broker.connect(), clock=LoopClock(), new_id=sequential_ids("op")))
            stage = Stage(broker, rigs, bus, plane, snapshots)
            stage.start("a")
            await stage.leader()
            stage.start("b")
            await stage.client.wait_ready(num_workers=len(rigs), deadline_s=30.0)
            try:
                await scenario(stage)
            finally:
                for process in stage.processes:
                    process.running.cancel()
                await asyncio.wait({p.running for p in stage.processes})
            assert [r.engine.violations for r in rigs] == [[] for _ in rigs]

    try:
        run(main())
    finally:
        scene._planes.clear()
