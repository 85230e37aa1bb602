"""One connection to a real NATS server; the only module that imports nats.

nats-py 2.16 has traps that were reproduced (facts/nats.md B); what is done about each stands beside the code. The main
one is this: nats-py never reconnects here. Each connection is a client of its own, made within a bound and given up
when it is lost; `rlbus._supervised` makes the next one and replays the subscriptions. So there is one way back instead
of two (its reconnect, and a rebuild when its client is closed for good), and no state of nats-py has to be trusted.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from rlbus._supervised import SupervisedTransport
from rlbus._transport import Handler, Message
from rlbus.config import BusConfig
from rlbus.errors import BrokenError, ConfigError

_log = logging.getLogger("rlbus.nats")

# What waits to be written, in bytes; a publish beyond it is refused. A fan-out to 10,000 workers needs 4 MB.
MAX_OUTBOX_BYTES = 16 << 20
# Counted for each message beside its payload: subjects and bookkeeping.
MESSAGE_OVERHEAD_BYTES = 256
# The writer lets the loop turn after so many messages; nats-py alone never yields below 2 MiB (facts/nats.md A1).
YIELD_EVERY = 500
# Kept free below the server's max_payload: protocol and headers (facts/nats.md B7: over it, the client is closed).
PAYLOAD_RESERVE_BYTES = 1024
# Deliveries waiting for our handler, per subscription (facts/nats.md A1: the default lost none at bursts of 20,000).
PENDING_MSGS = 512 * 1024
PENDING_BYTES = 64 << 20
# nats-py's own pings; the watchdog of `_supervised` is faster.
PING_S = 10
MAX_PINGS = 2
# Unacknowledged bytes for so long mean that the peer is gone (facts/nats.md B3: else a write blocks for minutes).
TCP_USER_TIMEOUT_MS = 10_000
# At most one line in this many seconds about errors that the client reports (slow consumer: one for each message).
LOG_EVERY_S = 10.0
# What the server sends when nobody was subscribed. Source: NATS protocol, "no responders".
NO_RESPONDERS = "503"


async def connect_nats(config: BusConfig, *, name: str) -> SupervisedTransport:
    """Connect within `config.connect_s`, and stay connected until the transport is closed.

    Raises:
        BrokenError: no server there, wrong credentials, or no answer in time; one line that says which.
        ConfigError: the credentials file is none.
    Cancel: nothing is left open.
    """

    _check_creds(config)

    async def open_connection(limit_s: float) -> NatsConnection:
        return await NatsConnection.open(config, name=name, limit_s=limit_s, on_dropped=transport.count_dropped)

    transport = SupervisedTransport(open_connection, f"NATS server at {config.url}", config.connect_s)
    await transport.start()
    return transport


@dataclass(frozen=True, slots=True)
class _Publish:
    subject: str
    data: bytes
    reply: str | None
    headers: dict[str, str] | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.data) + MESSAGE_OVERHEAD_BYTES


@dataclass(eq=False, slots=True)
class _Native:
    """A subscription on this client. In the outbox it means: open it, or close it if it isn't wanted any more."""

    pattern: str
    deliver: Handler
    is_open: bool = True
    handle: Any = None


class _Client(Client):  # type: ignore[misc,unused-ignore]
    """Says nothing to a server that isn't encrypted if that was asked for: nats-py takes one without TLS behind a tls://
    URL, too, and tells it the credentials (facts/nats.md B11).
    """

    def __init__(self, is_encrypted: bool) -> None:
        super().__init__()
        self._is_encrypted = is_encrypted

    def _connect_command(self) -> bytes:
        stream = getattr(self._transport, "_io_writer", None)
        if self._is_encrypted and (stream is None or stream.get_extra_info("ssl_object") is None):
            raise nats.errors.Error("it doesn't ask for TLS, which tls:// needs; nothing was told to it")
        command: bytes = super()._connect_command()
        return command


