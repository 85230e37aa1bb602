"""What every transport promises (rlbus/_transport.py), on the bus in memory and on a real NATS server alike."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import pytest

from rlbus._nats import connect_nats
from rlbus._transport import Message, Transport
from rlbus.config import BusConfig
from rlbus.errors import BrokenError, ClosedError, DeadlineError, PayloadTooLargeError
from rlbus.server import EmbeddedServer
from rlbus.testing import MemoryBroker, MemoryTransport

pytestmark = pytest.mark.integration

LIMIT_S = 30.0


class Stage(Protocol):
    """A server with connections to it, which can be cut off and brought back."""

    async def connect(self) -> Transport:
        """A new connection."""
        ...

    async def cut(self) -> None:
        """Take every connection down; returns when each knows."""
        ...

    async def restore(self) -> None:
        """Bring them back; returns when each knows."""
        ...


async def until(is_true: Callable[[], bool]) -> None:
    """Poll for something that another process causes."""
    async with asyncio.timeout(LIMIT_S):
        while not is_true():  # noqa: ASYNC110 - another process sets it
            await asyncio.sleep(0.001)


class MemoryStage:
    """The bus in memory."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.transports: list[MemoryTransport] = []

    async def connect(self) -> Transport:
        """See Stage."""
        self.transports.append(self.broker.connect())
        return self.transports[-1]

    async def cut(self) -> None:
        """See Stage."""
        for transport in self.transports:
            self.broker.disconnect(transport)
        await asyncio.sleep(0)

    async def restore(self) -> None:
        """See Stage."""
        for transport in self.transports:
            self.broker.reconnect(transport)
        await asyncio.sleep(0)


class NatsStage:
    """A real server, stopped and started again on its port."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.transports: list[Transport] = []

    async def connect(self) -> Transport:
        """See Stage."""
        self.transports.append(await connect_nats(BusConfig(url=self.server.url), name="contract"))
        return self.transports[-1]

    async def cut(self) -> None:
        """See Stage."""
        await self.server.stop()
        await until(lambda: not any(t.is_connected for t in self.transports))

    async def restore(self) -> None:
        """See Stage."""
        await self.server.start()
        await until(lambda: all(t.is_connected for t in self.transports))


@contextlib.asynccontextmanager
async def stage_of(kind: str) -> AsyncIterator[Stage]:
    if kind == "memory":
        yield MemoryStage()
        return
    async with EmbeddedServer() as server:
        stage = NatsStage(server)
        try:
            yield stage
        finally:
            for transport in stage.transports:
                await transport.aclose()


@pytest.fixture(params=["memory", "nats"])
def play(request: pytest.FixtureRequest) -> Callable[[Callable[[Stage], Awaitable[None]]], None]:
    """Run a scenario on one kind of stage."""

    def run(scenario: Callable[[Stage], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with stage_of(request.param) as stage:
                await scenario(stage)

        asyncio.run(whole())

    return run


Play = Callable[[Callable[[Stage], Awaitable[None]]], None]


def texts(messages: list[Message]) -> list[str]:
    return [m.data.decode() for m in messages]


async def settle(*transports: Transport) -> None:
    """All that was published arrives: every connection's echo passes what was sent to it before; twice for answers."""
    for _ in range(2):
        for transport in transports:
            await transport.barrier(LIMIT_S)


def test_every_matching_subscription_gets_a_message_once_also_the_publishers_own(play: Play) -> None:
    """Literal, `*` and `>`; what doesn't match gets nothing."""

    async def scenario(stage: Stage) -> None:
        near, far = await stage.connect(), await stage.connect()
        got: dict[str, list[Message]] = {p: [] for p in ("a.b.c", "a.*.c", "a.>", "a.*", "b.>")}
        for pattern, messages in got.items():
            far.subscribe(pattern, messages.append)
        own: list[Message] = []
        near.subscribe("a.b.c", own.append)
        await settle(far)
        near.publish("a.b.c", b"x", "back.here")
        await settle(near, far)
        hit = [Message("a.b.c", b"x", "back.here")]
        assert own == hit
        assert got == {"a.b.c": hit, "a.*.c": hit, "a.>": hit, "a.*": [], "b.>": []}

    play(scenario)


def test_messages_of_a_publisher_stay_in_order(play: Play) -> None:
    """A few thousand, as fast as they go."""

    async def scenario(stage: Stage) -> None:
        near, far = await stage.connect(), await stage.connect()
        got: list[Message] = []
        far.subscribe("n.*", got.append)
        await settle(far)
        for number in range(3000):
            near.publish(f"n.{number % 7}", str(number).encode())
        await settle(near, far)
        assert texts(got) == [str(n) for n in range(3000)]

    play(scenario)


