"""Adopts a Dynamo fleet: one agent for each of its workers, all in one process, on one connection to the bus.

Invariants: a worker that fails in whatever way costs no other one anything; whoever leaves says goodbye; a process that
was lost is never adopted again, only its successor is, with unknown weights. Whom to adopt is decided in `roster`.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

import httpx

from rlbus.bus import Bus
from rlbus.errors import DeadlineError, EngineDeadError, EngineError, RLBusError
from rlbus.schemas import Fault, FaultCode
from rlbus.transfer.bounded import run_in_thread
from rlbus.workers.agent import Agent
from rlbus.workers.config import DEFAULT_COMPONENT, AgentConfig
from rlbus.workers.dynamo.engine import DynamoEngine, EngineOptions
from rlbus.workers.dynamo.listing import DISCOVERY_PATH, Answer, Listed, parse_answer
from rlbus.workers.dynamo.roster import Adopt, Answered, Ended, Event, LetGo, Roster, Tell, decide
from rlbus.workers.dynamo.surface import Began, Surface
from rlbus.workers.ledger import opened
from rlbus.workers.peer_http import Peer, PeerClient
from rlbus.workers.system.serving import served
from rlbus.workers.system.settings import NO_PORT, SystemConfig

_log = logging.getLogger("rlbus.workers")

# How often a list is asked for, in seconds; after a failure the pause is doubled up to the last, and jittered.
LIST_S = 2.0
MAX_LIST_S = 30.0
# Dynamo's frontend probes every worker before it answers.
LIST_LIMIT_S = 20.0
# Getting to know one worker: some questions, and the headers of its checkpoint.
START_S = 60.0
# How often is looked whether a worker's process is still there, how long that may take, and how many times in a row
# it may fail to answer before the worker is given up. A refused connection counts at once.
ALIVE_S = 1.0
ALIVE_LIMIT_S = 5.0
MAX_SILENT = 24
# How long all the agents may take to stop. Source: AgentConfig.drain_s, and undoing what still runs.
STOP_S = 20.0
# How long is waited until the copies of a process that is gone are removed. Their disk may hang.
DROP_S = 10.0


class Source(Protocol):
    """Something that lists workers. `name` is for people."""

    name: str

    async def ask(self) -> Answer:
        """The list of now. Raises RLBusError. Cancel: leaves nothing."""
        ...

    async def aclose(self) -> None:
        """Drop its connections. Cancel: they go with the process."""
        ...


class Discovery:
    """The RL discovery of a Dynamo frontend. With `component` only that part of its fleet."""

    def __init__(
        self, peer: Peer, component: str | None = None, *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        # People paste either form of the URL.
        self._peer = Peer(peer.url.removesuffix(DISCOVERY_PATH), peer.headers)
        self.name = self._peer.url
        self._component = component
        self._client = PeerClient(self._peer, what="Dynamo's discovery", transport=transport)

    async def ask(self) -> Answer:
        """See `Source`."""
        return parse_answer(await self._client.get(DISCOVERY_PATH, limit_s=LIST_LIMIT_S), self._component)

    async def aclose(self) -> None:
        """See `Source`. Cancel: see `Source`."""
        await self._client.aclose()


class StaticUrl:
    """One worker at a `system_url` that the user names. What it is it says itself."""

    def __init__(
        self, peer: Peer, component: str | None = None, *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.name = peer.url
        self._component = component or DEFAULT_COMPONENT
        self._client = PeerClient(peer, what="Dynamo worker", transport=transport)

    async def ask(self) -> Answer:
        """See `Source`. A worker that isn't there is an error here, and not an empty list: it may only be starting."""
        return Answer((await Surface(self._client).describe(self._component),))

    async def aclose(self) -> None:
        """See `Source`. Cancel: see `Source`."""
        await self._client.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopting:
    """How workers are adopted. `peer_of` puts the credentials to a worker's URL; `on_change` hears what people want to
    know: who was adopted, who left, who is left out, and why. `system` is the HTTP surface of each, whose host is found
    towards `bus_url`. `transport` stands in for the network, in tests.
    """

    namespace: str
    agent: AgentConfig
    peer_of: Callable[[str], Peer]
    options: EngineOptions = field(default_factory=EngineOptions)
    system: SystemConfig = field(default_factory=lambda: SystemConfig(port=NO_PORT))
    bus_url: str = ""
    on_change: Callable[[str], None] = lambda text: None
    transport: httpx.AsyncBaseTransport | None = None


