"""The door of a worker's HTTP surface: tokens, bodies, methods, callers that hang up; and what every worker answers."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from rlbus.schemas import FlushCache, PauseGeneration, ResultStatus, Version
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import Step
from rlbus.workers.engines.lora import LoraInfo
from rlbus.workers.lora_testing import config_for
from rlbus.workers.system import app as app_module
from rlbus.workers.system import calls
from rlbus.workers.system.app import OWN_SHAPE, Door, make_app
from rlbus.workers.system.calls import Call, Endpoint
from rlbus.workers.system.testing import Front, on_surface
from rlbus.workers.testing import updated

pytestmark = pytest.mark.unit

PATHS = ["/health", "/live", "/metrics", "/status", "/ops/x", "/engine/pause_generation", "/nowhere"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "header", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"}, {"authorization": "right"}]
)
def test_without_the_token_nothing_is_answered(path: str, header: dict[str, str]) -> None:
    """SCENARIOS 43: without, with another one, in another scheme; also what isn't there."""

    async def scenario(front: Front) -> None:
        answer = await front.post(path, {}, **header)
        assert answer.status_code == 401
        assert "RLBUS_SYSTEM_TOKEN" in answer.text
        assert "right" not in answer.text
        assert front.rig.engine.calls.count("pause") == 0

    on_surface(scenario, tokens=("right",))


@pytest.mark.parametrize("header", ["Bearer right", "bearer right", "Bearer  right"])
def test_the_token_lets_in(header: str) -> None:
    """As bearer token; the scheme's case doesn't matter."""

    async def scenario(front: Front) -> None:
        assert (await front.get("/health", authorization=header)).status_code == 200

    on_surface(scenario, tokens=("right",))


def test_a_401_says_which_scheme() -> None:
    """As RFC 9110 asks for."""

    async def scenario(front: Front) -> None:
        answer = await front.get("/health")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert front.door.num_refused == 1

    on_surface(scenario, tokens=("right",))


def test_refusals_in_the_log_have_no_escapes_of_the_senders(caplog: pytest.LogCaptureFixture) -> None:
    """Who reads it on a terminal would run them."""

    async def scenario(front: Front) -> None:
        assert (await front.get("/a%1B[2J%0Aforged")).status_code == 401

    on_surface(scenario, tokens=("right",))
    assert "refused GET '/a" in caplog.text
    assert "\x1b" not in caplog.text


