"""The agent of one worker: takes commands from the bus, keeps the rules, calls the engine, says how the worker is.

Invariants: a message handler never waits; queries, aborts of requests and heartbeats share neither task nor lock with a
mutation; whatever arrives, the agent lives on. It resumes an engine on new weights only with flushed caches: a flush is
owed from the first byte of an update on, whoever sends `flush_cache` pays it, and otherwise the resume does.
"""

import asyncio
import logging
from dataclasses import replace

from rlbus import subjects
from rlbus._engine_routes import answer_routes
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.errors import ConfigError, DecodeError, RLBusError
from rlbus.schemas import (
    DRAFT_ROUTE,
    LORA_ROUTES,
    AbortRequest,
    Announcement,
    Command,
    Descriptor,
    Fault,
    FaultCode,
    GenerationResumed,
    Goodbye,
    LorasData,
    PauseGeneration,
    PrepareWeightsUpdate,
    TensorSpec,
    WorkerStatus,
    route_of,
)
from rlbus.transfer.manifest import ManifestBook
from rlbus.workers.adoption import adopt, in_words
from rlbus.workers.answers import Answers, bad_message, find_op_id
from rlbus.workers.beside import Beside
from rlbus.workers.checks import fault
from rlbus.workers.config import AgentConfig
from rlbus.workers.disk import DISK
from rlbus.workers.draft import INITIAL as INITIAL_DRAFT
from rlbus.workers.draft import is_for_draft, torn_part
from rlbus.workers.engines.base import Engine, Observed
from rlbus.workers.engines.found import Found, FoundAsleep, FoundEngine
from rlbus.workers.engines.sleep import SleepEngine
from rlbus.workers.entrance import Entrance
from rlbus.workers.facts import facts, is_visible
from rlbus.workers.heartbeat import Heartbeat
from rlbus.workers.journal import Journal, Record
from rlbus.workers.leases import OWN_OP_S, retried, work_of
from rlbus.workers.ledger import Ledger, come_back, noted
from rlbus.workers.lifecycle import decide, is_mutation, served_routes
from rlbus.workers.lora_calls import lora_engine
from rlbus.workers.lora_files import LoraFiles
from rlbus.workers.lora_watch import LoraWatch
from rlbus.workers.moves import (
    Action,
    AnswerNow,
    Arrived,
    DrainEnded,
    Event,
    Ignore,
    Join,
    LeaseEnded,
    Refuse,
    Replay,
    Run,
    RunOwn,
    TakeBack,
)
from rlbus.workers.observation import Observer, drift
from rlbus.workers.parting import let_go
from rlbus.workers.preconditions import manifest_problem
from rlbus.workers.refusals import Refusals
from rlbus.workers.slept import after_sleep
from rlbus.workers.slot import Slot
from rlbus.workers.state import WorkerState
from rlbus.workers.torn_found import TornFound

_log = logging.getLogger("rlbus.workers")

# How long the subscriptions may take to stand, and the goodbye to leave, in seconds.
BARRIER_S = 2.0
# Subject token of Dynamo's descriptor query.
ROUTES_QUERY = "routes"


