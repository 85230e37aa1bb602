"""What a `vllm-rs` server can do, from what it says of itself. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlbus.schemas import DRAFT_ROUTE
from rlbus.workers.engines.native import NATIVE_ROUTES
from rlbus.workers.engines.sleep import SLEEP_ROUTES
from rlbus.workers.vllm_server.exchange import RankDraft, RankOutcome
from rlbus.workers.vllm_server.ranks import left_of

# Names under which rlbus adds its transfer backend to vLLM. Source: rlbus.workers.vllm_server.plugin.register.
BACKENDS = ("gloo", "rlbus")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What GetServerInfo and GetModelInfo say.

    `transfer_backend` is None without one, or if the engines behind one server have different ones. `num_ranks` counts
    the processes that hold the model, over all data-parallel engines.
    """

    instance_id: str
    version: str
    # The folder or hub name that the weights came from, and the name that clients use.
    model: str
    served_name: str
    num_ranks: int
    is_local: bool
    transfer_backend: str | None = None
    has_sleep: bool = False
    has_draft: bool = False
    has_lora: bool = False
    max_loras: int = 0

    @classmethod
    def of(cls, info: Any, model: Any) -> "ServerFacts":
        """From the two answers. A server that doesn't count its ranks has one."""
        parallel, rl = info.parallelism, info.rl_capabilities
        num_engines = max(1, parallel.data_parallel_size)
        # Its world size is that of one engine. Source: vLLM 0.32, v1/engine/core.py, EngineCoreReadyResponse.
        return cls(
            instance_id=info.instance_id,
            version=info.engine_version,
            model=model.model_id,
            served_name=model.served_model_name or model.model_id,
            num_ranks=max(1, parallel.world_size) * num_engines,
            is_local=max(1, parallel.data_parallel_size_local) == num_engines,
            transfer_backend=(rl.weight_transfer_backend or None) if rl.weight_transfer_enabled else None,
            has_sleep=rl.sleep_mode_enabled,
            has_draft=rl.draft_weight_updates_enabled,
            has_lora=model.supports_lora,
            max_loras=info.max_loras,
        )


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the ranks answered through the exchange folder: a device each, or in words why updates are off."""

    devices: tuple[str, ...] = ()
    problem: str | None = None
    # What all of them speculate with, as they say it.
    draft: RankDraft | None = None


def is_ours(facts: ServerFacts) -> str | None:
    """Why the server's transfer backend can't be one of rlbus's; None if it is worth asking its ranks."""
    if facts.transfer_backend is None:
        return "the server was started without --weight-transfer-config"
    if facts.transfer_backend not in BACKENDS:
        return f"the server transfers weights by {facts.transfer_backend!r}, not by one of {', '.join(BACKENDS)}"
    if not facts.is_local:
        return "the server's engines are on several machines, and rlbus's transfer answers through a folder"
    return None


def greeting_of(outcomes: Sequence[RankOutcome | None]) -> Greeting:
    """What the ranks' answers amount to."""
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            text = "its answer isn't in the folder that this worker gave it; run this worker on the server's machine"
            return Greeting(problem=f"rank {rank}: {text}, with the same temporary folder")
        if outcome.fault is not None:
            return Greeting(problem=f"rank {rank}: {outcome.fault.message}")
    said = [outcome for outcome in outcomes if outcome is not None]
    return Greeting(tuple(outcome.device for outcome in said), draft=left_of(said).draft)


def routes_of(facts: ServerFacts, greeting: Greeting, *, has_expected: bool, has_draft: bool = False) -> frozenset[str]:
    """The routes that are advertised. `has_expected`: the model's tensors are known, so that updates can be checked;
    `has_draft`: those of a draft model are, too.

    Sums and reloads go through rlbus's transfer backend in the ranks, since the service has no call for either.
    """
    routes = {"pause_generation", "resume_generation", "flush_cache", "abort_request", "set_weight_version"}
    if greeting.problem is None:
        routes.add("get_weight_checksums")
        if has_expected:
            routes |= {"update_weights_from_disk", "update_weights_from_distributed", *NATIVE_ROUTES}
            routes |= {DRAFT_ROUTE} if has_draft and facts.has_draft else set()
    # On a CPU vLLM only says that it sleeps (facts/vllm-cpu.md 9).
    if facts.has_sleep and "cpu" not in greeting.devices:
        routes |= SLEEP_ROUTES
    return frozenset(routes)


def backends_of(facts: ServerFacts, greeting: Greeting) -> tuple[str, ...]:
    """The transfer backends that the ranks can join. NCCL only where all have a GPU, and the backend isn't Gloo's."""
    if greeting.problem is not None:
        return ()
    has_cuda = bool(greeting.devices) and all(device == "cuda" for device in greeting.devices)
    return ("nccl", "gloo") if has_cuda and facts.transfer_backend == "rlbus" else ("gloo",)
