"""A message bus in memory, behind the same Protocol as NATS, with NATS' semantics and faults on demand.

Invariants: everything that a connection publishes or subscribes passes the broker in that order; deliveries run from
the event loop, never from inside `publish`; a publish with a reply that no subscription matches is answered with
`no_responders` to its publisher alone. Faults are drawn from a seeded generator per connection, so a run on
`VirtualTimeLoop` can be repeated exactly.
"""

import asyncio
import heapq
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlbus._transport import Handler, Message
from rlbus.errors import BrokenError, ClosedError, ConfigError, DeadlineError, PayloadTooLargeError

if TYPE_CHECKING:
    from rlbus._kv_memory import MemoryBucket

_log = logging.getLogger("rlbus.memory")

# Source: the default of nats-server (max_payload: 1 MiB).
DEFAULT_MAX_PAYLOAD_BYTES = 1_048_576
# How long a reordered message is held back, beyond its delay, so that later ones overtake it.
REORDER_HOLD_S = 0.010


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong on one connection, in both directions; probabilities per message, 0 to 1.

    `delay_s` is a range from which each message's delay is drawn; later messages wait for it, as on a TCP connection. A
    reordered message is held back by REORDER_HOLD_S more and overtaken. `only` restricts all of it to subjects that
    match the pattern.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    only: str = ">"

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "reorder"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(name, getattr(self, name), "use a probability from 0 to 1")
        if not 0.0 <= self.delay_s[0] <= self.delay_s[1]:
            raise ConfigError("delay_s", self.delay_s, "use (least, most) in seconds")


NO_FAULTS = Faults()


def matches(pattern: str, subject: str) -> bool:
    """Whether a NATS pattern (`*` one token, trailing `>` one or more) matches a subject."""
    if pattern == ">":
        return True
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


@dataclass(eq=False, slots=True)
class MemorySubscription:
    """A running subscription of one MemoryTransport."""

    transport: "MemoryTransport"
    pattern: str
    handler: Handler
    number: int
    is_active: bool = True

    def unsubscribe(self) -> None:
        """Stop delivery. Idempotent; nothing is delivered after it returns."""
        if self.is_active:
            self.is_active = False
            self.transport._forget(self)


@dataclass(slots=True)
class _Node:
    """One token of the subscription tree. `here` ends at this token, `rest` are those with `>` after it."""

    children: dict[str, "_Node"] = field(default_factory=dict)
    here: dict[int, MemorySubscription] = field(default_factory=dict)
    rest: dict[int, MemorySubscription] = field(default_factory=dict)


class _Interest:
    """Who is subscribed to what: a tree by token, so that a publish costs by depth and matches, not by fleet size."""

    def __init__(self) -> None:
        self._root = _Node()

    def _place(self, pattern: str) -> dict[int, MemorySubscription]:
        tokens = pattern.split(".")
        has_rest = tokens[-1] == ">"
        node = self._root
        for token in tokens[:-1] if has_rest else tokens:
            node = node.children.setdefault(token, _Node())
        return node.rest if has_rest else node.here

    def add(self, subscription: MemorySubscription) -> None:
        self._place(subscription.pattern)[subscription.number] = subscription

    def remove(self, subscription: MemorySubscription) -> None:
        self._place(subscription.pattern).pop(subscription.number, None)

    def find(self, subject: str) -> list[MemorySubscription]:
        found: list[MemorySubscription] = []
        nodes = [self._root]
        for token in subject.split("."):
            for node in nodes:
                found.extend(node.rest.values())
            nodes = [n.children[t] for n in nodes for t in (token, "*") if t in n.children]
        for node in nodes:
            found.extend(node.here.values())
        return sorted(found, key=lambda s: s.number)


