"""A command that was refused once isn't done when a second copy of it comes."""

import pytest

from rlbus.schemas import Fault, FaultCode, InitGroup, PauseGeneration, ResultStatus, Version
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from rlbus.workers.refusals import Refusals
from rlbus.workers.testing import Rig, on_worker

pytestmark = pytest.mark.unit

V1 = Version(step=1)


def test_a_second_copy_of_a_refused_command_is_refused_though_it_could_be_done_by_then() -> None:
    """Whoever asked was told that nothing happened, and goes on from there. Another op may do it."""

    async def scenario(rig: Rig) -> None:
        await rig.send(InitGroup(plan=rig.plan(1)))
        await rig.prepare(V1, DEFAULT_TENSORS)
        first = await rig.receive(V1, DEFAULT_TENSORS, epoch=1).result()
        await rig.send(PauseGeneration())
        again = await rig.receive(V1, DEFAULT_TENSORS, epoch=1).result()
        assert (first.status, again.status, again.fault) == (ResultStatus.REFUSED, ResultStatus.REFUSED, first.fault)
        assert "receive_weights" not in rig.engine.calls

    on_worker(scenario)


@pytest.mark.parametrize("is_retryable", [True, False])
def test_what_asks_for_a_repeat_is_tried_again(is_retryable: bool) -> None:
    """A busy worker, and a message that was wrong in itself."""
    refusals = Refusals()
    code = FaultCode.BUSY if is_retryable else FaultCode.EXPIRED
    refusals.note("op", 1, Fault(code=code, message="m", retryable=is_retryable))
    assert len(refusals._kept) == 0


def test_only_the_last_ones_are_remembered() -> None:
    """The memory is bounded."""
    refusals = Refusals(max_kept=2)
    for number in range(3):
        refusals.note(f"op-{number}", 1, Fault(code=FaultCode.WRONG_STATE, message="m"))
    assert [op_id for op_id, _ in refusals._kept] == ["op-1", "op-2"]
