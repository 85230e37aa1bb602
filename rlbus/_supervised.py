"""A transport that outlives its connections: when one is lost, for whatever reason, it makes the next one.

Invariants: a connection is alive until it is lost, and never comes back, so nothing that was buffered in it is
delivered late; what is subscribed is kept in one table here and replayed on each new connection; a connection counts
only once an echo has come back through it; silence is found by an echo every WATCHDOG_S, whatever the client library
believes.
"""

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from rlbus._transport import Handler, Message
from rlbus.errors import BrokenError, ClosedError, ConfigError, DeadlineError, PayloadTooLargeError, RLBusError
from rlbus.subjects import MAX_SUBJECT_CHARS

_log = logging.getLogger("rlbus.transport")

# The watchdog's echo, and how many may be missed before the connection counts as lost (facts/nats.md B2, B3).
WATCHDOG_S = 5.0
WATCHDOG_MISSES = 2
# Back-off between attempts to connect again: full jitter up to a ceiling that doubles (facts/nats.md B12).
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
# Closing: how long what was published before may take to arrive, and how long the rest may take.
CLOSE_ECHO_S = 3.0
CLOSE_REST_S = 1.0


class Connection(Protocol):
    """One connection to a server. `rlbus._nats` has the real one."""

    # Done when the connection is lost; its result says why. The supervisor sets it when it gives the connection up.
    lost: asyncio.Future[str]

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that the server takes."""
        ...

    def publish(self, subject: str, data: bytes, reply: str | None, headers: dict[str, str] | None = None) -> None:
        """Queue for writing, after all that was queued before. Raises BrokenError: lost, or too much is queued."""
        ...

    def subscribe(self, pattern: str, deliver: Handler) -> Callable[[], None]:
        """Queue a subscription; the function that is returned ends it. Raises BrokenError: lost."""
        ...

    async def aclose(self, limit_s: float) -> None:
        """Drop it at once, with what is still queued, and wait at most `limit_s` for its tasks. Idempotent.

        Cancel: it is dropped all the same.
        """
        ...


# Makes a new connection within so many seconds, or raises BrokenError.
OpenConnection = Callable[[float], Awaitable[Connection]]


@dataclass(eq=False, slots=True)
class _Entry:
    """One subscription. `end` ends it on the current connection; None between two connections."""

    pattern: str
    handler: Handler
    is_open: bool = True
    end: Callable[[], None] | None = None


class _Subscription:
    def __init__(self, transport: "SupervisedTransport", entry: _Entry) -> None:
        self._transport = transport
        self._entry = entry

    def unsubscribe(self) -> None:
        self._transport._drop(self._entry)


class SupervisedTransport:
    """Implements `rlbus._transport.Transport` over connections that come and go. Call `start` first, `aclose` last.

    Args:
        open_connection: makes a connection.
        where: names the server in errors; no secrets.
        limit_s: how long making one connection may take, in seconds.
    """

    def __init__(self, open_connection: OpenConnection, where: str, limit_s: float) -> None:
        self.where = where
        # Exceptions that handlers raised. Only grows.
        self.num_handler_errors = 0
        self._open_connection = open_connection
        self._limit_s = limit_s
        self._num_dropped = 0
        # The table, in the order of subscribing.
        self._table: dict[_Entry, None] = {}
        self._connection: Connection | None = None
        # True from the first echo on a connection until it is lost.
        self._is_up = False
        self._is_closed = False
        self._max_payload_bytes = 0
        # Unguessable: whoever knows it may answer (facts/nats.md A6).
        self._inbox_root = f"_INBOX.{secrets.token_hex(12)}"
        self._num_inboxes = 0
        self._echoes: dict[str, asyncio.Future[None]] = {}
        self._num_echoes = 0
        self._on_reconnect: list[Callable[[], None]] = []
        self._on_disconnect: list[Callable[[], None]] = []
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Make the first connection; call once.

        Raises:
            BrokenError: there is none within `limit_s`; one line that says why.
        Cancel: nothing is left open.
        """
        self.subscribe(f"{self._inbox_root}.echo.*", self._on_echo)
        await self._connect()
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())

    # -- Transport ----------------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether a publish now would leave this process."""
        return self._is_up and self._connection is not None and not self._connection.lost.done()

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that the server takes, less a reserve for what travels with it."""
        return self._max_payload_bytes

    @property
    def num_dropped(self) -> int:
        """Deliveries that were lost here because we were too slow. Only grows."""
        return self._num_dropped

    def count_dropped(self) -> None:
        """A delivery was lost on this side. Called by connections."""
        self._num_dropped += 1

    def new_inbox(self) -> str:
        """See Transport."""
        self._num_inboxes += 1
        return f"{self._inbox_root}.{self._num_inboxes}"

    def publish(
        self, subject: str, data: bytes, reply: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        """See Transport. Also BrokenError: too much waits to be written. ConfigError: the subject is malformed.

        `headers` are for JetStream; all of them together must fit into 512 bytes, which is what is kept free for them.
        """
        if self._is_closed:
            raise ClosedError("bus")
        _check_subject(subject)
        if reply is not None:
            _check_subject(reply)
        connection = self._connection
        if connection is None or not self.is_connected:
            raise BrokenError(self.where, "not connected; nothing was sent")
        if len(data) > self._max_payload_bytes:
            raise PayloadTooLargeError(f"message on {subject}", len(data), self._max_payload_bytes)
        connection.publish(subject, data, reply, headers)

    def subscribe(self, pattern: str, handler: Handler) -> _Subscription:
        """See Transport. Written before whatever is published next. ConfigError: the pattern is malformed."""
        if self._is_closed:
            raise ClosedError("bus")
        _check_pattern(pattern)
        entry = _Entry(pattern, handler)
        self._table[entry] = None
        if self._connection is not None and not self._connection.lost.done():
            entry.end = self._connection.subscribe(pattern, self._deliverer(entry))
        return _Subscription(self, entry)

    async def barrier(self, limit_s: float) -> None:
        """See Transport."""
        if self._is_closed:
            raise ClosedError("bus")
        if self._connection is None or not self.is_connected:
            raise BrokenError(self.where, "not connected")
        await self._echo(self._connection, limit_s)

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        """See Transport."""
        self._on_reconnect.append(handler)

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        """See Transport."""
        self._on_disconnect.append(handler)

    async def aclose(self) -> None:
        """See Transport. What was published before arrives first, as far as CLOSE_ECHO_S allows."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._connection is not None and self.is_connected:
                with contextlib.suppress(BrokenError, DeadlineError):
                    await self._echo(self._connection, CLOSE_ECHO_S)
        finally:
            connection, self._connection = self._connection, None
            self._is_up = False
            self._fail_echoes(ClosedError("bus"))
            if self._supervisor is not None:
                self._supervisor.cancel()
            if connection is not None:
                await connection.aclose(CLOSE_REST_S)
            if self._supervisor is not None:
                await asyncio.wait([self._supervisor], timeout=CLOSE_REST_S)

    # -- connections --------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        """Make a connection, replay the table on it, and see an echo come back. Raises BrokenError."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._limit_s
        connection = await self._open_connection(self._limit_s)
        self._connection = connection
        self._max_payload_bytes = connection.max_payload_bytes
        try:
            for entry in list(self._table):
                entry.end = connection.subscribe(entry.pattern, self._deliverer(entry))
            # Echoes end with the connection, not with the supervisor's next turn.
            connection.lost.add_done_callback(lambda lost: self._on_lost(connection, lost.result()))
            await self._echo(connection, max(0.0, until_s - loop.time()))
        except DeadlineError as exc:
            await self._discard(connection)
            problem = f"connected, but no echo came back within {self._limit_s:g} s; may this user use _INBOX.>?"
            raise BrokenError(self.where, problem) from exc
        except BaseException:
            await self._discard(connection)
            raise
        self._is_up = True

    async def _supervise(self) -> None:
        """Whenever the connection is lost, make the next one, for ever."""
        while True:
            connection = self._connection
            if connection is not None:
                why = await self._until_lost(connection)
                if not connection.lost.done():
                    connection.lost.set_result(why)
                self._on_lost(connection, why)
                await connection.aclose(CLOSE_REST_S)
            await self._connect_again()
            _log.info("connected to %s again", self.where)
            _call(self._on_reconnect)

    async def _until_lost(self, connection: Connection) -> str:
        """Why the connection is lost. A peer that is connected and silent counts as lost, too."""
        num_misses = 0
        pause_s = WATCHDOG_S
        while num_misses < WATCHDOG_MISSES:
            done, _ = await asyncio.wait([connection.lost], timeout=pause_s)
            if done:
                return connection.lost.result()
            try:
                await self._echo(connection, WATCHDOG_S)
            except DeadlineError:
                num_misses, pause_s = num_misses + 1, 0.0
            except BrokenError:
                # Lost, which the next turn sees; or its outbox is full, which is a miss, too.
                num_misses, pause_s = num_misses + 1, WATCHDOG_S
            else:
                num_misses, pause_s = 0, WATCHDOG_S
        return f"no echo within {num_misses} x {WATCHDOG_S:g} s"

    def _on_lost(self, connection: Connection, why: str) -> None:
        if connection is not self._connection:
            return
        was_up, self._is_up = self._is_up, False
        self._connection = None
        for entry in self._table:
            entry.end = None
        self._fail_echoes(BrokenError(self.where, f"connection lost: {why}"))
        if was_up:
            _log.warning("connection to %s lost: %s", self.where, why)
            _call(self._on_disconnect)

    async def _connect_again(self) -> None:
        ceiling_s = BACKOFF_FIRST_S
        while True:
            # Jitter against herds of workers, no secret.
            await asyncio.sleep(random.uniform(0, ceiling_s))
            ceiling_s = min(2 * ceiling_s, BACKOFF_MAX_S)
            try:
                return await self._connect()
            except BrokenError as exc:
                _log.info("%s", exc)

    async def _discard(self, connection: Connection) -> None:
        if connection is self._connection:
            self._connection = None
            for entry in self._table:
                entry.end = None
        await connection.aclose(CLOSE_REST_S)

    # -- echoes -------------------------------------------------------------------------------------------------------

    async def _echo(self, connection: Connection, limit_s: float) -> None:
        """Publish to ourselves and wait for it: all that was queued before has been processed by then.

        nats-py's own flush overtakes what is buffered, and a late PONG kills its read loop (facts/nats.md B1, B2).
        """
        self._num_echoes += 1
        subject = f"{self._inbox_root}.echo.{self._num_echoes}"
        echo: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._echoes[subject] = echo
        try:
            connection.publish(subject, b"", None)
            async with asyncio.timeout(limit_s):
                await echo
        except TimeoutError as exc:
            raise DeadlineError(f"an echo from {self.where}", limit_s) from exc
        finally:
            self._echoes.pop(subject, None)

    def _on_echo(self, message: Message) -> None:
        echo = self._echoes.pop(message.subject, None)
        if echo is not None and not echo.done():
            echo.set_result(None)

    def _fail_echoes(self, error: RLBusError) -> None:
        for echo in self._echoes.values():
            if not echo.done():
                echo.set_exception(error)
        self._echoes.clear()

    # -- subscriptions ------------------------------------------------------------------------------------------------

    def _deliverer(self, entry: _Entry) -> Handler:
        def deliver(message: Message) -> None:
            if not entry.is_open:
                return
            try:
                entry.handler(message)
            except Exception:  # noqa: BLE001 - a handler's bug is logged and counted, and harms nobody else
                self.num_handler_errors += 1
                _log.exception("handler of %s failed", entry.pattern)

        return deliver

    def _drop(self, entry: _Entry) -> None:
        entry.is_open = False
        self._table.pop(entry, None)
        end, entry.end = entry.end, None
        if end is not None:
            end()


def _call(handlers: list[Callable[[], None]]) -> None:
    for handler in list(handlers):
        try:
            handler()
        except Exception:  # noqa: BLE001 - one listener's bug is logged and must not cost the others the news
            _log.exception("a connection handler failed")


def _check_subject(subject: str) -> None:
    """A malformed subject goes nowhere or injects protocol, an over-long one closes the client (facts/nats.md A2)."""
    if len(subject) > MAX_SUBJECT_CHARS:
        raise PayloadTooLargeError("subject", len(subject), MAX_SUBJECT_CHARS)
    if not all(subject.split(".")) or any(c in " \t\r\n" for c in subject):
        raise ConfigError("subject", subject, "use tokens without spaces, joined by dots")


def _check_pattern(pattern: str) -> None:
    _check_subject(pattern)
    tokens = pattern.split(".")
    for index, token in enumerate(tokens):
        is_rest = token == ">" and index == len(tokens) - 1
        if not is_rest and token != "*" and any(c in token for c in "*>"):
            raise ConfigError("pattern", pattern, "`*` stands for one token, and `>` for the rest at the end")
