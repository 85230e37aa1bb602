"""Whom to adopt, whom to let go, whom to try again and when: on lists and ends, without any network."""

import pytest

from rlbus.workers.dynamo.listing import Answer, LeftOut, Listed
from rlbus.workers.dynamo.roster import (
    FIRST_RETRY_S,
    MAX_RETRY_S,
    MISSES,
    STEADY_S,
    Action,
    Adopt,
    Answered,
    Ended,
    LetGo,
    Roster,
    Tell,
    decide,
)
from tests.unit.workers.dynamo.fake_dynamo import listed

pytestmark = pytest.mark.unit

ONE, TWO = listed(), listed("http://two:1", instance_id="2")


class Story:
    """A roster that is told things, second after second."""

    def __init__(self) -> None:
        self.roster = Roster()
        self.now_s = 0.0

    def lists(
        self, *workers: Listed, left_out: tuple[LeftOut, ...] = (), source: str = "front", busy: tuple[str, ...] = ()
    ) -> list[Action]:
        """A source's list arrives."""
        self.now_s += 1.0
        answered = Answered(source, Answer(workers, left_out), self.now_s, frozenset(busy))
        self.roster, actions = decide(self.roster, answered)
        return list(actions)

    def ends(self, worker: Listed) -> None:
        """A worker's task ends."""
        self.roster, actions = decide(self.roster, Ended(worker.who, self.now_s))
        assert actions == ()


def test_who_is_listed_is_adopted_once() -> None:
    """And new ones as they appear."""
    story = Story()
    assert story.lists(ONE) == [Adopt(ONE)]
    assert story.lists(ONE, TWO) == [Adopt(TWO)]
    assert story.lists(TWO, ONE) == []


def test_who_vanishes_from_the_list_leaves_after_two_lists_and_can_come_back() -> None:
    """One miss may be a probe that failed; a miss in between starts to count anew."""
    story = Story()
    story.lists(ONE, TWO)
    for _ in range(3):
        assert story.lists(TWO) == []
        assert story.lists(ONE, TWO) == []
    for _ in range(MISSES - 1):
        assert story.lists(TWO) == []
    assert story.lists(TWO) == [LetGo(ONE.who, "Dynamo doesn't list it any more")]
    assert story.lists(TWO) == []
    story.ends(ONE)
    assert story.lists(ONE, TWO) == [Adopt(ONE)]


def test_a_worker_with_an_error_is_reported_once_per_reason_and_left_out() -> None:
    """The others go on; as soon as it is well it is adopted."""
    story = Story()
    sick = LeftOut(ONE.who, "Dynamo says: no answer", is_known=True)
    assert story.lists(TWO, left_out=(sick,)) == [Adopt(TWO), Tell(ONE.who, sick.reason)]
    assert story.lists(TWO, left_out=(sick,)) == []
    other = LeftOut(ONE.who, "Dynamo says: other", is_known=True)
    assert story.lists(TWO, left_out=(other,)) == [Tell(ONE.who, other.reason)]
    assert story.lists(ONE, TWO) == [Adopt(ONE)]
    story.lists(TWO)


def test_an_adopted_worker_whose_probe_fails_stays_adopted() -> None:
    """SCENARIOS 21: it may be busy with an update; its own process says how it is."""
    story = Story()
    story.lists(ONE)
    sick = LeftOut(ONE.who, "Dynamo says: no answer", is_known=True)
    for _ in range(10):
        assert story.lists(left_out=(sick,)) == []


def test_a_busy_worker_is_let_go_by_no_list() -> None:
    """SCENARIOS 21: a front end that has just begun anew lists nobody; as soon as the work is done its list counts."""
    story = Story()
    story.lists(ONE, TWO)
    assert story.lists(busy=(ONE.who,)) == []
    assert story.lists(busy=(ONE.who,)) == [LetGo(TWO.who, "Dynamo doesn't list it any more")]
    for _ in range(10):
        assert story.lists(busy=(ONE.who,)) == []
    for _ in range(MISSES - 1):
        assert story.lists() == []
    assert story.lists() == [LetGo(ONE.who, "Dynamo doesn't list it any more")]


