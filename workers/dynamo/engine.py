"""A Dynamo worker as an engine of rlbus: a sidecar that drives `POST <system_url>/engine/<route>`.

What Dynamo doesn't list isn't advertised. Updates over a group need rlbus installed beside the worker's vLLM, and its
transfer backend chosen (`--weight-transfer-config '{"backend": "rlbus"}'`): whether that is so is asked at the start.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rlbus.errors import EngineDeadError, EngineError, refused
from rlbus.schemas import (
    LORA_ROUTES,
    ChecksumsData,
    Fault,
    FaultCode,
    Generation,
    PausedData,
    PauseMode,
)
from rlbus.workers.dynamo.listing import Listed
from rlbus.workers.dynamo.loras import NEEDED, DynamoLoras
from rlbus.workers.dynamo.rpc import DynamoRpc
from rlbus.workers.dynamo.surface import Began, DynamoError, Surface
from rlbus.workers.dynamo.tensors import model_tensors
from rlbus.workers.engines.base import NO_LABEL, EngineInfo, Observed
from rlbus.workers.engines.found import Found
from rlbus.workers.engines.native import NATIVE_ROUTES
from rlbus.workers.peer_http import Peer, PeerClient
from rlbus.workers.vllm_server.adapters import TakesLoras
from rlbus.workers.vllm_server.calls import CHECKSUM_S, EngineCalls
from rlbus.workers.vllm_server.checksums import checksums_data
from rlbus.workers.vllm_server.exchange import CHECKSUMS, Exchange, FolderError, RankOutcome
from rlbus.workers.vllm_server.ranks import CALL_S, Left
from rlbus.workers.vllm_server.updates import Updates
from rlbus.workers.vllm_server.updating import UpdatingEngine

_log = logging.getLogger("rlbus.workers")

# A pause that waits for requests is bounded by its caller; this only says that nothing waits for ever.
WAIT_S = 86_400.0
# Leaving the group while the sidecar ends.
LEAVE_S = 5.0
# Aborts of one command that are on their way at once.
MAX_ABORTS = 16
# What a client knows a request by is the engine's id with the kind of the request before it.
_PREFIXES = ("cmpl-", "chatcmpl-")
_PAUSE, _RESUME, _FLUSH, _ABORT = "pause_generation", "resume_generation", "flush_cache", "abort_request"
_DISK, _DISTRIBUTED = "update_weights_from_disk", "update_weights_from_distributed"
_GROUP = frozenset({"init_weights_update_group", _DISTRIBUTED})
# A request that was answered a moment ago may still count: how long a pause waits for that, in seconds.
LORAS_END_S = 1.0
LORAS_POLL_S = 0.1
# Dynamo's words.
_LORAS_RUN = "with active LoRA requests"
# Without a label nobody could tell later which weights there are.
_PROBE, _LABELS = "liveness_probe", frozenset({"get_weight_version", "set_weight_version"})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What Dynamo doesn't say of its workers.

    Args:
        model_dir: the folder of the model's checkpoint, if `model` in the descriptor isn't it.
        has_transfer: whether the workers' vLLM has rlbus's transfer backend. None asks those of one rank; one of
            several isn't asked, since a question that its vLLM doesn't understand leaves its ranks out of step.
        max_loras: how many adapters a worker has room for, which Dynamo doesn't say; None: none are given to it.
        run_dir: parent of the folder through which engine and sidecar exchange what HTTP can't; has to be the same on
            both. None is the system's temporary folder.
    """

    model_dir: Path | None = None
    has_transfer: bool | None = None
    run_dir: str | None = None
    max_loras: int | None = None


