"""Who holds a transfer up: nothing moves, the others are heard, and one is silent. Pure.

The silence of everybody at once is no evidence against anybody: then it may be we who hear nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlbus.schemas import WorkerId


@dataclass(slots=True)
class Stillness:
    """When bytes moved last and who was heard last, in loop time. `limit_s` is how long both may be missing."""

    limit_s: float
    _moved_s: float = field(init=False, default=float("inf"))
    _heard_s: dict[WorkerId | None, float] = field(init=False, default_factory=dict)

    def begin(self, now_s: float) -> None:
        """The transfer begins: nobody's silence before counts."""
        self._moved_s = now_s
        self._heard_s.clear()

    def moved(self, now_s: float) -> None:
        """A byte moved."""
        self._moved_s = now_s

    def heard(self, who: WorkerId | None, now_s: float) -> None:
        """A sign of life of a worker, in the update or not, or of the trainer (None)."""
        self._heard_s[who] = now_s

    def lost(self, pending: Sequence[WorkerId], now_s: float) -> list[WorkerId]:
        """Those of `pending` that hold the transfer up."""
        began_s = now_s - self.limit_s
        if self._moved_s > began_s or not any(heard_s > began_s for heard_s in self._heard_s.values()):
            return []
        return [w for w in pending if self._heard_s.get(w, float("-inf")) <= began_s]
