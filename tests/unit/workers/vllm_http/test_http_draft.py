"""The draft model of a vLLM server that runs by itself, on a stand-in for it: what its ranks say and are told."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlbus.errors import ManifestError
from rlbus.schemas import DRAFT_ROUTE, TensorSpec
from rlbus.workers.engines.draft import drafter
from rlbus.workers.engines.found import Found
from rlbus.workers.vllm_http.engine import VllmHttpEngine
from rlbus.workers.vllm_server.exchange import TORN, RankDraft, RankOutcome
from tests.unit.workers.vllm_http.fake_server import FakeServer
from tests.unit.workers.vllm_http.test_http_engine import on_engine, save

pytestmark = pytest.mark.unit


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """A healthy one, whose target has one tensor; what reads it runs inline, for virtual time."""

    async def inline(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    for name in ("model", "draft"):
        (tmp_path / name).mkdir()
        save(tmp_path / name, name[0])
        (tmp_path / name / "config.json").write_text('{"tie_word_embeddings": false}')
    return FakeServer(tmp_path / "model")


def drafting(server: FakeServer, *, label: str | None = None, method: str = "draft_model") -> None:
    """Let its ranks speculate."""
    draft = RankDraft(method=method, model=str(server.model.parent / "draft"), label=label)
    server.hello = RankOutcome(device="cpu", draft=draft)


def test_draft_that_the_ranks_tell_of_is_offered_by_its_own_tensors(server: FakeServer) -> None:
    """Its folder is read here; its checksums come from a session of vLLM's about it, which is closed again."""
    drafting(server)

    async def check(engine: VllmHttpEngine) -> None:
        assert DRAFT_ROUTE in engine.info.routes
        own = TensorSpec(name="d", dtype="float32", shape=(2,))
        drafter(engine).check_draft_manifest((own,))
        with pytest.raises(ManifestError):
            engine.check_manifest((own,))
        data = await drafter(engine).draft_checksums()
        assert [(s.name, s.checksum) for s in data.sums] == [("d", "cd" * 8)]
        paths = [call.split()[1] for call in server.calls]
        assert paths == ["/start_draft_weight_update", "/init_weight_transfer_engine", "/finish_weight_update"]

    on_engine(server, check)


@pytest.mark.parametrize("why", ["shares tensors", "its files aren't here", "no draft"])
def test_draft_that_cannot_be_updated_is_not_offered(server: FakeServer, why: str) -> None:
    """One that was left torn is found so all the same: nothing may be generated with it."""
    drafting(server, label=TORN, method="eagle3" if why == "shares tensors" else "draft_model")
    if why == "its files aren't here":
        (server.model.parent / "draft" / "model.safetensors").unlink()
    elif why == "no draft":
        server.hello = RankOutcome(device="cpu")

    async def check(engine: VllmHttpEngine) -> None:
        assert DRAFT_ROUTE not in engine.info.routes
        assert engine.found == Found(None, is_paused=False, is_torn=False, is_draft_torn=why != "no draft")

    on_engine(server, check)


@pytest.mark.parametrize("answers", [True, False])
def test_torn_draft_is_found_also_where_the_target_cannot_be_updated(server: FakeServer, answers: bool) -> None:
    """Its files aren't here (any more). Ranks that don't answer cost nothing there, as nothing is asked of them."""
    drafting(server, label=TORN)
    (server.model / "model.safetensors").unlink()
    if not answers:
        server.hello = None

    async def check(engine: VllmHttpEngine) -> None:
        assert not engine.info.backends
        assert engine.found == Found(None, is_paused=False, is_torn=False, is_draft_torn=answers)

    on_engine(server, check)


@pytest.mark.parametrize("is_open", [True, False])
def test_torn_draft_of_an_agent_before_is_found_beside_a_whole_target(server: FakeServer, is_open: bool) -> None:
    """Whether its session stands open or not; the target keeps its label."""
    drafting(server, label=TORN)
    assert server.hello is not None
    server.hello = RankOutcome(device="cpu", is_open=is_open, draft=server.hello.draft)
    server.label = "0.7"

    async def check(engine: VllmHttpEngine) -> None:
        assert engine.found == Found("0.7", False, is_torn=False, draft_label=TORN, is_draft_torn=True)
        assert server.label == "0.7"

    on_engine(server, check)


def test_draft_of_a_version_is_found_so(server: FakeServer) -> None:
    """By its ranks' label, beside the target's own."""
    drafting(server, label="0.3")

    async def check(engine: VllmHttpEngine) -> None:
        assert engine.found == Found(None, is_paused=False, is_torn=False, draft_label="0.3")

    on_engine(server, check)
