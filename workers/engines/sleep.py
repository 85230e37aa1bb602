"""The seam to an engine whose memory can sleep: what such an adapter has to do beyond `base.Engine`.

Ordering contract, kept by the agent:
- `sleep` and `wake_up` are mutations: at most one of all mutations runs at a time. `observe` and `abort` may be called
  beside one.
- `sleep` never comes while an update session is open, and only with tags that are awake.
- While anything sleeps, `resume` isn't called; while the weights sleep, neither are join_group, receive_weights,
  load_weights, checksums. `pause`, `flush_cache`, `leave_group`, `abort_update` may be called, and succeed. With the
  weights awake and the KV cache asleep a whole update may come.
- `resume` follows a wake of the last tag if nobody holds a pause; the adapter doesn't resume by itself.

The adapter lists the routes `sleep` and `wake_up`, both or none, and says in `Engine.observe` which tags sleep.
"""

from typing import Protocol, runtime_checkable

from rlbus.errors import refused
from rlbus.schemas import FaultCode, PauseMode, SleepData, SleepTag
from rlbus.workers.engines.base import Engine

SLEEP_ROUTES = frozenset({"sleep", "wake_up"})


@runtime_checkable
class SleepEngine(Protocol):
    """An engine that can give its memory back and take it again."""

    @property
    def sleep_tags(self) -> frozenset[SleepTag]:
        """The parts of its memory that can sleep; constant after `start`."""
        ...

    async def sleep(self, tags: frozenset[SleepTag], level: int, mode: PauseMode) -> SleepData:
        """Free the memory of `tags`, a part of `sleep_tags`. Returns only when no step runs, none will start until
        `resume`, and it is free. Level 1 keeps the weights in host memory, level 2 discards them. Idempotent per tag.
        `keep` and `wait` do with requests what a pause does; KV entries of those that are kept are computed again.

        Raises refused errors (`bad_message`, before anything has changed) for tags that can't sleep apart, and for a
        level that it doesn't have. Cancel or failure: some may sleep; the agent wakes them.
        """
        ...

    async def wake_up(self, tags: frozenset[SleepTag]) -> SleepData:
        """Take the memory of `tags` again; weights that were kept are what they were. No step runs before `resume`.
        A tag that is awake is no error.

        Cancel or failure: those of `tags` that still sleep do, and `observe` says which.
        """
        ...


def sleeper(engine: Engine) -> SleepEngine:
    """The engine as one that can sleep. Raises a refused error (`no_route`) if it can't."""
    if not isinstance(engine, SleepEngine) or not engine.info.routes >= SLEEP_ROUTES:
        raise refused(FaultCode.NO_ROUTE, f"{engine.info.engine} has no sleep", route="sleep")
    return engine


def in_order(tags: frozenset[SleepTag]) -> tuple[SleepTag, ...]:
    """Tags as they stand on the wire."""
    return tuple(sorted(tags))
