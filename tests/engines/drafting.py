"""Engines with a draft model, for test_contract_draft.py: the fake one, and real vLLM with two tiny random models."""

import asyncio
import hashlib
import json
import os
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from rlbus.schemas import TensorSpec, TensorSum, Version
from rlbus.testing import VirtualTimeLoop
from rlbus.transfer.fake import fake_sum
from rlbus.workers.engines.base import ReceiveOrder
from rlbus.workers.engines.contract import EngineCase
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.found import Found
from tests.engines import cases_vllm_grpc, cases_vllm_http
from tests.engines.cases_fake import OpenedFake
from tests.engines.cases_vllm import ENV, LIMIT_S, MAX_TOKENS, OpenedVllm, end
from tests.engines.cases_vllm_grpc import OpenedGrpc
from tests.engines.cases_vllm_http import OpenedHttp

DRAFT_TENSORS = (
    TensorSpec(name="embed.weight", dtype="float32", shape=(64, 8)),
    TensorSpec(name="draft.layers.0.weight", dtype="float32", shape=(8, 8)),
    TensorSpec(name="draft.head.weight", dtype="float32", shape=(64, 8)),
)
NUM_SPECULATIVE_TOKENS = 3
# Zero in vLLM's target, so that it is the same as its first layer alone, which a draft of one layer can be.
IDLE = ("model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight")
# The version of the target that is the model itself, and the one of the draft that is the same.
TARGET, TWIN = Version(step=0), Version(incarnation=1, step=0)


class DraftingFake(OpenedFake):
    """A fake engine with a draft."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine(world_size=2, feed=self._feed, draft_tensors=DRAFT_TENSORS)

    def draft_tensors(self) -> tuple[TensorSpec, ...]:
        return DRAFT_TENSORS

    def sums_of(self, version: Version) -> dict[str, str]:
        return {spec.name: fake_sum(spec.name, version, spec.shape) for spec in DRAFT_TENSORS}


@asynccontextmanager
async def _open_fake(folder: Path) -> AsyncIterator[DraftingFake]:
    opened = DraftingFake()
    try:
        await opened.engine.start()
        yield opened
    finally:
        await opened.engine.aclose()
        assert opened.engine.violations == []


class _Draft(OpenedVllm):
    def __init__(self, llm: Any, engine: Any, plane: Any, own: Mapping[str, Any], twin: Mapping[str, Any]) -> None:
        super().__init__(llm, engine, plane, own)
        self._twin = twin

    def weights_of(self, version: Version) -> Mapping[str, Any]:
        return self._twin if version == TWIN else super().weights_of(version)


class Drafting(OpenedVllm):
    """vLLM, in whatever form, that speculates with a draft model."""

    def draft_with(self, draft: Mapping[str, Any]) -> None:
        """Its checkpoint's weights."""
        self._draft = _Draft(None, self.engine, self._plane, draft, {name: self._weights[name] for name in draft})

    def draft_tensors(self) -> tuple[TensorSpec, ...]:
        return self._draft.tensors()

    async def send(self, order: ReceiveOrder, num_tensors: int | None = None) -> tuple[TensorSum, ...]:
        if order.is_draft:
            return await self._draft.send(order, num_tensors)
        return await super().send(order, num_tensors)

    def sums_of(self, version: Version) -> dict[str, str]:
        """Linear layers are fused, and prepacked on a CPU; the rest is as it was sent."""
        weights = self._draft.weights_of(version)
        kept = {name: tensor for name, tensor in weights.items() if "norm" in name or "embed_tokens" in name}
        return {
            f"dp0:pp0:pcp0:tp0:{name}": hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
            for name, tensor in kept.items()
        }

    async def num_drafted(self) -> tuple[int, int]:
        """How many tokens the draft has proposed so far, and how many of them the target has accepted."""
        raise NotImplementedError


class DraftingVllm(Drafting):
    """In this process."""

    async def num_drafted(self) -> tuple[int, int]:
        from vllm.v1.metrics.reader import get_metrics_snapshot

        found = {metric.name: getattr(metric, "value", 0) for metric in get_metrics_snapshot()}
        return (
            int(found["vllm:spec_decode_num_draft_tokens"]),
            int(found["vllm:spec_decode_num_accepted_tokens"]),
        )


