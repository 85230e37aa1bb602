"""The bus in memory behaves as NATS does, and fails as it is told to."""

import asyncio

import pytest

from rlbus._memory import REORDER_HOLD_S, Faults, MemoryBroker, matches
from rlbus._transport import Message, Transport
from rlbus.errors import BrokenError, ClosedError, ConfigError, DeadlineError, PayloadTooLargeError
from rlbus.testing import run

pytestmark = pytest.mark.unit


def texts(messages: list[Message]) -> list[str]:
    return [m.data.decode() for m in messages]


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.*.c", "a.b.c", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a.b", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("dyn.*.worker.>", "dyn.x.worker.1", True),
    ],
)
def test_patterns_match_as_in_nats(pattern: str, subject: str, expected: bool) -> None:
    """The function and the broker's tree of interest agree with NATS."""
    assert matches(pattern, subject) is expected

    async def scenario() -> int:
        broker = MemoryBroker()
        transport = broker.connect()
        transport.subscribe(pattern, lambda _: None)
        await transport.barrier(1)
        return broker.num_subscriptions(subject)

    assert run(scenario()) == int(expected)


def test_the_memory_transport_is_a_transport() -> None:
    """It can stand where the Protocol is asked for; checked by mypy too."""
    transport: Transport = MemoryBroker().connect()
    assert transport.is_connected


def test_every_matching_subscription_gets_a_message_once_also_the_publishers_own() -> None:
    """Overlapping subscriptions each get their copy, in the order in which they were made."""

    async def scenario() -> list[str]:
        broker = MemoryBroker()
        a, b = broker.connect(), broker.connect()
        got: list[str] = []
        b.subscribe("x.*", lambda m: got.append(f"b-star {m.subject}"))
        a.subscribe("x.>", lambda m: got.append(f"a-rest {m.subject}"))
        b.subscribe("x.1", lambda m: got.append(f"b-exact {m.subject}"))
        b.subscribe("y", lambda m: got.append("never"))
        a.publish("x.1", b"")
        await asyncio.sleep(100)
        return got

    assert run(scenario()) == ["b-star x.1", "a-rest x.1", "b-exact x.1"]


def test_messages_of_a_publisher_stay_in_order_whatever_their_delay() -> None:
    """Delay holds back what comes later too, as a TCP connection does."""

    async def scenario() -> list[str]:
        broker = MemoryBroker(seed=3)
        a, b = broker.connect(faults=Faults(delay_s=(0.0, 1.0))), broker.connect()
        got: list[Message] = []
        b.subscribe("x", got.append)
        for i in range(50):
            a.publish("x", str(i).encode())
        await asyncio.sleep(100)
        return texts(got)

    assert run(scenario()) == [str(i) for i in range(50)]


def test_delivery_never_happens_inside_publish() -> None:
    """A handler that publishes doesn't recurse, and nothing is delivered before the loop turns."""

    async def scenario() -> tuple[int, list[str]]:
        transport = MemoryBroker().connect()
        got: list[str] = []

        def echo(message: Message) -> None:
            got.append(message.data.decode())
            if len(got) < 2:
                transport.publish("x", str(len(got)).encode())
            got.append("done")

        transport.subscribe("x", echo)
        transport.publish("x", b"0")
        before = len(got)
        await asyncio.sleep(100)
        return before, got

    assert run(scenario()) == (0, ["0", "done", "1", "done"])


def test_a_request_that_nobody_hears_is_answered_with_no_responders_to_its_publisher_alone() -> None:
    """As the server's 503: empty, on the reply subject, and not for others who listen there."""

    async def scenario() -> tuple[list[Message], list[Message]]:
        broker = MemoryBroker()
        a, b = broker.connect(), broker.connect()
        mine: list[Message] = []
        others: list[Message] = []
        a.subscribe("inbox", mine.append)
        b.subscribe("inbox", others.append)
        a.publish("nobody", b"hello", "inbox")
        a.publish("nobody", b"without reply")
        await asyncio.sleep(100)
        return mine, others

    assert run(scenario()) == ([Message("inbox", b"", None, no_responders=True)], [])


def test_an_observer_of_everything_hides_that_nobody_listens() -> None:
    """A 503 is a hint, no proof: any subscription that matches suppresses it (facts/nats.md A2)."""

    async def scenario() -> list[Message]:
        broker = MemoryBroker()
        a, observer = broker.connect(), broker.connect()
        got: list[Message] = []
        a.subscribe("inbox", got.append)
        observer.subscribe("dyn.>", lambda _: None)
        a.publish("dyn.nobody", b"", "inbox")
        await asyncio.sleep(100)
        return got

    assert run(scenario()) == []


