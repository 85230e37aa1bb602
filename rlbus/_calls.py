"""The calls that run on what can be closed: closing it ends them first, while they can still take back what they began.

Whoever waits for such a call gets ClosedError, as from a call that comes later. Invariant: after `aclose` has begun
none begins, and when it has returned none runs.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from rlbus.errors import ClosedError

# How soon a call is looked at again whose task was being cancelled, perhaps by a time limit within it.
LOOK_AGAIN_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    """One that runs. `num_cancels`: how often its task had been cancelled before."""

    task: asyncio.Task[Any]
    num_cancels: int
    ended: asyncio.Future[None]
    is_ending: bool = False


class Calls:
    """Those of one owner; `what` names it in errors."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._running: dict[asyncio.Task[Any], _Call] = {}
        self._is_closed = False

    @contextmanager
    def one(self) -> Iterator[None]:
        """While inside, this task makes a call; another inside of it is a part of it.

        Raises: ClosedError: closed before, or meanwhile; then with the notes of the cancellation that ended it.
        """
        task = asyncio.current_task()
        assert task is not None
        if task in self._running:
            yield
            return
        if self._is_closed:
            raise ClosedError(self._what)
        call = _Call(task, task.cancelling(), asyncio.get_running_loop().create_future())
        self._running[task] = call
        try:
            yield
        except asyncio.CancelledError as exc:
            # As asyncio.timeout: whoever else has cancelled the task goes first.
            if not call.is_ending or task.cancelling() > call.num_cancels + 1:
                raise
            closed = ClosedError(self._what)
            for note in getattr(exc, "__notes__", ()):
                closed.add_note(note)
            raise closed from exc
        finally:
            if call.is_ending:
                task.uncancel()
            del self._running[task]
            call.ended.set_result(None)

    async def aclose(self) -> None:
        """Cancel what runs, and wait until it has undone what it began. Idempotent. Cancel: it still ends."""
        self._is_closed = True
        while self._running:
            for call in self._running.values():
                # One that somebody else cancels is undoing already, which a second cancel would cut short.
                if call.task.cancelling() == call.num_cancels:
                    call.is_ending = True
                    call.task.cancel()
            await asyncio.wait([call.ended for call in self._running.values()], timeout=LOOK_AGAIN_S)


class _Owner(Protocol):
    _calls: Calls


OwnerT = TypeVar("OwnerT", bound=_Owner)


def one_call(
    method: Callable[Concatenate[OwnerT, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[OwnerT, P], Coroutine[Any, Any, T]]:
    """A coroutine method that is one of its owner's `_calls`."""

    @functools.wraps(method)
    async def within(self: OwnerT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._calls.one():
            return await method(self, *args, **kwargs)

    return within
