"""Adapters over HTTP, on a whole fleet: vLLM's routes and prime-rl's."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus.adapter import adapter_sum
from rlbus.schemas import FolderSource, Generation, LoadLora, PauseGeneration
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.http.side import code_of, over_http
from tests.unit.controller.lora_stage import adapter, serving, taker, takers
from tests.unit.controller.scene import Scene, worker

pytestmark = pytest.mark.unit

LOAD, UNLOAD, AGAIN = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter"


def body(folder: Path, name: str = "policy", **more: Any) -> dict[str, Any]:
    """What vLLM's clients send."""
    return {"lora_name": name, "lora_path": str(folder), **more}


async def models(client: httpx.AsyncClient) -> list[str]:
    """The ids of what the fleet shows."""
    return [card["id"] for card in (await client.get("/v1/models")).json()["data"]]


def test_an_adapter_is_loaded_and_unloaded_on_all(tmp_path: Path) -> None:
    """Golden: vLLM's lines of text; one op each, named in the header."""
    folder = adapter(tmp_path / "a")

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        answer = await client.post(LOAD, json=body(folder), headers={"x-rlbus-op-id": "op-1"})
        assert answer.content == b"Success: LoRA adapter 'policy' added successfully."
        assert (answer.status_code, answer.headers["x-rlbus-op-id"]) == (200, "op-1")
        assert answer.headers["x-rlbus-lora"] == "policy@1"
        assert serving(scene) == [["policy@1"], ["policy@1"]]
        assert await scene.addressed(LoadLora) == await scene.addressed(PauseGeneration) == ["1", "2"]
        assert await scene.generations() == [Generation.RUNNING] * 2
        sources = {c.body.source for c, _ in scene.commands if isinstance(c.body, LoadLora)}
        assert sources == {FolderSource(path=str(folder))}
        gone = await client.post(UNLOAD, json={"lora_name": "policy", "lora_int_id": 3})
        assert gone.content == b"Success: LoRA adapter 'policy' removed successfully."
        assert serving(scene) == [[], []]

    over_http(takers(1, 2, roots=[tmp_path]), check)


def test_models_show_adapters_as_vllm_does(tmp_path: Path) -> None:
    """Every revision, and the name, which is the newest; with where it is from and what it is for."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        model = scene.fleet.workers[0].agent.descriptor.model
        await client.post(LOAD, json=body(adapter(tmp_path / "a", "1")))
        await client.post(LOAD, json=body(adapter(tmp_path / "b", "2"), "policy@4"))
        assert await models(client) == [model, "policy@1", "policy@4", "policy"]
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card.get("root") for card in cards] == [None, *(str(tmp_path / n) for n in "abb")]
        assert [card.get("parent") for card in cards] == [None, model, model, model]
        await client.post(UNLOAD, json={"lora_name": "policy@4"})
        assert await models(client) == [model, "policy@1", "policy"]

    over_http(takers(1, roots=[tmp_path]), check)


def test_models_show_no_adapter_that_nobody_who_is_admitted_has(tmp_path: Path) -> None:
    """A request for it would be refused."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        await client.post(LOAD, json=body(adapter(tmp_path / "a")))
        await client.post("/pause")
        assert await models(client) == []

    over_http(takers(1, roots=[tmp_path]), check)


def test_a_name_that_is_loaded_needs_load_inplace(tmp_path: Path) -> None:
    """Golden: vLLM's words and status; in place it is the next revision, and the idle one before has gone."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        await client.post(LOAD, json=body(adapter(tmp_path / "a", "1")))
        other = adapter(tmp_path / "b", "2")
        assert code_of(await client.post(LOAD, json=body(other))) == (
            400,
            "The lora adapter 'policy' has already been loaded. If you want to load the adapter in place, "
            "set 'load_inplace' to True.",
        )
        answer = await client.post(LOAD, json=body(other, load_inplace=True))
        assert (answer.status_code, answer.headers["x-rlbus-lora"]) == (200, "policy@2")
        assert serving(scene) == [["policy@2"]]

    over_http([taker(1, roots=[tmp_path], can_hot_swap=True)], check)


def test_prime_rl_loads_one_name_anew_each_step(tmp_path: Path) -> None:
    """Its client's call and its server's answer; a repeat with the same files is no new revision."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        for step in range(1, 8):
            folder = adapter(tmp_path / f"step_{step}", str(step))
            for _ in range(2):
                answer = await client.post(AGAIN, json=body(folder, "r8-1e-4"))
                assert (answer.status_code, answer.content) == (200, b'{"status":"ok"}')
                assert answer.headers["x-rlbus-lora"] == f"r8-1e-4@{step}"
        assert all("r8-1e-4@7" in ids and len(ids) <= 4 for ids in serving(scene))
        # Back to older bytes: the newest revision has to be what was asked for last.
        again = await client.post(AGAIN, json=body(tmp_path / "step_1", "r8-1e-4"))
        assert again.headers["x-rlbus-lora"] == "r8-1e-4@8"

    over_http(takers(1, 2, roots=[tmp_path]), check)