class NatsConnection:
    """One client of nats-py, with the only task that writes to it. Made by `open`; see `_supervised.Connection`."""

    def __init__(self, where: str, on_dropped: Callable[[], None], is_encrypted: bool) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._where = where
        self._on_dropped = on_dropped
        self._client = _Client(is_encrypted)
        # Publishes, and subscriptions to open or close, in the order in which they were asked for.
        self._outbox: deque[_Publish | _Native] = deque()
        self._outbox_bytes = 0
        self._has_work = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        # The last things that the client reported; they explain why it couldn't connect.
        self._reported: deque[Exception] = deque(maxlen=4)
        self._logged_at_s = float("-inf")
        self._num_unlogged = 0

    @classmethod
    async def open(
        cls, config: BusConfig, *, name: str, limit_s: float, on_dropped: Callable[[], None]
    ) -> "NatsConnection":
        """Connect within `limit_s`; `on_dropped` is called for each delivery that nats-py drops.

        Raises:
            BrokenError: one line that says why there is no connection.
        Cancel: nothing is left open.
        """
        is_encrypted = any(server.startswith("tls:") for server in config.servers)
        connection = cls(f"NATS server at {config.url}", on_dropped, is_encrypted)
        try:
            await connection._connect(config, name, limit_s)
        except BaseException:
            connection._abort()
            raise
        return connection

    @property
    def max_payload_bytes(self) -> int:
        """What the server takes, less a reserve."""
        return int(self._client.max_payload) - PAYLOAD_RESERVE_BYTES

    def publish(self, subject: str, data: bytes, reply: str | None, headers: dict[str, str] | None = None) -> None:
        """Queue it for the writer. Raises BrokenError: lost, or MAX_OUTBOX_BYTES wait already."""
        item = _Publish(subject, data, reply, headers)
        if self.lost.done():
            raise BrokenError(self._where, f"connection lost: {self.lost.result()}")
        if self._outbox_bytes + item.num_bytes > MAX_OUTBOX_BYTES:
            raise BrokenError(self._where, f"{self._outbox_bytes} bytes wait to be written; the server is too slow")
        self._outbox_bytes += item.num_bytes
        self._put(item)

    def subscribe(self, pattern: str, deliver: Handler) -> Callable[[], None]:
        """Queue it for the writer, so that it stands before whatever is published later."""
        native = _Native(pattern, deliver)
        self._put(native)

        def end() -> None:
            native.is_open = False
            self._put(native)

        return end

    async def aclose(self, limit_s: float) -> None:
        """Drop the connection with all that waits, and wait at most `limit_s` for the tasks. Idempotent.

        nats-py's own close isn't used: it writes what is buffered first, and waits for a frozen peer for ever.
        Cancel: it is dropped all the same.
        """
        tasks = self._abort()
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)

    # -- connecting ---------------------------------------------------------------------------------------------------

    async def _connect(self, config: BusConfig, name: str, limit_s: float) -> None:
        try:
            # `allow_reconnect=False` alone still retries for minutes on a dead port (facts/nats.md B9).
            async with asyncio.timeout(limit_s):
                await self._client.connect(
                    servers=list(config.servers),
                    name=name,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    # nats-py says int, but it only passes it to asyncio.
                    connect_timeout=limit_s / len(config.servers),  # type: ignore[arg-type,unused-ignore]
                    ping_interval=PING_S,
                    max_outstanding_pings=MAX_PINGS,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_gone,
                    closed_cb=self._on_gone,
                    **_credentials(config),
                )
        except TimeoutError as exc:
            seen = "".join(f": {_in_words(e, [])}" for e in list(self._reported)[-1:] if str(e))
            raise BrokenError(self._where, f"no connection within {limit_s:g} s{seen}") from exc
        except Exception as exc:
            # The seam: whatever the library raises becomes one line for the caller.
            raise BrokenError(self._where, _in_words(exc, list(self._reported))) from exc
        self._tune()
        # A read loop or flusher that died leaves a client that says it is connected, and is deaf or mute (B2, B4).
        for task in (self._client._reading_task, self._client._flusher_task):
            task.add_done_callback(lambda _: self._lose(self._last_words()))
        self._writer = asyncio.get_running_loop().create_task(self._write())

    def _tune(self) -> None:
        """Small messages at once; a vanished peer noticed by the kernel."""
        sock = self._socket()
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)

    def _socket(self) -> Any:
        """None before there is a connection."""
        stream = getattr(self._client._transport, "_io_writer", None)
        return None if stream is None else stream.get_extra_info("socket")

    # -- losing -------------------------------------------------------------------------------------------------------

    async def _on_error(self, exc: Exception) -> None:
        """Runs inside nats-py's read loop, where an exception would leave a deaf client (facts/nats.md B4)."""
        self._reported.append(exc)
        if isinstance(exc, nats.errors.SlowConsumerError):
            self._on_dropped()
        elif "permissions violation" not in str(exc).lower():
            # It ends the connection, and stands in the line about that.
            return
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_at_s < LOG_EVERY_S:
            self._num_unlogged += 1
            return
        _log.warning("%s: %s (%d more since the last line)", self._where, _in_words(exc, []), self._num_unlogged)
        self._logged_at_s, self._num_unlogged = now_s, 0

    async def _on_gone(self) -> None:
        self._lose(self._last_words())

    def _last_words(self) -> str:
        if self._client.last_error is not None:
            return _in_words(self._client.last_error, [])
        return _in_words(self._reported[-1], []) if self._reported else "closed by the server"

    def _lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)

    def _abort(self) -> list["asyncio.Task[Any]"]:
        """Nothing leaves or arrives any more. Returns the tasks that end now."""
        is_ours = not self.lost.done()
        self._lose("closed here")
        self._outbox.clear()
        self._outbox_bytes = 0
        client = self._client
        client._status = Client.CLOSED
        own = [self._writer, client._reading_task, client._ping_interval_task, client._flusher_task]
        tasks = [t for t in (*own, *(sub._wait_for_msgs_task for sub in client._subs.values())) if t is not None]
        client._subs.clear()
        stream = getattr(client._transport, "_io_writer", None)
        if stream is not None:
            if not is_ours:
                # Lost: what the kernel still holds must not reach a server that wakes up (facts/nats.md A3).
                with contextlib.suppress(OSError):
                    self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.transport.abort()
        elif client._transport is not None:
            client._transport.close()
        for task in tasks:
            task.cancel()
        return [task for task in tasks if not task.done()]

    # -- writing ------------------------------------------------------------------------------------------------------

    def _put(self, item: _Publish | _Native) -> None:
        if not self.lost.done():
            self._outbox.append(item)
            self._has_work.set()

    async def _write(self) -> None:
        """Write what is queued until the connection is lost. nats-py may swallow a cancellation here (B8)."""
        num_written = 0
        while not self.lost.done():
            await self._has_work.wait()
            self._has_work.clear()
            while self._outbox and not self.lost.done():
                try:
                    await self._write_one(self._outbox.popleft())
                except Exception as exc:  # noqa: BLE001 - becomes the reason of the loss, and is logged with it
                    self._lose(_in_words(exc, []))
                num_written += 1
                if num_written % YIELD_EVERY == 0:
                    await asyncio.sleep(0)

    async def _write_one(self, item: _Publish | _Native) -> None:
        if isinstance(item, _Publish):
            self._outbox_bytes -= item.num_bytes
            await self._client.publish(item.subject, item.data, reply=item.reply or "", headers=item.headers)
        elif item.is_open:
            item.handle = await self._client.subscribe(
                item.pattern,
                cb=self._receiver(item),
                pending_msgs_limit=PENDING_MSGS,
                pending_bytes_limit=PENDING_BYTES,
            )
        elif item.handle is not None:
            await item.handle.unsubscribe()

    def _receiver(self, native: _Native) -> Any:
        async def receive(msg: Msg) -> None:
            if not native.is_open or self.lost.done():
                return
            # Its other headers are junk (facts/nats.md A2).
            is_nobody = not msg.data and msg.headers is not None and msg.headers.get("Status") == NO_RESPONDERS
            native.deliver(Message(msg.subject, msg.data, msg.reply or None, is_nobody))

        return receive


