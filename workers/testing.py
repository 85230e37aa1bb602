"""For tests: one worker on a bus in memory, and a plain sender of commands that keeps every answer.

```python
async with worker_on_bus(FakeEngine()) as rig:
    result = await rig.send(PauseGeneration())
    assert result.status is ResultStatus.OK
```
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rlbus import subjects
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.codec import decode
from rlbus.errors import BrokenError
from rlbus.schemas import (
    Accepted,
    Announcement,
    Command,
    CommandBody,
    CommitWeights,
    FaultCode,
    GroupPlan,
    InitGroup,
    PauseGeneration,
    PrepareWeightsUpdate,
    Progress,
    PutManifest,
    RankSpan,
    ReceiveWeights,
    Rendezvous,
    Result,
    ResultStatus,
    ResumeGeneration,
    TensorSpec,
    Version,
    WorkerAnswer,
    WorkerEvent,
    WorkerMessage,
    route_of,
)
from rlbus.testing import LoopClock, MemoryBroker, run, sequential_ids
from rlbus.transfer.manifest import digest, pages
from rlbus.workers.agent import Agent
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step

NAMESPACE = "test"
COMPONENT = "backend"
INSTANCE_ID = "7"
# Bytes of one page in `Rig.prepare`.
PAGE_BYTES = 100_000


@dataclass
class Sent:
    """One published command and all that came back, in order."""

    op_id: str
    answers: list[WorkerAnswer] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, answer: WorkerAnswer) -> None:
        """An answer arrived."""
        self.answers.append(answer)
        self._changed.set()

    @property
    def results(self) -> list[Result]:
        """The results so far."""
        return [a for a in self.answers if isinstance(a, Result)]

    @property
    def is_accepted(self) -> bool:
        """Whether an `Accepted` came."""
        return any(isinstance(a, Accepted) for a in self.answers)

    @property
    def progress(self) -> list[Progress]:
        """The progress so far."""
        return [a for a in self.answers if isinstance(a, Progress)]

    async def until(self, is_true: Callable[["Sent"], bool], limit_s: float = 60.0) -> None:
        """Wait for answers until `is_true`. Raises TimeoutError."""
        async with asyncio.timeout(limit_s):
            while not is_true(self):
                self._changed.clear()
                await self._changed.wait()

    async def result(self, limit_s: float = 60.0) -> Result:
        """The first result. Raises TimeoutError."""
        await self.until(lambda sent: bool(sent.results), limit_s)
        return self.results[0]


class Rig:
    """A running agent, and the other end of its bus."""

    def __init__(self, engine: FakeEngine, agent: Agent, bus: Bus, worker_bus: Bus, broker: MemoryBroker) -> None:
        self.engine = engine
        self.agent = agent
        self.bus = bus
        self.worker_bus = worker_bus
        self.broker = broker
        self.announcements: list[WorkerMessage] = []
        self.events: list[WorkerEvent] = []
        self._num_sent = 0
        component, instance_id = agent.descriptor.component, agent.descriptor.instance_id
        bus.subscribe(subjects.worker(NAMESPACE, component, instance_id), WorkerMessage, self._on_announcement)
        bus.subscribe(subjects.worker_event(NAMESPACE, component, instance_id), WorkerEvent, self._on_event)

    def _on_announcement(self, message: WorkerMessage, _: Message) -> None:
        self.announcements.append(message)

    def _on_event(self, event: WorkerEvent, _: Message) -> None:
        self.events.append(event)

    @property
    def last(self) -> Announcement:
        """The newest announcement. Raises BrokenError if there is none."""
        for message in reversed(self.announcements):
            if isinstance(message, Announcement):
                return message
        raise BrokenError("worker", "it has not announced itself")

    def post(
        self,
        body: CommandBody,
        *,
        op_id: str | None = None,
        term: int = 1,
        expires_in_s: float = 30.0,
        members: tuple[str, ...] | None = None,
        is_broadcast: bool = False,
        route: str | None = None,
    ) -> Sent:
        """Publish a command; its answers gather in what is returned."""
        self._num_sent += 1
        sent = Sent(f"op-{self._num_sent}" if op_id is None else op_id)
        expires_at = self.bus.clock.now() + expires_in_s
        command = Command(op_id=sent.op_id, term=term, expires_at=expires_at, body=body, members=members)
        name = route_of(body) if route is None else route
        target = self.agent.descriptor
        subject = (
            subjects.command(NAMESPACE, target.component, name)
            if is_broadcast
            else subjects.command_to(NAMESPACE, target.component, name, target.instance_id)
        )
        self.bus.publish(subject, command, self.inbox(sent))
        return sent

    def inbox(self, sent: Sent) -> str:
        """A reply address whose answers gather in `sent`."""

        def on_reply(message: Message, _: str) -> None:
            if not message.no_responders:
                sent.add(decode(message.data, WorkerAnswer, message.subject))

        return self.bus.open_inbox(on_reply).reply

    async def send(self, body: CommandBody, **envelope: Any) -> Result:
        """Publish a command and return its result."""
        return await self.post(body, **envelope).result()

    # --- an update, step by step

    def plan(self, epoch: int = 1, num_ranks: int = 1, backend: str = "fake") -> GroupPlan:
        """A group of one trainer rank and this worker."""
        target = self.agent.descriptor
        span = RankSpan(component=target.component, instance_id=target.instance_id, first=1, num_ranks=num_ranks)
        return GroupPlan(
            epoch=epoch,
            group_id=f"group-{epoch}",
            backend=backend,
            num_trainer_ranks=1,
            world_size=1 + num_ranks,
            spans=(span,),
            rendezvous=Rendezvous(host="127.0.0.1", port=1, prefix=f"g{epoch}"),
            bucket_bytes=1024,
        )

    async def prepare(self, version: Version, tensors: Sequence[TensorSpec], op_id: str = "u") -> Result:
        """Send the manifest's pages, and prepare."""
        for page in pages(tensors, PAGE_BYTES):
            await self.send(PutManifest(page=page))
        body = PrepareWeightsUpdate(version=version, manifest_digest=digest(tensors))
        return await self.send(body, op_id=f"{op_id}-prepare")

    async def until_paused(
        self, version: Version, tensors: Sequence[TensorSpec], op_id: str = "u", epoch: int = 1
    ) -> None:
        """Everything of an update up to, but not including, the transfer."""
        await self.prepare(version, tensors, op_id)
        await self.send(InitGroup(plan=self.plan(epoch)), op_id=f"{op_id}-join")
        await self.send(PauseGeneration(owner=op_id), op_id=f"{op_id}-pause")

    def receive(self, version: Version, tensors: Sequence[TensorSpec], op_id: str = "u", epoch: int = 1) -> Sent:
        """Begin the transfer."""
        body = ReceiveWeights(
            update_op_id=op_id, epoch=epoch, version=version, manifest_digest=digest(tensors), bucket_bytes=1024
        )
        return self.post(body, op_id=f"{op_id}-receive")

    async def commit(self, version: Version, op_id: str = "u") -> Result:
        """Commit what was received."""
        return await self.send(CommitWeights(update_op_id=op_id, version=version), op_id=f"{op_id}-commit")


