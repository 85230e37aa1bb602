"""vLLM's client for a whole fleet, over the in-memory bus, with a controller that says how each step ended."""

from collections.abc import Iterator

import pytest

import rlbus
from rlbus import subjects
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.config import BusConfig
from rlbus.errors import ConfigError, PartialError, RefusedError
from rlbus.schemas import (
    ControlRequest,
    Fault,
    FaultCode,
    OpAccepted,
    OpResult,
    OpStatus,
    Refusal,
    Report,
    TransferFleet,
    TransferStep,
    Version,
)
from rlbus.schemas.weights import MAX_VERSION_NUMBER
from rlbus.sync_client import version_of
from rlbus.testing import MemoryBroker

pytestmark = pytest.mark.unit


class Controller:
    """Joins well, fails to update, and refuses the rest."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        bus.subscribe(subjects.all_control("test"), ControlRequest, self._on_request)

    def _on_request(self, request: ControlRequest, message: Message) -> None:
        assert isinstance(request, TransferFleet)
        assert message.reply is not None
        fault = Fault(code=FaultCode.GROUP_FAILED, message="it broke")
        if request.step not in (TransferStep.INIT, TransferStep.UPDATE):
            self._bus.publish(
                message.reply, Refusal(op_id=request.op_id, fault=Fault(code=FaultCode.WRONG_STATE, message="no"))
            )
            return
        is_well = request.step is TransferStep.INIT
        report = Report(
            op_id=request.op_id,
            op=request.step.value,
            status=OpStatus.OK if is_well else OpStatus.FAILED,
            outcomes=(),
            phases_s={},
            took_s=0.1,
            fault=None if is_well else fault,
        )
        self._bus.publish(message.reply, OpAccepted(op_id=request.op_id))
        self._bus.publish(message.reply, OpResult(report=report))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[rlbus.BusWeightSyncClient]:
    """One that is connected."""

    async def connect_bus(_config: BusConfig, *, name: str) -> Bus:
        assert name
        broker = MemoryBroker()
        Controller(Bus(broker.connect()))
        return Bus(broker.connect())

    monkeypatch.setattr("rlbus.connecting.connect_bus", connect_bus)
    with rlbus.BusWeightSyncClient("nats://127.0.0.1:1", namespace="test") as client:
        yield client


def test_report_is_that_of_the_last_step_also_when_it_failed(client: rlbus.BusWeightSyncClient) -> None:
    """The very one that the exception has; none of a step that was never begun."""
    assert client.report is None
    client.init_weight_transfer_engine({"a": 1})
    assert client.report is not None
    assert (client.report.op, client.report.status) == ("init", OpStatus.OK)
    with pytest.raises(PartialError, match="it broke") as caught:
        client.update_weights({"a": 1})
    assert client.report is not None
    assert (client.report.status, client.report) == (OpStatus.FAILED, caught.value.report)
    with pytest.raises(RefusedError):
        client.finish_weight_update()
    assert client.report is None


def test_versions_are_steps_of_an_incarnation() -> None:
    """The first one, unless it is said."""
    assert version_of("7") == Version(step=7)
    assert version_of("1.7") == Version(incarnation=1, step=7)
    largest = MAX_VERSION_NUMBER
    assert version_of(f"{largest}.{largest}") == Version(incarnation=largest, step=largest)


@pytest.mark.parametrize(
    "text",
    ["", "v7", "1.", "1.2.3", "-1", "\u0667", f"{MAX_VERSION_NUMBER + 1}", f"{MAX_VERSION_NUMBER + 1}.0", "9" * 5000],
)
def test_text_that_can_not_be_compared_with_the_fleets_version_is_refused(text: str) -> None:
    """Also a number that no worker could report exactly."""
    with pytest.raises(ConfigError, match="use a step such as 7"):
        version_of(text)
