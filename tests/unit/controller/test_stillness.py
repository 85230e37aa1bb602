"""Who holds a transfer up."""

import pytest

from rlbus.controller.stillness import Stillness
from rlbus.schemas import WorkerId

pytestmark = pytest.mark.unit

W1, W2 = WorkerId("backend/1"), WorkerId("backend/2")
LIMIT_S = 5.0


def begun() -> Stillness:
    """At time 0; everybody was heard a moment ago."""
    stillness = Stillness(LIMIT_S)
    stillness.begin(0.0)
    for who in (None, W1, W2):
        stillness.heard(who, 0.5)
    return stillness


def test_a_silent_worker_is_lost_when_nothing_moves_and_others_are_heard() -> None:
    """Both limits have to pass: that of the bytes, and its own."""
    stillness = begun()
    stillness.heard(W1, 5.2)
    assert stillness.lost([W1, W2], 5.4) == []
    assert stillness.lost([W1, W2], 5.5) == [W2]


def test_as_long_as_bytes_move_nobody_is_lost() -> None:
    """A blocked agent of a healthy receiver holds nobody up."""
    stillness = begun()
    stillness.heard(None, 9.9)
    stillness.moved(9.0)
    assert stillness.lost([W1, W2], 10.0) == []


def test_when_nobody_is_heard_nobody_is_blamed() -> None:
    """Then it may be our own connection."""
    assert begun().lost([W1, W2], 100.0) == []


def test_the_trainer_alone_is_evidence_enough() -> None:
    """With one worker there is nobody else to compare with."""
    stillness = begun()
    stillness.heard(None, 9.0)
    assert stillness.lost([W1], 10.0) == [W1]


def test_before_a_transfer_begins_nothing_is_still() -> None:
    """Receivers wait for the trainer then."""
    stillness = Stillness(LIMIT_S)
    stillness.heard(None, 99.0)
    assert stillness.lost([W1], 100.0) == []
