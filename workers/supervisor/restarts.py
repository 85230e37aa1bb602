"""Whether, and when, a server that ended is started again. Pure: told of each end, it answers with the pause."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most `max_restarts` within `window_s` seconds; the pause doubles from `first_s` to `max_s`.

    A server that ran for `settled_s` has its pauses begin anew.
    """

    max_restarts: int = 5
    window_s: float = 600.0
    first_s: float = 1.0
    max_s: float = 30.0
    settled_s: float = 120.0


@dataclass(slots=True)
class Restarts:
    """The history that the policy looks at. Times are of one steady clock, in seconds."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    _ends: deque[float] = field(default_factory=deque)
    _pause_s: float = 0.0

    def on_end(self, now_s: float, ran_s: float) -> float | None:
        """A server ended at `now_s` after `ran_s`: the pause before the next, None to give up."""
        policy = self.policy
        while self._ends and now_s - self._ends[0] > policy.window_s:
            self._ends.popleft()
        if len(self._ends) >= policy.max_restarts:
            return None
        self._ends.append(now_s)
        is_fresh = self._pause_s == 0.0 or ran_s >= policy.settled_s
        self._pause_s = policy.first_s if is_fresh else min(self._pause_s * 2, policy.max_s)
        return self._pause_s
