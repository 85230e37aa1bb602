"""The adapters of one vLLM server: "name@revision" for its OpenAI routes, a number of their own for its core.

vLLM's own routes do this by name; here every load of a revision has a new number and a path with its checksum, which is
what vLLM's prefix cache is keyed by, so no revision is served another's prefixes (SCENARIOS 31). vLLM dies of a request
whose adapter it can't load (facts/vllm-cpu.md 7), and loads one again for a request that comes late; so a request that
still names an adapter after its end is refused where it enters the engine, and what is unloaded waits for those that
are just entering.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlbus.adapter import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE
from rlbus.errors import EngineError, FaultError, refused
from rlbus.files import read_file
from rlbus.schemas import MAX_LORAS, Fault, FaultCode, lora_id
from rlbus.workers.checkpoint import CheckpointError, read_specs
from rlbus.workers.disk import DISK
from rlbus.workers.engines.lora import LoraInfo, Resident
from rlbus.workers.vllm_server.calls import EngineCalls

_log = logging.getLogger("rlbus.workers")

# Reading an adapter from the disk and copying it to every rank.
LORA_S = 300.0
# Questions, and dropping one.
CALL_S = 30.0
# How long requests that are being ended may take to go, in seconds; vLLM ends them within a step.
END_S = 10.0
END_POLL_S = 0.02
# Where vLLM's `add_request` takes the adapter, if it isn't named. Source: AsyncLLM.add_request, vLLM 0.32.
LORA_INDEX = 4


class _Names(dict[str, Any]):
    """vLLM's table of adapters by model name, with "policy" beside "policy@7" for the same one: listed once."""

    def values(self) -> Any:
        """Those under their own name; whoever looks a model up by name finds the others, too."""
        return {name: request for name, request in self.items() if request.lora_name == name}.values()