def test_a_subscription_stands_before_what_the_same_connection_publishes_next(play: Play) -> None:
    """No barrier needed between subscribing to an inbox and publishing a request."""

    async def scenario(stage: Stage) -> None:
        near, far = await stage.connect(), await stage.connect()
        far.subscribe("ask", lambda m: far.publish(m.reply or "", m.data))
        await settle(far)
        got: list[Message] = []
        for number in range(200):
            inbox = near.new_inbox()
            near.subscribe(inbox, got.append)
            near.publish("ask", str(number).encode(), inbox)
        await settle(near, far, near)
        assert texts(got) == [str(n) for n in range(200)]

    play(scenario)


def test_after_a_barrier_others_reach_the_subscription(play: Play) -> None:
    """`flush` of nats-py would lose a few in hundreds (facts/nats.md B1); the barrier none."""

    async def scenario(stage: Stage) -> None:
        near, far = await stage.connect(), await stage.connect()
        answers: list[Message] = []
        inbox = near.new_inbox()
        near.subscribe(inbox, answers.append)
        for number in range(300):
            far.subscribe(f"q.{number}", lambda m: far.publish(m.reply or "", m.subject.encode()))
            await far.barrier(LIMIT_S)
            near.publish(f"q.{number}", b"", inbox)
        await settle(near, far, near)
        assert [m for m in answers if m.no_responders] == []
        assert texts(answers) == [f"q.{n}" for n in range(300)]

    play(scenario)


def test_a_request_that_nobody_hears_is_answered_with_no_responders(play: Play) -> None:
    """Empty, on the reply subject, marked; with a subscriber there is no such answer, nor without a reply subject."""

    async def scenario(stage: Stage) -> None:
        near, far = await stage.connect(), await stage.connect()
        far.subscribe("somebody", lambda m: None)
        await settle(far)
        got: list[Message] = []
        inbox = near.new_inbox()
        near.subscribe(f"{inbox}.*", got.append)
        near.publish("nobody", b"hello", f"{inbox}.1")
        near.publish("somebody", b"hello", f"{inbox}.2")
        near.publish("nobody", b"hello")
        await settle(near, far)
        assert got == [Message(f"{inbox}.1", b"", None, no_responders=True)]

    play(scenario)


def test_delivery_never_happens_inside_publish_or_subscribe(play: Play) -> None:
    """So a handler may publish without being entered again."""

    async def scenario(stage: Stage) -> None:
        near = await stage.connect()
        got: list[Message] = []
        near.subscribe("a", got.append)
        near.publish("a", b"x")
        assert got == []
        await settle(near)
        assert texts(got) == ["x"]

    play(scenario)


