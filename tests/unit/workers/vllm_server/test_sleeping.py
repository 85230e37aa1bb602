"""Sleep of vLLM on a stand-in that does what vLLM's core does: the last wake resumes it, unless somebody pauses it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlbus.errors import AsleepError, EngineError, RefusedError
from rlbus.schemas import Generation, PauseMode, SleepTag
from rlbus.testing import run
from rlbus.workers.engines.sleep import SLEEP_ROUTES, sleeper
from rlbus.workers.vllm_server import engine as engine_module
from rlbus.workers.vllm_server.engine import VllmEngine
from tests.unit.workers.vllm_server.fake_llm import FakeLLM

pytestmark = pytest.mark.unit

BOTH = frozenset(SleepTag)
WEIGHTS, KV = frozenset({SleepTag.WEIGHTS}), frozenset({SleepTag.KV_CACHE})


def on_engine(llm: FakeLLM, tmp_path: Path, check: Callable[[VllmEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = VllmEngine(llm, run_dir=str(tmp_path))
        await engine.start()
        try:
            await check(engine)
        finally:
            await engine.aclose()

    run(main())


@pytest.fixture(autouse=True)
def _unknown_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def inline(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    monkeypatch.setattr(engine_module, "expected_tensors", lambda _: None)
    monkeypatch.setattr(asyncio, "to_thread", inline)


def test_the_routes_are_there_only_if_the_server_has_a_sleep(tmp_path: Path) -> None:
    """--enable-sleep-mode, which vLLM refuses to start with on a platform that has none, such as a CPU."""

    async def without(engine: VllmEngine) -> None:
        assert not SLEEP_ROUTES & engine.info.routes
        with pytest.raises(RefusedError, match="no sleep"):
            sleeper(engine)

    async def with_it(engine: VllmEngine) -> None:
        assert engine.info.routes >= SLEEP_ROUTES
        assert sleeper(engine).sleep_tags == BOTH

    on_engine(FakeLLM(), tmp_path, without)
    on_engine(FakeLLM(has_sleep=True), tmp_path, with_it)


def test_a_wake_does_not_run_the_engine_and_a_resume_does(tmp_path: Path) -> None:
    """A pause is on the heels of the wake of the last tag, by which vLLM would resume."""
    llm = FakeLLM(has_sleep=True)

    async def check(engine: VllmEngine) -> None:
        slept = await engine.sleep(BOTH, 1, PauseMode.ABORT)
        assert set(slept.asleep) == BOTH
        observed = await engine.observe()
        assert (observed.generation, observed.asleep) == (Generation.PAUSED, BOTH)
        with pytest.raises(AsleepError, match="kv_cache, weights"):
            await engine.resume()
        assert (await engine.wake_up(WEIGHTS)).asleep == (SleepTag.KV_CACHE,)
        assert llm.paused
        assert (await engine.wake_up(BOTH)).asleep == ()
        assert (await engine.observe()).generation is Generation.PAUSED
        await engine.wake_up(BOTH)
        await engine.resume()
        assert (await engine.observe()).generation is Generation.RUNNING
        assert [c for c in llm.calls if "label" not in c] == [
            "pause abort",
            "sleep 1 abort",
            "wake_up weights",
            "wake_up kv_cache",
            "pause keep",
            "resume",
        ]

    on_engine(llm, tmp_path, check)


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.WAIT])
def test_what_is_kept_or_was_waited_for_is_not_aborted_by_the_sleep(tmp_path: Path, mode: PauseMode) -> None:
    """vLLM's own default is to abort."""
    llm = FakeLLM(has_sleep=True)

    async def check(engine: VllmEngine) -> None:
        await engine.sleep(BOTH, 2, mode)
        assert llm.calls == [f"pause {mode.value}", "sleep 2 keep"]

    on_engine(llm, tmp_path, check)


def test_the_cache_sleeps_alone_and_the_weights_after_it(tmp_path: Path) -> None:
    """By the ways that vLLM has; what it hasn't is refused before anything changes."""
    llm = FakeLLM(has_sleep=True)

    async def check(engine: VllmEngine) -> None:
        with pytest.raises(RefusedError, match="name both tags"):
            await engine.sleep(WEIGHTS, 1, PauseMode.ABORT)
        assert llm.calls == []
        await engine.sleep(KV, 1, PauseMode.ABORT)
        assert llm.calls == ["pause abort", "release_kv_cache_memory"]
        await engine.sleep(WEIGHTS, 1, PauseMode.ABORT)
        assert llm.sleeping == {"weights", "kv_cache"}
        await engine.wake_up(KV)
        calls = list(llm.calls)
        with pytest.raises(RefusedError, match="name both tags"):
            await engine.sleep(KV, 1, PauseMode.ABORT)
        assert llm.calls == calls

    on_engine(llm, tmp_path, check)


def test_a_wake_by_somebody_else_is_seen(tmp_path: Path) -> None:
    """vLLM's own routes, say: what runs isn't asleep."""
    llm = FakeLLM(has_sleep=True)

    async def check(engine: VllmEngine) -> None:
        await engine.sleep(BOTH, 1, PauseMode.ABORT)
        await llm.wake_up(["kv_cache", "weights"])
        observed = await engine.observe()
        assert (observed.asleep, observed.generation) == (frozenset(), Generation.RUNNING)

    on_engine(llm, tmp_path, check)


def test_a_sleep_that_fails_may_sleep_until_a_wake_has_succeeded(tmp_path: Path) -> None:
    """In doubt nobody resumes it."""
    llm = FakeLLM(world_size=1, has_sleep=True, raises={"sleep 1 abort": "no"})

    async def check(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match="no"):
            await engine.sleep(BOTH, 1, PauseMode.ABORT)
        with pytest.raises(AsleepError):
            await engine.resume()
        await engine.wake_up(BOTH)
        await engine.resume()

    on_engine(llm, tmp_path, check)
