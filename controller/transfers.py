"""Updates that somebody else's trainer drives, on the whole fleet: one step of vLLM's weight transfer, on every worker.

The trainer says once what a server would be told, and each worker is told its own: its rank offset from the real world
sizes, its share of a list with an entry per rank. A step that fails on one worker ends on all of them at once, since
the others wait for it in a collective. Between the steps the fleet stands still under leases, and in a step as long as
its trainer says that it lives, so that one that dies leaves nobody paused. One trainer drives the fleet at a time:
whoever forms the group takes the place of the one before, whose open update is given up and whose next step is refused.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from rlbus.controller import admission
from rlbus.controller.answers import StepAnswer, unknown
from rlbus.controller.causes import fault
from rlbus.controller.leases import keep, renewing
from rlbus.controller.line import Line
from rlbus.controller.op import PROGRESS_S, Op
from rlbus.controller.op_ids import derive_step
from rlbus.controller.registry import Member, Registry
from rlbus.controller.trainer_holds import (
    driver_problem,
    is_held_by_another,
    is_kept,
    is_to_free,
    owner_of,
    owner_problem,
    served_version,
)
from rlbus.controller.verbs import FleetVerb
from rlbus.schemas import (
    AbortWeights,
    ApplyUpdate,
    CommandBody,
    Fault,
    FaultCode,
    FinishUpdate,
    InitTransfer,
    Outcome,
    PauseGeneration,
    RenewLease,
    Report,
    ResumeGeneration,
    ShutdownTransfer,
    StartUpdate,
    Target,
    TransferFleet,
    TransferStep,
    Version,
    WorkerId,
    WorkerOutcome,
)

# How long the fleet stands still for a trainer between two steps, in seconds; as a pause over HTTP.
HOLD_S = 600.0
# How long others are heard out after one has failed, in seconds: they may have failed by the same cause.
HEAR_OUT_S = 0.5
# The route that each step needs, which is also the name of its op.
ROUTES: Mapping[TransferStep, str] = {
    TransferStep.INIT: "init_weight_transfer_engine",
    TransferStep.START: "start_weight_update",
    TransferStep.UPDATE: "update_weights",
    TransferStep.FINISH: "finish_weight_update",
    TransferStep.SHUTDOWN: "shutdown_weight_transfer_engine",
}
Bodies = Mapping[WorkerId, CommandBody]


class Transfers:
    """What a controller knows of such an update between its steps: with whom the group was formed.

    A controller that takes over knows nothing of it and goes by who is there: a worker that isn't in the group refuses.
    """

    def __init__(self, line: Line, registry: Registry) -> None:
        self._line = line
        self._registry = registry
        # Boots of those that the last init reached; None: nobody that we know of.
        self._boots: dict[WorkerId, str] | None = None
        # The caller that drives the fleet: who began to form the group last. None: nobody that we know of.
        self._driver: str | None = None

    def problem(self, request: TransferFleet, members: Sequence[Member]) -> Fault | None:
        """Why this step can't be taken. Pure but for what was seen before; nothing has changed then."""
        if (missing := admission.check_route(members, ROUTES[request.step])) is not None:
            return missing
        if (others := self._others(request, members)) is not None:
            return others
        match request.step:
            case TransferStep.INIT | TransferStep.UPDATE:
                bodies = bodies_of(request, members)
                return bodies if isinstance(bodies, Fault) else self._changed(request, members)
            case TransferStep.START:
                return self._changed(request, members)
            case TransferStep.FINISH:
                version = self.version(request)
                assert version is not None
                return admission.check_version(self._registry, members, version, allow_rollback=False)
            case _:
                return None

    def version(self, request: TransferFleet) -> Version | None:
        """What a finish makes the fleet's version: what it says, else the next step. None: another step makes none."""
        if request.step is not TransferStep.FINISH:
            return None
        return admission.next_version(self._registry) if request.version is None else request.version

    async def run(
        self, op: Op, request: TransferFleet, members: Sequence[Member], version: Version | None
    ) -> tuple[Report, Version | None]:
        """Take the step, a finish to `version`; the report, and the version that somebody is at because of it.

        Cancel: workers go on with what they were sent; `Op.stop` is the way to take it back.
        """
        verb = TransferVerb(op, self._line, members, self._registry)
        self._driver = None if request.step is TransferStep.SHUTDOWN else request.caller
        match request.step:
            case TransferStep.INIT:
                bodies = bodies_of(request, members)
                assert not isinstance(bodies, Fault)
                report = await verb.join(bodies)
                is_formed = all(o.outcome is Outcome.OK for o in report.outcomes)
                self._boots = {m.worker: m.boot_id for m in members} if is_formed else None
            case TransferStep.START:
                report = await verb.start(request)
            case TransferStep.UPDATE:
                bodies = bodies_of(request, members)
                assert not isinstance(bodies, Fault)
                report = await verb.update(request, bodies)
                if verb.has_left:
                    self._boots = None
            case TransferStep.FINISH:
                assert version is not None
                report, is_done = await verb.finish(request, version)
                return report, version if is_done else None
            case TransferStep.SHUTDOWN:
                self._boots = None
                report = await verb.shutdown()
        return report, None

    def _others(self, request: TransferFleet, members: Sequence[Member]) -> Fault | None:
        """Whether another trainer drives, as we know or workers say. An init or a shutdown takes its place."""
        match request.step:
            case TransferStep.INIT | TransferStep.SHUTDOWN:
                return None
            case TransferStep.START:
                return driver_problem(request, self._driver)
            case _:
                return driver_problem(request, self._driver) or owner_problem(request, members)

    def _changed(self, request: TransferFleet, members: Sequence[Member]) -> Fault | None:
        """Whether others are there than the group was formed with: a collective would wait for ever (SCENARIOS 59)."""
        if request.step is TransferStep.INIT or self._boots is None:
            return None
        now = {m.worker: m.boot_id for m in members}
        differing = sorted(w for w in now.keys() | self._boots.keys() if now.get(w) != self._boots.get(w))
        if not differing:
            return None
        names = ", ".join(differing)
        message = (
            f"the fleet has changed since the group was formed ({names}); form it again: init_weight_transfer_engine"
        )
        return fault(FaultCode.WRONG_STATE, message, workers=names)


