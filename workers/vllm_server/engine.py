"""vLLM as an engine of rlbus, around the AsyncLLM of its own API server.

Everything is asked of vLLM's AsyncLLM, in vLLM's words, and nothing of its HTTP routes. Lives on the server's loop,
in the one API server process that has the agent.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlbus.errors import EngineDeadError, EngineError, refused
from rlbus.schemas import (
    DRAFT_ROUTE,
    LORA_ROUTES,
    AbortedData,
    ChecksumsData,
    Fault,
    FaultCode,
    Generation,
    PausedData,
    PauseMode,
    SleepData,
    SleepTag,
    Version,
)
from rlbus.workers.engines.base import NO_LABEL, EngineInfo, Observed
from rlbus.workers.engines.native import NATIVE_ROUTES
from rlbus.workers.engines.sleep import SLEEP_ROUTES, in_order
from rlbus.workers.vllm_server.adapters import TakesLoras
from rlbus.workers.vllm_server.calls import CHECKSUM_S, EngineCalls
from rlbus.workers.vllm_server.checksums import checksums_data
from rlbus.workers.vllm_server.draft import expected_draft, expected_from
from rlbus.workers.vllm_server.exchange import Exchange
from rlbus.workers.vllm_server.guards import Guards, is_named
from rlbus.workers.vllm_server.loras import VllmLoras, capacity_of, parent_of
from rlbus.workers.vllm_server.model import expected_tensors
from rlbus.workers.vllm_server.native import PassedNative
from rlbus.workers.vllm_server.ranks import CALL_S, Left
from rlbus.workers.vllm_server.sleeping import Sleeping
from rlbus.workers.vllm_server.updates import Updates
from rlbus.workers.vllm_server.updating import UpdatingEngine

_log = logging.getLogger("rlbus.workers")

# vLLM's label of weights that nobody has labelled.
UNLABELLED = "default"
# Names under which `plugin.register` adds our transfer backend to vLLM.
BACKENDS = ("gloo", "rlbus")


class VllmEngine(UpdatingEngine, TakesLoras[VllmLoras]):
    """One vLLM server; see `Engine` for what each method promises.

    The updates' routes are there only if the server was configured for them: over a group if its weight transfer
    backend is one of BACKENDS, all its processes are on this machine, and the model's tensors are known. With several
    API servers no requests are counted or aborted by id, since each knows only its own.

    Args:
        llm: the server's AsyncLLM; it stays the server's.
        completions_url: where its OpenAI routes answer, None if they can't be reached.
        run_dir: parent of this engine's private folder; None is the system's temporary folder.
        sees_requests: whether `llm` knows the requests in flight, as the server's own does.
        guards: of the requests of this server, around `llm`; None wraps it with new ones if it sees requests.
        models: the server's OpenAIServingModels, under whose names adapters are served; None: there are none.
    """

    def __init__(
        self,
        llm: Any,
        *,
        completions_url: str | None = None,
        run_dir: str | None = None,
        sees_requests: bool = True,
        guards: Guards | None = None,
        models: Any = None,
    ) -> None:
        super().__init__()
        self._llm = llm
        self._guards = Guards() if guards is None else guards
        if sees_requests and not self._guards.is_wrapped:
            self._guards.wrap(llm)
        self._completions_url = completions_url
        self._run_dir = run_dir
        parallel = llm.vllm_config.parallel_config
        self._is_inside = sees_requests
        self._is_only_server = sees_requests and parallel._api_process_count == 1
        is_local = parallel.local_engines_only
        num_engines = parallel.data_parallel_size_local if is_local else parallel.data_parallel_size
        self._world_size: int = parallel.world_size * num_engines
        self._first_dp_index: int = parallel.data_parallel_index if is_local else 0
        self._calls = EngineCalls(llm, parallel.world_size)
        self._sleeping = Sleeping(llm, self._calls)
        # Several API servers don't know each other's names.
        has_loras = models is not None and llm.vllm_config.lora_config is not None and self._is_only_server
        if has_loras and capacity_of(llm.vllm_config) < 1:
            _log.warning("adapters are off: on a CPU vLLM needs one slot more than adapters; use --max-loras 2")
            has_loras = False
        self._loras = VllmLoras(llm, self._calls, models, self._parent) if has_loras else None
        self._passed = PassedNative(llm, self._calls)
        # Whether they have our transfer backend, on this machine.
        self._has_ranks = False
        self._exchange: Exchange | None = None
        self._info: EngineInfo | None = None

    @property
    def info(self) -> EngineInfo:
        """Valid after `start`."""
        assert self._info is not None, "the engine has not been started"
        return self._info

    @property
    def death(self) -> str | None:
        """Why the engine has to be restarted by what supervises the server; None while it lives."""
        return self._calls.death

    @property
    def calls(self) -> EngineCalls:
        """What every call of this engine goes through, so that what else calls it takes its turn."""
        return self._calls

    async def start(self) -> None:
        """Find out what the server can do. Cancel: leaves nothing."""
        config = self._llm.vllm_config
        self._expected = await asyncio.to_thread(expected_tensors, config.model_config)
        backends = self._backends()
        routes = {"pause_generation", "resume_generation", "flush_cache", "get_weight_checksums", "set_weight_version"}
        if self._is_only_server:
            routes.add("abort_request")
        if self._expected is not None:
            routes.add("update_weights_from_disk")
            _log.info("updates are checked against %s", self._expected.source)
        if backends:
            routes |= {"update_weights_from_distributed", *NATIVE_ROUTES}
            # From outside its ranks say what it speculates with: see `take_over`.
            self._draft = await asyncio.to_thread(expected_draft, self._llm) if self._is_inside else None
            routes |= {DRAFT_ROUTE} if self._draft is not None else set()
        elif self._is_inside and (own := config.weight_transfer_config) is not None and own.backend not in BACKENDS:
            routes |= NATIVE_ROUTES
            self._native = self._passed
        # vLLM refuses it where the platform has none; from outside it isn't known.
        if getattr(config.model_config, "enable_sleep_mode", False):
            routes |= SLEEP_ROUTES
        if self._loras is not None:
            self._loras.attach()
            routes |= LORA_ROUTES
        self._exchange = Exchange(self._run_dir)
        self._updates = Updates(
            self._llm,
            self._calls,
            self._exchange,
            world_size=self._world_size,
            first_dp_index=self._first_dp_index,
            expected=self._expected,
            has_transfer=config.weight_transfer_config is not None,
        )
        name = config.model_config.served_model_name
        self._info = EngineInfo(
            engine="vllm",
            model=name if isinstance(name, str) else str(name[0]),
            world_size=self._world_size,
            routes=frozenset(routes),
            backends=backends,
            completions_url=self._completions_url,
        )

    async def take_over(self) -> Left:
        """After `start`, of a server that ran before: leave its group, close its open update. What its ranks say
        of its weights; and if its draft model can be updated, that route is listed from here on.

        Raises: EngineError, EngineDeadError. Cancel: called again, it finishes.
        """
        left = await self._left()
        if left.draft is not None and self.info.backends:
            self._draft = await asyncio.to_thread(expected_from, left.draft)
        if self._draft is not None:
            self._info = replace(self.info, routes=self.info.routes | {DRAFT_ROUTE})
        return left

    async def _left(self) -> Left:
        """What the ranks say. They are asked even if no update can be checked: the draft may be torn all the same, and
        only they know. Then it is no error if they don't answer, since nothing else will be asked of them.
        """
        if not self._has_ranks:
            return Left()
        try:
            return await self._ready().take_over()
        except EngineDeadError:
            raise
        except EngineError as exc:
            if self.info.backends:
                raise
            _log.warning("whether a draft model was left torn isn't known: %s", exc)
            return Left()

    def _backends(self) -> tuple[str, ...]:
        """What the server can join; nothing, and why in the log, if it can't take an update over a group."""
        config = self._llm.vllm_config
        transfer, parallel = config.weight_transfer_config, config.parallel_config
        if transfer is None or transfer.backend not in BACKENDS:
            has = "no weight transfer" if transfer is None else f"weight transfer {transfer.backend!r}"
            _log.info("updates over a group are off: the server has %s, not one of %s", has, ", ".join(BACKENDS))
            return ()
        self._has_ranks = parallel.nnodes == 1 and parallel.distributed_executor_backend != "ray"
        if not self._has_ranks or self._expected is None:
            _log.info("updates over a group are off: the engine spans machines, or its tensors can't be told")
            return ()
        has_cuda = config.device_config.device_type == "cuda"
        return ("nccl", "gloo") if has_cuda and transfer.backend == "rlbus" else ("gloo",)

    async def aclose(self) -> None:
        """Drop the group; the engine itself belongs to the server. Idempotent.

        Cancel: the group may stand as long as the server does.
        """
        updates, self._updates = self._updates, None
        try:
            if updates is not None and self._calls.death is None:
                async with asyncio.timeout(5.0):
                    await updates.leave()
        except (TimeoutError, EngineError) as exc:
            _log.warning("the group could not be left: %s", exc)
        finally:
            self._calls.close()
            await self._guards.aclose()
            if self._loras is not None:
                self._loras.detach()
            if self._exchange is not None:
                self._exchange.close()

    async def observe(self) -> Observed:
        """Ask the engine. While its core is inside a call that changes the weights it can't answer, but it can't
        generate either: it was paused before and will be after, so that is what is said, without a label.

        Raises: EngineError, EngineDeadError. Cancel: leaves nothing.
        """
        self._calls.check_alive()
        if self._calls.is_held_paused:
            return Observed(Generation.PAUSED, None, self._num_requests(), self._sleeping.told)
        is_paused = await self._calls.ask("is_paused", self._llm.is_paused, CALL_S)
        label = await self._calls.ask("get_weight_version", self._llm.get_weight_version, CALL_S)
        asleep = await self._sleeping.asleep()
        generation = Generation.PAUSED if is_paused or asleep else Generation.RUNNING
        return Observed(generation, NO_LABEL if label == UNLABELLED else label, self._num_requests(), asleep)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> PausedData:
        """See `Engine`. A wait takes as long as the requests do, and is bounded by the caller.

        Cancel: the engine is, or becomes, paused.
        """
        before = self._requests()
        await self._calls.ask(
            f"pause ({mode.value})",
            lambda: self._llm.pause_generation(mode=mode.value, clear_cache=clear_cache),
            None if mode is PauseMode.WAIT else CALL_S,
        )
        # A wait also returns after somebody else has resumed the engine meanwhile (facts/vllm-cpu.md 2).
        if not await self._calls.ask("is_paused", self._llm.is_paused, CALL_S):
            text = "the engine was resumed by somebody else while it was being paused"
            raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text, retryable=True))
        after = self._requests()
        if before is None or after is None:
            return PausedData()
        num_aborted = len(before.keys() - after.keys()) if mode is PauseMode.ABORT else 0
        return PausedData(num_aborted=num_aborted, num_held=len(after))

    async def resume(self) -> None:
        """See `Engine`. Raises: AsleepError: vLLM itself would step over memory that isn't there."""
        await self._calls.settle(CALL_S)
        if asleep := await self._sleeping.asleep():
            tags = ", ".join(in_order(asleep))
            raise refused(FaultCode.ASLEEP, f"asleep: {tags}; wake it before it generates", tags=tags)
        await self._calls.ask("resume", self._llm.resume_generation, CALL_S)

    async def flush_cache(self) -> None:
        """See `Engine`. Requests that hold blocks are preempted, and compute them anew from the weights of then."""
        has_connector = self._llm.vllm_config.kv_transfer_config is not None
        try:
            is_empty = await self._calls.ask(
                "reset_prefix_cache",
                lambda: self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=has_connector),
                CALL_S,
            )
            await self._calls.ask("reset_mm_cache", self._llm.reset_mm_cache, CALL_S)
            await self._calls.ask("reset_encoder_cache", self._llm.reset_encoder_cache, CALL_S)
        except EngineError as exc:
            self._calls.check_alive()
            raise refused(FaultCode.FLUSH_FAILED, exc.fault.message) from exc
        if not is_empty:
            raise refused(FaultCode.FLUSH_FAILED, "the prefix cache still holds blocks of running requests")

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """See `Engine`. Ids are those that `generate` was given, or the X-Request-Id of an HTTP request.

        vLLM's frontend answers it, so it works beside everything. One without a token yet ends at its first one
        (`guards`), and is counted.
        """
        done = await self.abort_counted(request_ids)
        return (done.num_aborted or 0) + done.num_deferred

    async def abort_counted(self, request_ids: Sequence[str] | None) -> AbortedData:
        """See `CountsAborts`."""
        requests = self._requests()
        if requests is None:
            raise refused(FaultCode.NO_ROUTE, "each of several API servers knows only its own requests")
        # Nothing of vLLM's own makes requests without `generate`; an extension of the user's may.
        unguarded = [own for own, name in requests.items() if not self._guards.knows(name)]
        chosen = [own for own in unguarded if request_ids is None or is_named(requests[own], request_ids)]
        num_unguarded = len({self._parent(own) for own in chosen})
        if chosen:
            await self._calls.ask("abort", lambda: self._llm.abort(chosen, internal=True), CALL_S)
        done = await self._guards.abort(request_ids, self._abort_named)
        num_left = done.num_left if request_ids is None else None
        num_aborted = done.num_aborted + num_unguarded
        return AbortedData(num_aborted=num_aborted, num_deferred=done.num_deferred, num_left=num_left)

    def _parent(self, own: str) -> str:
        return parent_of(self._llm, own)

    async def _abort_named(self, names: list[str]) -> None:
        """End requests of these external names; with n > 1 each is several of the engine's."""
        own = [key for key, name in (self._requests() or {}).items() if name in names]
        if own:
            await self._calls.ask("abort", lambda: self._llm.abort(own, internal=True), CALL_S)

    @property
    def sleep_tags(self) -> frozenset[SleepTag]:
        """See `SleepEngine`."""
        return frozenset(SleepTag)

    async def sleep(self, tags: frozenset[SleepTag], level: int, mode: PauseMode) -> SleepData:
        """See `SleepEngine`. vLLM doesn't say how much it freed."""
        self._sleeping.check(tags)
        paused = await self.pause(mode, True)
        await self._sleeping.sleep(tags, level, mode)
        return SleepData(asleep=in_order(await self._sleeping.asleep()), num_aborted=paused.num_aborted)

    async def wake_up(self, tags: frozenset[SleepTag]) -> SleepData:
        """See `SleepEngine`."""
        await self._sleeping.wake_up(tags)
        return SleepData(asleep=in_order(await self._sleeping.asleep()))

    async def finish_update(self, version: Version) -> None:
        """See `Engine`."""
        is_draft = self.is_about_draft
        await super().finish_update(version)
        if not is_draft:
            await self._restore_loras()

    async def abort_update(self) -> None:
        """See `Engine`. Torn weights are labelled so."""
        await self._passed.abort()
        await super().abort_update()
        await self._restore_loras()

    async def finish_native(self, version: Version) -> None:
        """See `NativeEngine`."""
        await super().finish_native(version)
        # vLLM drops its adapters with an update; a request that names one would kill it.
        await self._restore_loras()

    # --- from disk, and what there is

    async def load_weights(self, path: str, version: Version) -> None:
        """See `Engine`."""
        await super().load_weights(path, version)
        await self._restore_loras()

    async def checksums(self) -> ChecksumsData:
        """vLLM's own, by its fused parameter names, cut to 64 bits; on a CPU without the linear layers, which vLLM
        keeps prepacked where it doesn't look. What was received is checked by rlbus's own sums (`ReceivedData`).
        Cancel: the engine goes on computing them.
        """
        found = await self._calls.hold("compute_weight_checksums", self._llm.compute_weight_checksums, CHECKSUM_S)
        return checksums_data(pair for rank in found for pair in rank.items())

    # --- adapters, see `LoraEngine`

    async def _restore_loras(self) -> None:
        if self._loras is not None:
            await self._loras.restore()

    # --- within

    def _requests(self) -> dict[str, str] | None:
        """Internal -> external id of every request in flight; None if there are others that this process can't see."""
        if not self._is_only_server:
            return None
        states = self._llm.output_processor.request_states
        return {own: state.external_req_id or own for own, state in states.items()}

    def _num_requests(self) -> int | None:
        requests = self._requests()
        return None if requests is None else len(requests)
