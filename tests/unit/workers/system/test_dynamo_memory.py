"""Dynamo's routes for adapters and for sleep: statuses, strict bodies, edge cases."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from rlbus.adapter import WEIGHTS_FILE, adapter_sum
from rlbus.schemas import SleepTag
from rlbus.workers.engines.fake import ROUTES, FakeEngine
from rlbus.workers.engines.lora import LoraInfo
from rlbus.workers.lora_testing import config_for, fake_adapter
from rlbus.workers.system import dynamo_loras
from rlbus.workers.system.testing import Front, on_surface

pytestmark = pytest.mark.unit


async def said(front: Front, route: str, body: Any = None, **headers: str) -> dict[str, Any]:
    """What a handler says, whatever it is; with 200."""
    answer = await front.post(f"/engine/{route}", body, **headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def loads(name: str, path: Path) -> dict[str, Any]:
    """A body of `load_lora`."""
    return {"lora_name": name, "source": {"uri": path.as_uri()}}


# --- adapters


def test_an_adapter_is_loaded_from_a_uri_and_answered_in_dynamos_words(tmp_path: Path) -> None:
    """`success`, as Dynamo says it for adapters."""
    folder = fake_adapter(tmp_path / "a", "x")

    async def scenario(front: Front) -> None:
        answer = await said(front, "load_lora", loads("policy@7", folder))
        assert {k: answer[k] for k in ("status", "lora_name", "lora_id", "hot_swap")} == {
            "status": "success",
            "lora_name": "policy@7",
            "lora_id": 7,
            "hot_swap": False,
        }
        listed = (await front.get("/v1/loras")).json()
        assert listed == {"status": "success", "loras": {"policy@7": 7}, "count": 1}
        gone = await said(front, "unload_lora", {"lora_name": "policy@7"})
        assert (gone["status"], gone["lora_name"]) == ("success", "policy@7")
        assert (await front.get("/v1/loras")).json()["count"] == 0

    on_surface(scenario, config=config_for(tmp_path))


def test_a_name_without_revision_keeps_its_revision_for_the_same_files_and_gets_the_next_for_others(
    tmp_path: Path,
) -> None:
    """SCENARIOS 31: another content is never served under the old name's caches."""
    first, second = fake_adapter(tmp_path / "a", "x"), fake_adapter(tmp_path / "b", "y")

    async def scenario(front: Front) -> None:
        assert (await said(front, "load_lora", loads("policy", first)))["lora_id"] == 1
        assert (await said(front, "load_lora", loads("policy", first)))["lora_id"] == 1
        assert (await said(front, "load_lora", loads("policy", second)))["lora_id"] == 2
        assert (await front.get("/v1/loras")).json()["loras"] == {"policy@1": 1, "policy@2": 2}
        gone = await said(front, "unload_lora", {"lora_name": "policy"}, x_rlbus_op_id="it")
        assert gone["status"] == "success"
        assert await said(front, "unload_lora", {"lora_name": "policy"}, x_rlbus_op_id="it") == gone
        assert (await front.get("/v1/loras")).json()["count"] == 0
        assert (await said(front, "load_lora", loads("policy", first)))["lora_id"] == 1

    on_surface(scenario, config=config_for(tmp_path), engine=FakeEngine(loras=LoraInfo(4)))


def test_a_name_that_is_rolled_back_means_the_files_that_were_asked_for_last(tmp_path: Path) -> None:
    """The old files are its next revision by both surfaces; a repeat of an op that was named is still that op."""
    first, second = fake_adapter(tmp_path / "a", "x"), fake_adapter(tmp_path / "b", "y")

    async def scenario(front: Front) -> None:
        one = await said(front, "load_lora", loads("policy", first), x_rlbus_op_id="one")
        await said(front, "load_lora", loads("policy", second))
        assert (one["lora_id"], front.rig.engine.loras.choose("policy", "base")) == (1, "policy@2")
        assert (await said(front, "load_lora", loads("policy", first)))["lora_id"] == 3
        assert front.rig.engine.loras.choose("policy", "base") == "policy@3"
        assert (await said(front, "load_lora", loads("policy", first)))["lora_id"] == 3
        assert await said(front, "load_lora", loads("policy", first), x_rlbus_op_id="one") == one
        body = {"lora_name": "policy", "lora_path": str(second)}
        assert (await front.post("/v1/load_lora_adapter", body)).status_code == 200
        assert front.rig.engine.loras.choose("policy", "base") == "policy@4"
        # Once the newer ones are gone, it may be what it was.
        for revision in (3, 4):
            await said(front, "unload_lora", {"lora_name": f"policy@{revision}"})
        assert (await said(front, "load_lora", loads("policy", second)))["lora_id"] == 4

    on_surface(scenario, config=config_for(tmp_path), engine=FakeEngine(loras=LoraInfo(4)))


