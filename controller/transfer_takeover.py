"""What a new leader does with a step of another trainer's update that the one before left unfinished.

A finish goes forward, as it does while its leader lives: everything was sent by then. An init, a start or an update
that every worker says it has done counts as done; an init or update that still runs is waited for while its trainer
asks for it. Any other is taken back on all: an update is closed and its group left, so that nobody can finish what he
has a part of; what had come is torn and stays paused, and whoever is whole generates again.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping

from rlbus.controller.answers import StepAnswer
from rlbus.controller.asking import Asker
from rlbus.controller.causes import fault
from rlbus.controller.leases import renewing
from rlbus.controller.limits import ENDING_S, RETRY_S
from rlbus.controller.line import Line
from rlbus.controller.op import Op
from rlbus.controller.registry import Registry
from rlbus.controller.takeover import PHASE, TORN, TakeOver
from rlbus.controller.trainer_holds import is_behind, is_kept, is_to_free, owner_of, served_version
from rlbus.controller.transfers import HOLD_S
from rlbus.schemas import (
    AbortWeights,
    CommandBody,
    Fault,
    FaultCode,
    FinishUpdate,
    GetOutcome,
    JournalEntry,
    Outcome,
    OutcomeData,
    RenewLease,
    Report,
    ResultStatus,
    ResumeGeneration,
    ShutdownTransfer,
    Target,
    TransferFleet,
    TransferStep,
    Version,
    WeightsState,
    WorkerId,
    WorkerStatus,
)

_log = logging.getLogger("rlbus.controller")

# How long a step that still runs is waited for when nobody has asked for it, in seconds. Source: clients ask again
# after 5 s of silence (rlbus._conversation).
ASKED_S = 10.0


class TransferTakeOver(TakeOver):
    """One step that was left behind. `run` once, as the work of `op`."""

    def __init__(self, op: Op, line: Line, registry: Registry, entry: JournalEntry) -> None:
        super().__init__(op, line, registry, entry)
        assert isinstance(entry.request, TransferFleet)
        self._request = entry.request
        self._asker = Asker(op, line)
        # Every worker did it, by its own word.
        self._is_done = False
        # What last went wrong on whom while it was settled.
        self._faults: dict[WorkerId, Fault] = {}

    async def run(self) -> tuple[Report, Version | None]:
        """Settle it; the report, and the version that some worker is at because of it. Cancel: as `TakeOver.run`."""
        item = self._entry.item
        _log.warning("op %s (%s) was left behind by term %d", item.op_id, item.op, item.term)
        self._op.enter(PHASE, total=len(self._entry.members))
        await self._await_members()
        await self._look()
        match self._request.step:
            case TransferStep.INIT:
                self._is_done = await self._is_joined("init")
                if not self._is_done:
                    await self._leave()
                    await self._let_go(self._seen)
            case TransferStep.START:
                await self._settle_start()
            case TransferStep.UPDATE:
                await self._settle_update_step()
            case TransferStep.FINISH:
                await self._settle_finish()
            case TransferStep.SHUTDOWN:
                await self._leave()
                await self._let_go(self._seen)
        report = self._report()
        is_at = any(self._is_at_version(worker) for worker in self._seen)
        return report, item.version if is_at else None

    # -- steps --------------------------------------------------------------------------------------------------------

    async def _settle_start(self) -> None:
        """Everybody has it open: it is done. Otherwise nobody has, and whom it paused generates again."""
        begun = await self._became_of("start")
        is_begun = self._all_are_there() and all(_is_ok(begun.get(w)) for w in self._entry.members)
        if is_begun and all(status.pause is not None for status in self._seen.values()):
            self._is_done = True
            await self._keep()
            return
        # A resume ends a pause that still runs, and closes what is open; nothing has come in it.
        waiting = [w for w, status in self._seen.items() if status.op_id not in self._pause_ids]
        abort = AbortWeights(update_op_id=self._begun_id("start"), reason="its controller died")
        await self._tell("abort", abort, waiting)
        await self._look()
        await self._let_go(self._seen)

    async def _settle_update_step(self) -> None:
        """Everybody has received: it is done. Otherwise nobody may finish: who missed a part of it would be mixed."""
        owner = owner_of(self._request)
        async with renewing(self._line, self._op.op_id, owner, self._leased, lease_s=HOLD_S):
            has_come = await self._is_joined("update")
        await self._look()
        is_open = all(s.weights.state is WeightsState.UPDATING for s in self._seen.values())
        if has_come and is_open and not self._silent:
            self._is_done = True
            await self._keep()
            return
        await self._leave()
        await self._let_go(self._seen)

    async def _settle_finish(self) -> None:
        """Whoever isn't at the version yet is asked once more, as the leader before would have; who is there runs."""
        version = self._entry.item.version
        if version is None:
            return  # by an older release, which didn't write it down: nobody can say which weights are meant
        await self._let_go(w for w in self._seen if self._is_at_version(w))  # no need to stand still for who hangs
        await self._await_idle()
        rest = [w for w in self._seen if not self._is_at_version(w) and not self._is_rebooted(w)]
        self._note(await self._asker.ask(PHASE, "finish", FinishUpdate(version=version), rest, is_final=True))
        await self._look()
        await self._let_go(w for w in self._seen if self._is_at_version(w))

    async def _leave(self) -> None:
        """Nobody stays in the group, or in a collective without others; an open update is given up."""
        await self._tell("leave", ShutdownTransfer(), self._seen)
        await self._look()

    async def _let_go(self, workers: Iterable[WorkerId]) -> None:
        """Those of them generate again that stand still for this trainer (or one whose place it takes), and whose
        weights are whole.
        """
        served = self._served()
        free = [w for w in workers if self._seen[w].weights.state not in TORN and self._may_go(self._seen[w], served)]
        await self._tell("resume", ResumeGeneration(), free)
        await self._look()

    def _may_go(self, status: WorkerStatus, served: Version | None) -> bool:
        match self._request.step:
            case TransferStep.FINISH:
                return self._is_mine(status)
            case TransferStep.INIT | TransferStep.SHUTDOWN:
                return is_to_free(status, served)
            case _:
                return self._is_mine(status) and not is_behind(status, served)

    async def _keep(self) -> None:
        """The trainer's next step has the time that it would have had."""
        await self._tell("keep", RenewLease(owner=owner_of(self._request), lease_s=HOLD_S), self._leased())

    # -- what became of it --------------------------------------------------------------------------------------------

    async def _is_joined(self, step: str) -> bool:
        """Whether everybody has done this step. One that runs is waited for while somebody asks for it."""
        asked_until_s = self._loop.time() + ASKED_S
        while self._all_are_there():
            found = await self._became_of(step)
            running = [w for w, data in found.items() if data.running]
            if any(not _is_ok(found.get(w)) and w not in running for w in self._entry.members):
                return False  # the others would wait for it in vain
            if not running:
                return True
            # Whoever asked and is gone since is noticed as in any such step (`callers`).
            is_asked = not self._op.audience.is_empty or self._loop.time() < asked_until_s
            if not is_asked or not self._may_wait():
                return False
            await self._pass_time()
        return False

    async def _await_idle(self) -> None:
        """What runs on a worker is ended first, as long as the op's own deadline allows."""
        while any(status.op_id is not None for status in self._seen.values()) and self._may_wait():
            await self._pass_time()
            await self._look()

    def _may_wait(self) -> bool:
        return not self._op.stopped.is_set() and self._loop.time() < self._op.forward_until_s

    async def _pass_time(self) -> None:
        """What follows has its time from here on."""
        await asyncio.sleep(RETRY_S)
        self._op.tick()
        self._until_s = self._loop.time() + ENDING_S

    async def _became_of(self, step: str) -> dict[WorkerId, OutcomeData]:
        """What each says of the command that the leader before sent it; nothing of whom it never reached."""
        answers = await self._ask("ask", GetOutcome(of_op_id=self._begun_id(step)), list(self._seen))
        return {w: answer.data for w, answer in answers.items() if isinstance(answer.data, OutcomeData)}

    def _all_are_there(self) -> bool:
        members = self._entry.members
        return not self._silent and all(self._is_there(w) and not self._is_rebooted(w) for w in members)

    def _leased(self) -> list[WorkerId]:
        """Those that stand still for the trainer, as long as it is there and not for longer."""
        served = self._served()
        return [w for w, status in self._seen.items() if self._is_mine(status) and not is_kept(status, served)]

    def _served(self) -> Version | None:
        return served_version(self._registry.addressable(Target()), self._registry.version)

    def _is_mine(self, status: WorkerStatus) -> bool:
        """Whether it stands still in the trainer's name, or is about to."""
        return status.op_id in self._pause_ids or self._is_paused_by(status, owner_of(self._request))

    async def _tell(self, step: str, body: CommandBody, workers: Iterable[WorkerId]) -> None:
        self._note(await self._asker.until_free(PHASE, step, body, list(workers)))

    def _note(self, answers: Mapping[WorkerId, StepAnswer]) -> None:
        for worker, answer in answers.items():
            self._faults.pop(worker, None)
            if answer.fault is not None:
                self._faults[worker] = answer.fault

    # -- the report ---------------------------------------------------------------------------------------------------

    def _judge(self, worker: WorkerId, status: WorkerStatus) -> tuple[Outcome, Fault | None]:
        if self._is_done:
            return Outcome.OK, None
        is_paused = status.pause is not None
        if status.weights.state in TORN:
            message = "its controller died; weights are torn, and an update that brings all of them makes them clean"
            return Outcome.FAILED, self._lost(message, weights="torn", generation="paused" if is_paused else "running")
        why = self._faults.get(worker)
        if self._is_mine(status) and self._request.step is not TransferStep.INIT:
            message = "its controller died; it stays paused until its lease ends"
            return Outcome.FAILED, why or self._lost(message, generation="paused")
        match self._request.step:
            case TransferStep.FINISH:
                if self._is_at_version(worker):
                    return Outcome.OK, None
                return Outcome.FAILED, why or self._lost("its controller died; it isn't at the new version")
            case TransferStep.SHUTDOWN:
                return (Outcome.OK, None) if why is None else (Outcome.FAILED, why)
            case _:
                return Outcome.UNDONE, None

    def _lost(self, message: str, **detail: object) -> Fault:
        return fault(FaultCode.CONTROLLER_LOST, message, retryable=True, **detail)


def _is_ok(data: OutcomeData | None) -> bool:
    return data is not None and data.status is ResultStatus.OK
