"""Who is behind the fleet's version, and when it is brought there. Pure.

A worker that lives and doesn't have the fleet's version (restarted, new, torn, or left paused at an older one) is given
the trainer's snapshot of it, on that worker alone. Rules: not before it was seen behind for SETTLE_S, so that an update
that is about to begin includes it; those who never failed go together, the others one at a time, so that one that can't
take it holds up nobody else; after each failure it waits longer, up to MAX_RETRY_S.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlbus.controller.admission import UPDATE_ROUTE
from rlbus.controller.registry import Member, Registry
from rlbus.schemas import (
    FaultCode,
    FleetSnapshot,
    Generation,
    Liveness,
    Outcome,
    Report,
    SnapshotKind,
    Version,
    WeightsState,
    WorkerId,
)

# How long a worker has to be behind before anything is done about it, in seconds; also after an op has ended.
SETTLE_S = 0.75
# How long one waits for others that have come after it, in seconds: a restarted rack is one transfer.
GATHER_S = 1.5
# Before a worker is tried again after its first failure, and at most: it doubles with each.
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0
# Workers that are caught up together at most.
MAX_AT_ONCE = 64
RELOAD_ROUTE = "update_weights_from_disk"
# How a report ends for a worker because of others, or of the trainer.
_INNOCENT = (Outcome.UNDONE, Outcome.SKIPPED)


@dataclass(frozen=True, slots=True)
class Attempt:
    """How far catching up one boot of a worker is. `next_s`: not before, in loop time; `why` is the last failure."""

    boot_id: str
    next_s: float
    num_failed: int = 0
    why: str | None = None


Attempts = Mapping[WorkerId, Attempt]


def is_behind(registry: Registry, member: Member) -> bool:
    """Whether this worker lives, is awake, can be addressed, and hasn't the fleet's version."""
    version, weights = registry.version, member.status.weights
    if member.status.asleep:
        return False
    if version is None or member.liveness is not Liveness.ALIVE or registry.refusal(member) is not None:
        return False
    return weights.state is not WeightsState.CLEAN or weights.version != version


def refreshed(attempts: Attempts, behind: Sequence[Member], now_s: float) -> dict[WorkerId, Attempt]:
    """The attempts of those that are behind now: new for who wasn't before, or was restarted."""
    found: dict[WorkerId, Attempt] = {}
    for member in behind:
        known = attempts.get(member.worker)
        is_same = known is not None and known.boot_id == member.boot_id
        found[member.worker] = known if known is not None and is_same else Attempt(member.boot_id, now_s + SETTLE_S)
    return found


def obstacle(snapshot: FleetSnapshot | None, version: Version | None) -> str | None:
    """Why nobody can be brought to `version`, in words; None: there is a snapshot of it."""
    if snapshot is None or snapshot.version != version or snapshot.offer.kind is SnapshotKind.NONE:
        return "waits for the next update: the trainer keeps no snapshot of this version"
    return None


def misfit(member: Member, snapshot: FleetSnapshot) -> str | None:
    """Why this worker can't take the snapshot, in words; None: it can."""
    descriptor = member.descriptor
    route = UPDATE_ROUTE if snapshot.offer.kind is SnapshotKind.MEMORY else RELOAD_ROUTE
    if route not in descriptor.routes:
        return f"waits for the next update: it doesn't serve {route}"
    if snapshot.offer.kind is SnapshotKind.MEMORY and snapshot.backend not in descriptor.backends:
        return f"can't join a {snapshot.backend} group"
    return None


def chosen(attempts: Attempts, behind: Sequence[Member], snapshot: FleetSnapshot, now_s: float) -> tuple[WorkerId, ...]:
    """Whom to catch up now; empty: nobody."""
    able = [m for m in behind if _is_free(m) and misfit(m, snapshot) is None]
    due = [m for m in able if attempts[m.worker].next_s <= now_s]
    fresh = [m.worker for m in due if attempts[m.worker].num_failed == 0]
    if fresh:
        is_more_coming = any(attempts[m.worker].num_failed == 0 for m in able if attempts[m.worker].next_s > now_s)
        if is_more_coming and now_s < min(attempts[w].next_s for w in fresh) + GATHER_S:
            return ()
        return tuple(fresh[:MAX_AT_ONCE])
    return tuple(sorted((m.worker for m in due), key=lambda w: (attempts[w].next_s, w))[:1])


def after_report(
    attempts: Attempts, workers: Sequence[WorkerId], report: Report, now_s: float
) -> dict[WorkerId, Attempt]:
    """What a catch-up of `workers` that ended so makes of the attempts. One that was taken back counts for nothing."""
    why = "it ended without a cause" if report.fault is None else report.fault.message
    outcomes = {o.worker: o for o in report.outcomes}
    if report.fault is not None and report.fault.code is FaultCode.CANCELLED:
        return {w: replace(a, next_s=now_s + SETTLE_S) if w in workers else a for w, a in attempts.items()}
    bad = {w for w in workers if w in outcomes and outcomes[w].outcome not in (Outcome.OK, *_INNOCENT)}
    changed = dict(attempts)
    for worker in workers:
        outcome, attempt = outcomes.get(worker), attempts.get(worker)
        if attempt is None or (outcome is not None and outcome.outcome is Outcome.OK):
            continue
        if bad and worker not in bad:  # taken back because of another
            changed[worker] = replace(attempt, next_s=now_s + SETTLE_S)
            continue
        own = None if outcome is None else outcome.fault
        changed[worker] = _failed(attempt, why if own is None else own.message, now_s)
    return changed


def after_failure(attempts: Attempts, workers: Sequence[WorkerId], why: str, now_s: float) -> dict[WorkerId, Attempt]:
    """What a catch-up that wasn't even begun makes of the attempts."""
    return {w: _failed(a, why, now_s) if w in workers else a for w, a in attempts.items()}


def note(
    member: Member, version: Version | None, snapshot: FleetSnapshot | None, attempt: Attempt | None, now_s: float
) -> str:
    """What is done about a worker that is behind and isn't being caught up at this moment, in words."""
    problem = obstacle(snapshot, version)
    if problem is None and snapshot is not None:
        problem = misfit(member, snapshot)
    if problem is not None:
        return problem
    if attempt is None or attempt.num_failed == 0:
        return "is caught up next"
    tries = "once" if attempt.num_failed == 1 else f"{attempt.num_failed} times"
    in_s = max(0.0, attempt.next_s - now_s)
    return f"catching it up failed {tries} ({attempt.why}); tried again in {in_s:.0f} s, or with the next update"


def _is_free(member: Member) -> bool:
    """Whether it could begin something now: its engine answers, and nothing runs in it."""
    return member.status.op_id is None and member.status.generation is not Generation.UNKNOWN


def _failed(attempt: Attempt, why: str, now_s: float) -> Attempt:
    wait_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(attempt.num_failed, 16))
    return replace(attempt, num_failed=attempt.num_failed + 1, next_s=now_s + wait_s, why=why)