class Agent:
    """Serves one started engine on the bus. `run` until `stop`; engine, bus and ledger belong to the caller.

    With a `ledger` of an earlier process the worker comes back as itself: with its outcomes and the largest term that
    it has seen, and with unknown weights, since the engine is a new one. One that comes `before` this agent, and has
    ended by itself, leaves it the engine as it is: weights, an open update, who holds the pause, outcomes.
    `system_url` is the base of this worker's own HTTP surface; None announces the engine's, if it has one.

    Raises:
        ConfigError: a name doesn't fit into a subject.
    """

    def __init__(
        self,
        engine: Engine,
        bus: Bus,
        *,
        namespace: str,
        component: str,
        instance_id: str,
        config: AgentConfig | None = None,
        ledger: Ledger | None = None,
        before: "Agent | None" = None,
        system_url: str | None = None,
    ) -> None:
        self._engine = engine
        self._bus = bus
        self._config = AgentConfig() if config is None else config
        DISK.know(self._config)
        self._subject = subjects.worker(namespace, component, instance_id)
        self._patterns = subjects.commands_for(namespace, component, instance_id)
        info = engine.info
        routes = served_routes(info.routes)
        self.descriptor = Descriptor(
            namespace=namespace,
            component=component,
            instance_id=instance_id,
            engine=info.engine,
            model=info.model,
            world_size=info.world_size,
            routes=tuple(sorted(routes)),
            backends=info.backends,
            system_url=info.system_url if system_url is None else system_url,
            completions_url=info.completions_url,
        )
        # One that takes over within the process is another start than the one that its supervisor named.
        self.boot_id = bus.new_id() if before is not None else self._config.boot_id or bus.new_id()
        self.journal = Journal()
        self.refusals = Refusals()
        self.answers = Answers(bus, namespace, component, instance_id, self.boot_id)
        # For callers in this process. Open while `run` serves.
        self.entrance = Entrance(self, bus, self._config)
        # Set once the subscriptions stand at the server.
        self.ready = asyncio.Event()
        lora_info = lora_engine(engine).lora_info if routes >= LORA_ROUTES else None
        self._state = WorkerState(
            component=component,
            instance_id=instance_id,
            world_size=info.world_size,
            routes=routes,
            backends=info.backends,
            sleep_tags=engine.sleep_tags if isinstance(engine, SleepEngine) and "sleep" in routes else frozenset(),
            lora_info=lora_info,
            draft=INITIAL_DRAFT if DRAFT_ROUTE in routes else None,
        )
        self._ledger = ledger
        if before is not None:
            self._adopt(before)
        elif ledger is not None:
            self._remember(ledger)
        found = engine.found if before is None and isinstance(engine, FoundEngine) else None
        self._torn_found = TornFound(self, found, bus.new_id)
        if found is not None:
            self._go_on_from(found, ledger)
        who = f"{namespace}.{component}.{instance_id}"
        self.lora_files: LoraFiles = LoraFiles(self._config, bus, who, None if before is None else before.lora_files)
        self._loras = LoraWatch(None if lora_info is None else lora_engine(engine), self, self._config)
        self._observer = Observer(engine, self._config.observe_s)
        self._slot = Slot(engine, self, bus.clock, self._config)
        self._book = ManifestBook()
        self._beside = Beside(engine, self, bus.clock, self._config, self._book)
        self._heartbeat = Heartbeat(self._beat, self._config.heartbeat_s, self._config.jitter, instance_id)
        # Runs while the pause has a lease.
        self._lease_timer: asyncio.TimerHandle | None = None
        self._stopped = asyncio.Event()
        self._stop_reason = "stopped"
        # Why the engine can't be helped any more; the agent then ends.
        self.lost: str | None = None

    @property
    def state(self) -> WorkerState:
        """What was commanded and is in progress."""
        return self._state

    @property
    def config(self) -> AgentConfig:
        """The bounds that it keeps."""
        return self._config

    def new_op_id(self) -> str:
        """One that no op has."""
        return self._bus.new_id()

    def stop(self, reason: str = "stopped") -> None:
        """Let `run` end: what runs may go on for `drain_s`. Idempotent; from the loop's thread."""
        self._stop_reason = reason
        self._stopped.set()

    def lose(self, why: str) -> None:
        """The engine is dead, or will never come back: stop, so that whoever supervises it can start it again."""
        if self.lost is None:
            self.lost = why
            _log.error("the engine is lost: %s", why)
            self.stop(f"the engine is lost: {why}")

    async def run(self) -> None:
        """Serve until `stop`. What runs then may go on for `drain_s`, is ended, and a goodbye is said.

        Cancel: the same without the wait.
        """
        subscriptions = [self._bus.subscribe(p, Command, self._on_command, self._on_bad) for p in self._patterns]
        unwatch = self._bus.watch_connection(self._on_connection)
        drain_s = 0.0
        self._arm_lease()
        self._torn_found.begin()
        self._slot.wake_later()
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(self._heartbeat.run()), group.create_task(self._loras.run())]
            try:
                await self._try_barrier()
                self.ready.set()
                self.entrance.open()
                await self._stopped.wait()
                drain_s = self._config.drain_s if self.lost is None else 0.0
            finally:
                self.entrance.close()
                unwatch()
                for subscription in subscriptions:
                    subscription.unsubscribe()
                for task in beside:
                    task.cancel()
                try:
                    await self._close(drain_s)
                finally:
                    self.entrance.abandon()

    def announce_soon(self) -> None:
        """Let the next heartbeat come now."""
        self._heartbeat.soon()

    async def observe(self) -> Observed:
        """Ask the engine how it is, bounded. Cancel: the question goes on for the others who wait."""
        return await self._observer.observe()

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Feed the state machine, publish what changed, and return what it wants done."""
        before = self._state
        self._state, actions = decide(before, event)
        for fact in facts(before, self._state, self._bus.clock.now()):
            if isinstance(fact, GenerationResumed) and fact.forced:
                _log.warning("op %s forced a resume on torn weights: %s", fact.op_id, torn_part(before))
            self.answers.event(fact)
        if is_visible(before, self._state):
            self._heartbeat.soon()
        if self._ledger is not None:
            self._ledger.note(noted(self._state))
        if self._state.lease is not before.lease:
            self._arm_lease()
        if self._state.adapters is not before.adapters:
            self._loras.soon()
        for action in actions:
            self._act(action)
        return actions

    def status(self) -> WorkerStatus:
        """Commanded state beside what the engine said last."""
        state, observed = self._state, self._observer.last
        return WorkerStatus(
            generation=observed.generation,
            weights=state.weights,
            pause=state.pause,
            drift=drift(state, observed),
            op_id=None if state.running is None else state.running.op_id,
            epoch=state.epoch,
            term=state.term,
            num_refused_messages=self.answers.num_refused,
            work=work_of(state.running, self._config.work_lease_s),
            asleep=tuple(sorted(observed.asleep)),
            loras=self._loras.view(),
            draft=state.draft,
        )

    # --- what outlives the process

    def _remember(self, ledger: Ledger) -> None:
        descriptor, past = self.descriptor, ledger.past
        if past.noted is not None:
            self._state = come_back(self._state, past.noted)
            before = past.noted.weights
            text = "worker %s/%s is back: its engine is a new one; before, its weights were %s at version %s"
            _log.info(text, descriptor.component, descriptor.instance_id, before.state.value, before.version)
        ledger.note(noted(self._state))
        self.journal.keep_in(ledger, descriptor.component, descriptor.instance_id, self.boot_id)

    def _go_on_from(self, found: Found, ledger: Ledger | None) -> None:
        past, loras = (None, ()) if ledger is None else (ledger.past.noted, ledger.past.loras)
        self._state = adopt(self._state, past, found, self._bus.clock.now(), loras)
        if isinstance(self._engine, FoundAsleep) and past is not None:
            self._engine.go_on_asleep(self._state.asleep)
        if ledger is not None:
            ledger.note(noted(self._state))
        _log.info("the engine was found %s", in_words(self._state, found))

    def submit(self, op_id: str, body: PauseGeneration) -> None:
        """Take a command of the agent's own."""
        command = Command(op_id=op_id, term=self._state.term, expires_at=self._bus.clock.now() + OWN_OP_S, body=body)
        self.take(command, None, route_of(body))

    def _adopt(self, before: "Agent") -> None:
        state = replace(after_sleep(before.state), running=None, queued=None)
        has_ended = state.lease is not None and state.lease.end_op_id is not None
        self._state = retried(state) if has_ended else state  # what its end asked for went with that agent
        self.refusals = before.refusals
        self.journal = before.journal
        self.journal.give_up(self.descriptor.component, self.descriptor.instance_id, before.boot_id)

    # --- the lease of a pause

    def _arm_lease(self) -> None:
        """Measure the lease that was just granted, as a duration: no clock but this process's own counts."""
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        self._lease_timer = None
        lease = self._state.lease
        if lease is not None and lease.end_op_id is None:
            self._lease_timer = asyncio.get_running_loop().call_later(lease.lease_s, self._on_lease_end)

    def _on_lease_end(self) -> None:
        pause = self._state.pause
        _log.warning("the lease of the pause by %s ended without renewal", None if pause is None else pause.owner)
        self.apply(LeaseEnded(self._bus.new_id(), self._bus.clock.now()))

    # --- adapters

    async def look_at_loras(self) -> None:
        """Ask the engine for its adapters, if it takes any, for `status`. Cancel: leaves nothing."""
        await self._loras.look()

    async def list_loras(self, limit_s: float) -> LorasData:
        """What the engine has now. Raises EngineError: it doesn't say in that time. Cancel: leaves nothing."""
        return await self._loras.answer(limit_s)

    def drain_ended(self, name: str, revision: int) -> None:
        """Nothing needs this draining adapter any more, or its time is over: let it go, if nothing else runs."""
        self.apply(DrainEnded(name, revision, self._bus.new_id(), self._bus.clock.now()))

    def _act(self, action: Action) -> None:
        """What the state machine wants done for its own sake; answers to commands are the caller's."""
        match action:
            case RunOwn():
                expires_at = self._bus.clock.now() + OWN_OP_S
                command = Command(op_id=action.op_id, term=self._state.term, expires_at=expires_at, body=action.body)
                record = self.journal.begin(command, None, asyncio.get_running_loop().time())
                self._slot.begin(command, record, None)
            case TakeBack():
                self._slot.take_back(action.op_id, action.fault)

    # --- messages: nothing below waits

    def _on_command(self, command: Command, message: Message) -> None:
        subject = subjects.parse_command(message.subject)
        if subject is None or subject.route == ROUTES_QUERY:
            self._on_undecodable(message, "the subject is no command's")
            return
        self.take(command, message.reply, subject.route, subject.instance_id is not None)

    def take(self, command: Command, reply: str | None, route: str, is_unicast: bool = True) -> None:
        """Take a command, from the bus or from `entrance`; answers go to `reply`. Never raises, never waits."""
        try:
            self._take(command, reply, route, is_unicast)
        except Exception:  # noqa: BLE001 - a bug of ours: logged, the sender gets `internal`, the agent lives on
            _log.exception("taking %s %s failed", route, command.op_id)
            self.refuse(command, reply, fault(FaultCode.INTERNAL, "the agent failed; see its log"))

    def _on_bad(self, error: DecodeError, message: Message) -> None:
        self._on_undecodable(message, error.problem)

    def _on_undecodable(self, message: Message, problem: str) -> None:
        subject = subjects.parse_command(message.subject)
        if subject is not None and subject.route == ROUTES_QUERY:
            self._answer_query(message)
            return
        why = bad_message(problem, len(message.data))
        route = None if subject is None else subject.route
        replies = () if message.reply is None else (message.reply,)
        self.answers.refuse(find_op_id(message.data), replies, why, route, self._bus.clock.now())

    def _answer_query(self, message: Message) -> None:
        """Dynamo's, {"method": "routes"}, as Dynamo answers it; any other with the descriptor. On the plain reply
        subject, where Dynamo's clients read.
        """
        if message.reply is None:
            return
        mine = self.descriptor
        asked = answer_routes(message.data, mine.routes, mine.system_url, mine.world_size)
        self.answers.publish(message.reply, mine if asked is None else asked)

    def _on_connection(self, is_connected: bool) -> None:
        if is_connected:
            self._heartbeat.soon()

    def _take(self, command: Command, reply: str | None, route: str, is_unicast: bool) -> None:
        record = self.journal.find(command.op_id)
        # What has run says more than a refusal of it before.
        if record is None and (known := self.refusals.find(command)) is not None:
            self.refuse(command, reply, known)
            return
        tensors, outside = (None, None) if record is not None else self._look_outside(command)
        now = self._bus.clock.now()
        (action,) = self.apply(Arrived(command, route, is_unicast, now, record, tensors, outside))
        match action:
            case Ignore():
                pass
            case Refuse():
                if action.fault.code is FaultCode.STALE_TERM:  # whoever leads under it shall know which is the newest
                    self._heartbeat.soon()
                self.refuse(command, reply, action.fault)
            case Join():
                self._join(action.record, command, reply)
            case Replay():
                assert action.record.result is not None
                self.answers.result(reply, action.record.result)
            case AnswerNow():
                self._beside.answer(command, reply)
            case Run():
                record = self.journal.begin(command, reply, asyncio.get_running_loop().time())
                self._slot.begin(command, record, action.takes_back)

    def _look_outside(self, command: Command) -> tuple[tuple[TensorSpec, ...] | None, Fault | None]:
        """The manifest that a command names and how it fits the model, looked at only if the command can run at all."""
        body = command.body
        if not isinstance(body, PrepareWeightsUpdate) or self._state.running is not None:
            return None, None
        tensors = self._book.get(body.manifest_digest)
        if tensors is None:
            return None, None
        return tensors, manifest_problem(self._engine, tensors, self.answers.max_bytes, is_for_draft(body))

    def refuse(self, command: Command, reply: str | None, why: Fault) -> None:
        """Tell who asks that nothing was done, and why; it is remembered, so that a copy isn't done after all."""
        if is_mutation(command.body) or isinstance(command.body, AbortRequest):
            self.refusals.note(command, why)
        self._say_no(command, reply, why)

    def _say_no(self, command: Command, reply: str | None, why: Fault) -> None:
        replies = () if reply is None else (reply,)
        self.answers.refuse(command.op_id, replies, why, route_of(command.body), self._bus.clock.now())

    def _join(self, record: Record, command: Command, reply: str | None) -> None:
        if not record.add_reply(reply):
            busy = fault(FaultCode.BUSY, f"too many wait for op {record.op_id}", retryable=True, op_id=record.op_id)
            self._say_no(command, reply, busy)  # the op runs
        elif record.is_accepted:
            self.answers.accepted(record.op_id, reply)

    # --- announcements and the end

    async def _beat(self) -> None:
        looking = self._loras.begin_look()
        await self._observer.observe_as_told(lambda: (self._state.pause, self._state.asleep))
        await self._loras.end_look(looking)
        if self._ledger is not None:
            self._ledger.touch()
        self.answers.num_announced += 1
        announcement = Announcement(
            boot_id=self.boot_id,
            seq=self.answers.num_announced,
            interval_s=self._config.heartbeat_s,
            descriptor=self.descriptor,
            status=self.status(),
        )
        self.answers.publish(self._subject, announcement)

    async def _try_barrier(self) -> None:
        try:
            await self._bus.barrier(BARRIER_S)
        except ConfigError:
            raise
        except RLBusError as exc:
            # Not connected at the moment: subscriptions and announcements come with the reconnect.
            _log.info("the bus doesn't echo: %s", exc)

    async def _close(self, drain_s: float) -> None:
        try:
            await self._slot.drain(drain_s)
        finally:
            if self._lease_timer is not None:
                self._lease_timer.cancel()
            self._torn_found.cancel()
            if self.lost is None:
                await let_go(self._engine, self._state, self._config)
            await self._beside.aclose()
            await self._observer.aclose()
            await self._loras.aclose()
            goodbye = Goodbye(
                boot_id=self.boot_id,
                component=self.descriptor.component,
                instance_id=self.descriptor.instance_id,
                reason=self._stop_reason,
            )
            self.answers.publish(self._subject, goodbye)
            await self._try_barrier()
