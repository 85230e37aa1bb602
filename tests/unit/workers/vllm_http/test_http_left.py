"""What the sidecar of a vLLM server leaves when it ends or dies: the label of the weights, word of a lost engine."""

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus.errors import EngineError
from rlbus.schemas import Version
from rlbus.workers.vllm_http.engine import VllmHttpEngine
from rlbus.workers.vllm_server.exchange import TORN
from tests.unit.workers.vllm_http.fake_server import FakeServer
from tests.unit.workers.vllm_http.test_http_engine import on_engine, save

pytestmark = pytest.mark.unit


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """A healthy one, with a checkpoint of one tensor; what reads it runs inline, for virtual time."""

    async def inline(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    model = tmp_path / "model"
    model.mkdir()
    save(model)
    (model / "config.json").write_text('{"tie_word_embeddings": false}')
    return FakeServer(model)


def test_a_reload_is_labelled_torn_until_it_is_done(server: FakeServer) -> None:
    """The server loads on when the sidecar dies: then nobody takes the new weights for the old ones."""
    labels: list[str] = []

    def loads() -> httpx.Response:
        labels.append(server.label)
        return httpx.Response(200)

    server.instead["/collective_rpc"] = loads

    async def check(engine: VllmHttpEngine) -> None:
        await engine.load_weights(str(server.model), Version(step=3))
        assert (labels, server.label) == ([TORN], "0.3")

    on_engine(server, check)


def test_sidecar_ends_as_ever_when_it_cannot_write_that_its_engine_is_lost(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so, and closes all the same."""
    server.num_ranks = 2
    server.instead["/weight_checker"] = lambda: httpx.Response(500, json={"error": {"message": "no"}})

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def check(engine: VllmHttpEngine) -> None:
        with pytest.raises(EngineError):
            await engine.checksums()
        monkeypatch.setattr(Path, "touch", full)

    on_engine(server, check, run_dir=str(tmp_path))
    assert "by hand" in caplog.text
    assert list(tmp_path.glob("rlbus-vllm-*")) == []
