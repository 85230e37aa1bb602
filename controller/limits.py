"""How long what of an op may take: its steps, and all that comes after its deadline.

An op goes forward until `Op.forward_until_s`. What has to be done then (commit, flush, resume, undo) shares one budget,
which ends at `Op.ending_until_s`; a step that begins when that is used up still gets a moment, since a healthy worker
answers in milliseconds, and must not stay paused because another one used up the time. So an op that every engine hangs
in ends OVERRUN_S after its deadline at the latest; one that a new leader takes over counts from then.
"""

from rlbus.fanout import OVERTIME_S, Limits

# Without a sign of life for this long a worker counts as silent for one command. Source: DESIGN section 3 wants limits
# apart; a healthy agent answers within milliseconds, whatever its engine does, so this only has to outlast a hiccup.
ACK_S = 5.0
# The ack limit as a part of a short deadline, so that silence is noticed while there is time to take things back.
ACK_PART = 0.25
MIN_LIMIT_S = 0.05
# What has to be done at the end of an op has so long in all. Above a server that is away for 20 s (issue 3).
ENDING_S = 30.0
# What each step of that has even when the whole is used up.
ENDING_STEP_S = 5.0
# Before a worker that is busy (still ending what nobody wants any more) is asked again, and before anything is tried
# again while we are disconnected.
RETRY_S = 0.5
# How long a step waits for a worker that does something of its own, in seconds. Source: rlbus.workers.leases.OWN_OP_S,
# which bounds that, and what its agent may need to let go of an engine that hangs in it.
HOUSEKEEPING_S = 40.0
# How many steps can follow when the budget is used up: what an update needs after a commit that somebody hung in
# (flush, resume, abort, settle, free, leave, keep). A load of an adapter needs fewer: by then it gives nothing back.
MAX_LAST_STEPS = 7
# How long a report waits for the store, in seconds. Above the life of a lease that isn't renewed (leader.TTL_S).
MARK_S = 5.0
# The longest that an op outlives its deadline: its budget, the steps after it, and the store.
OVERRUN_S = ENDING_S + MAX_LAST_STEPS * (ENDING_STEP_S + OVERTIME_S) + MARK_S


def ending_step_until_s(budget_until_s: float, now_s: float) -> float:
    """Until when a step that must be done, and begins now, may take: what is left of the budget, or a moment."""
    return max(budget_until_s, now_s + ENDING_STEP_S)


def overdue_at_s(budget_until_s: float, began_s: float) -> float:
    """When a step that must be done is given up from outside: its own limits ended it long before, unless the op was
    stopped meanwhile, which shortens the budget of a step that had more.
    """
    return ending_step_until_s(budget_until_s, began_s) + OVERTIME_S + RETRY_S


def limits_until(until_s: float, now_s: float, *, stall_s: float | None = None, is_ending: bool = False) -> Limits:
    """Limits of a step that has until `until_s` (loop time). `is_ending`: nothing can be taken back after it, so that
    noticing a silence early is no use.

    `stall_s` is for a step that counts its progress, which only a transfer does. A pause that waits for a long answer,
    or an engine that loads a large folder, makes none that could be seen, and is healthy (SCENARIOS 15): there the
    deadline counts, and the heartbeats tell a worker that died meanwhile.
    """
    left_s = max(until_s - now_s, MIN_LIMIT_S)
    ack_s = min(ACK_S, left_s if is_ending else max(MIN_LIMIT_S, ACK_PART * left_s))
    return Limits(ack_s=ack_s, stall_s=left_s if stall_s is None else min(stall_s, left_s), deadline_s=left_s)


def within(limits: Limits, left_s: float) -> Limits:
    """The same for a part of a step that has only `left_s`."""
    left_s = max(left_s, MIN_LIMIT_S)
    return Limits(min(limits.ack_s, left_s), min(limits.stall_s, left_s), min(limits.deadline_s, left_s))
