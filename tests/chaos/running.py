"""Runs one case: brings the fleet into the phase, strikes, does what an operator would do, and looks."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rlbus.errors import DeadlineError, RLBusError
from rlbus.schemas import Liveness, WeightsState
from tests.chaos.brake import POLL_S
from tests.chaos.cases import FAILOVER_S, HELD_BEFORE, STILL_S, Blow, Case, Phase, Target
from tests.chaos.judge import Call, Observation
from tests.chaos.messages import Held, LetGo, News
from tests.chaos.processes import strike
from tests.chaos.promises import Aftermath
from tests.chaos.stage import UPDATE_S, Stage
from tests.chaos.watching import (
    Sample,
    Trigger,
    Watch,
    false_admissions,
    is_at,
    paused,
    repeated,
    standing_in,
    stood_still,
    torn_in,
)

# Beyond its bound a case is watched so much longer, so that "late" can be told from "never".
MARGIN_S = 5.0
# Until the update is in the phase that the blow waits for.
PHASE_S = 30.0
# Until a leader that is held has written down how far it came: the next one is to find that.
JOURNALED_S = 0.25
# After everything ended, until the journal says so too.
JOURNAL_S = 15.0
SIGNALS = {Blow.KILL: signal.SIGKILL, Blow.STOP: signal.SIGSTOP}


@dataclass(slots=True)
class Run:
    """A case that runs: whom it strikes, and what is known so far. `versions`: those asked for in it, in order."""

    case: Case
    stage: Stage
    watch: Watch
    victim: str | None
    pid: int
    before: dict[str, tuple[int | None, str]]
    transfer_s: float
    start_s: float = 0.0
    returned_s: float | None = None
    failover_s: float | None = None
    blamed_in: str = ""
    old_step: int = 0
    again_s: float | None = None
    versions: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def survivors(self) -> tuple[str, ...]:
        """Workers that weren't struck."""
        return tuple(worker for worker in self.stage.kit.workers if worker != self.victim)

    @property
    def limit_s(self) -> float:
        """How long the survivors are waited for."""
        return self.case.serve_s + self.start_s + self.transfer_s * self.case.num_calls + MARGIN_S

    @property
    def since_s(self) -> float:
        """When the blow fell, as `time.monotonic`."""
        assert self.watch.struck_s is not None
        return self.watch.struck_s


async def run_case(stage: Stage, case: Case) -> Observation:
    """Run it on a stage that is made whole first. Raises: BrokenError, DeadlineError: the stage can't be set."""
    transfer_s = max([await stage.whole() for _ in range(2)])
    before = await stage.standing()
    victim, pid = await _victim(stage, case)
    if victim is not None:
        stage.count_blow(victim)
    async with Watch(stage.bus, _namespace(stage)) as watch:
        await watch.until(lambda sample: sample is not None, PHASE_S)
        run = Run(case, stage, watch, victim, pid, before, transfer_s, old_step=stage.version)

        def on_news(news: News) -> None:
            if isinstance(news, Held):
                watch.on_held()

        stage.on_news = on_news
        try:
            return await _run(run)
        finally:
            stage.trace = "\n".join((watch.trace(), *(str(call) for call in run.calls)))
            stage.on_news = lambda news: None
            strike(pid, signal.SIGCONT)


def _namespace(stage: Stage) -> str:
    return stage.client.namespace


async def _victim(stage: Stage, case: Case) -> tuple[str | None, int]:
    """The worker that is lost by it (None: none is), and the process that is struck."""
    view = await stage.view()
    members = {str(member.worker): member for member in view.members}
    pid: int | None
    match case.target:
        case Target.WORKER:
            victim = stage.next_worker()
            pid = stage.pid_of(members[victim])
        case Target.ENGINE:
            victim = stage.kit.struck_engine
            pid = stage.engine_of(victim)
        case Target.TRAINER:
            return None, stage.trainer.pid
        case Target.CONTROLLER:
            return None, await stage.leader()
        case Target.SERVER:
            return None, stage.server.pid
    if pid is None:
        raise DeadlineError(f"looking for the process of {victim}", 0.0)
    return victim, pid


async def _run(run: Run) -> Observation:
    stage, phase = run.stage, run.case.phase
    run.watch.arm(_trigger(run.case), lambda: strike(run.pid, SIGNALS[run.case.blow]))
    command = HELD_BEFORE.get(phase)
    if command is not None:
        stage.brake.arm(command)
    trainer = stage.trainer
    try:
        if phase is not Phase.IDLE:
            run.versions.append(stage.begin_update(hold=phase is Phase.MID_BROADCAST))
        if command is not None:
            await _until_braked(run)
        was_hit = await run.watch.until_struck(PHASE_S)
    finally:
        stage.brake.let_go()
        trainer.order(LetGo())
    if was_hit:
        with contextlib.suppress(RLBusError):
            await _AFTERWARDS[run.case.target](run)
    return await _look(run) if was_hit else _nothing(run)


