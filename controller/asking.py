"""One step of an op: a command to some workers, with an answer for each, whatever happens to the bus meanwhile."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

from rlbus.controller.answers import StepAnswer, unknown
from rlbus.controller.causes import fault
from rlbus.controller.limits import RETRY_S, ending_step_until_s, limits_until, overdue_at_s
from rlbus.controller.line import Line
from rlbus.controller.op import PROGRESS_S, Op
from rlbus.controller.op_ids import derive_step
from rlbus.errors import BrokenError, RLBusError
from rlbus.schemas import CommandBody, FaultCode, Outcome, WorkerId

_log = logging.getLogger("rlbus.controller")

OnAnswer = Callable[[WorkerId, StepAnswer], None]


class Asker:
    """Asks the workers of one op. `on_answer` hears of each answer when it comes."""

    def __init__(self, op: Op, line: Line) -> None:
        self._op = op
        self._line = line
        self._loop = asyncio.get_running_loop()

    async def ask(
        self,
        phase: str,
        step: str,
        body: CommandBody,
        workers: Sequence[WorkerId],
        *,
        is_final: bool = False,
        on_answer: OnAnswer | None = None,
    ) -> dict[WorkerId, StepAnswer]:
        """One step. `is_final`: it is neither stopped nor bound by what is left of the deadline.

        Cancel: what was sent goes on.
        """
        if not workers:
            return {}
        self._op.enter(phase, total=len(workers))
        answers: dict[WorkerId, StepAnswer] = {}

        def on_outcome(worker: WorkerId, answer: StepAnswer) -> None:
            answers[worker] = answer
            self._op.count(len(answers))
            if on_answer is not None:
                on_answer(worker, answer)

        asking = self._loop.create_task(self._fan_out(step, body, workers, is_final, on_outcome))
        stopping = self._loop.create_task(self._op.stopped.wait())
        waited = {asking} if is_final else {asking, stopping}
        began_s = self._loop.time()
        try:
            while not asking.done() and (is_final or not stopping.done()):
                if self._loop.time() >= overdue_at_s(self._op.ending_until_s, began_s) and stopping.done():
                    break
                await asyncio.wait(waited, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
                self._op.tick()
        finally:
            for task in (asking, stopping):
                task.cancel()
            ended = await asyncio.gather(asking, stopping, return_exceptions=True)
        why = ended[0] if isinstance(ended[0], StepAnswer) else self._why_missing(ended[0])
        return {w: answers.get(w, why) for w in workers}

    async def until_free(
        self,
        phase: str,
        step: str,
        body: CommandBody,
        workers: Sequence[WorkerId],
        *,
        on_answer: OnAnswer | None = None,
    ) -> dict[WorkerId, StepAnswer]:
        """A final step of the op's end; one that is busy ending what it was told to abandon is asked again, as long as
        there is time. Cancel: as `ask`.
        """
        self._op.winds_down()
        answers: dict[WorkerId, StepAnswer] = {}
        left: Sequence[WorkerId] = workers
        for number in itertools.count(1):
            name = step if number == 1 else f"{step}-{number}"
            answers.update(await self.ask(phase, name, body, left, is_final=True, on_answer=on_answer))
            left = [w for w in left if answers[w].is_busy]
            if not left or self._loop.time() + RETRY_S >= self._op.ending_until_s:
                break
            await asyncio.sleep(RETRY_S)
        return answers

    async def one(self, step: str, body: CommandBody, worker: WorkerId) -> StepAnswer:
        """A command to one worker, beside others of the same step, whom the caller counts and stops.

        Cancel: as `ask`.
        """
        found: list[StepAnswer] = []
        why = await self._fan_out(step, body, [worker], False, lambda _, answer: found.append(answer))
        return found[0] if found else why or self._why_missing(None)

    def _why_missing(self, ended: object) -> StepAnswer:
        """The answer of workers that the fan-out has none of."""
        if self._op.stop_fault is not None:
            return unknown(self._op.stop_fault)
        if isinstance(ended, Exception):
            _log.error("op %s: %s", self._op.op_id, ended, exc_info=ended)
        return unknown(fault(FaultCode.INTERNAL, "a bug in the controller; its log has the traceback"))

    async def _fan_out(
        self, step: str, body: CommandBody, workers: Sequence[WorkerId], is_final: bool, on_outcome: OnAnswer
    ) -> StepAnswer | None:
        """The answer of whoever has none, None if all have one. While we are disconnected (or our lease isn't renewed)
        nothing is given up: the deadline counts, as it does for a fan-out that had begun.
        """
        until_s = self._op.forward_until_s
        if is_final:
            until_s = ending_step_until_s(self._op.ending_until_s, self._loop.time())
        while True:
            limits = limits_until(until_s, self._loop.time(), is_ending=is_final)
            try:
                await self._line.ask(
                    body,
                    workers,
                    op_id=derive_step(self._op.op_id, self._line.term, step),
                    limits=limits,
                    on_outcome=on_outcome,
                )
                return None
            except BrokenError as exc:
                if self._loop.time() >= until_s:
                    why = fault(FaultCode.NO_ACK, f"nothing was sent: {exc}", retryable=True)
                    return StepAnswer(Outcome.REFUSED, why)
                await asyncio.sleep(RETRY_S)
            except RLBusError as exc:
                return unknown(fault(FaultCode.INTERNAL, str(exc)))
