"""When a silent process is said to be silent, and when it is ended: by what it does, and not by silence alone."""

from collections.abc import Callable

import pytest

from rlbus.workers.supervisor.hang import LOOK_S, HangLimits, Kind, Seen, Verdict, Watch

pytestmark = pytest.mark.unit

LIMITS = HangLimits()
Story = Callable[[float], Seen]


def told(
    story: Story, until_s: float, *, limits: HangLimits = LIMITS, every_s: float = LOOK_S
) -> list[tuple[float, Kind]]:
    """When each verdict came, looking regularly, up to the end of the process."""
    watch = Watch(limits, 0.0)
    verdicts: list[tuple[float, Kind]] = []
    for number in range(1, int(until_s / every_s) + 1):
        now_s = number * every_s
        verdict = watch.look(story(now_s))
        if verdict is not None:
            verdicts.append((now_s, verdict.kind))
            if verdict.kind is Kind.HUNG:
                break
    return verdicts


def seen(now_s: float, heard_s: float | None, **changes: object) -> Seen:
    """Waiting, without CPU."""
    fields: dict[str, object] = {"is_stopped": False, "is_runnable": False, "cpu_s": 0.0}
    return Seen(now_s, heard_s, **(fields | changes))  # type: ignore[arg-type]


def beating(until_s: float) -> Callable[[float], float]:
    """When it was heard last, if it fell silent then."""
    return lambda now_s: min(now_s, until_s)


def test_process_that_beats_is_left_alone() -> None:
    """For an hour."""
    assert told(lambda now_s: seen(now_s, now_s), 3600.0) == []


def test_silence_of_one_that_waits_is_said_within_2_s_and_ended_after_10() -> None:
    """It has a timer due every 0.25 s, and doesn't take it."""
    heard = beating(5.0)
    (first, kind), (end, last) = told(lambda now_s: seen(now_s, heard(now_s)), 100.0)
    assert (kind, last) == (Kind.SILENT, Kind.HUNG)
    assert first - 5.0 <= 2.0
    assert end - 5.0 == 10.0


@pytest.mark.parametrize(
    "does",
    [
        pytest.param(lambda now_s: {"cpu_s": now_s * 0.5}, id="computes"),
        pytest.param(lambda now_s: {"is_runnable": True}, id="starves"),
        pytest.param(lambda now_s: {"is_runnable": int(now_s / LOOK_S) % 2 == 0}, id="is runnable at times"),
    ],
)
def test_one_that_computes_or_wants_to_is_only_late_for_a_minute(does: Callable[[float], dict[str, object]]) -> None:
    """A loaded machine is no reason to end a healthy engine; the silence is said all the same."""
    heard = beating(5.0)
    (first, _), (end, _) = told(lambda now_s: seen(now_s, heard(now_s), **does(now_s)), 200.0)
    assert first - 5.0 <= 2.0
    assert end - 5.0 == 60.0


def test_one_that_comes_back_is_said_to_be_back() -> None:
    """Once each."""

    def story(now_s: float) -> Seen:
        return seen(now_s, now_s if now_s < 5.0 or now_s > 9.0 else 5.0)

    assert [kind for _, kind in told(story, 30.0)] == [Kind.SILENT, Kind.BACK]


def test_stopped_one_is_said_at_once_and_ended_after_3_s() -> None:
    """It can't come back by itself; but whoever stopped it may have meant to let it go on soon."""
    (first, kind), (end, last) = told(lambda now_s: seen(now_s, min(now_s, 5.0), is_stopped=now_s >= 5.0), 30.0)
    assert (first, kind, last) == (5.0 + LOOK_S, Kind.SILENT, Kind.HUNG)
    assert end == 8.0


def test_one_that_was_stopped_for_a_moment_is_left_alone() -> None:
    """Also when that happens again and again."""
    verdicts = told(lambda now_s: seen(now_s, now_s - now_s % 4.0, is_stopped=now_s % 4.0 >= 2.0), 60.0)
    assert Kind.HUNG not in [kind for _, kind in verdicts]


def test_our_own_standstill_is_nobody_elses_silence() -> None:
    """A supervisor that wasn't run for a minute has heard nothing by its own fault."""
    watch = Watch(LIMITS, 0.0)
    assert watch.look(seen(0.25, 0.2)) is None
    assert watch.look(seen(61.0, 0.2, is_stopped=True)) is None
    assert watch.look(seen(61.25, 61.2)) is None


def test_standstill_does_not_hide_one_that_hangs() -> None:
    """It only starts the count anew."""
    watch = Watch(LIMITS, 0.0)
    assert watch.look(seen(0.25, 0.2)) is None
    verdicts = [watch.look(seen(61.0 + step * LOOK_S, 0.2)) for step in range(60)]
    assert Kind.HUNG in [verdict.kind for verdict in verdicts if isinstance(verdict, Verdict)]


def test_start_may_take_an_hour_and_no_longer() -> None:
    """Before the first sign of life only that limit counts; None: not even that."""
    never = lambda now_s: seen(now_s, None)  # noqa: E731 - a story
    assert told(never, 4000.0, every_s=0.5) == [(3600.0, Kind.HUNG)]
    assert told(never, 4000.0, limits=HangLimits(start_s=None), every_s=0.5) == []


def test_engine_that_computes_for_long_is_never_ended_and_one_that_waits_is() -> None:
    """A long prefill on a CPU, and a core that waits for what doesn't come."""
    limits = HangLimits(idle_s=30.0, busy_s=None)
    busy = told(lambda now_s: seen(now_s, min(now_s, 5.0), cpu_s=now_s), 3600.0, limits=limits)
    assert [kind for _, kind in busy] == [Kind.SILENT]
    stuck = told(lambda now_s: seen(now_s, min(now_s, 5.0)), 3600.0, limits=limits)
    assert stuck[-1] == (35.0, Kind.HUNG)
