"""A transport that lets nothing out while its owner doesn't lead.

A leader that was stopped for a while (SIGSTOP, a swapping machine) wakes up in the middle of what it did. Its lease is
over by then, and somebody else leads; so every publish asks first, at the moment it would leave.
"""

from collections.abc import Callable

from rlbus._transport import Handler, Subscription, Transport
from rlbus.errors import BrokenError


class FencedTransport:
    """Implements `rlbus._transport.Transport` over `inner`, whose owner closes it. `may_publish` is asked each time."""

    def __init__(self, inner: Transport, may_publish: Callable[[], bool]) -> None:
        self._inner = inner
        self._may_publish = may_publish

    @property
    def is_connected(self) -> bool:
        """See Transport. Without the lease nothing leaves this process either."""
        return self._inner.is_connected and self._may_publish()

    @property
    def max_payload_bytes(self) -> int:
        """See Transport."""
        return self._inner.max_payload_bytes

    @property
    def num_dropped(self) -> int:
        """See Transport."""
        return self._inner.num_dropped

    def new_inbox(self) -> str:
        """See Transport."""
        return self._inner.new_inbox()

    def publish(self, subject: str, data: bytes, reply: str | None = None) -> None:
        """See Transport. Also BrokenError: the lease is over."""
        if not self._may_publish():
            raise BrokenError("the lease of this controller", "it is over; nothing was sent")
        self._inner.publish(subject, data, reply)

    def subscribe(self, pattern: str, handler: Handler) -> Subscription:
        """See Transport."""
        return self._inner.subscribe(pattern, handler)

    async def barrier(self, limit_s: float) -> None:
        """See Transport."""
        await self._inner.barrier(limit_s)

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        """See Transport."""
        self._inner.on_reconnect(handler)

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        """See Transport."""
        self._inner.on_disconnect(handler)

    async def aclose(self) -> None:
        """Nothing: the connection belongs to whoever made it. Cancel: can't come, since nothing is awaited."""
