"""When a call has to have ended, counted from its start: what it does one after the other shares the time."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from rlbus.errors import ConfigError, DeadlineError

T = TypeVar("T")

# What is begun at the very deadline is still given this long, so that it is answered rather than expired.
MIN_LEFT_S = 0.1


def check_seconds(name: str, value: object) -> None:
    """Raises: ConfigError: no number, which nobody could wait for, nor read in a message."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(name, value, "use a number of seconds")


class Deadline:
    """`limit_s` from now, for `operation`; made on the running loop. `until_s` is when, in loop time.

    Raises: ConfigError: `limit_s` is no number.
    """

    def __init__(self, operation: str, limit_s: float) -> None:
        check_seconds("deadline_s", limit_s)
        self.operation = operation
        self.limit_s = limit_s
        self.until_s = asyncio.get_running_loop().time() + limit_s

    def left_s(self) -> float:
        """What is left, at least MIN_LEFT_S: of `limit_s` itself, so that one that is whole stays what was given."""
        passed_s = asyncio.get_running_loop().time() - (self.until_s - self.limit_s)
        return max(MIN_LEFT_S, round(self.limit_s - passed_s, 3))

    async def bound(self, work: Awaitable[T], problem: str) -> T:
        """`work`, cancelled at the deadline; `problem` is what was still missing.

        Raises: DeadlineError; what `work` raises. Cancel: cancels `work`.
        """
        limit = asyncio.timeout_at(self.until_s)
        try:
            async with limit:
                return await work
        except TimeoutError as exc:
            if not limit.expired():  # one of its own
                raise
            raise DeadlineError(self.operation, self.limit_s, problem) from exc
