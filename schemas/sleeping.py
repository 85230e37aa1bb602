"""Sleep: an engine gives its memory back, part by part, and takes it again. Tags are a set, spelled as vLLM does.

Sleep and pause are independent. While any tag sleeps no step runs, whoever holds a pause or nobody; when the last one
wakes, a worker that nobody holds paused generates again, and one that somebody holds stays paused.
"""

import enum

from rlbus.schemas.base import Wire
from rlbus.schemas.pausing import PauseMode


class SleepTag(enum.StrEnum):
    """A part of an engine's memory."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class Sleep(Wire, frozen=True, kw_only=True, tag_field="route", tag="sleep"):
    """Give back the memory of `tags`; None: of all that the engine has. Done only when no step runs and it is free.

    `level` says what becomes of the weights, if they are meant: 1 keeps them in host memory; 2 discards them, and they
    are dirty from then on until a full update or a reload. KV entries never outlive it. `mode` is what becomes of
    requests in flight. Tags that sleep already stay as they are. Refused with `busy` while an update is open.
    """

    tags: tuple[SleepTag, ...] | None = None
    level: int = 1
    mode: PauseMode = PauseMode.ABORT


class WakeUp(Wire, frozen=True, kw_only=True, tag_field="route", tag="wake_up"):
    """Take back the memory of `tags`; None: of all that sleep. A tag that is awake is no error.

    As long as another tag sleeps nothing is generated. It never ends a pause; and on weights that aren't whole the
    worker stays paused.
    """

    tags: tuple[SleepTag, ...] | None = None