def test_a_page_in_a_browser_can_not_steer_a_worker_without_token() -> None:
    """Loopback keeps others out, but not the pages that this user has open."""

    async def scenario(front: Front) -> None:
        assert (await front.post("/status", origin="http://evil")).status_code == 403
        assert (await front.get("/status")).status_code == 200

    on_surface(scenario)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:1", "10.0.0.1", "127.0.0.1.evil.example", "[::1", ""])
def test_without_a_token_another_hosts_name_is_refused(host: str) -> None:
    """A name that was made to point at this machine, from a browser on it: to that it is no other origin."""

    async def scenario(front: Front) -> None:
        answer = await front.get("/status", host=host)
        assert answer.status_code == 403
        assert "RLBUS_SYSTEM_TOKEN" in answer.text
        for own in ("127.0.0.1:1", "localhost", "[::1]:8", "127.0.0.2"):
            assert (await front.get("/status", host=own)).status_code == 200

    on_surface(scenario)


def test_with_a_token_the_hosts_name_does_not_matter() -> None:
    """Others reach it by whatever name it has."""

    async def scenario(front: Front) -> None:
        answer = await front.get("/health", host="worker.example:1", authorization="Bearer right")
        assert answer.status_code == 200

    on_surface(scenario, tokens=("right",))


def test_what_is_not_there_is_named() -> None:
    """In rlbus' own shape."""

    async def scenario(front: Front) -> None:
        answer = await front.get("/nowhere")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"
        assert "/nowhere" in answer.json()["error"]["message"]

    on_surface(scenario)


def test_another_method_is_refused_with_those_that_are_there() -> None:
    """405 and an Allow header."""

    async def scenario(front: Front) -> None:
        answer = await front.post("/status", {})
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")

    on_surface(scenario)


def test_health_follows_the_engine_and_not_the_pause() -> None:
    """Paused is healthy; an engine that doesn't answer is not, except while it is at declared work."""

    async def scenario(front: Front) -> None:
        assert (await front.get("/health")).json()["status"] == "ready"
        await front.rig.send(PauseGeneration())
        assert (await front.get("/health")).status_code == 200
        front.rig.agent.lose("it is gone")
        answer = await front.get("/health")
        assert (answer.status_code, answer.json()["problem"]) == (503, "it is gone")
        assert (await front.get("/live")).status_code == 503

    on_surface(scenario)


def test_an_engine_that_does_not_answer_is_not_ready() -> None:
    """But its process is alive."""

    async def scenario(front: Front) -> None:
        assert (await front.get("/health")).status_code == 503
        assert (await front.get("/live")).status_code == 200

    on_surface(scenario, {"observe": {0: Step(hangs=True)}})


def test_metrics_tell_version_state_and_counts() -> None:
    """In Prometheus' text; one sample of each enumeration is 1."""

    async def scenario(front: Front) -> None:
        await updated(front.rig, Version(incarnation=2, step=9_007_199_254_740_991))
        await front.post("/status", {})
        answer = await front.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        assert "rlbus_worker_weights_step 9007199254740991" in lines
        assert "rlbus_worker_weights_incarnation 2" in lines
        assert 'rlbus_worker_weights_state{state="clean"} 1' in lines
        assert 'rlbus_worker_weights_state{state="dirty"} 0' in lines
        assert 'rlbus_worker_generation{state="running"} 1' in lines
        assert 'rlbus_worker_http_requests_total{path="/status",status="405"} 1' in lines
        samples = [line for line in lines if not line.startswith("#")]
        assert len({s.rpartition(" ")[0] for s in samples}) == len(samples)

    on_surface(scenario)


def test_metrics_name_the_op_that_runs_without_waiting_for_it() -> None:
    """A scrape shares nothing with a mutation."""

    async def scenario(front: Front) -> None:
        front.rig.post(FlushCache())
        await asyncio.sleep(0.1)
        assert 'rlbus_worker_op_running{route="flush_cache"} 1' in (await front.get("/metrics")).text

    on_surface(scenario, {"flush_cache": {0: Step(latency_s=9.0)}})


def test_the_outcome_of_an_op_can_be_asked_for() -> None:
    """For a caller whose answer was lost."""

    async def scenario(front: Front) -> None:
        await front.rig.send(FlushCache(), op_id="it")
        assert (await front.get("/ops/it")).json() == {
            "type": "outcome",
            "of_op_id": "it",
            "running": False,
            "status": "ok",
            "fault": None,
        }
        missing = await front.get("/ops/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_op")
        assert (await front.get("/ops/a.b")).status_code == 400

    on_surface(scenario)


def test_a_question_is_no_op_whatever_op_its_caller_names(tmp_path: Path) -> None:
    """A client that sends one header with all it asks gets the outcome of its op, and the list of adapters."""

    async def scenario(front: Front) -> None:
        assert (await front.post("/engine/flush_cache", {}, x_rlbus_op_id="it")).status_code == 200
        answer = await front.get("/ops/it", x_rlbus_op_id="it")
        assert (answer.status_code, answer.json().get("status")) == (200, "ok")
        assert "x-rlbus-op-id" not in answer.headers
        assert (await front.get("/ops/other", x_rlbus_op_id="it")).status_code == 404
        assert (await front.get("/v1/loras", x_rlbus_op_id="it")).json()["status"] == "success"
        for path in ("/health", "/live", "/metrics", "/status", "/is_paused", "/weight_info"):
            assert (await front.get(path, x_rlbus_op_id="it")).status_code == 200

    on_surface(scenario, engine=FakeEngine(loras=LoraInfo(4)), config=config_for(tmp_path))


# --- bodies, headers and callers, on an endpoint of the test's own


def over(scenario: Any, handler: Any, steps: Any = None) -> None:
    """Run with one more endpoint, POST /x."""

    async def with_endpoint(front: Front) -> None:
        door = Door(lambda: front.rig.agent)
        app = make_app([Endpoint("/x", "POST", handler, OWN_SHAPE)], door)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=3600.0) as client:
            await scenario(Front(front.rig, client, door), app)

    on_surface(with_endpoint, steps)


