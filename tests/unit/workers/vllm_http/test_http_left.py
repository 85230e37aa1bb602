"""What the sidecar of a vLLM server leaves when it ends or dies: the label of the weights, word of a lost engine."""

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus.errors import ConfigError, EngineDeadError, EngineError
from rlbus.schemas import PauseMode, Version
from rlbus.testing import run
from rlbus.workers.engines.base import NO_LABEL
from rlbus.workers.peer_http import Peer, PeerError
from rlbus.workers.vllm_http.engine import VllmHttpEngine
from rlbus.workers.vllm_server.exchange import TORN
from tests.unit.workers.vllm_http.fake_server import FakeServer
from tests.unit.workers.vllm_http.test_http_engine import PEER, on_engine, save

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


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(503, text="<html>503 Service Temporarily Unavailable</html>"),
        httpx.Response(503, json={"error": "The model is currently scaling. Please try again later."}),
        httpx.Response(502),
    ],
)
def test_words_of_a_proxy_before_the_server_are_no_death(server: FakeServer, answer: httpx.Response) -> None:
    """vLLM's own 503 on /health says nothing else; any other is about somebody who is away for a moment."""

    async def check(engine: VllmHttpEngine) -> None:
        server.instead["/health"] = server.instead["/is_paused"] = lambda: httpx.Response(
            answer.status_code, content=answer.content
        )
        with pytest.raises(PeerError) as caught:
            await engine.observe()
        assert caught.value.fault.retryable
        server.instead.clear()
        await engine.observe()
        await engine.pause(PauseMode.KEEP, True)

    on_engine(server, check)


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_server_that_was_met_before_is_waited_for_whatever_stands_in_its_place(
    server: FakeServer, tmp_path: Path, status: int
) -> None:
    """An ingress has pages of its own while the server is away; only at the first start they mean a wrong URL."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for is_away in (False, True):
            if is_away:
                server.instead["/health"] = lambda: httpx.Response(status)
                loop.call_later(90.0, server.instead.clear)
            engine = VllmHttpEngine(PEER, transport=server.transport, run_dir=str(run_dir))
            await engine.start()
            await engine.aclose()
        assert loop.time() == pytest.approx(90.0, abs=1.0)
        server.instead["/health"] = lambda: httpx.Response(status)
        elsewhere = Peer.of("http://elsewhere:8000")
        engine = VllmHttpEngine(elsewhere, transport=server.transport, run_dir=str(run_dir))
        with pytest.raises(ConfigError):
            await engine.start()
        await engine.aclose()

    run(main())


@pytest.mark.parametrize("is_found", [True, False])
def test_server_whose_label_is_gone_is_another_engine(server: FakeServer, is_found: bool) -> None:
    """Behind something that keeps accepting connections, and without rlbus's plugin, nothing else tells it apart."""
    server.about = None
    server.label = "0.7" if is_found else "default"

    async def check(engine: VllmHttpEngine) -> None:
        if not is_found:
            await engine.observe()  # weights that nobody has labelled yet are no other engine's
            await engine.label_weights(Version(step=7))
        await engine.observe()
        server.label = "default"
        with pytest.raises(EngineDeadError, match="started anew"):
            await engine.observe()
        with pytest.raises(EngineDeadError):
            await engine.resume()

    on_engine(server, check)


def test_label_that_was_asked_for_before_it_was_set_is_no_other_engines(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is late speaks of the time before."""
    server.about = None
    answers, arrived, on_its_way = server.answer, asyncio.Event(), asyncio.Event()
    on_its_way.set()

    async def late(request: httpx.Request) -> httpx.Response:
        answer = answers(request)
        if request.url.path == "/weight_info":
            arrived.set()
            await on_its_way.wait()
        return answer

    monkeypatch.setattr(server, "answer", late)

    async def check(engine: VllmHttpEngine) -> None:
        arrived.clear()
        on_its_way.clear()
        observing = asyncio.create_task(engine.observe())
        await arrived.wait()
        await engine.label_weights(Version(step=7))
        on_its_way.set()
        assert (await observing).weight_version == NO_LABEL
        assert (await engine.observe()).weight_version == "0.7"

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
