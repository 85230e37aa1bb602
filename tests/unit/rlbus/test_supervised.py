"""Connections come and go; the table of subscriptions, the watchdog and the back-off stay. Under virtual time."""

import asyncio
from collections.abc import Callable

import pytest

from rlbus import _supervised
from rlbus._memory import matches
from rlbus._supervised import BACKOFF_MAX_S, CLOSE_ECHO_S, WATCHDOG_S, SupervisedTransport
from rlbus._transport import Handler, Message, Transport
from rlbus.errors import BrokenError, ClosedError, ConfigError, DeadlineError, PayloadTooLargeError
from rlbus.testing import run

pytestmark = pytest.mark.unit

CONNECT_S = 5.0


class FakeConnection:
    """Echoes what is published to its own subscriptions, unless it is silent."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.max_payload_bytes = 1000
        self.is_silent = False
        self.is_closed = False
        self.patterns: list[str] = []
        self.published: list[str] = []
        self._handlers: list[tuple[str, Handler]] = []

    def publish(self, subject: str, data: bytes, reply: str | None, headers: dict[str, str] | None = None) -> None:
        """See Connection."""
        self.published.append(subject)
        for pattern, handler in list(self._handlers):
            if matches(pattern, subject) and not self.is_silent:
                asyncio.get_running_loop().call_soon(handler, Message(subject, data, reply))

    def subscribe(self, pattern: str, deliver: Handler) -> Callable[[], None]:
        """See Connection."""
        self.patterns.append(pattern)
        self._handlers.append((pattern, deliver))

        def end() -> None:
            self.patterns.remove(pattern)

        return end

    async def aclose(self, limit_s: float) -> None:
        """See Connection."""
        self.is_closed = True


class World:
    """Where connections come from. `is_down` refuses them, `is_silent` makes those that echo nothing."""

    def __init__(self) -> None:
        self.is_down = False
        self.is_silent = False
        self.made: list[FakeConnection] = []
        self.tried_at_s: list[float] = []
        self.transport = SupervisedTransport(self._open, "server", CONNECT_S)

    async def _open(self, limit_s: float) -> FakeConnection:
        self.tried_at_s.append(asyncio.get_running_loop().time())
        if self.is_down:
            raise BrokenError("server", "nobody listens there")
        connection = FakeConnection()
        connection.is_silent = self.is_silent
        self.made.append(connection)
        return connection

    async def come_back(self) -> None:
        """Wait for the next reconnect."""
        back = asyncio.Event()
        self.transport.on_reconnect(back.set)
        await asyncio.wait_for(back.wait(), 60.0)


def user_patterns(connection: FakeConnection) -> list[str]:
    return [p for p in connection.patterns if not p.startswith("_INBOX")]


def test_it_is_a_transport() -> None:
    """It can stand where the Protocol is asked for; checked by mypy too."""

    async def scenario() -> None:
        transport: Transport = World().transport
        assert not transport.is_connected
        await transport.aclose()

    run(scenario())


def test_the_table_is_replayed_in_order_on_each_connection() -> None:
    """With what was subscribed meanwhile, without what was ended, before anything is published."""

    async def scenario() -> None:
        world = World()
        transport = world.transport
        await transport.start()
        keep = [transport.subscribe(p, lambda m: None) for p in ("a", "b", "c")]
        world.is_down = True
        world.made[0].lost.set_result("planted")
        await asyncio.sleep(0.01)
        assert not transport.is_connected
        keep[1].unsubscribe()
        transport.subscribe("d", lambda m: None)
        world.is_down = False
        await world.come_back()
        assert world.made[0].is_closed
        assert user_patterns(world.made[1]) == ["a", "c", "d"]
        keep[0].unsubscribe()
        assert user_patterns(world.made[1]) == ["c", "d"]
        await transport.aclose()

    run(scenario())


def test_back_off_grows_to_its_ceiling_and_never_ends() -> None:
    """Each pause is below a ceiling that doubles up to BACKOFF_MAX_S; a server that comes back is found within it."""

    async def scenario() -> None:
        world = World()
        await world.transport.start()
        world.is_down = True
        world.made[0].lost.set_result("planted")
        await asyncio.sleep(600.0)
        pauses_s = [b - a for a, b in zip(world.tried_at_s[1:], world.tried_at_s[2:], strict=False)]
        ceilings_s = [min(BACKOFF_MAX_S, 0.2 * 2**n) for n in range(len(pauses_s))]
        assert all(p <= c for p, c in zip(pauses_s, ceilings_s, strict=True))
        assert len(pauses_s) > 600.0 / BACKOFF_MAX_S
        assert max(pauses_s) > BACKOFF_MAX_S / 2
        world.is_down = False
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        await world.come_back()
        assert loop.time() - started_s <= BACKOFF_MAX_S
        await world.transport.aclose()

    run(scenario())


def test_a_silent_connection_is_given_up_after_two_missed_echoes() -> None:
    """Found between 10 and 15 s after it fell silent; the next one is made, and its listeners told once."""

    async def scenario() -> None:
        world = World()
        transport = world.transport
        events: list[str] = []
        transport.on_disconnect(lambda: events.append("down"))
        transport.on_reconnect(lambda: events.append("up"))
        await transport.start()
        await asyncio.sleep(12.0)
        loop = asyncio.get_running_loop()
        world.made[0].is_silent = True
        started_s = loop.time()
        while transport.is_connected:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.1)
        assert 2 * WATCHDOG_S <= loop.time() - started_s <= 3 * WATCHDOG_S + 0.1
        assert "no echo" in world.made[0].lost.result()
        await asyncio.sleep(1.0)
        assert events == ["down", "up"]
        assert transport.is_connected
        await transport.aclose()

    run(scenario())


def test_one_missed_echo_is_forgiven() -> None:
    """A loop that was blocked for a while isn't a dead peer."""

    async def scenario() -> None:
        world = World()
        await world.transport.start()
        connection = world.made[0]
        for _ in range(5):
            connection.is_silent = True
            num_echoes = len(connection.published)
            while len(connection.published) == num_echoes:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.1)
            connection.is_silent = False
            await asyncio.sleep(2.5 * WATCHDOG_S)
        assert len(world.made) == 1
        assert world.transport.is_connected
        await world.transport.aclose()

    run(scenario())