async def echo(call: Call) -> Response:
    """What was understood."""
    return JSONResponse({"body": call.json(), "caller": call.caller, "lease_s": call.lease_s, "limit_s": call.limit_s})


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"\xff", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"{}", "application/x-www-form-urlencoded", 415),
        (b"{}", "", 415),
        (b"{}", "application/json; charset=utf-8", 200),
        (b"", "text/plain", 200),
    ],
)
def test_a_body_is_a_json_object_or_none(content: bytes, kind: str, status: int) -> None:
    """Anything else is refused before a handler does anything."""

    async def scenario(front: Front, _: Any) -> None:
        answer = await front.client.post("/x", content=content, headers={"content-type": kind})
        assert answer.status_code == status, answer.text

    over(scenario, echo)


def test_a_huge_body_is_refused_by_its_length_and_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared or not."""
    monkeypatch.setattr(calls, "MAX_BODY_BYTES", 1000)

    async def chunks() -> Any:
        for _ in range(100):
            yield b" " * 100

    async def scenario(front: Front, _: Any) -> None:
        headers = {"content-type": "application/json"}
        assert (await front.client.post("/x", content=b" " * 1001, headers=headers)).status_code == 413
        assert (await front.client.post("/x", content=chunks(), headers=headers)).status_code == 413

    over(scenario, echo)


def test_a_body_that_does_not_come_to_its_end_is_given_up() -> None:
    """Whoever sends a byte now and then holds no memory for ever."""

    async def drops() -> Any:
        while True:
            yield b" "
            await asyncio.sleep(1.0)

    async def scenario(front: Front, _: Any) -> None:
        began_s = asyncio.get_running_loop().time()
        answer = await front.client.post("/x", content=drops(), headers={"content-type": "application/json"})
        assert answer.status_code == 408
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(calls.BODY_S, abs=1.0)

    over(scenario, echo)


def test_requests_at_the_same_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is told to come later; places become free again, also of those that failed."""
    monkeypatch.setattr(app_module, "MAX_REQUESTS", 2)

    async def scenario(front: Front, _: Any) -> None:
        slow = [asyncio.create_task(front.post("/x", x_rlbus_op_id=name)) for name in ("a", "b")]
        await asyncio.sleep(1.0)
        late = await front.post("/x")
        assert (late.status_code, late.json()["error"]["code"]) == (503, "busy")
        assert sorted([(await answer).status_code for answer in slow]) == [200, 409]
        assert (await front.post("/x")).status_code == 200

    over(scenario, slowly, {"flush_cache": {0: Step(latency_s=5.0)}})


def test_callers_may_say_who_they_are_and_for_how_long() -> None:
    """By headers, which every surface takes."""

    async def scenario(front: Front, _: Any) -> None:
        plain = (await front.post("/x")).json()
        assert plain["caller"] == "http:127.0.0.1"
        headers = {"x_rlbus_caller": "me", "x_rlbus_lease_s": "7", "x_rlbus_limit_s": "3.5"}
        said = (await front.post("/x", **headers)).json()
        assert (said["caller"], said["lease_s"], said["limit_s"]) == ("http:me", 7.0, 3.5)

    over(scenario, echo)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x_rlbus_op_id", "a b"),
        ("x_rlbus_caller", "x" * 129),
        ("x_rlbus_caller", ""),
        ("x_rlbus_lease_s", "nan"),
        ("x_rlbus_lease_s", "0"),
        ("x_rlbus_lease_s", "1_0"),
        ("x_rlbus_limit_s", "inf"),
        ("x_rlbus_limit_s", "soon"),
    ],
)
def test_a_header_that_can_not_be_is_named(name: str, value: str) -> None:
    """Before anything is done."""

    async def scenario(front: Front, _: Any) -> None:
        answer = await front.post("/x", **{name: value})
        assert answer.status_code == 400
        assert name.replace("_", "-") in answer.json()["error"]["message"]

    over(scenario, echo)


