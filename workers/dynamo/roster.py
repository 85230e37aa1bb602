"""Which workers of Dynamo's are adopted: `decide(roster, event) -> (roster, actions)`. Pure; `adoption` does the rest.

Rules: whom Dynamo lists without an error is adopted. Who is adopted stays so while its own process answers, whatever
the list's probe of it says (it may be busy with an update), until Dynamo's list has been without it MISSES times. A
list ends nobody's work: a front end that has just begun anew lists nobody for some seconds. Who ended, or couldn't be
adopted, is tried again with growing pauses. A list that can't be had changes nothing.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlbus.workers.dynamo.listing import Answer, Listed

# A list is made of probes that may miss one worker once.
MISSES = 2
# Pause before the next try to adopt, in seconds: doubled from the first to the last.
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0
# Who was adopted for so long, in seconds, begins anew with the first pause.
STEADY_S = 60.0


class Phase(enum.Enum):
    """Where a worker stands. RUNS: its task runs. LEAVES: it was told to end. WAITS: no task."""

    RUNS = "runs"
    LEAVES = "leaves"
    WAITS = "waits"


@dataclass(frozen=True, slots=True)
class Entry:
    """One worker that a source lists. `since_s` is when its task began; before `retry_s` no new one begins."""

    listed: Listed
    source: str
    phase: Phase
    since_s: float = 0.0
    retry_s: float = 0.0
    num_failures: int = 0
    num_misses: int = 0


@dataclass(frozen=True, slots=True)
class Roster:
    """Everybody, by name; and what was said of those that are left out, so that it is said once."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    said: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answered:
    """A source gave its list. `now_s` is of the loop's clock; `busy` are adopted workers whose process answers, and
    which are at work.
    """

    source: str
    answer: Answer
    now_s: float
    busy: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker's task has ended: it was told to, or its engine is gone, or it never stood."""

    who: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Adopt:
    """Begin its task."""

    listed: Listed


@dataclass(frozen=True, slots=True)
class LetGo:
    """Tell its task to end, with a goodbye that gives the reason."""

    who: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Say, once, that somebody is left out."""

    who: str
    reason: str


Event = Answered | Ended
Action = Adopt | LetGo | Tell


def decide(roster: Roster, event: Event) -> tuple[Roster, tuple[Action, ...]]:
    """What an event makes of the roster, and what is to be done."""
    match event:
        case Answered():
            return _answered(roster, event)
        case Ended():
            return _ended(roster, event), ()


def _answered(roster: Roster, event: Answered) -> tuple[Roster, tuple[Action, ...]]:
    entries = dict(roster.entries)
    actions: list[Action] = []
    listed = {worker.who for worker in event.answer.workers}
    named = {out.who for out in event.answer.left_out if out.is_known}
    for worker in event.answer.workers:
        _take(entries, worker, event, actions)
    for who, entry in roster.entries.items():
        if entry.source == event.source and who not in listed and who not in event.busy:
            _miss(entries, who, entry, is_named=who in named, actions=actions)
    said = _tell(roster, event, actions, entries)
    return Roster(entries, said), tuple(actions)


def _take(entries: dict[str, Entry], worker: Listed, event: Answered, actions: list[Action]) -> None:
    entry = entries.get(worker.who)
    if entry is None:
        if rival := _same_url(entries, worker):
            actions.append(Tell(worker.who, f"its system_url {worker.system_url} is still that of {rival}"))
            return
        entries[worker.who] = Entry(worker, event.source, Phase.RUNS, since_s=event.now_s)
        actions.append(Adopt(worker))
        return
    if entry.source != event.source and entry.phase is not Phase.WAITS:
        return  # another source lists it too
    if entry.phase is Phase.RUNS and entry.listed != worker:
        if worker.who in event.busy:
            entries[worker.who] = replace(entry, num_misses=0)  # seen to be another one once it is done
            return
        entries[worker.who] = replace(entry, listed=worker, phase=Phase.LEAVES, num_misses=0)
        actions.append(LetGo(worker.who, "its descriptor has changed"))
    elif entry.phase is Phase.WAITS and event.now_s >= entry.retry_s and not _same_url(entries, worker):
        entries[worker.who] = replace(
            entry, listed=worker, source=event.source, phase=Phase.RUNS, since_s=event.now_s, num_misses=0
        )
        actions.append(Adopt(worker))
    else:
        entries[worker.who] = replace(entry, listed=worker, num_misses=0)


def _same_url(entries: Mapping[str, Entry], worker: Listed) -> str | None:
    """Who else has a task at that URL: a restarted worker's predecessor, until it is let go."""
    for who, entry in entries.items():
        if who != worker.who and entry.listed.system_url == worker.system_url and entry.phase is not Phase.WAITS:
            return who
    return None


def _miss(entries: dict[str, Entry], who: str, entry: Entry, *, is_named: bool, actions: list[Action]) -> None:
    if is_named:  # listed, with an error: its own process says how it is
        entries[who] = replace(entry, num_misses=0)
        return
    num_misses = entry.num_misses + 1
    if num_misses < MISSES:
        entries[who] = replace(entry, num_misses=num_misses)
    elif entry.phase is Phase.WAITS:
        del entries[who]
    elif entry.phase is Phase.RUNS:
        entries[who] = replace(entry, phase=Phase.LEAVES, num_misses=num_misses)
        actions.append(LetGo(who, "Dynamo doesn't list it any more"))


def _tell(roster: Roster, event: Answered, actions: list[Action], entries: Mapping[str, Entry]) -> Mapping[str, str]:
    """Say of everybody who is left out why, when that is new. Who is adopted needs no word of a list's probe."""
    told = {action.who: action.reason for action in actions if isinstance(action, Tell)}
    reasons = {out.who: out.reason for out in event.answer.left_out if out.who not in entries} | told
    actions[:] = [action for action in actions if not isinstance(action, Tell)]
    actions += [
        Tell(who, reason) for who, reason in reasons.items() if roster.said.get(f"{event.source} {who}") != reason
    ]
    others = {key: text for key, text in roster.said.items() if not key.startswith(f"{event.source} ")}
    return others | {f"{event.source} {who}": reason for who, reason in reasons.items()}


def _ended(roster: Roster, event: Ended) -> Roster:
    entry = roster.entries.get(event.who)
    if entry is None:
        return roster
    entries = dict(roster.entries)
    if entry.phase is Phase.LEAVES and entry.num_misses >= MISSES:
        del entries[event.who]
    elif entry.phase is Phase.LEAVES:
        entries[event.who] = replace(entry, phase=Phase.WAITS, retry_s=event.now_s)
    else:
        num_failures = 1 if event.now_s - entry.since_s >= STEADY_S else entry.num_failures + 1
        pause_s = min(FIRST_RETRY_S * 2 ** min(num_failures - 1, 16), MAX_RETRY_S)
        entries[event.who] = replace(entry, phase=Phase.WAITS, retry_s=event.now_s + pause_s, num_failures=num_failures)
    return replace(roster, entries=entries)
