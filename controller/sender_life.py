"""Until when the trainer of an update has to give a sign of life: engines stand still for it. Pure."""

from dataclasses import dataclass

from rlbus.controller.update_state import FORWARD, Sender, UpdateState

# How long a trainer that joins may be silent, in seconds: it says every second that it lives (rlbus._sending), also as
# it waits for others. In another attempt engines stand still for it. Nor is less than this expected of any other.
JOINING_SILENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class SenderLife:
    """What was heard of it, in loop time."""

    # When it was told its last task.
    told_s: float = 0.0
    # Its last word about that task; None: none yet.
    task_heard_s: float | None = None
    # Its last word at all.
    heard_s: float = 0.0
    # Whether it says that it lives also while it has no task; older ones don't.
    is_steady: bool = False
    # When we last were disconnected, or had stood still: what anybody said before, we may have missed.
    deaf_s: float = 0.0

    def since_s(self, sender: Sender) -> float:
        """Since when it is silent, for one that stands so."""
        if sender not in (Sender.JOINING, Sender.SENDING):
            return max(self.heard_s, self.deaf_s)
        return max(self.told_s if self.task_heard_s is None else self.task_heard_s, self.deaf_s)


def limit_s(state: UpdateState, life: SenderLife) -> float | None:
    """When its silence counts as its end, in loop time; None: nothing is expected of it now.

    Once it has sent everything it isn't needed any more.
    """
    if state.stage not in FORWARD or state.sender in (Sender.SENT, Sender.FAILED):
        return None
    since_s, stall_s = life.since_s(state.sender), state.plan.request.stall_s
    match state.sender:
        case Sender.JOINING:
            return min(since_s + JOINING_SILENCE_S, life.told_s + state.plan.group_timeout_s)
        case Sender.SENDING:
            return since_s + stall_s
        case _:
            return since_s + max(stall_s, JOINING_SILENCE_S) if life.is_steady else None


def silence(state: UpdateState, life: SenderLife, now_s: float) -> str:
    """What is said of it when that has passed."""
    is_at_task = state.sender in (Sender.JOINING, Sender.SENDING)
    what = f"while {state.sender.value}" if is_at_task else f"in phase {state.phase}"
    return f"the trainer was silent for {now_s - life.since_s(state.sender):.0f} s {what}"
