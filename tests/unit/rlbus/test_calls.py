"""The calls that run on what can be closed: each is ended and undone first, and says that it was closed."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rlbus._calls import Calls, one_call
from rlbus.errors import ClosedError
from rlbus.testing import run

pytestmark = pytest.mark.unit

UNDO_S = 3.0


class Owner:
    """Has calls that run for long, and take their time to be undone."""

    def __init__(self) -> None:
        self._calls = Calls("owner")
        self.log: list[str] = []

    @one_call
    async def work(self) -> None:
        """Runs for long."""
        self.log.append("begun")
        try:
            await asyncio.sleep(100.0)
        except asyncio.CancelledError as exc:
            await asyncio.sleep(UNDO_S)
            self.log.append("undone")
            exc.add_note("it is undone")
            raise

    @one_call
    async def outer(self) -> None:
        """A call within a call."""
        await self.work()

    async def aclose(self) -> None:
        """Closes it."""
        await self._calls.aclose()
        self.log.append("closed")


def play(scenario: Callable[[Owner, "asyncio.Task[None]"], Awaitable[None]]) -> list[str]:
    """Run `scenario` beside a call that runs for a second already; what happened."""
    owner = Owner()

    async def body() -> None:
        task = asyncio.create_task(owner.outer())
        await asyncio.sleep(1.0)
        await scenario(owner, task)

    run(body())
    return owner.log


def test_closing_ends_a_call_waits_for_its_undoing_and_the_call_says_closed() -> None:
    """With the notes of what became of it; whoever made it is not cancelled, and may close it, too."""

    async def scenario(owner: Owner, task: "asyncio.Task[None]") -> None:
        async def caller() -> None:
            with pytest.raises(ClosedError, match="owner is closed") as caught:
                await owner.work()
            assert caught.value.__notes__ == ["it is undone"]
            await owner.aclose()

        other = asyncio.create_task(caller())
        await asyncio.sleep(1.0)
        await owner.aclose()
        assert asyncio.get_running_loop().time() == 2.0 + UNDO_S
        await other
        assert other.cancelling() == 0
        with pytest.raises(ClosedError):
            await task

    log = play(scenario)
    assert log[:5] == ["begun", "begun", "undone", "undone", "closed"]


def test_no_call_begins_once_closing_has_begun() -> None:
    """Also not while another is still undone."""

    async def scenario(owner: Owner, task: "asyncio.Task[None]") -> None:
        closing = asyncio.create_task(owner.aclose())
        await asyncio.sleep(1.0)
        with pytest.raises(ClosedError):
            await owner.work()
        await closing
        with pytest.raises(ClosedError):
            await task

    assert play(scenario) == ["begun", "undone", "closed"]


def test_a_call_that_was_cancelled_before_is_undone_to_its_end_and_stays_cancelled() -> None:
    """Closing only waits for it."""

    async def scenario(owner: Owner, task: "asyncio.Task[None]") -> None:
        task.cancel()
        await asyncio.sleep(1.0)
        await owner.aclose()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert play(scenario) == ["begun", "undone", "closed"]


def test_whoever_cancels_a_call_that_closing_ends_gets_a_cancelled_one() -> None:
    """As with asyncio.timeout: the cancellation from outside goes first."""

    async def scenario(owner: Owner, task: "asyncio.Task[None]") -> None:
        closing = asyncio.create_task(owner.aclose())
        await asyncio.sleep(1.0)
        task.cancel()
        await closing
        with pytest.raises(asyncio.CancelledError):
            await task

    assert play(scenario) == ["begun", "closed"]


def test_closing_twice_at_once_waits_twice_and_ends_a_call_once() -> None:
    """The second cancel would cut the undoing short."""

    async def scenario(owner: Owner, task: "asyncio.Task[None]") -> None:
        await asyncio.gather(owner.aclose(), owner.aclose())
        with pytest.raises(ClosedError):
            await task

    assert play(scenario) == ["begun", "undone", "closed", "closed"]
