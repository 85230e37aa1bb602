"""The judge can fail: each promise that is broken in an observation is found; one that keeps them all passes."""

from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.cases import CASES, HELD_BEFORE, STRUCK_IN, UPDATE_PHASES, Blow, Case, Phase, Target
from tests.chaos.judge import Call, Observation, is_late, is_of_the_machine, judge
from tests.chaos.promises import ENDINGS, Aftermath, Left, OpEnd, Standing, Torn
from tests.chaos.table import COLUMNS, Row, header, line, totals

pytestmark = pytest.mark.unit

SURVIVORS = ("backend/1", "backend/3")
AT_2, AT_3 = Standing("clean", 2, True), Standing("clean", 3, True)
LOST = OpEnd(3, "partial", (("backend/1", "ok"), ("backend/2", "failed"), ("backend/3", "ok")))
WITHOUT = Aftermath(
    old_step=2,
    survivors=SURVIVORS,
    victim="backend/2",
    num_asked=1,
    ops=(LOST,),
    torn=(Torn("backend/1", 2, False),),
    rest={"backend/1": AT_3, "backend/2": AT_3, "backend/3": AT_3},
)
CASE = Case(Target.WORKER, Blow.KILL, Phase.MID_BROADCAST, 5.0, back_s=5.0)
GOOD = Observation(
    was_hit=True,
    phase_hit="transfer>undo",
    calls=(Call("3", "partial", 1.5),),
    serving_s=1.6,
    transfer_s=0.5,
    returned_s=4.0,
    back_s=1.0,
    aftermath=WITHOUT,
)

# Nobody is a victim of these: the update fails, and the next one serves everybody.
TRAINER_PAUSED = Case(Target.TRAINER, Blow.KILL, Phase.PAUSED, 10.0, num_calls=2)
TRAINER_SENDS = Case(Target.TRAINER, Blow.KILL, Phase.MID_BROADCAST, 10.0, num_calls=2)
HEALED = OpEnd(4, "ok", (("backend/1", "ok"), ("backend/3", "ok")))
UNDONE = Aftermath(
    old_step=2,
    survivors=SURVIVORS,
    victim=None,
    num_asked=2,
    ops=(OpEnd(3, "failed", (("backend/1", "undone"), ("backend/3", "undone"))), HEALED),
    rest={"backend/1": AT_2, "backend/3": AT_2},
)
DIRTY = Standing("dirty", None, False)
DAMAGED = replace(
    UNDONE,
    ops=(OpEnd(3, "failed", (("backend/1", "failed"), ("backend/3", "failed"))), HEALED),
    torn=(Torn("backend/1", 2, False), Torn("backend/3", 2, False)),
    rest={"backend/1": DIRTY, "backend/3": DIRTY},
)
FAILED = replace(GOOD, calls=(Call("4", "ok", 1.0),), returned_s=None, back_s=None, phase_hit="transfer")


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
        ({"phase_hit": "commit>commit"}, "the blow fell in commit>commit, not in transfer"),
        ({"calls": (Call("3", "partial", 1.0), Call("4", None, 1.0))}, "2 calls of update_weights, not 1"),
        ({"calls": (Call("3", "ok", 1.0),)}, "call 3 was told ok, the journal has partial"),
        ({"calls": (Call("4", "partial", 1.0),)}, "call 4 was told partial, the journal has None"),
        ({"aftermath": None}, "nothing was seen of the update"),
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


def test_being_late_is_told_from_never_and_from_all_else() -> None:
    """Only that is forgiven once."""
    found = judge(CASE, replace(GOOD, serving_s=5.6, back_s=7.0, restarted=("backend/1",)))
    assert [is_late(problem) for problem in found] == [True, True, False]
    assert not any(map(is_late, judge(CASE, replace(GOOD, serving_s=None, returned_s=None, back_s=None))))