async def flush(call: Call) -> Response:
    """One op."""
    result = await call.do(FlushCache())
    return JSONResponse({"op_id": result.op_id})


async def slowly(call: Call) -> Response:
    """One op, in some time, however it ends."""
    await asyncio.sleep(2.0)
    return await flush(call)


def test_a_client_that_hangs_up_leaves_its_op_running() -> None:
    """Its outcome stays, under the op_id that it gave."""

    async def scenario(front: Front, app: Any) -> None:
        sent: list[Any] = []
        hangs_up = asyncio.Event()
        messages = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await hangs_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/x",
            "raw_path": b"/x",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost"), (b"x-rlbus-op-id", b"it")],
            "client": ("9.9.9.9", 1),
            "server": ("x", 1),
            "scheme": "http",
            "http_version": "1.1",
        }
        serving = asyncio.create_task(app(scope, receive, send))
        await asyncio.sleep(0.5)
        assert not serving.done()
        hangs_up.set()
        await serving
        assert front.door.num_requests["/x", 499] == 1
        assert front.rig.agent.state.running is not None
        again = await front.post("/x", x_rlbus_op_id="it")
        assert again.json() == {"op_id": "it"}
        assert again.headers["x-rlbus-op-id"] == "it"
        assert front.rig.engine.calls.count("flush_cache") == 1

    over(scenario, flush, {"flush_cache": {0: Step(latency_s=5.0)}})


def test_of_two_callers_the_second_is_told_what_runs() -> None:
    """409, with the op's name."""

    async def scenario(front: Front, _: Any) -> None:
        first = asyncio.create_task(front.post("/x", x_rlbus_op_id="first"))
        await asyncio.sleep(0.1)
        second = await front.post("/x")
        assert second.status_code == 409
        assert second.json()["error"]["detail"]["op_id"] == "first"
        assert (await first).status_code == 200

    over(scenario, flush, {"flush_cache": {0: Step(latency_s=5.0)}})


def test_a_worker_that_stops_or_is_not_there_yet_says_so() -> None:
    """503, not a hanging connection."""

    async def scenario(front: Front, _: Any) -> None:
        front.rig.agent.stop()
        await asyncio.sleep(0.1)
        answer = await front.post("/x")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        door = Door(lambda: None)
        transport = httpx.ASGITransport(make_app([Endpoint("/x", "POST", echo, OWN_SHAPE)], door))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            assert (await client.post("/x")).status_code == 503

    over(scenario, flush)


def test_a_bug_of_a_handler_is_told_without_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """The log has it."""

    async def broken(call: Call) -> Response:
        raise ValueError("a secret")

    async def scenario(front: Front, _: Any) -> None:
        answer = await front.post("/x")
        assert answer.status_code == 500
        assert "secret" not in answer.text

    over(scenario, broken)
    assert "a secret" in caplog.text


def test_a_mutation_is_logged_with_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    """Every one of them is audited."""
    caplog.set_level("INFO", "rlbus.workers")

    async def scenario(front: Front, _: Any) -> None:
        await front.post("/x", x_rlbus_caller="me", x_rlbus_op_id="it")
        result = await front.rig.send(FlushCache(), op_id="it")
        assert result.status is ResultStatus.OK

    over(scenario, flush)
    assert "http:me asks for flush_cache (op it)" in caplog.text


def test_a_path_with_a_slash_too_many_is_not_redirected() -> None:
    """A client would lose its body, and its token, on the way."""

    async def scenario(front: Front) -> None:
        assert (await front.get("/status/")).status_code == 404

    on_surface(scenario)
