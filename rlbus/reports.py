"""What callers do with a report: raise for one that isn't ok, and read an update's numbers."""

from dataclasses import dataclass

from rlbus.errors import PartialError, error_from_fault
from rlbus.schemas import OpStatus, Outcome, Report, Version, WorkerId, WorkerOutcome


def raise_for_report(report: Report) -> None:
    """Return for a report that is ok; every client method calls this unless told `check=False`.

    Raises:
        RefusedError: nothing was begun; the class names the reason, and `__cause__.report` is the report.
        PartialError: it ended partial or failed; `.report` has one outcome per worker.
    """
    if report.status is OpStatus.OK:
        return
    if report.status is OpStatus.REFUSED and report.fault is not None:
        raise error_from_fault(report.fault) from PartialError(report)
    raise PartialError(report)


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """How an update of the fleet's weights ended, as `Trainer.update_weights` returns it.

    `report` is the controller's own record. `send_s` and `num_tensors` are the sender's: seconds from the first byte
    to the last, and how many tensors it sent (0 when it never came to that). `was_refused` is in `status`.
    """

    report: Report
    num_tensors: int = 0
    send_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether as many workers as required now serve the new version."""
        return self.report.status is OpStatus.OK

    @property
    def status(self) -> OpStatus:
        """How it ended as a whole."""
        return self.report.status

    @property
    def op_id(self) -> str:
        """Names this update in logs, events and statuses."""
        return self.report.op_id

    @property
    def version(self) -> Version | None:
        """The version that was asked for."""
        return self.report.version

    @property
    def num_bytes(self) -> int:
        """Size of the weights, once; every worker received as much."""
        return self.report.num_bytes

    @property
    def took_s(self) -> float:
        """Seconds from request to report."""
        return self.report.took_s

    @property
    def paused_s(self) -> float:
        """Seconds that engines stood still for it."""
        return self.report.paused_s

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds of each phase, in the order in which they ran."""
        return self.report.phases_s

    @property
    def outcomes(self) -> dict[WorkerId, WorkerOutcome]:
        """One outcome per worker."""
        return {outcome.worker: outcome for outcome in self.report.outcomes}

    @property
    def failed(self) -> tuple[WorkerOutcome, ...]:
        """The outcomes that aren't ok."""
        return tuple(o for o in self.report.outcomes if o.outcome is not Outcome.OK)

    def raise_for_status(self) -> None:
        """Raise as `raise_for_report` does unless the update is ok."""
        raise_for_report(self.report)

    def __str__(self) -> str:
        if self.status is OpStatus.REFUSED and self.report.fault is not None:
            return f"update {self.version}: refused: {self.report.fault.message}"
        num_ok = len(self.report.outcomes) - len(self.failed)
        text = f"update {self.version}: {self.status.value}, {num_ok} of {len(self.report.outcomes)} workers"
        text += f", {self.num_bytes} bytes in {self.took_s:.2f} s, paused {self.paused_s:.2f} s"
        if self.report.fault is not None:
            text += f": {self.report.fault.message}"
        return text
