"""What callers do with reports: raise for one that isn't ok, and read an update's numbers."""

import pytest

from rlbus.errors import BusyError, PartialError
from rlbus.reports import UpdateReport, raise_for_report
from rlbus.schemas import Fault, FaultCode, OpStatus, Outcome, Report, Version, WorkerId, WorkerOutcome

pytestmark = pytest.mark.unit

FAULT = Fault(code=FaultCode.BUSY, message="u9 runs", detail={"op_id": "u9"})


def report_of(status: OpStatus, fault: Fault | None = None) -> Report:
    """An update of two workers, the second of which failed unless all is ok."""
    second = Outcome.OK if status is OpStatus.OK else Outcome.FAILED
    return Report(
        op_id="u1",
        op="update_weights",
        status=status,
        outcomes=(
            WorkerOutcome(worker=WorkerId("a/1"), outcome=Outcome.OK, phase="resume"),
            WorkerOutcome(worker=WorkerId("a/2"), outcome=second, phase="transfer"),
        ),
        phases_s={"pause": 0.25, "transfer": 0.5},
        took_s=1.0,
        fault=fault,
        version=Version(step=7),
        num_bytes=100,
        paused_s=0.75,
    )


def test_an_ok_report_raises_nothing() -> None:
    """Neither as the wire's report nor as the trainer's."""
    raise_for_report(report_of(OpStatus.OK))
    UpdateReport(report_of(OpStatus.OK)).raise_for_status()


@pytest.mark.parametrize("status", [OpStatus.PARTIAL, OpStatus.FAILED])
def test_a_report_that_changed_something_raises_with_all_outcomes(status: OpStatus) -> None:
    """PartialError carries the report, whatever the fault's own class."""
    with pytest.raises(PartialError) as caught:
        raise_for_report(report_of(status, FAULT))
    assert caught.value.report == report_of(status, FAULT)


def test_a_refused_report_raises_the_class_of_its_fault() -> None:
    """The report is its cause, so nothing is lost; without a fault it is a PartialError."""
    with pytest.raises(BusyError) as caught:
        raise_for_report(report_of(OpStatus.REFUSED, FAULT))
    assert caught.value.running_op_id == "u9"
    assert isinstance(caught.value.__cause__, PartialError)
    with pytest.raises(PartialError):
        raise_for_report(report_of(OpStatus.REFUSED))


def test_an_update_report_reads_as_numbers_and_one_line() -> None:
    """Outcomes by worker, those that failed, and a line for a log."""
    report = UpdateReport(report_of(OpStatus.PARTIAL, FAULT), num_tensors=3, send_s=0.4)
    assert not report.ok
    assert (report.op_id, report.version, report.num_bytes) == ("u1", Version(step=7), 100)
    assert (report.took_s, report.paused_s, report.phases_s) == (1.0, 0.75, {"pause": 0.25, "transfer": 0.5})
    assert set(report.outcomes) == {"a/1", "a/2"}
    assert [o.worker for o in report.failed] == ["a/2"]
    assert str(report) == "update 0.7: partial, 1 of 2 workers, 100 bytes in 1.00 s, paused 0.75 s: u9 runs"
    assert str(UpdateReport(report_of(OpStatus.REFUSED, FAULT))) == "update 0.7: refused: u9 runs"
