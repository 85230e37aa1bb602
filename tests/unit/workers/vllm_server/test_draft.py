"""The draft model of a vLLM server on a stand-in: when it is advertised, and what vLLM is asked for."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rlbus.errors import EngineError, FaultError, ManifestError
from rlbus.schemas import DRAFT_ROUTE, Fault, FaultCode, GroupPlan, RankSpan, Rendezvous, TensorSpec, Version
from rlbus.testing import run
from rlbus.workers.engines.base import ReceiveOrder, UpdateFailedError
from rlbus.workers.engines.draft import drafter
from rlbus.workers.vllm_server import draft as draft_module
from rlbus.workers.vllm_server import engine as engine_module
from rlbus.workers.vllm_server.checkpoint import ExpectedTensors, expect
from rlbus.workers.vllm_server.engine import VllmEngine
from rlbus.workers.vllm_server.exchange import CHECKSUMS, CallFolder, RankOutcome
from tests.unit.workers.vllm_server.fake_llm import FakeLLM

pytestmark = pytest.mark.unit

DRAFT = TensorSpec(name="d", dtype="float32", shape=(2,))
SPAN = RankSpan(component="backend", instance_id="1", first=1, num_ranks=2)
PLAN = GroupPlan(
    epoch=1,
    group_id="g1",
    backend="gloo",
    num_trainer_ranks=1,
    world_size=3,
    spans=(SPAN,),
    rendezvous=Rendezvous(host="127.0.0.1", port=1, prefix="g1"),
    bucket_bytes=1024,
)


@dataclass
class DraftingLLM(FakeLLM):
    """A stand-in that speculates."""

    method: str = "draft_model"
    pipeline: int = 1
    says: Callable[[int], RankOutcome | None] = lambda rank: RankOutcome(digests={f"tp{rank}:d": "cd" * 32})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vllm_config.speculative_config = SimpleNamespace(method=self.method, draft_model_config="the draft's")
        self.vllm_config.parallel_config.pipeline_parallel_size = self.pipeline

    async def start_draft_weight_update(self) -> None:
        self.calls.append("draft")
        await self.start_weight_update()

    async def _init(self, info: dict[str, Any]) -> None:
        if info["ask"] != CHECKSUMS:
            await super()._init(info)
            return
        self.calls.append("ask")
        self._say(CallFolder(info["folder"]), CHECKSUMS, self.says)


@pytest.fixture(autouse=True)
def _known_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def expected(config: Any) -> ExpectedTensors:
        own = TensorSpec(name="w", dtype="float32", shape=(2,))
        return expect((DRAFT if config == "the draft's" else own,), is_head_tied=False, source="test")

    async def inline(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    monkeypatch.setattr(engine_module, "expected_tensors", expected)
    monkeypatch.setattr(draft_module, "expected_tensors", expected)
    # A thread would not run in virtual time.
    monkeypatch.setattr(asyncio, "to_thread", inline)


def on_engine(llm: FakeLLM, tmp_path: Path, check: Callable[[VllmEngine], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        engine = VllmEngine(llm, run_dir=str(tmp_path), **options)
        await engine.start()
        try:
            await check(engine)
        finally:
            await engine.aclose()

    run(main())
    assert list(tmp_path.iterdir()) == []


async def received(engine: VllmEngine, version: Version, *, is_draft: bool = True) -> None:
    """A transfer up to its end."""
    order = ReceiveOrder("up", 1, version, (DRAFT,), 1024, is_draft)
    num_ranks = engine.info.world_size
    await engine.join_group(PLAN, msgspec.structs.replace(SPAN, num_ranks=num_ranks))
    await engine.receive_weights(order, lambda: None, lambda done, total: None)


@pytest.mark.parametrize(
    ("llm", "options"),
    [
        (FakeLLM(), {}),
        (DraftingLLM(method="eagle3"), {}),
        (DraftingLLM(pipeline=2), {}),
        (DraftingLLM(backend="nccl"), {}),
        (DraftingLLM(), {"sees_requests": False}),
    ],
    ids=["none", "shares tensors", "pipeline", "no transfer", "from outside"],
)
def test_only_a_draft_that_is_a_model_of_its_own_is_advertised(
    llm: FakeLLM, options: dict[str, Any], tmp_path: Path
) -> None:
    """Others share tensors with the target, or aren't on every rank."""

    async def without(engine: VllmEngine) -> None:
        assert DRAFT_ROUTE not in engine.info.routes
        with pytest.raises(FaultError) as caught:
            drafter(engine)
        assert caught.value.code is FaultCode.NO_ROUTE

    async def with_it(engine: VllmEngine) -> None:
        assert DRAFT_ROUTE in engine.info.routes
        drafter(engine).check_draft_manifest((DRAFT,))
        with pytest.raises(ManifestError):
            engine.check_manifest((DRAFT,))

    on_engine(llm, tmp_path, without, **options)
    on_engine(DraftingLLM(), tmp_path, with_it)


