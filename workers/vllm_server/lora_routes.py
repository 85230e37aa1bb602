"""The adapters of a vLLM server for a sidecar of it: routes of rlbus's plugin that drive `VllmLoras` inside the server.

What the agent promises an engine in its own process (one change at a time, an answer that is never older than the last
change) is kept here by a lock that every route takes: who lost the answer to a load asks for the list, which waits for
that load. A request names the start of the server that it is meant for, so that none meant for a server that is gone
changes another one. As `GET /rlbus`: in dev mode only, and for whoever brings one of the server's keys.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rlbus._json_body import BodyError, read_json
from rlbus._vllm_words import error_body
from rlbus.errors import EngineError, FaultError, refused
from rlbus.schemas import Fault, FaultCode, LoraName, Revision
from rlbus.schemas.loras import MAX_PATH_CHARS
from rlbus.workers.engines.lora import Resident
from rlbus.workers.system.app import has_key
from rlbus.workers.system.calls import CallError, convert, read_body
from rlbus.workers.system.vllm_words import VLLM_SHAPE, VLLM_STATUS_OF
from rlbus.workers.vllm_server.about import has_dev_mode, unauthorized
from rlbus.workers.vllm_server.calls import EngineCalls
from rlbus.workers.vllm_server.loras import CALL_S, LORA_S, VllmLoras, capacity_of, parent_of

_log = logging.getLogger("rlbus.workers")

LIST = "/rlbus/loras"
LOAD, DRAIN, UNLOAD, RESTORE = (f"{LIST}/{verb}" for verb in ("load", "drain", "unload", "restore"))
MAX_BOOT_ID_CHARS = 64

B = TypeVar("B", bound="Meant")
Answer = Mapping[str, Any]

BootId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_BOOT_ID_CHARS)]


class Meant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of RESTORE, and base of the others. `boot_id` is that of `About`."""

    boot_id: BootId


class One(Meant, frozen=True):
    """Body of DRAIN and UNLOAD."""

    name: LoraName
    revision: Revision


class Load(One, frozen=True):
    """Body of LOAD. `folder` is an absolute path of the server's machine."""

    folder: Annotated[str, msgspec.Meta(pattern="^/", max_length=MAX_PATH_CHARS)]


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of LIST: all adapters of the server."""

    loras: tuple[Resident, ...]


class Unloaded(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of UNLOAD: how many requests that ended. The others answer with an empty object."""

    num_ended: int


def lora_capacity(llm: Any) -> int | None:
    """How many adapters a sidecar may load into a server; None if it takes none, or other API servers serve them, too.

    `llm` is its AsyncLLM, None before there is one.
    """
    config = None if llm is None else getattr(llm, "vllm_config", None)
    if config is None or config.lora_config is None or config.parallel_config._api_process_count != 1:
        return None
    capacity = capacity_of(config)
    return capacity if capacity > 0 else None


