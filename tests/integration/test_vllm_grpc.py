"""The client of vllm.Control and the engine on it, against a server that answers as told: errors, silence, restarts."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from rlbus.errors import EngineDeadError, EngineError, FaultError, RefusedError
from rlbus.schemas import DRAFT_ROUTE, FaultCode, Generation, PauseMode, Version
from rlbus.workers.engines.draft import drafter
from rlbus.workers.peer_http import Peer
from rlbus.workers.vllm_grpc import control as control_module
from rlbus.workers.vllm_grpc.control import Control
from rlbus.workers.vllm_grpc.engine import VllmGrpcEngine
from rlbus.workers.vllm_http.supervisor import LOST
from rlbus.workers.vllm_server.exchange import CallFolder, RankDraft, RankOutcome
from tests.integration.scripted_control import Script, forever, serve
from tests.peers.programs import free_port

pytestmark = pytest.mark.integration

LIMIT_S = 90.0


def go(check: Coroutine[Any, Any, None]) -> None:
    """Run on real time, with a bound."""

    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await check

    asyncio.run(bounded())


async def until_called(script: Script, name: str) -> None:
    """Until the server has got such a call."""
    while name not in script.calls:  # noqa: ASYNC110 - a real server has no Event
        await asyncio.sleep(0.01)


def control_at(port: int, **more: Any) -> Control:
    return Control(Peer.of(f"http://127.0.0.1:{port}", **more))


def greeting(script: Script, outcome: RankOutcome | None = None) -> None:
    """Let the ranks answer questions in the folder, as rlbus's transfer backend does."""
    import msgspec

    async def answer(request: Any) -> None:
        info = msgspec.json.decode(request.init_info_json)
        folder = CallFolder(info["folder"])
        for rank in range(script.num_ranks):
            if info.get("ask") is not None:
                folder.end(info["ask"], rank, outcome or RankOutcome(device="cpu"))

    script.answers["InitWeightTransferEngine"] = answer


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        ("INVALID_ARGUMENT", RefusedError, FaultCode.BAD_MESSAGE),
        ("FAILED_PRECONDITION", RefusedError, FaultCode.WRONG_STATE),
        ("UNIMPLEMENTED", RefusedError, FaultCode.NO_ROUTE),
        ("UNAUTHENTICATED", EngineError, FaultCode.ENGINE_FAILED),
        ("INTERNAL", EngineError, FaultCode.ENGINE_FAILED),
    ],
)
def test_status_of_a_real_call_becomes_a_fault(status: str, kind: type[FaultError], code: FaultCode) -> None:
    """By the table, with the server's words."""

    async def check() -> None:
        script = Script()
        script.refuse("ResumeGeneration", status, "the server's words")
        async with serve(script) as port:
            control = control_at(port)
            await control.connect(LIMIT_S)
            with pytest.raises(kind, match="the server's words") as caught:
                await control.resume()
            assert caught.value.code is code
            await control.is_paused()
            await control.aclose()

    go(check())


def test_call_without_an_answer_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the connection is as good as before."""

    async def check() -> None:
        script = Script(answers={"IsPaused": forever})
        async with serve(script) as port:
            control = control_at(port)
            await control.connect(LIMIT_S)
            with pytest.raises(EngineError, match=r"IsPaused did not return within 0\.2 s"):
                await control.is_paused(0.2)
            assert not control.errored
            assert await control.get_version() == "default"
            await control.aclose()

    go(check())


def test_headers_go_with_every_call_and_show_nowhere() -> None:
    """Also with the first one; a secret isn't part of an error."""

    async def check() -> None:
        script = Script()
        script.refuse("ResumeGeneration", "UNAUTHENTICATED", "no such key: s3cret-key")
        async with serve(script) as port:
            control = control_at(port, api_key="s3cret-key", headers={"X-Team": "rl"})
            await control.connect(LIMIT_S)
            with pytest.raises(EngineError) as caught:
                await control.resume()
            await control.abort(["a"])
            assert "s3cret" not in str(caught.value)
            assert "s3cret" not in repr(control)
            for name in ("GetServerInfo", "ResumeGeneration", "Abort"):
                assert script.metadata[name]["authorization"] == "Bearer s3cret-key"
                assert script.metadata[name]["x-team"] == "rl"
            await control.aclose()

    go(check())


def test_server_that_comes_later_is_waited_for() -> None:
    """A sidecar may be started before its server."""

    async def check() -> None:
        script, port = Script(), free_port()
        control = control_at(port)
        connecting = asyncio.ensure_future(control.connect(LIMIT_S))
        await asyncio.sleep(0.3)
        assert not connecting.done()
        async with serve(script, port):
            await connecting
            await control.aclose()

    go(check())


def test_server_that_never_comes_is_an_error_in_time() -> None:
    """Naming the call and the limit."""

    async def check() -> None:
        control = control_at(free_port())
        with pytest.raises(EngineError, match=r"did not return within 0\.5 s"):
            await control.connect(0.5)
        await control.aclose()

    go(check())