def test_an_update_that_ended_otherwise_is_forgiven_only_where_somebody_stood_still() -> None:
    """And damage never: who is dirty and runs, tokens that differ, a step that ran twice."""
    failed = replace(WITHOUT, ops=(replace(LOST, status="failed"),))
    seen = replace(GOOD, aftermath=failed, serving_s=None, left_paused=("backend/1",))
    found = judge(CASE, replace(seen, calls=(Call("3", "failed", 1.5),)))
    assert len(found) == 3
    still = replace(seen, stood_still="1 more terms than it takes")
    assert is_of_the_machine(found, still)
    assert not is_of_the_machine(found, seen)
    assert not is_of_the_machine(found, None)
    let_go = replace(failed, torn=(Torn("backend/1", 2, True),))
    for change in ({"aftermath": let_go}, {"wrong_outputs": ("backend/1",)}, {"repeated": ("op-1",)}):
        assert not is_of_the_machine(judge(CASE, replace(still, **change)), still)
    assert is_of_the_machine(judge(CASE, replace(GOOD, serving_s=5.6)), GOOD)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ops": ()}, "the journal has 0 updates that ended, not 1"),
        ({"ops": (LOST, LOST), "num_asked": 1}, "the journal has 2 updates that ended, not 1"),
        ({"ops": (replace(LOST, status="ok"),)}, "the update ended ok, not partial"),
        ({"ops": (replace(LOST, status="failed"),)}, "the update ended failed, not partial"),
        ({"ops": (replace(LOST, outcomes=LOST.outcomes[:2]),)}, "the outcome of backend/3 is None, not ok"),
        (
            {"ops": (replace(LOST, outcomes=(*LOST.outcomes[:2], ("backend/3", "undone"))),)},
            "the outcome of backend/3 is undone, not ok",
        ),
        (
            {"ops": (replace(LOST, outcomes=(*LOST.outcomes, ("backend/3", "ok"))),)},
            "update 3 has two outcomes for backend/3",
        ),
        (
            {"ops": (replace(LOST, outcomes=(LOST.outcomes[0], ("backend/2", "ok"), LOST.outcomes[2])),)},
            "the outcome of backend/2, which was struck, is ok",
        ),
        (
            {"ops": (replace(LOST, outcomes=(LOST.outcomes[0], LOST.outcomes[2])),)},
            "the outcome of backend/2, which was struck, is None",
        ),
        ({"torn": (Torn("backend/1", None, False),)}, "backend/1 was dirty with last_good None, not 2"),
        ({"torn": (Torn("backend/1", 3, False),)}, "backend/1 was dirty with last_good 3, not 2"),
        ({"torn": (Torn("backend/2", 2, True),)}, "backend/2 was dirty and ran, or was admitted"),
        ({"rest": {"backend/1": AT_3}}, "backend/3 was left unseen, not clean, running and at 3"),
        ({"rest": {"backend/1": AT_3, "backend/3": AT_2}}, "backend/3 was left clean, running and at 2"),
    ],
)
def test_each_promise_about_a_lost_worker_is_judged(change: dict[str, Any], words: str) -> None:
    """The others have the new version, it has failed; every worker has one outcome; torn ones stand still."""
    seen = replace(GOOD, calls=(), aftermath=replace(WITHOUT, **change))
    assert judge(CASE, replace(seen, aftermath=WITHOUT)) == ()
    assert words in judge(CASE, seen)[0]


def test_an_update_that_failed_before_its_first_byte_is_undone() -> None:
    """Everybody as before: clean, running, at the old version; nobody was dirty, even for a moment."""
    assert judge(TRAINER_PAUSED, replace(FAILED, aftermath=UNDONE)) == ()

    def problem(**change: Any) -> str:
        (found,) = judge(TRAINER_PAUSED, replace(FAILED, aftermath=replace(UNDONE, **change)))
        return found

    paused = {"backend/1": AT_2, "backend/3": Standing("clean", 2, False)}
    assert problem(rest=paused) == "backend/3 was left clean, paused and at 2, not clean, running and at 2"
    assert problem(rest={**paused, "backend/3": AT_3}).startswith("backend/3 was left clean, running and at 3")
    torn = problem(torn=(Torn("backend/1", 2, False),))
    assert torn == "backend/1 was dirty, though the update failed before its first byte"
    assert problem(ops=(replace(UNDONE.ops[0], status="ok"), HEALED)) == "the update ended ok, not failed"
    reported = OpEnd(3, "failed", (("backend/1", "ok"), ("backend/3", "undone")))
    assert "the outcome of backend/1 is ok, not failed or skipped" in problem(ops=(reported, HEALED))


