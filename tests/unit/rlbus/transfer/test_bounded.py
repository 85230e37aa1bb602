"""Blocking work is awaited within a bound, and left behind beyond it."""

import asyncio
import threading
import weakref

import pytest

from rlbus._virtual import VirtualTimeLoop
from rlbus.errors import DeadlineError, TransferError
from rlbus.transfer.bounded import GiveUp, call_bounded, run_in_thread, start_in_thread

pytestmark = pytest.mark.unit


def test_a_result_and_an_error_come_through() -> None:
    """As they are."""
    assert call_bounded(lambda: 7, operation="x", limit_s=60, give_up=GiveUp(), discard=lambda _: None) == 7
    with pytest.raises(ZeroDivisionError):
        call_bounded(lambda: 1 // 0, operation="x", limit_s=60, give_up=GiveUp(), discard=lambda _: None)


def test_work_that_is_late_is_left_behind_and_its_result_discarded() -> None:
    """The caller gets an error that names the operation and the limit."""
    gate, discarded, late = threading.Event(), threading.Event(), GiveUp()
    results: list[str] = []

    def work() -> str:
        gate.wait(60)
        return "group"

    def discard(result: str) -> None:
        results.append(result)
        discarded.set()

    with pytest.raises(DeadlineError, match="join did not end within") as caught:
        call_bounded(work, operation="join", limit_s=0.05, give_up=late, discard=discard)
    assert caught.value.limit_s == 0.05
    assert late.reason == "left behind"
    gate.set()
    assert discarded.wait(60)
    assert results == ["group"]


def test_giving_up_ends_the_wait_with_its_first_reason() -> None:
    """From another thread."""
    gate, give_up = threading.Event(), GiveUp()
    give_up.check("join")

    def work() -> None:
        give_up.set("the op was cancelled")
        give_up.set("something later")
        gate.wait(60)

    with pytest.raises(TransferError, match="join: given up: the op was cancelled"):
        call_bounded(work, operation="join", limit_s=60, give_up=give_up, discard=lambda _: None)
    gate.set()


def test_a_coroutine_awaits_a_thread_and_can_leave_it() -> None:
    """Results and errors come through; a cancelled caller doesn't wait."""

    async def scenario() -> None:
        loop_thread = threading.current_thread()
        assert await run_in_thread(lambda: threading.current_thread() is loop_thread, name="x") is False
        with pytest.raises(ZeroDivisionError):
            await run_in_thread(lambda: 1 // 0, name="x")
        gate = threading.Event()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await run_in_thread(lambda: gate.wait(60), name="x")
        gate.set()

    asyncio.run(scenario())


def test_work_that_has_ended_holds_nothing_any_more() -> None:
    """Though its thread may take a moment longer: what the work was about goes with its owner."""

    class Owner:
        """Something that cleans up when nobody has it."""

    async def main() -> None:
        for _ in range(200):
            owner = Owner()
            gone = weakref.ref(owner)
            assert await run_in_thread(lambda owner=owner: owner is not None, name="test")  # type: ignore[misc]
            del owner
            assert gone() is None

    asyncio.run(main())


def test_work_for_nobody_holds_nobody_up_and_what_it_raises_is_dropped() -> None:
    """On a simulated loop it is done at once, so that the same seed is the same run."""
    gate, done = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(60)
        done.set()
        raise OSError("gone")

    async def main() -> bool:
        start_in_thread(work, name="x")
        return done.is_set()

    assert asyncio.run(main()) is False
    gate.set()
    assert done.wait(60)
    done.clear()
    loop = VirtualTimeLoop()
    loop.is_without_threads = True
    assert loop.run_until_complete(main()) is True
    loop.close()