def test_a_name_gets_a_revision_above_those_that_an_agent_before_has_left_in_the_engine(tmp_path: Path) -> None:
    """Nobody knows their bytes, and the name would mean them."""
    folder = fake_adapter(tmp_path / "a", "x")

    async def scenario(front: Front) -> None:
        front.rig.engine.loras.sums["policy", 7] = "unknown"
        assert (await said(front, "load_lora", loads("policy", folder)))["lora_id"] == 8
        assert front.rig.engine.loras.choose("policy", "base") == "policy@8"

    on_surface(scenario, config=config_for(tmp_path), engine=FakeEngine(loras=LoraInfo(4)))


def test_the_rest_routes_of_dynamos_system_server_do_the_same(tmp_path: Path) -> None:
    """POST, GET and DELETE on /v1/loras."""
    folder = fake_adapter(tmp_path / "a", "x")

    async def scenario(front: Front) -> None:
        assert (await front.post("/v1/loras", loads("policy@2", folder))).json()["status"] == "success"
        assert (await front.get("/v1/loras")).json()["loras"] == {"policy@2": 2}
        assert (await front.client.delete("/v1/loras/policy@2")).json()["status"] == "success"
        missing = (await front.client.delete("/v1/loras/policy@2")).json()
        assert missing["status"] == "error"
        assert "not found" in missing["message"]

    on_surface(scenario, config=config_for(tmp_path))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"lora_name": "a"},
        {"lora_name": "", "source": {"uri": "file:///x"}},
        {"lora_name": 7, "source": {"uri": "file:///x"}},
        {"lora_name": ["a"], "source": {"uri": "file:///x"}},
        {"lora_name": "a/b", "source": {"uri": "file:///x"}},
        {"lora_name": "a@0", "source": {"uri": "file:///x"}},
        {"lora_name": "a", "source": "file:///x"},
        {"lora_name": "a", "source": {}},
        {"lora_name": "a", "source": None},
        {"lora_name": "a", "source": {"uri": ""}},
        {"lora_name": "a", "source": {"uri": 7}},
        {"lora_name": "a", "source": {"uri": "s3://bucket/key"}},
        {"lora_name": "a", "source": {"uri": "file://host/x"}},
        {"lora_name": "a", "source": {"uri": "http://["}},
        {"lora_name": "a", "source": {"uri": "relative"}},
        {"lora_name": "a", "source": {"uri": "file:///x?y"}},
        {"lora_name": "a", "source": {"uri": "file:///%00"}},
        {"lora_name": "a", "source": {"uri": "file:///etc"}},
        {"lora_name": "a", "source": {"uri": "file:///x", "more": 1}},
        {"lora_name": "a", "source": {"uri": "file:///x"}, "more": 1},
    ],
)
def test_bodies_of_adapters_are_strict_and_paths_stay_below_the_roots(body: Any, tmp_path: Path) -> None:
    """Non-empty names, `source.uri`; nothing is read or loaded otherwise."""

    async def scenario(front: Front) -> None:
        for answer in (await said(front, "load_lora", body), (await front.post("/v1/loras", body)).json()):
            assert answer["status"] == "error"
            assert answer["message"]
        assert "load_lora" not in front.rig.engine.calls

    on_surface(scenario, config=config_for(tmp_path))


@pytest.mark.parametrize(
    "body", [{}, {"lora_name": ""}, {"lora_name": 1}, {"lora_name": "a", "x": 1}, {"lora_name": "a"}]
)
def test_an_unload_names_what_is_there(body: Any, tmp_path: Path) -> None:
    """An adapter that isn't is an error, as in Dynamo."""

    async def scenario(front: Front) -> None:
        assert (await said(front, "unload_lora", body))["status"] == "error"

    on_surface(scenario, config=config_for(tmp_path))


def test_an_engine_without_adapters_has_none_of_these_routes(tmp_path: Path) -> None:
    """404 in Dynamo's shape, not an emulation."""

    async def scenario(front: Front) -> None:
        body = loads("a", tmp_path)
        for answer in (
            await front.post("/engine/load_lora", body),
            await front.post("/v1/loras", body),
            await front.get("/v1/loras"),
            await front.client.delete("/v1/loras/a"),
        ):
            assert (answer.status_code, answer.json()["error"]) == (404, "Route not found")

    on_surface(scenario, engine=FakeEngine(routes=ROUTES - {"load_lora", "unload_lora", "list_loras"}))