def test_a_payload_over_the_limit_is_refused_and_the_connection_lives_on() -> None:
    """The size is checked before anything is sent."""

    async def scenario() -> list[str]:
        transport = MemoryBroker(max_payload_bytes=4).connect()
        got: list[Message] = []
        transport.subscribe("x", got.append)
        with pytest.raises(PayloadTooLargeError) as caught:
            transport.publish("x", b"12345")
        assert (caught.value.size_bytes, caught.value.limit_bytes) == (5, 4)
        transport.publish("x", b"1234")
        await asyncio.sleep(100)
        return texts(got)

    assert run(scenario()) == ["1234"]


def test_nothing_is_delivered_after_unsubscribe_returned() -> None:
    """Also not what was already on its way; a second unsubscribe does nothing."""

    async def scenario() -> list[Message]:
        transport = MemoryBroker().connect()
        got: list[Message] = []
        subscription = transport.subscribe("x", got.append)
        transport.publish("x", b"1")
        subscription.unsubscribe()
        subscription.unsubscribe()
        transport.publish("x", b"2")
        await asyncio.sleep(100)
        return got

    assert run(scenario()) == []


def test_a_raising_handler_is_counted_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The next message and the other subscription are served."""

    async def scenario() -> tuple[int, list[str]]:
        transport = MemoryBroker().connect()
        got: list[Message] = []

        def bad(_: Message) -> None:
            raise ValueError("boom")

        transport.subscribe("x", bad)
        transport.subscribe("x", got.append)
        transport.publish("x", b"1")
        transport.publish("x", b"2")
        await asyncio.sleep(100)
        return transport.num_handler_errors, texts(got)

    assert run(scenario()) == (2, ["1", "2"])
    assert "boom" in caplog.text


def test_publish_while_disconnected_raises_and_is_never_delivered_later() -> None:
    """No zombie commands (facts/nats.md A3)."""

    async def scenario() -> tuple[list[str], list[str]]:
        broker = MemoryBroker()
        a, b = broker.connect(), broker.connect()
        got: list[Message] = []
        events: list[str] = []
        b.subscribe("x", got.append)
        a.on_disconnect(lambda: events.append(f"lost {a.is_connected}"))
        a.on_reconnect(lambda: events.append(f"back {a.is_connected}"))
        broker.disconnect(a)
        with pytest.raises(BrokenError):
            a.publish("x", b"zombie")
        with pytest.raises(BrokenError):
            await a.barrier(1)
        await asyncio.sleep(100)
        broker.reconnect(a)
        await asyncio.sleep(100)
        a.publish("x", b"fresh")
        await asyncio.sleep(100)
        return texts(got), events

    assert run(scenario()) == (["fresh"], ["lost False", "back True"])


def test_subscriptions_survive_a_reconnect_also_those_made_meanwhile() -> None:
    """While it is away its messages are lost, and its interest is gone."""

    async def scenario() -> tuple[list[str], int]:
        broker = MemoryBroker()
        a, b = broker.connect(), broker.connect()
        got: list[Message] = []
        b.subscribe("x", got.append)
        await b.barrier(1)
        broker.disconnect(b)
        b.subscribe("y", got.append)
        num_while_away = broker.num_subscriptions("x")
        a.publish("x", b"lost")
        await asyncio.sleep(100)
        broker.reconnect(b)
        a.publish("x", b"x")
        a.publish("y", b"y")
        await asyncio.sleep(100)
        return texts(got), num_while_away

    assert run(scenario()) == (["x", "y"], 0)


def test_what_was_on_its_way_to_a_cut_connection_is_lost() -> None:
    """A delivery belongs to one connection; the next one doesn't inherit it."""

    async def scenario() -> list[str]:
        broker = MemoryBroker()
        a, b = broker.connect(), broker.connect(faults=Faults(delay_s=(5.0, 5.0)))
        got: list[Message] = []
        b.subscribe("x", got.append)
        a.publish("x", b"late")
        await asyncio.sleep(1)
        broker.disconnect(b)
        broker.reconnect(b)
        await asyncio.sleep(100)
        return texts(got)

    assert run(scenario()) == []


