"""A client of `vllm.Control`: typed calls, each with a deadline, whose failures are faults of rlbus.

Invariants: a connection that broke is judged once, by whether the same server is back within LOST_S; a server that was
started anew (it has another instance id) is never taken for the one before, since nobody knows its weights.
"""

import asyncio
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from rlbus.errors import ConfigError, refused
from rlbus.schemas import FaultCode, PauseMode
from rlbus.workers.peer_http import Peer
from rlbus.workers.vllm_grpc import messages
from rlbus.workers.vllm_grpc.capabilities import ServerFacts
from rlbus.workers.vllm_grpc.faults import dead, error_of, is_engine_gone
from rlbus.workers.vllm_grpc.messages import Method

_log = logging.getLogger("rlbus.workers")

# A question or a switch: milliseconds, unless the engine is busy with a step.
CALL_S = 30.0
# How long a server that can't be reached may stay away before its engine counts as gone.
LOST_S = 5.0
# Between attempts to connect, in milliseconds. gRPC's own go up to two minutes.
FIRST_RETRY_MS, MAX_RETRY_MS = 100, 1000
# The largest message that tonic takes unless told otherwise, less some for the frame. Source: tonic, DEFAULT_MAX_RECV.
MAX_MESSAGE_BYTES = (4 << 20) - 1024
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", FIRST_RETRY_MS),
    ("grpc.min_reconnect_backoff_ms", FIRST_RETRY_MS),
    ("grpc.max_reconnect_backoff_ms", MAX_RETRY_MS),
    ("grpc.enable_retries", 0),  # nothing is asked twice without us
)
# Names of headers; with that ending the value would be bytes.
_NAME = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)
_BINARY = "-bin"
# vLLM's numbers. 0 is "unspecified", which the server takes for an abort; it is never sent.
_MODES = {PauseMode.ABORT: 1, PauseMode.WAIT: 2, PauseMode.KEEP: 3}


