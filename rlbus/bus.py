"""Typed messages over a Transport: publish, subscribe, request with one reply or many.

Invariants: all replies of this process come in over one long-lived inbox (`<inbox>.<token>`), subscribed on first use
and told apart by token, so a request costs no subscription; callbacks decode and enqueue, and never wait. A message
that doesn't parse is counted and logged, and harms nobody else.
"""

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Callable
from types import TracebackType, UnionType
from typing import Any, Generic, TypeVar, overload

from rlbus._clock import Clock, SystemClock
from rlbus._transport import Message, Subscription, Transport
from rlbus.codec import decode, encode
from rlbus.errors import BrokenError, ClosedError, DeadlineError, DecodeError, RLBusError
from rlbus.schemas.base import Wire

T = TypeVar("T")

_log = logging.getLogger("rlbus.bus")

# At most one line about undecodable messages in this many seconds; the counter has them all.
BAD_MESSAGE_LOG_S = 10.0
# Replies that a ReplyStream holds for a slow reader before it breaks.
DEFAULT_MAX_QUEUED = 1024

# Called with each reply and what follows the inbox's own subject ("" or "<instance_id>").
OnReply = Callable[[Message, str], None]


class Inbox:
    """A reply address of this process. `reply` is what to publish with; replies go to `on_reply` until `close`."""

    def __init__(self, bus: "Bus", token: str, reply: str, on_reply: OnReply, on_closed: Callable[[], None]) -> None:
        self._bus = bus
        self._token = token
        self.reply = reply
        self.on_reply = on_reply
        # Called when the bus closes under it.
        self.on_closed = on_closed

    def close(self) -> None:
        """Forget the address: later replies are counted as late and dropped. Idempotent."""
        self._bus._inboxes.pop(self._token, None)


class Bus:
    """One process' access to the bus.

    Args:
        transport: a connection; the bus owns it and closes it.
        clock: tells the date for `expires_at`.
        new_id: makes op ids and the like; unique.
    """

    def __init__(
        self, transport: Transport, *, clock: Clock | None = None, new_id: Callable[[], str] | None = None
    ) -> None:
        self.transport = transport
        self.clock: Clock = SystemClock() if clock is None else clock
        self.new_id: Callable[[], str] = _uuid_hex if new_id is None else new_id
        # Messages on a typed subscription or inbox that didn't parse. Only grows.
        self.num_bad_messages = 0
        # Replies to an address that was given up. Only grows.
        self.num_late_replies = 0
        self._inboxes: dict[str, Inbox] = {}
        self._inbox_root: str | None = None
        self._num_tokens = 0
        self._logged_bad_at_s = float("-inf")
        self._is_closed = False
        self._on_connection: dict[int, Callable[[bool], None]] = {}
        transport.on_reconnect(lambda: self._tell_connection(True))
        transport.on_disconnect(lambda: self._tell_connection(False))

    async def __aenter__(self) -> "Bus":
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    def publish(self, subject: str, message: Wire, reply: str | None = None) -> None:
        """Send a message. Doesn't wait; see `barrier`.

        Raises:
            BrokenError: not connected. ClosedError: after `aclose`. PayloadTooLargeError: nothing was sent.
        """
        self._check_open()
        self.transport.publish(subject, encode(message), reply)

    def subscribe(
        self,
        pattern: str,
        as_type: type[T] | Any,
        handler: Callable[[T, Message], None],
        on_bad: Callable[[DecodeError, Message], None] | None = None,
    ) -> Subscription:
        """Deliver each message on `pattern` that parses as `as_type` to `handler`, which must not wait or raise.

        What doesn't parse goes to `on_bad`; it is counted in `num_bad_messages` in any case, and logged (at most once
        per BAD_MESSAGE_LOG_S) when nobody takes it.
        """
        self._check_open()

        def on_message(message: Message) -> None:
            try:
                parsed: T = decode(message.data, as_type, message.subject)
            except DecodeError as exc:
                self.count_bad(exc, log=on_bad is None)
                if on_bad is not None:
                    on_bad(exc, message)
                return
            handler(parsed, message)

        return self.transport.subscribe(pattern, on_message)

    def open_inbox(self, on_reply: OnReply, on_closed: Callable[[], None] | None = None) -> Inbox:
        """A new reply address. `on_reply` is called with each raw reply to `<reply>` or `<reply>.<tail>`.

        Whoever opens it closes it. `on_closed` is called if the bus is closed before.
        """
        self._check_open()
        if self._inbox_root is None:
            # Subscribed before whatever is published next on this connection, so no barrier is needed.
            root = self.transport.new_inbox()
            self.transport.subscribe(f"{root}.>", self._on_reply)
            self._inbox_root = root
        self._num_tokens += 1
        token = str(self._num_tokens)
        inbox = Inbox(self, token, f"{self._inbox_root}.{token}", on_reply, on_closed or _nothing)
        self._inboxes[token] = inbox
        return inbox

    @overload
    async def request(self, subject: str, message: Wire, as_type: type[T], *, limit_s: float) -> T:
        """One type of reply."""

    @overload
    async def request(self, subject: str, message: Wire, as_type: UnionType, *, limit_s: float) -> Any:
        """A union of tagged replies."""

    async def request(self, subject: str, message: Wire, as_type: Any, *, limit_s: float) -> Any:
        """Publish and return the first reply.

        A reconnect meanwhile is survived only if the answer still comes; the request isn't sent twice.

        Raises:
            BrokenError: nobody listens on `subject`, or not connected. DeadlineError: no reply within `limit_s`.
            DecodeError: the reply is no `as_type`. ClosedError: the bus was closed.
        Cancel: the reply, if one comes, is dropped and counted.
        """
        async with self.stream(subject, message, as_type, max_queued=1) as replies:
            return await replies.next(limit_s)

    @overload
    def stream(
        self, subject: str, message: Wire, as_type: type[T], *, max_queued: int = DEFAULT_MAX_QUEUED
    ) -> "ReplyStream[T]":
        """One type of reply."""

    @overload
    def stream(
        self, subject: str, message: Wire, as_type: UnionType, *, max_queued: int = DEFAULT_MAX_QUEUED
    ) -> "ReplyStream[Any]":
        """A union of tagged replies."""

    def stream(
        self, subject: str, message: Wire, as_type: Any, *, max_queued: int = DEFAULT_MAX_QUEUED
    ) -> "ReplyStream[Any]":
        """Publish (on entering the stream) and read any number of replies, in the order of arrival.

        `max_queued` replies may wait for the reader; one more breaks the stream, so that none is lost in silence.
        """
        return ReplyStream(self, subject, message, as_type, max_queued)

    def watch_connection(self, handler: Callable[[bool], None]) -> Callable[[], None]:
        """Call `handler(False)` when the connection is lost, `handler(True)` when it stands again.

        Returns: a function that ends it. Unlike the transport's own handlers, these can be taken back.
        """
        self._num_tokens += 1
        key = self._num_tokens
        self._on_connection[key] = handler
        return lambda: _nothing(self._on_connection.pop(key, None))

    def _tell_connection(self, is_connected: bool) -> None:
        for handler in list(self._on_connection.values()):
            handler(is_connected)

    async def barrier(self, limit_s: float) -> None:
        """Return when the server has processed all that was published or subscribed before; see `Transport.barrier`.

        Cancel: leaves nothing behind.
        """
        self._check_open()
        await self.transport.barrier(limit_s)

    async def aclose(self) -> None:
        """Close the connection within 5 s; who still waits for a reply gets ClosedError. Idempotent.

        Cancel: the connection is dropped at once.
        """
        self._is_closed = True
        for inbox in list(self._inboxes.values()):
            inbox.close()
            inbox.on_closed()
        await self.transport.aclose()

    def count_bad(self, error: DecodeError, *, log: bool = True) -> None:
        """Count a message that didn't parse, and log it (rate-limited). Who decodes raw replies calls it."""
        self.num_bad_messages += 1
        now_s = asyncio.get_running_loop().time()
        if log and now_s - self._logged_bad_at_s >= BAD_MESSAGE_LOG_S:
            self._logged_bad_at_s = now_s
            _log.warning("%s (%d undecodable messages so far)", error, self.num_bad_messages)

    def _on_reply(self, message: Message) -> None:
        assert self._inbox_root is not None
        token, _, tail = message.subject[len(self._inbox_root) + 1 :].partition(".")
        inbox = self._inboxes.get(token)
        if inbox is None:
            self.num_late_replies += 1
            return
        inbox.on_reply(message, tail)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("bus")


