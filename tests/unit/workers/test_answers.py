"""How a worker speaks."""

import pytest

from rlbus.bus import Bus
from rlbus.codec import MAX_MESSAGE_BYTES
from rlbus.schemas import FaultCode, ReceivedData, ResultStatus, TensorSum
from rlbus.testing import MemoryBroker, run
from rlbus.workers.answers import Answers, bad_message, find_op_id

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("data", "op_id"),
    [
        (b'{"op_id":"a-1","body":{}}', "a-1"),
        (b'{"body":{"op_id":"inner"},"op_id":"outer"}', "outer"),
        (b'{"op_id" : "cut", "te', "cut"),
        (b'{"op_id":"no spaces allowed"}', None),
        (b'{"op_id":7}', None),
        (b"", None),
        (b"\xff\xfe", None),
        (b"[" * 200_000, None),
        (b'{"pad":"' + b"x" * 10_000 + b'","op_id":"deep', None),
    ],
)
def test_op_id_is_read_out_of_what_does_not_parse(data: bytes, op_id: str | None) -> None:
    """So that the sender can be told."""
    assert find_op_id(data) == op_id


def test_oversized_message_is_called_too_large() -> None:
    """Anything else that doesn't parse is a bad message."""
    assert bad_message("x", MAX_MESSAGE_BYTES + 1).code is FaultCode.TOO_LARGE
    assert bad_message("x", 10).code is FaultCode.BAD_MESSAGE


def test_result_that_fits_no_message_becomes_a_failure_that_says_so() -> None:
    """Whoever waits is told, instead of waiting for what can't be sent."""

    async def main() -> None:
        broker = MemoryBroker()
        async with Bus(broker.connect()) as bus:
            answers = Answers(bus, "ns", "c", "1", "boot")
            sums = tuple(TensorSum(name="n" * 100 + str(i), checksum="0" * 16) for i in range(10_000))
            data = ReceivedData(num_bytes=1, num_tensors=1, sums=sums, receive_s=0.0, load_s=0.0)
            large = answers.build("op", ResultStatus.OK, data=data)
            assert (large.status, large.data) == (ResultStatus.FAILED, None)
            assert large.fault is not None
            assert large.fault.code is FaultCode.TOO_LARGE
            small = answers.build("op", ResultStatus.OK)
            assert small.status is ResultStatus.OK

    run(main())


def test_closed_bus_swallows_answers() -> None:
    """Nothing here raises for the bus's sake."""

    async def main() -> None:
        bus = Bus(MemoryBroker().connect())
        answers = Answers(bus, "ns", "c", "1", "boot")
        await bus.aclose()
        answers.accepted("op", "reply")
        answers.result("reply", answers.build("op", ResultStatus.OK))
        assert answers.num_refused == 0

    run(main())
