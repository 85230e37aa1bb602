"""One simulated run: the fleet of a scenario, what is asked of it and what goes wrong, and then the reckoning.

Active phase: asks and mishaps at their times. Calm phase: faults stop, everything that is cut is mended, and bounded
virtual time passes. Then the invariants over the whole fleet are checked. See docs/simulation.md.
"""

import asyncio
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rlbus.controller.service import Controller
from rlbus.errors import RLBusError
from rlbus.reports import UpdateReport
from rlbus.schemas import OpStatus, Report, SnapshotKind, Version
from rlbus.transfer.fake import FakeSource
from tests.simulation import reckoning
from tests.simulation.leading import ControllerProcess
from tests.simulation.mishaps import happen
from tests.simulation.parties import (
    OPERATOR,
    OperatorProcess,
    Process,
    TracedBroker,
    TrainerProcess,
    WorkerProcess,
)
from tests.simulation.scenario import ACTIVE_S, Ask, Scenario
from tests.simulation.truth import Boot, Truth
from tests.simulation.weights import GIVEN, KEPT, TENSORS, Fabric

# How long a fleet may take after the faults until it is as I3 says, in virtual seconds: a lease of an op (30 s) and the
# longest wait between two tries of a catch-up (60 s) fit.
RECOVERY_S = 120.0
# How often the operator resumes what it holds, in seconds. Each time it takes the place of a catch-up that runs.
RESUME_S = 15.0
# Part of the runs that heal by themselves in which the trainer then gives one more update.
NEXT_UPDATE_PART = 0.3
# How long everything that was begun before may take to end before that, in virtual seconds.
DRAIN_S = 20.0
# How often the controllers' views are compared with the truth, in seconds.
LOOK_S = 1.0
# A worker that died is started again after this long, in seconds.
RESTART_S = 1.0


