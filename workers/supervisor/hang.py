"""Whether a process that lives still works. Pure: told what was heard and seen of it, it says what to make of that.

Silence alone proves nothing on a machine that has too little CPU for all, so a silent process is judged by what the
system says of it, too: one that was stopped by a signal can't come back by itself; one that waits, and uses no CPU, is
stuck; one that computes, or wants to, may only be late. Our own standstill is nobody else's silence.
"""

import enum
from dataclasses import dataclass

# How often `Watch.look` is to be called, in seconds, and the gap from which on we have stood still ourselves.
LOOK_S = 0.25
STANDSTILL_S = 1.0
# Up to this share of the silent time on a CPU a process counts as waiting.
IDLE_SHARE = 0.05
# From this share of looks on that find it running, or waiting for a CPU, it counts as computing.
RUNNABLE_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class HangLimits:
    """Seconds of silence. None: never.

    A stall of an event loop on 2 cores beside vLLM's spin loops was 7 to 10 s (facts/vllm-cpu.md 0), with the process
    runnable all the time; `busy_s` is far above it. Who only waits for 10 s, with a timer due every 0.25 s, waits for
    something that doesn't come.
    """

    # When the silence is said, in the log.
    seen_s: float = 1.0
    # When the process is ended: stopped by a signal; waiting; computing.
    stopped_s: float = 3.0
    idle_s: float | None = 10.0
    busy_s: float | None = 60.0
    # Before the first sign of life: loading a large model.
    start_s: float | None = 3600.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One look, at `now_s` of a steady clock. `heard_s` is when it last gave a sign of life, None: never yet."""

    now_s: float
    heard_s: float | None
    is_stopped: bool
    is_runnable: bool
    cpu_s: float


class Kind(enum.Enum):
    """What a look came to."""

    SILENT = "silent"  # for `seen_s`, or stopped: said once
    BACK = "back"  # heard again after that
    HUNG = "hung"  # to be ended


@dataclass(frozen=True, slots=True)
class Verdict:
    """`text` says why, in words that follow a name."""

    kind: Kind
    text: str


class Watch:
    """Judges one process by looks every LOOK_S. `began_s` is when it was started."""

    def __init__(self, limits: HangLimits, began_s: float) -> None:
        self._limits = limits
        self._looked_s = began_s
        # Nothing before this counts: the start, or the last time that we stood still.
        self._from_s = began_s
        self._stopped_s: float | None = None
        self._is_told = False
        # Of the present silence.
        self._heard_s: float | None = None
        self._cpu_s = 0.0
        self._num_looks = 0
        self._num_runnable = 0

    def look(self, seen: Seen) -> Verdict | None:
        """What to make of it now; None: nothing new."""
        if seen.now_s - self._looked_s > STANDSTILL_S:
            self._from_s = seen.now_s
            self._stopped_s = None
        self._looked_s = seen.now_s
        if seen.heard_s is not None and seen.heard_s != self._heard_s:
            self._begin_silence(seen)
        self._num_looks += 1
        self._num_runnable += seen.is_runnable
        return self._stopped(seen) or self._silent(seen)

    def _begin_silence(self, seen: Seen) -> None:
        self._heard_s = seen.heard_s
        self._cpu_s = seen.cpu_s
        self._num_looks = self._num_runnable = 0

    def _stopped(self, seen: Seen) -> Verdict | None:
        if not seen.is_stopped:
            self._stopped_s = None
            return None
        if self._stopped_s is None:
            self._stopped_s = seen.now_s
            return None
        stopped_s = seen.now_s - self._stopped_s
        text = f"was stopped by a signal {stopped_s:.1f} s ago"
        if stopped_s >= self._limits.stopped_s:
            return Verdict(Kind.HUNG, text)
        return self._tell(text)

    def _silent(self, seen: Seen) -> Verdict | None:
        limits = self._limits
        since_s = self._from_s if self._heard_s is None else max(self._heard_s, self._from_s)
        silent_s = seen.now_s - since_s
        if self._heard_s is None:
            if limits.start_s is not None and silent_s >= limits.start_s:
                return Verdict(Kind.HUNG, f"gave no sign of life within {limits.start_s:.0f} s of its start")
            return None
        if silent_s < limits.seen_s:
            if self._is_told and self._stopped_s is None:
                self._is_told = False
                return Verdict(Kind.BACK, "answers again")
            return None
        is_busy = self._is_busy(seen, silent_s)
        limit_s = limits.busy_s if is_busy else limits.idle_s
        does = "computes" if is_busy else "waits"
        text = f"has given no sign of life for {silent_s:.1f} s, and {does}"
        if limit_s is not None and silent_s >= limit_s:
            return Verdict(Kind.HUNG, text)
        return self._tell(text)

    def _is_busy(self, seen: Seen, silent_s: float) -> bool:
        has_used = seen.cpu_s - self._cpu_s > IDLE_SHARE * silent_s
        return has_used or self._num_runnable > RUNNABLE_SHARE * self._num_looks

    def _tell(self, text: str) -> Verdict | None:
        if self._is_told:
            return None
        self._is_told = True
        return Verdict(Kind.SILENT, text)
