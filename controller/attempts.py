"""Attempts of one update: whether it is tried again on those who are left, and from what state. Pure.

An attempt that lost somebody is wound down as far as the others' sessions and group; then the update begins again on
the survivors, at the next epoch, with the same op. A worker that an attempt left torn takes part in the next: a full
update heals it. Bounds: MAX_ATTEMPTS, and the op's deadline covers all of them.
"""

from dataclasses import replace

from rlbus.controller.seats import change
from rlbus.controller.update_state import Blame, Damage, Seat, Sender, Stage, UpdateState
from rlbus.schemas import FaultCode, OnFailure, Outcome, WorkerId

# How often one update is tried in all.
MAX_ATTEMPTS = 3
# After an attempt broke, a worker that shows no sign of life for this long is not waited for: half of what the fleet may
# take to serve again. A healthy agent answers in milliseconds, whatever its engine does.
PROBE_S = 2.5
# What breaks on a healthy worker because another one, or the group, broke.
ECHOES = frozenset({FaultCode.TRANSFER_FAILED, FaultCode.GROUP_FAILED, FaultCode.STALLED, FaultCode.CANCELLED})
# Where losing a worker is answered with another attempt. Before, it only drops out; after, it costs nobody else.
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
    if state.plan.request.require is None and any(not s.is_good and not is_lost(s) for s in state.seats.values()):
        return False
    return len(state.crew) >= num_at_least(state)


def survivors(state: UpdateState) -> tuple[WorkerId, ...]:
    """Who takes part in the next attempt: whoever is there, and didn't fail on its own account."""
    return tuple(w for w, seat in state.seats.items() if not seat.is_gone and _is_echo(seat.blame))


def may_retry(state: UpdateState) -> bool:
    """Whether the update is to be tried again, once its present attempt is aborted and settled."""
    if state.plan.request.on_failure is not OnFailure.RETRY or state.attempt >= MAX_ATTEMPTS or state.is_stopped:
        return False
    if state.group is None or state.failed_in not in _RETRIED_PHASES:
        return False
    if any(cause.code is FaultCode.SENDER_FAILED for cause in state.causes):
        return False
    if any(seat.damage is Damage.COMMITTED for seat in state.seats.values()):
        return False
    left = survivors(state)
    # If nobody dropped out and nothing was sent, the same would only fail again.
    has_changed = state.may_have_sent or len(left) < len(state.group.workers)
    return has_changed and len(left) >= num_at_least(state)


def next_attempt(state: UpdateState) -> UpdateState:
    """The state from which the survivors begin again. Who was paused stays so, and who is torn stays known as torn."""
    assert state.group is not None
    left = survivors(state)
    torn = [w for w in left if state.seats[w].damage is Damage.TORN]
    state = change(state, left, damage=Damage.NONE, blame=None, received=None, is_joined=False)
    return replace(
        change(state, torn, was_torn=True),
        plan=replace(state.plan, current=None, next_epoch=state.group.plan.epoch + 1),
        stage=Stage.NEW,
        step=None,
        pending=frozenset(),
        accepted=frozenset(),
        lacking=(),
        num_pages_put=0,
        group=None,
        is_group_suspect=False,
        sender=Sender.IDLE,
        may_have_sent=False,
        sums=(),
        num_bytes=0,
        failed_in=None,
        attempt=state.attempt + 1,
    )


def recall_torn(state: UpdateState) -> UpdateState:
    """Who was torn by an attempt before, and not made whole by this one, still is."""
    torn = [w for w, seat in state.seats.items() if seat.was_torn and seat.damage is Damage.NONE]
    return change(state, torn, damage=Damage.TORN)


def step_of(state: UpdateState, step: str) -> str:
    """The name of a step, different in each attempt, so that its op id is."""
    return step if state.attempt == 1 else f"try{state.attempt}-{step}"


def _is_echo(blame: Blame | None) -> bool:
    return blame is None or (blame.outcome is not Outcome.UNKNOWN and blame.fault.code in ECHOES)