class LoraRoutes:
    """The routes of one server.

    Args:
        boot_id: of this start of it.
        keys: those of which a caller has to bring one; none: everybody may.
    """

    def __init__(self, boot_id: str, keys: Callable[[], Sequence[str]]) -> None:
        self._boot_id = boot_id
        self._keys = keys
        self._llm: Any = None
        self._worker: str | None = None
        # Made by the first request.
        self._loras: VllmLoras | None = None
        self._calls: EngineCalls | None = None
        self._turn = asyncio.Lock()

    @property
    def capacity(self) -> int | None:
        """See `About.lora_capacity`."""
        return None if self._worker is not None else lora_capacity(self._llm)

    def serve(self, llm: Any, worker: str | None) -> None:
        """From now on. `worker` is the server's own name on the bus, if its own agent has the adapters."""
        self._llm, self._worker = llm, worker
        lora = None if worker is not None else getattr(getattr(llm, "vllm_config", None), "lora_config", None)
        if lora is not None and self.capacity is None:
            _log.warning(
                "rlbus: no adapters for a sidecar: that needs one API server, and on a CPU --max-loras 2 or more"
            )

    def attach(self, app: Any, environ: Mapping[str, str] | None = None) -> None:
        """Add them to vLLM's application, if it has vLLM's RL routes, too."""
        if not has_dev_mode(os.environ if environ is None else environ):
            return
        app.add_api_route(LIST, self._on(self._list, CALL_S), methods=["GET"], include_in_schema=False)
        changes = {LOAD: self._load, DRAIN: self._drain, UNLOAD: self._unload, RESTORE: self._restore}
        for path, change in changes.items():
            app.add_api_route(path, self._on(change, LORA_S), methods=["POST"], include_in_schema=False)

    # --- what each does

    async def _list(self, loras: VllmLoras, _body: bytes) -> Answer:
        return msgspec.to_builtins(Listed(loras=await loras.residents()))  # type: ignore[no-any-return]

    async def _load(self, loras: VllmLoras, body: bytes) -> Answer:
        load = self._parsed(body, Load)
        await loras.load(load.name, load.revision, Path(load.folder))
        return {}

    async def _drain(self, loras: VllmLoras, body: bytes) -> Answer:
        one = self._parsed(body, One)
        await loras.drain(one.name, one.revision)
        return {}

    async def _unload(self, loras: VllmLoras, body: bytes) -> Answer:
        one = self._parsed(body, One)
        return {"num_ended": await loras.unload(one.name, one.revision)}

    async def _restore(self, loras: VllmLoras, body: bytes) -> Answer:
        self._parsed(body, Meant)
        await loras.restore()
        return {}

    # --- within

    def _on(
        self, work: Callable[[VllmLoras, bytes], Awaitable[Answer]], limit_s: float
    ) -> Callable[[Request], Awaitable[Response]]:
        """A handler: checks who comes, and does `work` once it is its turn, within `limit_s` seconds."""

        async def handle(request: Request) -> Response:
            wanted = self._keys()
            if wanted and not has_key(request.headers, wanted):
                return unauthorized()
            try:
                loras = self._ready(request)
                body = await read_body(request)
                async with self._own_turn(limit_s):
                    return JSONResponse(await work(loras, body))
            except CallError as exc:
                return VLLM_SHAPE.error(exc)
            except FaultError as exc:
                return _spelled(self._final(exc.fault))
            except Exception:  # noqa: BLE001 - the caller gets a fault, the server's log the traceback
                _log.exception("rlbus: %s failed", request.url.path)
                return _spelled(Fault(code=FaultCode.INTERNAL, message="a bug of rlbus; the server's log has it"))

        return handle

    def _ready(self, request: Request) -> VllmLoras:
        """Raises: CallError: there are no adapters here, or they are not a sidecar's."""
        if self._worker is not None:
            problem = f"this server is on the bus by itself, as {self._worker}; load adapters by that worker"
            raise CallError(HTTPStatus.CONFLICT, "Conflict", problem)
        if self.capacity is None:
            problem = "this server takes no adapters: it needs --enable-lora, one API server, on a CPU --max-loras 2"
            raise CallError(HTTPStatus.NOT_FOUND, "Not Found", problem)
        if self._loras is None:
            llm, models = self._llm, request.app.state.openai_serving_models
            self._calls = EngineCalls(llm, llm.vllm_config.parallel_config.world_size)
            self._loras = VllmLoras(llm, self._calls, models, lambda own: parent_of(llm, own))
            self._loras.attach()
        return self._loras

    def _parsed(self, body: bytes, as_type: type[B]) -> B:
        """Raises: CallError: it isn't one. FaultError: it is meant for another start of the server."""
        try:
            data = read_json(body)
        except BodyError as exc:
            raise CallError(HTTPStatus.BAD_REQUEST, "Invalid JSON", str(exc)) from exc
        found = convert(data, as_type)
        if found.boot_id != self._boot_id:
            text = f"this start of the server is {self._boot_id}; that was meant for {found.boot_id}, which is gone"
            raise refused(FaultCode.STALE_EPOCH, text)
        return found

    @contextlib.asynccontextmanager
    async def _own_turn(self, limit_s: float) -> AsyncIterator[None]:
        """Raises: EngineError: another change doesn't end."""
        try:
            async with asyncio.timeout(limit_s):
                await self._turn.acquire()
        except TimeoutError as exc:
            text = f"another change of the server's adapters did not end within {limit_s:g} s"
            raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text, retryable=True)) from exc
        try:
            yield
        finally:
            self._turn.release()

    def _final(self, fault: Fault) -> Fault:
        """What failed, or why nothing goes any more."""
        death = None if self._calls is None else self._calls.death
        return fault if death is None else Fault(code=FaultCode.ENGINE_DEAD, message=f"{death} ({fault.message})")


def _spelled(fault: Fault) -> Response:
    """As vLLM words an error, with rlbus' words beside it."""
    status = HTTPStatus(VLLM_STATUS_OF.get(fault.code, HTTPStatus.INTERNAL_SERVER_ERROR))
    known = {"code": fault.code.value, "retryable": fault.retryable, "detail": dict(fault.detail)}
    return JSONResponse({**error_body(status, fault.message), "rlbus": known}, status_code=status)
