"""Real vLLM in the contract suite: an AsyncLLM in this process, its core in another, tiny random weights."""

import os
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from rlbus.schemas import GroupPlan, RankSpan, TensorSpec, TensorSum, Version
from rlbus.workers.engines.base import ReceiveOrder
from rlbus.workers.engines.contract import EngineCase, Generated
from tests.engines.native_side import NativeSide

# What is not set here, or set otherwise, starves the other processes of a small machine (facts/vllm-cpu.md 0).
ENV = {"VLLM_PLUGINS": "rlbus", "VLLM_LOGGING_LEVEL": "WARNING"}
MAX_TOKENS = 512
# Of one test. It takes seconds on a quiet machine.
LIMIT_S = 180.0
# Engines that were shut down; see `end`.
_ENDED: list[Any] = []


class OpenedVllm:
    """An engine beside a trainer's data plane, in whatever form vLLM runs; `llm` is its AsyncLLM, `models` what serves
    its adapters, if they are here.
    """

    def __init__(
        self, llm: Any, engine: Any, plane: Any, weights: Mapping[str, Any], models: Any = None, folder: Path = Path()
    ) -> None:
        from rlbus.transfer.source import weight_source

        self._models = models
        self._folder = folder
        self.engine = engine
        self._llm = llm
        self._plane = plane
        self._weights = weights
        self._tensors = weight_source(weights).specs()
        self.native = NativeSide(self.weights_of, 1)

    def tensors(self) -> tuple[TensorSpec, ...]:
        return self._tensors

    async def plan(self, epoch: int) -> GroupPlan:
        return GroupPlan(
            epoch=epoch,
            group_id=f"g{epoch}",
            backend="gloo",
            num_trainer_ranks=1,
            world_size=2,
            spans=(RankSpan(component="backend", instance_id="1", first=1, num_ranks=1),),
            rendezvous=await self._plane.rendezvous(),
            bucket_bytes=1 << 16,
            timeout_s=60.0,
        )

    async def join_sender(self, plan: GroupPlan) -> None:
        await self._plane.join(plan)

    async def send(self, order: ReceiveOrder, num_tensors: int | None = None) -> tuple[TensorSum, ...]:
        from rlbus.errors import TransferError
        from rlbus.transfer.checksum import tensor_checksum

        weights = self.weights_of(order.version)
        names = list(weights)[:num_tensors]
        source = _Cut(self._tensors, {name: weights[name] for name in names})
        try:
            await self._plane.send(
                source,
                self._tensors,
                bucket_bytes=order.bucket_bytes,
                version=order.version,
                stream_id=order.update_op_id,
                on_progress=lambda done, total: None,
            )
        except TransferError:
            assert num_tensors is not None
        return tuple(TensorSum(name=name, checksum=tensor_checksum(t)) for name, t in weights.items())

    async def leave_sender(self) -> None:
        await self._plane.leave("the test is over")

    async def save(self, folder: Path, version: Version) -> None:
        from safetensors.torch import save_file

        os.makedirs(folder)
        save_file(
            {name: tensor.clone() for name, tensor in self.weights_of(version).items()}, folder / "model.safetensors"
        )

    async def generate(
        self, prompt: tuple[int, ...], num_tokens: int, request_id: str, on_token: Callable[[], None] | None = None
    ) -> Generated:
        return await self._generate(prompt, num_tokens, request_id, on_token, None)

    async def save_adapter(self, folder: Path, number: int) -> Path:
        from rlbus.workers.torch_lm.make import make_tiny_adapter

        return make_tiny_adapter(folder, self._folder / "model", seed=number)

    async def generate_as(
        self,
        model: str,
        prompt: tuple[int, ...],
        num_tokens: int,
        request_id: str,
        on_token: Callable[[], None] | None = None,
    ) -> Generated:
        # As vLLM's routes look a model name up.
        return await self._generate(prompt, num_tokens, request_id, on_token, self._models.lora_requests[model])

    async def _generate(
        self,
        prompt: tuple[int, ...],
        num_tokens: int,
        request_id: str,
        on_token: Callable[[], None] | None,
        lora: Any,
    ) -> Generated:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        seen: tuple[int, ...] = ()
        finish = ""
        text = TokensPrompt(prompt_token_ids=list(prompt))
        async for output in self._llm.generate(text, params, request_id, lora_request=lora):
            tokens, finish = tuple(output.outputs[0].token_ids), output.outputs[0].finish_reason
            for _ in range(len(tokens) - len(seen)):
                if on_token is not None:
                    on_token()
            seen = tokens
        return Generated(seen, finish)

    def weights_of(self, version: Version) -> Mapping[str, Any]:
        """The model's own weights as step 0; others are moved by noise that the version seeds."""
        import torch

        generator = torch.Generator().manual_seed(version.step)
        return {
            name: tensor + 0.02 * version.step * torch.randn(tensor.shape, generator=generator)
            for name, tensor in self._weights.items()
        }


class _Cut:
    """Announces everything, and stops after what it has."""

    def __init__(self, specs: tuple[TensorSpec, ...], weights: Mapping[str, Any]) -> None:
        self._specs = specs
        self._weights = weights

    def specs(self) -> tuple[TensorSpec, ...]:
        return self._specs

    def __iter__(self) -> Any:
        return iter(self._weights.items())


def end(llm: Any) -> None:
    """Shut an AsyncLLM down. vLLM 0.32 does it again when the object goes, and leaves its zmq context to the garbage
    collector: both complain, and that would meet whatever test runs then. So it stays until the interpreter ends.
    """
    llm.shutdown()
    llm.shutdown = lambda *args, **kwargs: None
    _ENDED.append(llm)


@asynccontextmanager
async def _open(folder: Path) -> AsyncIterator[OpenedVllm]:
    from rlbus.transfer.torch_plane import TorchPlane
    from rlbus.workers.torch_lm.make import make_tiny_model
    from rlbus.workers.vllm_server.supervisor import small_machine_env

    with mock.patch.dict(os.environ, {**ENV, **small_machine_env()}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, and those of what it imports
        from safetensors.torch import load_file
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.entrypoints.openai.models.protocol import BaseModelPath
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        from vllm.v1.engine.async_llm import AsyncLLM

        from rlbus.workers.vllm_server.engine import VllmEngine

        make_tiny_model(folder / "model", vocab_size=512)
        args = AsyncEngineArgs(
            model=str(folder / "model"),
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_TOKENS,
            kv_cache_memory_bytes=64 << 20,
            weight_transfer_config=WeightTransferConfig(backend="gloo"),
            enable_lora=True,
            max_loras=4,
            max_cpu_loras=4,
            max_lora_rank=8,
        )
        llm = AsyncLLM.from_engine_args(args)
        plane = TorchPlane("gloo")
        model = str(folder / "model")
        models = OpenAIServingModels(llm, [BaseModelPath(name=model, model_path=model)])
        engine = VllmEngine(llm, run_dir=str(folder), models=models)
        try:
            await engine.start()
            weights = load_file(folder / "model" / "model.safetensors")
            yield OpenedVllm(llm, engine, plane, weights, models, folder)
        finally:
            await engine.aclose()
            await plane.aclose()
            end(llm)


# It starts in 20 s, and in 80 s when others use the machine, too.
CASE = EngineCase(
    name="vllm", open=_open, requires=("vllm",), long_tokens=400, settle_s=0.2, open_s=240.0, limit_s=LIMIT_S
)