class VllmLoras:
    """Loads, drains and unloads the adapters of one server.

    Args:
        llm: its AsyncLLM.
        models: its OpenAIServingModels: what requests name.
        parent_of: the request that one of the engine's internal ids belongs to.
    """

    def __init__(self, llm: Any, calls: EngineCalls, models: Any, parent_of: Callable[[str], str]) -> None:
        self._llm = llm
        self._calls = calls
        self._models = models
        self._parent_of = parent_of
        self.info = LoraInfo(capacity_of(llm.vllm_config), can_drain=True, can_hot_swap=False)
        self._max_rank: int = llm.vllm_config.lora_config.max_lora_rank
        # vLLM's LoRARequest of each adapter that is loaded, or was asked for, by (name, revision).
        self._ours: dict[tuple[str, int], Any] = {}
        self._draining: set[tuple[str, int]] = set()
        # Requests by number of their adapter that are on their way into the engine.
        self._entering: Counter[int] = Counter()
        # Numbers that take no requests any more, because they drain or are gone.
        self._closed: set[int] = set()
        self._add_request: Any = None

    def attach(self) -> None:
        """Begin to look at what enters the engine, and to name adapters. Idempotent."""
        if not isinstance(self._models.lora_requests, _Names):
            self._models.lora_requests = _Names(self._models.lora_requests)
        if self._add_request is not None:
            return
        self._add_request = add_request = self._llm.add_request

        async def guarded(*args: Any, **kwargs: Any) -> Any:
            lora = kwargs.get("lora_request", args[LORA_INDEX] if len(args) > LORA_INDEX else None)
            if lora is None:
                return await add_request(*args, **kwargs)
            number = lora.lora_int_id
            if number in self._closed:
                raise _not_found(lora.lora_name)
            self._entering[number] += 1
            try:
                return await add_request(*args, **kwargs)
            finally:
                self._entering[number] -= 1

        self._llm.add_request = guarded

    def detach(self) -> None:
        """Leave the engine as it was; adapters that are loaded stay. Idempotent."""
        if self._add_request is not None:
            self._llm.add_request, self._add_request = self._add_request, None

    # --- the seam

    async def load(self, name: str, revision: int, folder: Path) -> None:
        """See `LoraEngine.load_lora`."""
        key = (name, revision)
        await self._drop_strays()
        if key in self._draining:
            self._open(key)
            return
        if key in self._ours and self._is_named(key):
            return
        if name == self._llm.vllm_config.model_config.model or self._models.is_base_model(name):
            raise refused(FaultCode.WRONG_STATE, f"{name!r} is the name of the base model", name=name)
        if lora_id(*key) in self._models.lora_requests:
            raise refused(
                FaultCode.REVISION_TAKEN, f"somebody else has loaded {lora_id(*key)!r}; unload that one first"
            )
        await DISK.run(lambda: check_files(folder, self._max_rank), str(folder))
        listed = await self._numbers()
        if len(listed) >= self.info.capacity:
            capacity = self.info.capacity
            raise refused(FaultCode.NO_CAPACITY, f"the engine holds {capacity} adapters", capacity=capacity)
        request = self._request(name, revision, folder)
        self._ours[key] = request
        added = await self._calls.hold("add_lora", lambda: self._llm.add_lora(request), LORA_S)
        if not added:
            raise EngineError(_failed(f"vLLM did not take {request.lora_name}"))
        self._name(key)

    async def drain(self, name: str, revision: int) -> None:
        """See `LoraEngine.drain_lora`. Never waits."""
        key = (name, revision)
        if key in self._ours and self._is_named(key):
            self._draining.add(key)
            self._closed.add(self._ours[key].lora_int_id)
            self._unname(key)

    async def unload(self, name: str, revision: int) -> int:
        """See `LoraEngine.unload_lora`. No request of it is left when the engine lets it go."""
        key = (name, revision)
        await self._drop_strays()
        if key not in self._ours:
            return 0
        await self.drain(name, revision)
        number = self._ours[key].lora_int_id
        num_ended = await self._end_requests(number)
        await self._remove(number)
        del self._ours[key]
        self._draining.discard(key)
        return num_ended

    async def residents(self) -> tuple[Resident, ...]:
        """See `LoraEngine.list_loras`. What the core has and a request can name, or that still drains."""
        numbers = await self._numbers()
        ours = {request.lora_int_id for request in self._ours.values()}
        found = [
            Resident(
                *key,
                self._num_in_flight(request.lora_int_id),
                is_draining=key in self._draining,
                files=Path(request.lora_path).name,
            )
            for key, request in self._ours.items()
            if request.lora_int_id in numbers and (key in self._draining or self._is_named(key))
        ]
        others = {r.lora_name: r for r in self._models.lora_requests.values() if r.lora_int_id not in ours}
        found += [Resident(name, None, self._num_in_flight(r.lora_int_id)) for name, r in others.items()]
        return tuple(found)

    async def restore(self) -> None:
        """Put back what an update or reload of the base weights has dropped from the core (facts/vllm-cpu.md 7). One
        that can't be is not served any more: vLLM would die of its first request.

        Cancel: some may not be back; vLLM loads them for their first request.
        """
        for key, request in list(self._ours.items()):
            try:
                if not await self._calls.hold("add_lora", lambda r=request: self._llm.add_lora(r), LORA_S):  # type: ignore[misc]
                    raise EngineError(_failed("vLLM did not take it"))
            except FaultError as exc:
                self._calls.check_alive()
                _log.error("%s could not be loaded again, and is dropped: %s", lora_id(*key), exc.fault.message)
                await self.drain(*key)
                await self._end_requests(request.lora_int_id)
                self._ours.pop(key)
                self._draining.discard(key)

    # --- within

    def _request(self, name: str, revision: int, folder: Path) -> Any:
        """A new number for every load, so that what was cached or is late never meets another one's."""
        from vllm.lora.request import LoRARequest

        number = self._models.lora_id_counter.inc(1)
        return LoRARequest(lora_name=lora_id(name, revision), lora_int_id=number, lora_path=str(folder))

    def _is_named(self, key: tuple[str, int]) -> bool:
        return self._models.lora_requests.get(lora_id(*key)) is self._ours[key]

    def _name(self, key: tuple[str, int]) -> None:
        self._models.lora_requests[lora_id(*key)] = self._ours[key]
        self._rename(key[0])

    def _unname(self, key: tuple[str, int]) -> None:
        self._models.lora_requests.pop(lora_id(*key), None)
        self._rename(key[0])

    def _rename(self, name: str) -> None:
        """Let the plain name mean the newest revision that is served; one of somebody else's is left alone."""
        names = self._models.lora_requests
        current = names.get(name)
        if current is not None and current.lora_name == name:
            return
        newest = max((key for key in self._ours if key[0] == name and self._is_named(key)), default=None)
        if newest is None:
            names.pop(name, None)
        else:
            names[name] = self._ours[newest]

    def _open(self, key: tuple[str, int]) -> None:
        self._draining.discard(key)
        self._closed.discard(self._ours[key].lora_int_id)
        self._name(key)

    async def _numbers(self) -> set[int]:
        if self._calls.is_held_paused:
            raise EngineError(_failed("the engine is inside an update, and can't list its adapters", retryable=True))
        found: set[int] = set(await self._calls.ask("list_loras", self._llm.list_loras, CALL_S))
        return found

    async def _drop_strays(self) -> None:
        """What a load that was cut off has left in the core without a name."""
        for key, request in list(self._ours.items()):
            if key not in self._draining and not self._is_named(key):
                await self._remove(request.lora_int_id)
                del self._ours[key]

    async def _remove(self, number: int) -> None:
        self._closed.add(number)
        await self._calls.hold("remove_lora", lambda: self._llm.remove_lora(number), CALL_S)

    def _states(self, number: int) -> list[str]:
        """Internal ids of the requests that the engine has for an adapter."""
        states = self._llm.output_processor.request_states
        return [own for own, s in states.items() if s.lora_request is not None and s.lora_request.lora_int_id == number]

    def _num_in_flight(self, number: int) -> int:
        return len({self._parent_of(own) for own in self._states(number)}) + self._entering[number]

    async def _end_requests(self, number: int) -> int:
        """Abort what names it, also what is just entering; how many there were."""
        ended: set[str] = set()
        ends_s = asyncio.get_running_loop().time() + END_S
        while self._num_in_flight(number):
            chosen = self._states(number)
            ended |= {self._parent_of(own) for own in chosen}
            if chosen:
                await self._calls.ask("abort", lambda ids=chosen: self._llm.abort(ids, internal=True), CALL_S)  # type: ignore[misc]
            if asyncio.get_running_loop().time() > ends_s:
                raise EngineError(_failed(f"requests of the adapter did not end within {END_S:g} s", retryable=True))
            await asyncio.sleep(END_POLL_S)
        return len(ended)


