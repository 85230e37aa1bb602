"""vLLM's verbs and prime-rl's admin plane on a whole fleet: bodies, statuses, and one op behind each."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus import subjects
from rlbus.controller.http import shared
from rlbus.controller.http.fleet import DEFAULT_LEASE_S
from rlbus.controller.http.reading import MAX_BODY_BYTES
from rlbus.schemas import (
    AbortedData,
    AbortRequest,
    FaultCode,
    FlushCache,
    LoadWeights,
    PauseGeneration,
    PauseMode,
    ResumeGeneration,
    Target,
    Version,
    WorkerStatus,
)
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.http.side import code_of, http_side, over_http
from tests.unit.controller.scene import PAUSED, RUNNING, Scene, w, worker

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights of two steps, below the root of workers with `rooted`."""
    for step in (1, 2):
        FakeEngine.save(tmp_path / f"step_{step}", Version(step=step))
    return tmp_path


def rooted(folder: Path) -> AgentConfig:
    """Of a worker that may load below `folder`."""
    return AgentConfig(weight_roots=(str(folder),))


def bodies(scene: Scene, kind: type[Any]) -> list[Any]:
    """Commands of this kind that were sent to workers, one per fan-out."""
    seen = {c.op_id: c.body for c, _ in scene.commands if isinstance(c.body, kind)}
    return list(seen.values())


async def statuses(scene: Scene) -> list[WorkerStatus]:
    """In order of the workers."""
    members = await scene.fleet.members()
    return [members[name].status for name in sorted(members)]


def test_pause_and_resume_act_on_everybody_as_one_op() -> None:
    """With vLLM's bodies to the letter; the op's id is in a header and in the history of whoever looks."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        paused = await client.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        assert (paused.status_code, paused.content) == (200, b'{"status":"paused"}')
        assert await scene.generations() == [PAUSED] * 3
        [body] = bodies(scene, PauseGeneration)
        assert (body.mode, body.clear_cache) == (PauseMode.KEEP, False)
        assert all(c.op_id.startswith(paused.headers["x-rlbus-op-id"]) for c, _ in scene.commands[:1])
        asked = await client.get("/is_paused")
        assert (asked.status_code, asked.content) == (200, b'{"is_paused":true}')
        resumed = await client.post("/resume")
        assert (resumed.status_code, resumed.content) == (200, b'{"status":"resumed"}')
        assert await scene.generations() == [RUNNING] * 3
        assert (await client.get("/is_paused")).json() == {"is_paused": False}

    over_http([worker(n) for n in (1, 2, 3)], check)


def test_a_pause_is_vllms_default_and_has_a_lease() -> None:
    """Abort, with caches cleared; held in the caller's name for as long as it says, or until somebody resumes."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        await client.post("/pause", headers={"x-rlbus-caller": "trainer-0"})
        [body] = bodies(scene, PauseGeneration)
        assert (body.mode, body.clear_cache) == (PauseMode.ABORT, True)
        [status] = await statuses(scene)
        now = scene.fleet.client.bus.clock.now()
        assert status.pause is not None
        assert status.pause.owner == "http:trainer-0@127.0.0.1"
        assert status.pause.expires_at == pytest.approx(now + DEFAULT_LEASE_S, abs=5.0)
        await client.post("/resume")
        await client.post("/pause", headers={"x-rlbus-lease-s": "5"})
        await asyncio.sleep(6)
        assert await scene.generations() == [RUNNING]
        await client.post("/pause", headers={"x-rlbus-lease-s": "hold"})
        [status] = await statuses(scene)
        assert status.pause is not None
        assert status.pause.expires_at is None

    over_http([worker(1)], check)


