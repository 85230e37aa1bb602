"""Fleet verbs: one op on many workers, with a report that has one outcome for each.

A pause that half succeeds is undone on those that were paused by it and those that may have been; a reload is check ->
pause -> load -> flush -> resume with the rules of an update: who is at the new version runs, who is untouched goes back
to what was (unless others are at the new version already), who is torn stays paused.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rlbus.controller.answers import StepAnswer
from rlbus.controller.asking import Asker
from rlbus.controller.causes import fault, named
from rlbus.controller.leases import LEASE_S, keep, renewing
from rlbus.controller.line import Line
from rlbus.controller.op import Op
from rlbus.controller.op_ids import PAUSE_STEP, derive
from rlbus.controller.report import verb_report
from rlbus.schemas import (
    WHOLE,
    AbortFleet,
    AbortRequest,
    CommandBody,
    Fault,
    FaultCode,
    FlushCache,
    FlushFleet,
    GetLoras,
    GetVersion,
    GetVersions,
    ListLoras,
    LoadWeights,
    Outcome,
    PauseFleet,
    PauseGeneration,
    PrepareReload,
    ReloadFleet,
    RenewLease,
    Report,
    ResumeFleet,
    ResumeGeneration,
    Version,
    WeightsData,
    WorkerId,
    WorkerOutcome,
)

PlainVerb = ResumeFleet | FlushFleet | AbortFleet | GetVersions | ListLoras
Answers = Mapping[WorkerId, StepAnswer]


@dataclass(slots=True)
class Book:
    """What a verb knows of each worker so far; the first thing that goes wrong on one stays."""

    outcomes: dict[str, WorkerOutcome]
    causes: list[Fault] = field(default_factory=list)

    def note(self, phase: str, answers: Answers, *, is_changed: bool = False) -> None:
        """Take down the answers to one phase: a good one replaces what was good before.

        `is_changed`: an earlier phase has changed these workers, so that a refusal now leaves them neither as they were
        nor done, which is a failure.
        """
        for worker, answer in answers.items():
            if not answer.is_ok:
                assert answer.fault is not None
                self.causes.append(named(answer.fault, worker))
            is_refused = answer.outcome is Outcome.REFUSED
            if self.outcomes[worker].outcome in (Outcome.OK, Outcome.SKIPPED):
                self.outcomes[worker] = WorkerOutcome(
                    worker=worker,
                    outcome=Outcome.FAILED if is_refused and is_changed else answer.outcome,
                    phase=phase,
                    fault=answer.fault,
                    data=answer.data,
                    took_s=answer.took_s,
                )

    def undone(self, workers: Collection[WorkerId], phase: str) -> None:
        """These were taken back, because of others."""
        for worker in workers:
            if self.outcomes[worker].outcome is Outcome.OK:
                self.outcomes[worker] = WorkerOutcome(worker=worker, outcome=Outcome.UNDONE, phase=phase)


def new_book(workers: Sequence[WorkerId]) -> Book:
    """Nobody was asked anything yet."""
    return Book({w: WorkerOutcome(worker=w, outcome=Outcome.SKIPPED, phase="plan") for w in workers})


def to_undo(answers: Answers, held: Collection[WorkerId]) -> tuple[WorkerId, ...]:
    """Whom a half succeeded pause has to let go: who acked and who may be paused, but not whom somebody else held."""
    done = (Outcome.OK, Outcome.UNKNOWN)
    return tuple(w for w, answer in answers.items() if answer.outcome in done and w not in held)


class FleetVerb:
    """One verb on `workers`. `held` are those that were paused by somebody else before it began."""

    def __init__(self, op: Op, line: Line, workers: Sequence[WorkerId], held: Collection[WorkerId] = ()) -> None:
        self._op = op
        self._line = line
        self._asker = Asker(op, line)
        self._workers = tuple(workers)
        self._held = frozenset(held)
        # Whom this op has paused and not let go.
        self._holding: set[WorkerId] = set()
        # Whoever doesn't get the new version stays paused.
        self._keeps_old = False
        self._book = new_book(self._workers)
        self._loop = asyncio.get_running_loop()

    async def plain(self, request: PlainVerb) -> Report:
        """One command to everybody, and what they say. Cancel: workers go on with what they were sent."""
        match request:
            case ResumeFleet():
                body: CommandBody = ResumeGeneration(force=request.force)
            case FlushFleet():
                body = FlushCache()
            case AbortFleet():
                body = AbortRequest(request_ids=request.request_ids)
            case GetVersions():
                body = GetVersion()
            case ListLoras():
                body = GetLoras()
        self._book.note(self._op.name, await self._ask(self._op.name, self._op.name, body, self._workers))
        return self._report()

    async def pause(self, request: PauseFleet) -> Report:
        """Pause everybody, or nobody. Cancel: as `plain`; `Op.stop` is the way to take it back.

        Until all are paused each pause has a lease of this op, so that none is left half done if we die; then it gets
        the lease that was asked for, or none.
        """
        body = PauseGeneration(
            mode=request.mode, clear_cache=request.clear_cache, owner=request.caller, lease_s=LEASE_S
        )
        began_s = self._loop.time()
        async with renewing(self._line, self._op.op_id, request.caller, lambda: sorted(self._holding)):
            await self._pause_all(body, self._workers)
        if not self._is_over():
            await self._keep(RenewLease(owner=request.caller, lease_s=request.lease_s))
        if self._is_over():
            self._op.timings.paused_s = self._loop.time() - began_s
        return self._report()

    async def reload(self, request: ReloadFleet, version: Version) -> tuple[Report, bool]:
        """Load a folder everywhere; the report, and whether anybody is at `version` now.

        Everybody looks at the folder before anybody is paused: what one would refuse changes nothing on any.
        Once loading has begun it isn't taken back: there is no half loaded model to go back from. Cancel: as `plain`.
        """
        # Else who stays behind would be let go beside a fleet that has the new version.
        self._keeps_old = request.is_catch_up
        check = PrepareReload(
            path=request.path,
            version=version,
            allow_rollback=request.allow_rollback,
            sums_digest=request.sums_digest,
        )
        answers = await self._ask("check", "check", check, self._workers)
        self._book.note("check", {w: a for w, a in answers.items() if not a.is_ok})
        if self._is_over():
            return self._report(version=version), False
        owner = derive(self._op.op_id, PAUSE_STEP)
        async with renewing(self._line, self._op.op_id, owner, lambda: sorted(self._holding)):
            return await self._reload(request, version)

    async def _reload(self, request: ReloadFleet, version: Version) -> tuple[Report, bool]:
        began_s = self._loop.time()
        running = tuple(w for w in self._workers if w not in self._held)
        owner = derive(self._op.op_id, PAUSE_STEP)
        pause = PauseGeneration(mode=request.pause_mode, clear_cache=False, owner=owner, lease_s=LEASE_S)
        await self._pause_all(pause, running)
        if self._is_over():
            self._op.timings.paused_s = self._loop.time() - began_s
            return self._report(version=version), False
        body = LoadWeights(path=request.path, version=version, allow_rollback=request.allow_rollback)
        answers = await self._ask("load", "load", body, self._workers, is_final=True)
        self._book.note("load", answers)
        loaded = [w for w, answer in answers.items() if answer.is_ok]
        untouched, late = await self._settle([w for w in self._workers if w not in loaded], version)
        at_version = [*loaded, *late]
        flushed = await self._flush(at_version)
        # Two versions side by side serve nobody: who stayed at the old one goes on only if everybody did.
        has_new = bool(at_version) or self._keeps_old
        free = [w for w in (flushed if has_new else untouched) if w not in self._held]
        freed = await self._resume("resume" if has_new else "undo", free)
        if has_new:
            self._book.note("resume", freed, is_changed=True)
            await self._keep_paused([w for w in untouched if w in self._holding])
        else:
            self._note_undo(freed)
        self._op.timings.paused_s = self._loop.time() - began_s
        return self._report(version=version), bool(at_version)

    # -- steps --------------------------------------------------------------------------------------------------------

    async def _keep_paused(self, workers: Sequence[WorkerId]) -> None:
        self._holding.difference_update(workers)
        await keep(self._line, self._op.op_id, derive(self._op.op_id, PAUSE_STEP), workers)

    async def _pause_all(self, body: PauseGeneration, workers: Sequence[WorkerId]) -> None:
        """Pause `workers`; when one of them isn't, let those go that are."""
        answers = await self._ask("pause", PAUSE_STEP, body, workers)
        self._book.note("pause", answers)
        await self._undo_unless_all(answers)

    async def _keep(self, body: RenewLease) -> None:
        """All are paused: for how long now. When one of them isn't any more, let the others go."""
        answers = await self._ask("pause", "keep", body, self._workers)
        self._book.note("pause", {w: a for w, a in answers.items() if not a.is_ok})
        await self._undo_unless_all(answers)

    async def _undo_unless_all(self, answers: Answers) -> None:
        if all(answer.is_ok for answer in answers.values()) and not self._op.stopped.is_set():
            return
        if self._op.stop_fault is not None:
            self._book.causes.append(self._op.stop_fault)
        undo = to_undo(answers, self._held)
        self._book.undone([w for w, answer in answers.items() if answer.is_ok], "pause")
        if self._keeps_old:
            await self._keep_paused([w for w in undo if w in self._holding])
        else:
            self._note_undo(await self._resume("undo", undo))
        if not self._book.causes:
            self._book.causes.append(fault(FaultCode.INTERNAL, "the pause was taken back without a cause"))

    def _note_undo(self, answers: Answers) -> None:
        """A worker that can't be let go stays paused, which is worse than whatever was the matter with it before."""
        for worker, answer in answers.items():
            if answer.is_ok:
                continue
            assert answer.fault is not None
            self._book.causes.append(named(answer.fault, worker))
            before = self._book.outcomes[worker]
            if before.outcome is Outcome.UNDONE:
                self._book.outcomes[worker] = WorkerOutcome(
                    worker=worker, outcome=answer.outcome, phase="undo", fault=answer.fault
                )

    async def _settle(self, workers: Sequence[WorkerId], version: Version) -> tuple[list[WorkerId], list[WorkerId]]:
        """Ask those whose load wasn't ok what their weights are: (untouched, at the new version after all)."""
        answers = await self._ask("undo", "settle", GetVersion(), workers, is_final=True)
        untouched: list[WorkerId] = []
        late: list[WorkerId] = []
        for worker, answer in answers.items():
            if not isinstance(answer.data, WeightsData) or answer.data.weights.state not in WHOLE:
                continue
            if answer.data.weights.version == version and self._book.outcomes[worker].outcome is Outcome.UNKNOWN:
                self._book.outcomes[worker] = WorkerOutcome(
                    worker=worker, outcome=Outcome.OK, phase="load", data=answer.data
                )
                late.append(worker)
            else:
                untouched.append(worker)
        return untouched, late

    async def _flush(self, workers: Sequence[WorkerId]) -> list[WorkerId]:
        """Empty the caches of the old weights; a worker where that fails must not generate."""
        answers = await self._ask("flush", "flush", FlushCache(), workers, is_final=True)
        self._book.note("flush", {w: a for w, a in answers.items() if not a.is_ok}, is_changed=True)
        return [w for w, answer in answers.items() if answer.is_ok]

    async def _resume(self, phase: str, workers: Sequence[WorkerId]) -> dict[WorkerId, StepAnswer]:
        """Let them generate; one that is busy ending what it was told to abandon is asked again."""
        return await self._asker.until_free(phase, phase, ResumeGeneration(), workers, on_answer=self._freed)

    async def _ask(
        self, phase: str, step: str, body: CommandBody, workers: Sequence[WorkerId], *, is_final: bool = False
    ) -> dict[WorkerId, StepAnswer]:
        """One step. `is_final`: it is neither stopped nor bound by what is left of the deadline."""

        def on_answer(worker: WorkerId, answer: StepAnswer) -> None:
            if answer.is_ok and isinstance(body, PauseGeneration):
                self._holding.add(worker)
            elif isinstance(body, ResumeGeneration):
                self._freed(worker, answer)

        return await self._asker.ask(phase, step, body, workers, is_final=is_final, on_answer=on_answer)

    def _freed(self, worker: WorkerId, answer: StepAnswer) -> None:
        if answer.is_ok:
            self._holding.discard(worker)

    def _is_over(self) -> bool:
        """Whether something went wrong already, so that nothing further is begun."""
        return bool(self._book.causes)

    def _report(self, version: Version | None = None) -> Report:
        self._op.finish()
        return verb_report(
            self._op.op_id, self._op.name, self._book.outcomes, self._op.timings, self._book.causes, version=version
        )
