"""What has to be seen or over within seconds, on a machine where any process may stand still for seconds.

Such a test plays its scene again if the machine came between, and fails when that is so every time. Only being late is
forgiven: whatever else goes wrong fails at once.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

# A fault in the code is late in each of them.
TRIES = 4


class TooLateError(AssertionError):
    """A bound was missed, or what was to be met was over before; nothing else was wrong."""


def in_time(what: str, took_s: float, bound_s: float) -> None:
    """Raises TooLateError if it took as long as the bound, or longer."""
    if took_s >= bound_s:
        raise TooLateError(f"{what} took {took_s:.1f} s, not less than {bound_s:g} s")


def best_of(play: Callable[[], T], tries: int = TRIES) -> T:
    """Play it until it is in time, `tries` times at most."""
    for _ in range(tries - 1):
        try:
            return play()
        except TooLateError:
            continue
    return play()


async def best_of_async(play: Callable[[], Awaitable[T]], tries: int = TRIES) -> T:
    """The same of a coroutine. Cancel: as that one."""
    for _ in range(tries - 1):
        try:
            return await play()
        except TooLateError:
            continue
    return await play()