class DynamoEngine(UpdatingEngine, TakesLoras[DynamoLoras]):
    """One Dynamo worker; see `Engine` for what each method promises.

    Args:
        listed: what discovery says of it.
        peer: its `system_url` with what every call carries.
        outlived: when the process began that an earlier adapter gave up: it won't do.
        transport: stands in for the network, in tests.
    """

    def __init__(
        self,
        listed: Listed,
        peer: Peer,
        options: EngineOptions | None = None,
        *,
        outlived: Began | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__()
        self._listed = listed
        self._options = EngineOptions() if options is None else options
        self._world_size = 1 if listed.world_size is None else listed.world_size
        self._client = PeerClient(peer, what=f"Dynamo worker {listed.who}", transport=transport)
        self._surface = Surface(self._client)
        self._rpc = DynamoRpc(self._surface)
        self._calls = EngineCalls(self._rpc, self._world_size)
        self._exchange: Exchange | None = None
        self._info: EngineInfo | None = None
        self._found: Found | None = None
        self._outlived = outlived
        # When the worker's process began; None if it doesn't say.
        self.began: Began | None = None
        # What was commanded last; before that nobody knows.
        self._commanded = Generation.UNKNOWN
        # Held around everything that pauses or resumes: a flush or an abort of all ends as it has begun.
        self._switch = asyncio.Lock()

    @property
    def info(self) -> EngineInfo:
        """Valid after `start`."""
        assert self._info is not None, "the engine has not been started"
        return self._info

    @property
    def found(self) -> Found:
        """See `FoundEngine`."""
        assert self._found is not None, "the engine has not been started"
        return self._found

    @property
    def death(self) -> str | None:
        """Why the worker can't be helped by this adapter any more; None while it can."""
        return self._surface.gone or self._calls.death

    @property
    def is_gone(self) -> bool:
        """Whether the worker's process has ended, as nobody listens there, or another one does. One that lives may
        have its `death`, too.
        """
        return self._surface.gone is not None

    async def start(self) -> None:
        """Find out what the worker can do. Raises EngineError. Cancel: leaves nothing."""
        listed = self._listed
        self.began = await self._look(CALL_S)
        if self._outlived is not None and self.began is not None and not self.began.is_after(self._outlived):
            text = f"Dynamo worker {listed.who} was given up, and its process still runs; restart it"
            raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text))
        self._expected = await asyncio.to_thread(model_tensors, listed.model, self._options.model_dir)
        self._exchange = Exchange(self._options.run_dir)
        left = await self._take_over(self._exchange)
        has_transfer = left is not None
        if left is None:
            self._updates = self._make_updates(self._exchange, has_transfer=False)
        is_paused = await self._surface.is_paused() if _DISK in listed.routes else None
        if self._options.max_loras and listed.routes >= NEEDED and await self._surface.has_loras():
            self._loras = DynamoLoras(self._surface, self._calls, capacity=self._options.max_loras)
        self._found = (Left() if left is None else left).found(
            await self._label(), is_paused=is_paused is True, has_draft=False
        )
        self._info = EngineInfo(
            engine="dynamo",
            model=listed.model,
            world_size=self._world_size,
            routes=self._routes(has_transfer),
            backends=("gloo",) if has_transfer else (),
        )

    def _routes(self, has_transfer: bool) -> frozenset[str]:
        """Those of rlbus that the listed ones are enough for."""
        listed, found = self._listed.routes, set()
        if {_PAUSE, _RESUME} <= listed:
            found |= {_PAUSE, _RESUME}
            # Dynamo's own flush says "ok" when nothing was flushed; emptying them with a pause doesn't.
            found.add(_FLUSH)
        if {_ABORT, _PAUSE, _RESUME} <= listed:
            found.add(_ABORT)
        if listed >= _LABELS:
            found.add("set_weight_version")
        if self._expected is not None and _LABELS | {_DISK, _PAUSE} <= listed:
            found.add(_DISK)
        if has_transfer:
            found |= {_DISTRIBUTED, "get_weight_checksums", *NATIVE_ROUTES}
        if self._loras is not None:
            found |= LORA_ROUTES
        return frozenset(found)

    def _make_updates(self, exchange: Exchange, *, has_transfer: bool) -> Updates:
        return Updates(
            self._rpc,
            self._calls,
            exchange,
            world_size=self._world_size,
            first_dp_index=0,  # Dynamo's RL mode refuses data parallelism
            expected=self._expected,
            has_transfer=has_transfer,
        )

    async def _take_over(self, exchange: Exchange) -> Left | None:
        """How the ranks were left; None without our transfer backend, which every rank has to answer for, in our
        folder.
        """
        wanted = self._options.has_transfer
        if self._expected is None or not self._listed.routes >= _GROUP | _LABELS or wanted is False:
            return None
        if wanted is None and self._world_size > 1:
            return None
        self._updates = self._make_updates(exchange, has_transfer=True)
        try:
            return await self._updates.take_over()
        except (EngineDeadError, FolderError):
            raise
        except EngineError as exc:
            if wanted:
                raise
            _log.info("%s takes no updates over a group: %s", self._listed.who, exc)
            return None

    async def _ask_ranks(self, question: str) -> list[RankOutcome]:
        assert self._exchange is not None
        folder = self._exchange.open(question)
        try:
            info = {"folder": folder.path, "ask": question}
            await self._calls.hold(
                question,
                lambda: self._rpc.collective_rpc("init_weight_transfer_engine", {"init_info": info}),
                CHECKSUM_S,
            )
            outcomes = [folder.outcome(question, rank) for rank in range(self._world_size)]
        finally:
            folder.remove()
        found = [outcome for outcome in outcomes if outcome is not None and outcome.fault is None]
        if len(found) < self._world_size:
            said = next((o.fault.message for o in outcomes if o is not None and o.fault is not None), "no answer")
            text = f"only {len(found)} of {self._world_size} ranks answer {question!r} through {folder.path}: {said}"
            raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text))
        return found

    async def aclose(self) -> None:
        """Drop the group and the connections; the worker itself is Dynamo's. Idempotent.

        Cancel: the group may stand as long as the worker does.
        """
        updates, self._updates = self._updates, None
        try:
            if updates is not None and self.death is None:
                async with asyncio.timeout(LEAVE_S):
                    await updates.leave()
        except (TimeoutError, EngineError) as exc:
            _log.warning("the group could not be left: %s", exc)
        finally:
            self._calls.close()
            if self._exchange is not None:
                self._exchange.close()
            await self._client.aclose()

    # --- how it is

    async def check_alive(self, limit_s: float) -> None:
        """One cheap question. Raises EngineDeadError: the worker is gone, or another process answers in its place.

        Cancel: leaves nothing.
        """
        self._calls.check_alive()
        began = await self._look(limit_s)
        if began is not None and self.began is not None and began.is_after(self.began):
            self._surface.gone = f"Dynamo worker {self._listed.who} was restarted"
        if self.death is not None:
            raise EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=self.death))
        self.began = began or self.began

    async def _label(self) -> str | None:
        return (await self._surface.label() or NO_LABEL) if self._listed.routes >= _LABELS else None

    async def _look(self, limit_s: float) -> Began | None:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        uptime_s = await self._surface.uptime_s(limit_s)
        return None if uptime_s is None else Began(asked_s - uptime_s, loop.time() - uptime_s)

    async def observe(self) -> Observed:
        """Ask Dynamo: its own pause flag and its label. While we pause or resume it the flag can't be asked for; then,
        and where it has no route by which to tell, what was commanded is said.

        Raises: EngineError, EngineDeadError. Cancel: leaves nothing.
        """
        self._calls.check_alive()
        if self._calls.is_held_paused:
            return Observed(Generation.PAUSED)
        await self.check_alive(CALL_S)
        if _PROBE in self._listed.routes:
            await self._surface.call(_PROBE, {}, CALL_S)
        label = await self._label()
        generation = self._commanded
        if not self._switch.locked() and _DISK in self._listed.routes:
            is_paused = await self._surface.is_paused()
            if is_paused is not None:
                generation = Generation.PAUSED if is_paused else Generation.RUNNING
        return Observed(generation, label)

    # --- generation

    async def pause(self, mode: PauseMode, clear_cache: bool) -> PausedData:
        """See `Engine`. Dynamo refuses `keep` while requests of adapters run (busy). It doesn't count requests.

        Cancel: the engine is, or becomes, paused, a wait among it: Dynamo goes on without its caller.
        """
        self._calls.check_alive()
        async with self._switch:
            await self._pause(mode, clear_cache, WAIT_S if mode is PauseMode.WAIT else CALL_S)
            if _DISK in self._listed.routes and await self._surface.is_paused() is False:
                text = "the engine was resumed by somebody else while it was being paused"
                raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text, retryable=True))
        return PausedData()

    async def _pause(self, mode: PauseMode, clear_cache: bool, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + LORAS_END_S
        while True:
            try:
                await self._surface.call(_PAUSE, {"mode": mode.value, "clear_cache": clear_cache}, limit_s)
                break
            except DynamoError as exc:
                said = exc.fault.detail.get("problem", "")
                if _LORAS_RUN not in said:
                    raise
                if loop.time() >= ends_s:
                    text = f"Dynamo: {said}; pause with wait or abort, or when they have ended"
                    raise refused(FaultCode.BUSY, text) from exc
            await asyncio.sleep(LORAS_POLL_S)
        self._commanded = Generation.PAUSED

    async def resume(self) -> None:
        """See `Engine`. After a wait that was given up it comes once Dynamo is done with that."""
        await self._calls.settle(CALL_S)
        async with self._switch:
            await self._resume()

    async def _resume(self) -> None:
        await self._surface.call(_RESUME, {}, CALL_S)
        self._commanded = Generation.RUNNING

    async def flush_cache(self) -> None:
        """See `Engine`. By a pause that empties the caches, which fails if one stays: Dynamo's own flush doesn't say
        so, and leaves the cache as it is while requests run. A running engine stands still for that moment.
        """
        await self._calls.settle(CALL_S)
        try:
            await self._pause_for_a_moment(PauseMode.KEEP, True)
        except EngineDeadError:
            raise
        except EngineError as exc:
            raise refused(FaultCode.FLUSH_FAILED, exc.fault.message) from exc

    async def _pause_for_a_moment(self, mode: PauseMode, clear_cache: bool) -> None:
        """Pause, and run again if it ran. Cancel: likewise."""
        async with self._switch:
            said = await self._surface.is_paused() if _DISK in self._listed.routes else None
            was_paused = self._commanded is Generation.PAUSED if said is None else said
            try:
                await self._pause(mode, clear_cache, CALL_S)
            finally:
                if not was_paused:
                    await self._resume()

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        """See `Engine`. Ids are those of Dynamo's answers, with or without `cmpl-`. Dynamo doesn't say whether it knew
        one, so nothing is counted. All of them end by a pause with `abort`, which lets none in meanwhile.
        """
        if request_ids is None:
            if self._switch.locked() or self._calls.is_held_paused:
                text = "Dynamo is being paused or resumed, or changes its weights; abort by id meanwhile"
                raise refused(FaultCode.BUSY, text)
            await self._pause_for_a_moment(PauseMode.ABORT, False)
            return
        turn = asyncio.Semaphore(MAX_ABORTS)

        async def one(request_id: str) -> None:
            async with turn:
                await self._surface.call(_ABORT, {"request_id": _engine_id(request_id)}, CALL_S)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_caught(one(request_id))) for request_id in request_ids]
        failed = next((error for task in tasks if (error := task.result()) is not None), None)
        if failed is not None:
            raise failed

    # --- weights

    async def checksums(self) -> ChecksumsData:
        """See `Engine`; as vLLM's own, computed by our transfer backend. Cancel: the ranks go on computing them."""
        if "get_weight_checksums" not in self.info.routes:
            raise refused(FaultCode.NO_ROUTE, "Dynamo has no checksums; rlbus' transfer backend in its vLLM would")
        outcomes = await self._ask_ranks(CHECKSUMS)
        return checksums_data(pair for outcome in outcomes for pair in outcome.digests.items())


def _engine_id(request_id: str) -> str:
    for prefix in _PREFIXES:
        request_id = request_id.removeprefix(prefix)
    return request_id


async def _caught(call: Coroutine[Any, Any, None]) -> EngineError | None:
    """The error of a call; the others of its group go on."""
    try:
        await call
    except EngineError as exc:
        return exc
    return None