def test_connection_that_breaks_and_comes_back_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call failed, maybe after it was done; the next one succeeds."""
    monkeypatch.setattr(control_module, "LOST_S", LIMIT_S)
    monkeypatch.setattr(control_module, "CALL_S", LIMIT_S)

    async def check() -> None:
        script = Script(answers={"ResumeGeneration": forever})
        async with serve(script, free_port()) as port:
            control = control_at(port)
            await control.connect(LIMIT_S)
            call = asyncio.ensure_future(control.resume())
            await until_called(script, "ResumeGeneration")
        async with serve(script, port):
            with pytest.raises(EngineError) as caught:
                await call
            assert not isinstance(caught.value, EngineDeadError)
            assert caught.value.fault.retryable
            assert not await control.is_paused()
            await control.aclose()

    go(check())


def test_server_that_stays_away_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """After LOST_S; from then on every call says so at once."""
    monkeypatch.setattr(control_module, "LOST_S", 0.5)

    async def check() -> None:
        async with serve(Script(), free_port()) as port:
            control = control_at(port)
            await control.connect(LIMIT_S)
        with pytest.raises(EngineDeadError, match="can't be reached any more"):
            await control.is_paused()
        assert control.errored
        call = control.resume()
        with pytest.raises(EngineDeadError):
            call.send(None)  # it doesn't wait for anything
        await control.aclose()

    go(check())


def test_server_that_was_started_anew_is_another_one(tmp_path: Path) -> None:
    """Nobody knows its weights; the connection alone would look the same."""

    async def check() -> None:
        script = Script(backend=None)
        async with serve(script) as port:
            engine = VllmGrpcEngine(control_at(port), run_dir=str(tmp_path))
            await engine.start()
            assert (await engine.observe()).generation is Generation.RUNNING
            script.instance_id = "2"
            with pytest.raises(EngineDeadError, match="started anew"):
                await engine.observe()
            await engine.aclose()
            assert not (tmp_path / LOST).exists(), "the new server would be started anew, too"

    go(check())


def test_dead_engine_behind_a_living_server_is_seen_even_in_an_update(tmp_path: Path) -> None:
    """The call that holds the engine never comes back; the question beside it tells, and ends it."""

    async def check() -> None:
        script = Script()
        greeting(script)
        async with serve(script) as port:
            engine = VllmGrpcEngine(control_at(port), run_dir=str(tmp_path))
            await engine.start()
            script.answers["StartWeightUpdate"] = forever
            control, calls = engine._control, engine._calls
            held = asyncio.ensure_future(
                calls.hold("start", lambda: control.start_update(LIMIT_S), LIMIT_S, is_paused=True)
            )
            await until_called(script, "StartWeightUpdate")
            script.answers["IsPaused"] = forever
            engine._next_glance_s = 0.0
            assert (await engine.observe()).generation is Generation.PAUSED
            script.refuse(
                "IsPaused", "INTERNAL", "is_paused failed: transport error: Destination client not found by identity"
            )
            engine._next_glance_s = 0.0
            with pytest.raises(EngineDeadError, match="its server says so"):
                await engine.observe()
            with pytest.raises(EngineDeadError):
                await held
            assert not (tmp_path / LOST).exists()
            await engine.aclose()
            assert (tmp_path / LOST).exists(), "whoever supervises the server doesn't hear that it needs a new engine"

    go(check())


def test_only_what_the_server_and_its_ranks_have_is_advertised(tmp_path: Path) -> None:
    """No transfer: no updates. A transfer of rlbus's: sums, but no updates without the model's files."""

    async def check() -> None:
        always = {"pause_generation", "resume_generation", "flush_cache", "abort_request", "set_weight_version"}
        silent, ours = Script(), Script()
        greeting(ours)
        for script, more in ((Script(backend=None), set()), (silent, set()), (ours, {"get_weight_checksums"})):
            async with serve(script) as port:
                engine = VllmGrpcEngine(control_at(port), run_dir=str(tmp_path))
                await engine.start()
                assert engine.info.routes == always | more
                assert engine.info.backends == ()
                await engine.aclose()

    go(check())


def test_transfer_backend_that_only_has_our_name_is_found_out(tmp_path: Path) -> None:
    """Its ranks raise at our question."""

    async def check() -> None:
        script = Script()
        script.refuse("InitWeightTransferEngine", "INTERNAL", "unexpected keyword argument 'ask'")
        async with serve(script) as port:
            engine = VllmGrpcEngine(control_at(port), run_dir=str(tmp_path))
            await engine.start()
            assert "update_weights_from_distributed" not in engine.info.routes
            await engine.aclose()

    go(check())


def test_pause_modes_go_by_vllms_numbers_and_never_unspecified() -> None:
    """The server would take 0 for an abort, and end everybody's requests."""

    async def check() -> None:
        script = Script()
        async with serve(script) as port:
            control = control_at(port)
            await control.connect(LIMIT_S)
            for mode, number in ((PauseMode.ABORT, 1), (PauseMode.WAIT, 2), (PauseMode.KEEP, 3)):
                await control.pause(mode, False)
                request = script.requests["PauseGeneration"]
                assert (request.mode, request.HasField("clear_cache"), request.clear_cache) == (number, True, False)
            for bad in (None, "", "unspecified", 0):
                with pytest.raises(RefusedError) as caught:
                    await control.pause(bad, False)  # type: ignore[arg-type]
                assert caught.value.code is FaultCode.BAD_MESSAGE
            assert script.calls.count("PauseGeneration") == 3
            await control.aclose()

    go(check())