class Control:
    """One server. `connect` first, `aclose` last.

    Args:
        peer: where it answers (https: with TLS, by the authorities of the system or of SSL_CERT_FILE), and what goes
            with every call, e.g. credentials for a proxy before the server.

    Raises:
        ConfigError: the file with the authorities can't be read, or a header is one that gRPC can't send.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.target = f"[{peer.host}]:{peer.port}" if ":" in peer.host else f"{peer.host}:{peer.port}"
        self._headers = _metadata(peer)
        self._credentials = _credentials(os.environ.get("SSL_CERT_FILE")) if peer.url.startswith("https:") else None
        self._channel: Any = None
        self._calls: dict[str, Any] = {}
        self._instance_id: str | None = None
        self._lost: str | None = None
        # The server lives on without its engine.
        self.has_dead_engine = False
        self._finding_out: asyncio.Task[None] | None = None

    @property
    def errored(self) -> bool:
        """Whether the server is gone for good."""
        return self._lost is not None

    @property
    def death(self) -> str | None:
        """Why it counts as gone, None while it doesn't."""
        return self._lost

    async def connect(self, limit_s: float) -> None:
        """Connect, and note which server it is. Waits for one that doesn't listen yet.

        Raises: EngineError: it doesn't answer within `limit_s`, or isn't a server of this kind. Cancel: no connection;
            `aclose` is due all the same.
        """
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(self.target, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(self.target, self._credentials, options=_OPTIONS)
        self._calls = {
            method.name: self._channel.unary_unary(
                method.path,
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=lambda data, name=method.response: messages.parse(name, data),
            )
            for method in messages.METHODS
        }
        info = await self._call(messages.GET_SERVER_INFO, limit_s, is_waiting=True)
        self._instance_id = info.instance_id

    async def aclose(self) -> None:
        """Close the connection; calls that are under way end. Idempotent. Cancel: it closes by itself."""
        if self._finding_out is not None:
            self._finding_out.cancel()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=None)

    # --- the calls. Each raises FaultError by the table in `faults`, and EngineDeadError. Cancel: the server may do it.

    async def facts(self) -> ServerFacts:
        """What the server says of itself. Cancel: leaves nothing."""
        info = await self._call(messages.GET_SERVER_INFO, CALL_S)
        self._check_instance(info.instance_id)
        model = await self._call(messages.GET_MODEL_INFO, CALL_S)
        return ServerFacts.of(info, model)

    async def check_instance(self) -> None:
        """Whether it is still the server that was connected to; the server's front answers, not its engine.

        Raises: EngineDeadError: it was started anew. Cancel: leaves nothing.
        """
        info = await self._call(messages.GET_SERVER_INFO, CALL_S)
        self._check_instance(info.instance_id)

    async def pause(self, mode: PauseMode, clear_cache: bool, limit_s: float | None = CALL_S) -> None:
        """Pause. Raises: RefusedError: no mode of vLLM's. Cancel: the engine is, or becomes, paused."""
        number = _mode_number(mode)
        await self._call(messages.PAUSE, limit_s, mode=number, clear_cache=clear_cache)

    async def sleep(self, level: int, mode: PauseMode, limit_s: float) -> None:
        """Pause, and give the memory back. Raises: RefusedError: no mode of vLLM's. Cancel: it may sleep."""
        await self._call(messages.SLEEP, limit_s, level=level, mode=_mode_number(mode))

    async def wake_up(self, tags: Sequence[str], limit_s: float) -> None:
        """Take back the memory of `tags`; with the last of them it generates. Cancel: it may be awake."""
        await self._call(messages.WAKE_UP, limit_s, tags=list(tags))

    async def resume(self) -> None:
        """Resume. Cancel: the engine may be running."""
        await self._call(messages.RESUME, CALL_S)

    async def is_paused(self, limit_s: float = CALL_S) -> bool:
        """Whether the engine's scheduler is paused. Cancel: leaves nothing."""
        return bool((await self._call(messages.IS_PAUSED, limit_s)).paused)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests, of which unknown ones are no error. None given ends none. Cancel: some may end."""
        await self._call(messages.ABORT, CALL_S, request_ids=list(request_ids))

    async def get_version(self) -> str:
        """The label of the weights. Cancel: leaves nothing."""
        return str((await self._call(messages.GET_VERSION, CALL_S)).weight_version)

    async def set_version(self, label: str) -> None:
        """Label the weights. Cancel: they may be labelled."""
        await self._call(messages.SET_VERSION, CALL_S, weight_version=label)

    async def init_transfer(self, info: bytes, limit_s: float) -> None:
        """Hand `info` (JSON) to every rank's transfer engine. Cancel: it is handed over."""
        await self._call(messages.INIT_TRANSFER, limit_s, init_info_json=info)

    async def start_update(self, limit_s: float) -> None:
        """Open a session. Cancel: it may be open."""
        await self._call(messages.START_UPDATE, limit_s)

    async def start_draft_update(self, limit_s: float) -> None:
        """Open a session about the draft model. Cancel: it may be open."""
        await self._call(messages.START_DRAFT_UPDATE, limit_s)

    async def update_weights(self, info: bytes, limit_s: float) -> None:
        """Hand `info` (JSON) to every rank's transfer engine, and wait for what it does. Cancel: it does it."""
        await self._call(messages.UPDATE_WEIGHTS, limit_s, update_info_json=info)

    async def finish_update(self, limit_s: float) -> None:
        """Close the session. Cancel: it may be closed."""
        await self._call(messages.FINISH_UPDATE, limit_s)

    # --- within

    async def _call(self, method: Method, limit_s: float | None, *, is_waiting: bool = False, **fields: Any) -> Any:
        """`limit_s` None is for what its caller bounds. `is_waiting`: for a connection that isn't there yet."""
        if self._lost is not None:
            raise dead(self._lost)
        assert self._channel is not None, "not connected"
        request = messages.message(method.request, **fields)
        if (size := request.ByteSize()) > MAX_MESSAGE_BYTES:
            text = f"it has {size} bytes, and the server takes {MAX_MESSAGE_BYTES}"
            raise error_of("RESOURCE_EXHAUSTED", method.name, text, 0.0)
        try:
            return await self._calls[method.name](
                request, timeout=limit_s, metadata=self._headers, wait_for_ready=is_waiting
            )
        except grpc.aio.AioRpcError as exc:
            status, details = exc.code().name, self._peer.hide(exc.details() or "")
            if is_engine_gone(status, details):
                self.has_dead_engine = True
                self._lose(f"the engine behind {self.target} is dead: its server says so ({details})")
                raise dead(str(self._lost)) from exc
            if status == "UNAVAILABLE" and self._instance_id is not None:
                await self._find_out(details)
            raise error_of(status, method.name, details, limit_s or 0.0) from exc

    async def _find_out(self, details: str) -> None:
        """The connection broke: whether the same server is there again. Raises EngineDeadError if it isn't.

        Asked in a task of its own, so that it comes to an end when a caller's patience doesn't.
        """
        if self._finding_out is None or self._finding_out.done():
            self._finding_out = asyncio.get_running_loop().create_task(self._look_for_it(details))
        await asyncio.shield(self._finding_out)
        if self._lost is not None:
            raise dead(self._lost)

    async def _look_for_it(self, details: str) -> None:
        call = self._calls[messages.GET_SERVER_INFO.name]
        request = messages.message(messages.GET_SERVER_INFO.request)
        try:
            info = await call(request, timeout=LOST_S, metadata=self._headers, wait_for_ready=True)
        except grpc.aio.AioRpcError as exc:
            self._lose(f"{self.target} can't be reached any more ({details or exc.code().name})")
            return
        self._note_instance(info.instance_id)

    def _check_instance(self, instance_id: str) -> None:
        self._note_instance(instance_id)
        if self._lost is not None:
            raise dead(self._lost)

    def _note_instance(self, instance_id: str) -> None:
        if instance_id != self._instance_id:
            self._lose(f"the server at {self.target} was started anew, with weights that nobody knows")

    def _lose(self, why: str) -> None:
        if self._lost is None:
            _log.error("%s", why)
            self._lost = why


def _metadata(peer: Peer) -> tuple[tuple[str, str], ...]:
    """The headers as gRPC takes them. Otherwise a call would fail with no error of gRPC's own."""
    for name, value in peer.headers.items():
        if not _NAME.fullmatch(name) or name.lower().endswith(_BINARY):
            problem = f"gRPC takes names of letters, digits, and -_. only, that don't end in {_BINARY}"
            raise ConfigError("header", name, problem)
        if not value.isprintable():
            raise ConfigError("header", name, "gRPC takes values of printable characters only")
    return tuple((name.lower(), value) for name, value in peer.headers.items())


def _mode_number(mode: PauseMode) -> int:
    """vLLM's number of it. Raises: RefusedError: it is no mode; the server would take that for an abort."""
    if mode not in _MODES:
        text = f"{mode!r} is no pause mode; use one of {', '.join(_MODES)}"
        raise refused(FaultCode.BAD_MESSAGE, text, mode=mode)
    return _MODES[mode]


def _credentials(ca: str | None) -> Any:
    """Of a server with TLS; `ca` None trusts the authorities that gRPC brings along."""
    if ca is None:
        return grpc.ssl_channel_credentials()
    try:
        with open(ca, "rb") as file:
            return grpc.ssl_channel_credentials(root_certificates=file.read())
    except OSError as exc:
        raise ConfigError("SSL_CERT_FILE", ca, f"can't be read: {exc.strerror}") from exc