class ReplyStream(Generic[T]):
    """Replies to one published message; use as `async with`. Survives a reconnect: it keeps its reply address."""

    def __init__(self, bus: Bus, subject: str, message: Wire, as_type: type[T] | Any, max_queued: int) -> None:
        self._bus = bus
        self._subject = subject
        self._message = message
        self._as_type = as_type
        self._max_queued = max_queued
        self._queue: deque[T] = deque()
        self._error: RLBusError | None = None
        self._arrived = asyncio.Event()
        self._inbox: Inbox | None = None

    async def __aenter__(self) -> "ReplyStream[T]":
        self._inbox = self._bus.open_inbox(self._on_reply, self._on_closed)
        try:
            self.resend()
        except BaseException:
            self._inbox.close()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._inbox is not None
        self._inbox.close()

    def resend(self) -> None:
        """Publish the same message again, with the same reply address (after a reconnect; op ids make it safe).

        Raises: as `Bus.publish`.
        """
        assert self._inbox is not None
        self._bus.publish(self._subject, self._message, self._inbox.reply)

    async def next(self, limit_s: float) -> T:
        """The next reply. One reader at a time.

        Raises:
            DeadlineError: none came within `limit_s`; the stream lives on. BrokenError: nobody listens on the subject,
            or more than `max_queued` replies waited. DecodeError: one was no `as_type`. ClosedError: the bus closed.
            The last three are final, and come after the replies that arrived before.
        Cancel: loses no reply.
        """
        try:
            async with asyncio.timeout(limit_s):
                while not self._queue and self._error is None:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            raise DeadlineError(f"reply to {self._subject}", limit_s) from None
        if self._queue:
            return self._queue.popleft()
        assert self._error is not None
        raise self._error

    def _on_reply(self, message: Message, tail: str) -> None:
        if self._error is not None:
            return
        if message.no_responders:
            self._fail(BrokenError(self._subject, "nobody listens"))
            return
        if len(self._queue) >= self._max_queued:
            self._fail(BrokenError(self._subject, f"more than {self._max_queued} replies waited to be read"))
            return
        try:
            self._queue.append(decode(message.data, self._as_type, message.subject))
        except DecodeError as exc:
            self._bus.count_bad(exc)
            self._fail(exc)
            return
        self._arrived.set()

    def _on_closed(self) -> None:
        self._fail(ClosedError("bus"))

    def _fail(self, error: RLBusError) -> None:
        self._error = error
        self._arrived.set()


def _uuid_hex() -> str:
    return uuid.uuid4().hex


def _nothing(_: object = None) -> None:
    return None
