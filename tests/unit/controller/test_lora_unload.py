"""What is decided in an unload of adapters, without any I/O."""

import pytest

from rlbus.controller.answers import StepAnswer
from rlbus.controller.causes import fault
from rlbus.controller.lora_state import Answered, Ask, Done
from rlbus.controller.lora_unload import UnloadPlan, begin, decide
from rlbus.schemas import FaultCode, LorasData, LoraState, LoraView, Outcome, UnloadLora, WorkerId

pytestmark = pytest.mark.unit

ONE, TWO = WorkerId("backend/1"), WorkerId("backend/2")
WHY = fault(FaultCode.ENGINE_FAILED, "scripted")


def plan(*revisions: int) -> UnloadPlan:
    return UnloadPlan("policy", revisions, (ONE, TWO), 60.0)


def has(*revisions: int, state: LoraState = LoraState.LOADED) -> StepAnswer:
    views = tuple(LoraView(name="policy", state=state, revision=r) for r in revisions)
    return StepAnswer(Outcome.OK, None, LorasData(loras=views, capacity=4))


def test_one_revision_after_the_other_on_everybody() -> None:
    """Each with the drain that was asked for."""
    state, action = begin(plan(1, 2))
    asked: list[UnloadLora] = []
    while isinstance(action, Ask):
        assert isinstance(action.body, UnloadLora)
        assert action.workers == (ONE, TWO)
        asked.append(action.body)
        state, action = decide(state, Answered({ONE: has(), TWO: has()}))
    assert [(b.revision, b.drain_s) for b in asked] == [(1, 60.0), (2, 60.0)]
    assert (state.gone, state.blames, state.num_draining) == ((1, 2), {}, 0)


def test_who_drains_has_let_it_go() -> None:
    """New requests can't name it any more; that some still run is counted."""
    state, action = begin(plan(1))
    state, action = decide(state, Answered({ONE: has(1, state=LoraState.DRAINING), TWO: has()}))
    assert isinstance(action, Done)
    assert (state.gone, state.num_draining) == ((1,), 1)


@pytest.mark.parametrize(
    ("said", "is_gone"),
    [
        (has(), True),
        (has(1), False),
        (has(1, state=LoraState.DRAINING), True),
        (has(1, state=LoraState.UNSETTLED), False),
    ],
)
def test_an_unclear_answer_is_settled_by_the_list(said: StepAnswer, is_gone: bool) -> None:
    """SCENARIOS 34: unknown is neither gone nor there."""
    state, action = begin(plan(1))
    state, action = decide(state, Answered({ONE: has(), TWO: StepAnswer(Outcome.UNKNOWN, WHY)}))
    assert isinstance(action, Ask)
    assert action.workers == (TWO,)
    state, action = decide(state, Answered({TWO: said}))
    assert isinstance(action, Done)
    assert (state.gone == (1,), TWO not in state.blames) == (is_gone, is_gone)


def test_a_refusal_is_believed_and_the_next_revision_still_tried() -> None:
    """Nothing changed there; the first thing that went wrong stays."""
    refused = StepAnswer(Outcome.REFUSED, fault(FaultCode.BUSY, "scripted"))
    state, action = begin(plan(1, 2))
    state, action = decide(state, Answered({ONE: has(2), TWO: refused}))
    assert isinstance(action, Ask)
    assert isinstance(action.body, UnloadLora)
    state, action = decide(state, Answered({ONE: has(), TWO: has()}))
    assert isinstance(action, Done)
    assert state.gone == (2,)
    assert state.blames[TWO].outcome is Outcome.REFUSED


def test_one_that_is_taken_back_begins_no_further_revision() -> None:
    """What is gone is gone."""
    state, action = begin(plan(1, 2))
    stop = fault(FaultCode.CANCELLED, "taken back")
    state, action = decide(state, Answered({ONE: has(2), TWO: has(2)}, stop))
    assert isinstance(action, Done)
    assert (state.gone, state.stop) == ((1,), stop)


@pytest.mark.parametrize(
    ("answer", "said", "is_partly"),
    [
        (StepAnswer(Outcome.REFUSED, WHY), None, False),
        (StepAnswer(Outcome.FAILED, WHY), has(1), False),
        (StepAnswer(Outcome.FAILED, WHY), has(1, state=LoraState.UNSETTLED), True),
        (StepAnswer(Outcome.UNKNOWN, WHY), StepAnswer(Outcome.UNKNOWN, WHY), True),
    ],
)
@pytest.mark.parametrize("has_other", [False, True])
def test_what_only_some_let_go_is_told_from_what_all_keep(
    answer: StepAnswer, said: StepAnswer | None, is_partly: bool, has_other: bool
) -> None:
    """As it was on everybody, beyond doubt: nothing has begun."""
    state, action = begin(plan(1))
    state, action = decide(state, Answered({ONE: answer, TWO: has() if has_other else answer}))
    if said is not None:
        state, action = decide(state, Answered({ONE: said} if has_other else {ONE: said, TWO: said}))
    assert isinstance(action, Done)
    assert state.gone == ()
    assert state.partly == ((1,) if is_partly or has_other else ())
