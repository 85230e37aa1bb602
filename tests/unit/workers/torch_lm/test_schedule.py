"""What a pause, an abort and a resume mean for requests; no model, no thread."""

import pytest

pytest.importorskip("torch")

from rlbus.schemas import PauseMode
from rlbus.workers.torch_lm.sampling import Chosen, Sampling
from rlbus.workers.torch_lm.schedule import MAX_REQUESTS, MAX_RUNNING, Request, Schedule, VersionSpan

pytestmark = pytest.mark.unit

EOS = frozenset({1})


def request(name: str, max_tokens: int = 3, ignores_eos: bool = False) -> Request:
    """Nobody listens to it."""
    return Request(name, (5,), Sampling(max_tokens=max_tokens, ignores_eos=ignores_eos), lambda: None)


def with_requests(*names: str) -> Schedule:
    """All submitted."""
    schedule = Schedule()
    for name in names:
        assert schedule.submit(request(name))
    return schedule


def step(schedule: Schedule, token: int = 7, version: str | None = "0.1") -> list[str]:
    """One step; the names of those that got a token."""
    due = schedule.begin_step()
    for one in due:
        schedule.add(one, Chosen(token, -1.0), version, EOS)
    schedule.end_step()
    return [one.request_id for one in due]


def test_a_request_ends_at_its_length_or_at_eos() -> None:
    """Unless it ignores eos; the eos token is one of its tokens."""
    schedule = with_requests("a")
    deaf = request("b", 2, ignores_eos=True)
    schedule.submit(deaf)
    first = schedule.waiting["a"]
    step(schedule, token=1)
    assert (first.finish, first.tokens) == ("stop", (1,))
    assert "b" in schedule.running
    step(schedule, token=1)
    assert (deaf.finish, deaf.tokens) == ("length", (1, 1))
    assert not schedule.is_due


def test_spans_say_which_version_made_which_tokens() -> None:
    """A new one begins when the version changes."""
    schedule = with_requests("a")
    one = schedule.waiting["a"]
    for version in ("0.1", "0.1", "0.2"):
        step(schedule, version=version)
    assert one.spans == [VersionSpan("0.1", 0, 2), VersionSpan("0.2", 2, 3)]


def test_more_than_fit_wait_their_turn() -> None:
    """In order; over the bound, or with an id that is taken, they aren't taken."""
    schedule = with_requests(*(str(i) for i in range(MAX_RUNNING + 1)))
    assert len(step(schedule)) == MAX_RUNNING
    assert list(schedule.waiting) == [str(MAX_RUNNING)]
    assert not schedule.submit(request("0"))
    for i in range(MAX_REQUESTS):
        schedule.submit(request(f"more-{i}"))
    assert schedule.num_requests == MAX_REQUESTS
    assert not schedule.submit(request("one too many"))


def test_keep_holds_everything_and_takes_what_comes() -> None:
    """Nothing is due until resume."""
    schedule = with_requests("a")
    step(schedule)
    assert schedule.pause(PauseMode.KEEP) == []
    schedule.submit(request("b"))
    assert schedule.is_still
    assert not schedule.is_due
    assert schedule.paused_data(0).num_held == 2
    schedule.resume()
    assert step(schedule) == ["a", "b"]


def test_a_pause_stands_only_after_the_step_that_runs() -> None:
    """In every mode."""
    for mode in PauseMode:
        schedule = with_requests("a")
        schedule.begin_step()
        schedule.pause(mode)
        assert not schedule.is_still
        schedule.abort(None)
        schedule.end_step()
        assert schedule.is_still


def test_wait_finishes_what_came_before_and_holds_what_comes_after() -> None:
    """Also what still waited for a place; then it stands."""
    schedule = with_requests(*(str(i) for i in range(MAX_RUNNING + 1)))
    schedule.pause(PauseMode.WAIT)
    schedule.submit(request("late"))
    assert not schedule.is_still
    num_steps = 0
    while schedule.is_due:
        assert "late" not in step(schedule)
        num_steps += 1
    assert num_steps == 6  # three for the first ones, three for the one that waited
    assert schedule.is_still
    assert list(schedule.waiting) == ["late"]


def test_wait_without_requests_or_on_top_of_a_keep_stands_at_once() -> None:
    """What a keep holds isn't let run by a wait."""
    schedule = Schedule()
    schedule.pause(PauseMode.WAIT)
    assert schedule.is_still
    schedule = with_requests("a")
    schedule.pause(PauseMode.KEEP)
    schedule.pause(PauseMode.WAIT)
    assert schedule.is_still
    assert schedule.num_requests == 1


def test_keep_and_abort_on_top_of_a_wait_end_the_waiting() -> None:
    """The later verb counts."""
    for mode, num_left in ((PauseMode.KEEP, 1), (PauseMode.ABORT, 0)):
        schedule = with_requests("a")
        schedule.pause(PauseMode.WAIT)
        assert len(schedule.pause(mode)) == 1 - num_left
        assert schedule.is_still
        assert schedule.num_requests == num_left


def test_abort_ends_those_named_once_and_ignores_strangers() -> None:
    """A token that the running step still makes for it is dropped."""
    schedule = with_requests("a", "b")
    [first, second] = schedule.begin_step()
    assert schedule.abort(("a", "a", "nobody")) == [first]
    schedule.add(first, Chosen(7, -1.0), None, EOS)
    schedule.add(second, Chosen(7, -1.0), None, EOS)
    schedule.end_step()
    assert (first.finish, first.tokens) == ("abort", ())
    assert second.tokens == (7,)
    assert schedule.abort(None) == [second]
    assert schedule.abort(None) == []


def test_aborting_what_a_wait_waits_for_lets_it_stand() -> None:
    """Nothing is left to wait for."""
    schedule = with_requests("a")
    step(schedule)
    schedule.pause(PauseMode.WAIT)
    schedule.abort(("a",))
    assert schedule.is_still


def test_every_pause_and_resume_is_a_turn() -> None:
    """So that who waits for a pause sees that it was overtaken."""
    schedule = Schedule()
    schedule.pause(PauseMode.KEEP)
    schedule.resume()
    assert schedule.num_turns == 2