def bodies_of(request: TransferFleet, members: Sequence[Member]) -> Bodies | Fault:
    """What each worker is told in an init or an update; a fault if that can't be said. Pure."""
    info = _parsed(request.info)
    if isinstance(info, Fault):
        return info
    if request.step is TransferStep.INIT:
        return _inits(info, members)
    if not isinstance(info, list):
        return {m.worker: ApplyUpdate(info=json.dumps(info)) for m in members}
    num_ranks = sum(m.descriptor.world_size for m in members)
    if len(info) != num_ranks:
        message = (
            f"update_info has {len(info)} entries, and the fleet {num_ranks} ranks; give one for each, or one for all"
        )
        return fault(FaultCode.BAD_MESSAGE, message)
    bodies: dict[WorkerId, CommandBody] = {}
    first = 0
    for member in members:
        size = member.descriptor.world_size
        bodies[member.worker] = ApplyUpdate(info=json.dumps(info[first : first + size]))
        first += size
    return bodies


def _inits(info: Any, members: Sequence[Member]) -> Bodies | Fault:
    """Rank offsets from the real world sizes, in the order of `members` (SCENARIOS 17)."""
    if not isinstance(info, dict):
        return fault(FaultCode.BAD_MESSAGE, "init_info has to be an object")
    if "rank_offset" not in info:  # a backend without ranks, such as CUDA IPC
        return {m.worker: InitTransfer(info=json.dumps(info)) for m in members}
    first, size = info["rank_offset"], info.get("world_size")
    if type(first) is not int or first < 0 or (size is not None and type(size) is not int):
        return fault(FaultCode.BAD_MESSAGE, "rank_offset and world_size have to be numbers")
    num_ranks = sum(m.descriptor.world_size for m in members)
    if size is not None and size != first + num_ranks:
        listed = ", ".join(f"{m.worker} {m.descriptor.world_size}" for m in members)
        message = (
            f"world_size is {size}, but {first} ranks of the trainer and {num_ranks} of workers are {first + num_ranks}"
        )
        return fault(FaultCode.WRONG_STATE, f"{message} ({listed})")
    bodies: dict[WorkerId, CommandBody] = {}
    for member in members:
        bodies[member.worker] = InitTransfer(info=json.dumps(info | {"rank_offset": first}))
        first += member.descriptor.world_size
    return bodies


def _parsed(text: str | None) -> Any:
    try:
        info = json.loads(text or "")
    except (ValueError, RecursionError) as exc:
        return fault(FaultCode.BAD_MESSAGE, f"info is no JSON: {exc}")
    items = info if isinstance(info, list) else [info]
    if not items or not all(isinstance(item, dict) for item in items):
        return fault(FaultCode.BAD_MESSAGE, "info has to be an object, or a list of objects")
    return info


