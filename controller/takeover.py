"""What a new leader does with an op that the one before left unfinished: ask its workers, then finish or take it back.

Rules, those of an update that failed in the same place (`winding`): whoever is at the new version is let go; whoever
has everything, and was verified before the old leader died, is committed (a repeat changes nothing); every other open
session is aborted; who is untouched and was paused by this op generates again, unless others are at the new version
already; torn ones stay paused. Every command carries the new term, so nothing that the old leader still sends counts.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager

from rlbus.controller.answers import StepAnswer, unknown
from rlbus.controller.attempts import MAX_ATTEMPTS, in_attempt
from rlbus.controller.causes import fault
from rlbus.controller.draft import healing_of, view_of
from rlbus.controller.giving_way import is_catch_up
from rlbus.controller.leases import keep, renewing
from rlbus.controller.limits import ENDING_S, RETRY_S, ending_step_until_s, limits_until
from rlbus.controller.line import Line
from rlbus.controller.op import Op
from rlbus.controller.op_ids import PAUSE_STEP, derive, derive_step
from rlbus.controller.registry import Registry
from rlbus.controller.report import status_of
from rlbus.controller.sleep_verb import DISCARDING_LEVEL, by_tags
from rlbus.errors import BrokenError, RLBusError
from rlbus.schemas import (
    AbortWeights,
    CommandBody,
    CommitWeights,
    DestroyGroup,
    Fault,
    FaultCode,
    Generation,
    GetStatus,
    JournalEntry,
    Outcome,
    PauseFleet,
    ReloadFleet,
    RenewLease,
    Report,
    ResumeFleet,
    ResumeGeneration,
    SleepFleet,
    SleepTag,
    StatusData,
    UpdateWeights,
    Version,
    WakeFleet,
    WakeUp,
    WeightsState,
    WeightsView,
    WorkerId,
    WorkerOutcome,
    WorkerStatus,
)

_log = logging.getLogger("rlbus.controller")

PHASE = "take over"
# How long a member that nobody has heard since this leader began is waited for, in seconds. Source: workers try to
# connect at least every 5 s (rlbus._supervised.BACKOFF_MAX_S), and what this op has paused holds for 30 s.
REJOIN_S = 6.0
# How often a pause or a sleep is taken back: who was silent at first may be heard when the others are let go.
NUM_UNDOS = 2
# The phase of the journal from which on `verified` may be committed.
COMMIT_PHASE = "commit"
# Weights that nobody may serve. Unknown ones are not among them: so are those that a worker was started with.
TORN = (WeightsState.DIRTY, WeightsState.UPDATING)


class TakeOver:
    """One op that was left behind. `run` once, as the work of `op`, which has the old op's id and request."""

    def __init__(self, op: Op, line: Line, registry: Registry, entry: JournalEntry) -> None:
        self._op = op
        self._line = line
        self._entry = entry
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        # Until when things may take, in loop time; a step that begins later has a moment still (`limits`).
        self._until_s = self._loop.time() + ENDING_S
        self._num_steps = 0
        # Of what the op has paused; a pause itself is its caller's.
        request = entry.request
        self._owner = request.caller if isinstance(request, PauseFleet) else derive(op.op_id, PAUSE_STEP)
        # Of the pauses that it may have begun, one per attempt.
        self._pause_ids = {self._begun_id(in_attempt(1 + n, PAUSE_STEP)) for n in range(MAX_ATTEMPTS)}
        self._before = dict(zip(entry.members, entry.before, strict=False))
        # Who stays paused at the end, whatever becomes of the lease: its weights are whole, and others have newer ones.
        self._kept: list[WorkerId] = []
        # Whether a pause or a sleep was undone.
        self._is_taken_back = False
        # What each member says of itself; who isn't there or doesn't answer has no place in it.
        self._seen: dict[WorkerId, WorkerStatus] = {}
        self._silent: dict[WorkerId, Fault] = {}

    async def run(self) -> tuple[Report, Version | None]:
        """Settle it; the report, and the version that some worker is at because of it.

        Cancel: what is being asked is dropped; the next leader finds it as it is then.
        """
        item = self._entry.item
        _log.warning("op %s (%s) was left behind by term %d in phase %s", item.op_id, item.op, item.term, item.phase)
        self._op.enter(PHASE, total=len(self._entry.members))
        async with self._renewing():
            await self._await_members()
            await self._look()
            await self._settle()
        # When no renewal of ours can come after it.
        if isinstance(self._entry.request, PauseFleet):
            await self._hold(self._entry.request)
        await keep(self._line, self._op.op_id, self._owner, self._kept)
        report = self._report()
        is_at = any(self._is_at_version(worker) for worker in self._seen)
        return report, item.version if is_at else None

    # -- steps --------------------------------------------------------------------------------------------------------

    def _renewing(self) -> AbstractAsyncContextManager[None]:
        """As long as this runs, the leases of what the op has paused don't end."""

        def holding() -> list[WorkerId]:
            paused = [w for w, status in self._seen.items() if self._is_paused_by(status, self._owner)]
            return [w for w in paused if w not in self._entry.held]  # a hold from before has its own lease, or none

        return renewing(self._line, self._op.op_id, self._owner, holding)

    async def _settle(self) -> None:
        """What is right for this kind of op."""
        request = self._entry.request
        match request:
            case UpdateWeights():
                pausing = await self._settle_update(request)
                await self._free(may_be_old=request.require is not None or request.is_draft)
                await self._destroy(pausing)
            case ReloadFleet():
                await self._await_loads()
                await self._free(may_be_old=False)
            case PauseFleet():
                await self._settle_pause(request)
            case SleepFleet() if request.level < DISCARDING_LEVEL:
                await self._settle_sleep(request)

    async def _await_members(self) -> None:
        """Give members that weren't heard yet the time to connect again: after an outage we may be there first."""
        until_s = self._loop.time() + REJOIN_S
        while self._loop.time() < until_s and not self._op.stopped.is_set():
            if all(self._registry.get(worker) is not None for worker in self._entry.members):
                return
            await asyncio.sleep(RETRY_S)
            self._op.tick()

    async def _look(self) -> None:
        """Read every member's state from itself."""
        there: list[WorkerId] = []
        for worker in self._entry.members:
            if self._is_there(worker):
                there.append(worker)
            else:
                member = self._registry.get(worker)
                why = "it isn't there" if member is None else f"it is gone: {member.gone}"
                self._silent[worker] = fault(FaultCode.WORKER_LOST, why, worker=worker)
        answers = await self._ask("look", GetStatus(), there)
        self._seen.clear()
        for worker, answer in answers.items():
            if isinstance(answer.data, StatusData):
                self._seen[worker] = answer.data.status
            elif answer.fault is not None:
                self._silent[worker] = answer.fault

    async def _settle_update(self, request: UpdateWeights) -> list[WorkerId]:
        """No session of it stays open: committed where that is proven to be right, aborted elsewhere.

        Returns those that are still pausing: they have none, and only a resume ends that.
        """
        body = CommitWeights(update_op_id=request.op_id, version=request.version)
        if self._entry.item.phase == COMMIT_PHASE:
            received = [w for w in self._entry.verified if self._has(w, WeightsState.UPDATING)]
            await self._ask("commit", body, received)
            await self._look()
        pausing = [w for w, status in self._seen.items() if status.op_id in self._pause_ids]
        rest = [w for w in self._seen if w not in pausing and not self._is_at_version(w)]
        abort = AbortWeights(update_op_id=request.op_id, reason="its controller died")
        # A join of the old leader may still run; what is open is closed once that has ended.
        left = await self._until_free("abort", abort, rest, self._destroy)
        if left:
            _log.error("op %s: still busy: %s", self._op.op_id, ", ".join(left))
        await self._destroy(rest)
        await self._look()
        return pausing

    async def _destroy(self, workers: Sequence[WorkerId]) -> None:
        """Nobody stays in the group of this update: its sender has no controller any more that knows of it."""
        epochs = {s.epoch for w in workers if (s := self._seen.get(w)) is not None and s.epoch is not None}
        if self._entry.item.epoch is not None:
            # Also those of attempts that may have followed, and weren't written down in time.
            epochs.update(range(self._entry.item.epoch, self._entry.item.epoch + MAX_ATTEMPTS))
        for epoch in sorted(epochs):
            await self._ask("leave", DestroyGroup(epoch=epoch), workers)

    async def _await_loads(self) -> None:
        """What is being loaded can't be taken back; wait for it, as long as the op's own deadline allows.

        Who is silent meanwhile still loads, as far as anybody knows. What follows has its time from here on.
        """
        load_op_id = self._begun_id("load")
        loading = {w for w, status in self._seen.items() if status.op_id == load_op_id}
        while loading and not self._op.stopped.is_set() and self._loop.time() < self._op.forward_until_s:
            await asyncio.sleep(RETRY_S)
            self._op.tick()
            self._until_s = self._loop.time() + ENDING_S
            await self._look()
            loading = {w for w in loading if self._is_there(w) and self._may_run(w, load_op_id)}
        self._until_s = self._loop.time() + ENDING_S

    async def _settle_pause(self, request: PauseFleet) -> None:
        """Everybody paused: it is done (`_hold`). Otherwise nobody is."""
        if not self._silent and all(self._is_paused_by(s, request.caller) for s in self._seen.values()):
            return
        await self._undo_pause(request)

    async def _hold(self, request: PauseFleet) -> None:
        """All are paused: for as long as was asked. When one of them isn't any more, nobody is."""
        if self._is_taken_back:
            return
        body = RenewLease(owner=request.caller, lease_s=request.lease_s)
        answers = await self._ask("keep", body, self._entry.members)
        if not all(answer.is_ok for answer in answers.values()):
            await self._look()
            await self._undo_pause(request)

    async def _undo_pause(self, request: PauseFleet) -> None:
        self._is_taken_back = True
        for _ in range(NUM_UNDOS):
            mine = [w for w, s in self._seen.items() if w not in self._entry.held and self._is_held_by_op(s, request)]
            await self._until_free("undo", ResumeGeneration(), mine)
            await self._look()

    async def _settle_sleep(self, request: SleepFleet) -> None:
        """Everybody asleep: it is done. Otherwise those are woken that weren't before."""
        if not self._silent and all(self._sleeps(worker, request.tags) for worker in self._seen):
            return
        self._is_taken_back = True
        asked: Collection[WorkerId] = tuple(self._seen)  # also who is still falling asleep
        for _ in range(NUM_UNDOS):
            slept = {worker: self._slept(worker) for worker in asked}
            for tags, workers in by_tags(asked, slept, request.tags).items():
                await self._until_free("undo", WakeUp(tags=tags), workers)
            await self._look()
            asked = [w for w, status in self._seen.items() if not set(status.asleep).issubset(self._slept(w))]

    async def _free(self, *, may_be_old: bool) -> None:
        """Let go whom this op paused, as far as its weights and those of the others allow it."""
        has_new = is_catch_up(self._entry.request) or any(self._is_at_version(w) for w in self._seen)
        free: list[WorkerId] = []
        for worker, status in self._seen.items():
            if self._view(status).state in TORN or not self._is_held_by_op(status, None):
                continue
            is_served = self._has_version(worker) or not has_new or may_be_old
            (free if is_served else self._kept).append(worker)
        await self._until_free("free", ResumeGeneration(), free)
        await self._look()

    # -- asking -------------------------------------------------------------------------------------------------------

    async def _until_free(
        self, step: str, body: CommandBody, workers: Sequence[WorkerId], before_retry: object = None
    ) -> Sequence[WorkerId]:
        """Ask until nobody says busy any more; who still does."""
        answers = await self._answers(step, body, workers, before_retry)
        return [w for w, answer in answers.items() if answer.is_busy]

    async def _answers(
        self, step: str, body: CommandBody, workers: Sequence[WorkerId], before_retry: object = None
    ) -> dict[WorkerId, StepAnswer]:
        """Ask until nobody says busy any more; what each said last."""
        left, answers = workers, dict[WorkerId, StepAnswer]()
        while True:
            answers |= await self._ask(step, body, left)
            left = [w for w in left if answers[w].is_busy]
            if not left or self._loop.time() + RETRY_S >= self._until_s:
                break
            if callable(before_retry):
                await before_retry(left)
            await asyncio.sleep(RETRY_S)
            self._op.tick()
        return answers

    async def _ask(self, step: str, body: CommandBody, workers: Iterable[WorkerId]) -> dict[WorkerId, StepAnswer]:
        """One command under an op id of its own. It is tried again while we are disconnected, if there is time."""
        asked = list(workers)
        if not asked:
            return {}
        self._num_steps += 1
        until_s = ending_step_until_s(self._until_s, self._loop.time())
        op_id = derive_step(self._op.op_id, self._line.term, f"{self._num_steps}-{step}")
        while True:
            limits = limits_until(until_s, self._loop.time(), is_ending=True)
            try:
                return await self._line.ask(body, asked, op_id=op_id, limits=limits)
            except BrokenError as exc:
                if self._loop.time() >= until_s:
                    return {w: unknown(fault(FaultCode.NO_ACK, f"nothing was sent: {exc}")) for w in asked}
                await asyncio.sleep(RETRY_S)
            except RLBusError as exc:
                return {w: unknown(fault(FaultCode.INTERNAL, str(exc))) for w in asked}

    def _begun_id(self, step: str) -> str:
        """The op id under which the leader that died sent a step."""
        return derive_step(self._entry.item.op_id, self._entry.item.term, step)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _slept(self, worker: WorkerId) -> tuple[SleepTag, ...]:
        """What slept on it before the op."""
        before = self._before.get(worker)
        return () if before is None else before.asleep

    def _sleeps(self, worker: WorkerId, tags: tuple[SleepTag, ...] | None) -> bool:
        """Whether `tags` sleep on it; None: all that it has, and more than before, if that wasn't everything."""
        asleep, slept = set(self._seen[worker].asleep), set(self._slept(worker))
        if tags is not None:
            return asleep.issuperset(tags)
        return bool(asleep) and (not slept or asleep > slept or slept == set(SleepTag))

    def _is_there(self, worker: WorkerId) -> bool:
        member = self._registry.get(worker)
        return member is not None and member.gone is None

    def _may_run(self, worker: WorkerId, op_id: str) -> bool:
        """Whether it runs this command, unless it says otherwise."""
        status = self._seen.get(worker)
        return status is None or status.op_id == op_id

    def _is_rebooted(self, worker: WorkerId) -> bool:
        """Whether another process answers for it than the one that the op began with."""
        before, member = self._before.get(worker), self._registry.get(worker)
        return member is not None and before is not None and before.boot_id != member.boot_id

    def _has(self, worker: WorkerId, state: WeightsState) -> bool:
        status = self._seen.get(worker)
        return status is not None and self._view(status).state is state

    def _has_version(self, worker: WorkerId) -> bool:
        """Whether its weights bear the version of the op."""
        status, version = self._seen.get(worker), self._entry.item.version
        if status is None or version is None:
            return False
        weights = self._view(status)
        return weights.state is WeightsState.CLEAN and weights.version == version

    def _is_at_version(self, worker: WorkerId) -> bool:
        """Whether it has that from this op: who had the version before proves nothing by it, unless it was to be
        committed.
        """
        before = self._before.get(worker)
        is_new = before is None or before.version != self._entry.item.version
        is_verified = self._entry.item.phase == COMMIT_PHASE and worker in self._entry.verified
        return (is_new or is_verified) and self._has_version(worker)

    def _view(self, status: WorkerStatus) -> WeightsView:
        """The weights that the op is about."""
        return view_of(status, self._entry.request)

    def _is_paused_by(self, status: WorkerStatus, owner: str) -> bool:
        return status.pause is not None and status.pause.owner == owner

    def _is_held_by_op(self, status: WorkerStatus, request: PauseFleet | None) -> bool:
        """Whether this op paused it, or is about to."""
        owner = self._owner if request is None else request.caller
        return status.op_id in self._pause_ids or self._is_paused_by(status, owner)

    # -- the report ---------------------------------------------------------------------------------------------------

    def _report(self) -> Report:
        self._op.finish()
        request, item = self._entry.request, self._entry.item
        outcomes = tuple(self._outcome(worker) for worker in self._entry.members)
        needed = request.require if isinstance(request, UpdateWeights) else None
        status = status_of(outcomes, len(outcomes) if needed is None else needed)
        is_ok = all(o.outcome is Outcome.OK for o in outcomes)
        why = f"its controller (term {item.term}) died or lost its lease in phase {item.phase}; the next one settled it"
        return Report(
            op_id=item.op_id,
            op=item.op,
            status=status,
            outcomes=outcomes,
            phases_s=dict(self._op.timings.phases_s),
            took_s=self._op.timings.took_s,
            fault=None if is_ok else fault(FaultCode.CONTROLLER_LOST, why, retryable=True, phase=item.phase),
            version=item.version,
            epoch=item.epoch,
        )

    def _outcome(self, worker: WorkerId) -> WorkerOutcome:
        status = self._seen.get(worker)
        if status is None:
            why = self._silent.get(worker) or fault(FaultCode.NO_ACK, "it didn't answer")
            return WorkerOutcome(worker=worker, outcome=Outcome.UNKNOWN, phase=PHASE, fault=why)
        if self._is_rebooted(worker) and not isinstance(self._entry.request, ResumeFleet):
            why = fault(FaultCode.WORKER_LOST, "it was restarted while the op ran", worker=worker)
            return WorkerOutcome(worker=worker, outcome=Outcome.FAILED, phase=PHASE, fault=why)
        outcome, why_not = self._judge(worker, status)
        return WorkerOutcome(worker=worker, outcome=outcome, phase=PHASE, fault=why_not)

    def _judge(self, worker: WorkerId, status: WorkerStatus) -> tuple[Outcome, Fault | None]:
        match self._entry.request:
            case PauseFleet() as request:
                return self._judge_pause(worker, status, request)
            case ResumeFleet():
                if status.generation is Generation.RUNNING:
                    return Outcome.OK, None
                return Outcome.UNKNOWN, self._nobody_knows("it doesn't run")
            case UpdateWeights() | ReloadFleet():
                return self._judge_weights(worker, status)
            case SleepFleet() as request:
                return self._judge_sleep(worker, status, request)
            case WakeFleet() as request:
                if _sleeps_any(status, request.tags):
                    return Outcome.UNKNOWN, self._nobody_knows("it sleeps")
                return Outcome.OK, None
            case _:
                return Outcome.UNKNOWN, self._nobody_knows("whether it was done before the controller died isn't known")

    def _judge_pause(self, worker: WorkerId, status: WorkerStatus, request: PauseFleet) -> tuple[Outcome, Fault | None]:
        if not self._is_taken_back:
            return (Outcome.OK if self._is_paused_by(status, request.caller) else Outcome.UNDONE), None
        if worker not in self._entry.held and self._is_held_by_op(status, request):
            message = "its controller died; it could not be let go, and stays paused until its lease ends"
            return Outcome.FAILED, fault(FaultCode.CONTROLLER_LOST, message, generation="paused")
        return Outcome.UNDONE, None

    def _judge_sleep(self, worker: WorkerId, status: WorkerStatus, request: SleepFleet) -> tuple[Outcome, Fault | None]:
        if not self._is_taken_back:
            return (Outcome.OK if self._sleeps(worker, request.tags) else Outcome.UNDONE), None
        still = sorted(set(status.asleep) - set(self._slept(worker)))
        if still:
            message = f"its controller died; {', '.join(still)} still sleeps, and could not be woken"
            return Outcome.FAILED, fault(FaultCode.CONTROLLER_LOST, message)
        return Outcome.UNDONE, None

    def _judge_weights(self, worker: WorkerId, status: WorkerStatus) -> tuple[Outcome, Fault | None]:
        is_stuck = worker not in self._entry.held and self._is_held_by_op(status, None)
        if self._view(status).state in TORN:
            message = f"its controller died; weights are torn, and {healing_of(self._entry.request)} makes them clean"
            return Outcome.FAILED, fault(FaultCode.CONTROLLER_LOST, message, weights="torn", generation="paused")
        if is_stuck:
            message = "its controller died; it stays paused, since others are at the new version or it is still busy"
            return Outcome.FAILED, fault(FaultCode.CONTROLLER_LOST, message, generation="paused")
        if self._is_at_version(worker):
            return Outcome.OK, None
        if isinstance(self._entry.request, ReloadFleet) and self._has_version(worker):
            return Outcome.UNKNOWN, self._nobody_knows("it had this version before, and may have loaded it again")
        return Outcome.UNDONE, None

    def _nobody_knows(self, message: str) -> Fault:
        return fault(FaultCode.CONTROLLER_LOST, message, retryable=True)


def _sleeps_any(status: WorkerStatus, tags: tuple[SleepTag, ...] | None) -> bool:
    return bool(status.asleep) if tags is None else not set(tags).isdisjoint(status.asleep)