def test_an_update_that_failed_after_its_first_byte_leaves_everybody_dirty() -> None:
    """Until the next one heals them, or a catch-up, which may come first; never let go, and with what they had."""
    assert judge(TRAINER_SENDS, replace(FAILED, aftermath=DAMAGED)) == ()
    assert judge(TRAINER_SENDS, replace(FAILED, aftermath=replace(DAMAGED, rest=UNDONE.rest))) == ()

    def problem(**change: Any) -> str:
        (found,) = judge(TRAINER_SENDS, replace(FAILED, aftermath=replace(DAMAGED, **change)))
        return found

    never = "backend/3 was never dirty, though the update failed after its first byte"
    assert problem(torn=DAMAGED.torn[:1]) == never
    let_go = (DAMAGED.torn[0], Torn("backend/3", 2, True))
    assert problem(torn=let_go) == "backend/3 was dirty and ran, or was admitted"
    forgotten = (DAMAGED.torn[0], Torn("backend/3", None, False))
    assert problem(torn=forgotten) == "backend/3 was dirty with last_good None, not 2"
    reported = OpEnd(3, "failed", (("backend/1", "failed"), ("backend/3", "undone")))
    assert "the outcome of backend/3 is undone" in problem(ops=(reported, HEALED))


def test_whoever_calls_again_has_to_be_served() -> None:
    """The last update of a case ends ok, whatever became of the first."""
    ops = (DAMAGED.ops[0], replace(HEALED, status="partial"))
    seen = replace(FAILED, calls=(), aftermath=replace(DAMAGED, ops=ops))
    assert judge(TRAINER_SENDS, seen) == ("the last update ended partial, not ok",)


def test_an_update_that_has_everything_is_finished_without_trainer_or_leader() -> None:
    """Failing there breaks the promise, as does being committed before anything was sent."""
    for target in (Target.TRAINER, Target.CONTROLLER):
        for phase in UPDATE_PHASES:
            is_complete = phase in (Phase.BEFORE_COMMIT, Phase.BEFORE_RESUME)
            assert set(ENDINGS[target, phase]) == ({"ok"} if is_complete else {"failed"})
    assert ENDINGS[Target.TRAINER, Phase.MID_BROADCAST] == {"failed": Left.TORN}
    assert ENDINGS[Target.CONTROLLER, Phase.PAUSED] == {"failed": Left.OLD}


def test_a_dead_engine_that_was_known_before_the_update_need_not_be_in_it() -> None:
    """Struck while no update runs; in an update, it has to be reported."""
    case = Case(Target.ENGINE, Blow.KILL, Phase.IDLE, 5.0, back_s=5.0)
    ended = OpEnd(3, "ok", (("backend/1", "ok"), ("backend/3", "ok")))
    seen = replace(GOOD, phase_hit="none", calls=(), noticed_s=0.5, aftermath=replace(WITHOUT, ops=(ended,)))
    assert judge(case, seen) == ()
    named = replace(ended, outcomes=(*ended.outcomes, ("backend/2", "undone")))
    assert "which was struck, is undone" in judge(case, replace(seen, aftermath=replace(WITHOUT, ops=(named,))))[0]


