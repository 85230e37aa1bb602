"""Attempts of one update: whether it is tried again on those who are left, and from what state. Pure.

An attempt that broke is wound down as far as the others' sessions and group; then the update begins again on the
survivors, at the next epoch, with the same op. A worker that an attempt left torn takes part in the next: a full update
heals it. Who goes on: everybody but whoever is gone, silent, or failed on its own account. What only echoes another's
failure (a broken group breaks all of its members) is not held against a worker, unless nobody else is to blame for the
second time. Bounds: MAX_ATTEMPTS, and the op's deadline covers all of them.
"""

from dataclasses import replace

from rlbus.controller.limits import HOUSEKEEPING_S
from rlbus.controller.seats import blame, change
from rlbus.controller.update_state import Damage, Seat, Sender, Stage, UpdateState, WorkersAnswered
from rlbus.fanout import Limits
from rlbus.schemas import FaultCode, OnFailure, Outcome, WorkerId

# How often one update is tried in all.
MAX_ATTEMPTS = 3
# While others stand still, or the trainer waits, for an update that goes on without whoever is lost: a worker that
# doesn't answer for this long is asked what became of it, and one that runs for three times this (rlbus._gather): 4 and
# 8 s until a process that was stopped counts as lost. A healthy agent answers in milliseconds, whatever its engine
# does; taking a slow one for lost costs it a catch-up, nothing else.
PROBE_S = 2.0
# In a transfer: when no byte has moved for this long, whoever was silent as long is lost. As long as bytes move, nobody
# waits for a silent agent, and the limits of any step hold.
STILL_S = 5.0
# The least that a transfer may stand still before all who wait in it count as stalled: only then is it known who holds
# the others up. STILL_S, a heartbeat of somebody else (6 s at most, rlbus.workers.config), and a second to spare.
MIN_STALL_S = 12.0
# What breaks on a healthy worker, or on the trainer, because another one or the group broke.
ECHOES = frozenset({FaultCode.TRANSFER_FAILED, FaultCode.GROUP_FAILED, FaultCode.STALLED})
# Where the loss of a worker is answered with another attempt. Before, it only drops out; after, it costs nobody else.
_RETRIED_PHASES = frozenset({"group", "pause", "transfer"})


def is_lost(seat: Seat) -> bool:
    """Whether nothing more can be expected of a worker in this update: it is gone, or silent."""
    return seat.is_gone or (seat.blame is not None and seat.blame.outcome is Outcome.UNKNOWN)


def num_at_least(state: UpdateState) -> int:
    """For how few workers an update that lost some is still worth going on."""
    request = state.plan.request
    if request.on_failure is OnFailure.RETRY and request.require is None:
        return 1
    return max(1, state.plan.num_needed)


def may_go_without_lost(state: UpdateState) -> bool:
    """While preparing: whether those who are left are enough, and nobody but lost ones is missing.

    A worker that refuses stops an update that all were to take part in: what it says (a tensor that doesn't fit, an
    older version) is most likely meant for the whole fleet.
    """
    here = [seat for seat in state.seats.values() if not seat.is_out]
    if state.plan.request.require is None and any(not seat.is_good and not is_lost(seat) for seat in here):
        return False
    return len(state.crew) >= num_at_least(state)


def probe_s(state: UpdateState) -> float | None:
    """The ack limit of steps in which others stand still for a silent worker; None: as in any step."""
    return PROBE_S if state.plan.request.on_failure is OnFailure.RETRY else None


def stall_s(state: UpdateState) -> float:
    """How long no byte may move on a worker."""
    asked_s = state.plan.request.stall_s
    return max(asked_s, MIN_STALL_S) if probe_s(state) is not None and len(state.crew) > 1 else asked_s


def housekeeping_s(state: UpdateState, limits: Limits) -> float:
    """How long a step waits for a worker that does something of its own.

    Who has accepted a transfer, or is in a group that forms, waits for all others within a limit of its own. This ends
    well before, so that whoever is busy is left, and the others have time for what they were waiting for. Between two
    attempts nobody waits: who is busy leaves the old group by joining the next.
    """
    if state.stage is Stage.REGROUP:
        return 0.0
    limits_s = {Stage.JOIN: state.plan.group_timeout_s, Stage.RECEIVE: limits.stall_s}
    if state.stage not in limits_s or len(state.crew) < 2:
        return HOUSEKEEPING_S
    return min(HOUSEKEEPING_S, limits_s[state.stage] / 2)