class World:
    """Everything of one run; implements what `mishaps` and `reckoning` need of it.

    `folder` is an empty one, for what workers keep over the end of their process.
    """

    def __init__(self, scenario: Scenario, truth: Truth, folder: Path) -> None:
        self.scenario = scenario
        self.truth = truth
        self.workers: list[WorkerProcess] = []
        self.controllers: list[ControllerProcess] = []
        self.broker = TracedBroker(self.truth, scenario.seed)
        self.is_calm = False
        # How late messages may be, in seconds, because somebody lagged in this run.
        self.lag_s = 0.0
        self.recovery_s = RECOVERY_S
        self._folder = folder if scenario.has_ledgers else None
        self._fabric = Fabric()
        self._rng = random.Random(f"world/{scenario.seed}")
        self._num_boots = [0] * len(scenario.sizes)
        self._num_controllers = 0
        self._num_trainers = 0
        self._last_step = 0
        # The last report, what asked for it, and the controller that gave it.
        self._last: tuple[Report, Ask, Controller] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # -- the run ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """The whole run; violations are in `truth`."""
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        self._operator = OperatorProcess(self.scenario, self.truth, self.broker)
        for _ in range(self.scenario.num_controllers):
            self.start_controller()
        for number in range(len(self.scenario.sizes)):
            self.workers.append(self._new_worker(number, None))
        self.start_trainer()
        self._spawn(self._supervise(), "supervisor")
        self._spawn(self._load(), "load")
        for number, ask in enumerate(self.scenario.asks):
            self._spawn(self._ask_later(ask), f"ask {number}")
        for number, mishap in enumerate(self.scenario.mishaps):
            self._spawn(happen(self, mishap), f"mishap {number}")
        await asyncio.sleep(ACTIVE_S)
        await self._calm_down()
        await self._recover()
        reckoning.reckon(self)

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

    @property
    def leader(self) -> ControllerProcess | None:
        """Who leads, as far as it believes itself; of several the newest."""
        leading = [(c.controller.term, c) for c in self.controllers if c.is_leading and c.controller is not None]
        return max(leading, key=lambda one: one[0])[1] if leading else None

    @property
    def trainer(self) -> TrainerProcess:
        """Who trains now."""
        return self._trainer

    def processes(self) -> list[Process]:
        """All that were not replaced."""
        return [*self.workers, *self.controllers, self._trainer, self._operator]

    def close(self) -> None:
        """The run is over, the loop may be closed: let go of files."""
        for worker in self.workers:
            if worker.ledger is not None:
                worker.ledger.close()

    def start_controller(self) -> None:
        """One more: it stands by as long as another one leads."""
        self._num_controllers += 1
        controller = ControllerProcess(self.scenario, self.truth, self.broker, self._num_controllers)
        self.controllers.append(controller)
        self._enter(controller)

    def start_trainer(self) -> None:
        """The next one. It goes on from the version that the fleet has."""
        self._num_trainers += 1
        self._trainer = TrainerProcess(self.scenario, self.truth, self.broker, self._fabric, self._num_trainers)
        self._enter(self._trainer)
        if self._num_trainers > 1:
            with self._trainer.gate.inside():
                self._spawn(self._look_up_version(self._trainer), f"{self._trainer.name} looks")

    async def _look_up_version(self, trainer: TrainerProcess) -> None:
        try:
            view = await trainer.trainer.fleet.status()
        except RLBusError as exc:
            self.truth.raised("status", exc)
            return
        if trainer is self._trainer and view.version is not None:
            self.truth.note(trainer.name, f"goes on from {view.version}")
            self._last_step = view.version.step

    async def restart_worker(self, number: int, after_s: float, *, is_asked: bool = False) -> None:
        """Its process ends, at once or as it does when it `is_asked` to, and another boot of it comes later."""
        worker = self.workers[number]
        if not worker.is_running or worker.is_leaving:
            return
        worker.is_leaving = True
        await (worker.leave() if is_asked else worker.crash())
        await asyncio.sleep(after_s)
        self.workers[number] = self._new_worker(number, worker.boot)

    def _new_worker(self, number: int, before: Boot | None) -> WorkerProcess:
        self._num_boots[number] += 1
        boot = self._num_boots[number]
        worker = WorkerProcess(
            self.scenario, self.truth, self.broker, self._fabric, number, boot, folder=self._folder, before=before
        )
        self._enter(worker)
        return worker

    def _enter(self, process: Process) -> None:
        if self.is_calm:
            process.calm()
        process.start()

    async def _supervise(self) -> None:
        """Start again who died by itself, and look at what the controllers believe."""
        while True:
            await asyncio.sleep(LOOK_S)
            for number, worker in enumerate(self.workers):
                if worker.engine.is_dead:
                    self._spawn(self.restart_worker(number, RESTART_S), f"restart {number}")
            reckoning.look(self)

    # -- what is asked ------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        """Completions, on whoever lives."""
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 3.0))
            worker = self._rng.choice(self.workers)
            if worker.is_running and not worker.engine.is_dead and not worker.gate.is_closed:
                with worker.gate.inside():
                    worker.engine.generate(self._rng.randint(1, 8))

    async def _ask_later(self, ask: Ask) -> None:
        await asyncio.sleep(ask.at_s)
        trainer = self._trainer
        match ask.verb:
            case "update":
                work = self._update(trainer, ask)
            case "repeat":
                work = self._repeat()
            case "reload":
                work = self._reload(ask)
            case _:
                work = self._verb(ask)
        with (trainer if ask.verb == "update" else self._operator).gate.inside():
            call = asyncio.get_running_loop().create_task(work, name=f"call at {ask.at_s}")
        if ask.verb == "update":
            trainer.calls.add(call)
        await asyncio.wait({call}, timeout=ask.cancel_after_s)
        if not call.done():
            self.truth.note("caller", f"loses interest in {ask.verb}")
            self.truth.count("fault cancel")
            call.cancel()
            await asyncio.wait({call})
        trainer.calls.discard(call)
        if not call.cancelled():
            call.result()

    @property
    def _controller(self) -> Controller | None:
        return None if self.leader is None else self.leader.controller

    async def _verb(self, ask: Ask) -> None:
        controller = self._controller
        report = await self._call(ask.verb, ask.options)
        if report is not None:
            self.truth.reported(report)
            if (
                controller is not None
                and controller is self._controller
                and ask.verb in ("pause", "resume", "flush", "abort")
            ):
                self._last = (report, ask, controller)

    async def _reload(self, ask: Ask) -> None:
        """The operator gives the fleet the next version from a folder."""
        version, _ = self._goal("next")
        path = f"{GIVEN}/{version}"
        self._fabric.folders[path] = version
        await self._verb(Ask(ask.at_s, "reload", ask.options | {"path": path, "version": version}))

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
            self.truth.raised(verb, exc)
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
            self.truth.raised("update_weights", exc)
            return None
        self.truth.reported(update.report)
        return update.report

    # -- the reckoning ------------------------------------------------------------------------------------------------

    async def _calm_down(self) -> None:
        self.truth.note("world", "calms down")
        self.is_calm = True
        for process in self.processes():
            process.calm()
        await asyncio.sleep(DRAIN_S)

    async def _recover(self) -> None:
        """First nobody does anything, if there is a snapshot to catch up from; then the trainer goes on. Whoever put
        engines to sleep wakes them before.
        """
        await self._wake()
        if self._heals_by_itself():
            self.truth.count("recovered by itself")
            await self._until_recovered()
        if not self._heals_by_itself() or self._rng.random() < NEXT_UPDATE_PART:
            self.truth.count("recovered by the next update")
            await self._next_update()
            await self._until_recovered()

    def _heals_by_itself(self) -> bool:
        """Whether the fleet's version is kept by somebody who is there."""
        version = None if self._controller is None else self._controller.registry.version
        if version is None or version in self.truth.given:
            return False
        if self.scenario.snapshot is SnapshotKind.DISK:
            return f"{KEPT}/{version}" in self._fabric.folders
        kept = self.trainer.kept.get(version)
        # One that it tried to send and that nobody took is nobody's snapshot.
        return kept is not None and kept.request.op_id in self.truth.committed_by.get(version, ())

    async def _until_recovered(self) -> None:
        until_s, resume_s = self.truth.now_s + RECOVERY_S, self.truth.now_s
        while reckoning.not_recovered(self):
            if self.truth.now_s >= until_s:
                reckoning.reckon_recovery(self)
                return
            if self.truth.now_s >= resume_s and reckoning.is_held_by(self, OPERATOR):
                # Its owner lives, and does what owners do.
                await self._verb(Ask(self.truth.now_s, "resume", {"deadline_s": 10.0}))
                resume_s = self.truth.now_s + RESUME_S
            await asyncio.sleep(LOOK_S)

    async def _wake(self) -> None:
        until_s = self.truth.now_s + RECOVERY_S
        while asleep := [w.name for w in self.workers if w.engine.memory.asleep or (w.agent and w.agent.state.asleep)]:
            if self.truth.now_s >= until_s:
                self.truth.broken("I3", f"{', '.join(asleep)} could not be woken in {RECOVERY_S:g} s after the faults")
                return
            await self._verb(Ask(self.truth.now_s, "wake", {"deadline_s": 10.0}))
            await asyncio.sleep(LOOK_S)

    async def _next_update(self) -> None:
        """The trainer goes on with the next step until one succeeds."""
        until_s = self.truth.now_s + RECOVERY_S
        while self.truth.now_s < until_s:
            self._last_step += 1
            report = await self._update_to(self._trainer, Version(step=self._last_step), deadline_s=30.0, stall_s=5.0)
            if report is not None and report.status is OpStatus.OK:
                return
            await asyncio.sleep(LOOK_S)
        self.truth.broken("I3", f"no update succeeded in {RECOVERY_S:g} s after the faults")