def test_a_pause_that_half_succeeds_is_undone_and_names_who_failed() -> None:
    """SCENARIOS 1: as over the bus; the answer has one outcome per worker."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        answer = await client.post("/pause")
        status, message = code_of(answer)
        assert status == 500
        assert message.startswith("Failed to pause generation: ")
        assert "backend/2" in message
        found = {o["worker"]: o["outcome"] for o in answer.json()["rlbus"]["outcomes"]}
        assert found == {"backend/1": "undone", "backend/2": "failed", "backend/3": "undone"}
        assert answer.headers["x-rlbus-op-id"] == answer.json()["rlbus"]["op_id"]
        assert await scene.generations() == [RUNNING] * 3

    over_http([worker(1), worker(2, {"pause": {1: failing()}}), worker(3)], check)


def test_the_same_op_id_is_one_op() -> None:
    """Sent again after it ended, it has the same report, and nobody is asked again."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        first = await client.post("/pause", headers={"x-rlbus-op-id": "mine"})
        again = await client.post("/pause", headers={"x-rlbus-op-id": "mine"})
        assert [a.headers["x-rlbus-op-id"] for a in (first, again)] == ["mine", "mine"]
        assert len(bodies(scene, PauseGeneration)) == 1
        other = await client.post("/resume", headers={"x-rlbus-op-id": "mine"})
        assert code_of(other)[0] == 400

    over_http([worker(1)], check)


def test_a_client_whose_read_time_out_fired_joins_what_runs(folder: Path) -> None:
    """SCENARIOS 3: a slow load is done once, however often a retrying client posts it."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(20):
                    await client.post("/update_weights", json={"weight_dir": str(folder / "step_1")})
            await asyncio.sleep(5)
        done = await client.post("/update_weights", json={"weight_dir": str(folder / "step_1")})
        assert (done.status_code, done.json()) == (200, {"status": "ok"})
        assert done.headers["x-rlbus-version"] == "0.1"
        assert len(bodies(scene, LoadWeights)) == 1

    over_http([worker(1, {"load_weights": {1: Step(latency_s=90.0)}}, config=rooted(folder))], check)


def test_a_client_that_is_gone_for_good_leaves_nobody_paused() -> None:
    """SCENARIOS 1: its pause is taken back."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await client.post("/pause", params={"mode": "wait"})
        await asyncio.sleep(shared.GRACE_S + 60)
        assert await scene.generations() == [RUNNING] * 2

    over_http([worker(1), worker(2, {"pause": {1: Step(latency_s=40.0)}})], check)


def test_another_op_meanwhile_is_told_to_come_later() -> None:
    """503, which retrying clients take for what it is, with the op that runs."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        slow = asyncio.ensure_future(client.post("/pause"))
        await asyncio.sleep(1)
        answer = await client.post("/resume")
        status, message = code_of(answer)
        assert (status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["rlbus"]["code"] == "busy"
        assert "running" in message or "runs" in message
        assert (await slow).status_code == 200

    over_http([worker(1, {"pause": {1: Step(latency_s=5.0)}})], check)


def test_prime_rls_update_between_pause_and_resume(folder: Path) -> None:
    """Its admin plane as it calls it: pause, the folder, resume; the fleet is at the next step then."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        assert (await client.get("/weight_info")).json() == {"weight_version": "default"}
        for step in (1, 2):
            await client.post("/pause", params={"mode": "keep", "clear_cache": "false"})
            done = await client.post("/update_weights", json={"weight_dir": str(folder / f"step_{step}")})
            assert (done.status_code, done.content) == (200, b'{"status":"ok"}')
            assert await scene.generations() == [PAUSED] * 2  # whoever paused them resumes them
            assert (await client.post("/resume")).status_code == 200
            assert (await client.get("/weight_info")).json() == {"weight_version": f"0.{step}"}
        assert [b.path for b in bodies(scene, LoadWeights)] == [str(folder / "step_1"), str(folder / "step_2")]

    over_http([worker(n, config=rooted(folder)) for n in (1, 2)], check)


