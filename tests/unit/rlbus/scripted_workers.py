"""Workers by script, and a scene of a controller's bus with such workers around it, for the tests of fan-outs."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from rlbus import subjects
from rlbus._memory import MemoryTransport
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.fanout import Gathered, Limits, fanout
from rlbus.schemas import (
    Accepted,
    Command,
    Fault,
    FaultCode,
    GetOutcome,
    OutcomeData,
    PauseGeneration,
    Progress,
    Result,
    ResultData,
    ResultStatus,
    WorkerAnswer,
    WorkerId,
    worker_id,
)
from rlbus.testing import LoopClock, MemoryBroker, sequential_ids

NS = "ns"
LIMITS = Limits(ack_s=2.0, stall_s=5.0, deadline_s=20.0)


@dataclass
class ScriptedWorker:
    """Keeps the rules that matter here: membership, expiry, one run per op_id, recorded outcomes."""

    bus: Bus
    instance_id: str
    component: str = "backend"
    boot_id: str = "boot-1"
    # Seconds until the result; progress every second meanwhile if `progresses`.
    takes_s: float = 0.0
    progresses: bool = True
    is_mute: bool = False
    data: ResultData | None = None
    # Commands as they arrived, op ids as they were run.
    heard: list[Command] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    num_muted_answers: int = 0

    def listen(self) -> None:
        for pattern in subjects.commands_for(NS, self.component, self.instance_id):
            self.bus.subscribe(pattern, Command, self.on_command)

    @property
    def id(self) -> WorkerId:
        return worker_id(self.component, self.instance_id)

    def base(self, op_id: str) -> dict[str, Any]:
        return {
            "op_id": op_id,
            "component": self.component,
            "instance_id": self.instance_id,
            "boot_id": self.boot_id,
        }

    def answer(self, message: Message, answer: WorkerAnswer) -> None:
        if self.is_mute:
            self.num_muted_answers += 1
            return
        assert message.reply is not None
        if self.bus.transport.is_connected:
            self.bus.publish(f"{message.reply}.{self.instance_id}", answer)

    def refuse(self, message: Message, op_id: str, code: FaultCode) -> None:
        fault = Fault(code=code, message=code.value)
        self.answer(message, Result(**self.base(op_id), status=ResultStatus.REFUSED, fault=fault))

    def on_command(self, command: Command, message: Message) -> None:
        if command.members is not None and self.instance_id not in command.members:
            return
        self.heard.append(command)
        if command.expires_at < self.bus.clock.now():
            self.refuse(message, command.op_id, FaultCode.EXPIRED)
        elif isinstance(command.body, GetOutcome):
            self.tell_outcome(command, command.body.of_op_id, message)
        elif command.op_id in self.results:
            self.answer(message, self.results[command.op_id])
        elif command.op_id in self.running:
            self.answer(message, Accepted(**self.base(command.op_id)))
        else:
            self.begin(command, message)

    def tell_outcome(self, command: Command, of_op_id: str, message: Message) -> None:
        recorded = self.results.get(of_op_id)
        if recorded is None and of_op_id not in self.running:
            self.refuse(message, command.op_id, FaultCode.UNKNOWN_OP)
            return
        data = OutcomeData(
            of_op_id=of_op_id, running=recorded is None, status=None if recorded is None else recorded.status
        )
        self.answer(message, Result(**self.base(command.op_id), status=ResultStatus.OK, data=data))

    def begin(self, command: Command, message: Message) -> None:
        self.runs.append(command.op_id)
        if self.takes_s == 0.0:
            self.finish(command, message)
            return
        self.running.add(command.op_id)
        self.answer(message, Accepted(**self.base(command.op_id)))
        self.step(command, message, 1)

    def step(self, command: Command, message: Message, done: int) -> None:
        loop = asyncio.get_running_loop()
        if done > self.takes_s:
            self.finish(command, message)
            return
        if self.progresses and done > 1:
            self.answer(message, Progress(**self.base(command.op_id), phase="load", done=done))
        loop.call_later(1.0, self.step, command, message, done + 1)

    def finish(self, command: Command, message: Message) -> None:
        self.running.discard(command.op_id)
        result = Result(**self.base(command.op_id), status=ResultStatus.OK, data=self.data)
        self.results[command.op_id] = result
        self.answer(message, result)


class Scene:
    """A broker, a controller's bus, and workers that each have a connection of their own."""

    def __init__(self, seed: int = 0, max_payload_bytes: int = 1_048_576) -> None:
        self.broker = MemoryBroker(seed=seed, max_payload_bytes=max_payload_bytes)
        self.clock = LoopClock()
        self.transport = self.broker.connect("controller")
        self.bus = Bus(self.transport, clock=self.clock, new_id=sequential_ids("id"))
        self.published: list[Message] = []
        self.workers: list[ScriptedWorker] = []

    async def observe(self) -> None:
        """Record commands as an observer would see them; this hides 503s, as in NATS."""
        observer = self.broker.connect("observer")
        observer.subscribe("dyn.>", self.published.append)
        await observer.barrier(1)

    async def add(self, num: int = 1, **script: object) -> list[ScriptedWorker]:
        added = []
        for _ in range(num):
            bus = Bus(self.broker.connect(), clock=self.clock)
            number = str(len(self.workers) + 1)
            worker = ScriptedWorker(bus, number, **script)  # type: ignore[arg-type]
            worker.listen()
            self.workers.append(worker)
            added.append(worker)
        if added:
            await added[-1].bus.barrier(1)
        return added

    def transport_of(self, worker: ScriptedWorker) -> MemoryTransport:
        transport = worker.bus.transport
        assert isinstance(transport, MemoryTransport)
        return transport

    async def pause(self, **more: object) -> dict[WorkerId, Gathered]:
        arguments: dict[str, object] = {
            "members": [w.id for w in self.workers],
            "op_id": "op",
            "term": 1,
            "limits": LIMITS,
        }
        arguments.update(more)
        return await fanout(self.bus, NS, PauseGeneration(), **arguments)  # type: ignore[arg-type]


def now_s() -> float:
    return asyncio.get_running_loop().time()


def code_of(gathered: Gathered) -> FaultCode:
    assert gathered.fault is not None
    return gathered.fault.code