def survivors(state: UpdateState) -> tuple[WorkerId, ...]:
    """Who takes part in the next attempt."""
    assert state.group is not None
    members = {w: state.seats[w] for w in state.group.workers}
    seats = {w: seat for w, seat in members.items() if not is_lost(seat) and not _is_own(seat)}
    if state.attempt == 1 or len(seats) < len(members):
        return tuple(seats)
    # Nobody else is to blame for the second time: whoever said first that the group broke may be the one who breaks it.
    good = tuple(w for w, seat in seats.items() if seat.is_good)
    return good or tuple(seats)


def may_retry(state: UpdateState) -> bool:
    """Whether the update is to be tried again, once its present attempt is aborted and settled."""
    if state.plan.request.on_failure is not OnFailure.RETRY or state.attempt >= MAX_ATTEMPTS or state.is_stopped:
        return False
    if state.group is None or state.failed_in not in _RETRIED_PHASES:
        return False
    if state.sender_fault is not None and state.sender_fault.code not in ECHOES:
        return False  # the trainer's own, its source's say: it would only fail again
    if any(seat.damage is Damage.COMMITTED for seat in state.seats.values()):
        return False
    return len(survivors(state)) >= num_at_least(state)


def next_attempt(state: UpdateState) -> UpdateState:
    """The state from which the survivors begin again. Who was paused stays so, and who is torn stays known as torn."""
    assert state.group is not None
    left, epoch = survivors(state), state.group.plan.epoch
    torn = [w for w in left if state.seats[w].damage is Damage.TORN]
    state = change(state, [w for w in state.seats if w not in left], is_out=True)
    state = change(state, left, damage=Damage.NONE, blame=None, received=None, is_joined=False)
    return replace(
        change(state, torn, was_torn=True),
        plan=replace(state.plan, current=None, next_epoch=epoch + 1),
        stage=Stage.NEW,
        step=None,
        late_step=None,
        pending=frozenset(),
        accepted=frozenset(),
        lacking=(),
        num_pages_put=0,
        group=None,
        is_group_suspect=False,
        sender=Sender.IDLE,
        sender_fault=None,
        may_have_sent=False,
        sums=(),
        num_bytes=0,
        failed_in=None,
        is_out_of_time=False,
        attempt=state.attempt + 1,
    )


def note_late(state: UpdateState, event: WorkersAnswered) -> UpdateState:
    """How a broken broadcast ended on workers while it is wound down: only who failed on its own account counts.

    The trainer often hears first that the group broke, and why only the worker that broke it can say.
    """
    for worker, answer in event.answers.items():
        seat = state.seats.get(worker)
        if seat is None or answer.outcome is not Outcome.FAILED or answer.fault is None:
            continue
        # An abort of ours ends what runs as cancelled.
        if answer.fault.code not in ECHOES and answer.fault.code is not FaultCode.CANCELLED:
            state = blame(state, worker, Outcome.FAILED, answer.fault, state.failed_in)
    return state


def recall_torn(state: UpdateState) -> UpdateState:
    """Who was torn by an attempt before, and not made whole by this one, still is."""
    torn = [w for w, seat in state.seats.items() if seat.was_torn and seat.damage is Damage.NONE]
    return change(state, torn, damage=Damage.TORN)


def step_of(state: UpdateState, step: str) -> str:
    """The name of a step, different in each attempt, so that its op id is."""
    return in_attempt(state.attempt, step)


def in_attempt(attempt: int, step: str) -> str:
    """The name of `step` in attempt number `attempt`, from 1."""
    return step if attempt == 1 else f"try{attempt}-{step}"


def _is_own(seat: Seat) -> bool:
    """Whether a worker failed on its own account: it would again, and cost the others another attempt."""
    return seat.blame is not None and seat.blame.fault.code not in ECHOES
