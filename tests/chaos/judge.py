"""What was seen of a case, and which promises it broke. Pure."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.cases import FAILOVER_S, SEEN_S, STRUCK_IN, Blow, Case, Target
from tests.chaos.promises import Aftermath, broken

_LATE = re.compile(r" after [0-9.]+ s \(bound [0-9.]+ s\)$")
# What comes of a leader that loses its lease in mid update, or of a survivor that doesn't answer: the update ends in
# another way, and nobody serves before the next one. No damage, and nothing that anybody was told wrongly.
_OTHERWISE = re.compile(
    r"the (last )?update ended |the outcome of \S+ is (failed|unknown|undone|skipped), |\S+ was left |left paused: "
    r"|it took \d+ calls |the (survivors served|victim was admitted): never "
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `update_weights`, as its trainer told it. `status` of the report; None: it raised `error` instead.

    `outcomes`: of each worker outcome, phase and fault.
    """

    version: str
    status: str | None
    took_s: float
    error: str = ""
    outcomes: tuple[tuple[str, tuple[str, str, str]], ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen. Times are in seconds from the blow; None: it never came within the bound of waiting for it.

    `phase_hit`: the update's phase in which the blow fell; after a ">" the one in which the report blames the victim.
    `serving_s`: every survivor is admitted at the newest version. `returned_s`: the victim is on the bus again (started
    again, or woken up); `back_s`: from there on, until it is admitted at the newest version. `failover_s`: another
    controller answers. `noticed_s`: the fleet knows that the victim is gone. `transfer_s`: the longest undisturbed
    update on this fleet. `start_s`: what a start that had to be waited for took. The tuples name what must not be:
    healthy engines that were started again, ops without an outcome, steps that ran twice, workers whose tokens aren't
    the trainer's, workers that were admitted with other weights than the fleet's, and workers left paused. `aftermath`:
    what the update left; None only where none was seen. `stood_still`: what shows that others than who was struck
    stood still, see `watching.stood_still`.
    """

    was_hit: bool
    phase_hit: str
    calls: tuple[Call, ...]
    serving_s: float | None
    transfer_s: float
    start_s: float = 0.0
    returned_s: float | None = None
    back_s: float | None = None
    failover_s: float | None = None
    noticed_s: float | None = None
    restarted: tuple[str, ...] = ()
    lost_ops: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    wrong_outputs: tuple[str, ...] = ()
    false_admissions: tuple[str, ...] = ()
    left_paused: tuple[str, ...] = ()
    aftermath: Aftermath | None = None
    stood_still: str = ""


def judge(case: Case, seen: Observation) -> tuple[str, ...]:
    """The promises that were broken, in words; none: the case held."""
    return tuple(_broken(case, seen))


def is_late(problem: str) -> bool:
    """Whether a broken promise is only a bound that was missed: a machine that stands still does that, too."""
    return _LATE.search(problem) is not None


def is_of_the_machine(broken: Sequence[str], seen: Observation | None) -> bool:
    """Whether nothing was broken but what comes of being late, or of a standstill that was seen."""
    has_stood = seen is not None and seen.stood_still != ""
    return all(is_late(problem) or (has_stood and _OTHERWISE.match(problem) is not None) for problem in broken)


def _broken(case: Case, seen: Observation) -> Iterator[str]:
    if not seen.was_hit:
        yield "the phase was never reached, nothing was struck"
        return
    if seen.phase_hit.partition(">")[0] != STRUCK_IN[case.phase]:
        yield f"the blow fell in {seen.phase_hit}, not in {STRUCK_IN[case.phase]}"
        return
    yield from _late(case, seen)
    if seen.aftermath is None:
        yield "nothing was seen of the update"
    else:
        yield from broken(case, seen.aftermath)
        yield from _told_otherwise(seen.calls, seen.aftermath)
    if len(seen.calls) > case.num_calls:
        yield f"it took {len(seen.calls)} calls of update_weights, not {case.num_calls}"
    for names, text in (
        (seen.restarted, "healthy engines were started again"),
        (seen.lost_ops, "ops have no outcome"),
        (seen.repeated, "steps ran twice"),
        (seen.wrong_outputs, "tokens differ from the trainer's"),
        (seen.false_admissions, "admitted with other weights than the fleet's"),
        (seen.left_paused, "left paused"),
    ):
        if names:
            yield f"{text}: {', '.join(names)}"


def _late(case: Case, seen: Observation) -> Iterator[str]:
    limit_s = case.serve_s + seen.start_s + seen.transfer_s * case.num_calls
    yield from _later_than("the survivors served", seen.serving_s, limit_s)
    if case.back_s is not None:
        if seen.returned_s is None:
            yield "the victim never came back to the bus"
        else:
            yield from _later_than("the victim was admitted", seen.back_s, case.back_s + seen.transfer_s)
    if case.target is Target.ENGINE and case.blow is Blow.KILL:
        yield from _later_than("the engine's death was seen", seen.noticed_s, SEEN_S)
    if case.target is Target.CONTROLLER:
        yield from _later_than("the standby answered", seen.failover_s, FAILOVER_S)


def _told_otherwise(calls: tuple[Call, ...], aftermath: Aftermath) -> Iterator[str]:
    """The trainer's call returns what the journal has."""
    journal = {str(op.step): op.status for op in aftermath.ops}
    for call in calls:
        if call.status is not None and call.status != journal.get(call.version):
            yield f"call {call.version} was told {call.status}, the journal has {journal.get(call.version)}"


def _later_than(what: str, took_s: float | None, limit_s: float) -> Iterator[str]:
    if took_s is None:
        yield f"{what}: never (bound {limit_s:.1f} s)"
    elif took_s > limit_s:
        yield f"{what} after {took_s:.1f} s (bound {limit_s:.1f} s)"
