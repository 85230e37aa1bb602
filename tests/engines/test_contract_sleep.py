"""What an engine that can sleep has to do beyond the rest; run where the routes are listed.

Each test begins with a running engine without a group and leaves it so; its weights are complete, of any version.
"""

import asyncio

import pytest

from rlbus.errors import FaultError
from rlbus.schemas import Generation, PauseMode, SleepTag
from rlbus.workers.engines.contract import (
    A,
    B,
    CaseRunner,
    Generated,
    OpenedEngine,
    begin,
    grouped,
    tokens,
    transfer,
    update,
)
from rlbus.workers.engines.sleep import SLEEP_ROUTES, SleepEngine, in_order, sleeper
from tests.tries import TooLateError, best_of

pytestmark = pytest.mark.engine

BOTH = frozenset(SleepTag)
WEIGHTS, KV = frozenset({SleepTag.WEIGHTS}), frozenset({SleepTag.KV_CACHE})


@pytest.fixture(autouse=True)
def _only_engines_that_sleep(runner: CaseRunner) -> None:
    async def look(opened: OpenedEngine) -> None:
        routes = opened.engine.info.routes & SLEEP_ROUTES
        assert routes in (frozenset(), SLEEP_ROUTES), "both routes or none"
        if not routes:
            with pytest.raises(FaultError):
                sleeper(opened.engine)
            pytest.skip("this engine doesn't list the routes")

    runner.run(look)


def sleeping(opened: OpenedEngine) -> SleepEngine:
    engine = sleeper(opened.engine)
    assert engine.sleep_tags == BOTH
    return engine


async def awake(opened: OpenedEngine) -> None:
    """Wake everything, and run."""
    await sleeping(opened).wake_up(BOTH)
    await opened.engine.resume()


def test_it_frees_its_memory_and_is_what_it_was_after_the_wake(runner: CaseRunner) -> None:
    """Level 1: the same tokens as before, without an update; the same bytes come back as were freed."""

    async def check(opened: OpenedEngine) -> None:
        expected = await tokens(opened)
        slept = await sleeping(opened).sleep(BOTH, 1, PauseMode.ABORT)
        observed = await opened.engine.observe()
        assert (observed.asleep, observed.generation) == (BOTH, Generation.PAUSED)
        assert slept.asleep == in_order(BOTH)
        assert slept.num_bytes is None or slept.num_bytes > 0
        woken = await sleeping(opened).wake_up(BOTH)
        assert (woken.asleep, woken.num_bytes) == ((), slept.num_bytes)
        assert (await opened.engine.observe()).asleep == frozenset()
        await opened.engine.resume()
        assert await tokens(opened) == expected

    runner.run(check)


def test_no_step_runs_from_sleep_to_resume(runner: CaseRunner) -> None:
    """A request that comes meanwhile waits: while all sleeps, after each partial wake, and after the last."""

    async def check(opened: OpenedEngine) -> None:
        expected = await tokens(opened)
        for first in (WEIGHTS, KV):
            await sleeping(opened).sleep(BOTH, 1, PauseMode.ABORT)
            late = asyncio.ensure_future(tokens(opened))
            for tags in (frozenset[SleepTag](), first, BOTH):
                await sleeping(opened).wake_up(tags)
                await asyncio.sleep(runner.case.settle_s)
                assert not late.done()
                assert (await opened.engine.observe()).generation is Generation.PAUSED
            await opened.engine.resume()
            assert await late == expected

    runner.run(check)


def test_what_is_kept_over_a_sleep_goes_on(runner: CaseRunner) -> None:
    """The KV entries are gone; the tokens are those of a run without a sleep."""

    async def check(opened: OpenedEngine) -> None:
        whole = await tokens(opened, runner.case.long_tokens)
        stream = await begin(opened, runner.case.long_tokens)
        await sleeping(opened).sleep(BOTH, 1, PauseMode.KEEP)
        was_done = stream.task.done()
        await awake(opened)
        assert await stream.task == Generated(whole, "length")
        if was_done:
            raise TooLateError("it had ended by itself")

    best_of(lambda: runner.run(check))


def test_requests_in_flight_end_or_are_waited_for(runner: CaseRunner) -> None:
    """As in a pause of that mode."""

    async def check(opened: OpenedEngine) -> None:
        stream = await begin(opened, runner.case.long_tokens)
        slept = await sleeping(opened).sleep(BOTH, 1, PauseMode.ABORT)
        ended = await stream.task
        await awake(opened)
        if ended.finish == "length":
            raise TooLateError("it had ended by itself")
        assert ended.finish == "abort"
        assert slept.num_aborted == (1 if runner.case.counts_requests else slept.num_aborted)
        stream = await begin(opened, runner.case.long_tokens)
        await sleeping(opened).sleep(BOTH, 1, PauseMode.WAIT)
        assert (await stream.task).finish == "length"
        await awake(opened)

    best_of(lambda: runner.run(check))


def test_each_tag_sleeps_and_wakes_once(runner: CaseRunner) -> None:
    """In whichever order; what is awake isn't woken, what sleeps already costs nothing."""

    async def check(opened: OpenedEngine) -> None:
        expected = await tokens(opened)
        engine = sleeping(opened)
        await engine.wake_up(BOTH)
        first = await engine.sleep(KV, 1, PauseMode.ABORT)
        assert first.asleep == in_order(KV)
        both = await engine.sleep(WEIGHTS, 1, PauseMode.ABORT)
        assert both.asleep == in_order(BOTH)
        assert (await engine.wake_up(WEIGHTS)).asleep == in_order(KV)
        again = await engine.wake_up(WEIGHTS)
        assert (again.asleep, again.num_bytes or 0) == (in_order(KV), 0)
        await engine.wake_up(KV)
        await opened.engine.resume()
        assert await tokens(opened) == expected

    runner.run(check)


def test_pause_flush_and_abort_work_while_it_sleeps(runner: CaseRunner) -> None:
    """They have nothing to do, and say so."""

    async def check(opened: OpenedEngine) -> None:
        expected = await tokens(opened)
        await sleeping(opened).sleep(BOTH, 1, PauseMode.ABORT)
        await opened.engine.pause(PauseMode.KEEP, True)
        await opened.engine.flush_cache()
        await opened.engine.leave_group()
        await opened.engine.abort_update()
        assert await opened.engine.abort(None) == 0
        await awake(opened)
        assert await tokens(opened) == expected

    runner.run(check)


def test_an_update_comes_to_awake_weights_while_the_cache_sleeps(runner: CaseRunner) -> None:
    """Also after the weights were discarded: it generates what the new ones say."""

    async def check(opened: OpenedEngine) -> None:
        await update(opened, B)
        expected = await tokens(opened)
        for level in (1, 2):
            await update(opened, A)
            await sleeping(opened).sleep(BOTH, level, PauseMode.ABORT)
            await sleeping(opened).wake_up(WEIGHTS)
            async with grouped(opened) as epoch:
                received, sent, _ = await transfer(opened, epoch, B)
                assert received.sums == sent
                await opened.engine.finish_update(B)
            await opened.engine.flush_cache()
            await awake(opened)
            assert await tokens(opened) == expected

    runner.run(check)