class TransferVerb(FleetVerb):
    """One step on `members`. Each method is called once.

    Cancel, of every coroutine: workers go on with what they were sent.
    """

    def __init__(self, op: Op, line: Line, members: Sequence[Member], registry: Registry) -> None:
        served = served_version(registry.addressable(Target()), registry.version)
        # Those are held that are behind, and were left paused for that: nothing of ours lets them go as they are.
        kept = [m.worker for m in members if is_kept(m.status, served)]
        super().__init__(op, line, [m.worker for m in members], kept)
        self._registry = registry
        self._members = tuple(members)
        self._served = served
        # Whether everybody was told to leave the group, because one failed.
        self.has_left = False

    async def join(self, bodies: Bodies) -> Report:
        """Form the group on everybody, or on nobody; what a trainer before left open is given up first."""
        await self._end_earlier()
        if self._is_over():
            return self._report()
        answers = await self._race("init", bodies)
        self._book.note("init", answers)
        await self._leave_unless_well("init", answers)
        return self._report()

    async def _end_earlier(self) -> None:
        """Nobody has an update open any more, and whoever isn't torn generates. Whoever paused them is gone, or will
        find that it was replaced.
        """
        # Also one that a person holds may have it open.
        still = [m.worker for m in self._current() if m.status.pause is not None]
        answers = await self._ask("leave", "close", ShutdownTransfer(), still)
        self._book.note("leave", {w: a for w, a in answers.items() if not a.is_ok})
        if not self._is_over():
            # One that can't be let go now does so when its lease ends, or stands still for the start that follows.
            await self._ask("leave", "free", ResumeGeneration(), self._free_of(still))

    async def start(self, request: TransferFleet) -> Report:
        """Pause whoever runs, and open the update; where that fails on one, everybody goes back."""
        async with self._renewing(request):
            return await self._start(request)

    async def _start(self, request: TransferFleet) -> Report:
        owner = owner_of(request)
        running = [m.worker for m in self._members if not is_held_by_another(m.status)]
        pause = PauseGeneration(mode=request.pause_mode, clear_cache=False, owner=owner, lease_s=HOLD_S)
        await self._pause_all(pause, running)
        await keep(self._line, self._op.op_id, owner, sorted(self._held))
        if self._is_over():
            return self._report()
        answers = await self._ask("start", "start", StartUpdate(), self._workers)
        self._book.note("start", answers)
        if self._is_over():
            opened = [w for w, answer in answers.items() if answer.is_ok]
            op_id = derive_step(self._op.op_id, self._line.term, "start")
            abort = AbortWeights(update_op_id=op_id, reason="others failed")
            await self._asker.until_free("undo", "close", abort, opened)
            self._book.undone(opened, "start")
            self._note_undo(await self._resume("undo", [w for w in running if w not in self._held]))
        return self._report()

    async def update(self, request: TransferFleet, bodies: Bodies) -> Report:
        """Everybody receives. Where one fails the group is left on all: those that had received are torn."""
        async with self._renewing(request):
            answers = await self._race("update", bodies)
        self._book.note("update", answers)
        await self._leave_unless_well("update", answers)
        if self.has_left and self._op.stopped.is_set():
            # Whoever asked for it is gone, or wants it back: nobody stands still for that.
            await self._free_whole(self._owned(request))
            return self._report()
        renewal = RenewLease(owner=owner_of(request), lease_s=HOLD_S)
        await self._ask("update", "keep", renewal, self._leased(request), is_final=True)
        return self._report()

    async def finish(self, request: TransferFleet, version: Version) -> tuple[Report, bool]:
        """Everybody becomes clean at `version`, and generates again; the report, and whether anybody did."""
        owned = self._owned(request)
        answers = await self._ask("finish", "finish", FinishUpdate(version=version), self._workers, is_final=True)
        self._book.note("finish", answers)
        done = [w for w, answer in answers.items() if answer.is_ok]
        # Two versions side by side serve nobody: who isn't at the new one stays as it is. Caches go with the resume.
        freed = await self._resume("resume", [w for w in done if w in owned])
        self._book.note("resume", freed, is_changed=True)
        return self._report(version=version), bool(done)

    async def shutdown(self) -> Report:
        """Everybody leaves the group; an update that is open is given up, and whoever isn't torn generates again."""
        answers = await self._ask("shutdown", "shutdown", ShutdownTransfer(), self._workers, is_final=True)
        self._book.note("shutdown", answers)
        # Whoever else stands still for an update or a trainer is left over: no other op of ours runs now.
        await self._free_whole([w for w, answer in answers.items() if answer.is_ok])
        return self._report()

    async def _free_whole(self, workers: Sequence[WorkerId]) -> None:
        freed = await self._resume("resume", self._free_of(workers))
        # Torn weights refuse, which is what they have to: the next update heals them.
        refused = {w: a for w, a in freed.items() if a.fault is not None and a.fault.code is not FaultCode.DIRTY}
        self._book.note("resume", refused, is_changed=True)

    async def _race(self, phase: str, bodies: Bodies) -> dict[WorkerId, StepAnswer]:
        """Each worker its own body; the answers up to the first that isn't ok, since the others then wait in vain."""
        self._op.enter(phase, total=len(bodies))
        stopping = self._loop.create_task(self._op.stopped.wait())
        tasks = {self._loop.create_task(self._asker.one(phase, body, w)): w for w, body in bodies.items()}
        answers: dict[WorkerId, StepAnswer] = {}
        pending: set[asyncio.Task[Any]] = set(tasks)
        try:
            while pending and not stopping.done() and all(a.is_ok for a in answers.values()):
                waited = pending | {stopping}
                done, _ = await asyncio.wait(waited, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
                answers |= {w: task.result() for task, w in tasks.items() if task in done}
                pending -= done
                self._op.count(len(answers))
                self._op.tick()
            if pending and not stopping.done():
                done, pending = await asyncio.wait(pending, timeout=HEAR_OUT_S)
                answers |= {w: task.result() for task, w in tasks.items() if task in done}
        finally:
            for task in (*pending, stopping):
                task.cancel()
            await asyncio.gather(*pending, stopping, return_exceptions=True)
        if self._op.stop_fault is not None:
            answers |= {w: unknown(self._op.stop_fault) for task, w in tasks.items() if task in pending}
        return answers

    async def _leave_unless_well(self, phase: str, answers: Mapping[WorkerId, StepAnswer]) -> None:
        """Where one has failed, nobody stays in the group, or in a collective without it; unless nobody began."""
        refused = [w for w, answer in answers.items() if answer.outcome is Outcome.REFUSED]
        is_well = not self._is_over() and not self._op.stopped.is_set()
        if is_well or len(refused) == len(self._workers):
            return
        self.has_left = True
        left = await self._asker.until_free("undo", "leave", ShutdownTransfer(), self._workers)
        for worker in self._workers:
            before = answers.get(worker)
            if before is not None and not before.is_ok:
                continue
            answer = left[worker]
            why = answer.fault or fault(FaultCode.GROUP_FAILED, "another worker failed, and the group was left")
            outcome = Outcome.UNDONE if phase == "init" and answer.is_ok else Outcome.FAILED
            self._book.outcomes[worker] = WorkerOutcome(
                worker=worker, outcome=outcome, phase=phase, fault=None if outcome is Outcome.UNDONE else why
            )

    def _renewing(self, request: TransferFleet) -> AbstractAsyncContextManager[None]:
        """A step may take longer than a lease holds. Nothing is held for a trainer that took it back, or is gone: who
        gives no sign of life has its step stopped (`callers`).
        """

        def leased() -> list[WorkerId]:
            return [] if self._op.stopped.is_set() else self._leased(request)

        return renewing(self._line, self._op.op_id, owner_of(request), leased, lease_s=HOLD_S)

    def _owned(self, request: TransferFleet) -> list[WorkerId]:
        """Those that stand still in the trainer's name, now."""
        owner = owner_of(request)
        current = self._current()
        return [m.worker for m in current if m.status.pause is not None and m.status.pause.owner == owner]

    def _leased(self, request: TransferFleet) -> list[WorkerId]:
        """Those of them that stand still as long as the trainer is there, and not for longer."""
        kept = {m.worker for m in self._current() if is_kept(m.status, self._served)}
        return [w for w in self._owned(request) if w not in kept]

    def _free_of(self, workers: Sequence[WorkerId]) -> list[WorkerId]:
        """Those of `workers` that may generate: nobody does on an older version beside others at the fleet's."""
        return [m.worker for m in self._current() if m.worker in workers and is_to_free(m.status, self._served)]

    def _current(self) -> list[Member]:
        return [m for w in self._workers if (m := self._registry.get(w)) is not None]
