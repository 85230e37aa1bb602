"""One simulated run: the fleet of a scenario, what is asked of it and what goes wrong, and then the reckoning.

Active phase: asks and mishaps at their times. Calm phase: faults stop, everything that is cut is mended, and bounded
virtual time passes. Then the invariants over the whole fleet are checked. See docs/simulation.md.
"""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from rlbus.errors import RLBusError
from rlbus.reports import UpdateReport
from rlbus.schemas import FleetView, MemberView, OpStatus, Report, Version, WeightsState
from rlbus.testing import VirtualTimeLoop
from rlbus.transfer.fake import FakeSource
from tests.simulation.parties import (
    TENSORS,
    ControllerProcess,
    Fabric,
    OperatorProcess,
    Process,
    TracedBroker,
    TrainerProcess,
    WorkerProcess,
)
from tests.simulation.scenario import ACTIVE_S, HEARTBEAT_S, MAX_LAG_S, Ask, Mishap, Scenario
from tests.simulation.truth import Truth

# The strong form of I3: after the faults the fleet recovers by itself (leases end ownerless pauses, a journal finishes
# what a controller left, workers that are behind are caught up). False: the harness plays the trainer and the operator
# who do the next full update and a resume, and only then everybody has to be admitted.
HEALS_BY_ITSELF = False
# How long a fleet may take after the faults until it is as I3 says, in virtual seconds.
RECOVERY_S = 40.0
# How long everything that was begun before may take to end before that, in virtual seconds.
DRAIN_S = 20.0
# How often the controllers' views are compared with the truth, in seconds.
LOOK_S = 1.0
# An admitted worker that isn't what its announcements said is seen by the controller within this many seconds: it turns
# suspect after 2.5 of its intervals, which have up to 20 % of jitter, and messages take up to a second.
MAX_NEWS_S = 2.5 * HEARTBEAT_S * 1.2 + 2.0
# A worker that died is started again after this long, in seconds.
RESTART_S = 1.0


