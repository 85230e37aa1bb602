"""A stand-in for a vLLM server that takes adapters: a core that holds them by number, and the table of their names."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlbus.schemas import TensorSpec
from rlbus.transfer.folder import header_of
from rlbus.workers.vllm_server import loras as loras_module
from rlbus.workers.vllm_server.loras import VllmLoras
from tests.unit.workers.vllm_server.fake_llm import FakeLLM

KEY = "base_model.model.model.layers.0.self_attn.q_proj"


class LateError(Exception):
    """What a request gets that comes after its adapter's end."""


def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `VllmLoras` run without vLLM, and without threads."""

    async def inline(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    # A thread would not run in virtual time.
    monkeypatch.setattr(asyncio, "to_thread", inline)
    monkeypatch.setattr(loras_module, "_not_found", LateError)

    def request(self: VllmLoras, name: str, revision: int, folder: Path) -> Any:
        number = self._models.lora_id_counter.inc(1)
        return SimpleNamespace(lora_name=f"{name}@{revision}", lora_int_id=number, lora_path=str(folder))

    monkeypatch.setattr(VllmLoras, "_request", request)


class Counter:
    """vLLM's counter of adapter numbers."""

    def __init__(self) -> None:
        self.value = 0

    def inc(self, by: int) -> int:
        self.value += by
        return self.value


class LoraLLM(FakeLLM):
    """The stand-in with a core that holds adapters by number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vllm_config.lora_config = SimpleNamespace(max_cpu_loras=2, max_loras=3, max_lora_rank=8)
        self.vllm_config.model_config.model = "base"
        self.core: set[int] = set()
        # While it isn't set, `add_request` is on its way.
        self.may_enter = asyncio.Event()
        self.may_enter.set()

    async def add_lora(self, request: Any) -> bool:
        self._note("add_lora")
        self.core.add(request.lora_int_id)
        return True

    async def remove_lora(self, number: int) -> bool:
        self._note("remove_lora")
        self.core.discard(number)
        return True

    async def list_loras(self) -> set[int]:
        return set(self.core)

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, arrival_time: Any = None, lora_request: Any = None
    ) -> str:
        await self.may_enter.wait()
        state = SimpleNamespace(external_req_id=request_id, parent_req=None, lora_request=lora_request)
        self.output_processor.request_states[request_id] = state
        return request_id


def models_of(llm: LoraLLM) -> Any:
    """vLLM's table of names."""
    return SimpleNamespace(lora_requests={}, lora_id_counter=Counter(), is_base_model=lambda name: name == "base")


def write(folder: Path, *, rank: int = 4, b: tuple[int, ...] | None = None, config: object = None) -> Path:
    """An adapter's files: one pair of tensors of zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8} if config is None else config)
    (folder / "adapter_config.json").write_text(text)
    specs = [TensorSpec(name=f"{KEY}.lora_A.weight", dtype="float32", shape=(rank, 4))]
    if b != ():
        specs.append(TensorSpec(name=f"{KEY}.lora_B.weight", dtype="float32", shape=(4, rank) if b is None else b))
    data = sum(4 * shape[0] * shape[1] for shape in (spec.shape for spec in specs))
    (folder / "adapter_model.safetensors").write_bytes(header_of(specs) + bytes(data))
    return folder
