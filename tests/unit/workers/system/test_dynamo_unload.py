"""Dynamo's and vLLM's unload on a worker: what an agent before this one has left goes by its name, too."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, failing
from rlbus.workers.engines.lora import LoraInfo
from rlbus.workers.lora_testing import config_for, fake_adapter
from rlbus.workers.system.testing import Front, on_surface

pytestmark = pytest.mark.unit

DYNAMO, VLLM, REST = "/engine/unload_lora", "/v1/unload_lora_adapter", "/v1/loras"


async def unload(front: Front, route: str, name: str, **headers: str) -> httpx.Response:
    """By one of the surfaces."""
    if route == REST:
        return await front.client.delete(f"{REST}/{name}", headers={k.replace("_", "-"): v for k, v in headers.items()})
    return await front.post(route, {"lora_name": name}, **headers)


def left(*revisions: int, **more: Any) -> FakeEngine:
    """An engine in which an agent before has left these."""
    engine = FakeEngine(loras=LoraInfo(8), **more)
    engine.loras.sums = {("policy", revision): "unknown" for revision in revisions}
    return engine


@pytest.mark.parametrize("route", [DYNAMO, VLLM, REST])
@pytest.mark.parametrize(("name", "stay"), [("policy@7", {8}), ("policy", set())])
def test_what_an_agent_before_has_left_is_unloaded_by_its_name(route: str, name: str, stay: set[int]) -> None:
    """By the engine's own list; a repeat of the call is still that call."""

    async def scenario(front: Front) -> None:
        first = await unload(front, route, name, x_rlbus_op_id="it")
        assert first.status_code == 200, first.text
        assert "uccess" in first.text
        assert {revision for _, revision in front.rig.engine.loras.sums} == stay
        again = await unload(front, route, name, x_rlbus_op_id="it")
        assert (again.status_code, again.text) == (200, first.text)

    on_surface(scenario, engine=left(7, 8))


def test_a_name_means_what_is_there_from_before_and_from_now(tmp_path: Path) -> None:
    """All of it goes, oldest first."""
    folder = fake_adapter(tmp_path / "a", "x")

    async def scenario(front: Front) -> None:
        body = {"lora_name": "policy@3", "source": {"uri": folder.as_uri()}}
        assert (await front.post("/engine/load_lora", body)).json()["status"] == "success"
        assert (await unload(front, DYNAMO, "policy")).json()["lora_id"] == 7
        assert front.rig.engine.loras.sums == {}

    on_surface(scenario, engine=left(7), config=config_for(tmp_path))


def test_what_is_not_there_is_named_with_what_is() -> None:
    """Also what an agent before has left; a name that somebody else has put there has no revision to unload."""
    engine = left(7)
    engine.loras.foreign = ["other"]

    async def scenario(front: Front) -> None:
        missing = (await unload(front, DYNAMO, "policy@8")).json()
        assert missing["message"] == "LoRA adapter 'policy@8' not found. Available LoRAs: ['policy@7']"
        assert (await unload(front, VLLM, "policy@8")).status_code == 404
        assert "somebody else" in (await unload(front, DYNAMO, "other")).json()["message"]
        assert (await unload(front, VLLM, "other")).status_code == 400
        assert "unload_lora" not in engine.calls

    on_surface(scenario, engine=engine)


def test_an_engine_that_does_not_say_what_it_has_is_no_reason_to_say_that_it_has_nothing() -> None:
    """Nothing was done; asked again, it may say."""
    engine = FakeEngine(FakeScript({"list_loras": dict.fromkeys(range(1, 100), failing())}), loras=LoraInfo(8))

    async def scenario(front: Front) -> None:
        answer = (await unload(front, DYNAMO, "policy")).json()
        assert answer["status"] == "error"
        assert "not found" not in answer["message"]
        assert "did not list its adapters" in answer["message"]

    on_surface(scenario, engine=engine)