def test_prime_rl_asks_again_while_the_folder_is_not_there_yet(tmp_path: Path) -> None:
    """Of adapters its client does so after 404 and 500 only, so a busy fleet is 500 here, and 503 by vLLM's route."""
    folder = tmp_path / "late"

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        for path in (AGAIN, LOAD):
            status, message = code_of(await client.post(path, json=body(folder)))
            assert (status, "adapter_config.json" in message) == (404, True)
        adapter(folder)
        waiting = asyncio.create_task(client.post("/pause?mode=wait"))
        await asyncio.sleep(1.0)
        busy = [await client.post(path, json=body(folder)) for path in (AGAIN, LOAD)]
        assert [code_of(answer)[0] for answer in busy] == [500, 503]
        assert all(answer.headers["retry-after"] == "1" for answer in busy)
        await waiting
        assert (await client.post(AGAIN, json=body(folder))).status_code == 200

    over_http([taker(1, {"pause": {1: Step(latency_s=5.0)}}, roots=[tmp_path])], check)


def test_prime_rl_asks_again_while_requests_use_the_older_revisions(tmp_path: Path) -> None:
    """They end; a place that somebody else's adapter has, nobody gives back by waiting."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        assert (await client.post(AGAIN, json=body(adapter(tmp_path / "a", "1")))).status_code == 200
        engine, second = scene.fleet.workers[0].engine, body(adapter(tmp_path / "b", "2"))
        engine.submit("r", (1, 2), 10_000, model="policy")
        busy = [await client.post(path, json={**second, "load_inplace": True}) for path in (AGAIN, LOAD)]
        assert [(code_of(answer)[0], answer.headers["retry-after"]) for answer in busy] == [(500, "1"), (503, "1")]
        assert busy[0].json()["rlbus"]["code"] == "no_capacity"
        other = [await client.post(path, json=body(tmp_path / "b", "other")) for path in (AGAIN, LOAD)]
        assert [code_of(answer)[0] for answer in other] == [409, 409]
        engine.requests.abort(["r"])
        assert (await client.post(AGAIN, json=second)).status_code == 200

    over_http([taker(1, roots=[tmp_path], capacity=1)], check)


def test_a_repeat_of_an_op_gets_its_report(tmp_path: Path) -> None:
    """By the op's id; without one it is vLLM's 400 and 404."""
    folder = adapter(tmp_path / "a")

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        one, two = {"x-rlbus-op-id": "one"}, {"x-rlbus-op-id": "two"}
        for _ in range(2):
            assert (await client.post(LOAD, json=body(folder), headers=one)).status_code == 200
        assert (await client.post(LOAD, json=body(folder))).status_code == 400
        anew = [await client.post(AGAIN, json=body(folder), headers={"x-rlbus-op-id": "anew"}) for _ in range(2)]
        assert [a.headers["x-rlbus-lora"] for a in anew] == ["policy@2", "policy@2"]
        for _ in range(2):
            assert (await client.post(UNLOAD, json={"lora_name": "policy"}, headers=two)).status_code == 200
        assert code_of(await client.post(UNLOAD, json={"lora_name": "policy"})) == (
            404,
            "The lora adapter 'policy' cannot be found.",
        )

    over_http(takers(1, roots=[tmp_path]), check)


def test_a_caller_that_asks_again_meanwhile_joins(tmp_path: Path) -> None:
    """SCENARIOS 3: its read time-out isn't the end of the load."""
    folder = adapter(tmp_path / "a")

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        answers = await asyncio.gather(*(client.post(AGAIN, json=body(folder)) for _ in range(3)))
        assert {(a.status_code, a.headers["x-rlbus-lora"]) for a in answers} == {(200, "policy@1")}
        assert len([c for c, _ in scene.commands if isinstance(c.body, LoadLora)]) == 1

    over_http(takers(1, roots=[tmp_path]), check)


def test_what_one_worker_cannot_load_nobody_keeps(tmp_path: Path) -> None:
    """500 with an outcome per worker."""
    folder = adapter(tmp_path / "a")

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        answer = await client.post(LOAD, json=body(folder))
        status, message = code_of(answer)
        assert (status, "backend/2" in message) == (500, True)
        assert [o["outcome"] for o in answer.json()["rlbus"]["outcomes"]] == ["undone", "failed"]
        assert serving(scene) == [[], []]
        assert (await models(client))[1:] == []

    over_http([taker(1, roots=[tmp_path]), taker(2, {"load_lora": {1: failing()}}, roots=[tmp_path])], check)


def test_refusals_of_workers_have_statuses_of_what_is_to_be_done(tmp_path: Path) -> None:
    """No room, other bytes under a revision, a folder outside of the roots: 409; no engine for it: 501."""
    inside, outside = tmp_path / "roots", tmp_path / "elsewhere"

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        assert code_of(await client.post(LOAD, json=body(adapter(outside))))[0] == 409
        await client.post(LOAD, json=body(adapter(inside / "a", "1"), "policy@1"))
        status, message = code_of(await client.post(LOAD, json=body(adapter(inside / "b", "2"), "other")))
        assert (status, "room" in message or "place" in message) == (409, True)
        await client.post(UNLOAD, json={"lora_name": "policy"})
        assert code_of(await client.post(LOAD, json=body(inside / "b", "policy@1")))[0] == 409

    over_http([taker(1, roots=[inside], capacity=1)], check)

    async def check_none(client: httpx.AsyncClient, scene: Scene) -> None:
        assert code_of(await client.post(LOAD, json=body(adapter(inside / "c"))))[0] == 501

    over_http([worker(1, routes=frozenset({"pause_generation", "resume_generation"}))], check_none)


