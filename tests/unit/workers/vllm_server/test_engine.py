"""The adapter on a stand-in for vLLM's AsyncLLM: what it offers, how it pauses, flushes, aborts and answers."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlbus.errors import EngineDeadError, EngineError, FaultError
from rlbus.schemas import FaultCode, Generation, PauseMode, TensorSpec, TensorSum
from rlbus.testing import run
from rlbus.workers.engines.base import NO_LABEL
from rlbus.workers.vllm_server import engine as engine_module
from rlbus.workers.vllm_server.checkpoint import ExpectedTensors, expect
from rlbus.workers.vllm_server.engine import VllmEngine
from tests.unit.workers.vllm_server.fake_llm import FakeLLM

pytestmark = pytest.mark.unit

Check = Callable[[VllmEngine], Awaitable[None]]
TENSORS = (TensorSpec(name="w", dtype="float32", shape=(2,)),)


@pytest.fixture(autouse=True)
def _known_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def expected(_: Any) -> ExpectedTensors:
        return expect(TENSORS, is_head_tied=False, source="test")

    monkeypatch.setattr(engine_module, "expected_tensors", expected)

    async def inline(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    # A thread would not run in virtual time.
    monkeypatch.setattr(asyncio, "to_thread", inline)


def on_engine(llm: FakeLLM, tmp_path: Path, check: Check) -> None:
    """Run a check on a started engine."""

    async def main() -> None:
        engine = VllmEngine(llm, run_dir=str(tmp_path))
        await engine.start()
        try:
            await check(engine)
        finally:
            await engine.aclose()

    run(main())
    assert list(tmp_path.iterdir()) == []


def test_it_offers_what_the_server_was_configured_for(tmp_path: Path) -> None:
    """Ranks of all engines, our backend, every route."""

    async def check(engine: VllmEngine) -> None:
        assert engine.info.world_size == 2
        assert engine.info.backends == ("gloo",)
        assert {"abort_request", "update_weights_from_distributed", "update_weights_from_disk"} <= engine.info.routes

    on_engine(FakeLLM(), tmp_path, check)


@pytest.mark.parametrize("backend", [None, "nccl", "ipc"])
def test_without_our_weight_transfer_there_is_no_update_over_a_group(tmp_path: Path, backend: str | None) -> None:
    """The route is missing, rather than there and failing; loading from disk needs none."""

    async def check(engine: VllmEngine) -> None:
        assert "update_weights_from_distributed" not in engine.info.routes
        assert engine.info.backends == ()
        assert "update_weights_from_disk" in engine.info.routes

    on_engine(FakeLLM(backend=backend), tmp_path, check)


def test_model_whose_tensors_are_unknown_takes_no_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing could be checked before it is written."""
    monkeypatch.setattr(engine_module, "expected_tensors", lambda _: None)

    async def check(engine: VllmEngine) -> None:
        assert not {r for r in engine.info.routes if r.startswith("update_weights")}

    on_engine(FakeLLM(), tmp_path, check)


def test_one_of_several_api_servers_neither_counts_nor_aborts(tmp_path: Path) -> None:
    """SCENARIOS 50: it sees only its own requests."""
    llm = FakeLLM(num_servers=2)
    llm.add("a-1", "a")

    async def check(engine: VllmEngine) -> None:
        assert "abort_request" not in engine.info.routes
        assert (await engine.pause(PauseMode.ABORT, True)).num_aborted is None
        assert (await engine.observe()).num_running is None
        with pytest.raises(FaultError):
            await engine.abort(None)

    on_engine(llm, tmp_path, check)


def test_pause_counts_what_it_ended_and_what_it_holds(tmp_path: Path) -> None:
    """By requests, not by outputs."""
    llm = FakeLLM()
    llm.add("a-1", "a")
    llm.add("b-1", "b")

    async def check(engine: VllmEngine) -> None:
        kept = await engine.pause(PauseMode.KEEP, True)
        assert (kept.num_aborted, kept.num_held) == (0, 2)
        ended = await engine.pause(PauseMode.ABORT, True)
        assert (ended.num_aborted, ended.num_held) == (2, 0)
        assert llm.calls == ["pause keep", "pause abort"]

    on_engine(llm, tmp_path, check)