def test_a_path_outside_of_the_roots_changes_nothing(folder: Path) -> None:
    """A conflict with how the workers were started: no retry helps."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        for path in ("/etc", f"{folder}/../etc", "relative"):
            answer = await client.post("/update_weights", json={"weight_dir": path})
            assert code_of(answer)[0] == 409, answer.text
            assert "root" in code_of(answer)[1]
        assert bodies(scene, LoadWeights) == []
        assert await scene.generations() == [RUNNING]

    over_http([worker(1, config=rooted(folder))], check)


def test_dirty_weights_refuse_to_resume(folder: Path) -> None:
    """SCENARIOS 4: prime-rl's `finally: resume` doesn't let torn weights generate."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        await client.post("/pause")
        torn = await client.post("/update_weights", json={"weight_dir": str(folder / "step_1")})
        assert code_of(torn)[0] == 500
        answer = await client.post("/resume")
        assert code_of(answer)[0] == 409
        assert answer.json()["rlbus"]["outcomes"][0]["code"] == "dirty"
        assert await scene.generations() == [PAUSED]

    over_http([worker(1, {"load_weights": {1: failing(after_parts=1)}}, config=rooted(folder))], check)


def test_abort_ends_the_named_or_all_and_counts() -> None:
    """None, and an empty list, are all; vLLM's body."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        alike: list[dict[str, Any]] = [{}, {"request_ids": []}, {"request_ids": None}]
        for body in alike:
            answer = await client.post("/abort_requests", json=body)
            assert answer.json() == {"status": "aborted", "aborted": 0}
        await client.post("/abort_requests", json={"request_ids": ["a", "b"]})
        assert [b.request_ids for b in bodies(scene, AbortRequest)] == [None, None, None, ("a", "b")]

    over_http([worker(1), worker(2)], check)


def test_two_requests_under_one_op_id_are_never_answered_with_one_report() -> None:
    """The first of the name is done, its repeat joins it; another verb, or other arguments, are refused meanwhile."""
    named = {"x-rlbus-op-id": "mine"}

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        first = asyncio.create_task(client.post("/abort_requests", json={"request_ids": ["a"]}, headers=named))
        await asyncio.sleep(1.0)
        again = asyncio.create_task(client.post("/abort_requests", json={"request_ids": ["a"]}, headers=named))
        others = [
            await client.post("/reset_prefix_cache", headers=named),
            await client.post("/abort_requests", json={"request_ids": ["b"]}, headers=named),
            await client.post("/abort_requests?component=backend", json={"request_ids": ["a"]}, headers=named),
        ]
        assert [code_of(answer)[0] for answer in others] == [400] * 3
        assert not first.done()
        assert [(await task).status_code for task in (first, again)] == [200, 200]
        assert [b.request_ids for b in bodies(scene, AbortRequest)] == [("a",)]
        assert bodies(scene, FlushCache) == []

    over_http([worker(1, {"abort": {1: Step(latency_s=5.0)}})], check)


def test_aborts_that_nobody_has_named_are_each_done() -> None:
    """Requests may have come in between."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        answers = await asyncio.gather(*(client.post("/abort_requests") for _ in range(2)))
        assert [answer.status_code for answer in answers] == [200, 200]
        assert len(bodies(scene, AbortRequest)) == 2

    over_http([worker(1)], check)


def test_engines_that_do_not_count_add_nothing_to_those_aborted() -> None:
    """Beside one that ended two and will end a third at its first token."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        async def uncounted(_: object) -> None:
            return None

        async def counted(_: object) -> AbortedData:
            return AbortedData(num_aborted=2, num_deferred=1)

        one, two = (rig.engine for rig in scene.fleet.workers)
        one.abort = uncounted  # type: ignore[method-assign, assignment]
        two.abort_counted = counted  # type: ignore[attr-defined]
        answer = await client.post("/abort_requests")
        assert (answer.status_code, answer.json()) == (200, {"status": "aborted", "aborted": 3})

    over_http([worker(1), worker(2)], check)


def test_a_cache_that_cannot_be_emptied_is_no_success() -> None:
    """SCENARIOS 14: vLLM says so with 200 and `success`."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        failed = await client.post("/reset_prefix_cache")
        assert (failed.status_code, failed.content) == (200, b'{"success":false}')
        done = await client.post("/reset_prefix_cache", params={"reset_external": "false"})
        assert (done.status_code, done.content) == (200, b'{"success":true}')
        assert len(bodies(scene, FlushCache)) == 2

    over_http([worker(1), worker(2, {"flush_cache": {1: failing(code=FaultCode.FLUSH_FAILED)}})], check)