def test_a_connection_counts_only_after_its_first_echo() -> None:
    """A role that may not use its inbox connects, and would be deaf: refused at start, and closed."""

    async def scenario() -> None:
        world = World()
        world.is_silent = True
        with pytest.raises(BrokenError, match=r"no echo came back within 5 s; may this user use _INBOX"):
            await world.transport.start()
        assert world.made[0].is_closed
        assert not world.transport.is_connected

    run(scenario())


def test_a_connection_lost_while_it_is_made_is_only_another_attempt() -> None:
    """Nobody is told that it was there."""

    async def scenario() -> None:
        world = World()
        transport = world.transport
        events: list[str] = []
        transport.on_disconnect(lambda: events.append("down"))
        transport.on_reconnect(lambda: events.append("up"))
        await transport.start()
        world.is_silent = True
        world.made[0].lost.set_result("planted")
        while len(world.made) < 2:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
        world.made[1].lost.set_result("again")
        world.is_silent = False
        await asyncio.sleep(10.0)
        assert events == ["down", "up"]
        assert [c.is_closed for c in world.made] == [True, True, False]
        await transport.aclose()

    run(scenario())


def test_a_loss_is_known_at_once_to_publish_and_to_barriers() -> None:
    """Before any handler or task had its turn, nothing more is taken; a barrier in flight ends with the reason."""

    async def scenario() -> None:
        world = World()
        transport = world.transport
        await transport.start()
        world.made[0].is_silent = True
        barrier = asyncio.create_task(transport.barrier(60.0))
        await asyncio.sleep(0)
        world.is_down = True
        world.made[0].lost.set_result("planted")
        assert not transport.is_connected
        with pytest.raises(BrokenError, match="nothing was sent"):
            transport.publish("a", b"")
        with pytest.raises(BrokenError, match="planted"):
            await asyncio.wait_for(barrier, 0.001)
        with pytest.raises(BrokenError):
            await transport.barrier(60.0)
        await transport.aclose()

    run(scenario())