def _make_models(folder: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A target in `model` and a draft in `draft`: their weights."""
    import torch
    from safetensors.torch import load_file, save_file

    from rlbus.workers.torch_lm.make import make_tiny_model

    make_tiny_model(folder / "model", vocab_size=512, seed=1, **options)
    make_tiny_model(folder / "draft", vocab_size=512, seed=2, layers=1, **options)
    weights = load_file(folder / "model" / "model.safetensors")
    weights |= {name: torch.zeros_like(t) for name, t in weights.items() if name in IDLE}
    save_file(weights, folder / "model" / "model.safetensors")
    return weights, load_file(folder / "draft" / "model.safetensors")


def _speculation(folder: Path) -> dict[str, Any]:
    return {
        "method": "draft_model",
        "model": str(folder / "draft"),
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
    }


class Outliving:
    """A server that outlives its sidecar, which another one can follow. Mixed into an opened engine."""

    engine: Any
    # Makes a sidecar that isn't started.
    make: Callable[[], Any]

    @property
    def found(self) -> Found:
        """What the sidecar was told at its start."""
        found: Found = self.engine.found
        return found

    async def follow(self) -> None:
        """The sidecar goes without another word to its server, as one that is killed, and the next one comes."""
        await self.engine.aclose()
        self.engine = self.make()
        await self.engine.start()


async def _counted(http: httpx.AsyncClient, url: str) -> tuple[int, int]:
    """As `num_drafted`, by the server's metrics."""
    found = {"draft": 0.0, "accepted": 0.0}
    for line in (await http.get(url)).text.splitlines():
        for kind in found:
            if line.startswith(f"vllm:spec_decode_num_{kind}_tokens_total{{"):
                found[kind] += float(line.rpartition(" ")[2])
    return int(found["draft"]), int(found["accepted"])


class DraftingHttp(Outliving, Drafting, OpenedHttp):
    """A server behind a sidecar."""

    async def num_drafted(self) -> tuple[int, int]:
        return await _counted(self._http, f"{self.engine.info.completions_url}/metrics")


class DraftingGrpc(Outliving, Drafting, OpenedGrpc):
    """A vllm-rs server behind a sidecar."""

    async def num_drafted(self) -> tuple[int, int]:
        return await _counted(self._http, "/metrics")


@asynccontextmanager
async def _open_http(folder: Path) -> AsyncIterator[DraftingHttp]:
    from rlbus.transfer.torch_plane import TorchPlane
    from rlbus.workers.peer_http import Peer
    from rlbus.workers.vllm_http.engine import VllmHttpEngine

    weights, draft = _make_models(folder, max_positions=cases_vllm_http.MAX_TOKENS)
    speculation = ("--speculative-config", json.dumps(_speculation(folder)))
    async with cases_vllm_http.serving(folder, folder / "model", *speculation) as (http, url):

        def make() -> VllmHttpEngine:
            return VllmHttpEngine(Peer.of(url, api_key=cases_vllm_http.API_KEY), run_dir=str(folder))

        plane = TorchPlane("gloo")
        opened = DraftingHttp(http, make(), plane, weights, folder)
        opened.make = make
        opened.draft_with(draft)
        try:
            await opened.engine.start()
            yield opened
        finally:
            await opened.engine.aclose()
            await plane.aclose()


@asynccontextmanager
async def _open_grpc(folder: Path) -> AsyncIterator[DraftingGrpc]:
    from rlbus.transfer.torch_plane import TorchPlane
    from rlbus.workers.peer_http import Peer
    from rlbus.workers.vllm_grpc.control import Control
    from rlbus.workers.vllm_grpc.engine import VllmGrpcEngine

    weights, draft = _make_models(folder, max_positions=cases_vllm_grpc.MAX_TOKENS)
    speculation = ("--speculative-config", json.dumps(_speculation(folder)))
    async with cases_vllm_grpc.serving(folder, folder / "model", *speculation) as (url, grpc_url):

        def make() -> VllmGrpcEngine:
            return VllmGrpcEngine(Control(Peer.of(grpc_url)), completions_url=url, run_dir=str(folder))

        plane = TorchPlane("gloo")
        opened = DraftingGrpc(url, str(folder / "model"), make(), plane, weights)
        opened.make = make
        opened.draft_with(draft)
        try:
            await opened.engine.start()
            yield opened
        finally:
            await opened.engine.aclose()
            await opened.aclose()
            await plane.aclose()


@asynccontextmanager
async def _open_vllm(folder: Path) -> AsyncIterator[DraftingVllm]:
    from rlbus.transfer.torch_plane import TorchPlane
    from rlbus.workers.vllm_server.supervisor import small_machine_env

    with mock.patch.dict(os.environ, {**ENV, **small_machine_env()}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, and those of what it imports
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        from rlbus.workers.vllm_server.engine import VllmEngine

        weights, draft = _make_models(folder)
        args = AsyncEngineArgs(
            model=str(folder / "model"),
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_TOKENS,
            kv_cache_memory_bytes=64 << 20,
            weight_transfer_config=WeightTransferConfig(backend="gloo"),
            speculative_config=_speculation(folder),
        )
        llm = AsyncLLM.from_engine_args(args)
        plane = TorchPlane("gloo")
        engine = VllmEngine(llm, run_dir=str(folder))
        try:
            await engine.start()
            opened = DraftingVllm(llm, engine, plane, weights)
            opened.draft_with(draft)
            yield opened
        finally:
            await engine.aclose()
            await plane.aclose()
            end(llm)


def new_loop() -> asyncio.AbstractEventLoop:
    """Of virtual time."""
    return VirtualTimeLoop(1e6)


CASES = (
    EngineCase(name="fake", open=_open_fake, loop_factory=new_loop, takes_other_dtypes=False),
    EngineCase(name="vllm", open=_open_vllm, requires=("vllm",), open_s=240.0, limit_s=LIMIT_S),
    EngineCase(name="vllm_http", open=_open_http, requires=("vllm",), open_s=300.0, limit_s=LIMIT_S),
    EngineCase(
        name="vllm_grpc",
        open=_open_grpc,
        requires=("vllm", "grpc"),
        is_peer=True,
        missing=cases_vllm_grpc.missing,
        open_s=300.0,
        limit_s=LIMIT_S,
    ),
)
