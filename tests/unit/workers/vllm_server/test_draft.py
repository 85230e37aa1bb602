"""The draft model of a vLLM server on a stand-in: when it is advertised, and what vLLM is asked for."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
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
from rlbus.workers.engines.found import Found
from rlbus.workers.vllm_server import draft as draft_module
from rlbus.workers.vllm_server import engine as engine_module
from rlbus.workers.vllm_server.checkpoint import ExpectedTensors, expect
from rlbus.workers.vllm_server.draft import draft_of
from rlbus.workers.vllm_server.engine import VllmEngine
from rlbus.workers.vllm_server.exchange import CHECKSUMS, TORN, CallFolder, RankDraft, RankOutcome
from rlbus.workers.vllm_server.ranks import left_of
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
    """A stand-in that speculates. Its ranks keep the draft's label, as `transfer.py` does."""

    method: str = "draft_model"
    pipeline: int = 1
    says: Callable[[int], RankOutcome | None] = lambda rank: RankOutcome(digests={f"tp{rank}:d": "cd" * 32})
    labelled: Callable[[int], RankOutcome | None] = lambda rank: RankOutcome()
    # Of each rank; and whether the target's layers are taken apart.
    draft_labels: dict[int, str | None] = field(default_factory=dict)
    is_target_touched: bool = False
    # Ranks that have no draft to tell of.
    silent: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        own = SimpleNamespace(model="the draft's", revision=None)
        self.vllm_config.speculative_config = SimpleNamespace(method=self.method, draft_model_config=own)
        self.vllm_config.parallel_config.pipeline_parallel_size = self.pipeline
        self._is_draft = False

    async def start_draft_weight_update(self) -> None:
        self.calls.append("draft")
        await self.start_weight_update()
        self._is_draft = True

    async def _update(self, info: dict[str, Any]) -> None:
        if self._is_draft:
            self.draft_labels |= dict.fromkeys(range(self.world_size), TORN)
        self.is_target_touched = not self._is_draft
        await super()._update(info)

    async def finish_weight_update(self) -> None:
        await super().finish_weight_update()
        self._is_draft = self.is_target_touched = False

    async def _init(self, info: dict[str, Any]) -> None:
        match info["ask"]:
            case None:
                await super()._init(info)
                return
            case "checksums":
                answer = self.says
            case "label-draft":
                self.draft_labels |= dict.fromkeys(range(self.world_size), info["label"])
                answer = self.labelled
            case "hello":
                answer = self._hello
        self.calls.append("ask" if info["ask"] == CHECKSUMS else info["ask"])
        self._say(CallFolder(info["folder"]), info["ask"], answer)

    def _hello(self, rank: int) -> RankOutcome:
        draft = draft_of(self.vllm_config, self.draft_labels.get(rank))
        return RankOutcome(
            is_open=self._is_open, weights_touched=self.is_target_touched, draft=None if rank in self.silent else draft
        )