class World:
    """Everything of one run."""

    def __init__(self, scenario: Scenario, truth: Truth) -> None:
        self.scenario = scenario
        self.truth = truth
        self._broker = TracedBroker(self.truth, scenario.seed)
        self._fabric = Fabric()
        self._rng = random.Random(f"world/{scenario.seed}")
        self._num_boots = [0] * len(scenario.sizes)
        self._num_terms = 0
        self._num_trainers = 0
        self._last_step = 0
        self._is_calm = False
        # How late messages may be, in seconds, because somebody lagged in this run.
        self._lag_s = 0.0
        # The last report, what asked for it, and the controller that gave it.
        self._last: tuple[Report, Ask, ControllerProcess] | None = None
        # Another controller is about to take over, so that this one isn't replaced by two.
        self._is_replacing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.workers: list[WorkerProcess] = []
        self.controllers: list[ControllerProcess] = []

    # -- the run ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """The whole run; violations are in `truth`."""
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        self._operator = OperatorProcess(self.scenario, self.truth, self._broker)
        self._start_controller()
        for number in range(len(self.scenario.sizes)):
            self.workers.append(self._new_worker(number))
        self._start_trainer()
        self._spawn(self._supervise(), "supervisor")
        self._spawn(self._load(), "load")
        for number, ask in enumerate(self.scenario.asks):
            self._spawn(self._ask_later(ask), f"ask {number}")
        for number, mishap in enumerate(self.scenario.mishaps):
            self._spawn(self._happen_later(mishap), f"mishap {number}")
        await asyncio.sleep(ACTIVE_S)
        await self._calm_down()
        await self._recover()
        self._reckon(self._controller.controller.view())

    def _on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.truth.broken("I0", f"{context.get('message')}: {context.get('exception')!r}")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.truth.broken("I0", f"{task.get_name()} raised {error!r}")

    # -- processes ----------------------------------------------------------------------------------------------------

    def _new_worker(self, number: int) -> WorkerProcess:
        self._num_boots[number] += 1
        boot = self._num_boots[number]
        worker = WorkerProcess(self.scenario, self.truth, self._broker, self._fabric, number, boot)
        self._enter(worker)
        return worker

    def _start_controller(self) -> None:
        self._num_terms += 1
        self._controller = ControllerProcess(self.scenario, self.truth, self._broker, self._num_terms)
        self.controllers.append(self._controller)
        self._enter(self._controller)

    def _start_trainer(self) -> None:
        self._num_trainers += 1
        self._trainer = TrainerProcess(self.scenario, self.truth, self._broker, self._fabric, self._num_trainers)
        self._enter(self._trainer)

    def _enter(self, process: Process) -> None:
        if self._is_calm:
            process.calm()
        process.start()

    def _processes(self) -> list[Process]:
        return [*self.workers, *self.controllers, self._trainer, self._operator]

    async def _supervise(self) -> None:
        """Start again who died by itself, and look at what the controllers believe."""
        while True:
            await asyncio.sleep(LOOK_S)
            for number, worker in enumerate(self.workers):
                if worker.engine.is_dead and worker.is_running:
                    self._spawn(self._restart_worker(number, RESTART_S), f"restart {number}")
            for controller in self.controllers:
                if controller.is_running:
                    self._look(controller)

    async def _restart_worker(self, number: int, after_s: float) -> None:
        worker = self.workers[number]
        if worker.is_running:
            await worker.crash()
            await asyncio.sleep(after_s)
            self.workers[number] = self._new_worker(number)

    # -- what is asked ------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        """Completions, on whoever lives."""
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 3.0))
            worker = self._rng.choice(self.workers)
            if worker.is_running and not worker.engine.is_dead:
                worker.engine.generate(self._rng.randint(1, 8))

    async def _ask_later(self, ask: Ask) -> None:
        await asyncio.sleep(ask.at_s)
        trainer = self._trainer
        match ask.verb:
            case "update":
                work = self._update(trainer, ask)
            case "repeat":
                work = self._repeat()
            case _:
                work = self._verb(ask)
        call = asyncio.get_running_loop().create_task(work, name=f"call at {ask.at_s}")
        if ask.verb == "update":
            trainer.calls.add(call)
        await asyncio.wait({call}, timeout=ask.cancel_after_s)
        if not call.done():
            self.truth.note("caller", f"loses interest in {ask.verb}")
            call.cancel()
            await asyncio.wait({call})
        trainer.calls.discard(call)
        if not call.cancelled():
            call.result()

    async def _verb(self, ask: Ask) -> None:
        controller = self._controller
        report = await self._call(ask.verb, ask.options)
        if report is not None:
            self.truth.reported(report)
            if controller is self._controller and ask.verb in ("pause", "resume", "flush", "abort"):
                self._last = (report, ask, controller)

    async def _repeat(self) -> None:
        """Ask for the last op once more, under its own op_id."""
        if self._last is None:
            return
        first, ask, controller = self._last
        again = await self._call(ask.verb, dict(ask.options, op_id=first.op_id))
        if again is not None and controller is self._controller:
            self.truth.repeated(first, again)

    async def _call(self, verb: str, options: dict[str, Any]) -> Report | None:
        self.truth.note("ask", f"{verb} {options}")
        try:
            report: Report = await getattr(self._operator.client, verb)(**options, check=False)
        except RLBusError as exc:
            self.truth.note("raised", f"{verb}: {exc}")
            return None
        return report

    async def _update(self, trainer: TrainerProcess, ask: Ask) -> None:
        options = dict(ask.options)
        version, is_rollback = self._goal(options.pop("goal"))
        await self._update_to(trainer, version, allow_rollback=is_rollback, **options)

    def _goal(self, goal: str) -> tuple[Version, bool]:
        if goal == "same" and self._last_step:
            return Version(step=self._last_step), False
        if goal in ("older", "rollback") and self._last_step > 1:
            version = Version(step=self._rng.randint(1, self._last_step - 1))
            if goal == "rollback":
                self.truth.rollbacks.add(version)
            return version, goal == "rollback"
        self._last_step += 1
        return Version(step=self._last_step), False

    async def _update_to(self, trainer: TrainerProcess, version: Version, **options: Any) -> Report | None:
        self.truth.note("ask", f"update to {version} {options}")
        try:
            update: UpdateReport = await trainer.trainer.update_weights(
                FakeSource(TENSORS), version=version, check=False, **options
            )
        except RLBusError as exc:
            self.truth.note("raised", f"update to {version}: {exc}")
            return None
        self.truth.reported(update.report)
        return update.report

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    async def _happen_later(self, mishap: Mishap) -> None:
        await asyncio.sleep(mishap.at_s)
        if self._is_calm:
            return
        self.truth.note("mishap", f"{mishap.kind} {mishap.whom} for {mishap.for_s:.3f} s")
        processes = [p for p in self._processes() if p.is_running]
        victim = processes[mishap.whom % len(processes)]
        match mishap.kind:
            case "partition":
                self._broker.partition(victim.transport)
                await asyncio.sleep(mishap.for_s)
                self._broker.heal(victim.transport)
            case "lag":
                self._lag_s = MAX_LAG_S
                victim.transport.faults = replace(victim.transport.faults, delay_s=(0.0, MAX_LAG_S))
                await asyncio.sleep(mishap.for_s)
                if not self._is_calm:
                    victim.transport.faults = self.scenario.faults
            case "disconnect":
                await self._cut([victim], mishap.for_s)
            case "blackout":
                await self._cut(processes, mishap.for_s)
            case "worker-crash":
                await self._restart_worker(mishap.whom % len(self.workers), mishap.for_s)
            case "controller-crash":
                await self._replace_controller(mishap.for_s)
            case "controller-zombie":
                await self._leave_zombie(mishap.for_s)
            case "trainer-crash":
                await self._trainer.crash()
                self._start_trainer()
            case "trainer-zombie":
                zombie = self._trainer
                self._start_trainer()
                await asyncio.sleep(mishap.for_s)
                await zombie.crash()

    async def _cut(self, victims: list[Process], for_s: float) -> None:
        for victim in victims:
            self._broker.disconnect(victim.transport)
        await asyncio.sleep(for_s)
        for victim in victims:
            if victim.is_running:
                self._broker.reconnect(victim.transport)

    async def _replace_controller(self, after_s: float) -> None:
        if self._is_replacing:
            return
        self._is_replacing = True
        await self._controller.crash()
        await asyncio.sleep(after_s)
        self._start_controller()
        self._is_replacing = False

    async def _leave_zombie(self, for_s: float) -> None:
        """A controller is cut off and replaced, comes back without knowing it, and dies later."""
        if self._is_replacing:
            return
        self._is_replacing = True
        zombie = self._controller
        self._broker.partition(zombie.transport)
        await asyncio.sleep(for_s / 2)
        zombie.lose_requests()
        self._start_controller()
        self._is_replacing = False
        await asyncio.sleep(for_s / 2)
        self._broker.heal(zombie.transport)
        await asyncio.sleep(for_s)
        await zombie.crash()

    # -- the reckoning ------------------------------------------------------------------------------------------------

    async def _calm_down(self) -> None:
        self.truth.note("world", "calms down")
        self._is_calm = True
        for process in self._processes():
            process.calm()
        for zombie in self.controllers:
            if zombie is not self._controller:
                await zombie.crash()
        await asyncio.sleep(DRAIN_S)

    async def _recover(self) -> None:
        until_s = self.truth.now_s + RECOVERY_S
        if not HEALS_BY_ITSELF:
            await self._next_update(until_s)
            await self._verb(Ask(self.truth.now_s, "resume", {"deadline_s": 10.0}))
        while self.truth.now_s < until_s and self._not_recovered(self._controller.controller.view()):  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(LOOK_S)

    async def _next_update(self, until_s: float) -> None:
        """The trainer goes on with the next step until one succeeds."""
        while self.truth.now_s < until_s:
            self._last_step += 1
            report = await self._update_to(self._trainer, Version(step=self._last_step), deadline_s=30.0, stall_s=5.0)
            if report is not None and report.status is OpStatus.OK:
                return
            await asyncio.sleep(LOOK_S)
        self.truth.broken("I3", f"no update succeeded in {RECOVERY_S:g} s after the faults")

    def _not_recovered(self, view: FleetView) -> list[str]:
        """What is missing for I3."""
        members = {m.worker: m for m in view.members}
        missing = [f"{w.worker} isn't there" for w in self.workers if w.worker not in members]
        missing += [f"{m.worker} isn't admitted: {m.reason}" for m in view.members if not m.admitted]
        newest = max((w.boot.label for w in self.workers if w.boot.label is not None), default=None)
        if view.version != newest and not self.truth.rollbacks:
            missing.append(f"the fleet is at {view.version}, the newest that was committed is {newest}")
        return missing

    def _reckon(self, view: FleetView) -> None:
        for problem in self._not_recovered(view):
            self.truth.broken("I3", f"{problem}, {RECOVERY_S:g} s after the faults")
        for worker in self.workers:
            agent = worker.agent
            if agent is None or agent.state.running is not None:
                self.truth.broken("I3", f"{worker.worker} still runs {None if agent is None else agent.state.running}")
            for what in worker.engine.violations:
                self.truth.broken("I0", f"{worker.worker}: {what}")
        for process in self._processes():
            if process.transport.num_handler_errors:
                self.truth.broken("I0", f"a message handler of {process.name} raised")
        for member in view.members:
            self._check_admitted(member, self._controller, is_final=True)

    def _look(self, controller: ControllerProcess) -> None:
        """Compare what a controller believes with the truth (I1, I6)."""
        view = controller.controller.view()
        seen = controller.seen_version
        if (
            seen is not None
            and (view.version is None or view.version < seen)
            and view.version not in self.truth.rollbacks
        ):
            self.truth.broken("I6", f"{controller.name} went from {seen} to {view.version} without a rollback")
        controller.seen_version = view.version
        for member in view.members:
            self._check_admitted(member, controller, is_final=False)

    def _check_admitted(self, member: MemberView, controller: ControllerProcess, *, is_final: bool) -> None:
        view = controller.controller.registry.version
        weights = member.status.weights
        worker = self.workers[int(member.descriptor.instance_id)]
        if member.admitted and (
            weights.state is not WeightsState.CLEAN or (view is not None and weights.version != view)
        ):
            self.truth.broken("I1", f"{member.worker} is admitted with {weights} while the fleet is at {view}")
        if controller is not self._controller:
            return
        is_right = worker.is_running and worker.engine.truth_version == (weights.version or Version())
        # While the controller itself is cut off, nobody's silence counts, on purpose.
        if is_right or not member.admitted or not controller.transport.is_connected:
            worker.wrong_since_s = None
            return
        now_s = self.truth.now_s
        worker.wrong_since_s = now_s if worker.wrong_since_s is None else worker.wrong_since_s
        if is_final or now_s - worker.wrong_since_s > MAX_NEWS_S + self._lag_s:
            really = worker.engine.truth_version
            since = f"for {now_s - worker.wrong_since_s:.1f} s"
            self.truth.broken("I1", f"{member.worker} is admitted as {weights.version} but {since} it has {really}")


class SimulationLoop(VirtualTimeLoop):
    """Runs what goes to a thread at once instead: threads would end when they like, and runs would differ."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """As in asyncio, with the work done already."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as exc:  # noqa: BLE001 - whoever awaits the future gets it
            future.set_exception(exc)
        return future
