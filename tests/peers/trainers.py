"""vLLM's own trainer side, as a user of vLLM has it, and what a model of its weights generates."""

import asyncio
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def trainer(checkpoint: Path, client: Any, world_size: int, on_first: Callable[[], None] = lambda: None) -> Any:
    """vLLM's trainer engine over Gloo, as a user of vLLM makes it. `on_first` is called before the first tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports
        from safetensors.torch import load_file
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from rlbus.workers.vllm_server.trainer import GlooTrainerInitInfo

    weights = load_file(checkpoint / "model.safetensors")

    class Source(WeightSource):  # type: ignore[misc]
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            on_first()
            return iter(weights.items())

    info = GlooTrainerInitInfo(master_address="127.0.0.1", master_port=0, world_size=world_size, rank=0)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source())


def expected_tokens(checkpoint: Path) -> list[int]:
    """What a model of these weights generates, by another engine."""

    async def main() -> list[int]:
        from rlbus.workers.engines.torch_engine import TorchEngine
        from rlbus.workers.torch_lm.sampling import Sampling

        engine = TorchEngine(checkpoint)
        await engine.start()
        try:
            sampling = Sampling(max_tokens=16, temperature=0.0, ignores_eos=True)
            return list((await engine.generate([7, 8, 9, 10], sampling)).tokens)
        finally:
            await engine.aclose()

    return asyncio.run(main())
