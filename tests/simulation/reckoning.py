"""Compares what the controller believes with the truth, all the time and at the end of a run (I1, I3, I6)."""

from typing import Protocol

from rlbus.schemas import FleetView, MemberView, Version, WeightsState, WeightsView
from tests.simulation.leading import ControllerProcess
from tests.simulation.parties import Process, WorkerProcess
from tests.simulation.scenario import HEARTBEAT_S
from tests.simulation.truth import Truth

# An admitted worker that isn't what its announcements said is seen by the controller within this many seconds: it turns
# suspect after 2.5 of its intervals, which have up to 20 % of jitter, and messages take up to a second.
MAX_NEWS_S = 2.5 * HEARTBEAT_S * 1.2 + 2.0


class Fleet(Protocol):
    """What the reckoning looks at."""

    truth: Truth
    workers: list[WorkerProcess]
    controllers: list[ControllerProcess]
    # How late messages may be, in seconds, because somebody lagged in this run.
    lag_s: float
    recovery_s: float

    @property
    def leader(self) -> ControllerProcess | None:
        """Who leads, as far as it believes itself."""

    def processes(self) -> list[Process]:
        """All that were not replaced."""


def look(fleet: Fleet) -> None:
    """Compare what each controller believes with the truth (I1, I6)."""
    leader = fleet.leader
    for process in fleet.controllers:
        if not process.is_leading or process.gate.is_closed or process.controller is None:
            continue
        view, seen = process.controller.view(), process.seen_version
        if seen is None and process is leader:
            # Who takes over goes on from what was reported.
            seen = fleet.truth.reported_version
        went_back = seen is not None and (view.version is None or view.version < seen)
        if went_back and view.version not in fleet.truth.rollbacks:
            fleet.truth.broken("I6", f"{process.name} went from {seen} to {view.version} without a rollback")
        process.seen_version = view.version
        for member in view.members:
            _check_admitted(fleet, member, process, is_leader=process is leader, is_final=False)


def not_recovered(fleet: Fleet) -> list[str]:
    """What is missing for I3."""
    leader = fleet.leader
    if leader is None or leader.controller is None:
        return ["nobody leads"]
    view: FleetView = leader.controller.view()
    members = {m.worker: m for m in view.members}
    missing = [f"{w.worker} isn't there" for w in fleet.workers if w.worker not in members]
    missing += [f"{m.worker} isn't admitted: {m.reason}" for m in view.members if not m.admitted]
    newest = max((w.boot.label for w in fleet.workers if w.boot.label is not None), default=None)
    if view.version != newest and not fleet.truth.rollbacks:
        missing.append(f"the fleet is at {view.version}, the newest that was committed is {newest}")
    return missing


def reckon_recovery(fleet: Fleet) -> None:
    """The time to recover is over (I3)."""
    for problem in not_recovered(fleet):
        fleet.truth.broken("I3", f"{problem}, {fleet.recovery_s:g} s after the faults")


def is_held_by(fleet: Fleet, owner: str) -> bool:
    """Whether `owner` has paused somebody, as far as the leader knows."""
    leader = fleet.leader
    if leader is None or leader.controller is None:
        return False
    pauses = [m.status.pause for m in leader.controller.view().members]
    return any(pause is not None and pause.owner == owner for pause in pauses)


def reckon(fleet: Fleet) -> None:
    """At the end: the faults are over, and what was to recover did."""
    truth = fleet.truth
    for worker in fleet.workers:
        agent = worker.agent
        if agent is None or agent.state.running is not None:
            truth.broken("I3", f"{worker.worker} still runs {None if agent is None else agent.state.running}")
        for what in worker.engine.violations:
            truth.broken("I0", f"{worker.worker}: {what}")
    for process in fleet.processes():
        if process.transport.num_handler_errors:
            truth.broken("I0", f"a message handler of {process.name} raised")
    leader = fleet.leader
    if leader is not None and leader.controller is not None:
        for member in leader.controller.view().members:
            _check_admitted(fleet, member, leader, is_leader=True, is_final=True)


def _check_admitted(
    fleet: Fleet, member: MemberView, process: ControllerProcess, *, is_leader: bool, is_final: bool
) -> None:
    assert process.controller is not None
    version = process.controller.registry.version
    weights = member.status.weights
    worker = fleet.workers[int(member.descriptor.instance_id)]
    is_clean = weights.state is WeightsState.CLEAN and (version is None or weights.version == version)
    # Nobody was given anything yet: who was started again is as good as the others, who were just started.
    is_initial = version is None and weights == WeightsView(state=WeightsState.UNKNOWN)
    if member.admitted and not is_clean and not is_initial:
        fleet.truth.broken("I1", f"{member.worker} is admitted with {weights} while the fleet is at {version}")
    if not is_leader:
        return
    has_it = worker.is_running and worker.engine.truth_version == (weights.version or Version())
    # While the controller itself is cut off, nobody's silence counts, on purpose.
    if has_it or not member.admitted or not process.transport.is_connected or worker.judge is not process.controller:
        worker.judge, worker.wrong_since_s = process.controller, None
        return
    now_s = fleet.truth.now_s
    worker.wrong_since_s = now_s if worker.wrong_since_s is None else worker.wrong_since_s
    if is_final or now_s - worker.wrong_since_s > MAX_NEWS_S + fleet.lag_s:
        really = worker.engine.truth_version
        since = f"for {now_s - worker.wrong_since_s:.1f} s"
        fleet.truth.broken("I1", f"{member.worker} is admitted as {weights.version} but {since} it has {really}")