def test_a_raising_handler_harms_nobody(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    """Neither its own next message, nor other subscriptions (facts/nats.md B4: a deaf client)."""

    async def scenario(stage: Stage) -> None:
        near = await stage.connect()
        got: list[Message] = []

        def picky(message: Message) -> None:
            if message.data == b"bad":
                raise RuntimeError("planted")
            got.append(message)

        others: list[Message] = []
        near.subscribe("a", picky)
        near.subscribe("*", others.append)
        for data in (b"bad", b"good", b"bad", b"fine"):
            near.publish("a", data)
        await settle(near)
        assert texts(got) == ["good", "fine"]
        assert texts(others) == ["bad", "good", "bad", "fine"]

    play(scenario)
    assert sum("planted" in (r.exc_text or "") for r in caplog.records) == 2


def test_nothing_is_delivered_after_unsubscribe_returned(play: Play) -> None:
    """Not even what was on its way; idempotent; and the server forgets the interest."""

    async def scenario(stage: Stage) -> None:
        near, far = await stage.connect(), await stage.connect()
        got: list[Message] = []
        subscription = far.subscribe("a", got.append)
        await settle(far)
        near.publish("a", b"1")
        await settle(near, far)
        near.publish("a", b"2")
        subscription.unsubscribe()
        subscription.unsubscribe()
        await settle(near, far)
        assert texts(got) == ["1"]
        answers: list[Message] = []
        inbox = near.new_inbox()
        near.subscribe(inbox, answers.append)
        near.publish("a", b"3", inbox)
        await settle(near)
        assert [m.no_responders for m in answers] == [True]

    play(scenario)


def test_a_payload_over_the_limit_is_refused_and_the_connection_lives_on(play: Play) -> None:
    """The largest allowed one arrives whole; one byte more is an error with both numbers, and nothing is sent."""

    async def scenario(stage: Stage) -> None:
        near = await stage.connect()
        sizes: list[int] = []
        near.subscribe("a", lambda m: sizes.append(len(m.data)))
        limit = near.max_payload_bytes
        near.publish("a", b"x" * limit, near.new_inbox())
        with pytest.raises(PayloadTooLargeError) as caught:
            near.publish("a", b"x" * (limit + 1))
        assert (caught.value.size_bytes, caught.value.limit_bytes) == (limit + 1, limit)
        near.publish("a", b"x")
        await settle(near)
        assert sizes == [limit, 1]
        assert near.is_connected

    play(scenario)


def test_publish_while_down_raises_and_nothing_is_delivered_later(play: Play) -> None:
    """No zombie commands (facts/nats.md A3): neither what was refused, nor anything else."""

    async def scenario(stage: Stage) -> None:
        near, far = await stage.connect(), await stage.connect()
        got: list[Message] = []
        far.subscribe(">", lambda m: got.append(m) if m.subject == "a" else None)
        await settle(near, far)
        await stage.cut()
        assert not near.is_connected
        with pytest.raises(BrokenError):
            near.publish("a", b"zombie")
        with pytest.raises(BrokenError):
            await near.barrier(LIMIT_S)
        await stage.restore()
        near.publish("a", b"alive")
        await settle(near, far)
        assert texts(got) == ["alive"]

    play(scenario)


def test_subscriptions_survive_a_reconnect_also_those_made_or_ended_meanwhile(play: Play) -> None:
    """Each exactly once; the handlers for both events run once per event, the second when subscriptions stand."""

    async def scenario(stage: Stage) -> None:
        near = await stage.connect()
        events: list[str] = []
        got: list[Message] = []

        def back() -> None:
            events.append("up")
            near.publish("old", b"from the handler")

        near.on_disconnect(lambda: events.append("down"))
        near.on_reconnect(back)
        near.subscribe("old", got.append)
        ended = near.subscribe("ended", got.append)
        await settle(near)
        await stage.cut()
        near.subscribe("new", got.append)
        ended.unsubscribe()
        await stage.restore()
        await until(lambda: "up" in events)
        for subject in ("old", "new", "ended"):
            near.publish(subject, subject.encode())
        await settle(near)
        assert events == ["down", "up"]
        assert texts(got) == ["from the handler", "old", "new"]

    play(scenario)


def test_a_second_cut_is_survived_as_the_first(play: Play) -> None:
    """State of an earlier connection doesn't get in the way of the next."""

    async def scenario(stage: Stage) -> None:
        near = await stage.connect()
        got: list[Message] = []
        near.subscribe("a", got.append)
        for number in range(3):
            near.publish("a", str(number).encode())
            await settle(near)
            await stage.cut()
            await stage.restore()
        await settle(near)
        assert texts(got) == ["0", "1", "2"]

    play(scenario)


def test_a_barrier_in_flight_ends_when_the_connection_does(play: Play) -> None:
    """With BrokenError at once, not with its own limit."""

    async def scenario(stage: Stage) -> None:
        near = await stage.connect()

        async def echo_for_ever() -> None:
            while True:
                await near.barrier(60.0)

        task = asyncio.create_task(echo_for_ever())
        await asyncio.sleep(0)
        await stage.cut()
        with pytest.raises(BrokenError):
            await asyncio.wait_for(task, LIMIT_S)

    play(scenario)


def test_a_barrier_names_its_limit(play: Play) -> None:
    """An impossible one is a DeadlineError, and the connection lives on (facts/nats.md B2: a late PONG kills)."""

    async def scenario(stage: Stage) -> None:
        near = await stage.connect()
        for _ in range(20):
            with pytest.raises(DeadlineError) as caught:
                await near.barrier(0.0)
        assert caught.value.limit_s == 0.0
        await settle(near)
        assert near.is_connected

    play(scenario)


def test_a_closed_transport_says_so_and_close_is_idempotent(play: Play) -> None:
    """What was published before arrives; every verb then raises ClosedError."""

    async def scenario(stage: Stage) -> None:
        near, far = await stage.connect(), await stage.connect()
        got: list[Message] = []
        far.subscribe("last", got.append)
        await settle(far)
        near.publish("last", b"words")
        await near.aclose()
        await near.aclose()
        await until(lambda: bool(got))
        assert texts(got) == ["words"]
        assert not near.is_connected
        with pytest.raises(ClosedError):
            near.publish("a", b"")
        with pytest.raises(ClosedError):
            near.subscribe("a", got.append)
        with pytest.raises(ClosedError):
            await near.barrier(LIMIT_S)

    play(scenario)


def test_inboxes_are_subjects_of_their_own(play: Play) -> None:
    """No two connections and no two calls share one."""

    async def scenario(stage: Stage) -> None:
        near, far = await stage.connect(), await stage.connect()
        inboxes = [t.new_inbox() for t in (near, far) for _ in range(100)]
        assert len(set(inboxes)) == 200

    play(scenario)