def test_a_folder_that_only_workers_see_needs_its_checksum(tmp_path: Path) -> None:
    """In a header, since vLLM's body has no place for it; the workers compare it."""
    folder = adapter(tmp_path / "a")
    checksum = adapter_sum(folder).checksum

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        wrong = await client.post(LOAD, json=body(folder), headers={"x-rlbus-lora-checksum": "0" * 64})
        assert wrong.status_code >= 400
        assert serving(scene) == [[]]
        assert (
            await client.post(LOAD, json=body(folder), headers={"x-rlbus-lora-checksum": checksum})
        ).status_code == 200
        assert serving(scene) == [["policy@2"]]

    over_http(takers(1, roots=[tmp_path]), check)


def test_components_have_adapters_of_their_own(tmp_path: Path) -> None:
    """`?component=` as of the other verbs."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        folder = adapter(tmp_path / "a")
        assert code_of(await client.post(f"{LOAD}?component=other", json=body(folder)))[0] == 503
        assert (await client.post(f"{LOAD}?component=backend", json=body(folder))).status_code == 200
        assert (await client.post(f"{LOAD}?component=backend", json=body(folder))).status_code == 400
        assert code_of(await client.post(f"{LOAD}?component=other", json=body(folder)))[0] == 503

    over_http(takers(1, roots=[tmp_path]), check)


@pytest.mark.parametrize(
    ("path", "sent", "status", "part"),
    [
        (LOAD, {"lora_name": "p"}, 400, "lora_path"),
        (LOAD, {"lora_name": "", "lora_path": "/a"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (AGAIN, {"lora_name": "p", "lora_path": ""}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (LOAD, {"lora_name": 7, "lora_path": "/a"}, 400, "str"),
        (LOAD, {"lora_name": "p", "lora_path": "/a", "load_inplace": "true"}, 400, "bool"),
        (LOAD, {"lora_name": "p", "lora_path": "/a", "is_3d_lora_weight": True}, 501, "is_3d_lora_weight"),
        (LOAD, {"lora_name": "p", "lora_path": "/a", "base_model_name": "m"}, 400, "'base_model_name'"),
        (LOAD, {"lora_name": "org/name", "lora_path": "/a"}, 400, "org/name"),
        (LOAD, {"lora_name": "p@0", "lora_path": "/a"}, 400, "p@0"),
        (AGAIN, {"lora_name": "p", "lora_path": "relative/dir"}, 400, "absolute"),
        (LOAD, {"lora_name": "p", "lora_path": "/dev"}, 404, "/dev"),
        (LOAD, {"lora_name": "fake", "lora_path": "/a"}, 400, "conflicts with a served base model"),
        (LOAD + "?load_inplace=true", {"lora_name": "p", "lora_path": "/a"}, 400, "'load_inplace'"),
        (UNLOAD, {}, 400, "lora_name"),
        (UNLOAD, {"lora_name": ""}, 400, "'lora_name' needs to be provided to unload a LoRA adapter."),
        (UNLOAD, {"lora_name": "p", "lora_int_id": "1"}, 400, "int"),
        (UNLOAD, {"lora_name": "p", "revision": 1}, 400, "'revision'"),
        (UNLOAD, {"lora_name": "p@3"}, 404, "'p@3' cannot be found"),
    ],
)
def test_a_wrong_request_is_named_and_nothing_is_loaded(path: str, sent: Any, status: int, part: str) -> None:
    """Types, names and paths; vLLM's words where it has some."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        model = scene.fleet.workers[0].agent.descriptor.model
        given = {**sent, "lora_name": model} if sent.get("lora_name") == "fake" else sent
        found, message = code_of(await client.post(path, json=given))
        assert found == status
        assert part in message
        await asyncio.sleep(0.1)
        assert scene.commands == []

    over_http(takers(1), check)


@pytest.mark.parametrize("checksum", ["", "0" * 63, "A" * 64])
def test_a_wrong_checksum_is_named(tmp_path: Path, checksum: str) -> None:
    """The header of it."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        answer = await client.post(LOAD, json=body(tmp_path), headers={"x-rlbus-lora-checksum": checksum})
        assert code_of(answer)[0] == 400
        assert "x-rlbus-lora-checksum" in answer.json()["error"]["message"]

    over_http(takers(1), check)


def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    """A path is whatever a caller says."""
    folder = adapter(tmp_path / "a")
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        assert code_of(await client.post(LOAD, json=body(folder)))[0] == 404

    over_http(takers(1, roots=[tmp_path]), check)
