"""Whether the core of a server answers."""

import asyncio

import pytest

from rlbus.testing import run
from rlbus.workers.supervisor.beats import BEAT_S
from rlbus.workers.supervisor.hang import LOOK_S, HangLimits, Kind, Seen, Watch
from rlbus.workers.vllm_server.probe import ASK_EVERY_S, PATIENCE_S, Probe

pytestmark = pytest.mark.unit


class Core:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.num_asked = 0
        self.error: Exception | None = None

    async def observe(self) -> str:
        self.num_asked += 1
        await self.is_free.wait()
        if self.error is not None:
            raise self.error
        return "fine"


def test_core_that_keeps_silent_is_asked_once_and_said_not_to_answer_until_it_does() -> None:
    """Questions that nobody answers must not pile up in front of it."""

    async def main() -> None:
        core = Core()
        probe = Probe(core)
        asking = asyncio.ensure_future(probe.run())
        await asyncio.sleep(10.0)
        assert probe.answers
        core.is_free.clear()
        await asyncio.sleep(ASK_EVERY_S)
        num_asked = core.num_asked
        await asyncio.sleep(PATIENCE_S + 0.1)
        assert not probe.answers
        await asyncio.sleep(100.0)
        assert core.num_asked <= num_asked + 1
        core.is_free.set()
        await asyncio.sleep(0.1)
        assert probe.answers
        asking.cancel()

    run(main())


def test_error_is_an_answer() -> None:
    """What it means is for those who watch for death."""

    async def main() -> None:
        core = Core()
        core.error = RuntimeError("no")
        probe = Probe(core)
        asking = asyncio.ensure_future(probe.run())
        await asyncio.sleep(10.0)
        assert probe.answers
        assert core.num_asked > 10
        asking.cancel()

    run(main())


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
def test_core_that_hangs_is_named_within_2_s(after_s: float) -> None:
    """Issue 3, 1.7: from its last answer over the beats of its server to the words of the supervisor."""

    async def main() -> float:
        core, heard_s = Core(), [0.0]
        loop = asyncio.get_running_loop()
        probe = Probe(core)
        asking = asyncio.ensure_future(probe.run())
        watch = Watch(HangLimits(), loop.time())

        async def beat() -> None:
            while True:
                if probe.answers:
                    heard_s[0] = loop.time()
                await asyncio.sleep(BEAT_S)

        beating = asyncio.ensure_future(beat())
        loop.call_later(10.0 + after_s, core.is_free.clear)
        while True:
            await asyncio.sleep(LOOK_S)
            verdict = watch.look(Seen(loop.time(), heard_s[0], is_stopped=False, is_runnable=False, cpu_s=0.0))
            if verdict is not None:
                asking.cancel()
                beating.cancel()
                assert verdict.kind is Kind.SILENT
                return loop.time() - 10.0 - after_s

    assert run(main()) < 2.0
