"""Whether what arrived is what was sent, by table (SCENARIOS 47)."""

import pytest

from rlbus.controller.testing import SUMS, TENSORS
from rlbus.controller.verify import check_received, check_sent
from rlbus.schemas import FaultCode, ReceivedData, TensorSum

pytestmark = pytest.mark.unit

A, B = SUMS
OTHER = TensorSum(name="b", checksum="0" * 16)


def data(*sums: TensorSum) -> ReceivedData:
    return ReceivedData(num_bytes=1, num_tensors=len(sums), sums=sums, receive_s=0.0, load_s=0.0)


@pytest.mark.parametrize(
    ("received", "tensor"),
    [
        (data(A, B), None),
        (data(A, OTHER), "b"),
        (data(B, A), "a"),
        (data(A), "b"),
        (data(A, B, TensorSum(name="c", checksum="c" * 16)), "c"),
        (data(), "a"),
    ],
)
def test_the_first_tensor_that_differs_is_named(received: ReceivedData, tensor: str | None) -> None:
    """By name, order and checksum; missing and surplus ones too."""
    found = check_received(SUMS, received)
    assert (None if found is None else found.detail["tensor"]) == tensor
    assert found is None or found.code is FaultCode.CHECKSUM_MISMATCH


def test_a_worker_that_says_nothing_proves_nothing() -> None:
    """No sums, no commit."""
    found = check_received(SUMS, None)
    assert found is not None
    assert found.code is FaultCode.CHECKSUM_MISMATCH


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        ((A, B), None),
        ((A,), "the trainer sent 1 tensors, 2 were announced"),
        ((B, A), "the trainer sent b where a was announced"),
        ((), "the trainer sent 0 tensors, 2 were announced"),
    ],
)
def test_a_trainer_sends_what_it_announced(sums: tuple[TensorSum, ...], message: str | None) -> None:
    """Its sums cover the manifest, in order."""
    found = check_sent(TENSORS, sums)
    assert (None if found is None else found.message) == message