def test_pause_that_somebody_undid_meanwhile_is_a_failure(tmp_path: Path) -> None:
    """A wait of vLLM returns as if all were well."""
    llm = FakeLLM()

    async def undone(*, mode: str, clear_cache: bool) -> None:
        llm.paused = False

    llm.pause_generation = undone  # type: ignore[method-assign]

    async def check(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match="resumed by somebody else"):
            await engine.pause(PauseMode.WAIT, True)

    on_engine(llm, tmp_path, check)


def test_flush_empties_every_cache_and_admits_when_one_stays(tmp_path: Path) -> None:
    """SCENARIOS 14: prefix, multimodal, encoder."""
    llm = FakeLLM()

    async def check(engine: VllmEngine) -> None:
        await engine.flush_cache()
        assert llm.calls == ["reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"]
        llm.is_prefix_cache_empty = False
        with pytest.raises(EngineError) as caught:
            await engine.flush_cache()
        assert caught.value.code is FaultCode.FLUSH_FAILED
        llm.raises["reset_encoder_cache"] = "no"
        with pytest.raises(EngineError) as caught:
            await engine.flush_cache()
        assert caught.value.code is FaultCode.FLUSH_FAILED

    on_engine(llm, tmp_path, check)


@pytest.mark.parametrize(
    ("asked", "num_ended", "left"),
    [
        (("a",), 1, {"b-1", "0_c-1", "1_c-1", "d-1"}),
        (("c",), 1, {"a-1", "b-1", "d-1"}),
        (("mine",), 1, {"a-1", "0_c-1", "1_c-1", "d-1"}),
        (("talk",), 1, {"a-1", "b-1", "0_c-1", "1_c-1"}),
        (("nobody",), 0, {"a-1", "b-1", "0_c-1", "1_c-1", "d-1"}),
        (None, 4, set()),
    ],
)
def test_abort_finds_requests_by_their_outer_names(
    tmp_path: Path, asked: tuple[str, ...] | None, num_ended: int, left: set[str]
) -> None:
    """As given to generate, or as X-Request-Id; two samples of one request are one."""
    llm = FakeLLM()
    llm.add("a-1", "a")
    llm.add("b-1", "cmpl-mine-0")
    llm.add("0_c-1", "c", parent="c-1")
    llm.add("1_c-1", "c", parent="c-1")
    llm.add("d-1", "chatcmpl-talk")

    async def check(engine: VllmEngine) -> None:
        assert await engine.abort(asked) == num_ended
        assert set(llm.output_processor.request_states) == left

    on_engine(llm, tmp_path, check)


def test_observe_asks_the_engine(tmp_path: Path) -> None:
    """vLLM's name for weights that nobody labelled is no label."""
    llm = FakeLLM()

    async def check(engine: VllmEngine) -> None:
        seen = await engine.observe()
        assert (seen.generation, seen.weight_version, seen.num_running) == (Generation.RUNNING, NO_LABEL, 0)
        llm.paused, llm.label = True, "0.3"
        seen = await engine.observe()
        assert (seen.generation, seen.weight_version) == (Generation.PAUSED, "0.3")
        llm.errored = True
        with pytest.raises(EngineDeadError):
            await engine.observe()
        assert engine.death is not None

    on_engine(llm, tmp_path, check)


def test_checksums_leave_out_what_vllm_does_not_see(tmp_path: Path) -> None:
    """And say how much that is."""

    async def check(engine: VllmEngine) -> None:
        data = await engine.checksums()
        assert data.sums == tuple(TensorSum(name=f"tp{rank}:embed", checksum="ab" * 8) for rank in range(2))
        assert data.algorithm == "vllm sha256, first 64 bits, 2 prepacked parameters not seen"

    on_engine(FakeLLM(), tmp_path, check)
