"""The decisions of one scatter-gather, without I/O: (state, event, time) -> actions.

Invariants: every addressed worker ends with exactly one `Gathered`; an answer costs O(1); time costs one pass over the
open workers at `wake_s`, never a timer each. Three limits, never one number for all: no sign of life within `ack_s`, no
progress within `stall_s`, not done within `deadline_s`. Silence is settled by asking the worker what became of the op
before it is reported. While we are disconnected ourselves, nobody's silence counts, only the deadline does.

A worker that has answered says so again at least every second while it runs. If that stops, its result may be lost, so
it is asked; else a lost result would cost the whole deadline.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlbus.errors import ConfigError
from rlbus.schemas import (
    Accepted,
    Fault,
    FaultCode,
    OutcomeData,
    Progress,
    Result,
    ResultStatus,
    WorkerAnswer,
    WorkerId,
    split_worker_id,
    worker_id,
)

# Who hasn't answered after this part of the ack limit gets the same command again.
RESEND_PART = 0.25
# A worker that runs counts as silent after this many ack limits: machines that starve for seconds are not dead.
RUNNING_SILENCE_LIMITS = 3
# How long a silent worker may take at least to say what became of the op, in seconds, also past the deadline.
SETTLE_GRACE_S = 1.0
# 503s in a row on a worker's own subject after which it counts as not there; they are RESEND_PART of the limit apart.
# Only for one that was never heard, and not after a disconnect of ours: then it may be reconnecting like we did.
MAX_UNHEARD = 2
# Least time between two passes over the open workers, in seconds, however their limits are scattered.
MIN_WAKE_S = 0.02

_EPSILON_S = 1e-9


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: until the first sign of life, between two signs of progress, and in all. A ConfigError if not > 0."""

    ack_s: float
    stall_s: float
    deadline_s: float

    def __post_init__(self) -> None:
        for name in ("ack_s", "stall_s", "deadline_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(name, getattr(self, name), "use a number of seconds above 0")


@dataclass(frozen=True, slots=True)
class Gathered:
    """The one outcome of a command on one worker: its `result`, or the `fault` for which there is none.

    Faults: `no_ack`, `stalled`, `deadline`, `worker_lost`. What is known beyond is in `fault.detail["settled"]`:
    "running" (still at it, when last asked) or "not_begun" (it never got the command).
    """

    worker: WorkerId
    result: Result | None = None
    fault: Fault | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the worker did it."""
        return self.result is not None and self.result.status is ResultStatus.OK

    @property
    def is_unknown(self) -> bool:
        """Whether nobody can say if the worker did it."""
        return self.result is None and (self.fault is None or self.fault.detail.get("settled") != "not_begun")

    @property
    def why(self) -> Fault | None:
        """What went wrong: the fault of the gathering, or else of the worker's own result."""
        return self.fault if self.result is None else self.result.fault


class Verb(enum.Enum):
    """What to send to one worker."""

    COMMAND = "command"  # the same command again
    ASK = "ask"  # what became of the op?
    FETCH = "fetch"  # it has ended, so the same command again returns its recorded result


@dataclass(frozen=True, slots=True)
class Send:
    """An action: `verb` to one worker, by unicast."""

    worker: WorkerId
    verb: Verb


class _Phase(enum.Enum):
    WAITING = "waiting"  # no sign of life yet
    RUNNING = "running"
    SETTLING = "settling"  # asked what became of it


@dataclass(slots=True)
class _Track:
    """One worker that has no outcome yet. `due_s` ends its present phase, `stalled_at_s` its patience for progress."""

    worker: WorkerId
    key: tuple[str, str]
    due_s: float
    resend_at_s: float | None
    boot_id: str | None
    phase: _Phase = _Phase.WAITING
    stalled_at_s: float = float("inf")
    step: str = ""
    done: int = -1
    num_unheard: int = 0
    was_heard: bool = False
    # While settling: why, and the result that it told of without the data.
    why: FaultCode = FaultCode.NO_ACK
    told: Result | None = None


@dataclass(slots=True)
class Gather:
    """State of one scatter-gather. Feed it events with the loop's time; do what it returns; stop when `num_open` is 0.

    `ask_id` is the op_id of its questions. `boots` are the boot ids that are expected; a worker that isn't in it is
    held to the first one that it answers with.
    """

    members: Sequence[WorkerId]
    op_id: str
    ask_id: str
    limits: Limits
    now_s: float
    boots: Mapping[WorkerId, str] = field(default_factory=dict)
    # One per worker that has ended, in the order of their ends.
    outcomes: dict[WorkerId, Gathered] = field(init=False, default_factory=dict)
    # The same, as far as nobody has taken them: `take_ended` empties it.
    ended: list[Gathered] = field(init=False, default_factory=list)
    num_strangers: int = field(init=False, default=0)
    num_duplicates: int = field(init=False, default=0)
    # When `on_time` wants to be called next; an event may move it to an earlier time.
    wake_s: float = field(init=False, default=0.0)
    is_deaf: bool = field(init=False, default=False)
    was_deaf: bool = field(init=False, default=False)
    deadline_at_s: float = field(init=False, default=0.0)
    _open: dict[tuple[str, str], _Track] = field(init=False, default_factory=dict)
    _all: frozenset[tuple[str, str]] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        self.deadline_at_s = self.now_s + self.limits.deadline_s
        for worker in self.members:
            track = _Track(worker, split_worker_id(worker), 0.0, None, self.boots.get(worker))
            self._await_ack(track, self.now_s)
            self._open[track.key] = track
        self._all = frozenset(self._open)
        self._plan_wake(self.now_s)

    @property
    def num_open(self) -> int:
        """Workers without an outcome."""
        return len(self._open)

    def take_ended(self) -> list[Gathered]:
        """The outcomes since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def on_answer(self, answer: WorkerAnswer, now_s: float) -> tuple[bool, list[Send]]:
        """An answer arrived. Returns whether it counts (False: of a stranger, a repeat, or another op), and actions."""
        key = (answer.component, answer.instance_id)
        track = self._open.get(key)
        if track is None:
            self._count_dropped(key)
            return False, []
        if answer.op_id not in (self.op_id, self.ask_id):
            self.num_strangers += 1
            return False, []
        if track.boot_id is None:
            track.boot_id = answer.boot_id
        elif track.boot_id != answer.boot_id:
            self._lose(track, "it was restarted meanwhile", boot_id=answer.boot_id)
            return False, []
        track.was_heard = True
        if answer.op_id == self.ask_id:
            return False, self._on_told(track, answer, now_s)
        if isinstance(answer, Result):
            self._end(track, Gathered(track.worker, result=answer))
            return True, []
        return self._on_life(track, answer, now_s), []

    def on_nobody(self, worker: WorkerId, now_s: float) -> list[Send]:
        """The server said 503 to a unicast of the command: a hint that this worker isn't there now, no proof."""
        track = self._open.get(split_worker_id(worker))
        if track is None or track.phase is not _Phase.WAITING:
            return []
        track.num_unheard += 1
        if track.num_unheard >= MAX_UNHEARD and not (track.was_heard or self.was_deaf):
            fault = Fault(
                code=FaultCode.NO_ACK,
                message=f"{worker} is not there: nobody listens on its subject",
                retryable=True,
                detail={"heard_by": "nobody"},
            )
            self._end(track, Gathered(worker, fault=fault))
            return []
        track.resend_at_s = now_s + RESEND_PART * self.limits.ack_s
        self._wake_by(track.resend_at_s)
        return []

    def on_nobody_of(self, component: str) -> list[Send]:
        """The server said 503 to the broadcast to a component: ask each of its workers by unicast at once."""
        return [
            Send(track.worker, Verb.COMMAND)
            for key, track in self._open.items()
            if key[0] == component and track.phase is _Phase.WAITING
        ]

    def on_unaddressable(self, worker: WorkerId, problem: str) -> None:
        """No subject can be built for it, so that it never got anything."""
        track = self._open.get(split_worker_id(worker))
        if track is not None:
            message = f"{worker} can't be addressed: {problem}"
            detail = {"settled": "not_begun"}
            self._end(track, Gathered(worker, fault=Fault(code=FaultCode.NO_ACK, message=message, detail=detail)))

    def on_lost(self, worker: WorkerId, reason: str) -> None:
        """Whoever watches the fleet says that the worker is gone."""
        track = self._open.get(split_worker_id(worker))
        if track is not None:
            self._lose(track, reason)

    def on_disconnected(self) -> None:
        """We can't hear: from now on nobody's silence counts."""
        self.is_deaf = self.was_deaf = True

    def on_reconnected(self, now_s: float) -> list[Send]:
        """We hear again. Commands and answers may be lost, so everybody open gets the command again."""
        self.is_deaf = False
        if now_s >= self.deadline_at_s - _EPSILON_S:
            return []
        for track in self._open.values():
            self._await_ack(track, now_s)
        self._plan_wake(now_s)
        return [Send(track.worker, Verb.COMMAND) for track in self._open.values()]

    def on_time(self, now_s: float) -> list[Send]:
        """`wake_s` has come: one pass over the open workers."""
        actions: list[Send] = []
        is_over = now_s >= self.deadline_at_s - _EPSILON_S
        for track in list(self._open.values()):
            if self.is_deaf and not is_over:
                continue
            if track.phase is _Phase.SETTLING and not self.is_deaf:
                if track.due_s <= now_s + _EPSILON_S:
                    self._give_up(track)
            else:
                actions.extend(self._on_due(track, is_over, now_s))
        self._plan_wake(now_s)
        return actions

    def _on_due(self, track: _Track, is_over: bool, now_s: float) -> list[Send]:
        if track.due_s <= now_s + _EPSILON_S and not self.is_deaf:
            is_stalled = track.phase is _Phase.RUNNING and track.stalled_at_s <= now_s + _EPSILON_S
            return self._settle(track, FaultCode.STALLED if is_stalled else FaultCode.NO_ACK, now_s)
        if is_over:
            return self._settle(track, FaultCode.DEADLINE, now_s)
        if track.resend_at_s is not None and track.resend_at_s <= now_s + _EPSILON_S:
            track.resend_at_s = None
            return [Send(track.worker, Verb.COMMAND)]
        return []

    def _on_life(self, track: _Track, answer: Accepted | Progress, now_s: float) -> bool:
        """An `Accepted` or `Progress`; whether it says anything new."""
        is_settling = track.phase is _Phase.SETTLING
        is_first = track.phase is _Phase.WAITING or (is_settling and track.why is FaultCode.NO_ACK)
        is_grown = False
        if isinstance(answer, Progress):
            is_grown = answer.phase != track.step or answer.done > track.done
            if is_grown:
                track.step, track.done = answer.phase, answer.done
        elif not is_first:
            self.num_duplicates += 1
            return False
        is_final = is_settling and (track.told is not None or now_s >= self.deadline_at_s - _EPSILON_S)
        if is_final:
            return True
        if is_first or is_grown:
            self._run(track, now_s, is_progress=track.phase is not _Phase.SETTLING or is_grown)
        elif track.phase is _Phase.RUNNING:
            self._run(track, now_s, is_progress=False)
        return True

    def _on_told(self, track: _Track, answer: WorkerAnswer, now_s: float) -> list[Send]:
        """The answer to our question. Only while settling: later ones tell nothing that we need."""
        if track.phase is not _Phase.SETTLING or track.told is not None or not isinstance(answer, Result):
            return []
        if answer.fault is not None and answer.fault.code is FaultCode.UNKNOWN_OP:
            self._end_with(track, track.why, "it never got the command", settled="not_begun")
            return []
        data = answer.data
        if not isinstance(data, OutcomeData) or data.of_op_id != self.op_id:
            return []
        if data.running or data.status is None:
            self._on_told_running(track, now_s)
            return []
        track.told = Result(
            op_id=self.op_id,
            component=answer.component,
            instance_id=answer.instance_id,
            boot_id=answer.boot_id,
            status=data.status,
            fault=data.fault,
        )
        track.due_s = max(track.due_s, now_s + SETTLE_GRACE_S)
        return [Send(track.worker, Verb.FETCH)]

    def _on_told_running(self, track: _Track, now_s: float) -> None:
        is_over = now_s >= self.deadline_at_s - _EPSILON_S
        if track.why is FaultCode.NO_ACK and not is_over:
            self._run(track, now_s, is_progress=False)
            return
        self._end_with(track, FaultCode.DEADLINE if is_over else track.why, "it still runs", settled="running")

    def _await_ack(self, track: _Track, now_s: float) -> None:
        track.phase, track.told, track.stalled_at_s = _Phase.WAITING, None, float("inf")
        track.due_s = now_s + self.limits.ack_s
        track.resend_at_s = now_s + RESEND_PART * self.limits.ack_s

    def _run(self, track: _Track, now_s: float, *, is_progress: bool) -> None:
        """It lives; `is_progress` also renews its patience for progress, which starts with its first sign of life."""
        track.phase, track.resend_at_s = _Phase.RUNNING, None
        if is_progress or track.stalled_at_s == float("inf"):
            track.stalled_at_s = now_s + self.limits.stall_s
        track.due_s = min(now_s + self._silence_s, track.stalled_at_s)
        self._wake_by(track.due_s)

    @property
    def _silence_s(self) -> float:
        return RUNNING_SILENCE_LIMITS * self.limits.ack_s

    def _settle(self, track: _Track, why: FaultCode, now_s: float) -> list[Send]:
        track.phase, track.resend_at_s, track.why = _Phase.SETTLING, None, why
        if self.is_deaf:
            self._give_up(track)
            return []
        track.due_s = max(now_s + SETTLE_GRACE_S, min(self.deadline_at_s, now_s + self.limits.ack_s))
        self._wake_by(track.due_s)
        return [Send(track.worker, Verb.ASK)]

    def _give_up(self, track: _Track) -> None:
        """Settling ended without the whole result: report what it told, or the silence."""
        if track.told is not None:
            self._end(track, Gathered(track.worker, result=track.told))
        else:
            self._end_with(track, track.why, "and it didn't say what became of the op")

    def _lose(self, track: _Track, reason: str, **detail: str) -> None:
        self._end_with(track, FaultCode.WORKER_LOST, reason, **detail)

    def _end_with(self, track: _Track, code: FaultCode, problem: str, **detail: str) -> None:
        message = f"{track.worker} {self._in_words(code)}: {problem}"
        retryable = code is not FaultCode.WORKER_LOST
        fault = Fault(code=code, message=message, retryable=retryable, detail=detail)
        self._end(track, Gathered(track.worker, fault=fault))

    def _in_words(self, code: FaultCode) -> str:
        limits = self.limits
        return {
            FaultCode.NO_ACK: f"gave no sign of life within {limits.ack_s:g} s",
            FaultCode.STALLED: f"made no progress for {limits.stall_s:g} s",
            FaultCode.DEADLINE: f"did not end within {limits.deadline_s:g} s",
            FaultCode.WORKER_LOST: "is lost",
        }[code]

    def _end(self, track: _Track, gathered: Gathered) -> None:
        del self._open[track.key]
        self.outcomes[track.worker] = gathered
        self.ended.append(gathered)

    def _count_dropped(self, key: tuple[str, str]) -> None:
        if key in self._all:
            self.num_duplicates += 1
        else:
            self.num_strangers += 1

    def _wake_by(self, at_s: float) -> None:
        self.wake_s = min(self.wake_s, at_s)

    def _plan_wake(self, now_s: float) -> None:
        """The earliest limit of all open workers, but not more often than MIN_WAKE_S."""
        next_s = self.deadline_at_s if now_s < self.deadline_at_s - _EPSILON_S else float("inf")
        for track in () if self.is_deaf else self._open.values():
            next_s = min(next_s, track.due_s)
            if track.resend_at_s is not None:
                next_s = min(next_s, track.resend_at_s)
        self.wake_s = max(next_s, now_s + MIN_WAKE_S)


def by_component(members: Sequence[WorkerId]) -> dict[str, list[str]]:
    """component -> instance ids, in the order given, without repeats."""
    found: dict[str, list[str]] = {}
    for worker in dict.fromkeys(members):
        component, instance_id = split_worker_id(worker)
        found.setdefault(component, []).append(instance_id)
    return found


def who(answer: WorkerAnswer) -> WorkerId:
    """The worker that gave an answer."""
    return worker_id(answer.component, answer.instance_id)