def test_a_partition_loses_everything_while_the_connection_seems_to_stand() -> None:
    """is_connected stays True, the barrier hangs to its limit, no 503 is given."""

    async def scenario() -> tuple[bool, list[str], list[Message]]:
        broker = MemoryBroker()
        a, b = broker.connect(), broker.connect()
        got: list[Message] = []
        inbox: list[Message] = []
        b.subscribe("x", got.append)
        a.subscribe("inbox", inbox.append)
        await b.barrier(1)
        broker.partition(b)
        a.publish("x", b"lost", "inbox")
        b.publish("x", b"lost too")
        with pytest.raises(DeadlineError) as caught:
            await b.barrier(3)
        assert caught.value.limit_s == 3
        is_connected = b.is_connected
        broker.heal(b)
        a.publish("x", b"heard")
        await asyncio.sleep(100)
        return is_connected, texts(got), inbox

    is_connected, got, inbox = run(scenario())
    assert is_connected
    assert got == ["heard"]
    assert inbox == []


def test_drop_and_duplicate_follow_the_seed() -> None:
    """The same seed gives the same losses; another one gives others."""

    async def scenario(seed: int) -> tuple[list[str], int]:
        broker = MemoryBroker(seed=seed)
        a, b = broker.connect(), broker.connect(faults=Faults(drop=0.3, duplicate=0.3))
        got: list[Message] = []
        b.subscribe("x", got.append)
        for i in range(40):
            a.publish("x", str(i).encode())
        await asyncio.sleep(100)
        return texts(got), b.num_dropped

    first, num_dropped = run(scenario(7))
    assert run(scenario(7)) == (first, num_dropped)
    assert run(scenario(8))[0] != first
    assert num_dropped == 40 - len(set(first))
    assert 0 < num_dropped < 40
    assert len(first) > len(set(first))


def test_a_reordered_message_is_overtaken() -> None:
    """It is held back alone, and arrives after those published within the hold."""

    async def scenario() -> list[str]:
        broker = MemoryBroker()
        a, b = broker.connect(faults=Faults(reorder=1.0, only="slow")), broker.connect()
        got: list[Message] = []
        b.subscribe("*", got.append)
        a.publish("slow", b"first")
        a.publish("fast", b"second")
        await asyncio.sleep(REORDER_HOLD_S * 2)
        return texts(got)

    assert run(scenario()) == ["second", "first"]


def test_faults_keep_to_their_subjects() -> None:
    """`only` restricts drops to what matches."""

    async def scenario() -> list[str]:
        broker = MemoryBroker()
        a, b = broker.connect(faults=Faults(drop=1.0, only="x.*")), broker.connect()
        got: list[Message] = []
        b.subscribe(">", got.append)
        a.publish("x.1", b"lost")
        a.publish("y.1", b"kept")
        await asyncio.sleep(100)
        return texts(got)

    assert run(scenario()) == ["kept"]


@pytest.mark.parametrize("bad", [{"drop": 1.1}, {"duplicate": -0.1}, {"delay_s": (2.0, 1.0)}])
def test_impossible_faults_are_refused(bad: dict[str, object]) -> None:
    """Named by field."""
    with pytest.raises(ConfigError) as caught:
        Faults(**bad)  # type: ignore[arg-type]
    assert caught.value.name in bad


def test_a_barrier_returns_after_what_was_published_before_it() -> None:
    """The echo takes both queues: what this connection published is at the broker, what it was sent is delivered."""

    async def scenario() -> tuple[int, float]:
        transport = MemoryBroker().connect(faults=Faults(delay_s=(0.5, 0.5), only="x"))
        got: list[Message] = []
        transport.subscribe("x", got.append)
        transport.publish("x", b"")
        await transport.barrier(2)
        return len(got), asyncio.get_running_loop().time()

    assert run(scenario()) == (1, 1.0)


def test_a_closed_transport_says_so_and_close_is_idempotent() -> None:
    """Every verb raises ClosedError; a waiting barrier is released; nothing is delivered any more."""

    async def scenario() -> list[Message]:
        broker = MemoryBroker()
        a, b = broker.connect(), broker.connect()
        got: list[Message] = []
        b.subscribe("x", got.append)
        broker.partition(b)
        waiting = asyncio.ensure_future(b.barrier(60))
        await asyncio.sleep(0)
        await b.aclose()
        await b.aclose()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            b.publish("x", b"")
        with pytest.raises(ClosedError):
            b.subscribe("x", got.append)
        with pytest.raises(ClosedError):
            await b.barrier(1)
        a.publish("x", b"")
        broker.reconnect(b)
        await asyncio.sleep(100)
        assert not b.is_connected
        return got

    assert run(scenario()) == []


def test_inboxes_are_unused_subjects_of_their_own() -> None:
    """No two connections and no two calls share one."""
    broker = MemoryBroker()
    a, b = broker.connect(), broker.connect()
    inboxes = [a.new_inbox(), a.new_inbox(), b.new_inbox(), b.new_inbox()]
    assert len(set(inboxes)) == 4
