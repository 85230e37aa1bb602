"""Pauses of a server that has only pauses: nothing comes between another's pause and resume, in virtual time."""

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest

pytest.importorskip("grpc")

from rlbus.errors import EngineError
from rlbus.schemas import FaultCode, PauseMode
from rlbus.testing import run
from rlbus.workers.vllm_grpc.control import Control
from rlbus.workers.vllm_grpc.pausing import Pausing
from rlbus.workers.vllm_server.calls import EngineCalls

pytestmark = pytest.mark.unit


class Server:
    """Pauses as vllm-rs does: one pause or resume at a time, and a cancelled one lets the next in."""

    errored = False

    def __init__(self, *, is_busy: bool = False) -> None:
        self.is_paused_now = False
        # Requests that a waiting pause waits for.
        self.is_busy = is_busy
        self.log: list[str] = []
        self.fails: set[str] = set()
        self._lock = asyncio.Lock()

    async def is_paused(self, limit_s: float = 1.0) -> bool:
        return self.is_paused_now

    async def pause(self, mode: PauseMode, clear_cache: bool, limit_s: float | None = None) -> None:
        async with self._lock:
            self.log.append(f"pause {mode.value}{' clear' if clear_cache else ''}")
            if mode.value in self.fails:
                raise RuntimeError("boom")
            self.is_paused_now = True
            while mode is PauseMode.WAIT and self.is_busy:  # noqa: ASYNC110 - the clock is virtual
                await asyncio.sleep(1.0)
            if mode is PauseMode.ABORT:
                self.is_busy = False
            await asyncio.sleep(0.01)

    async def resume(self) -> None:
        async with self._lock:
            self.log.append("resume")
            # A call that is cancelled on its way isn't made.
            await asyncio.sleep(0.01)
            self.is_paused_now = False


def of(server: Server) -> Pausing:
    return Pausing(cast(Control, server), EngineCalls(server))


def do(check: Coroutine[Any, Any, None]) -> None:
    run(check)


@pytest.mark.parametrize("was_paused", [False, True])
def test_flush_and_end_all_leave_the_engine_as_it_was(was_paused: bool) -> None:
    """A running one goes on, a paused one stays so; only a flush empties caches."""

    async def check() -> None:
        server = Server()
        pausing = of(server)
        if was_paused:
            await pausing.pause(PauseMode.KEEP, False)
            server.log.clear()
        await pausing.flush()
        await pausing.abort_all()
        resume = [] if was_paused else ["resume"]
        assert server.log == ["pause keep clear", *resume, "pause abort", *resume]
        assert server.is_paused_now is was_paused

    do(check())


def test_pause_that_comes_during_an_end_all_holds() -> None:
    """The end-all saw a running engine, and must not resume it when somebody has paused it meanwhile."""

    async def check() -> None:
        server = Server()
        pausing = of(server)
        ending = asyncio.ensure_future(pausing.abort_all())
        await asyncio.sleep(0.005)
        await pausing.pause(PauseMode.KEEP, True)
        await ending
        assert server.is_paused_now

    do(check())


def test_end_all_releases_a_pause_that_waits() -> None:
    """It ends what the pause waits for; the pause then stands."""

    async def check() -> None:
        server = Server(is_busy=True)
        pausing = of(server)
        waiting = asyncio.ensure_future(pausing.pause(PauseMode.WAIT, True))
        await asyncio.sleep(3.0)
        assert not waiting.done()
        await pausing.abort_all()
        await asyncio.wait_for(waiting, 1.0)
        assert server.log == ["pause wait clear", "pause abort clear"]
        assert server.is_paused_now

    do(check())


def test_pause_waits_until_all_have_finished() -> None:
    """Without anybody's help."""

    async def check() -> None:
        server = Server(is_busy=True)
        pausing = of(server)
        waiting = asyncio.ensure_future(pausing.pause(PauseMode.WAIT, False))
        await asyncio.sleep(3.0)
        server.is_busy = False
        await asyncio.wait_for(waiting, 2.0)
        assert server.log == ["pause wait"]

    do(check())


def test_resume_by_somebody_else_during_a_wait_is_told() -> None:
    """The pause returns all the same, and the engine runs."""

    async def check() -> None:
        server = Server(is_busy=True)
        pausing = of(server)
        waiting = asyncio.ensure_future(pausing.pause(PauseMode.WAIT, False))
        await asyncio.sleep(1.5)
        server.is_busy = False
        # Behind our back, and behind the server's lock, as another client of the engine.
        asyncio.get_running_loop().call_later(0.509, lambda: setattr(server, "is_paused_now", False))
        with pytest.raises(EngineError, match="somebody else"):
            await waiting

    do(check())


def test_failed_flush_resumes_what_ran() -> None:
    """An engine that could be asked to stand still, and failed in it, isn't left so."""

    async def check() -> None:
        server = Server()
        server.fails = {"keep"}
        with pytest.raises(EngineError) as caught:
            await of(server).flush()
        assert caught.value.code is FaultCode.ENGINE_FAILED
        assert server.log[-1] == "resume"

    do(check())


def test_cancelled_flush_and_end_all_let_the_engine_go_on() -> None:
    """At every point of them."""

    async def check() -> None:
        for what in ("flush", "abort_all"):
            for delay_s in (0.0, 0.001, 0.005, 0.011, 0.015):
                server = Server()
                task = asyncio.ensure_future(getattr(of(server), what)())
                await asyncio.sleep(delay_s)
                task.cancel()
                await asyncio.wait({task})
                await asyncio.sleep(1.0)
                assert not server.is_paused_now, (what, delay_s, server.log)

    do(check())


def test_end_all_in_an_update_answers_at_once() -> None:
    """The engine can't hear it, and whoever asks must not wait for the whole transfer."""

    async def check() -> None:
        server = Server()
        calls = EngineCalls(server)
        pausing = Pausing(cast(Control, server), calls)
        update = asyncio.ensure_future(calls.hold("update_weights", lambda: asyncio.sleep(50), 60.0, is_paused=True))
        await asyncio.sleep(1.0)
        with pytest.raises(EngineError, match="in an update"):
            await asyncio.wait_for(pausing.abort_all(), 0.1)
        await update

    do(check())
