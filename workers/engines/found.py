"""An engine that outlives its agent: what an adapter says of one that it found running, for the agent to go on from.

Adapters whose engine is another process implement `FoundEngine` besides `Engine`; the rest begin with a fresh engine.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rlbus.schemas import SleepTag


@dataclass(frozen=True, slots=True)
class Found:
    """How an engine was found at the start of its adapter.

    `label` is its own label of its weights, None if it has none. `is_torn` says that an update ended in their middle:
    they aren't to be generated on. The same of its draft model: that it is torn, whoever could update it, the label
    only if it lists DRAFT_ROUTE.
    """

    label: str | None
    is_paused: bool
    is_torn: bool
    draft_label: str | None = None
    is_draft_torn: bool = False

    @property
    def has_torn(self) -> bool:
        """Whether either keeps it from generating."""
        return self.is_torn or self.is_draft_torn


@runtime_checkable
class FoundEngine(Protocol):
    """An engine that ran before its adapter did."""

    @property
    def found(self) -> Found:
        """Valid after `start`."""
        ...


@runtime_checkable
class FoundAsleep(Protocol):
    """A `FoundEngine` that can't say itself what of it sleeps."""

    def go_on_asleep(self, tags: frozenset[SleepTag]) -> None:
        """These sleep, as the agent before noted, or may do so. Called once, before anything but `start`."""
        ...