def _check_creds(config: BusConfig) -> None:
    """What nats-py would only find out in the middle of the handshake, and tell in its own words."""
    if config.creds_file is None:
        return
    try:
        text = Path(config.creds_file).read_text(errors="replace")
    except OSError as exc:
        raise ConfigError("creds_file", config.creds_file, f"it can't be read: {exc.strerror}") from exc
    for part in ("BEGIN NATS USER JWT", "BEGIN USER NKEY SEED"):
        if part not in text:
            raise ConfigError("creds_file", config.creds_file, f"it is no NATS credentials file: no line with {part}")


def _credentials(config: BusConfig) -> dict[str, Any]:
    found = {
        "token": config.token,
        "user": config.user,
        "password": config.password,
        "user_credentials": config.creds_file,
    }
    return {name: value for name, value in found.items() if value is not None}


def _in_words(exc: Exception, seen: list[Exception]) -> str:
    """One line. `seen` is what was reported before, which says more than nats-py's "no servers available"."""
    cause = next((e for e in reversed(seen) if isinstance(e, OSError)), exc) if "no servers" in str(exc) else exc
    text = str(cause) or next((str(e) for e in reversed(seen) if str(e)), type(cause).__name__)
    lowered = text.lower()
    if "authorization" in lowered or "authentication" in lowered:
        return "wrong credentials (authorization violation)"
    if isinstance(cause, ConnectionRefusedError) or "connect call failed" in lowered or "no servers" in lowered:
        return f"nobody listens there ({text})"
    return " ".join(text.split())
