"""What one worker said to one step, reduced to what decisions need. Pure."""

from dataclasses import dataclass

from rlbus.controller.causes import fault
from rlbus.fanout import Gathered
from rlbus.schemas import Fault, FaultCode, Outcome, ResultData, ResultStatus

_OUTCOME = {
    ResultStatus.OK: Outcome.OK,
    ResultStatus.REFUSED: Outcome.REFUSED,
    ResultStatus.FAILED: Outcome.FAILED,
}


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """How one step ended on one worker: ok, refused (nothing changed), failed, or unknown (silence, not settled).

    `fault` is set exactly when it isn't ok.
    """

    outcome: Outcome
    fault: Fault | None = None
    data: ResultData | None = None
    took_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether the worker did it."""
        return self.outcome is Outcome.OK

    @property
    def is_busy(self) -> bool:
        """Whether the worker refused only because something else still runs in it, which ends by itself.

        An update that is open there doesn't: somebody has to end it.
        """
        if self.fault is None or self.outcome is not Outcome.REFUSED:
            return False
        return self.fault.code is FaultCode.BUSY and "open" not in self.fault.detail

    @property
    def is_housekeeping(self) -> bool:
        """Whether what runs there is the worker's own: an adapter that has drained goes, a lease has ended. Nobody
        sent it, so nobody can be told to wait for it.
        """
        return self.is_busy and self.fault is not None and "own" in self.fault.detail


def answer_of(gathered: Gathered) -> StepAnswer:
    """The answer in what a fan-out gathered for one worker."""
    result = gathered.result
    if result is None:
        why = gathered.fault or fault(FaultCode.INTERNAL, "no answer, and no reason for it")
        return unknown(why) if gathered.is_unknown else StepAnswer(Outcome.REFUSED, why)
    outcome = _OUTCOME[result.status]
    if outcome is Outcome.OK:
        return StepAnswer(outcome, None, result.data, result.took_s)
    why = result.fault or fault(FaultCode.INTERNAL, f"the worker answered {outcome.value} without a reason")
    return StepAnswer(outcome, why, result.data, result.took_s)


def unknown(why: Fault) -> StepAnswer:
    """The answer of a worker that gave none."""
    return StepAnswer(Outcome.UNKNOWN, why)
