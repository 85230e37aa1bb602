"""The seam between rlbus and a message bus.

`rlbus._supervised` implements it over the connections of `rlbus._nats`, `rlbus._memory` in memory.

Contract (both implementations pass the same tests):
- Delivery is at most once, in order per publisher and subject, to every subscription whose pattern matches.
- A handler is a plain function called on the loop. It must not block or raise; what it raises is logged and counted,
  and changes nothing for the others. It only enqueues.
- `publish` while disconnected raises BrokenError at once: nothing is buffered to be delivered later, when whoever sent
  it has long given up on it (facts/nats.md A3, "zombie commands").
- Subscriptions survive a reconnect. `on_reconnect` handlers run after they have been replayed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Message:
    """One delivery. `no_responders` marks the server's 503: nobody was subscribed to what we published."""

    subject: str
    data: bytes
    reply: str | None = None
    no_responders: bool = False


Handler = Callable[[Message], None]


class Subscription(Protocol):
    """A running subscription."""

    def unsubscribe(self) -> None:
        """Stop delivery. Idempotent; nothing is delivered after it returns."""
        ...


class Transport(Protocol):
    """One connection to a bus."""

    @property
    def is_connected(self) -> bool:
        """Whether a publish now would leave this process."""
        ...

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that the server takes."""
        ...

    @property
    def num_dropped(self) -> int:
        """How many deliveries were lost on this side so far (slow consumer). Only grows."""
        ...

    def new_inbox(self) -> str:
        """A subject of this connection's own, unused so far. `<inbox>.>` is covered by this role's permissions."""
        ...

    def publish(self, subject: str, data: bytes, reply: str | None = None) -> None:
        """Send. Does not wait; use `barrier` to know that the server has it.

        Raises:
            BrokenError: not connected. ClosedError: after aclose.
            PayloadTooLargeError: over max_payload_bytes; nothing was sent, the connection lives on.
        """
        ...

    def subscribe(self, pattern: str, handler: Handler) -> Subscription:
        """Deliver every message that matches `pattern` (`*` one token, trailing `>` the rest) to `handler`."""
        ...

    async def barrier(self, limit_s: float) -> None:
        """Return when everything that was published or subscribed before has been processed by the server.

        Raises:
            DeadlineError: no echo within `limit_s`. BrokenError: disconnected.
        Cancel: leaves nothing behind.
        """
        ...

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        """Call `handler` after each reconnect, when subscriptions stand again."""
        ...

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        """Call `handler` when the connection is lost."""
        ...

    async def aclose(self) -> None:
        """Close within 5 s, whatever the peer does. Idempotent. Cancel: the connection is dropped at once."""
        ...
