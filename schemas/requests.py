"""What all requests to the controller have in common, and whom they address."""

from rlbus.schemas.base import Wire
from rlbus.schemas.ids import OpId, Token, WorkerId

# Largest deadline, and largest lease of a pause, that the controller takes, in seconds: nothing waits for over a day.
MAX_DEADLINE_S = 86_400.0


class Target(Wire, frozen=True, kw_only=True):
    """Which workers: all of the namespace (both None), those of some components, or those named."""

    components: tuple[Token, ...] | None = None
    workers: tuple[WorkerId, ...] | None = None


class Request(Wire, frozen=True, kw_only=True, tag_field="op"):
    """Base of requests. `op_id` is the caller's: sent again, it joins the first. `caller` is shown in events."""

    op_id: OpId
    deadline_s: float = 30.0
    caller: str = "unknown"