def test_an_agent_may_answer_for_an_engine_whose_death_is_not_seen_yet() -> None:
    """Where the agent alone ends the update, and only there; and the death has to be seen soon."""
    case = Case(Target.ENGINE, Blow.KILL, Phase.BEFORE_COMMIT, 5.0, back_s=5.0)
    ended = OpEnd(3, "ok", (("backend/1", "ok"), ("backend/2", "ok"), ("backend/3", "ok")))
    seen = replace(GOOD, phase_hit="commit", calls=(), noticed_s=0.5, aftermath=replace(WITHOUT, ops=(ended,)))
    assert judge(case, seen) == ()
    (problem,) = judge(case, replace(seen, noticed_s=2.1))
    assert problem == "the engine's death was seen after 2.1 s (bound 2.0 s)"
    (problem,) = judge(case, replace(seen, noticed_s=None))
    assert problem == "the engine's death was seen: never (bound 2.0 s)"
    paused = replace(case, phase=Phase.PAUSED)
    assert judge(paused, replace(seen, phase_hit="transfer")) == ("the update ended ok, not partial",)


def test_a_start_that_had_to_be_waited_for_is_no_delay() -> None:
    """Nobody can hurry a process that imports torch; but it is counted only where the case has one."""
    seen = replace(FAILED, serving_s=14.0, aftermath=DAMAGED)
    assert judge(TRAINER_SENDS, seen) != ()
    assert judge(TRAINER_SENDS, replace(seen, start_s=3.0)) == ()


def test_a_standby_has_its_own_bound() -> None:
    """Under 5 s, whatever the fleet needs."""
    case = Case(Target.CONTROLLER, Blow.KILL, Phase.MID_BROADCAST, 10.0, num_calls=2)
    seen = replace(FAILED, failover_s=3.1, aftermath=DAMAGED)
    assert judge(case, seen) == ()
    assert "the standby answered after 5.1 s" in judge(case, replace(seen, failover_s=5.1))[0]
    assert "the standby answered: never" in judge(case, replace(seen, failover_s=None))[0]


def test_the_table_says_what_broke_and_the_totals_count_it() -> None:
    """One line for a case that held, one more for each broken promise; the JSON has the sums."""
    bad = replace(GOOD, restarted=("backend/1",), lost_ops=("op-1", "op-2"), serving_s=None)
    rows = [
        Row(CASE, GOOD, ()),
        Row(CASE, bad, judge(CASE, bad), ("DeadlineError()",)),
        Row(CASE, None, ("it couldn't be run",)),
    ]
    assert len(line(rows[0]).splitlines()) == 1
    assert line(rows[0]).endswith("held")
    notes = [text.strip() for text in line(rows[1]).splitlines()[1:]]
    assert notes == ["run again, since it couldn't be run: DeadlineError()", *rows[1].broken]
    assert [line(row).splitlines()[0].split()[-2] for row in rows] == ["0", "1", "0"]
    assert "BROKEN" in line(rows[2])
    assert all(name in header() for name, _ in COLUMNS)
    sums = totals(rows, 12.34)
    assert (sums["cases"], sums["reruns"]) == (3, 1)
    assert sums["broken"] == [CASE.name, CASE.name]
    assert (sums["restarts_of_healthy_engines"], sums["lost_ops"], sums["serving_s_max"]) == (1, 2, 1.6)


def test_cases_cover_what_the_issue_names() -> None:
    """Each target killed and stopped in each phase of an update; each case has a name of its own, and an ending."""
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    seen = {(case.target, case.blow, case.phase) for case in CASES if case.engine == "torch"}
    assert {(target, blow, phase) for target in Target for blow in Blow for phase in UPDATE_PHASES} <= seen
    assert {(case.target, case.phase) for case in CASES} <= set(ENDINGS)
    assert set(STRUCK_IN) == set(Phase)
    assert set(HELD_BEFORE) == set(UPDATE_PHASES) - {Phase.MID_BROADCAST}
    assert {case.down_s for case in CASES if case.target is Target.SERVER} == {0.0, 6.0, 20.0}
    assert any(case.engine == "vllm" for case in CASES)