class _Hosted:
    """One adopted worker, from the first question to its goodbye."""

    def __init__(self, task: "asyncio.Task[None]") -> None:
        self.task = task
        self.agent: Agent | None = None
        self.reason: str | None = None
        # Whether its process has answered when it was last looked at.
        self.answers = True

    @property
    def is_busy(self) -> bool:
        """Whether it is at work, as far as its process answers: an op, an open session, or a pause that an op holds."""
        if self.agent is None or not self.answers:
            return False
        state = self.agent.state
        is_held = state.lease is not None and state.lease.end_op_id is None
        return is_held or state.running is not None or state.session is not None

    def let_go(self, reason: str) -> None:
        """End it with a goodbye; before there is an agent there is nothing to say goodbye to."""
        self.reason = reason
        if self.agent is None:
            self.task.cancel()
        else:
            self.agent.stop(reason)


class Adoption:
    """Adopts what its sources list. The bus and the sources are the caller's."""

    def __init__(self, bus: Bus, sources: Sequence[Source], how: Adopting) -> None:
        self._bus = bus
        self._sources = sources
        self._how = how
        self._roster = Roster()
        self._hosted: dict[str, _Hosted] = {}
        # Processes that were given up, by worker: when each began.
        self._outlived: dict[str, Began] = {}

    @property
    def agents(self) -> tuple[Agent, ...]:
        """Of the workers that are on the bus now."""
        return tuple(hosted.agent for hosted in self._hosted.values() if hosted.agent is not None)

    async def run(self, stopped: asyncio.Event) -> None:
        """Watch the sources and host the agents, until `stopped` is set. Cancel: everybody leaves, with a goodbye."""
        loop = asyncio.get_running_loop()
        watching = [loop.create_task(self._watch(source)) for source in self._sources]
        try:
            await stopped.wait()
        finally:
            for task in watching:
                task.cancel()
            await self._end_all()

    async def _end_all(self) -> None:
        hosted = list(self._hosted.values())
        for one in hosted:
            one.let_go("the sidecar stops")
        tasks = {one.task for one in hosted}
        if not tasks:
            return
        try:
            _, pending = await asyncio.wait(tasks, timeout=STOP_S)
        finally:
            for task in tasks:
                task.cancel()
        if pending:
            _log.error("%d agents did not stop within %g s", len(pending), STOP_S)
            await asyncio.wait(pending, timeout=STOP_S)

    # --- whom to adopt

    async def _watch(self, source: Source) -> None:
        loop = asyncio.get_running_loop()
        wait_s, said = LIST_S, ""
        while True:
            try:
                answer = await source.ask()
                busy = frozenset(who for who, hosted in self._hosted.items() if hosted.is_busy)
                self._apply(Answered(source.name, answer, loop.time(), busy))
                wait_s, said = LIST_S, ""
            except Exception as exc:  # noqa: BLE001 - said once, and asked again: a list may never end the others
                if not isinstance(exc, RLBusError):
                    _log.exception("asking %s failed", source.name)
                if str(exc) != said:
                    said = str(exc)
                    self._how.on_change(f"{source.name} can't be asked, and is asked again: {exc}")
                wait_s = min(wait_s * 2, MAX_LIST_S)
            await asyncio.sleep(wait_s * random.uniform(0.75, 1.25))

    def _apply(self, event: Event) -> None:
        self._roster, actions = decide(self._roster, event)
        for action in actions:
            match action:
                case Adopt(listed):
                    task = asyncio.get_running_loop().create_task(self._host(listed))
                    self._hosted[listed.who] = _Hosted(task)
                case LetGo(who, reason):
                    if who in self._hosted:
                        self._hosted[who].let_go(reason)
                case Tell(who, reason):
                    self._how.on_change(f"{who} is left out: {reason}")
        if isinstance(event, Answered):
            self._outlived = {who: began for who, began in self._outlived.items() if who in self._roster.entries}

    # --- one worker

    async def _host(self, listed: Listed) -> None:
        """Its whole life on the bus."""
        who, said = listed.who, "it ended"
        try:
            await self._serve(listed)
            said = self._hosted[who].reason or said
        except asyncio.CancelledError:
            said = self._hosted[who].reason or "the sidecar was cancelled"
            raise
        except RLBusError as exc:
            said = str(exc)
        except Exception as exc:  # noqa: BLE001 - a bug of ours: this one worker is off the bus, and tried again
            _log.exception("hosting %s failed", who)
            said = f"{type(exc).__name__}; see the log"
        finally:
            was_there = self._hosted.pop(who).agent is not None
            self._how.on_change(f"{who} {'has left' if was_there else 'could not be adopted'}: {said}")
            self._apply(Ended(who, asyncio.get_running_loop().time()))

    async def _serve(self, listed: Listed) -> None:
        how, hosted = self._how, self._hosted[listed.who]
        peer = how.peer_of(listed.system_url)
        outlived = self._outlived.get(listed.who)
        engine = DynamoEngine(listed, peer, how.options, outlived=outlived, transport=how.transport)
        try:
            await _start(engine)
            async with AsyncExitStack() as stack:
                surface = served(how.system, lambda: hosted.agent, how.bus_url)
                system_url = await stack.enter_async_context(surface)
                ledger = stack.enter_context(
                    opened(how.agent.state_dir, how.namespace, listed.component, listed.instance_id)
                )
                agent = Agent(
                    engine,
                    self._bus,
                    namespace=how.namespace,
                    component=listed.component,
                    instance_id=listed.instance_id,
                    config=how.agent,
                    ledger=ledger,
                    system_url=system_url,
                )
                hosted.agent = agent
                await self._run(agent, engine, listed, hosted)
            if agent.lost is not None:
                self._give_up(listed.who, engine)
                if engine.is_gone:
                    await _drop_copies(agent)
                raise EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=agent.lost))
        finally:
            await engine.aclose()

    def _give_up(self, who: str, engine: DynamoEngine) -> None:
        """The process that it was is not adopted again: what it last did isn't known, and can't be undone."""
        if engine.began is not None:
            self._outlived[who] = engine.began

    async def _run(self, agent: Agent, engine: DynamoEngine, listed: Listed, hosted: _Hosted) -> None:
        loop = asyncio.get_running_loop()
        running, watching = loop.create_task(agent.run()), loop.create_task(_stop_with(engine, agent, hosted))
        try:
            ready = loop.create_task(agent.ready.wait())
            await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            if not running.done():
                self._how.on_change(f"{listed.who} is adopted from {listed.system_url}")
            await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and watching.exception() is not None:
                agent.stop("nobody watches its process any more")
            await running
            if watching.done():
                watching.result()
        finally:
            watching.cancel()
            if not running.done():
                running.cancel()
                await asyncio.wait({running}, timeout=STOP_S)


async def _start(engine: DynamoEngine) -> None:
    try:
        async with asyncio.timeout(START_S):
            await engine.start()
    except TimeoutError as exc:
        raise DeadlineError("getting to know the worker", START_S) from exc


async def _drop_copies(agent: Agent) -> None:
    """What is left of them goes with `copies.sweep`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROP_S):
            await run_in_thread(agent.lora_files.drop, name="rlbus disk")


async def _stop_with(engine: DynamoEngine, agent: Agent, hosted: _Hosted) -> None:
    """Stop the agent when its worker's process is gone, or another one answers in its place."""
    num_silent = 0
    while agent.lost is None:
        await asyncio.sleep(ALIVE_S)
        try:
            await engine.check_alive(ALIVE_LIMIT_S)
            num_silent, hosted.answers = 0, True
        except EngineDeadError as exc:
            agent.lose(exc.fault.message)
        except EngineError as exc:
            num_silent, hosted.answers = num_silent + 1, False
            if num_silent >= MAX_SILENT:
                agent.lose(f"the worker's process hasn't answered {MAX_SILENT} times: {exc.fault.message}")
