"""The judge can fail: each promise that is broken in an observation is found; one that keeps them all passes."""

from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.cases import CASES, Blow, Case, Phase, Target
from tests.chaos.judge import Call, Observation, judge
from tests.chaos.table import COLUMNS, Row, header, line, totals

pytestmark = pytest.mark.unit

CASE = Case(Target.WORKER, Blow.KILL, Phase.MID_BROADCAST, 5.0, back_s=5.0)
GOOD = Observation(
    was_hit=True,
    phase_hit="transfer",
    calls=(Call("2", "partial", 1.5),),
    serving_s=1.6,
    transfer_s=0.5,
    returned_s=4.0,
    back_s=1.0,
)


def test_a_case_that_kept_every_promise_holds() -> None:
    """Also just within its bounds."""
    assert judge(CASE, GOOD) == ()
    assert judge(CASE, replace(GOOD, serving_s=5.5, back_s=5.5)) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"was_hit": False}, "never reached"),
        ({"serving_s": None}, "the survivors served: never (bound 5.5 s)"),
        ({"serving_s": 5.6}, "the survivors served after 5.6 s (bound 5.5 s)"),
        ({"returned_s": None, "back_s": None}, "never came back to the bus"),
        ({"back_s": None}, "the victim was admitted: never"),
        ({"back_s": 5.6}, "the victim was admitted after 5.6 s"),
        ({"calls": (Call("2", "failed", 1.0), Call("3", "ok", 1.0))}, "2 calls of update_weights, not 1"),
        ({"restarted": ("backend/1",)}, "healthy engines were started again: backend/1"),
        ({"lost_ops": ("op-1",)}, "ops have no outcome: op-1"),
        ({"repeated": ("op-1-pause on backend/1",)}, "steps ran twice"),
        ({"wrong_outputs": ("backend/3",)}, "tokens differ from the trainer's: backend/3"),
        ({"false_admissions": ("backend/3 dirty 1",)}, "admitted with other weights"),
        ({"left_paused": ("backend/1",)}, "left paused: backend/1"),
    ],
)
def test_each_broken_promise_is_named(change: dict[str, Any], words: str) -> None:
    """One line, and no other promise is blamed for it."""
    (problem,) = judge(CASE, replace(GOOD, **change))
    assert words in problem


def test_a_start_that_had_to_be_waited_for_is_no_delay() -> None:
    """Nobody can hurry a process that imports torch; but it is counted only where the case has one."""
    case = Case(Target.TRAINER, Blow.KILL, Phase.MID_BROADCAST, 10.0, num_calls=2)
    seen = replace(GOOD, serving_s=14.0, returned_s=None, back_s=None)
    assert judge(case, seen) != ()
    assert judge(case, replace(seen, start_s=3.0)) == ()


def test_a_standby_has_its_own_bound() -> None:
    """Under 5 s, whatever the fleet needs."""
    case = Case(Target.CONTROLLER, Blow.KILL, Phase.MID_BROADCAST, 10.0, num_calls=2)
    seen = replace(GOOD, returned_s=None, back_s=None, failover_s=3.1)
    assert judge(case, seen) == ()
    assert "the standby answered after 5.1 s" in judge(case, replace(seen, failover_s=5.1))[0]
    assert "the standby answered: never" in judge(case, replace(seen, failover_s=None))[0]


def test_the_table_says_what_broke_and_the_totals_count_it() -> None:
    """One line for a case that held, one more for each broken promise; the JSON has the sums."""
    bad = replace(GOOD, restarted=("backend/1",), lost_ops=("op-1", "op-2"), serving_s=None)
    rows = [Row(CASE, GOOD, ()), Row(CASE, bad, judge(CASE, bad)), Row(CASE, None, ("it couldn't be run",))]
    assert len(line(rows[0]).splitlines()) == 1
    assert line(rows[0]).endswith("held")
    assert [text.strip() for text in line(rows[1]).splitlines()[1:]] == list(rows[1].broken)
    assert "BROKEN" in line(rows[2])
    assert all(name in header() for name, _ in COLUMNS)
    sums = totals(rows, 12.34)
    assert sums["cases"] == 3
    assert sums["broken"] == [CASE.name, CASE.name]
    assert (sums["restarts_of_healthy_engines"], sums["lost_ops"], sums["serving_s_max"]) == (1, 2, 1.6)


def test_cases_cover_what_the_issue_names() -> None:
    """Both blows on a worker in each phase, and every other target; each case has a name of its own."""
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    seen = {(case.target, case.blow, case.phase) for case in CASES}
    for phase in Phase:
        if phase is not Phase.IDLE:
            assert {(Target.WORKER, blow, phase) for blow in Blow} <= seen
            assert (Target.TRAINER, Blow.KILL, phase) in seen
            assert (Target.CONTROLLER, Blow.KILL, phase) in seen
    assert {(case.target, case.blow) for case in CASES} == {(target, blow) for target in Target for blow in Blow}
    assert {case.down_s for case in CASES if case.target is Target.SERVER} == {0.0, 20.0}
    assert any(case.engine == "vllm" for case in CASES)
