"""The transport over a real NATS server; the only module that imports nats.

nats-py 2.16 has traps that were reproduced (facts/nats.md B); what is done about each stands beside the code. The main
one is this: nats-py never reconnects here. Each connection is a client of its own, made within a bound; when it is lost,
for whatever reason, a supervisor makes the next one and replays *our* table of subscriptions. So there is one way back
instead of two (its reconnect, and our rebuild when its client is closed for good), nothing that was buffered in an old
client is ever delivered late, and no state of nats-py has to be trusted.
"""

import asyncio
import contextlib
import logging
import random
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from rlbus._transport import Handler, Message
from rlbus.config import BusConfig
from rlbus.errors import BrokenError, ClosedError, DeadlineError, PayloadTooLargeError
from rlbus.subjects import MAX_SUBJECT_CHARS

_log = logging.getLogger("rlbus.nats")

# What waits to be written, in bytes; a publish beyond it is refused. A fan-out to 10,000 workers needs 4 MB.
MAX_OUTBOX_BYTES = 16 << 20
# Kept free below the server's max_payload: protocol and headers (facts/nats.md B7: over it, the client is closed).
PAYLOAD_RESERVE_BYTES = 1024
# Deliveries waiting for our handler, per subscription (facts/nats.md A1: the default drops at bursts of 20,000).
PENDING_MSGS = 512 * 1024
PENDING_BYTES = 64 << 20
# The watchdog's echo, and how many may be missed before the connection counts as lost (facts/nats.md B2, B3).
WATCHDOG_S = 5.0
WATCHDOG_MISSES = 2
# Back-off between attempts to connect again: full jitter up to a ceiling that doubles (facts/nats.md B12).
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
CLOSE_S = 5.0
# Unacknowledged bytes for so long mean that the peer is gone (facts/nats.md B3: else a write blocks for minutes).
TCP_USER_TIMEOUT_MS = 10_000
# What the server sends when nobody was subscribed. Source: NATS protocol, "no responders".
NO_RESPONDERS = "503"


@dataclass(slots=True)
class _Entry:
    """One subscription of ours. `native` is that of the current client, None between two clients."""

    pattern: str
    handler: Handler
    is_open: bool = True
    native: Any = None


class _Subscription:
    def __init__(self, transport: "NatsTransport", entry: _Entry) -> None:
        self._transport = transport
        self._entry = entry

    def unsubscribe(self) -> None:
        self._transport._drop(self._entry)


@dataclass(frozen=True, slots=True)
class _Publish:
    subject: str
    data: bytes
    reply: str | None


