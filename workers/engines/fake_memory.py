"""The memory of the fake engine: which parts are mapped, so that a touch of one that sleeps is seen."""

from collections.abc import Callable, Mapping

from rlbus.schemas import SleepTag


class FakeMemory:
    """A sleep memory map. `violate` is told of every touch of memory that sleeps: a real engine would die of it.

    Args:
        sizes: bytes of each part.
    """

    def __init__(self, sizes: Mapping[SleepTag, int], violate: Callable[[str], None]) -> None:
        self._sizes = dict(sizes)
        self._violate = violate
        self.asleep: frozenset[SleepTag] = frozenset()
        # The weights fell asleep to be discarded, and have not been written completely since.
        self.is_discarded = False

    @property
    def tags(self) -> frozenset[SleepTag]:
        """All parts."""
        return frozenset(self._sizes)

    @property
    def num_bytes(self) -> int:
        """What is mapped now."""
        return sum(size for tag, size in self._sizes.items() if tag not in self.asleep)

    def sleep(self, tags: frozenset[SleepTag], level: int) -> int:
        """Unmap `tags`; the bytes that this freed."""
        before = self.num_bytes
        if level >= 2 and SleepTag.WEIGHTS in tags - self.asleep:
            self.is_discarded = True
        self.asleep |= tags
        return before - self.num_bytes

    def wake(self, tags: frozenset[SleepTag]) -> int:
        """Map `tags`; the bytes that this took."""
        before = self.num_bytes
        self.asleep -= tags
        return self.num_bytes - before

    def touch(self, tag: SleepTag, what: str) -> None:
        """Somebody reads or writes this part."""
        if tag in self.asleep:
            self._violate(f"{what} while {tag.value} sleeps")