def test_message_that_the_server_wouldnt_take_isnt_sent() -> None:
    """A list of too many tensors; the limit is named."""

    async def check() -> None:
        script = Script()
        async with serve(script) as port:
            control = control_at(port)
            await control.connect(LIMIT_S)
            with pytest.raises(RefusedError, match="4193280") as caught:
                await control.update_weights(b"x" * (4 << 20), LIMIT_S)
            assert caught.value.code is FaultCode.TOO_LARGE
            assert "UpdateWeights" not in script.calls
            await control.aclose()

    go(check())


def test_engine_that_was_left_paused_and_torn_is_found_so(tmp_path: Path) -> None:
    """An agent that comes back doesn't take torn weights for good ones."""

    async def check() -> None:
        script = Script(is_paused=True, label="torn")
        greeting(script, RankOutcome(device="cpu", is_open=True, weights_touched=True))
        async with serve(script) as port:
            engine = VllmGrpcEngine(control_at(port), run_dir=str(tmp_path))
            await engine.start()
            assert (engine.found.is_paused, engine.found.is_torn) == (True, True)
            assert "FinishWeightUpdate" in script.calls
            await engine.aclose()

    go(check())


def drafting(script: Script, folder: Path, label: str | None = None) -> None:
    """Let the ranks speculate with a model in the folder, and have one GPU each."""
    from rlbus.workers.torch_lm.make import make_tiny_model

    script.model = str(make_tiny_model(folder / "model", vocab_size=512))
    draft = str(make_tiny_model(folder / "draft", vocab_size=512, layers=1))
    said = RankDraft(method="draft_model", model=draft, label=label)
    greeting(script, RankOutcome(device="cuda", draft=said, digests={"d": "cd" * 32}))


def test_draft_is_asked_about_by_the_services_own_call_and_found_torn_by_its_ranks(tmp_path: Path) -> None:
    """The server, which has one label only, says nothing of it; a server that can't update it isn't asked to."""

    async def check() -> None:
        for has_draft in (True, False):
            script = Script(has_draft=has_draft, label="0.7")
            drafting(script, tmp_path, "torn")
            async with serve(script) as port:
                engine = VllmGrpcEngine(control_at(port), run_dir=str(tmp_path))
                await engine.start()
                assert (DRAFT_ROUTE in engine.info.routes) is has_draft
                # It is generated with, whoever could update it.
                assert (engine.found.is_torn, engine.found.is_draft_torn) == (False, True)
                if has_draft:
                    await drafter(engine).draft_checksums()
                    made = [call for call in script.calls if call.endswith("WeightUpdate")]
                    assert made == ["StartDraftWeightUpdate", "FinishWeightUpdate"]
                await engine.aclose()

    go(check())


def test_sleep_that_would_discard_a_draft_is_refused(tmp_path: Path) -> None:
    """With the last wake the server generates at once, and its label would say that the target is whole by then."""

    async def check() -> None:
        script = Script(has_draft=True, has_sleep=True)
        drafting(script, tmp_path)
        async with serve(script) as port:
            engine = VllmGrpcEngine(control_at(port), run_dir=str(tmp_path))
            await engine.start()
            with pytest.raises(RefusedError, match="level 2 would discard the draft"):
                await engine.sleep(engine.sleep_tags, 2, PauseMode.KEEP)
            assert "Sleep" not in script.calls
            await engine.sleep(engine.sleep_tags, 1, PauseMode.KEEP)
            await engine.aclose()

    go(check())


def test_weights_can_be_named_without_loading_any() -> None:
    """By the service's own call; what the engine says of itself follows."""

    async def check() -> None:
        script = Script(backend=None)
        async with serve(script) as port:
            engine = VllmGrpcEngine(control_at(port))
            await engine.start()
            await engine.label_weights(Version(incarnation=3, step=9))
            assert (script.label, (await engine.observe()).weight_version) == ("3.9", "3.9")
            script.refuse("UpdateWeightVersion", "INTERNAL", "boom")
            with pytest.raises(EngineError, match="boom"):
                await engine.label_weights(Version(step=1))
            await engine.aclose()

    go(check())


def test_ids_are_aborted_as_given_and_as_the_http_routes_spell_them() -> None:
    """An empty list ends nothing, and isn't sent."""

    async def check() -> None:
        script = Script(backend=None)
        async with serve(script) as port:
            engine = VllmGrpcEngine(control_at(port))
            await engine.start()
            assert await engine.abort(["a"]) is None
            assert list(script.requests["Abort"].request_ids) == ["a", "cmpl-a", "chatcmpl-a"]
            await engine.abort([])
            assert script.calls.count("Abort") == 1
            await engine.aclose()

    go(check())
