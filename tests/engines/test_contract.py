"""What every engine has to do with requests, whatever it is: the same checks on fake, torch and vLLM.

Each test begins with a running engine without a group and leaves it so; its weights are complete, of any version.
"""

import asyncio

import pytest

from rlbus.errors import FaultError
from rlbus.schemas import DRAFT_ROUTE, FaultCode, Generation, PauseMode
from rlbus.workers.engines.contract import CaseRunner, Generated, OpenedEngine, Stream, begin, paused, tokens
from rlbus.workers.engines.draft import drafter
from tests.tries import TooLateError, best_of

pytestmark = pytest.mark.engine


async def settle(stream: Stream, settle_s: float) -> int:
    """The number of tokens once no more come, which takes a few looks when the reader has no time to read."""
    for _ in range(10):
        num_tokens = stream.num_tokens
        await asyncio.sleep(settle_s)
        if stream.num_tokens == num_tokens:
            return num_tokens
    raise AssertionError("tokens come during a pause")


async def aborted(stream: Stream) -> Generated:
    """How it ended, which has to be by an abort."""
    ended = await stream.task
    if ended.finish == "length":
        raise TooLateError("it had ended by itself")
    assert ended.finish == "abort"
    return ended


def test_it_says_what_it_is(runner: CaseRunner) -> None:
    """Routes, ranks and backends are there after start, and it runs."""

    async def check(opened: OpenedEngine) -> None:
        info = opened.engine.info
        assert {"pause_generation", "resume_generation", "flush_cache", "abort_request"} <= info.routes
        assert "update_weights_from_distributed" in info.routes
        plan = await opened.plan(1)
        assert info.world_size == plan.spans[0].num_ranks
        assert plan.backend in info.backends
        assert (await opened.engine.observe()).generation is Generation.RUNNING

    runner.run(check)


def test_keep_freezes_requests_and_resume_continues_them(runner: CaseRunner) -> None:
    """SCENARIOS 49: no token while paused; afterwards the same tokens as without a pause."""

    async def check(opened: OpenedEngine) -> None:
        whole = await tokens(opened, runner.case.long_tokens)
        stream = await begin(opened, runner.case.long_tokens)
        await opened.engine.pause(PauseMode.KEEP, True)
        assert (await opened.engine.observe()).generation is Generation.PAUSED
        # What had been generated may still be on its way to its reader when the pause returns; then nothing comes.
        await settle(stream, runner.case.settle_s)
        was_done = stream.task.done()
        await opened.engine.resume()
        assert await stream.task == Generated(whole, "length")
        if was_done:
            raise TooLateError("it had ended by itself")

    best_of(lambda: runner.run(check))


def test_wait_lets_requests_finish_first(runner: CaseRunner) -> None:
    """SCENARIOS 49: the pause returns when the last one has ended by itself."""

    async def check(opened: OpenedEngine) -> None:
        stream = await begin(opened, runner.case.long_tokens)
        async with paused(opened, PauseMode.WAIT):
            assert (await stream.task).finish == "length"
            assert (await opened.engine.observe()).generation is Generation.PAUSED

    runner.run(check)


def test_abort_ends_requests_with_what_they_have(runner: CaseRunner) -> None:
    """SCENARIOS 49: they end as aborted, with the tokens so far, and are counted if the engine can."""

    async def check(opened: OpenedEngine) -> None:
        stream = await begin(opened, runner.case.long_tokens)
        data = await opened.engine.pause(PauseMode.ABORT, True)
        await stream.task
        await opened.engine.resume()
        ended = await aborted(stream)
        assert 0 < len(ended.tokens) < runner.case.long_tokens
        assert data.num_aborted == (1 if runner.case.counts_requests else data.num_aborted)

    best_of(lambda: runner.run(check))


def test_pause_and_resume_are_idempotent(runner: CaseRunner) -> None:
    """In every mode, and an abort on top of a keep ends what was held."""

    async def check(opened: OpenedEngine) -> None:
        await opened.engine.resume()
        stream = await begin(opened, runner.case.long_tokens)
        await opened.engine.pause(PauseMode.KEEP, True)
        await opened.engine.pause(PauseMode.KEEP, True)
        was_done = stream.task.done()
        await opened.engine.pause(PauseMode.ABORT, True)
        await stream.task
        await opened.engine.pause(PauseMode.WAIT, True)
        assert (await opened.engine.observe()).generation is Generation.PAUSED
        await opened.engine.resume()
        await opened.engine.resume()
        assert (await opened.engine.observe()).generation is Generation.RUNNING
        assert len(await tokens(opened)) == 12
        await aborted(stream)
        assert not was_done

    best_of(lambda: runner.run(check))


def test_request_that_comes_during_a_pause_runs_after_it(runner: CaseRunner) -> None:
    """SCENARIOS 27: it is taken, makes no token, and isn't lost."""

    async def check(opened: OpenedEngine) -> None:
        expected = await tokens(opened)
        async with paused(opened):
            late = asyncio.ensure_future(tokens(opened))
            await asyncio.sleep(runner.case.settle_s)
            assert not late.done()
        assert await late == expected

    runner.run(check)


def test_flush_leaves_a_paused_and_a_running_engine_able_to_generate(runner: CaseRunner) -> None:
    """Caches change the speed, never the tokens."""

    async def check(opened: OpenedEngine) -> None:
        expected = await tokens(opened)
        async with paused(opened):
            await opened.engine.flush_cache()
        assert await tokens(opened) == expected
        await opened.engine.flush_cache()
        assert await tokens(opened) == expected

    runner.run(check)


def test_abort_ends_the_named_requests_only(runner: CaseRunner) -> None:
    """Unknown ids are not an error and not counted; None means all."""

    async def check(opened: OpenedEngine) -> None:
        one = await begin(opened, runner.case.long_tokens)
        two = await begin(opened, runner.case.long_tokens)
        numbers = [await opened.engine.abort((one.request_id, "nobody"))]
        await one.task
        was_done = two.task.done()
        numbers.append(await opened.engine.abort(None))
        await two.task
        numbers.append(await opened.engine.abort(None))
        assert (await opened.engine.observe()).generation is Generation.RUNNING
        await aborted(one)
        await aborted(two)
        assert not was_done
        assert numbers == ([1, 1, 0] if runner.case.counts_requests else [None] * 3)

    best_of(lambda: runner.run(check))


def test_abort_and_observe_work_beside_a_waiting_pause(runner: CaseRunner) -> None:
    """Aborting what it waits for lets the pause return."""

    async def check(opened: OpenedEngine) -> None:
        stream = await begin(opened, runner.case.long_tokens)
        pausing = asyncio.ensure_future(opened.engine.pause(PauseMode.WAIT, True))
        await asyncio.sleep(0)
        await opened.engine.observe()
        await opened.engine.abort((stream.request_id,))
        await pausing
        await opened.engine.resume()
        # The pause, and so whoever waits for it, would last as long as the request.
        await aborted(stream)

    best_of(lambda: runner.run(check))


def test_engine_without_a_draft_says_so(runner: CaseRunner) -> None:
    """It lists no route, and is no such engine whatever it has beside."""

    async def check(opened: OpenedEngine) -> None:
        assert DRAFT_ROUTE not in opened.engine.info.routes
        with pytest.raises(FaultError) as caught:
            drafter(opened.engine)
        assert caught.value.code is FaultCode.NO_ROUTE

    runner.run(check)
