"""Adapters of a vLLM server, on a stand-in: names and numbers, what enters late, what an update drops, bad files."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlbus.errors import EngineError, FaultError
from rlbus.schemas import FaultCode
from rlbus.testing import run
from rlbus.workers.vllm_server.calls import EngineCalls
from rlbus.workers.vllm_server.engine import VllmEngine
from rlbus.workers.vllm_server.loras import VllmLoras, capacity_of, check_files
from tests.unit.workers.vllm_server.fake_loras import LateError, LoraLLM, models_of, without_vllm, write

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)


def on_loras(check: Callable[[LoraLLM, VllmLoras, Any], Awaitable[None]]) -> None:
    """Run a check on attached adapters of a stand-in."""

    async def main() -> None:
        llm = LoraLLM(world_size=1)
        models = models_of(llm)
        loras = VllmLoras(llm, EngineCalls(llm), models, lambda own: own)
        loras.attach()
        await check(llm, loras, models)

    run(main())


def test_revision_has_a_number_of_its_own_and_the_plain_name_is_the_newest(tmp_path: Path) -> None:
    """SCENARIOS 31: also when it is loaded again after an unload; the table lists each once."""
    files = write(tmp_path)

    async def check(llm: LoraLLM, loras: VllmLoras, models: Any) -> None:
        await loras.load("policy", 2, files)
        await loras.load("policy", 1, files)
        names = models.lora_requests
        assert {name: r.lora_name for name, r in names.items()} == {
            "policy@1": "policy@1",
            "policy@2": "policy@2",
            "policy": "policy@2",
        }
        assert sorted(r.lora_name for r in names.values()) == ["policy@1", "policy@2"]
        assert names["policy@1"].lora_int_id != names["policy@2"].lora_int_id
        first = names["policy@2"].lora_int_id
        await loras.unload("policy", 2)
        assert names["policy"].lora_name == "policy@1"
        await loras.load("policy", 2, files)
        assert names["policy@2"].lora_int_id not in (first, names["policy@1"].lora_int_id)
        await loras.unload("policy", 1)
        await loras.unload("policy", 2)
        assert (dict(names), llm.core) == ({}, set())

    on_loras(check)


def test_request_that_comes_after_the_end_of_its_adapter_is_refused(tmp_path: Path) -> None:
    """SCENARIOS 32: it had looked the name up before; the engine would load the adapter again, or die of it."""
    files = write(tmp_path)

    async def check(llm: LoraLLM, loras: VllmLoras, models: Any) -> None:
        await loras.load("policy", 1, files)
        looked_up = models.lora_requests["policy"]
        await llm.add_request("before", None, None, None, looked_up)
        await loras.drain("policy", 1)
        with pytest.raises(LateError):
            await llm.add_request("late", None, None, lora_request=looked_up)
        await llm.add_request("of the base", None, None)
        assert (await loras.residents())[0].num_in_flight == 1
        assert await loras.unload("policy", 1) == 1
        assert set(llm.output_processor.request_states) == {"of the base"}
        with pytest.raises(LateError):
            await llm.add_request("later", None, None, lora_request=looked_up)

    on_loras(check)


def test_unload_waits_for_a_request_that_is_just_entering(tmp_path: Path) -> None:
    """SCENARIOS 32: it is counted while it is tokenized, and ended when it is in; only then the adapter goes."""
    files = write(tmp_path)

    async def check(llm: LoraLLM, loras: VllmLoras, models: Any) -> None:
        await loras.load("policy", 1, files)
        llm.may_enter.clear()
        entering = asyncio.ensure_future(llm.add_request("r", None, None, lora_request=models.lora_requests["policy"]))
        await asyncio.sleep(0)
        assert (await loras.residents())[0].num_in_flight == 1
        unloading = asyncio.ensure_future(loras.unload("policy", 1))
        await asyncio.sleep(1.0)
        assert len(llm.core) == 1
        llm.may_enter.set()
        await entering
        assert await unloading == 1
        assert (llm.core, llm.output_processor.request_states) == (set(), {})

    on_loras(check)


def test_load_that_was_cut_off_before_its_name_is_not_listed_and_leaves_no_stray(tmp_path: Path) -> None:
    """SCENARIOS 34: the core has it, and nobody can ask for it; the next load or unload clears it away."""
    files = write(tmp_path)

    async def check(llm: LoraLLM, loras: VllmLoras, models: Any) -> None:
        llm.raises = {"add_lora": "lost"}
        with pytest.raises(EngineError):
            await loras.load("policy", 1, files)
        llm.core.add(models.lora_id_counter.value)  # it had done it all the same
        llm.raises = {}
        assert await loras.residents() == ()
        await loras.load("policy", 2, files)
        assert [(r.name, r.revision) for r in await loras.residents()] == [("policy", 2)]
        assert len(llm.core) == 1

    on_loras(check)


def test_adapters_that_an_update_drops_are_put_back_or_not_served_any_more(tmp_path: Path) -> None:
    """vLLM dies of a request for one that it can't load again."""
    files = write(tmp_path)

    async def check(llm: LoraLLM, loras: VllmLoras, models: Any) -> None:
        await loras.load("policy", 1, files)
        llm.core.clear()
        await loras.restore()
        assert len(await loras.residents()) == 1
        llm.core.clear()
        llm.raises = {"add_lora": "no such folder"}
        await loras.restore()
        assert await loras.residents() == ()
        assert dict(models.lora_requests) == {}

    on_loras(check)


