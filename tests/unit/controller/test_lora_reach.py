"""Whom an adapter is meant for: exact for every sum and difference of what ops can name."""

import itertools
from collections.abc import Callable

import msgspec
import pytest

from rlbus.controller.lora_book import should_have
from rlbus.controller.lora_reach import NOBODY, Reach, reach, reach_of, reaching
from rlbus.schemas import FleetLora, FolderSource, Target, WorkerId

pytestmark = pytest.mark.unit

# Also one of a component that nobody names.
WORKERS = tuple(WorkerId(w) for w in ("a/1", "a/2", "b/1", "b/2", "c/1"))
TARGETS = (
    Target(),
    Target(components=("a",)),
    Target(components=("a", "b")),
    Target(workers=(WorkerId("a/1"),)),
    Target(workers=(WorkerId("a/1"), WorkerId("b/1"))),
    Target(components=("b",), workers=(WorkerId("a/1"),)),
)
LORA = FleetLora(name="policy", revision=1, checksum="a" * 64, source=FolderSource(path="/a"), since=1.0, op_id="op")


def meant(whom: Reach) -> set[WorkerId]:
    return {w for w in WORKERS if w in whom}


Op = tuple[Callable[[Reach, Reach], Reach], Callable[[set[WorkerId], set[WorkerId]], set[WorkerId]]]
OPS: tuple[Op, ...] = ((Reach.__and__, set.__and__), (Reach.__or__, set.__or__), (Reach.__sub__, set.__sub__))


def test_sums_and_differences_mean_whom_they_say() -> None:
    """Of any three targets; the wire keeps them."""
    for targets in itertools.product(TARGETS, repeat=3):
        first, second, third = map(reach_of, targets)
        for (one, plain_one), (two, plain_two) in itertools.product(OPS, repeat=2):
            whom = two(one(first, second), third)
            assert meant(whom) == plain_two(plain_one(meant(first), meant(second)), meant(third))
            assert reach(reaching(LORA, whom)) == whom
            assert meant(whom) == {w for w in WORKERS if should_have(reaching(LORA, whom), w)}
            assert bool(whom) is (whom != NOBODY)


def test_who_is_taken_away_and_given_back_is_meant_as_before() -> None:
    """One way to say it, so that what changes nothing is known to."""
    for target in TARGETS[1:]:
        assert reach_of(Target()) - reach_of(target) | reach_of(target) == reach_of(Target())
        assert reach_of(target) - reach_of(Target()) == NOBODY


def test_what_an_older_controller_wrote_down_means_the_same() -> None:
    """A worker and its component, both taken away."""
    old = msgspec.structs.replace(LORA, not_on=("a", "a/1", "b/1"))
    assert meant(reach(old)) == {WorkerId("b/2"), WorkerId("c/1")}
    assert [w for w in WORKERS if should_have(old, w)] == ["b/2", "c/1"]