def parent_of(llm: Any, own: str) -> str:
    """The request that an internal id of AsyncLLM belongs to: with n > 1 several share one."""
    state = llm.output_processor.request_states.get(own)
    parent = None if state is None else state.parent_req
    return own if parent is None else str(parent.request_id)


def capacity_of(config: Any) -> int:
    """How many adapters a server may have; 0: none soundly. `config` is a VllmConfig with a `lora_config`.

    On a CPU the last slot has to stay empty: vLLM 0.32 gives it to requests of the base model that run in one batch
    with others, which have slot -1 there (seen with tokens that differ; `lora/ops/torch_ops`, which other platforms
    don't use).
    """
    lora = config.lora_config
    largest: int = min(lora.max_cpu_loras, MAX_LORAS)
    return min(largest, lora.max_loras - 1) if config.device_config.device_type == "cpu" else largest


def check_files(folder: Path, max_rank: int) -> None:
    """Find what vLLM accepts silently, or fails at on every rank: by the headers alone. Blocks.

    Raises a refusal (manifest_mismatch): a rank above the server's, or halves whose sizes don't fit.
    """
    try:
        config = json.loads(read_file(folder / CONFIG_FILE, MAX_CONFIG_BYTES))
        rank, patterns = int(config["r"]), dict(config.get("rank_pattern") or {})
        specs = {spec.name: spec.shape for spec in read_specs(folder / WEIGHTS_FILE)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise _mismatch(f"{CONFIG_FILE} can't be read ({type(exc).__name__})") from exc
    except CheckpointError as exc:
        raise _mismatch(f"{WEIGHTS_FILE} {exc.problem}") from exc
    largest = max([rank, *(int(value) for value in patterns.values())])
    if largest > max_rank:
        raise _mismatch(f"its rank is {largest}, this server takes up to {max_rank} (--max-lora-rank)")
    for name, shape in specs.items():
        other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
        own_rank = shape[0] if ".lora_A." in name else shape[1] if ".lora_B." in name and len(shape) > 1 else None
        if own_rank is None:
            continue
        if other not in specs:
            raise _mismatch(f"tensor {name!r} has no other half")
        if not patterns and own_rank != rank:
            raise _mismatch(f"tensor {name!r} has shape {shape}, which isn't of rank {rank}")


def _mismatch(problem: str) -> FaultError:
    return refused(FaultCode.MANIFEST_MISMATCH, f"the adapter can't be loaded: {problem}")


def _failed(message: str, *, retryable: bool = False) -> Fault:
    return Fault(code=FaultCode.ENGINE_FAILED, message=message, retryable=retryable)


def _not_found(name: str) -> Exception:
    """What vLLM's routes answer with 404."""
    from vllm.exceptions import LoRAAdapterNotFoundError

    error: Exception = LoRAAdapterNotFoundError(name, "a request that came after its end")
    return error