def test_a_changed_descriptor_of_a_busy_worker_waits_for_the_end_of_its_work() -> None:
    """A front end that has just begun anew may not know all of it yet."""
    story = Story()
    story.lists(ONE)
    changed = listed(world_size=2)
    for _ in range(3):
        assert story.lists(changed, busy=(ONE.who,)) == []
    assert story.lists(changed) == [LetGo(ONE.who, "its descriptor has changed")]


def test_who_ended_by_itself_is_tried_again_with_growing_bounded_pauses() -> None:
    """Doubled up to the last; a worker that stood for a while begins anew."""
    story = Story()
    story.lists(ONE)
    pauses = []
    for _ in range(9):
        story.ends(ONE)
        ended_s = story.now_s
        while Adopt(ONE) not in story.lists(ONE):
            assert story.now_s < ended_s + 2 * MAX_RETRY_S
        pauses.append(story.now_s - ended_s)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert (pauses[0], pauses[-1]) == (FIRST_RETRY_S, MAX_RETRY_S)
    story.now_s += STEADY_S
    story.ends(ONE)
    story.now_s += FIRST_RETRY_S
    assert story.lists(ONE) == [Adopt(ONE)]


def test_who_waits_and_vanishes_is_forgotten() -> None:
    """Nobody is tried whom Dynamo doesn't list."""
    story = Story()
    story.lists(ONE)
    story.ends(ONE)
    for _ in range(MISSES):
        assert story.lists() == []
    assert dict(story.roster.entries) == {}


def test_a_restarted_worker_is_adopted_once_its_predecessor_has_let_the_url_go() -> None:
    """SCENARIOS 25: never two workers of one URL; it is said once who is waited for."""
    story = Story()
    story.lists(ONE)
    again = listed(instance_id="9")
    assert story.lists(again) == [Tell(again.who, f"its system_url {ONE.system_url} is still that of {ONE.who}")]
    assert story.lists(again) == [LetGo(ONE.who, "Dynamo doesn't list it any more")]
    assert story.lists(again) == []
    story.ends(ONE)
    assert story.lists(again) == [Adopt(again)]


def test_a_lost_worker_makes_way_for_its_successor_at_once() -> None:
    """Its agent has seen the restart; the list still has both, or only the new one."""
    story = Story()
    story.lists(ONE)
    story.ends(ONE)
    again = listed(instance_id="9")
    assert story.lists(again) == [Adopt(again)]
    story.now_s += MAX_RETRY_S
    assert story.lists(again, ONE) == [], "the URL is the successor's"


def test_a_changed_descriptor_is_adopted_anew() -> None:
    """Other routes, another world size: the old agent leaves first."""
    story = Story()
    story.lists(ONE)
    changed = listed(world_size=2)
    assert story.lists(changed) == [LetGo(ONE.who, "its descriptor has changed")]
    assert story.lists(changed) == []
    story.ends(ONE)
    assert story.lists(changed) == [Adopt(changed)]


def test_a_worker_of_two_sources_is_adopted_once_and_kept_by_the_one_that_had_it_first() -> None:
    """Another front end that doesn't list it says nothing about it."""
    story = Story()
    assert story.lists(ONE, source="a") == [Adopt(ONE)]
    assert story.lists(ONE, source="b") == []
    for _ in range(5):
        assert story.lists(source="b") == []
    assert story.lists(source="a") == []
    assert story.lists(source="a") == [LetGo(ONE.who, "Dynamo doesn't list it any more")]


def test_the_end_of_somebody_unknown_changes_nothing() -> None:
    """It was forgotten meanwhile."""
    story = Story()
    before = story.roster
    story.ends(ONE)
    assert story.roster is before
