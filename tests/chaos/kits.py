"""The engines that the stage is set with, as the command lines of their workers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# About 30 MB in float32 for torch: a transfer of a good part of a second to three workers on 2 cores.
TORCH_HIDDEN, TORCH_LAYERS = 320, 8
# About 6 MB: some buckets, so that half of it is something.
VLLM_HIDDEN, VLLM_LAYERS = 256, 4


@dataclass(frozen=True, slots=True)
class Kit:
    """One engine. `options` of each worker, by instance id; `struck_workers` and `struck_engine` say whom blows hit.

    `engine_words`: one of them is in the command line of the engine's own process. `ready_s`: what a start may take.
    `make_model` writes it into a folder.
    """

    name: str
    policy: str
    options: Mapping[str, tuple[str, ...]]
    struck_workers: tuple[str, ...]
    struck_engine: str
    engine_words: tuple[str, ...]
    ready_s: float
    make_model: Callable[[Path], object]
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def workers(self) -> tuple[str, ...]:
        """Their names on the bus."""
        return tuple(f"backend/{instance_id}" for instance_id in self.options)


def torch_kit() -> Kit:
    """Three workers of unequal size."""

    def make(folder: Path) -> None:
        from rlbus.workers.torch_lm.make import make_tiny_model

        make_tiny_model(folder, vocab_size=512, hidden=TORCH_HIDDEN, layers=TORCH_LAYERS)

    return Kit(
        name="torch",
        policy="torch",
        options={"1": (), "2": (), "3": ("--ranks", "2")},
        struck_workers=("backend/2", "backend/1", "backend/3"),
        struck_engine="backend/3",
        engine_words=("torch_lm.rank_process",),
        ready_s=300.0,
        make_model=make,
        env={"OMP_NUM_THREADS": "1"},
    )


def vllm_kit() -> Kit:
    """Two workers, as the demo starts them on a machine without a GPU."""
    from rlbus.workers.vllm_server.supervisor import small_machine_env

    def make(folder: Path) -> None:
        from rlbus.workers.torch_lm.make import make_tiny_model

        make_tiny_model(folder, vocab_size=512, hidden=VLLM_HIDDEN, layers=VLLM_LAYERS)

    options = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--kv-cache-memory-bytes", "67108864")
    return Kit(
        name="vllm",
        policy="transformers",
        options={"1": options, "2": options},
        struck_workers=("backend/2", "backend/1"),
        struck_engine="backend/2",
        engine_words=("EngineCore",),
        ready_s=300.0,
        make_model=make,
        env=small_machine_env(),
    )


KITS: Mapping[str, Callable[[], Kit]] = {"torch": torch_kit, "vllm": vllm_kit}