def test_world_size_is_the_sum_of_the_living() -> None:
    """Of unequal workers; with data parallel ranks, always."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        answer = await client.get("/get_world_size", params={"include_dp": "true"})
        assert (answer.status_code, answer.content) == (200, b'{"world_size":5}')
        assert (await client.get("/get_world_size?component=nobody")).status_code == 503
        assert code_of(await client.get("/get_world_size?include_dp=false"))[0] == 501

    over_http([worker(1, world_size=1), worker(2, world_size=4)], check)


def test_one_worker_that_runs_means_not_paused() -> None:
    """Whoever asks wants to know whether all stand still."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        await scene.fleet.client.pause(Target(workers=(w(1),)))
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        assert bodies(scene, ResumeGeneration) == []

    over_http([worker(1), worker(2)], check)


@pytest.mark.parametrize(
    ("method", "target", "status", "part"),
    [
        ("POST", "/pause?mode=now", 400, "keep, wait or abort"),
        ("POST", "/pause?clear_cache=maybe", 400, "clear_cache"),
        ("POST", "/pause?clear_cach=true", 400, "clear_cach"),
        ("POST", "/pause?mode=keep&mode=wait", 400, "twice"),
        ("POST", "/pause?component=a.b", 400, "component"),
        ("POST", "/pause?component=nobody", 503, "matches no worker"),
        ("POST", "/resume?force=true", 400, "force"),
        ("POST", "/reset_prefix_cache?reset_running_requests=true", 501, "reset_running_requests"),
        ("POST", "/reset_prefix_cache?reset_external=true", 501, "reset_external"),
        ("GET", "/pause", 405, "GET"),
        ("POST", "/is_paused", 405, "POST"),
        ("GET", "/is_paused?x=1", 400, "'x'"),
        ("GET", "/weight_info?x=1", 400, "'x'"),
        ("GET", "/get_world_size?include_dp=2", 400, "include_dp"),
        ("POST", "/init_broadcaster", 501, "NCCL"),
        ("POST", "/collective_rpc", 404, "no route"),
        ("POST", "/nonsense", 404, "no route"),
        ("DELETE", "/resume", 405, "DELETE"),
    ],
)
def test_a_wrong_request_is_named_and_changes_nothing(method: str, target: str, status: int, part: str) -> None:
    """Unknown and doubled names, wrong words, other methods, routes that aren't there."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        found, message = code_of(await client.request(method, target))
        assert found == status
        assert part in message
        assert bodies(scene, PauseGeneration) == bodies(scene, ResumeGeneration) == bodies(scene, FlushCache) == []

    over_http([worker(1)], check)


@pytest.mark.parametrize(
    ("path", "content", "kind", "status", "part"),
    [
        ("/update_weights", b"{}", "application/json", 400, "weight_dir"),
        ("/update_weights", b'{"weight_dir": 7}', "application/json", 400, "weight_dir"),
        ("/update_weights", b'{"weight_dir": "/weights", "a": 1, "b": 2}', "application/json", 400, "'a', 'b'"),
        ("/update_weights", b'{"weight_dir": null}', "application/json", 501, "NCCL"),
        ("/update_weights", b'["/weights"]', "application/json", 400, "object"),
        ("/update_weights", b'{"weight_dir": "/a", "weight_dir": "/weights"}', "application/json", 400, "twice"),
        ("/update_weights", b'{"weight_dir": ', "application/json", 400, "JSON"),
        ("/update_weights", b'{"weight_dir": "/weights"}', "text/plain", 415, "text/plain"),
        ("/update_weights", b'{"weight_dir": "/weights"}', None, 415, "application/json"),
        ("/update_weights", b"[" * 100_000, "application/json", 400, "JSON"),
        ("/update_weights", b" " * (MAX_BODY_BYTES + 1), "application/json", 413, "bytes"),
        ("/abort_requests", b'{"request_ids": "a"}', "application/json", 400, "request_ids"),
        ("/abort_requests", b'{"request_ids": [1]}', "application/json", 400, "request_ids"),
        ("/abort_requests", b'{"ids": ["a"]}', "application/json", 400, "'ids'"),
        ("/pause", b'{"mode": "keep"}', "application/json", 400, "'mode'"),
        ("/resume", b"x", "application/json", 400, "JSON"),
    ],
)
def test_a_wrong_body_is_named_and_changes_nothing(
    path: str, content: bytes, kind: str | None, status: int, part: str
) -> None:
    """Missing, wrong and unknown fields, no JSON, another content type, too much of it."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        headers = {} if kind is None else {"content-type": kind}
        found, message = code_of(await client.post(path, content=content, headers=headers))
        assert found == status
        assert part in message
        sent = (PauseGeneration, ResumeGeneration, AbortRequest, LoadWeights)
        assert [bodies(scene, kind) for kind in sent] == [[], [], [], []]

    over_http([worker(1, config=AgentConfig(weight_roots=("/weights",)))], check)