def test_adapter_of_somebody_else_is_listed_without_a_revision_and_left_alone(tmp_path: Path) -> None:
    """One of vLLM's own --lora-modules, whose name ours doesn't take."""
    files = write(tmp_path)

    async def check(llm: LoraLLM, loras: VllmLoras, models: Any) -> None:
        theirs = SimpleNamespace(lora_name="policy", lora_int_id=models.lora_id_counter.inc(1))
        models.lora_requests["policy"] = theirs
        llm.core.add(theirs.lora_int_id)
        await loras.load("policy", 1, files)
        assert models.lora_requests["policy"] is theirs
        assert {(r.name, r.revision) for r in await loras.residents()} == {("policy", None), ("policy", 1)}
        with pytest.raises(FaultError) as caught:
            await loras.load("policy", 2, files)
        assert caught.value.code is FaultCode.NO_CAPACITY
        with pytest.raises(FaultError) as caught:
            await loras.load("base", 1, files)
        assert caught.value.code is FaultCode.WRONG_STATE
        await loras.unload("policy", 1)
        assert models.lora_requests["policy"] is theirs
        models.lora_requests["policy@3"] = SimpleNamespace(lora_name="policy@3", lora_int_id=99)
        with pytest.raises(FaultError) as caught:
            await loras.load("policy", 3, files)
        assert caught.value.code is FaultCode.REVISION_TAKEN

    on_loras(check)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"rank": 16}, "up to 8"),
        ({"config": {"r": 8}}, "rank 8"),
        ({"config": []}, "can't be read"),
        ({"config": {"lora_alpha": 8}}, "can't be read"),
        ({"b": ()}, "no other half"),
        ({"b": (4, 3)}, "isn't of rank 4"),
    ],
)
def test_files_that_vllm_would_take_in_silence_or_fail_at_are_refused(
    tmp_path: Path, files: dict[str, Any], words: str
) -> None:
    """Before the engine is asked: on several ranks a failed call would cost the engine (facts/vllm-cpu.md 6, 7)."""
    with pytest.raises(FaultError, match=words) as caught:
        check_files(write(tmp_path, **files), 8)
    assert caught.value.code is FaultCode.MANIFEST_MISMATCH


def test_configuration_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    """As one that is no JSON: Python's reader gives up with an error of another kind."""
    folder = write(tmp_path)
    (folder / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(FaultError, match="can't be read") as caught:
        check_files(folder, 8)
    assert caught.value.code is FaultCode.MANIFEST_MISMATCH


@pytest.mark.parametrize(
    ("device", "max_loras", "max_cpu_loras", "capacity"),
    [("cpu", 4, 4, 3), ("cpu", 4, 8, 3), ("cpu", 4, 2, 2), ("cpu", 1, 1, 0), ("cuda", 1, 1, 1), ("cuda", 4, 8, 8)],
)
def test_on_a_cpu_the_last_slot_stays_empty(device: str, max_loras: int, max_cpu_loras: int, capacity: int) -> None:
    """There vLLM adds what is in it to requests of the base model in the same batch."""
    llm = LoraLLM(world_size=1)
    llm.vllm_config.device_config.device_type = device
    llm.vllm_config.lora_config = SimpleNamespace(max_cpu_loras=max_cpu_loras, max_loras=max_loras, max_lora_rank=8)
    assert capacity_of(llm.vllm_config) == capacity


@pytest.mark.parametrize("why", ["no lora", "no names", "several servers", "one slot"])
def test_server_that_cant_serve_adapters_doesnt_advertise_the_routes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Without --enable-lora, without OpenAI routes, with several servers, on a CPU with one slot."""
    monkeypatch.setattr("rlbus.workers.vllm_server.engine.expected_tensors", lambda _: None)

    async def main() -> None:
        llm = LoraLLM(world_size=1, num_servers=2 if why == "several servers" else 1)
        if why == "no lora":
            llm.vllm_config.lora_config = None
        if why == "one slot":
            llm.vllm_config.lora_config.max_loras = 1
        engine = VllmEngine(llm, run_dir=str(tmp_path), models=None if why == "no names" else models_of(llm))
        await engine.start()
        assert not {"load_lora", "unload_lora", "list_loras"} & engine.info.routes
        await engine.aclose()

    run(main())