def test_update_of_the_draft_is_a_session_of_its_own_and_leaves_the_label(tmp_path: Path) -> None:
    """vLLM is told at the start; the next one of the target is the target's again, and labels it."""
    llm = DraftingLLM()

    async def check(engine: VllmEngine) -> None:
        await received(engine, Version(step=7))
        await engine.finish_update(Version(step=7))
        assert llm.calls.count("draft") == 1
        assert llm.label == "default"
        await received(engine, Version(step=3), is_draft=False)
        await engine.finish_update(Version(step=3))
        assert llm.calls.count("draft") == 1
        assert llm.label == "0.3"

    on_engine(llm, tmp_path, check)


def test_torn_draft_is_closed_as_a_draft_and_the_target_is_not_called_torn(tmp_path: Path) -> None:
    """Also when vLLM has closed the session with an error: it is opened again for the draft, to be put together."""
    llm = DraftingLLM(world_size=1, raises={"update": "a rank failed"})

    async def check(engine: VllmEngine) -> None:
        with pytest.raises(UpdateFailedError) as caught:
            await received(engine, Version(step=7))
        assert caught.value.weights_touched
        llm._is_open = False
        await engine.abort_update()
        assert [call for call in llm.calls if call in ("draft", "start", "finish")] == [
            *("draft", "start"),
            *("draft", "start", "finish"),
        ]
        assert llm.label == "default"

    on_engine(llm, tmp_path, check)


def test_checksums_of_the_draft_open_a_session_and_close_it(tmp_path: Path) -> None:
    """A draft's own open session is used as it is; the target's is left alone, and the question refused."""
    llm = DraftingLLM()

    async def check(engine: VllmEngine) -> None:
        data = await engine.draft_checksums()
        assert [(s.name, s.checksum) for s in data.sums] == [("tp0:d", "cd" * 8), ("tp1:d", "cd" * 8)]
        assert llm.calls[-4:] == ["draft", "start", "ask", "finish"]
        await received(engine, Version(step=7))
        await engine.draft_checksums()
        assert llm.calls[-1] == "ask"
        await engine.finish_update(Version(step=7))
        await received(engine, Version(step=8), is_draft=False)
        with pytest.raises(FaultError) as caught:
            await engine.draft_checksums()
        assert caught.value.code is FaultCode.BUSY
        await engine.finish_update(Version(step=8))

    on_engine(llm, tmp_path, check)


@pytest.mark.parametrize("says", [None, RankOutcome(fault=Fault(code=FaultCode.ENGINE_FAILED, message="no memory"))])
def test_rank_that_does_not_say_what_its_draft_holds_fails_the_question(
    tmp_path: Path, says: RankOutcome | None
) -> None:
    """The session is closed all the same."""
    llm = DraftingLLM(says=lambda rank: says)

    async def check(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match="checksums of the draft model"):
            await engine.draft_checksums()
        assert llm.calls[-1] == "finish"

    on_engine(llm, tmp_path, check)
