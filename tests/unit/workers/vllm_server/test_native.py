"""A trainer's update through vLLM's own backends, on a stand-in: what is passed on, and what a failure leaves."""

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rlbus.errors import EngineDeadError, EngineError, RefusedError
from rlbus.schemas import FaultCode, Version
from rlbus.testing import run
from rlbus.workers.engines.base import UpdateFailedError
from rlbus.workers.engines.native import NATIVE_ROUTES
from rlbus.workers.vllm_server import engine as engine_module
from rlbus.workers.vllm_server.engine import VllmEngine
from tests.unit.workers.vllm_server.fake_llm import FakeLLM

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM's requests are its own classes"),
]

INFO = {"master_address": "10.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3, "packed": True}
V2 = Version(step=2)


class Nccl(FakeLLM):
    """With the calls of vLLM's weight transfer, noted with what they were told; `raises` as in FakeLLM."""

    def __init__(self, **given: Any) -> None:
        super().__init__(backend="nccl", **given)
        self.told: list[tuple[str, Any]] = []
        self.hangs = False

    async def _take(self, call: str, info: Any = None) -> None:
        self.told.append((call, info))
        self._note(call)
        if self.hangs:
            await asyncio.Event().wait()

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._take("init", request.init_info)

    async def shutdown_weight_transfer_engine(self) -> None:
        await self._take("shutdown")

    async def start_weight_update(self) -> None:
        await self._take("start")

    async def update_weights(self, request: Any) -> None:
        await self._take("update", request.update_info)

    async def finish_weight_update(self) -> None:
        await self._take("finish")


@pytest.fixture(autouse=True)
def _unknown_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "expected_tensors", lambda _: None)

    async def inline(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    monkeypatch.setattr(asyncio, "to_thread", inline)


def on_engine(llm: Nccl, tmp_path: Any, check: Callable[[VllmEngine], Awaitable[None]]) -> None:
    """Run a check on a started engine."""

    async def main() -> None:
        engine = VllmEngine(llm, run_dir=str(tmp_path))
        await engine.start()
        try:
            await check(engine)
        finally:
            await engine.aclose()

    run(main())


def verbs(llm: Nccl) -> list[str]:
    """What vLLM was asked for."""
    return [call for call, _ in llm.told]


def test_a_model_that_nobody_can_tell_is_refused_where_it_would_have_to_be_compared(tmp_path: Any) -> None:
    """Torn weights stay torn then, and say why; it is no bug of ours."""

    async def check(engine: VllmEngine) -> None:
        with pytest.raises(RefusedError, match="can't be told"):
            engine.check_manifest(())

    on_engine(Nccl(), tmp_path, check)


def test_everything_passes_straight_through_and_the_version_is_vllms_label(tmp_path: Any) -> None:
    """Info unread, also a list of one entry for each rank."""
    llm = Nccl()

    async def check(engine: VllmEngine) -> None:
        assert engine.info.routes >= NATIVE_ROUTES
        await engine.init_native(INFO)
        await engine.start_native()
        await engine.update_native([{"names": ["a"]}, {"names": ["b"]}])
        await engine.finish_native(V2)
        await engine.abort_update()
        await engine.shutdown_native()
        assert llm.told == [
            ("init", INFO),
            ("start", None),
            ("update", [{"names": ["a"]}, {"names": ["b"]}]),
            ("finish", None),
            ("shutdown", None),
        ]
        assert llm.label == str(V2)

    on_engine(llm, tmp_path, check)


def test_a_group_is_left_before_another_is_joined(tmp_path: Any) -> None:
    """And a shutdown without one asks vLLM for nothing."""
    llm = Nccl()

    async def check(engine: VllmEngine) -> None:
        await engine.shutdown_native()
        await engine.init_native(INFO)
        await engine.init_native(INFO)
        assert verbs(llm) == ["init", "shutdown", "init"]

    on_engine(llm, tmp_path, check)


def test_an_update_that_is_given_up_before_its_first_byte_leaves_what_was(tmp_path: Any) -> None:
    """vLLM has taken the layers apart; a finish without tensors puts them together. No label of torn weights."""
    llm = Nccl()

    async def check(engine: VllmEngine) -> None:
        await engine.start_native()
        await engine.abort_update()
        assert verbs(llm) == ["start", "finish"]
        assert llm.label == "default"

    on_engine(llm, tmp_path, check)


def test_a_failed_update_counts_as_torn_and_vllms_session_is_closed(tmp_path: Any) -> None:
    """vLLM doesn't say what it has changed; the model can run again, and the next update start."""
    llm = Nccl(world_size=1, raises={"update": "boom"})

    async def check(engine: VllmEngine) -> None:
        await engine.start_native()
        with pytest.raises(UpdateFailedError) as caught:
            await engine.update_native({})
        assert caught.value.weights_touched
        await engine.abort_update()
        assert verbs(llm) == ["start", "update", "start", "finish"]
        assert llm.label == "torn"
        llm.raises.clear()
        await engine.start_native()
        await engine.update_native({})
        await engine.finish_native(V2)
        assert llm.label == str(V2)

    on_engine(llm, tmp_path, check)


def test_a_failed_finish_counts_as_torn(tmp_path: Any) -> None:
    """Some layers may be together and others not."""
    llm = Nccl(world_size=1, raises={"finish": "boom"})

    async def check(engine: VllmEngine) -> None:
        await engine.start_native()
        await engine.update_native({})
        with pytest.raises(UpdateFailedError) as caught:
            await engine.finish_native(V2)
        assert caught.value.weights_touched
        llm.raises.clear()
        await engine.abort_update()
        assert llm.label == "torn"

    on_engine(llm, tmp_path, check)


def test_a_failed_call_of_several_ranks_is_the_engines_death(tmp_path: Any) -> None:
    """Their answers are out of step from then on (facts/vllm-cpu.md 6)."""
    llm = Nccl(world_size=2, raises={"update": "boom"})

    async def check(engine: VllmEngine) -> None:
        await engine.start_native()
        with pytest.raises(UpdateFailedError):
            await engine.update_native({})
        assert engine.death is not None
        with pytest.raises(EngineDeadError):
            await engine.abort_update()

    on_engine(llm, tmp_path, check)


def test_a_join_that_fails_says_so(tmp_path: Any) -> None:
    """group_failed, as with any group."""
    llm = Nccl(world_size=1, raises={"init": "nobody came"})

    async def check(engine: VllmEngine) -> None:
        with pytest.raises(EngineError) as caught:
            await engine.init_native(INFO)
        assert caught.value.code is FaultCode.GROUP_FAILED

    on_engine(llm, tmp_path, check)


def test_a_receive_that_never_ends_is_the_engines_death_once_it_was_to_end(tmp_path: Any) -> None:
    """Nothing can end vLLM's wait for a trainer."""
    llm = Nccl()

    async def check(engine: VllmEngine) -> None:
        await engine.start_native()
        llm.hangs = True
        receiving = asyncio.create_task(engine.update_native({}))
        await asyncio.sleep(1.0)
        receiving.cancel()
        with pytest.raises(EngineError):
            await engine.abort_update()
        await asyncio.sleep(60.0)
        assert engine.death is not None
        assert "update_weights" in engine.death

    on_engine(llm, tmp_path, check)


def test_nothing_is_received_that_was_not_started(tmp_path: Any) -> None:
    """Refused before vLLM is asked."""
    llm = Nccl()

    async def check(engine: VllmEngine) -> None:
        with pytest.raises(UpdateFailedError) as caught:
            await engine.update_native({})
        assert not caught.value.weights_touched
        assert llm.told == []

    on_engine(llm, tmp_path, check)
