"""One deadline for all that a call does."""

import asyncio
from typing import Any

import pytest

from rlbus._deadline import MIN_LEFT_S, Deadline
from rlbus.errors import ConfigError, DeadlineError
from rlbus.testing import run

pytestmark = pytest.mark.unit


def test_what_is_left_is_what_was_given_less_the_time_that_has_passed() -> None:
    """All of it at first, to the digit; never nothing."""

    async def body() -> list[float]:
        await asyncio.sleep(0.7)
        deadline = Deadline("load", 20.1)
        left = [deadline.left_s()]
        for _ in range(2):
            await asyncio.sleep(12.0)
            left.append(deadline.left_s())
        return left

    assert run(body()) == [20.1, 8.1, MIN_LEFT_S]


def test_work_is_cancelled_at_the_deadline_and_the_error_says_what_was_missing() -> None:
    """A time-out of the work's own stays one."""

    async def body() -> None:
        deadline = Deadline("load", 5.0)
        assert await deadline.bound(asyncio.sleep(3.0, "done"), "unused") == "done"

        async def own() -> None:
            raise TimeoutError("of its own")

        with pytest.raises(TimeoutError, match="of its own"):
            await deadline.bound(own(), "unused")
        with pytest.raises(DeadlineError, match="load did not end within 5 s: a file is missing"):
            await deadline.bound(asyncio.sleep(9.0), "a file is missing")
        assert asyncio.get_running_loop().time() == 5.0

    run(body())


@pytest.mark.parametrize("value", ["5", None, True])
def test_seconds_that_are_no_number_are_a_config_error(value: Any) -> None:
    """It names them."""

    async def body() -> None:
        with pytest.raises(ConfigError, match=r"^deadline_s.*: use a number of seconds"):
            Deadline("load", value)

    run(body())