# --- sleep


def test_an_engine_sleeps_and_wakes_and_says_so_twice() -> None:
    """Both are idempotent, in Dynamo's words."""

    async def scenario(front: Front) -> None:
        assert await said(front, "control/sleep", {"level": 1}) == {"status": "ok", "message": "Engine slept (level=1)"}
        assert front.rig.agent.state.asleep == frozenset(SleepTag)
        again = await said(front, "control/sleep", {})
        assert again == {"status": "ok", "message": "Engine already sleeping"}
        assert await said(front, "control/wake_up", {}) == {"status": "ok", "message": "Engine woke"}
        assert await said(front, "control/wake_up") == {"status": "ok", "message": "Engine already awake"}

    on_surface(scenario)


def test_a_pause_outlives_sleep_and_wake_and_updates_stay_right() -> None:
    """SCENARIOS 39: two flags that can't disagree."""

    async def scenario(front: Front) -> None:
        await said(front, "pause_generation")
        await said(front, "control/sleep")
        assert (await said(front, "resume_generation"))["status"] == "error"
        await said(front, "control/wake_up")
        assert front.rig.agent.state.pause is not None
        assert (await said(front, "resume_generation"))["status"] == "ok"

    on_surface(scenario)


@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"], ["weights", "kv_cache"]])
def test_a_part_can_wake_alone(tags: list[str]) -> None:
    """The rest sleeps on, and no step runs."""

    async def scenario(front: Front) -> None:
        await said(front, "control/sleep")
        assert (await said(front, "control/wake_up", {"tags": tags}))["status"] == "ok"
        assert front.rig.agent.state.asleep == frozenset(SleepTag) - set(tags)

    on_surface(scenario)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("control/sleep", {"level": 3}),
        ("control/sleep", {"level": "1"}),
        ("control/sleep", {"level": True}),
        ("control/sleep", {"tags": ["all"]}),
        ("control/sleep", {"tags": []}),
        ("control/sleep", {"nonsense": 1}),
        ("control/wake_up", {"tags": "weights"}),
        ("control/wake_up", {"tags": [1]}),
        ("control/wake_up", {"level": 1}),
    ],
)
def test_bodies_of_sleep_are_strict(route: str, body: Any) -> None:
    """SCENARIOS 41: a malformed one takes nobody out."""

    async def scenario(front: Front) -> None:
        assert (await said(front, route, body))["status"] == "error"
        assert not front.rig.agent.state.asleep
        assert "sleep" not in front.rig.engine.calls

    on_surface(scenario)


def test_an_engine_that_can_not_sleep_has_no_such_route() -> None:
    """Dynamo doesn't list these, and neither do we."""

    async def scenario(front: Front) -> None:
        for route in ("control/sleep", "control/wake_up"):
            assert (await front.post(f"/engine/{route}", {})).status_code == 404

    on_surface(scenario, engine=FakeEngine(routes=ROUTES - {"sleep", "wake_up"}))


def test_a_link_that_leads_out_of_the_roots_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a byte behind it is read, whatever it is."""
    root = tmp_path / "root"
    folder = fake_adapter(root / "a", "first")
    (tmp_path / "secret").write_text("s")
    (folder / WEIGHTS_FILE).unlink()
    (folder / WEIGHTS_FILE).symlink_to(tmp_path / "secret")
    read: list[Path] = []
    monkeypatch.setattr(dynamo_loras, "adapter_sum", read.append)

    async def scenario(front: Front) -> None:
        answer = await said(front, "load_lora", loads("policy", folder))
        assert answer["status"] == "error"
        assert "not below a adapter root" in answer["message"]

    on_surface(scenario, engine=FakeEngine(loras=LoraInfo(4)), config=config_for(root))
    assert read == []


def test_folders_are_summed_up_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask: the agent's threads stay free for its own work."""
    folder = fake_adapter(tmp_path / "a", "first")
    at_once: list[int] = []
    running: list[int] = []

    def counted(path: Path) -> Any:
        running.append(1)
        at_once.append(len(running))
        time.sleep(0.01)
        running.pop()
        return adapter_sum(path)

    monkeypatch.setattr(dynamo_loras, "adapter_sum", counted)

    async def scenario(front: Front) -> None:
        await asyncio.gather(*(said(front, "load_lora", loads("policy", folder)) for _ in range(8)))
        assert (len(at_once), max(at_once)) == (8, 1)

    on_surface(scenario, engine=FakeEngine(loras=LoraInfo(4)), config=config_for(tmp_path))