class NatsTransport:
    """One connection to a NATS server. Made by `connect`, closed by `aclose`."""

    def __init__(self, config: BusConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._client: Client | None = None
        self._table: list[_Entry] = []
        # Publishes, and subscriptions to open or close, in the order in which they were asked for.
        self._outbox: deque[_Publish | _Entry] = deque()
        self._outbox_bytes = 0
        self._has_work = asyncio.Event()
        self._lost = asyncio.Event()
        self._is_connected = False
        self._is_closed = False
        self._max_payload_bytes = 0
        self._inbox_root = f"_INBOX.{random.getrandbits(96):024x}"
        self._num_inboxes = 0
        self._num_dropped = 0
        self._echoes: dict[str, asyncio.Future[None]] = {}
        self._num_echoes = 0
        self._on_reconnect: list[Callable[[], None]] = []
        self._on_disconnect: list[Callable[[], None]] = []
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(cls, config: BusConfig, *, name: str) -> "NatsTransport":
        """Connect within `config.connect_s`.

        Raises:
            BrokenError: no server there, wrong credentials, or no answer in time; one line that says which.
        Cancel: nothing is left open.
        """
        transport = cls(config, name)
        await transport._open(config.connect_s)
        loop = asyncio.get_running_loop()
        transport.subscribe(f"{transport._inbox_root}.echo.*", transport._on_echo)
        for work in (transport._write(), transport._supervise(), transport._watch()):
            transport._tasks.append(loop.create_task(work))
        return transport

    # -- Transport ----------------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether a publish now would leave this process."""
        return self._is_connected

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that the server takes, less a reserve for what travels with it."""
        return self._max_payload_bytes

    @property
    def num_dropped(self) -> int:
        """Deliveries that nats-py dropped because we were too slow; only grows."""
        return self._num_dropped

    def new_inbox(self) -> str:
        """See Transport."""
        self._num_inboxes += 1
        return f"{self._inbox_root}.{self._num_inboxes}"

    def publish(self, subject: str, data: bytes, reply: str | None = None) -> None:
        """See Transport. Also BrokenError when MAX_OUTBOX_BYTES wait to be written."""
        if self._is_closed:
            raise ClosedError("bus")
        if not self._is_connected:
            raise BrokenError(self._where, "not connected; nothing was sent")
        if len(subject) > MAX_SUBJECT_CHARS:
            raise PayloadTooLargeError("subject", len(subject), MAX_SUBJECT_CHARS)
        if len(data) > self._max_payload_bytes:
            raise PayloadTooLargeError(f"message on {subject}", len(data), self._max_payload_bytes)
        if self._outbox_bytes + len(data) > MAX_OUTBOX_BYTES:
            raise BrokenError(self._where, f"{self._outbox_bytes} bytes wait to be written; the server is too slow")
        self._outbox_bytes += len(data)
        self._outbox.append(_Publish(subject, data, reply))
        self._has_work.set()

    def subscribe(self, pattern: str, handler: Handler) -> _Subscription:
        """See Transport. Before the next publish of this connection, as it is written in order."""
        if self._is_closed:
            raise ClosedError("bus")
        entry = _Entry(pattern, handler)
        self._table.append(entry)
        self._outbox.append(entry)
        self._has_work.set()
        return _Subscription(self, entry)

    async def barrier(self, limit_s: float) -> None:
        """See Transport. An echo of our own: nats-py's flush overtakes what is buffered (facts/nats.md B1)."""
        if self._is_closed:
            raise ClosedError("bus")
        self._num_echoes += 1
        subject = f"{self._inbox_root}.echo.{self._num_echoes}"
        echo: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._echoes[subject] = echo
        try:
            self.publish(subject, b"")
            async with asyncio.timeout(limit_s):
                await echo
        except TimeoutError as exc:
            raise DeadlineError(f"an echo from {self._where}", limit_s) from exc
        finally:
            self._echoes.pop(subject, None)

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        """See Transport."""
        self._on_reconnect.append(handler)

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        """See Transport."""
        self._on_disconnect.append(handler)

    async def aclose(self) -> None:
        """See Transport. What was published before is written first, as far as CLOSE_S allows."""
        if self._is_closed:
            return
        try:
            if self._is_connected:
                with contextlib.suppress(BrokenError, DeadlineError):
                    await self.barrier(CLOSE_S / 2)
        finally:
            self._is_closed = True
            self._is_connected = False
            for task in self._tasks:
                task.cancel()
            self._fail_echoes()
            client, self._client = self._client, None
            if client is not None:
                await _discard(client, CLOSE_S / 2)
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- connection ---------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"NATS server at {self._config.url}"

    async def _open(self, limit_s: float) -> None:
        """Make a new client and the subscriptions of our table on it."""
        client = Client()
        problem: list[Exception] = []

        async def on_error(exc: Exception) -> None:
            # Runs inside nats-py's read loop: what it raises would leave a deaf client (facts/nats.md B4).
            problem.append(exc)
            self._note(exc)

        async def on_gone() -> None:
            if self._client is client:
                self._lost.set()

        try:
            # `allow_reconnect=False` alone still retries for minutes on a dead port (facts/nats.md B9).
            async with asyncio.timeout(limit_s):
                await client.connect(
                    servers=list(self._config.servers),
                    name=self._name,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=max(1, round(limit_s)),
                    ping_interval=10,
                    max_outstanding_pings=2,
                    error_cb=on_error,
                    disconnected_cb=on_gone,
                    closed_cb=on_gone,
                    **_credentials(self._config),
                )
                _tune(client)
                for entry in [e for e in self._table if e.is_open]:
                    await self._subscribe_on(client, entry)
        except TimeoutError as exc:
            await _discard(client, 1.0)
            seen = f": {problem[-1]}" if problem and str(problem[-1]) else ""
            raise BrokenError(self._where, f"no connection within {limit_s:g} s{seen}") from exc
        except (OSError, nats.errors.Error, ValueError) as exc:
            await _discard(client, 1.0)
            raise BrokenError(self._where, _in_words(exc, problem)) from exc
        except BaseException:
            await _discard(client, 1.0)
            raise
        self._client = client
        self._max_payload_bytes = client.max_payload - PAYLOAD_RESERVE_BYTES
        self._lost.clear()
        if client.is_closed:
            self._lost.set()
        self._is_connected = True

    async def _supervise(self) -> None:
        """Whenever the connection is lost, make a new one, for ever."""
        while True:
            await self._lost.wait()
            self._on_lost()
            ceiling_s = BACKOFF_FIRST_S
            while True:
                # Jitter against herds of workers, no secret.
                await asyncio.sleep(random.uniform(0, ceiling_s))  # noqa: S311
                ceiling_s = min(2 * ceiling_s, BACKOFF_MAX_S)
                try:
                    await self._open(self._config.connect_s)
                    break
                except BrokenError as exc:
                    _log.info("%s", exc)
            self._has_work.set()
            _log.info("connected to %s again", self._where)
            _call(self._on_reconnect)

    def _on_lost(self) -> None:
        self._is_connected = False
        client, self._client = self._client, None
        # What is queued is never delivered later: whoever sent it will have given up on it (facts/nats.md A3).
        self._outbox.clear()
        self._outbox_bytes = 0
        self._fail_echoes()
        for entry in self._table:
            entry.native = None
        if client is not None:
            _log.warning("connection to %s lost", self._where)
            self._tasks = [t for t in self._tasks if not t.done()]
            self._tasks.append(asyncio.get_running_loop().create_task(_discard(client, 1.0)))
            _call(self._on_disconnect)

    async def _watch(self) -> None:
        """Notice a peer that is connected and dead (facts/nats.md B2, B3)."""
        misses = 0
        while True:
            await asyncio.sleep(WATCHDOG_S)
            if not self._is_connected:
                misses = 0
                continue
            try:
                await self.barrier(WATCHDOG_S)
                misses = 0
            except (BrokenError, DeadlineError):
                misses += 1
            if misses >= WATCHDOG_MISSES and self._is_connected:
                misses = 0
                self._lost.set()

    # -- writing ------------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        """The only task that writes. It can't be stuck for ever: losing the client ends its flush."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self._outbox and self._client is not None:
                item = self._outbox.popleft()
                if isinstance(item, _Publish):
                    self._outbox_bytes -= len(item.data)
                try:
                    await self._write_one(self._client, item)
                except (OSError, nats.errors.Error) as exc:
                    _log.warning("%s: %s", self._where, _in_words(exc, []))
                    self._lost.set()
                    break

    async def _write_one(self, client: Client, item: _Publish | _Entry) -> None:
        if isinstance(item, _Publish):
            await client.publish(item.subject, item.data, reply=item.reply or "")
        elif item.is_open:
            if item.native is None:
                await self._subscribe_on(client, item)
        elif item.native is not None:
            native, item.native = item.native, None
            await native.unsubscribe()

    async def _subscribe_on(self, client: Client, entry: _Entry) -> None:
        async def deliver(msg: Msg) -> None:
            if entry.is_open:
                self._deliver(entry, msg)

        entry.native = await client.subscribe(
            entry.pattern, cb=deliver, pending_msgs_limit=PENDING_MSGS, pending_bytes_limit=PENDING_BYTES
        )

    def _drop(self, entry: _Entry) -> None:
        if not entry.is_open:
            return
        entry.is_open = False
        self._table.remove(entry)
        self._outbox.append(entry)
        self._has_work.set()

    # -- delivery -----------------------------------------------------------------------------------------------------

    def _deliver(self, entry: _Entry, msg: Msg) -> None:
        is_nobody = not msg.data and msg.headers is not None and msg.headers.get("Status") == NO_RESPONDERS
        try:
            entry.handler(Message(msg.subject, msg.data, msg.reply or None, is_nobody))
        except Exception:  # noqa: BLE001 - a handler's bug is logged and harms nobody else
            _log.exception("a handler of %s raised", entry.pattern)

    def _on_echo(self, message: Message) -> None:
        echo = self._echoes.pop(message.subject, None)
        if echo is not None and not echo.done():
            echo.set_result(None)

    def _fail_echoes(self) -> None:
        for echo in self._echoes.values():
            if not echo.done():
                echo.set_exception(BrokenError(self._where, "disconnected"))
        self._echoes.clear()

    def _note(self, exc: Exception) -> None:
        if isinstance(exc, nats.errors.SlowConsumerError):
            self._num_dropped += 1
        _log.warning("%s: %s", self._where, _in_words(exc, []))


def _call(handlers: list[Callable[[], None]]) -> None:
    for handler in list(handlers):
        try:
            handler()
        except Exception:  # noqa: BLE001 - one listener's bug is logged and must not cost the others the news
            _log.exception("a connection handler raised")


def _credentials(config: BusConfig) -> dict[str, Any]:
    found = {
        "token": config.token,
        "user": config.user,
        "password": config.password,
        "user_credentials": config.creds_file,
        # A plaintext server behind a tls:// URL is accepted otherwise (facts/nats.md B11).
        "tls_handshake_first": True if config.url.startswith("tls") else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _tune(client: Client) -> None:
    """Small messages at once; a vanished peer noticed by the kernel."""
    writer = getattr(client._transport, "_io_writer", None)
    sock = None if writer is None else writer.get_extra_info("socket")
    if sock is None:
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)


async def _discard(client: Client, limit_s: float) -> None:
    """Close a client whatever state it is in; abort its socket if that takes too long."""
    with contextlib.suppress(Exception):  # a client that is broken may raise anything here
        await asyncio.wait_for(client.close(), limit_s)
        return
    writer = getattr(client._transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()


def _in_words(exc: Exception, seen: list[Exception]) -> str:
    text = str(exc) or next((str(e) for e in reversed(seen) if str(e)), type(exc).__name__)
    lowered = text.lower()
    if "authorization" in lowered or "authentication" in lowered:
        return "wrong credentials (authorization violation)"
    if isinstance(exc, ConnectionRefusedError) or "connect call failed" in lowered or "no servers" in lowered:
        return f"nobody listens there ({text})"
    return text