async def _until_braked(run: Run) -> None:
    """Until the controller is held; nothing was struck if that takes too long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PHASE_S):
            while (phase := run.stage.brake.reached()) is None:  # noqa: ASYNC110 - a file
                await asyncio.sleep(POLL_S)
            if run.case.target is Target.CONTROLLER:
                await asyncio.sleep(JOURNALED_S)
            run.watch.on_braked(phase)


def _trigger(case: Case) -> Trigger:
    """When the blow falls: as soon as this holds after a message, or after the brake's word."""
    if case.phase is Phase.IDLE:
        return lambda watch: True
    if case.phase is Phase.MID_BROADCAST:
        return lambda watch: watch.is_held and watch.phase == "transfer" and watch.done > 0
    return lambda watch: watch.held_in is not None


# -- what an operator does, by what was struck -------------------------------------------------------------------------


async def _after_worker(run: Run) -> None:
    """A killed worker is started again at once, unless something supervises it; a stopped one wakes up at the end."""
    assert run.victim is not None
    if run.case.blow is Blow.KILL and run.case.target is Target.WORKER and not await _is_kept(run):
        await run.stage.start_worker(run.victim)
    if run.case.phase is Phase.IDLE:
        run.versions.append(run.stage.begin_update())
    await _hear(run, run.versions[0])
    with contextlib.suppress(DeadlineError):  # then the judge says so; the victim is waited for all the same
        await _until_served(run, run.versions[0])
    if run.case.blow is Blow.STOP:
        strike(run.pid, signal.SIGCONT)
        run.returned_s = time.monotonic() - run.since_s
    await _until_back(run, run.versions[0])


async def _is_kept(run: Run) -> bool:
    """Whether what the harness started for the victim outlives it: then that is a supervisor."""
    assert run.victim is not None
    with contextlib.suppress(DeadlineError):
        await run.watch.until(lambda _: not run.stage.is_started(run.victim or ""), 0.5)
    return run.stage.is_started(run.victim)


async def _after_trainer(run: Run) -> None:
    """Killed: the next one is started. Stopped: it wakes up when its update is over. Then one more call."""
    if run.case.blow is Blow.KILL:
        await run.stage.start_trainer()
        run.start_s = run.stage.trainer_start_s
    # What was seen before the blow knows nothing of its update.
    await run.watch.until(lambda s: s is not None and s.at_s > run.since_s and _is_settled(s), run.limit_s)
    if run.case.blow is Blow.STOP:
        strike(run.pid, signal.SIGCONT)
        await _hear(run, run.versions[0])
    await _call_again(run)
    await _until_served(run, run.versions[-1])


async def _after_controller(run: Run) -> None:
    """Another one leads; a killed one is replaced, a stopped one wakes up and has to follow."""
    term = run.watch.samples[-1].view.term

    def is_other(sample: Sample | None) -> bool:
        return sample is not None and sample.view.term > term

    sample = await run.watch.until(is_other, run.limit_s)
    assert sample is not None
    run.failover_s = sample.at_s - run.since_s
    if run.case.blow is Blow.STOP:
        strike(run.pid, signal.SIGCONT)
    else:
        await run.stage.start_controller()
    await _hear_or_repeat(run)


async def _after_server(run: Run) -> None:
    """It is away for as long as the case says, then there again on the same port."""
    server = run.stage.server
    if run.case.down_s:
        await asyncio.sleep(run.case.down_s)
    if run.case.blow is Blow.STOP:
        strike(run.pid, signal.SIGCONT)
    else:
        await server.stop()
        await server.start()
    if run.case.phase is Phase.IDLE:
        run.versions.append(run.stage.begin_update())
    await _hear_or_repeat(run)


_AFTERWARDS: dict[Target, Callable[[Run], Awaitable[None]]] = {
    Target.WORKER: _after_worker,
    Target.ENGINE: _after_worker,
    Target.TRAINER: _after_trainer,
    Target.CONTROLLER: _after_controller,
    Target.SERVER: _after_server,
}


async def _hear(run: Run, version: int) -> None:
    """Wait for the end of the call, and note it."""
    end = await run.stage.trainer.ended(version, UPDATE_S)
    if end is not None:
        run.calls.append(Call(str(version), end.status, end.took_s, end.error, tuple(sorted(end.outcomes.items()))))
        outcome, phase, _ = end.outcomes.get(run.victim or "", ("ok", "", ""))
        run.blamed_in = run.blamed_in or ("" if outcome == "ok" else phase)


async def _hear_or_repeat(run: Run) -> None:
    """Wait for the end of the call; unless it served everybody, the trainer calls once more, as a loop would."""
    await _hear(run, run.versions[-1])
    if not run.calls or run.calls[-1].status != "ok":
        await _call_again(run)
    await _until_served(run, run.versions[-1])


async def _call_again(run: Run) -> None:
    """The next call, once the fleet is at rest: what the one before left of it is seen by then."""
    with contextlib.suppress(DeadlineError):  # then the judge says what doesn't rest
        await run.watch.until(_is_settled, run.limit_s)
    run.again_s = time.monotonic()
    run.versions.append(run.stage.begin_update())
    await _hear(run, run.versions[-1])


