"""What silence says of a worker: alive, suspect, or dead. Pure; ages are in seconds of the caller's clock."""

from rlbus.schemas import Announcement, Liveness, WorkerStatus

# Silence, in the worker's own heartbeat intervals. Source: DESIGN section 3.
SUSPECT_INTERVALS = 2.5
DEAD_INTERVALS = 4.0
# Bounds of a worker's own claim about its interval, in seconds, so that none can stay "alive" for ever.
MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 60.0
# Most that a worker's declared work may excuse of its silence, in seconds, for the same reason.
MAX_WORK_LEASE_S = 120.0
# Whoever looks at the time several times a second, and comes later than this, in seconds, has stood still.
STOOD_STILL_S = 2.0


def interval_of(message: Announcement) -> float:
    """The heartbeat interval that a worker claims, within bounds, in seconds."""
    return min(max(message.interval_s, MIN_INTERVAL_S), MAX_INTERVAL_S)


def excused_s(status: WorkerStatus) -> float:
    """How long a worker may be silent for the sake of the work that it declared (SCENARIOS 21)."""
    return 0.0 if status.work is None else min(max(status.work.lease_s, 0.0), MAX_WORK_LEASE_S)


def liveness_of(age_s: float, interval_s: float, excused_s: float) -> Liveness:
    """Suspect when the excuse is over, but not before the usual time; dead as long after that as it always takes."""
    suspect_s = max(SUSPECT_INTERVALS * interval_s, excused_s)
    if age_s < suspect_s:
        return Liveness.ALIVE
    return Liveness.DEAD if age_s >= suspect_s + (DEAD_INTERVALS - SUSPECT_INTERVALS) * interval_s else Liveness.SUSPECT


def stood_still(before_s: float, now_s: float, limit_s: float = STOOD_STILL_S) -> bool:
    """Whether we ourselves did nothing since we looked at `before_s` (stopped, starved): what others said meanwhile
    isn't read yet, and their silence says nothing.
    """
    return now_s - before_s > limit_s
