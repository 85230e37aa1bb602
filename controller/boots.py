"""Boots of a worker that were replaced: late words of the dead are told from a second process that still lives. Pure.

Two processes may announce one instance id by mistake. The later one replaces the earlier, as after a restart; if the
earlier goes on announcing, both are shown as a collision, and whoever is left when one leaves or falls silent is the
worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlbus.schemas import Announcement

# Earlier boots of a worker that are remembered, so that their late messages are known as such.
MAX_OLD_BOOTS = 8
# New announcements of a boot after it was replaced from which on it counts as living; one may just have been under way.
RIVAL_MESSAGES = 2


@dataclass(frozen=True, slots=True)
class OldBoot:
    """A boot that was replaced, its highest `seq`, and what it announced since. `has_left`: it said goodbye."""

    boot_id: str
    seq: int
    has_left: bool = False
    num_heard: int = 0
    heard_at_s: float = 0.0
    said: Announcement | None = None

    @property
    def rival(self) -> Announcement | None:
        """What it said last, if it still lives beside its successor."""
        return self.said if self.num_heard >= RIVAL_MESSAGES and not self.has_left else None


def find(boots: Sequence[OldBoot], boot_id: str) -> OldBoot | None:
    """The boot of this id."""
    return next((boot for boot in boots if boot.boot_id == boot_id), None)


def rival_of(boots: Sequence[OldBoot]) -> OldBoot | None:
    """The boot replaced last that still lives."""
    return next((boot for boot in reversed(boots) if boot.rival is not None), None)


def heard(boot: OldBoot, message: Announcement, now_s: float) -> OldBoot:
    """It announced itself anew."""
    return replace(boot, seq=message.seq, num_heard=boot.num_heard + 1, heard_at_s=now_s, said=message)


def silent(boot: OldBoot, *, has_left: bool = False) -> OldBoot:
    """It left or fell silent; one that only fell silent may be heard again."""
    return replace(boot, has_left=boot.has_left or has_left, num_heard=0, said=None)


def put(boots: Sequence[OldBoot], boot: OldBoot) -> tuple[OldBoot, ...]:
    """`boots` with this one in its place, or added as the newest."""
    if find(boots, boot.boot_id) is None:
        return (*boots, boot)[-MAX_OLD_BOOTS:]
    return tuple(boot if old.boot_id == boot.boot_id else old for old in boots)


def without(boots: Sequence[OldBoot], boot_id: str) -> tuple[OldBoot, ...]:
    """`boots` without the one of this id."""
    return tuple(boot for boot in boots if boot.boot_id != boot_id)
