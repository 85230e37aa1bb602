"""What really happened, noted independently of what rlbus believes, and the invariants over it.

The numbers are those of docs/simulation.md. I0 is the ground under them: no bug surfaced as an exception, and no
engine saw its contract broken.
"""

import asyncio
import hashlib
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from rlbus.controller.takeover import PHASE
from rlbus.schemas import QUERY_ROUTES, Outcome, Report, Version, WorkerId

# What is kept of a run's trace, in messages and notes.
TAIL_LEN = 400
# Bytes of a message that are shown in a trace.
SHOWN_BYTES = 300


@dataclass(frozen=True, slots=True)
class Begun:
    """One begin of a command on a worker; engine calls made for it carry it."""

    number: int
    op_id: str
    term: int


# Which begun command the running code belongs to; tasks inherit it.
CURRENT: ContextVar[Begun | None] = ContextVar("simulation_begun", default=None)


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that did not hold."""

    invariant: str
    at_s: float
    what: str

    def __str__(self) -> str:
        return f"{self.invariant} at {self.at_s:.3f} s: {self.what}"


@dataclass(slots=True)
class Boot:
    """What is known of one life of one worker."""

    worker: WorkerId
    boot: int
    # op_id -> number of the begin that reached the engine.
    ran: dict[str, int] = field(default_factory=dict)
    term: int = 0
    group: tuple[int, int] = (0, 0)
    label: Version | None = None


# `<op_id>-t<term>-<step>` (rlbus.controller.op_ids).
_STEP = re.compile(r"(.+)-t\d+-")
# Who was in a group before leaves it for an update that isn't about it.
_OF_OTHERS = QUERY_ROUTES | {"destroy_weights_update_group"}


class Truth:
    """The notes of one run. Of its trace the last `tail_len` lines are kept; None: all."""

    def __init__(self, tail_len: int | None = TAIL_LEN) -> None:
        self.violations: list[Violation] = []
        self.tail: deque[tuple[float, str, str]] = deque(maxlen=tail_len)
        self.num_messages = 0
        self.num_tokens = 0
        # How often what happened, by name: faults, and how ops ended.
        self.counts: Counter[str] = Counter()
        # Versions that somebody asked to roll back to.
        self.rollbacks: set[Version] = set()
        # Versions that somebody took from a folder that is no snapshot.
        self.given: set[Version] = set()
        # By version, the updates that some engine took it in.
        self.committed_by: dict[Version, set[str]] = {}
        # The newest version of which some caller was told that a worker has it.
        self.reported_version: Version | None = None
        self._digest = hashlib.blake2b(digest_size=16)
        self._num_begun = 0
        # (worker, update) of every commit.
        self._commits: set[tuple[str, str]] = set()
        # By op, the workers that began a command of it.
        self._took_part: dict[str, set[str]] = {}
        # (worker, version) of every commit.
        self._taken: set[tuple[str, Version | None]] = set()

    @property
    def now_s(self) -> float:
        """Virtual seconds since the run began."""
        return asyncio.get_running_loop().time()

    @property
    def digest(self) -> str:
        """Of everything that was noted so far, with its times."""
        return self._digest.hexdigest()

    def count(self, what: str) -> None:
        """It happened once more."""
        self.counts[what] += 1

    def note(self, kind: str, what: str) -> None:
        """Something happened."""
        self._digest.update(f"{self.now_s!r} {kind} {what}\n".encode())
        self.tail.append((self.now_s, kind, what))

    def message(self, subject: str, data: bytes) -> None:
        """A message passed the broker."""
        self.num_messages += 1
        self._digest.update(f"{self.now_s!r} {subject} ".encode())
        self._digest.update(data)
        self.tail.append((self.now_s, subject, data[:SHOWN_BYTES].decode(errors="replace")))
        if b'"code":"internal"' in data:
            self.broken("I0", f"a message tells of a bug: {subject} {data[:SHOWN_BYTES].decode(errors='replace')}")

    def broken(self, invariant: str, what: str) -> None:
        """An invariant didn't hold."""
        self.violations.append(Violation(invariant, self.now_s, what))
        self.note("VIOLATION", f"{invariant} {what}")

    # -- commands and engine calls (I4, I5, I6) -----------------------------------------------------------------------

    def begun(self, boot: Boot, op_id: str, term: int, route: str, late_s: float) -> Begun:
        """A worker begins a command, `late_s` after it expired by the worker's own clock (below 0: before)."""
        if late_s >= 0:
            self.broken("I5", f"{boot.worker} began {route} {op_id} {late_s:.3f} s after it expired")
        if term < boot.term:
            self.broken("I5", f"{boot.worker} began {route} {op_id} of term {term} after term {boot.term}")
        boot.term = max(boot.term, term)
        if route not in _OF_OTHERS and (step := _STEP.match(op_id)) is not None:
            self._took_part.setdefault(step[1], set()).add(boot.worker)
        self._num_begun += 1
        return Begun(self._num_begun, op_id, term)

    def called(self, boot: Boot, verb: str) -> None:
        """A worker's engine is called."""
        begun = CURRENT.get()
        self.note(f"{boot.worker}#{boot.boot}", f"{verb} for {None if begun is None else begun.op_id}")
        # Aborts of requests run beside mutations, in nobody's name; and asking for adapters changes nothing.
        if begun is None or verb in ("abort", "list_loras"):
            return
        first = boot.ran.setdefault(begun.op_id, begun.number)
        if first != begun.number:
            self.broken("I4", f"op {begun.op_id} ran twice on {boot.worker} boot {boot.boot} ({verb})")

    def joined(self, boot: Boot, epoch: int) -> None:
        """An engine joins the group of `epoch`."""
        begun = CURRENT.get()
        group = (0 if begun is None else begun.term, epoch)
        if group <= boot.group:
            self.broken("I5", f"{boot.worker} joined group {epoch} of term {group[0]} after {boot.group}")
        boot.group = max(group, boot.group)

    def committed(
        self,
        boot: Boot,
        version: Version,
        held: Mapping[str, Version],
        update_op_id: str,
        *,
        is_given: bool = False,
    ) -> None:
        """An engine labels its weights; `is_given`: they are from a folder that no trainer keeps as a snapshot."""
        if is_given:
            self.given.add(version)
        self._commits.add((boot.worker, update_op_id))
        self._taken.add((boot.worker, version))
        self.committed_by.setdefault(version, set()).add(update_op_id)
        wrong = {name: str(v) for name, v in held.items() if v != version}
        if wrong:
            self.broken("I2", f"{boot.worker} labelled weights as {version} that are {wrong}")
        if boot.label is not None and version < boot.label and version not in self.rollbacks:
            self.broken("I6", f"{boot.worker} went from {boot.label} to {version} without a rollback")
        boot.label = version

    def token(self, boot: Boot, label: Version, held: Iterable[Version], is_stale: bool) -> None:
        """An engine generated a token while it was labelled `label`."""
        self.num_tokens += 1
        others = sorted({str(v) for v in held if v != label})
        if others:
            self.broken("I2", f"{boot.worker} labelled {label} generated with weights of {', '.join(others)}")
        if is_stale:
            self.broken("I2", f"{boot.worker} labelled {label} generated on a cache of older weights")

    # -- reports (I4) -------------------------------------------------------------------------------------------------

    def reported(self, report: Report) -> None:
        """A caller got the report of an op for the first time."""
        workers = [o.worker for o in report.outcomes]
        self.count(f"op {report.op} {report.status.value}")
        self.note("report", f"{report.op} {report.op_id} {report.status.value} {report.outcomes} {report.fault}")
        if len(set(workers)) != len(workers):
            self.broken("I4", f"op {report.op_id} has several outcomes for one worker: {workers}")
        if forgotten := self._took_part.get(report.op_id, set()).difference(workers):
            self.broken("I4", f"op {report.op_id} has no outcome for {sorted(forgotten)}, which took part in it")
        if report.version is not None and any(o.outcome is Outcome.OK for o in report.outcomes):
            known = self.reported_version
            self.reported_version = report.version if known is None else max(known, report.version)
        if report.op != "update_weights":
            return
        for outcome in report.outcomes:
            has_it = any(w == outcome.worker and _is_of(report.op_id, op_id) for w, op_id in self._commits)
            # Who takes an op over sees what a worker has, and not in which op it took that.
            is_seen = outcome.phase == PHASE and (outcome.worker, report.version) in self._taken
            if outcome.outcome is Outcome.OK and not (has_it or is_seen):
                self.broken("I4", f"{report.op_id} is ok on {outcome.worker}, which committed nothing for it")
            if outcome.outcome in (Outcome.REFUSED, Outcome.UNDONE, Outcome.SKIPPED) and has_it:
                self.broken("I4", f"{report.op_id} is {outcome.outcome.value} on {outcome.worker}, which committed it")

    def raised(self, op: str, error: Exception) -> None:
        """A caller got an exception instead of a report."""
        self.count(f"op {op} raised {type(error).__name__}")
        self.note("raised", f"{op}: {error}")

    def repeated(self, first: Report, again: Report) -> None:
        """The same controller was asked for the same op once more."""
        self.count("op repeated")
        if first != again:
            self.broken("I4", f"op {first.op_id} has two reports: {first} and {again}")


def _is_of(op_id: str, update_op_id: str) -> bool:
    return update_op_id == op_id or update_op_id.startswith(f"{op_id}-")
