"""Adapters of a Dynamo worker: what is advertised, what Dynamo is told, and what can't be told from outside."""

import asyncio
import json
from pathlib import Path

import pytest

from rlbus.errors import EngineError, FaultError
from rlbus.schemas import LORA_ROUTES, FaultCode, PauseMode
from rlbus.workers.dynamo.engine import LORAS_END_S, DynamoEngine
from rlbus.workers.engines.lora import Resident
from tests.unit.workers.dynamo.fake_dynamo import FakeWorker, listed, on_engine

pytestmark = pytest.mark.unit


def adapter(folder: Path, rank: int = 4) -> Path:
    """A PEFT folder of one projection."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    halves = {"q.lora_A.weight": np.zeros((4, 8), np.float32), "q.lora_B.weight": np.zeros((8, 4), np.float32)}
    save_file(halves, folder / "adapter_model.safetensors")
    return folder


def code_of(error: pytest.ExceptionInfo[FaultError]) -> FaultCode:
    return error.value.code


def test_adapters_are_advertised_where_dynamo_takes_them_and_the_user_says_how_many(tmp_path: Path) -> None:
    """Dynamo doesn't tell its capacity, and vLLM would drop the one used longest ago without a word."""
    found: list[bool] = []

    async def check(engine: DynamoEngine) -> None:
        found.append(engine.info.routes >= LORA_ROUTES)

    on_engine(FakeWorker(loras={}), tmp_path, check, max_loras=2)
    on_engine(FakeWorker(loras={}), tmp_path, check)
    on_engine(FakeWorker(), tmp_path, check, max_loras=2)
    without = listed(routes=listed().routes - {"unload_lora"})
    on_engine(FakeWorker(loras={}), tmp_path, check, without, max_loras=2)
    assert found == [True, False, False, False]


def test_each_revision_is_an_adapter_of_its_own(tmp_path: Path) -> None:
    """Under its whole name, from the folder as it is; again changes nothing; those of others are listed, too."""
    folder = adapter(tmp_path / "a b@1")
    worker = FakeWorker(loras={"other": "/x"})

    async def check(engine: DynamoEngine) -> None:
        await engine.load_lora("policy", 1, folder)
        await engine.load_lora("policy", 1, folder)
        assert worker.loras == {"other": "/x", "policy@1": str(folder)}
        assert worker.routes.count("load_lora") == 1
        assert await engine.list_loras() == (Resident("other", None), Resident("policy", 1))
        info = engine.lora_info
        assert (info.capacity, info.can_drain, info.can_hot_swap, info.ends_requests) == (3, False, False, False)
        assert await engine.unload_lora("policy", 1) is None
        assert await engine.unload_lora("policy", 1) is None
        assert worker.loras == {"other": "/x"}
        with pytest.raises(FaultError, match="unloading waits") as caught:
            await engine.drain_lora("policy", 1)
        assert code_of(caught) is FaultCode.NO_ROUTE

    on_engine(worker, tmp_path, check, max_loras=3)


def test_what_does_not_fit_is_refused_before_dynamo_is_asked(tmp_path: Path) -> None:
    """No place, and files that are no adapter: nothing has changed."""
    good, bad = adapter(tmp_path / "good"), adapter(tmp_path / "bad", rank=8)
    worker = FakeWorker(loras={})

    async def check(engine: DynamoEngine) -> None:
        with pytest.raises(FaultError) as caught:
            await engine.load_lora("policy", 1, bad)
        assert code_of(caught) is FaultCode.MANIFEST_MISMATCH
        await engine.load_lora("policy", 1, good)
        with pytest.raises(FaultError) as caught:
            await engine.load_lora("policy", 2, good)
        assert code_of(caught) is FaultCode.NO_CAPACITY
        assert worker.routes.count("load_lora") == 1

    on_engine(worker, tmp_path, check, max_loras=1)


def test_a_load_that_dynamo_fails_is_told_in_its_words(tmp_path: Path) -> None:
    """It comes with status 200."""
    folder = adapter(tmp_path / "a")
    worker = FakeWorker(loras={}, broken={"load_lora": (200, b'{"status":"error","message":"Failed to add LoRA x"}')})

    async def check(engine: DynamoEngine) -> None:
        with pytest.raises(EngineError, match="Failed to add LoRA"):
            await engine.load_lora("policy", 1, folder)
        assert await engine.list_loras() == ()

    on_engine(worker, tmp_path, check, max_loras=2)


def test_while_a_load_that_was_given_up_may_come_yet_the_list_decides_nothing(tmp_path: Path) -> None:
    """Else it would count as not done, and be there a moment later."""
    folder = adapter(tmp_path / "a")
    worker = FakeWorker(loras={})

    async def check(engine: DynamoEngine) -> None:
        worker.held["load_lora"] = asyncio.Event()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await engine.load_lora("policy", 1, folder)
        with pytest.raises(EngineError, match="hasn't come back from loading policy@1"):
            await engine.list_loras()
        worker.held["load_lora"].set()
        await asyncio.sleep(1.0)
        assert await engine.list_loras() == (Resident("policy", 1),)

    on_engine(worker, tmp_path, check, max_loras=2)


def test_an_unload_waits_for_requests_and_is_refused_while_they_are_paused(tmp_path: Path) -> None:
    """Dynamo ends none of them."""
    folder = adapter(tmp_path / "a")
    worker = FakeWorker(loras={})

    async def check(engine: DynamoEngine) -> None:
        await engine.load_lora("policy", 1, folder)
        worker.lora_requests["policy@1"] = ended = asyncio.Event()
        await engine.pause(PauseMode.WAIT, False)
        with pytest.raises(FaultError, match="with active requests") as caught:
            await engine.unload_lora("policy", 1)
        assert code_of(caught) is FaultCode.BUSY
        await engine.resume()
        unloading = asyncio.ensure_future(engine.unload_lora("policy", 1))
        await asyncio.sleep(10.0)
        assert not unloading.done()
        ended.set()
        await unloading
        assert worker.loras == {}

    on_engine(worker, tmp_path, check, max_loras=2)


def test_keep_is_refused_while_requests_of_adapters_run_but_not_for_one_that_just_ends(tmp_path: Path) -> None:
    """Dynamo can't hold them; what can be done is said."""
    worker = FakeWorker(loras={})

    async def check(engine: DynamoEngine) -> None:
        worker.lora_requests["policy@1"] = asyncio.Event()
        with pytest.raises(FaultError, match="policy@1; pause with wait or abort") as caught:
            await engine.pause(PauseMode.KEEP, False)
        assert code_of(caught) is FaultCode.BUSY
        asyncio.get_running_loop().call_later(LORAS_END_S / 2, worker.lora_requests.clear)
        await engine.pause(PauseMode.KEEP, False)
        assert worker.is_paused

    on_engine(worker, tmp_path, check)