@pytest.fixture(autouse=True)
def _known_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def expected(config: Any) -> ExpectedTensors:
        own = TensorSpec(name="w", dtype="float32", shape=(2,))
        is_drafts = getattr(config, "model", None) == "the draft's"
        return expect((DRAFT if is_drafts else own,), is_head_tied=False, source="test")

    def expected_by_name(model: str, revision: str | None) -> ExpectedTensors:
        return expected(SimpleNamespace(model=model, revision=revision))

    async def inline(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    monkeypatch.setattr(engine_module, "expected_tensors", expected)
    monkeypatch.setattr(draft_module, "expected_tensors", expected)
    monkeypatch.setattr(draft_module, "expected_of", expected_by_name)
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
    ids=["none", "shares tensors", "pipeline", "no transfer", "from outside, and its ranks weren't asked"],
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


def test_ranks_keep_the_label_of_the_draft_and_vllm_that_of_the_target(tmp_path: Path) -> None:
    """The version once every rank has finished, torn from the first tensor until then."""
    llm = DraftingLLM()

    async def check(engine: VllmEngine) -> None:
        await received(engine, Version(step=7))
        assert llm.draft_labels == {0: TORN, 1: TORN}
        await engine.finish_update(Version(step=7))
        assert (llm.draft_labels, llm.label) == ({0: "0.7", 1: "0.7"}, "default")
        await received(engine, Version(step=3), is_draft=False)
        await engine.finish_update(Version(step=3))
        assert (llm.draft_labels, llm.label) == ({0: "0.7", 1: "0.7"}, "0.3")
        await received(engine, Version(step=8))
        await engine.abort_update()
        assert (llm.draft_labels, llm.label) == ({0: TORN, 1: TORN}, "0.3")

    on_engine(llm, tmp_path, check)


def test_engine_knows_whether_it_would_generate_on_what_no_label_tells_of(tmp_path: Path) -> None:
    """A draft from its first tensor on until a whole one, whatever becomes of the target; an update that is open."""
    llm = DraftingLLM()

    async def check(engine: VllmEngine) -> None:
        updates = engine._ready()
        assert not updates.is_unfit
        for is_draft in (True, False):
            await received(engine, Version(step=7), is_draft=is_draft)
            assert updates.is_unfit
            await engine.finish_update(Version(step=7))
            assert not updates.is_unfit
        await received(engine, Version(step=8))
        await engine.abort_update()
        await received(engine, Version(step=9), is_draft=False)
        await engine.finish_update(Version(step=9))
        assert updates.is_unfit
        await received(engine, Version(step=10))
        await engine.finish_update(Version(step=10))
        assert not updates.is_unfit

    on_engine(llm, tmp_path, check)
    llm.draft_labels = {0: TORN, 1: TORN}

    async def found(engine: VllmEngine) -> None:
        await engine.take_over()
        assert engine._ready().is_unfit

    on_engine(llm, tmp_path, found, sees_requests=False)


NO_MEMORY = RankOutcome(fault=Fault(code=FaultCode.ENGINE_FAILED, message="no memory"))


@pytest.mark.parametrize(
    "llm",
    [
        DraftingLLM(finished=lambda rank: NO_MEMORY if rank else RankOutcome()),
        DraftingLLM(labelled=lambda rank: None if rank else RankOutcome()),
    ],
    ids=["one fails to finish", "one doesn't take the label"],
)
def test_draft_that_not_every_rank_calls_whole_is_touched(llm: DraftingLLM, tmp_path: Path) -> None:
    """The update fails, and after its abort every rank says torn."""

    async def check(engine: VllmEngine) -> None:
        await received(engine, Version(step=7))
        with pytest.raises(UpdateFailedError) as caught:
            await engine.finish_update(Version(step=7))
        assert caught.value.weights_touched
        await engine.abort_update()
        assert (set(llm.draft_labels.values()), llm.label) == ({TORN}, "default")

    on_engine(llm, tmp_path, check)


@pytest.mark.parametrize("is_draft", [True, False])
def test_agent_from_outside_is_told_which_of_the_two_its_predecessor_has_torn(tmp_path: Path, is_draft: bool) -> None:
    """That one was killed before the end of a transfer. Its session is closed, and vLLM labels only the target."""
    llm = DraftingLLM()

    async def main() -> None:
        first = VllmEngine(llm, run_dir=str(tmp_path / "1"), sees_requests=False)
        await first.start()
        await first.take_over()
        await received(first, Version(step=7), is_draft=is_draft)  # and nobody is there any more to hear of it
        second = VllmEngine(llm, run_dir=str(tmp_path / "2"), sees_requests=False)
        await second.start()
        left = await second.take_over()
        found = left.found(llm.label, is_paused=True, has_draft=True)
        assert (found.is_torn, found.is_draft_torn) == (not is_draft, is_draft)
        assert llm.label == ("default" if is_draft else TORN)
        assert llm.calls[-1] == "finish"
        assert DRAFT_ROUTE in second.info.routes
        await received(second, Version(step=8))
        await second.finish_update(Version(step=8))
        third = VllmEngine(llm, run_dir=str(tmp_path / "3"), sees_requests=False)
        await third.start()
        left = await third.take_over()
        found = left.found(llm.label, is_paused=True, has_draft=True)
        assert (found.draft_label, found.is_draft_torn, found.is_torn) == ("0.8", False, not is_draft)
        for engine in (first, second, third):
            await engine.aclose()

    for name in "123":
        (tmp_path / name).mkdir()
    run(main())


@pytest.mark.parametrize(
    ("llm", "is_told"),
    [
        (DraftingLLM(method="eagle3"), True),
        (DraftingLLM(pipeline=2), True),
        (DraftingLLM(silent=frozenset({1})), True),
        (DraftingLLM(silent=frozenset({0, 1})), False),
    ],
    ids=["shares tensors", "pipeline", "one rank has none", "old ranks"],
)
def test_draft_that_the_ranks_cannot_update_is_not_advertised_from_outside(
    llm: DraftingLLM, is_told: bool, tmp_path: Path
) -> None:
    """It is found torn all the same, by the word of one rank: nothing may be generated with it."""
    llm.draft_labels = {0: TORN, 1: TORN}

    async def check(engine: VllmEngine) -> None:
        left = await engine.take_over()
        assert DRAFT_ROUTE not in engine.info.routes
        assert left.found("0.7", is_paused=False, has_draft=False) == Found("0.7", False, False, None, is_told)
        assert left.in_words() == ("torn (draft)" if is_told else "whole")

    on_engine(llm, tmp_path, check, sees_requests=False)


def test_ranks_that_do_not_agree_on_their_draft_have_a_torn_one() -> None:
    """An agent died between two of them; no label but the same one of all counts."""

    def said(*labels: str | None) -> list[RankOutcome]:
        return [RankOutcome(draft=RankDraft(method="draft_model", model="m", label=label)) for label in labels]

    def label(*labels: str | None) -> str | None:
        draft = left_of(said(*labels)).draft
        assert draft is not None
        return draft.label

    assert [label("0.7", "0.7"), label(None, None), label(TORN, TORN)] == ["0.7", None, TORN]
    assert [label("0.7", TORN), label("0.7", None), label(None, TORN)] == [TORN, TORN, TORN]
    assert left_of([*said("0.7"), RankOutcome()]).draft is None
    assert left_of([]).draft is None


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