@asynccontextmanager
async def worker_on_bus(
    engine: FakeEngine,
    *,
    broker: MemoryBroker | None = None,
    config: AgentConfig | None = None,
    component: str = COMPONENT,
    instance_id: str = INSTANCE_ID,
    boot: str = "boot",
) -> AsyncIterator[Rig]:
    """A started engine and its agent on a bus in memory; both end with the context. A restart has another `boot`."""
    broker = MemoryBroker() if broker is None else broker
    await engine.start()
    worker_bus = Bus(broker.connect(), clock=LoopClock(), new_id=sequential_ids(f"{boot}-{instance_id}"))
    bus = Bus(broker.connect(), clock=LoopClock(), new_id=sequential_ids("id"))
    async with worker_bus, bus:
        agent = Agent(
            engine, worker_bus, namespace=NAMESPACE, component=component, instance_id=instance_id, config=config
        )
        rig = Rig(engine, agent, bus, worker_bus, broker)
        running = asyncio.get_running_loop().create_task(agent.run())
        try:
            await agent.ready.wait()
            yield rig
        finally:
            agent.stop()
            await running
            await engine.aclose()


def on_worker(
    scenario: Callable[[Rig], Coroutine[Any, Any, None]],
    steps: Mapping[str, Mapping[int, Step]] | None = None,
    config: AgentConfig | None = None,
) -> None:
    """Run a scenario against one worker with a scripted engine, in virtual time.

    Raises AssertionError also if the engine saw its contract violated.
    """

    async def main() -> None:
        engine = FakeEngine(FakeScript({} if steps is None else steps))
        async with worker_on_bus(engine, config=config) as rig:
            await scenario(rig)
        assert engine.violations == []

    run(main())


def code_of(result: Result) -> FaultCode | None:
    """The fault code of a result."""
    return None if result.fault is None else result.fault.code


async def updated(rig: Rig, version: Version, op_id: str = "u", epoch: int = 1) -> None:
    """A whole update that goes well, up to resume."""
    tensors = rig.engine.tensors
    await rig.until_paused(version, tensors, op_id, epoch)
    received = await rig.receive(version, tensors, op_id, epoch).result()
    committed = await rig.commit(version, op_id)
    resumed = await rig.send(ResumeGeneration(), op_id=f"{op_id}-resume")
    assert {r.status for r in (received, committed, resumed)} == {ResultStatus.OK}