def test_a_body_without_a_length_is_bounded_too() -> None:
    """Chunks are counted as they come."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        async def endless() -> Any:
            while True:
                yield b" " * 65536

        answer = await client.post("/abort_requests", content=endless(), headers={"content-type": "application/json"})
        assert code_of(answer)[0] == 413

    over_http([worker(1)], check)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-rlbus-op-id", "a b"),
        ("x-rlbus-op-id", "a" * 65),
        ("x-rlbus-lease-s", "0"),
        ("x-rlbus-lease-s", "-1"),
        ("x-rlbus-lease-s", "nan"),
        ("x-rlbus-lease-s", "inf"),
        ("x-rlbus-lease-s", "soon"),
        ("x-rlbus-lease-s", "1_0"),
        ("x-rlbus-limit-s", "1e9"),
        ("x-rlbus-caller", "x" * 129),
        ("x-rlbus-caller", ""),
    ],
)
def test_a_wrong_header_is_named_and_changes_nothing(header: str, value: str) -> None:
    """Ids, durations and names have bounds."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        status, message = code_of(await client.post("/pause", headers={header: value}))
        assert status == 400
        assert header in message
        assert bodies(scene, PauseGeneration) == []

    over_http([worker(1)], check)


def test_without_a_controller_everything_is_503() -> None:
    """Within bounds, and with a word of what to start."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        broker = type(scene.fleet.broker)()
        async with http_side(broker) as alone:
            for method, path in (("POST", "/pause"), ("GET", "/is_paused"), ("GET", "/weight_info")):
                answer = await alone.request(method, path)
                status, message = code_of(answer)
                assert (status, answer.headers["retry-after"]) == (503, "1")
                assert "rlbus controller" in message

    over_http([worker(1)], check)


def test_while_nobody_leads_questions_and_named_ops_may_be_asked_again() -> None:
    """A standby listens and says nothing. Of an op without a name nobody can tell whether it was begun unheard."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        broker = type(scene.fleet.broker)()
        broker.connect().subscribe(subjects.all_control("test"), lambda _: None)
        async with http_side(broker) as alone:
            for method, path, headers, expected in (
                ("GET", "/is_paused", {}, (503, "1")),
                ("GET", "/v1/models", {}, (503, "1")),
                ("GET", "/v1/rl/workers", {}, (503, "1")),
                ("POST", "/pause", {"x-rlbus-op-id": "mine"}, (503, "1")),
                ("POST", "/pause", {}, (504, None)),
                ("POST", "/v1/load_lora_adapter", {}, (503, "1")),  # which first asks who is there
                ("POST", "/load_lora_adapter", {}, (500, "1")),  # after which prime-rl asks again
            ):
                body = {"lora_name": "policy", "lora_path": "/x"} if "lora" in path else None
                answer = await alone.request(method, path, headers=headers, json=body)
                assert (answer.status_code, answer.headers.get("retry-after")) == expected, answer.text
                assert "doesn't answer" in answer.text

    over_http([worker(1)], check)