def test_closing_waits_for_what_was_published_but_not_for_ever() -> None:
    """An echo that comes, or CLOSE_ECHO_S; then everything is ClosedError."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        for is_silent, took_s in ((False, 0.0), (True, CLOSE_ECHO_S)):
            world = World()
            transport = world.transport
            await transport.start()
            world.made[0].is_silent = is_silent
            barrier = asyncio.create_task(transport.barrier(60.0)) if is_silent else None
            await asyncio.sleep(0)
            started_s = loop.time()
            await transport.aclose()
            await transport.aclose()
            assert loop.time() - started_s == pytest.approx(took_s, abs=1e-6)
            assert world.made[0].is_closed
            if barrier is not None:
                with pytest.raises(ClosedError):
                    await barrier
            with pytest.raises(ClosedError):
                transport.publish("a", b"")

    run(scenario())


def test_closing_while_down_ends_the_attempts() -> None:
    """No task goes on behind the caller's back."""

    async def scenario() -> None:
        world = World()
        await world.transport.start()
        world.is_down = True
        world.made[0].lost.set_result("planted")
        await asyncio.sleep(30.0)
        await world.transport.aclose()
        num_tried = len(world.tried_at_s)
        await asyncio.sleep(60.0)
        assert len(world.tried_at_s) == num_tried
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario())


def test_a_missed_barrier_is_a_deadline_error_and_leaves_nothing() -> None:
    """Its late echo is nobody's."""

    async def scenario() -> None:
        world = World()
        transport = world.transport
        await transport.start()
        world.made[0].is_silent = True
        with pytest.raises(DeadlineError) as caught:
            await transport.barrier(0.5)
        assert caught.value.limit_s == 0.5
        world.made[0].is_silent = False
        world.made[0].publish(world.made[0].published[-1], b"", None)
        await asyncio.sleep(0)
        await transport.barrier(0.5)
        assert transport._echoes == {}
        await transport.aclose()

    run(scenario())


@pytest.mark.parametrize("subject", ["", ".", "a.", ".a", "a..b", "a b", "a\r\nPUB x 0", "a\t"])
def test_malformed_subjects_are_refused(subject: str) -> None:
    """As subject, as reply and as pattern; on the wire they would go nowhere, or be commands of their own."""

    async def scenario() -> None:
        world = World()
        transport = world.transport
        await transport.start()
        num_published = len(world.made[0].published)
        with pytest.raises(ConfigError):
            transport.publish(subject, b"")
        with pytest.raises(ConfigError):
            transport.publish("a", b"", subject)
        with pytest.raises(ConfigError):
            transport.subscribe(subject, lambda m: None)
        assert len(world.made[0].published) == num_published
        await transport.aclose()

    run(scenario())


@pytest.mark.parametrize("pattern", ["a.>.b", "a.b*", "*a", ">a", "a.>>"])
def test_malformed_patterns_are_refused(pattern: str) -> None:
    """One in the table would break each new connection."""

    async def scenario() -> None:
        world = World()
        await world.transport.start()
        with pytest.raises(ConfigError):
            world.transport.subscribe(pattern, lambda m: None)
        for good in ("a", "*", ">", "a.*.b", "a.>"):
            world.transport.subscribe(good, lambda m: None)
        await world.transport.aclose()

    run(scenario())


def test_sizes_are_checked_before_publishing() -> None:
    """Payload by what the server takes, subject and reply by our own limit."""

    async def scenario() -> None:
        world = World()
        transport = world.transport
        await transport.start()
        assert transport.max_payload_bytes == 1000
        transport.publish("a", b"x" * 1000)
        for subject, size, reply in (("a", 1001, None), ("a" * 256, 0, None), ("a", 0, "a" * 256)):
            with pytest.raises(PayloadTooLargeError):
                transport.publish(subject, b"x" * size, reply)
        assert world.made[0].published[1:] == ["a"]
        await transport.aclose()

    run(scenario())


def test_limits_fit_together() -> None:
    """The whole of a close stays within the 5 s of the contract."""
    assert CLOSE_ECHO_S + 2 * _supervised.CLOSE_REST_S <= 5.0