class MemoryBroker:
    """The server side. Build it anywhere, use it from within one event loop.

    Args:
        max_payload_bytes: what it takes at most per message.
        seed: of every fault that is drawn.
    """

    def __init__(self, *, max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES, seed: int = 0) -> None:
        self.max_payload_bytes = max_payload_bytes
        self.seed = seed
        # What `rlbus._kv_memory` keeps here, by name: it outlives connections.
        self.buckets: dict[str, MemoryBucket] = {}
        self._interest = _Interest()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._wake: asyncio.Handle | None = None
        self._wake_at = 0.0
        self._num_connections = 0
        self._counter = 0

    def connect(self, name: str | None = None, *, faults: Faults = NO_FAULTS) -> "MemoryTransport":
        """A new connection. `name` seeds its faults; by default its number."""
        self._num_connections += 1
        number = self._num_connections
        return MemoryTransport(self, number, str(number) if name is None else name, faults)

    def disconnect(self, transport: "MemoryTransport") -> None:
        """Cut a connection, as a dying server would: what is on its way to it is lost, its interest is gone."""
        if transport.is_connected:
            transport._set_connected(False)

    def reconnect(self, transport: "MemoryTransport") -> None:
        """Bring a cut connection back: its subscriptions stand again, then its `on_reconnect` handlers run."""
        if not transport.is_connected and not transport._is_closed:
            transport._set_connected(True)

    def partition(self, transport: "MemoryTransport") -> None:
        """Lose everything in both directions from now on, while both sides still believe in the connection."""
        transport._is_partitioned = True

    def heal(self, transport: "MemoryTransport") -> None:
        """End a partition. What was lost stays lost."""
        transport._is_partitioned = False

    def num_subscriptions(self, subject: str) -> int:
        """How many subscriptions would get a message on `subject` now."""
        return len(self._interest.find(subject))

    def _next_number(self) -> int:
        self._counter += 1
        return self._counter

    def _at(self, due_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (due_s, self._next_number(), action))
        self._schedule()

    def _schedule(self) -> None:
        due_s = self._queue[0][0]
        if self._wake is not None:
            if self._wake_at <= due_s:
                return
            self._wake.cancel()
        loop = asyncio.get_running_loop()
        self._wake_at = due_s
        self._wake = loop.call_soon(self._pump) if due_s <= loop.time() else loop.call_at(due_s, self._pump)

    def _pump(self) -> None:
        self._wake = None
        # Only what was there when the pump began: handlers that publish let the loop turn in between.
        last = self._counter
        now_s = asyncio.get_running_loop().time()
        while self._queue and self._queue[0][0] <= now_s + 1e-9 and self._queue[0][1] <= last:
            _, _, action = heapq.heappop(self._queue)
            action()
        if self._queue:
            self._schedule()

    def _route(self, publisher: "MemoryTransport", message: Message) -> None:
        found = self._interest.find(message.subject)
        for subscription in found:
            subscription.transport._receive(subscription, message)
        if message.reply is not None and not found:
            nobody = Message(message.reply, b"", no_responders=True)
            for subscription in self._interest.find(message.reply):
                if subscription.transport is publisher:
                    publisher._receive(subscription, nobody)


