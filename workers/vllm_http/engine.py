"""A vLLM server that runs by itself, as an engine of rlbus: everything goes over its HTTP routes.

The rules are those of `VllmEngine`, which drives the server here too, only through `RemoteLLM` instead of vLLM's own
object. What that one knows of requests in flight, and its adapters, this one has only of a server with rlbus's plugin.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from rlbus.errors import ConfigError, EngineDeadError, EngineError
from rlbus.schemas import (
    DRAFT_ROUTE,
    LORA_ROUTES,
    ChecksumsData,
    Fault,
    FaultCode,
    Generation,
    GroupPlan,
    JoinedData,
    PausedData,
    PauseMode,
    RankSpan,
    ReceivedData,
    TensorSpec,
    TensorSum,
    Version,
    lora_id,
)
from rlbus.workers.engines.base import EngineInfo, Observed, ProgressFn, ReadyFn, ReceiveOrder, UpdateFailedError
from rlbus.workers.engines.found import Found
from rlbus.workers.engines.native import NATIVE_ROUTES
from rlbus.workers.peer_http import Peer, PeerClient, PeerError
from rlbus.workers.vllm_http.facts import ServerFacts, ask, denied
from rlbus.workers.vllm_http.loras import RemoteLoras
from rlbus.workers.vllm_http.remote import RemoteLLM, until_healthy
from rlbus.workers.vllm_http.supervisor import LOST, tell_lost
from rlbus.workers.vllm_server.about import ABOUT, About
from rlbus.workers.vllm_server.adapters import TakesLoras
from rlbus.workers.vllm_server.engine import VllmEngine
from rlbus.workers.vllm_server.exchange import clear_left
from rlbus.workers.vllm_server.ranks import CALL_S

_log = logging.getLogger("rlbus.workers")

NAME = "vllm_http"
# In the run folder: the URL of a server that an agent has worked with.
MET = "server-met"
# While the server isn't there yet: between two looks, and between two lines in the log.
POLL_S = 0.5
TELL_S = 10.0
# What of VllmEngine this adapter has over HTTP.
ROUTES = frozenset(
    {
        "pause_generation",
        "resume_generation",
        "flush_cache",
        "get_weight_checksums",
        "set_weight_version",
        "update_weights_from_disk",
        "update_weights_from_distributed",
        DRAFT_ROUTE,
        *NATIVE_ROUTES,
    }
)
# Of a completion with several prompts, so many are looked for by the id of its request, where the server can't be asked
# which there are.
MAX_PROMPTS = 16


class VllmHttpEngine(TakesLoras[RemoteLoras]):
    """One running vLLM server; see `Engine` for what each method promises, and `VllmEngine` for how.

    The server needs VLLM_SERVER_DEV_MODE=1; for updates over a group also VLLM_PLUGINS=rlbus and a weight transfer
    of rlbus's, on this machine.

    Args:
        peer: where it answers, and the credentials of every call.
        advertise_host: host under which clients reach it, if not that of `peer`.
        run_dir: parent of this engine's private folder, used by nobody else; None is the system's temporary folder.
        transport: stands in for the network, in tests.
    """

    def __init__(
        self,
        peer: Peer,
        *,
        advertise_host: str | None = None,
        run_dir: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._peer = peer
        self._advertise_host = advertise_host
        self._run_dir = run_dir
        self._client = PeerClient(peer, what="vLLM", transport=transport)
        self._facts: ServerFacts | None = None
        self._llm: RemoteLLM | None = None
        self._inner: VllmEngine | None = None
        self._info: EngineInfo | None = None
        self._found: Found | None = None

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

    async def start(self) -> None:
        """Wait until the server is healthy, and find out what it can do and how it was left. Bounded by the caller.
        Once a server was there, whatever answers 401 or 404 in its place (an ingress) is waited out.

        Raises: ConfigError: wrong credentials, no RL routes, or a server that is on the bus by itself. EngineError,
            EngineDeadError. Cancel: leaves nothing.
        """
        try:
            await until_healthy(self._client, poll_s=POLL_S, tell_s=TELL_S, is_known=self._was_met())
        except PeerError as exc:
            if exc.is_missing:
                problem = "there is no /health: that isn't the base URL of a vLLM server"
                raise ConfigError("url", self._peer.url, problem) from exc
            raise denied(exc) from exc
        facts = self._facts = await ask(self._client)
        if self._run_dir is not None:
            clear_left(self._run_dir)
        self._llm = RemoteLLM(self._client, facts.config)
        inner = self._inner = VllmEngine(
            self._llm, completions_url=self._completions_url(), run_dir=self._run_dir, sees_requests=False
        )
        await inner.start()
        left = await inner.take_over()
        observed = await inner.observe()
        info = inner.info
        is_paused = observed.generation is Generation.PAUSED
        self._found = left.found(observed.weight_version, is_paused=is_paused, has_draft=DRAFT_ROUTE in info.routes)
        routes = info.routes & ROUTES
        # With several API servers each knows only its own requests.
        if facts.config.parallel_config._api_process_count == 1:
            routes |= {"abort_request"}
        if facts.about is not None and facts.about.lora_capacity is not None:
            await self._take_over_loras(inner, facts.about.boot_id, facts.about.lora_capacity)
            routes |= LORA_ROUTES
        self._info = EngineInfo(
            engine=NAME,
            model=info.model,
            world_size=info.world_size,
            routes=routes,
            backends=info.backends,
            completions_url=info.completions_url,
        )
        self._note_met()

    def _was_met(self) -> bool:
        """Whether an agent before this one, under the same supervisor, has worked with a server at this URL."""
        if self._run_dir is None:
            return False
        try:
            return Path(self._run_dir, MET).read_text() == self._peer.url
        except (OSError, UnicodeError):
            return False

    def _note_met(self) -> None:
        if self._run_dir is not None:
            # Without it the next agent judges the URL anew, as the first did.
            with contextlib.suppress(OSError):
                Path(self._run_dir, MET).write_text(self._peer.url)

    def _completions_url(self) -> str:
        parts = urlsplit(self._peer.url)
        if self._advertise_host is None:
            return self._peer.url
        host = f"[{self._advertise_host}]" if ":" in self._advertise_host else self._advertise_host
        return urlunsplit((parts.scheme, f"{host}:{self._peer.port}", parts.path, "", ""))

    async def aclose(self) -> None:
        """Drop the group; the server goes on. Idempotent. Cancel: the group may stand as long as the server does."""
        inner, self._inner = self._inner, None
        try:
            if inner is not None:
                self._tell_if_lost(inner)
                await inner.aclose()
        finally:
            await self._client.aclose()

    async def observe(self) -> Observed:
        """Ask the server; see `VllmEngine.observe`.

        Raises: EngineError, EngineDeadError: it is gone, its engine died, or another server answers in its place.
            Cancel: leaves nothing.
        """
        # Beside each other: who asks has a second, and a loaded server takes a good part of that for each.
        observed, requests = await asyncio.gather(self._ready().observe(), self._requests())
        return Observed(observed.generation, observed.weight_version, None if requests is None else len(requests))

    async def pause(self, mode: PauseMode, clear_cache: bool) -> PausedData:
        """See `Engine`. Counts requests only of a server with rlbus's plugin.

        Cancel: the engine is, or becomes, paused.
        """
        before = await self._requests()
        await self._ready().pause(mode, clear_cache)
        after = await self._requests()
        if before is None or after is None:
            return PausedData()
        num_aborted = len(set(before) - set(after)) if mode is PauseMode.ABORT else 0
        return PausedData(num_aborted=num_aborted, num_held=len(after))

    async def resume(self) -> None:
        """See `Engine`."""
        await self._ready().resume()

    async def flush_cache(self) -> None:
        """See `VllmEngine.flush_cache`."""
        await self._ready().flush_cache()

    async def abort(self, request_ids: Sequence[str] | None) -> int | None:
        """See `Engine`. Ids are those of vLLM, or the X-Request-Id of a request to it.

        A server without rlbus's plugin doesn't say how many of the named ones there were, only how many of all.
        Cancel: some may have ended.
        """
        llm, known = self._remote(), await self._requests()
        if request_ids is None:
            counted = await llm.abort_requests(None)
            return counted if known is None else len(known)
        if known is None:
            await llm.abort_requests([own for name in request_ids for own in _ids_of(name)])
            return None
        chosen = [own for own in known if set(_names_of(own)) & set(request_ids)]
        if chosen:
            await llm.abort_requests(chosen)
        return len(chosen)

    def check_manifest(self, tensors: Sequence[TensorSpec]) -> None:
        """See `Engine`."""
        self._ready().check_manifest(tensors)

    async def join_group(self, plan: GroupPlan, span: RankSpan) -> JoinedData:
        """See `Engine`."""
        return await self._ready().join_group(plan, span)

    async def leave_group(self) -> None:
        """See `Engine`."""
        await self._ready().leave_group()

    async def receive_weights(self, order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
        """See `Engine`."""
        return await self._ready().receive_weights(order, on_ready, on_progress)

    async def finish_update(self, version: Version) -> None:
        """See `Engine`."""
        is_draft = self._ready().is_about_draft
        await self._ready().finish_update(version)
        if not is_draft:
            await self._restore_after_weights()

    async def abort_update(self) -> None:
        """See `Engine`. Torn weights are labelled so."""
        await self._ready().abort_update()
        if self._loras is not None:
            await self._loras.restore()

    # --- an update that somebody else's trainer drives, see `NativeEngine`: over rlbus's backend in the server only

    def check_init(self, info: dict[str, Any]) -> None:
        """See `ChecksInit`."""
        self._ready().check_init(info)

    async def init_native(self, info: dict[str, Any]) -> None:
        """See `NativeEngine`."""
        await self._ready().init_native(info)

    async def shutdown_native(self) -> None:
        """See `NativeEngine`."""
        await self._ready().shutdown_native()

    async def start_native(self) -> None:
        """See `NativeEngine`."""
        await self._ready().start_native()

    async def update_native(self, info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """See `NativeEngine`."""
        await self._ready().update_native(info)

    async def finish_native(self, version: Version) -> None:
        """See `NativeEngine`."""
        await self._ready().finish_native(version)
        await self._restore_after_weights()

    # --- from disk, and what there is

    async def check_checkpoint(self, path: str) -> None:
        """See `Engine`."""
        await self._ready().check_checkpoint(path)

    async def checkpoint_sums(self, path: str) -> tuple[TensorSum, ...]:
        """See `Engine`."""
        return await self._ready().checkpoint_sums(path)

    async def load_weights(self, path: str, version: Version) -> None:
        """See `Engine`. The server has to find the folder under the same path."""
        await self._ready().load_weights(path, version)
        await self._restore_after_weights()

    async def label_weights(self, version: Version) -> None:
        """See `LabelEngine`."""
        await self._ready().label_weights(version)

    async def checksums(self) -> ChecksumsData:
        """See `VllmEngine.checksums`. Cancel: the engine goes on computing them."""
        return await self._ready().checksums()

    def check_draft_manifest(self, tensors: Sequence[TensorSpec]) -> None:
        """See `DraftEngine`."""
        self._ready().check_draft_manifest(tensors)

    async def draft_checksums(self) -> ChecksumsData:
        """See `DraftEngine`, and `VllmEngine.checksums`. Cancel: the engine goes on computing them."""
        return await self._ready().draft_checksums()

    # --- within

    async def _take_over_loras(self, inner: VllmEngine, boot_id: str, capacity: int) -> None:
        """Adapters that were loaded for an agent before stay, whole; those that drained for it end here.

        Raises: EngineError, EngineDeadError. Cancel: called again, it finishes.
        """
        loras = self._loras = RemoteLoras(self._remote(), inner.calls, boot_id=boot_id, capacity=capacity)
        # It may have died between the end of an update, with which vLLM drops them, and this.
        await loras.restore()
        for found in await loras.residents():
            if found.is_draining and found.revision is not None:
                num_ended = await loras.unload(found.name, found.revision)
                name = lora_id(found.name, found.revision)
                _log.warning(
                    "%s drained for an agent that is gone, and is unloaded; requests ended: %d", name, num_ended
                )

    async def _restore_after_weights(self) -> None:
        """vLLM drops its adapters with an update or reload. Raises: UpdateFailedError: nobody may generate yet."""
        if self._loras is None:
            return
        try:
            await self._loras.restore()
        except EngineDeadError:
            raise
        except EngineError as exc:
            raise UpdateFailedError(exc.fault, weights_touched=True) from exc

    def _tell_if_lost(self, inner: VllmEngine) -> None:
        """A server that runs on with a lost engine (ranks out of step, a call that never comes back) has to be started
        anew: whoever supervises it, if that is us, is told by a file.
        """
        if inner.death is not None and self._remote_death() is None and self._run_dir is not None:
            tell_lost(Path(self._run_dir, LOST))

    def _remote_death(self) -> str | None:
        return None if self._llm is None else self._llm.death

    def _ready(self) -> VllmEngine:
        assert self._inner is not None, "the engine isn't started, or is closed"
        return self._inner

    def _remote(self) -> RemoteLLM:
        assert self._llm is not None, "the engine isn't started"
        if self._llm.death is not None:
            raise EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=self._llm.death))
        return self._llm

    async def _requests(self) -> tuple[str, ...] | None:
        """The ids of what is in flight; None if the server doesn't tell. Sees whether it is still the same server."""
        llm = self._remote()
        if self._facts is None or self._facts.about is None:
            return None
        try:
            about = About.parse(await self._client.get(ABOUT, limit_s=CALL_S))
        except EngineDeadError as exc:
            llm.die(exc.fault.message)
            raise
        if about.boot_id != self._facts.about.boot_id:
            llm.die(f"the server at {self._peer.url} was started anew")
            raise EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=f"{llm.death}"))
        return about.requests


def _ids_of(name: str) -> list[str]:
    """Under which ids vLLM may know a request: as given, and as its OpenAI routes make them of an X-Request-Id."""
    return [name, f"chatcmpl-{name}", *(f"cmpl-{name}-{i}" for i in range(MAX_PROMPTS))]


def _names_of(own: str) -> list[str]:
    """The other way round."""
    kind, _, rest = own.partition("-")
    if kind == "cmpl":
        return [own, rest, rest.rpartition("-")[0]]
    return [own, rest] if kind == "chatcmpl" else [own]
