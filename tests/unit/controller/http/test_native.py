"""vLLM's weight transfer over HTTP on a whole fleet: its bodies, and one op behind each call."""

from typing import Any

import httpx
import pytest

from rlbus.schemas import Version, WeightsState
from rlbus.workers.engines.fake_script import failing
from tests.unit.controller.http.side import code_of, over_http
from tests.unit.controller.scene import PAUSED, RUNNING, Scene, worker

pytestmark = pytest.mark.unit

INIT = {"init_info": {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 4}}


async def post(client: httpx.AsyncClient, path: str, body: Any = None) -> bytes:
    """A call that is answered with 200; its body."""
    answer = await client.post(path, json=body) if body is not None else await client.post(path)
    assert answer.status_code == 200, answer.text
    return answer.content


def test_a_whole_update_as_vllms_own_client_posts_it() -> None:
    """Golden: vLLM's messages; offsets from the real sizes, and the fleet's next version."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        assert await post(client, "/init_weight_transfer_engine", INIT) == b'{"message":"Weight transfer initialized"}'
        infos = [r.engine.native_info for r in scene.fleet.workers]
        assert [i["rank_offset"] for i in infos if i is not None] == [1, 2]
        assert await post(client, "/start_weight_update") == b'{"message":"Weight update started"}'
        assert await scene.generations() == [PAUSED] * 2
        body = {"update_info": {"step": 1}}
        assert await post(client, "/update_weights", body) == b'{"message":"Weights updated"}'
        assert await post(client, "/finish_weight_update") == b'{"message":"Weight update finished"}'
        assert await scene.generations() == [RUNNING] * 2
        assert (await client.get("/weight_info")).json() == {"weight_version": "0.1"}
        done = await post(client, "/shutdown_weight_transfer_engine")
        assert done == b'{"message":"Weight transfer shut down"}'

    over_http([worker(1), worker(2, world_size=2)], check)


def test_between_pause_and_resume_it_leaves_them_to_the_caller() -> None:
    """As vLLM's examples do it: whoever paused resumes."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        await post(client, "/init_weight_transfer_engine", INIT)
        await post(client, "/pause")
        await post(client, "/start_weight_update")
        await post(client, "/update_weights", {"update_info": [{"step": 1}] * 3})
        await post(client, "/finish_weight_update", {"weight_version": "1.7"})
        assert await scene.generations() == [PAUSED] * 2
        await post(client, "/resume")
        assert await scene.generations() == [RUNNING] * 2
        assert {r.agent.state.weights.version for r in scene.fleet.workers} == {Version(incarnation=1, step=7)}

    over_http([worker(1), worker(2, world_size=2)], check)


def test_a_failure_names_the_worker() -> None:
    """As any op."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        answer = await client.post("/init_weight_transfer_engine", json=INIT)
        status, message = code_of(answer)
        assert status == 500
        assert "backend/2" in message
        assert {o["outcome"] for o in answer.json()["rlbus"]["outcomes"]} == {"undone", "failed"}

    over_http([worker(1), worker(2, {"init_native": {1: failing()}}, world_size=2)], check)


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("/init_weight_transfer_engine", {}, 400, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": []}, 400, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": {}, "extra": 1}, 400, "'extra'"),
        ("/init_weight_transfer_engine", {"init_info": {"rank_offset": 1, "world_size": 9}}, 409, "backend/2 2"),
        ("/init_weight_transfer_engine", {"init_info": {"rank_offset": None}}, 400, "rank_offset"),
        ("/start_weight_update", {"x": 1}, 400, "'x'"),
        ("/update_weights", {"update_info": 7}, 400, "update_info"),
        ("/update_weights", {"update_info": []}, 400, "object"),
        ("/update_weights", {"update_info": [{}]}, 400, "3 ranks"),
        ("/update_weights", {"update_info": {}, "weight_dir": "/w"}, 400, "weight_dir"),
        ("/finish_weight_update", {"weight_version": 7}, 400, "weight_version"),
        ("/finish_weight_update", {"weight_version": "latest"}, 400, "incarnation.step"),
        ("/shutdown_weight_transfer_engine", {"now": True}, 400, "'now'"),
    ],
)
def test_a_wrong_body_is_named_and_changes_nothing(path: str, body: Any, status: int, part: str) -> None:
    """In vLLM's shape."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        found, message = code_of(await client.post(path, json=body))
        assert found == status
        assert part in message
        assert await scene.generations() == [RUNNING] * 2
        assert {r.agent.state.weights.state for r in scene.fleet.workers} == {WeightsState.CLEAN}
        assert [r.engine.native_info for r in scene.fleet.workers] == [None] * 2

    over_http([worker(1), worker(2, world_size=2)], check)


def test_what_does_not_fit_into_one_message_is_too_large() -> None:
    """Its quotes are escaped on the way, so that a body below its own limit may not fit; no retry helps, and nothing
    is begun.
    """

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        await post(client, "/init_weight_transfer_engine", INIT)
        num_sent = len(scene.commands)
        answer = await client.post("/update_weights", json={"update_info": {"names": ["x" * 20] * 39_000}})
        status, message = code_of(answer)
        assert status == 413
        assert "1000000" in message
        assert len(scene.commands) == num_sent

    over_http([worker(1), worker(2, world_size=2)], check)