class MemoryTransport:
    """One connection to a MemoryBroker; implements `rlbus._transport.Transport`. `faults` may change at any time."""

    def __init__(self, broker: MemoryBroker, number: int, name: str, faults: Faults) -> None:
        self.name = name
        self.faults = faults
        self.num_handler_errors = 0
        self._broker = broker
        self._number = number
        self._random = random.Random(f"{broker.seed}/{name}")
        self._num_inboxes = 0
        self._num_dropped = 0
        self._is_connected = True
        self._is_closed = False
        self._is_partitioned = False
        self._out_due_s = 0.0
        self._in_due_s = 0.0
        # Grows with each disconnect, so that deliveries of an earlier connection find out that they are lost.
        self._connection = 0
        self._subscriptions: dict[int, MemorySubscription] = {}
        self._on_reconnect: list[Callable[[], None]] = []
        self._on_disconnect: list[Callable[[], None]] = []
        self._barriers: set[asyncio.Future[None]] = set()

    @property
    def is_connected(self) -> bool:
        """Whether a publish now would leave this process."""
        return self._is_connected

    @property
    def broker(self) -> MemoryBroker:
        """What it is connected to."""
        return self._broker

    @property
    def is_closed(self) -> bool:
        """Whether it was closed for good."""
        return self._is_closed

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that the broker takes."""
        return self._broker.max_payload_bytes

    @property
    def num_dropped(self) -> int:
        """Incoming deliveries lost by `Faults.drop` so far: what a slow consumer would have lost."""
        return self._num_dropped

    def new_inbox(self) -> str:
        """A subject of this connection's own, unused so far."""
        self._num_inboxes += 1
        return f"_INBOX.{self._number}.{self._num_inboxes}"

    def publish(self, subject: str, data: bytes, reply: str | None = None) -> None:
        """Send; see `Transport.publish`."""
        if self._is_closed:
            raise ClosedError("connection")
        if not self._is_connected:
            raise BrokenError("connection", "not connected")
        if len(data) > self.max_payload_bytes:
            raise PayloadTooLargeError(f"message on {subject}", len(data), self.max_payload_bytes)
        message = Message(subject, bytes(data), reply)
        for due_s in self._faulty_dues(subject, outgoing=True):
            self._broker._at(due_s, lambda: self._leave(message))

    def subscribe(self, pattern: str, handler: Handler) -> MemorySubscription:
        """Deliver what matches `pattern`; see `Transport.subscribe`."""
        if self._is_closed:
            raise ClosedError("connection")
        subscription = MemorySubscription(self, pattern, handler, self._broker._next_number())
        self._subscriptions[subscription.number] = subscription
        if self._is_connected:
            connection = self._connection
            self._broker._at(self._out_due(0.0), lambda: self._stand(subscription, connection))
        return subscription

    async def barrier(self, limit_s: float) -> None:
        """Return when all that was published or subscribed before has been processed; see `Transport.barrier`."""
        if self._is_closed:
            raise ClosedError("connection")
        if not self._is_connected:
            raise BrokenError("connection", "not connected")
        echo: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._barriers.add(echo)
        self._broker._at(self._out_due(0.0), lambda: self._turn(echo))
        try:
            async with asyncio.timeout(limit_s):
                await echo
        except TimeoutError:
            raise DeadlineError("barrier", limit_s) from None
        finally:
            self._barriers.discard(echo)

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        """Call `handler` after each reconnect, when subscriptions stand again."""
        self._on_reconnect.append(handler)

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        """Call `handler` when the connection is lost."""
        self._on_disconnect.append(handler)

    async def aclose(self) -> None:
        """Close. Idempotent. Cancel: closed all the same, since nothing is awaited."""
        if self._is_closed:
            return
        self._is_closed = True
        self._is_connected = False
        self._connection += 1
        for subscription in list(self._subscriptions.values()):
            subscription.unsubscribe()
        self._fail_barriers(ClosedError("connection"))

    async def travel(self, subject: str, until_s: float, *, outgoing: bool) -> bool:
        """Pass the faults of this connection one way, for a call that isn't a message; whether it came through.

        If not, returns only at `until_s` (loop time), when the caller gives up. Cancel: leaves nothing.
        """
        loop = asyncio.get_running_loop()
        connection = self._connection
        dues_s = self._faulty_dues(subject, outgoing=outgoing)
        if dues_s:
            await asyncio.sleep(max(0.0, min(*dues_s, until_s) - loop.time()))
        if dues_s and min(dues_s) <= until_s and connection == self._connection and not self._is_partitioned:
            return True
        await asyncio.sleep(max(0.0, until_s - loop.time()))
        return False

    def _set_connected(self, is_connected: bool) -> None:
        self._is_connected = is_connected
        loop = asyncio.get_running_loop()
        if is_connected:
            for subscription in self._subscriptions.values():
                self._broker._interest.add(subscription)
        else:
            self._connection += 1
            for subscription in self._subscriptions.values():
                self._broker._interest.remove(subscription)
            self._fail_barriers(BrokenError("connection", "disconnected"))
        for handler in self._on_reconnect if is_connected else self._on_disconnect:
            loop.call_soon(handler)

    def _fail_barriers(self, error: Exception) -> None:
        for echo in self._barriers:
            if not echo.done():
                echo.set_exception(error)

    def _turn(self, echo: asyncio.Future[None]) -> None:
        # The way back is the incoming queue, behind what was delivered before, as a message to oneself would take.
        if not self._is_partitioned:
            self._broker._at(self._in_due(0.0), lambda: self._echo(echo))

    def _echo(self, echo: asyncio.Future[None]) -> None:
        if not self._is_partitioned and not echo.done():
            echo.set_result(None)

    def _stand(self, subscription: MemorySubscription, connection: int) -> None:
        if subscription.is_active and connection == self._connection:
            self._broker._interest.add(subscription)

    def _forget(self, subscription: MemorySubscription) -> None:
        self._subscriptions.pop(subscription.number, None)
        self._broker._interest.remove(subscription)

    def _leave(self, message: Message) -> None:
        if not self._is_partitioned:
            self._broker._route(self, message)

    def _receive(self, subscription: MemorySubscription, message: Message) -> None:
        if self._is_partitioned:
            return
        connection = self._connection
        dues_s = self._faulty_dues(message.subject, outgoing=False)
        self._num_dropped += not dues_s
        for due_s in dues_s:
            self._broker._at(due_s, lambda: self._deliver(subscription, message, connection))

    def _deliver(self, subscription: MemorySubscription, message: Message, connection: int) -> None:
        if not subscription.is_active or connection != self._connection or self._is_partitioned:
            return
        try:
            subscription.handler(message)
        except Exception:  # noqa: BLE001 - the contract: logged and counted, and nobody else is affected
            self.num_handler_errors += 1
            _log.exception("handler of %s failed", subscription.pattern)

    def _out_due(self, delay_s: float) -> float:
        self._out_due_s = max(self._out_due_s, asyncio.get_running_loop().time() + delay_s)
        return self._out_due_s

    def _in_due(self, delay_s: float) -> float:
        self._in_due_s = max(self._in_due_s, asyncio.get_running_loop().time() + delay_s)
        return self._in_due_s

    def _faulty_dues(self, subject: str, *, outgoing: bool) -> list[float]:
        """When each copy of a message arrives at the other end: none if it is dropped, two if duplicated."""
        in_order = self._out_due if outgoing else self._in_due
        faults = self.faults
        if faults is NO_FAULTS or not matches(faults.only, subject):
            return [in_order(0.0)]
        if self._random.random() < faults.drop:
            return []
        num_copies = 2 if self._random.random() < faults.duplicate else 1
        dues_s: list[float] = []
        for _ in range(num_copies):
            delay_s = self._random.uniform(*faults.delay_s)
            if self._random.random() < faults.reorder:
                dues_s.append(asyncio.get_running_loop().time() + delay_s + REORDER_HOLD_S)
            else:
                dues_s.append(in_order(delay_s))
        return dues_s
