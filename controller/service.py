"""The controller of one namespace: hears workers, takes requests, and runs ops through `Desk`."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlbus import subjects
from rlbus._objects import Objects
from rlbus._transport import Message, Subscription
from rlbus.bus import Bus
from rlbus.controller import admission
from rlbus.controller.callers import Callers
from rlbus.controller.catching_up import CatchUps
from rlbus.controller.causes import fault
from rlbus.controller.desk import Desk, Record, Running
from rlbus.controller.draft import name_of
from rlbus.controller.frontend import Frontend
from rlbus.controller.giving_way import GivingWay, keeps_version
from rlbus.controller.greeting import Greeter
from rlbus.controller.hearing import Hearing
from rlbus.controller.journal import Journal
from rlbus.controller.line import Line
from rlbus.controller.lora_desk import LoraDesk
from rlbus.controller.manifests import Manifests
from rlbus.controller.op import Op, publish
from rlbus.controller.registry import Member, Registry
from rlbus.controller.report import has_committed, standing_group, update_report
from rlbus.controller.sleep_verb import SleepVerb
from rlbus.controller.succession import NO_JOURNAL, Succession
from rlbus.controller.transfers import ROUTES, Transfers
from rlbus.controller.update import UpdateRun
from rlbus.controller.update_state import Group, Plan
from rlbus.controller.verbs import FleetVerb
from rlbus.controller.viewing import Head, Viewing
from rlbus.controller.waiting import Waiter, WaitingRoom
from rlbus.errors import DecodeError
from rlbus.schemas import (
    AbortFleet,
    CancelOp,
    ControlRequest,
    Fault,
    FaultCode,
    FleetView,
    FlushFleet,
    GetFleet,
    GetHistory,
    GetVersions,
    ListLoras,
    LoadLoraFleet,
    MutationRequest,
    OpAccepted,
    PauseFleet,
    PutManifestPage,
    Refusal,
    ReloadFleet,
    Report,
    ResumeFleet,
    SenderSignal,
    SleepFleet,
    TensorSum,
    TransferFleet,
    UnloadLoraFleet,
    UpdateWeights,
    Version,
    WaitReady,
    WakeFleet,
    WorkerId,
    WorkerMessage,
)

_log = logging.getLogger("rlbus.controller")

# How often time is looked at: liveness, waits. Small against the shortest heartbeat interval in use.
TICK_S = 0.25
# How long a stop may take to undo what runs. Docker and Kubernetes kill after 10 s and 30 s.
STOP_S = 8.0

# Name of an op that brings workers to the version that the fleet has.
CATCH_UP = "catch_up"
# What the journal says of a resume that didn't ask for clean weights.
FORCED = "forced"
VerbRequest = PauseFleet | ResumeFleet | FlushFleet | AbortFleet | GetVersions | SleepFleet | WakeFleet | ListLoras


@dataclass(frozen=True, slots=True)
class Settings:
    """How a controller behaves. `components` are greeted at once, others when they are first heard.

    `group_timeout_s` bounds the forming of a process group, and is the least backstop of each collective in it.
    `frontend` has to show an adapter before its load counts as done; None: there is none to ask.
    """

    components: tuple[str, ...] = ("backend",)
    group_timeout_s: float = 60.0
    stop_s: float = STOP_S
    frontend: Frontend | None = None


class Controller:
    """One controller. `run` it; there must be one per namespace, which `rlbus.controller.reign` sees to by a lease.

    Its term comes with the lease. Without one (`rlbus controller --single`) it is the millisecond of its start, so that
    one that was restarted is newer than the one before; a leader with a lease then takes a larger one (`outranked`).
    `journal` is what it writes down and finds left behind; None: nothing. `objects` is where adapters may come from,
    which it frees of what was unloaded.
    """

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        *,
        settings: Settings | None = None,
        term: int | None = None,
        journal: Journal | None = None,
        objects: Objects | None = None,
    ) -> None:
        self.settings = Settings() if settings is None else settings
        self.namespace = namespace
        self.term = int(bus.clock.now() * 1000) if term is None else term
        self.registry = Registry(namespace, term=self.term, tick_s=TICK_S)
        # Set when requests are taken.
        self.ready = asyncio.Event()
        # Set when a worker has seen a larger term than ours, so that it refuses us.
        self.outranked = asyncio.Event()
        # Requests that could not be decoded, or were on the wrong subject. Only grows.
        self.num_bad_requests = 0
        # Requests that came while nothing could be answered: disconnected, or the lease was over. Only grows.
        self.num_unanswerable = 0
        self._bus = bus
        self._line = Line(bus, namespace, self.term, self.registry)
        self._desk = Desk(bus, namespace, journal)
        self._viewing = Viewing(
            bus, self.registry, self._head, lambda view: self._loras.explain(self._catch_ups.explain(view))
        )
        self._waiting = WaitingRoom(self.registry, lambda limit: self._viewing.page(limit))
        self._catch_ups = CatchUps(
            bus, self.registry, self._desk, lambda request: self._begin_verb(request, Message("", b""), CATCH_UP)
        )
        self._transfers = Transfers(self._line, self.registry)
        self._giving_way = GivingWay(bus, self._desk, self._on_control)
        self._callers = Callers(bus, self._desk)
        self._manifests = Manifests()
        self._group: Group | None = None
        self._greeter = Greeter(bus, namespace, self.term)
        self._hearing = Hearing(
            bus,
            self.registry,
            self._greeter,
            self.settings.components,
            self._waiting,
            on_lost=self._lose,
            on_heard=self._heard,
        )
        self._stop_s = self.settings.stop_s
        self._succession: Succession | None = None
        if journal is not None:
            self._succession = Succession(
                journal, bus, namespace, self._desk, self._line, self._catch_ups, on_committed=self._committed
            )
        self._loras = LoraDesk(
            bus,
            self._line,
            self._desk,
            frontend=self.settings.frontend,
            succession=self._succession,
            objects=objects,
        )

    def abandon(self) -> None:
        """Somebody else leads: when `run` is cancelled now, nothing is taken back, since that is theirs to do."""
        self._stop_s = 0.0

    async def run(self) -> None:
        """Serve until cancelled; then take back what runs, within `settings.stop_s`.

        Cancel: the way to stop it. A second cancel drops what is being undone.
        """
        loop = asyncio.get_running_loop()
        stop_watching = self._bus.watch_connection(self._hearing.on_connection)
        subscriptions: list[Subscription] = [
            self._bus.subscribe(subjects.all_workers(self.namespace), WorkerMessage, self._hearing.on_message)
        ]
        known = () if self._succession is None else self._succession.restore()
        self._loras.restore()
        try:
            self._greeter.greet((*self.settings.components, *known))
            if self._succession is not None:
                await self._succession.listen()
                if self._is_outranked():  # settled under this term, what was left behind would be lost
                    await asyncio.Event().wait()
                self._succession.begin_takeovers()
            requests = subjects.all_control(self.namespace)
            subscriptions.append(self._bus.subscribe(requests, ControlRequest, self._on_control, self._on_bad_request))
            self.ready.set()
            while True:
                await asyncio.sleep(TICK_S)
                self._is_outranked()
                self._hearing.tick()
                self._waiting.check()
                self._giving_way.tick(loop.time())
                self._callers.tick(loop.time())
                self._catch_ups.tick(loop.time())
                self._loras.tick(loop.time())
                if self._succession is not None:
                    self._succession.keep_version()
        finally:
            self._waiting.refuse_all(fault(FaultCode.CANCELLED, "the controller is stopping", retryable=True))
            try:
                await self._catch_ups.aclose()
                await self._loras.aclose()
                await self._desk.aclose(self._stop_s)
            finally:
                for subscription in subscriptions:
                    subscription.unsubscribe()
                stop_watching()

    def _is_outranked(self) -> bool:
        if self.registry.newest_term > self.term and not self.outranked.is_set():
            _log.error("workers have seen term %d, ours is %d: they refuse us", self.registry.newest_term, self.term)
            self.outranked.set()
        return self.outranked.is_set()

    def view(self) -> FleetView:
        """The fleet as it is known now."""
        return self._viewing.whole()

    def _head(self) -> Head:
        mutation = self._desk.mutation
        epoch = None if self._group is None else self._group.plan.epoch
        return Head(self.term, epoch, None if mutation is None else mutation.op.op_id)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _lose(self, worker: WorkerId, reason: str) -> None:
        self._line.losses.report(worker, reason)
        mutation = self._desk.mutation
        if mutation is not None and mutation.update is not None:
            mutation.update.on_gone(worker, reason)

    def _heard(self, worker: WorkerId) -> None:
        mutation = self._desk.mutation
        if mutation is not None and mutation.update is not None:
            mutation.update.on_heard(worker)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _on_bad_request(self, error: DecodeError, message: Message) -> None:
        self.num_bad_requests += 1
        _log.warning("refused: %s", error)
        self._refuse(message, None, fault(FaultCode.BAD_MESSAGE, str(error)))

    def _on_control(self, request: ControlRequest, message: Message) -> None:
        if not self._bus.transport.is_connected:
            # Also when our lease is over, or not renewed yet: who can't answer doesn't begin. The client asks again,
            # and reaches whoever leads then.
            self.num_unanswerable += 1
            return
        op = str(request.__struct_config__.tag)
        if message.subject != subjects.control(self.namespace, op):
            self.num_bad_requests += 1
            problem = fault(FaultCode.BAD_MESSAGE, f"a request of kind {op} came on {message.subject}")
            self._refuse(message, request.op_id, problem)
            return
        match request:
            case PutManifestPage():
                self._take(message, request.op_id, self._manifests.put(request.page))
            case GetFleet():
                self._reply(message, self._viewing.page(request.limit, request.after))
            case GetHistory():
                self._tell_history(request, message)
            case CancelOp():
                self._cancel(request, message)
            case SenderSignal():
                self._signal(request, message)
            case WaitReady():
                self._wait_ready(request, message)
            case UpdateWeights():
                self._begin_update(request, message)
            case TransferFleet():
                self._begin_transfer(request, message)
            case LoadLoraFleet() | UnloadLoraFleet():
                if not self._is_handled(request, message, is_mutation=True):
                    refusal = self._loras.begin(request, message.reply, op)
                    if refusal is not None:
                        self._refuse(message, request.op_id, refusal)
            case _:
                self._begin_verb(request, message, op)

    def _reply(self, message: Message, answer: Any) -> None:
        if message.reply is not None:
            publish(self._bus, message.reply, answer)

    def _refuse(self, message: Message, op_id: str | None, why: Fault) -> None:
        _log.info("request on %s refused: %s", message.subject, why.message)
        self._reply(message, Refusal(op_id=op_id, fault=why))

    def _take(self, message: Message, op_id: str, problem: Fault | None) -> None:
        """Say that a short request was taken, or why not."""
        if problem is None:
            self._reply(message, OpAccepted(op_id=op_id))
        else:
            self._refuse(message, op_id, problem)

    def _cancel(self, request: CancelOp, message: Message) -> None:
        problem: Fault | None = None
        why = fault(FaultCode.CANCELLED, f"cancelled by {request.caller}")
        running = self._desk.running(request.of_op_id)
        if running is not None:
            running.op.stop(why)
        elif self._waiting.get(request.of_op_id) is not None:
            self._waiting.refuse(request.of_op_id, why)
        elif not self._giving_way.withdraw(request.of_op_id, why):
            what = "has ended" if self._desk.has_ended(request.of_op_id) else "isn't known"
            problem = fault(FaultCode.UNKNOWN_OP, f"op {request.of_op_id} {what}", op_id=request.of_op_id)
        self._take(message, request.op_id, problem)

    def _tell_history(self, request: GetHistory, message: Message) -> None:
        told = NO_JOURNAL if self._succession is None else self._succession.history(request)
        if isinstance(told, Fault):
            self._refuse(message, request.op_id, told)
        else:
            self._reply(message, told)

    def _signal(self, request: SenderSignal, message: Message) -> None:
        problem: Fault | None = None
        if not self._callers.heard(request, asyncio.get_running_loop().time()):
            running = self._desk.running(request.of_op_id)
            if running is not None and running.update is not None:
                problem = running.update.on_signal(request)
            else:
                nobody = f"no update {request.of_op_id} is running here"
                problem = fault(FaultCode.UNKNOWN_OP, nobody, op_id=request.of_op_id)
        self._take(message, request.op_id, problem)

    def _wait_ready(self, request: WaitReady, message: Message) -> None:
        waiter = self._waiting.get(request.op_id)
        if waiter is not None:
            waiter.op.join(message.reply)
            return
        problem = admission.check_deadline(request.deadline_s) or self._waiting.refusal(request)
        if problem is not None:
            self._refuse(message, request.op_id, problem)
            return
        op = Op(self._bus, self.namespace, request, "wait_ready")
        self._waiting.add(Waiter(op, request))
        op.join(message.reply)
        self._waiting.check()

    # -- ops ----------------------------------------------------------------------------------------------------------

    def _is_handled(self, request: Any, message: Message, *, is_mutation: bool) -> bool:
        """Whether the request was a repeat, or nothing of its kind can begin now."""
        repeat = self._desk.repeat(request, message.reply)
        if repeat is True:
            return True
        problem = repeat if isinstance(repeat, Fault) else None
        problem = problem or admission.check_sender(request)
        if problem is None and is_mutation and self._giving_way.takes_place(request, message):
            return True
        problem = problem or self._desk.refusal(is_mutation=is_mutation)
        problem = problem or admission.check_target(self.registry, request.target)
        if problem is not None:
            self._refuse(message, request.op_id, problem)
        return problem is not None

    def _begin_verb(self, request: VerbRequest | ReloadFleet, message: Message, name: str) -> None:
        is_mutation = not isinstance(request, AbortFleet | GetVersions | ListLoras)
        if self._is_handled(request, message, is_mutation=is_mutation):
            return
        members = admission.asked(self.registry.addressable(request.target), request)
        problem = admission.check_verb(members, request)
        version = Version()
        if problem is None and isinstance(request, ReloadFleet):
            version = admission.reload_version(self.registry, request)
            problem = admission.check_version(self.registry, members, version, allow_rollback=request.allow_rollback)
            problem = problem or admission.check_catch_up(self.registry, request, members, version)
        if problem is not None:
            self._refuse(message, request.op_id, problem)
            return
        op = Op(self._bus, self.namespace, request, name)

        async def work(_: Running) -> Report:
            return await self._run_verb(op, request, members, version)

        record: Record | None = None
        if self._succession is not None and is_mutation:
            given = version if isinstance(request, ReloadFleet) else None
            held = admission.held(members)
            what = FORCED if isinstance(request, ResumeFleet) and request.force else None
            record = self._succession.record(request, name, members, held=held, version=given, what=what)
        self._desk.begin(op, message.reply, work, is_mutation=is_mutation, record=record)

    async def _run_verb(
        self, op: Op, request: VerbRequest | ReloadFleet, members: Sequence[Member], version: Version
    ) -> Report:
        if isinstance(request, SleepFleet | WakeFleet):
            sleeping = SleepVerb(op, self._line, members)
            return await (sleeping.sleep(request) if isinstance(request, SleepFleet) else sleeping.wake(request))
        verb = FleetVerb(op, self._line, [m.worker for m in members], admission.held(members))
        match request:
            case PauseFleet():
                return await verb.pause(request)
            case ReloadFleet():
                report, is_committed = await verb.reload(request, version)
                if is_committed:
                    self._committed(version, request)
                return report
            case _:
                return await verb.plain(request)

    def _begin_update(self, request: UpdateWeights, message: Message) -> None:
        if self._is_handled(request, message, is_mutation=True):
            return
        members = self._giving_way.without_stuck(self.registry.addressable(request.target), request.target)
        tensors = self._manifests.get(request.manifest_digest)
        problem = admission.check_update(self.registry, request, members, tensors)
        if problem is not None:
            self._refuse(message, request.op_id, problem)
            return
        assert tensors is not None
        plan = admission.plan_update(
            self.registry,
            request,
            members,
            tensors,
            self._manifests.pages_of(request.manifest_digest, tensors),
            self._group,
            self.settings.group_timeout_s,
            self._catch_ups.expected_sums(request),
        )
        op = Op(self._bus, self.namespace, request, CATCH_UP if request.is_catch_up else name_of(request))

        async def work(running: Running) -> Report:
            return await self._run_update(running, plan)

        record: Record | None = None
        if self._succession is not None:
            held = [c.worker for c in plan.candidates if c.is_held]
            version, epoch = request.version, plan.next_epoch
            record = self._succession.record(request, op.name, members, held=held, version=version, epoch=epoch)
        self._desk.begin(op, message.reply, work, is_mutation=True, record=record)

    def _begin_transfer(self, request: TransferFleet, message: Message) -> None:
        if self._is_handled(request, message, is_mutation=True):
            return
        members = self.registry.addressable(request.target)
        problem = self._transfers.problem(request, members)
        if problem is not None:
            self._refuse(message, request.op_id, problem)
            return
        name = ROUTES[request.step]
        op, version = Op(self._bus, self.namespace, request, name), self._transfers.version(request)

        async def work(_: Running) -> Report:
            report, committed = await self._transfers.run(op, request, members, version)
            if committed is not None:
                self._committed(committed, request)
            return report

        record: Record | None = None
        if self._succession is not None:
            held = admission.held(members)
            record = self._succession.record(request, name, members, held=held, version=version)
        self._desk.begin(op, message.reply, work, is_mutation=True, record=record)

    def _committed(self, version: Version, request: MutationRequest, sums: Sequence[TensorSum] = ()) -> None:
        if keeps_version(request):
            return
        self.registry.committed(version)
        self._catch_ups.committed(version, request, sums)
        if self._succession is not None:
            self._succession.keep_version()

    def _is_known_only(self, version: Version) -> bool:
        """Whether the fleet is at `version` by the word of workers alone, some of which may be gone: then an op to it
        did commit it, though no answer says so, and what the trainer keeps of it is the snapshot of it.
        """
        snapshot = self._catch_ups.snapshot
        return self.registry.version == version and (snapshot is None or snapshot.version != version)

    async def _run_update(self, running: Running, plan: Plan) -> Report:
        run = UpdateRun(running.op, self._line, plan)
        running.update = run
        if self._succession is not None:
            run.on_phase = self._succession.note_phase
        self.registry.saw_epoch(plan.next_epoch)
        try:
            state = await run.run()
        finally:
            # Also when dropped half way: what stands then is as far as it came.
            self._group = standing_group(run.state)
            for epoch in run.state.epochs:
                self.registry.saw_epoch(epoch)
            if has_committed(run.state) or self._is_known_only(plan.request.version):
                self._committed(plan.request.version, plan.request, run.state.sums)
        running.op.finish()
        return update_report(state, running.op.timings)
