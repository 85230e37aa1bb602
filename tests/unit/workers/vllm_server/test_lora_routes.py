"""The plugin's routes for adapters: what they do, whom they let in, and what they say to what makes no sense."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus.testing import run
from rlbus.workers.vllm_server.lora_routes import DRAIN, LIST, LOAD, RESTORE, UNLOAD, lora_capacity
from tests.unit.workers.vllm_server.fake_loras import LoraLLM, without_vllm, write
from tests.unit.workers.vllm_server.lora_server import BOOT_ID, LoraServer

pytestmark = pytest.mark.unit

Check = Callable[[httpx.AsyncClient], Awaitable[None]]


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)


def on_server(server: LoraServer, check: Check) -> None:
    """Run a check with a client of it."""

    async def main() -> None:
        async with httpx.AsyncClient(transport=server.transport, base_url="http://127.0.0.1") as client:
            await check(client)

    run(main())


def body_of(revision: int = 1, **more: Any) -> dict[str, Any]:
    """Of a request about one adapter."""
    return {"boot_id": BOOT_ID, "name": "policy", "revision": revision, **more}


async def names(client: httpx.AsyncClient) -> list[tuple[str, int | None, bool]]:
    """What the server lists."""
    listed = (await client.get(LIST)).raise_for_status().json()["loras"]
    return [(each["name"], each["revision"], each["is_draining"]) for each in listed]


def test_adapters_are_loaded_drained_and_unloaded(tmp_path: Path) -> None:
    """As the agent inside a server does it, and listed by the core itself."""
    server, files = LoraServer(), write(tmp_path)

    async def check(client: httpx.AsyncClient) -> None:
        assert await names(client) == []
        for revision in (1, 2):
            answer = await client.post(LOAD, json=body_of(revision, folder=str(files)))
            assert (answer.status_code, answer.json()) == (200, {})
        assert server.models.lora_requests["policy"].lora_name == "policy@2"
        await client.post(DRAIN, json=body_of(2))
        assert await names(client) == [("policy", 1, False), ("policy", 2, True)]
        answer = await client.post(UNLOAD, json=body_of(2))
        assert answer.json() == {"num_ended": 0}
        assert await names(client) == [("policy", 1, False)]
        server.llm.core.clear()
        assert await names(client) == []
        assert (await client.post(RESTORE, json={"boot_id": BOOT_ID})).status_code == 200
        assert await names(client) == [("policy", 1, False)]

    on_server(server, check)


def test_requests_of_an_unloaded_adapter_are_ended_and_counted(tmp_path: Path) -> None:
    """By the request that clients made, however many samples it has."""
    server, files = LoraServer(), write(tmp_path)

    async def check(client: httpx.AsyncClient) -> None:
        await client.post(LOAD, json=body_of(folder=str(files)))
        await server.llm.add_request("r", "prompt", None, lora_request=server.models.lora_requests["policy@1"])
        assert (await client.get(LIST)).json()["loras"][0]["num_in_flight"] == 1
        assert (await client.post(UNLOAD, json=body_of())).json() == {"num_ended": 1}

    on_server(server, check)


@pytest.mark.parametrize(
    ("folder", "num_before", "status", "code"),
    [("missing", 0, 422, "manifest_mismatch"), ("files", 2, 409, "no_capacity")],
)
def test_refusals_say_in_vllms_shape_and_in_rlbus_words_why(
    tmp_path: Path, folder: str, num_before: int, status: int, code: str
) -> None:
    """SCENARIOS 35: for people, for vLLM's clients, and for a sidecar."""
    server, files = LoraServer(), write(tmp_path / "files")

    async def check(client: httpx.AsyncClient) -> None:
        for revision in range(1, num_before + 1):
            (await client.post(LOAD, json=body_of(revision, folder=str(files)))).raise_for_status()
        answer = await client.post(LOAD, json=body_of(9, folder=str(tmp_path / folder)))
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == status
        assert answer.json()["error"]["message"]
        assert answer.json()["rlbus"]["code"] == code
        assert len(await names(client)) == num_before

    on_server(server, check)


