"""A stand-in for vLLM's AsyncLLM, with ranks that leave outcomes in the call's folder as `transfer.py` does."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from rlbus.schemas import Fault, FaultCode, TensorSum
from rlbus.workers.vllm_server.exchange import CallFolder, RankOutcome

SUMS = (TensorSum(name="w", checksum="a" * 16),)


def config(
    *, world_size: int = 2, backend: str | None = "gloo", num_servers: int = 1, index: int = 0, has_sleep: bool = False
) -> Any:
    """The parts of a VllmConfig that are looked at."""
    parallel = SimpleNamespace(
        _api_process_count=num_servers,
        _api_process_rank=index,
        local_engines_only=False,
        data_parallel_size=1,
        data_parallel_size_local=1,
        data_parallel_index=0,
        world_size=world_size,
        nnodes=1,
        distributed_executor_backend="mp",
    )
    return SimpleNamespace(
        parallel_config=parallel,
        weight_transfer_config=None if backend is None else SimpleNamespace(backend=backend),
        model_config=SimpleNamespace(served_model_name="model", enable_sleep_mode=has_sleep),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=None,
    )


@dataclass
class FakeLLM:
    """Notes every call in `calls`. `on_update` decides what a rank says after a transfer."""

    world_size: int = 2
    backend: str | None = "gloo"
    num_servers: int = 1
    errored: bool = False
    paused: bool = False
    label: str = "default"
    calls: list[str] = field(default_factory=list)
    raises: dict[str, str] = field(default_factory=dict)
    joined: Callable[[int], RankOutcome | None] = lambda rank: RankOutcome(group_rank=1 + rank, group_size=3)
    updated: Callable[[int], RankOutcome | None] = lambda rank: RankOutcome(
        weights_touched=True, num_bytes=8, num_tensors=1, sums=SUMS, receive_s=0.1 * (rank + 1)
    )
    finished: Callable[[int], RankOutcome | None] = lambda rank: RankOutcome()
    # Until it is set, or the folder says stop, `update_weights` doesn't return.
    update_may_end: asyncio.Event | None = None
    is_prefix_cache_empty: bool = True
    has_sleep: bool = False
    # As vLLM's executor keeps them.
    sleeping: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.vllm_config = config(
            world_size=self.world_size, backend=self.backend, num_servers=self.num_servers, has_sleep=self.has_sleep
        )
        self.output_processor = SimpleNamespace(request_states={})
        self._folder: CallFolder | None = None
        self._is_open = False

    def add(self, own: str, external: str, parent: str | None = None) -> None:
        """A request in flight."""
        parent_req = None if parent is None else SimpleNamespace(request_id=parent)
        state = SimpleNamespace(external_req_id=external, parent_req=parent_req)
        self.output_processor.request_states[own] = state

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.raises:
            raise Exception(f"Call to {call} method failed: {self.raises[call]}")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._note(f"pause {mode}")
        self.paused = True
        if mode == "abort":
            self.output_processor.request_states.clear()

    async def resume_generation(self) -> None:
        self._note("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def is_sleeping(self) -> bool:
        return self.paused or bool(self.sleeping)

    async def sleep(self, level: int, mode: str) -> None:
        self._note(f"sleep {level} {mode}")
        self.paused = True
        if "weights" not in self.sleeping:
            self.sleeping |= {"weights", "kv_cache"}

    async def release_kv_cache_memory(self) -> None:
        self._note("release_kv_cache_memory")
        assert self.paused, "requires a completed pause first"
        assert not self.sleeping, "requires all executor memory to be resident"
        self.sleeping.add("kv_cache")

    async def wake_up(self, tags: list[str]) -> bool:
        """As vLLM's core: the last one resumes it; one that is awake stops the call."""
        self._note(f"wake_up {' '.join(tags)}")
        if self.sleeping.issuperset(tags):
            self.sleeping -= set(tags)
        if not self.sleeping:
            self.paused = False
        return not self.sleeping

    def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:
        raise NotImplementedError

    async def get_weight_version(self) -> str:
        return self.label

    async def update_weight_version(self, label: str) -> None:
        self._note("label")
        self.label = label

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        self._note("reset_prefix_cache")
        return self.is_prefix_cache_empty

    async def reset_mm_cache(self) -> None:
        self._note("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        self._note("reset_encoder_cache")

    async def abort(self, request_ids: list[str], internal: bool) -> None:
        assert internal
        self._note("abort")
        for own in request_ids:
            del self.output_processor.request_states[own]

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        return [{f"tp{rank}:embed": "ab" * 32, f"tp{rank}:linear": empty} for rank in range(self.world_size)]

    async def _init(self, info: dict[str, Any]) -> None:
        self._note("init" if info["plan"] is not None else "leave")
        if info["plan"] is not None:
            self._say(CallFolder(info["folder"]), "join", self.joined)

    async def start_weight_update(self) -> None:
        self._note("start")
        assert not self._is_open, "start_weight_update called while a weight update is already active"
        self._is_open = True

    async def _update(self, info: dict[str, Any]) -> None:
        self._note("update")
        folder = self._folder = CallFolder(info["folder"])
        for rank in range(self.world_size):
            folder.open_counter(rank, 8).close()
        outcomes = self.updated
        while self.update_may_end is not None and not self.update_may_end.is_set():
            await asyncio.sleep(0.01)
            if folder.stop_reason() is not None:
                outcomes = untouched
                break
        self._say(folder, "receive", outcomes)

    async def finish_weight_update(self) -> None:
        self._note("finish")
        assert self._is_open, "finish_weight_update called without a matching start_weight_update"
        self._is_open = False
        if self._folder is not None:
            self._say(self._folder, "finish", self.finished)

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        match method:
            case "init_weight_transfer_engine":
                await self._init(kwargs["init_info"])
            case "update_weights":
                await self._update(kwargs["update_info"])
            case _:
                self._note(method)

    def _say(self, folder: CallFolder, step: str, outcomes: Callable[[int], RankOutcome | None]) -> None:
        for rank in range(self.world_size):
            outcome = outcomes(rank)
            if outcome is not None:
                folder.end(step, rank, outcome)


def untouched(rank: int) -> RankOutcome:
    """A transfer that failed before its first byte."""
    return RankOutcome(fault=Fault(code=FaultCode.TRANSFER_FAILED, message=f"rank {rank} saw the group go"))
