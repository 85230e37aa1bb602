"""Durations as text."""

import pytest

from rlbus._seconds import read_seconds

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("text", "seconds"), [("5", 5.0), ("0.5", 0.5), ("007", 7.0), ("86400", 86400.0)])
def test_plain_digits_are_seconds(text: str, seconds: float) -> None:
    """With a point or without."""
    assert read_seconds(text, 86400.0) == seconds


@pytest.mark.parametrize(
    "text",
    [
        *("", "1_0", "nan", "inf", "Infinity", " 1", "1 ", "1\n", "1e3", "+1", "-1", ".5", "5.", "0", "0.0", "0x10"),
        *("\u0661", "1.\u0661", "86400.1", "9" * 33, "1,5", "soon"),
    ],
)
def test_anything_else_is_no_duration(text: str) -> None:
    """Neither what only Python reads, nor what is out of bounds."""
    assert read_seconds(text, 86400.0) is None
