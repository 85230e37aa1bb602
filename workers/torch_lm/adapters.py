"""The adapters that are loaded beside one model: which model name means which of them. Pure; whoever steps guards it.

Invariant: each load has a number of its own, which is what cached prefixes are keyed by, so that nothing computed with
one revision is ever found for another.
"""

import itertools
from dataclasses import dataclass

from rlbus.schemas import lora_id, split_lora_id
from rlbus.workers.torch_lm.adapter import Adapter


@dataclass(slots=True, eq=False)
class Loaded:
    """One adapter, as requests hold it."""

    name: str
    revision: int
    adapter: Adapter
    number: int
    is_draining: bool = False

    @property
    def id(self) -> str:
        """As requests name it."""
        return lora_id(self.name, self.revision)


class AdapterTable:
    """At most `capacity` adapters."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._loaded: dict[str, Loaded] = {}
        self._numbers = itertools.count(1)

    @property
    def all(self) -> tuple[Loaded, ...]:
        """In the order in which they were loaded."""
        return tuple(self._loaded.values())

    @property
    def is_full(self) -> bool:
        """Whether there is no place left."""
        return len(self._loaded) >= self.capacity

    def get(self, name: str, revision: int) -> Loaded | None:
        """That one."""
        return self._loaded.get(lora_id(name, revision))

    def add(self, name: str, revision: int, adapter: Adapter) -> Loaded:
        """From here on requests can name it."""
        loaded = Loaded(name, revision, adapter, next(self._numbers))
        self._loaded[loaded.id] = loaded
        return loaded

    def remove(self, loaded: Loaded) -> None:
        """No request can name it any more."""
        self._loaded.pop(loaded.id, None)

    def find(self, model: str) -> Loaded | None:
        """What a model name means: "policy@7", or the newest revision of "policy"; None: no adapter that is there."""
        if split_lora_id(model) is not None:
            found = self._loaded.get(model)
            return None if found is None or found.is_draining else found
        named = [loaded for loaded in self._loaded.values() if loaded.name == model and not loaded.is_draining]
        return max(named, key=lambda loaded: loaded.revision, default=None)

    def names(self) -> tuple[str, ...]:
        """Every model name that means an adapter now, sorted."""
        served = [loaded for loaded in self._loaded.values() if not loaded.is_draining]
        return tuple(sorted({loaded.id for loaded in served} | {loaded.name for loaded in served}))
