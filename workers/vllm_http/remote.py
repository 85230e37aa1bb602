"""vLLM's AsyncLLM, as far as rlbus asks it for anything, over the RL routes of its HTTP server (VLLM_SERVER_DEV_MODE).

What a server answers in-process by an exception comes back here as one; what the connection does becomes an error of
rlbus. A collective call that failed may have left vLLM's ranks out of step, so it never looks like a refusal.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlbus.errors import EngineDeadError, EngineError
from rlbus.schemas import Fault, FaultCode
from rlbus.workers.peer_http import PeerClient, PeerError
from rlbus.workers.vllm_server.calls import OVERDUE_S
from rlbus.workers.vllm_server.engine import UNLABELLED
from rlbus.workers.vllm_server.exchange import TORN
from rlbus.workers.vllm_server.ranks import CALL_S
from rlbus.workers.vllm_server.updates import LOAD_S, TRANSFER_S

_log = logging.getLogger("rlbus.workers")

# A call's own deadline is beyond the one of whoever waits for it (`EngineCalls`), who knows what a late one means.
BEYOND_S = OVERDUE_S + 5.0
# A pause that waits for requests is bounded by the agent; this only ends a connection that was forgotten.
WAIT_S = 86_400.0
# How long the server may take to say whether its engine lives.
HEALTH_S = 2.0
# vLLM's answer to /health when its engine is dead, without a word. A proxy that can't reach it has words of its
# own, and so has vLLM while it scales. Source: vllm 0.32, serve/instrumentator/health.py.
UNHEALTHY = 503

_ROUTES = {
    "init_weight_transfer_engine": ("/init_weight_transfer_engine", CALL_S),
    "update_weights": ("/update_weights", TRANSFER_S),
}


class RemoteLLM:
    """Calls one server. Methods are AsyncLLM's, with AsyncLLM's meaning.

    Args:
        vllm_config: the server's configuration (`facts.config_of`).
    """

    def __init__(self, client: PeerClient, vllm_config: Any) -> None:
        self._client = client
        self.vllm_config = vllm_config
        # Why the server, or its engine, is gone for good; a server that comes back is another one.
        self.death: str | None = None
        # Whether its weights are known to have a label.
        self._has_label = False

    @property
    def errored(self) -> bool:
        """Whether it died."""
        return self.death is not None

    # --- requests

    async def is_paused(self) -> bool:
        """Whether its scheduler stands still. Cancel: leaves nothing."""
        return bool(self._field(await self._get("/is_paused"), "is_paused"))

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """See AsyncLLM. Cancel: the engine is, or becomes, paused."""
        limit_s = WAIT_S if mode == "wait" else CALL_S
        await self._post("/pause", params={"mode": mode, "clear_cache": _flag(clear_cache)}, limit_s=limit_s)

    async def resume_generation(self) -> None:
        """See AsyncLLM. Cancel: the engine may be running."""
        await self._post("/resume")

    async def abort_requests(self, request_ids: Sequence[str] | None) -> int:
        """End the requests of these ids, which are vLLM's own, or all. The number, which vLLM counts by what it was
        asked for; so only that of all says something. Cancel: some may have ended.
        """
        body = {} if request_ids is None else {"request_ids": list(request_ids)}
        answer = await self._post("/abort_requests", body=body)
        return int(self._field(answer, "aborted"))

    # --- caches

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        """Whether it is empty now. Cancel: it may be emptied."""
        params = {"reset_running_requests": _flag(reset_running_requests), "reset_external": _flag(reset_connector)}
        return bool(self._field(await self._post("/reset_prefix_cache", params=params), "success"))

    async def reset_mm_cache(self) -> None:
        """See AsyncLLM. Cancel: it may be emptied."""
        await self._post("/reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        """See AsyncLLM. Cancel: it may be emptied."""
        await self._post("/reset_encoder_cache")

    # --- weights

    async def get_weight_version(self) -> str:
        """Its label.

        Raises: EngineDeadError: it had one, and has none, so it is another server's. Without rlbus's plugin, and behind
            something that keeps accepting connections, nothing else tells. Cancel: leaves nothing.
        """
        had_label = self._has_label  # an answer that is on its way speaks of the time before
        label = str(self._field(await self._get("/weight_info"), "weight_version"))
        if label != UNLABELLED:
            self._has_label = True
        elif had_label:
            self.die(f"the server at {self._client.peer.url} was started anew: its weights have lost their label")
            raise EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=str(self.death)))
        return label

    async def update_weight_version(self, label: str) -> None:
        """Set it. Cancel: it may be set."""
        await self._post("/update_weight_version", body={"new_version": label})
        self._has_label = True

    async def start_weight_update(self) -> None:
        """See AsyncLLM. Cancel: a session may be open."""
        await self._collective("/start_weight_update", {}, CALL_S)

    async def start_draft_weight_update(self) -> None:
        """See AsyncLLM. Cancel: a session may be open."""
        await self._collective("/start_draft_weight_update", {}, CALL_S)

    async def finish_weight_update(self) -> None:
        """See AsyncLLM; the label stays. Cancel: it goes on in the engine."""
        await self._collective("/finish_weight_update", {}, LOAD_S)

    async def compute_weight_checksums(self) -> list[Mapping[str, str]]:
        """Those of all ranks in one mapping: their names tell the ranks apart. Cancel: it goes on in the engine."""
        answer = await self._collective("/weight_checker", {"action": "checksum"}, LOAD_S)
        return [self._field(answer, "checksums")]

    async def collective_rpc(self, method: str, *, kwargs: Mapping[str, Any]) -> Any:
        """Only of methods that this module knows, each by its own route, or by the general one.

        Cancel: it goes on in the engine.
        """
        if method in _ROUTES:
            path, limit_s = _ROUTES[method]
            return await self._collective(path, kwargs, limit_s)
        assert method == "reload_weights", method
        # The server loads on when we are gone, and the label of before would then be a lie.
        await self.update_weight_version(TORN)
        return await self._collective("/collective_rpc", {"method": method, "kwargs": kwargs}, LOAD_S)

    async def plugin(self, method: str, path: str, *, body: Any = None, limit_s: float) -> Any:
        """One of the routes of rlbus's plugin. Raises: as `PeerClient.call`. Cancel: it goes on in the server."""
        return await self._guard(self._client.call(method, path, body=body, limit_s=limit_s + BEYOND_S))

    # --- within

    async def _collective(self, path: str, body: Mapping[str, Any], limit_s: float) -> Any:
        try:
            return await self._post(path, body=body, limit_s=limit_s)
        except PeerError as exc:
            if exc.status is not None and exc.status < 500:
                raise
            # Not a FaultError, so that the caller judges it as what AsyncLLM raises (`EngineCalls`).
            raise RemoteCallError(exc.problem or str(exc)) from exc

    async def _get(self, path: str) -> Any:
        return await self._guard(self._client.get(path, limit_s=CALL_S + BEYOND_S))

    async def _post(
        self, path: str, *, body: Any = None, params: Mapping[str, str] | None = None, limit_s: float = CALL_S
    ) -> Any:
        return await self._guard(self._client.post(path, body=body, params=params, limit_s=limit_s + BEYOND_S))

    async def _guard(self, call: Any) -> Any:
        """Make the call; what failed inside the server may be the death of its engine."""
        try:
            return await call
        except EngineDeadError as exc:
            self.die(exc.fault.message)
            raise
        except PeerError as exc:
            if exc.status is None or exc.status >= 500:
                await self._look(exc)
            raise

    def _field(self, answer: Any, name: str) -> Any:
        """One of an answer's, which has to be there."""
        if isinstance(answer, dict) and answer.get(name) is not None:
            return answer[name]
        text = f"{self._client.peer.url} answers without {name!r}: is it a vLLM server?"
        raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text))

    async def _look(self, cause: PeerError) -> None:
        """Raise EngineDeadError if the server says that its engine is dead, or doesn't listen any more."""
        try:
            await self._client.text("GET", "/health", limit_s=HEALTH_S)
        except EngineDeadError as exc:
            self.die(exc.fault.message)
            raise
        except PeerError as exc:
            if exc.status != UNHEALTHY or exc.problem:
                return
            message = f"the engine behind {self._client.peer.url} is dead: its server says so"
            self.die(message)
            raise EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=message)) from cause

    def die(self, why: str) -> None:
        """It is gone for good. Idempotent."""
        if self.death is None:
            self.death = why
            _log.error("%s", why)


class RemoteCallError(Exception):
    """A collective call raised inside vLLM, or nobody knows how it ended."""


async def until_healthy(client: PeerClient, *, poll_s: float, tell_s: float, is_known: bool = False) -> None:
    """Wait until the server says that it is healthy, saying every `tell_s` what it waits for. Bounded by the caller.

    Args:
        is_known: it was there before, so whatever else answers stands in its place while it is away.

    Raises: PeerError: it refuses our credentials, or has no such route, and isn't known. Cancel: leaves nothing.
    """
    loop = asyncio.get_running_loop()
    told_s: float | None = None
    while True:
        try:
            await client.text("GET", "/health", limit_s=HEALTH_S)
            return
        except EngineError as exc:
            if not is_known and isinstance(exc, PeerError) and (exc.is_denied or exc.is_missing):
                raise
            if told_s is None or loop.time() - told_s >= tell_s:
                told_s = loop.time()
                _log.info("waiting for %s: %s", client.peer.url, exc.fault.message)
        await asyncio.sleep(poll_s)


def _flag(value: bool) -> str:
    return "true" if value else "false"
