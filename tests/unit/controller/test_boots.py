"""Two processes under one instance id: a collision while both live, and whoever is left afterwards is the worker."""

import pytest

from rlbus.controller.registry import Collided, Gone, Joined, Member, Registry, Updated
from rlbus.controller.testing import announcement
from rlbus.schemas import Goodbye, Target, WorkerId

pytestmark = pytest.mark.unit

W1 = WorkerId("backend/1")


def member(registry: Registry) -> Member:
    found = registry.get(W1)
    assert found is not None
    return found


def say(registry: Registry, boot_id: str, seq: int, now_s: float) -> list[type]:
    return [type(c) for c in registry.hear(announcement("backend/1", boot_id=boot_id, seq=seq), now_s)]


def bye(registry: Registry, boot_id: str, now_s: float) -> list[type]:
    message = Goodbye(boot_id=boot_id, component="backend", instance_id="1")
    return [type(c) for c in registry.hear(message, now_s)]


def collision() -> Registry:
    """`a` was there first, `b` came, and `a` goes on."""
    registry = Registry("test")
    assert say(registry, "a", 5, 0.0) == [Joined]
    assert say(registry, "b", 1, 1.0) == [Joined]
    assert say(registry, "a", 6, 2.0) == []
    assert say(registry, "a", 7, 3.0) == [Collided]
    return registry


def test_two_that_live_under_one_id_are_shown_and_not_addressed() -> None:
    """One late message is no collision, two are; it is told once."""
    registry = collision()
    assert say(registry, "a", 8, 4.0) == []
    reason = "two processes announce this instance id (boots a and b); stop one"
    assert registry.unadmitted(member(registry)) == reason
    assert registry.addressable(Target()) == ()


def test_when_the_newer_leaves_the_older_is_the_worker_again() -> None:
    """Without a restart; what the one that left still says is late."""
    registry = collision()
    assert bye(registry, "b", 4.0) == [Gone, Joined]
    assert (member(registry).boot_id, registry.unadmitted(member(registry))) == ("a", None)
    assert say(registry, "b", 2, 5.0) == []
    assert say(registry, "a", 8, 5.0) == [Updated]


def test_when_the_older_leaves_the_newer_is_admitted() -> None:
    """Its goodbye ends the collision for good."""
    registry = collision()
    assert bye(registry, "a", 4.0) == [Updated]
    assert (member(registry).boot_id, registry.unadmitted(member(registry))) == ("b", None)
    assert say(registry, "a", 9, 5.0) == []
    assert say(registry, "a", 10, 5.0) == []
    assert registry.unadmitted(member(registry)) is None


def test_when_the_newer_falls_silent_the_older_is_the_worker_again() -> None:
    """A silence of four intervals, as for anybody."""
    registry = collision()
    say(registry, "a", 8, 20.0)
    assert [type(c) for c in registry.tick(21.0)] == [Gone, Joined]
    assert (member(registry).boot_id, registry.unadmitted(member(registry))) == ("a", None)


def test_when_the_older_falls_silent_the_newer_is_admitted() -> None:
    """The collision ends with what made it."""
    registry = collision()
    say(registry, "b", 2, 20.0)
    assert [type(c) for c in registry.tick(22.9)] == []
    assert [type(c) for c in registry.tick(23.0)] == [Updated]
    assert registry.unadmitted(member(registry)) is None


def test_the_first_comes_back_also_when_the_second_left_before_a_collision_was_seen() -> None:
    """The one that still announces itself is the worker."""
    registry = Registry("test")
    say(registry, "a", 5, 0.0)
    say(registry, "b", 1, 1.0)
    assert bye(registry, "b", 2.0) == [Gone]
    assert say(registry, "a", 6, 3.0) == [Joined]
    assert (member(registry).boot_id, registry.unadmitted(member(registry))) == ("a", None)