BAD_BODIES = [
    (b"", "JSON"),
    (b"{", "JSON"),
    (b"[]", "array"),
    (b"\xff", "JSON"),
    (b"{}", "missing required field"),
    (b'{"boot_id": "b1", "name": "policy", "revision": "1", "folder": "/x"}', "revision"),
    (b'{"boot_id": "b1", "name": "policy", "revision": 0, "folder": "/x"}', "revision"),
    (b'{"boot_id": "b1", "name": "a/b", "revision": 1, "folder": "/x"}', "name"),
    (b'{"boot_id": "b1", "name": "policy", "revision": 1, "revision": 2, "folder": "/x"}', "'revision' is given twice"),
    (b'{"boot_id": "b1", "name": "policy", "revision": 1}', "folder"),
    (b'{"boot_id": "b1", "name": "policy", "revision": 1, "folder": "x"}', "folder"),
    (b'{"boot_id": "b1", "name": "policy", "revision": 1, "folder": "/x", "foldr": 1}', "foldr"),
    (b'{"boot_id": "b1", "name": "policy", "revision": 1, "folder": "/' + b"x" * 5000 + b'"}', "folder"),
]


@pytest.mark.parametrize(("body", "named"), BAD_BODIES)
def test_body_that_makes_no_sense_is_refused_by_name(body: bytes, named: str) -> None:
    """Nothing is guessed, and the engine isn't asked."""
    server = LoraServer()

    async def check(client: httpx.AsyncClient) -> None:
        answer = await client.post(LOAD, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "BadRequestError"
        assert named in answer.json()["error"]["message"]

    on_server(server, check)
    assert server.llm.calls == []


def test_body_of_another_type_or_size_is_refused() -> None:
    """A page in a browser can't send one without saying that it is JSON."""
    server = LoraServer()

    async def check(client: httpx.AsyncClient) -> None:
        answer = await client.post(UNLOAD, content=b"{}", headers={"content-type": "text/plain"})
        assert answer.status_code == 415
        headers = {"content-type": "application/json", "content-length": str(1 << 30)}
        answer = await client.post(UNLOAD, content=b"{}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, 413)
        assert (await client.get(LOAD)).status_code == 405

    on_server(server, check)


@pytest.mark.parametrize(("sent", "status"), [(None, 401), ("Bearer wrong", 401), ("Bearer key", 200)])
def test_a_server_with_keys_wants_one(tmp_path: Path, sent: str | None, status: int) -> None:
    """SCENARIOS 43: on every one of the routes; vLLM's own keys are for its /v1 only."""
    server, files = LoraServer(keys=("key",)), write(tmp_path)

    async def check(client: httpx.AsyncClient) -> None:
        headers = {} if sent is None else {"authorization": sent}
        assert (await client.get(LIST, headers=headers)).status_code == status
        for path, body in (
            (LOAD, body_of(folder=str(files))),
            (DRAIN, body_of()),
            (UNLOAD, body_of()),
            (RESTORE, {"boot_id": BOOT_ID}),
        ):
            assert (await client.post(path, json=body, headers=headers)).status_code == status
        if status == 401:
            assert server.llm.calls == []

    on_server(server, check)


def test_request_for_a_server_that_is_gone_changes_nothing_in_the_next(tmp_path: Path) -> None:
    """It came late, and nobody knows in the new one which bytes that adapter is."""
    server, files = LoraServer(), write(tmp_path)

    async def check(client: httpx.AsyncClient) -> None:
        body = {**body_of(folder=str(files)), "boot_id": "before"}
        answer = await client.post(LOAD, json=body)
        assert (answer.status_code, answer.json()["rlbus"]["code"]) == (409, "stale_epoch")
        assert await names(client) == []

    on_server(server, check)


def test_list_waits_for_the_load_whose_answer_was_lost(tmp_path: Path) -> None:
    """What it says is what settles that load, so it may not be older."""
    server, files = LoraServer(), write(tmp_path)
    may_load, add_lora = asyncio.Event(), server.llm.add_lora

    async def slow(request: Any) -> bool:
        await may_load.wait()
        return await add_lora(request)

    server.llm.add_lora = slow  # type: ignore[method-assign]

    async def check(client: httpx.AsyncClient) -> None:
        loading = asyncio.ensure_future(client.post(LOAD, json=body_of(folder=str(files))))
        await asyncio.sleep(1.0)
        listing = asyncio.ensure_future(names(client))
        await asyncio.sleep(1.0)
        assert not listing.done()
        may_load.set()
        assert await listing == [("policy", 1, False)]
        await loading

    on_server(server, check)


def test_list_gives_up_on_a_load_that_does_not_end(tmp_path: Path) -> None:
    """As a failure, never as an empty list."""
    server, files = LoraServer(), write(tmp_path)

    async def never(_request: Any) -> bool:
        await asyncio.Event().wait()
        return True

    server.llm.add_lora = never  # type: ignore[assignment,method-assign]

    async def check(client: httpx.AsyncClient) -> None:
        loading = asyncio.ensure_future(client.post(LOAD, json=body_of(folder=str(files))))
        await asyncio.sleep(1.0)
        answer = await client.get(LIST)
        assert (answer.status_code, answer.json()["rlbus"]["code"]) == (500, "engine_failed")
        assert (await loading).status_code == 500

    on_server(server, check)


def test_dead_engine_says_so(tmp_path: Path) -> None:
    """Whatever it was that failed first."""
    server, files = LoraServer(), write(tmp_path)

    async def check(client: httpx.AsyncClient) -> None:
        await client.post(LOAD, json=body_of(folder=str(files)))
        server.llm.errored = True
        answer = await client.post(UNLOAD, json=body_of())
        assert (answer.status_code, answer.json()["rlbus"]["code"]) == (503, "engine_dead")

    on_server(server, check)


def test_server_on_the_bus_by_itself_leaves_its_adapters_to_its_own_agent() -> None:
    """Two hands on one table would not know of each other."""
    server = LoraServer(worker="backend/7")
    assert server.routes.capacity is None

    async def check(client: httpx.AsyncClient) -> None:
        answer = await client.get(LIST)
        assert answer.status_code == 409
        assert "backend/7" in answer.json()["error"]["message"]

    on_server(server, check)


def test_server_without_adapters_says_what_it_needs() -> None:
    """And `About` has no capacity, so a sidecar doesn't ask."""
    server = LoraServer()
    server.llm.vllm_config.lora_config = None
    assert server.routes.capacity is None

    async def check(client: httpx.AsyncClient) -> None:
        answer = await client.get(LIST)
        assert answer.status_code == 404
        assert "--enable-lora" in answer.json()["error"]["message"]

    on_server(server, check)


def test_routes_are_there_in_dev_mode_only() -> None:
    """As vLLM's own RL routes."""
    server = LoraServer(dev_mode="0")

    async def check(client: httpx.AsyncClient) -> None:
        assert (await client.get(LIST)).status_code == 404

    on_server(server, check)


def test_capacity_is_that_of_one_server_process_with_room_on_its_device() -> None:
    """None: a sidecar may load none. On a CPU the last slot stays empty (docs/loras.md)."""
    llm = LoraLLM(world_size=1)
    assert lora_capacity(llm) == 2
    llm.vllm_config.lora_config.max_loras = 1
    assert lora_capacity(llm) is None
    assert lora_capacity(None) is None
    assert lora_capacity(object()) is None
    many = LoraLLM(world_size=1, num_servers=2)
    assert lora_capacity(many) is None