async def _until_served(run: Run, version: int) -> None:
    left_s = run.limit_s - (time.monotonic() - run.since_s)
    workers = run.survivors
    await run.watch.until(lambda s: s is not None and s.is_admitted(workers, version), max(left_s, 0.1))


async def _until_back(run: Run, version: int) -> None:
    """Until the victim is admitted at the newest version; a killed one has to have a new boot for it."""
    assert run.case.back_s is not None
    assert run.victim is not None
    victim, boot_id = run.victim, run.before[run.victim][1]
    may_be_old = run.case.blow is Blow.STOP

    def is_back(sample: Sample | None) -> bool:
        member = None if sample is None else sample.member(victim)
        return is_at(member, version) and member is not None and (may_be_old or member.boot_id != boot_id)

    limit_s = run.stage.worker_start_s + run.case.back_s + run.transfer_s + MARGIN_S
    await run.watch.until(is_back, limit_s)


def _is_settled(sample: Sample | None) -> bool:
    """Whether nothing runs, and nobody is in the middle of something."""
    if sample is None or sample.view.op_id is not None:
        return False
    return all(m.status.weights.state is not WeightsState.UPDATING for m in sample.view.members)


# -- looking -----------------------------------------------------------------------------------------------------------


def _nothing(run: Run) -> Observation:
    return Observation(was_hit=False, phase_hit="", calls=(), serving_s=None, transfer_s=run.transfer_s)


async def _look(run: Run) -> Observation:
    """All that is left to see, at the end."""
    stage, watch, version = run.stage, run.watch, run.versions[-1] if run.versions else run.stage.version
    returned_s, back_s = _return_of(run, version)
    lost = await stage.lost_ops(watch.op_ids, JOURNAL_S)
    after = await stage.standing()
    ops = await stage.op_ends(run.old_step, JOURNAL_S)
    first = [s for s in watch.samples if s.at_s >= run.since_s and s.at_s < (run.again_s or float("inf"))]
    restarted = tuple(w for w in run.survivors if run.before.get(w) != after.get(w))
    return Observation(
        was_hit=True,
        phase_hit=_phase_hit(run),
        calls=tuple(run.calls),
        serving_s=watch.first(lambda s: s.is_admitted(run.survivors, version), run.since_s),
        transfer_s=run.transfer_s,
        start_s=run.start_s,
        returned_s=returned_s,
        back_s=back_s,
        failover_s=run.failover_s,
        noticed_s=_noticed_s(run),
        restarted=restarted,
        lost_ops=(*lost, *(f"call {c.version} ({c.error})" for c in run.calls if c.status is None)),
        repeated=repeated(watch.events),
        wrong_outputs=await stage.wrong_outputs(),
        false_admissions=false_admissions(watch.samples),
        left_paused=paused(watch.samples),
        stood_still=_stood_still(run),
        aftermath=Aftermath(
            old_step=run.old_step,
            survivors=run.survivors,
            victim=run.victim,
            num_asked=len(run.versions),
            ops=ops,
            torn=torn_in(first),
            rest=standing_in(first[-1]) if first else {},
        ),
    )


def _stood_still(run: Run) -> str:
    """What shows that others than those who were struck did; nothing of an outage, in which nobody is heard anyway."""
    match run.case.target:
        case Target.SERVER:
            return ""
        case Target.CONTROLLER:
            return stood_still(run.watch.samples, 1, FAILOVER_S)
        case _:
            return stood_still(run.watch.samples, 0, STILL_S)


def _return_of(run: Run, version: int) -> tuple[float | None, float | None]:
    """When the victim was on the bus again, and how long after that it was admitted."""
    victim = run.victim
    if victim is None:
        return None, None
    boot_id = run.before[victim][1]

    def is_new(sample: Sample) -> bool:
        member = sample.member(victim)
        return member is not None and member.boot_id != boot_id and member.liveness.value == "alive"

    booted_s = run.watch.first(is_new, run.since_s)
    returned_s = run.returned_s if booted_s is None else booted_s
    admitted_s = run.watch.first(lambda s: is_at(s.member(victim), version), run.since_s)
    if returned_s is None or admitted_s is None:
        return returned_s, None
    return returned_s, max(0.0, admitted_s - returned_s)


def _noticed_s(run: Run) -> float | None:
    """When the controller first said that the victim as it was is gone."""
    if run.victim is None:
        return None
    boot_id = run.before[run.victim][1]
    for sample in run.watch.samples:
        member = sample.member(run.victim)
        is_there = member is not None and member.liveness is Liveness.ALIVE and member.boot_id == boot_id
        if sample.at_s >= run.since_s and not is_there:
            return sample.at_s - run.since_s
    return None


def _phase_hit(run: Run) -> str:
    """What was announced last before the blow; and where the report says that the victim failed, if that is another."""
    struck_in, blamed_in = run.watch.struck_in, run.blamed_in
    return struck_in if blamed_in in ("", struck_in) else f"{struck_in}>{blamed_in}"
