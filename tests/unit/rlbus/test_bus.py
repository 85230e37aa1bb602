"""Typed publish, subscribe, request and reply streams, on the bus in memory under virtual time."""

import asyncio
from collections.abc import Callable

import pytest

from rlbus._transport import Message
from rlbus.bus import BAD_MESSAGE_LOG_S, Bus, ReplyStream
from rlbus.errors import BrokenError, ClosedError, DeadlineError, DecodeError, PayloadTooLargeError
from rlbus.schemas import ControlReply, GetFleet, OpAccepted, OpProgress, OpResult
from rlbus.testing import Faults, LoopClock, MemoryBroker, run, sequential_ids

pytestmark = pytest.mark.unit

ASK = GetFleet(op_id="op-1")


def two() -> tuple[MemoryBroker, Bus, Bus]:
    """A broker, a client and a server."""
    broker = MemoryBroker()
    return broker, Bus(broker.connect(), clock=LoopClock()), Bus(broker.connect(), clock=LoopClock())


def answering(bus: Bus, num_replies: int = 1, delay_s: float = 0.0) -> Callable[[GetFleet, Message], None]:
    """A handler that answers each request with progress, numbered from 0."""

    def on_request(request: GetFleet, message: Message) -> None:
        def reply() -> None:
            for i in range(num_replies):
                assert message.reply is not None
                bus.publish(message.reply, OpProgress(op_id=request.op_id, phase="x", done=i))

        asyncio.get_running_loop().call_later(delay_s, reply)

    return on_request


def test_a_request_gets_its_reply_typed() -> None:
    """One publish, one reply, over the one inbox."""

    async def scenario() -> ControlReply:
        _, client, server = two()
        server.subscribe("q", GetFleet, lambda m, raw: server.publish(str(raw.reply), OpAccepted(op_id=m.op_id)))
        await server.barrier(1)
        reply: ControlReply = await client.request("q", ASK, ControlReply, limit_s=1)
        return reply

    assert run(scenario()) == OpAccepted(op_id="op-1")


def test_many_requests_share_one_subscription_and_get_their_own_replies() -> None:
    """Replies are told apart by token, also when they cross."""

    async def scenario() -> tuple[list[str], int]:
        broker, client, server = two()

        def on_request(request: GetFleet, message: Message) -> None:
            number = int(request.op_id)
            asyncio.get_running_loop().call_later(
                20 - number, server.publish, str(message.reply), OpAccepted(op_id=request.op_id)
            )

        server.subscribe("q", GetFleet, on_request)
        await server.barrier(1)
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(client.request("q", GetFleet(op_id=str(i)), OpAccepted, limit_s=30))
                for i in range(20)
            ]
            await asyncio.sleep(0.5)
            num_inboxes = broker.num_subscriptions("_INBOX.1.1.7")
        return [task.result().op_id for task in asked], num_inboxes

    assert run(scenario()) == ([str(i) for i in range(20)], 1)


def test_a_request_to_nobody_fails_at_once() -> None:
    """The 503 ends it long before the limit."""

    async def scenario() -> float:
        _, client, _ = two()
        with pytest.raises(BrokenError) as caught:
            await client.request("q", ASK, ControlReply, limit_s=60)
        assert (caught.value.what, caught.value.problem) == ("q", "nobody listens")
        return asyncio.get_running_loop().time()

    assert run(scenario()) == 0.0


def test_a_request_without_an_answer_ends_at_its_limit_and_a_late_reply_is_counted() -> None:
    """The reply address is forgotten; nothing is kept."""

    async def scenario() -> tuple[float, int, dict[str, object]]:
        _, client, server = two()
        server.subscribe("q", GetFleet, answering(server, delay_s=5.0))
        await server.barrier(1)
        with pytest.raises(DeadlineError) as caught:
            await client.request("q", ASK, ControlReply, limit_s=2)
        assert caught.value.limit_s == 2
        ended_s = asyncio.get_running_loop().time()
        await asyncio.sleep(10)
        return ended_s, client.num_late_replies, dict(client._inboxes)

    assert run(scenario()) == (2.0, 1, {})


def test_a_cancelled_request_leaves_nothing_behind() -> None:
    """Its reply address is gone."""

    async def scenario() -> dict[str, object]:
        _, client, server = two()
        server.subscribe("q", GetFleet, lambda *_: None)
        await server.barrier(1)
        task = asyncio.ensure_future(client.request("q", ASK, ControlReply, limit_s=60))
        await asyncio.sleep(1)
        assert len(client._inboxes) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return dict(client._inboxes)

    assert run(scenario()) == {}


def test_a_reply_that_does_not_parse_is_a_decode_error() -> None:
    """It names what was expected, and is counted."""

    async def scenario() -> int:
        _, client, server = two()
        server.subscribe("q", GetFleet, answering(server))
        await server.barrier(1)
        with pytest.raises(DecodeError) as caught:
            await client.request("q", ASK, OpResult, limit_s=1)
        assert caught.value.expected == "OpResult"
        return client.num_bad_messages

    assert run(scenario()) == 1


def test_a_request_while_disconnected_raises_and_leaves_no_inbox() -> None:
    """Nothing is buffered for later."""

    async def scenario() -> dict[str, object]:
        broker, client, _ = two()
        broker.disconnect(client.transport)  # type: ignore[arg-type]
        with pytest.raises(BrokenError):
            await client.request("q", ASK, ControlReply, limit_s=60)
        return dict(client._inboxes)

    assert run(scenario()) == {}


def test_a_request_survives_a_reconnect_when_the_answer_comes_after_it() -> None:
    """The inbox is the same before and after."""

    async def scenario() -> OpProgress:
        broker, client, server = two()
        server.subscribe("q", GetFleet, answering(server, delay_s=3.0))
        await server.barrier(1)
        task = asyncio.ensure_future(client.request("q", ASK, OpProgress, limit_s=10))
        await asyncio.sleep(1)
        broker.disconnect(client.transport)  # type: ignore[arg-type]
        await asyncio.sleep(1)
        broker.reconnect(client.transport)  # type: ignore[arg-type]
        return await task

    assert run(scenario()) == OpProgress(op_id="op-1", phase="x", done=0)


def test_a_stream_gives_every_reply_in_order() -> None:
    """Also those that came before they were asked for; silence is a DeadlineError, and the stream lives on."""

    async def scenario() -> list[int]:
        _, client, server = two()
        server.subscribe("q", GetFleet, answering(server, num_replies=5))
        await server.barrier(1)
        seen: list[int] = []
        async with client.stream("q", ASK, OpProgress) as replies:
            await asyncio.sleep(1)
            seen.extend([(await replies.next(1)).done for _ in range(5)])
            with pytest.raises(DeadlineError):
                await replies.next(2)
            replies.resend()
            seen.append((await replies.next(1)).done)
        return seen

    assert run(scenario()) == [0, 1, 2, 3, 4, 0]


def test_a_stream_that_overflows_breaks_after_what_it_held() -> None:
    """Never a silent drop: the reader gets the first ones, then the error."""

    async def scenario() -> list[int]:
        _, client, server = two()
        server.subscribe("q", GetFleet, answering(server, num_replies=10))
        await server.barrier(1)
        seen: list[int] = []
        async with client.stream("q", ASK, OpProgress, max_queued=3) as replies:
            await asyncio.sleep(1)
            seen.extend([(await replies.next(1)).done for _ in range(3)])
            with pytest.raises(BrokenError, match="more than 3 replies"):
                await replies.next(1)
        return seen

    assert run(scenario()) == [0, 1, 2]


def test_cancelling_next_loses_no_reply() -> None:
    """The reply that comes after the cancelled wait is there for the next one."""

    async def scenario() -> int:
        _, client, server = two()
        server.subscribe("q", GetFleet, answering(server, delay_s=2.0))
        await server.barrier(1)
        async with client.stream("q", ASK, OpProgress) as replies:
            waiting = asyncio.ensure_future(replies.next(60))
            await asyncio.sleep(1)
            waiting.cancel()
            await asyncio.sleep(5)
            return (await replies.next(1)).done

    assert run(scenario()) == 0


def test_closing_the_bus_ends_every_wait_with_closed_error() -> None:
    """Requests and streams alike; afterwards every verb says so."""

    async def scenario() -> None:
        _, client, server = two()
        server.subscribe("q", GetFleet, lambda *_: None)
        await server.barrier(1)
        request = asyncio.ensure_future(client.request("q", ASK, ControlReply, limit_s=60))
        stream: ReplyStream[ControlReply] = client.stream("q", ASK, ControlReply)
        async with stream as replies:
            waiting = asyncio.ensure_future(replies.next(60))
            await asyncio.sleep(1)
            await client.aclose()
            await client.aclose()
            for task in (request, waiting):
                with pytest.raises(ClosedError):
                    await task
        with pytest.raises(ClosedError):
            client.publish("q", ASK)
        with pytest.raises(ClosedError):
            client.subscribe("q", GetFleet, lambda *_: None)
        with pytest.raises(ClosedError):
            await client.barrier(1)

    run(scenario())


def test_bad_messages_are_counted_logged_rarely_and_given_to_who_wants_them(caplog: pytest.LogCaptureFixture) -> None:
    """The good message behind them is delivered."""

    async def scenario() -> tuple[list[str], list[str], int]:
        _, client, server = two()
        good: list[str] = []
        bad: list[str] = []
        server.subscribe("q", GetFleet, lambda m, _: good.append(m.op_id))
        server.subscribe("r", GetFleet, lambda m, _: good.append(m.op_id), lambda e, m: bad.append(e.problem))
        for _ in range(5):
            client.transport.publish("q", b"{")
        client.transport.publish("r", b"[]")
        client.publish("q", ASK)
        await asyncio.sleep(BAD_MESSAGE_LOG_S)
        client.transport.publish("q", b"{")
        await asyncio.sleep(1)
        return good, bad, server.num_bad_messages

    good, bad, num_bad = run(scenario())
    assert good == ["op-1"]
    assert bad == ["Expected `object`, got `array`"]
    assert num_bad == 7
    assert len(caplog.records) == 2
    assert "message on q is no GetFleet" in caplog.records[0].getMessage()


def test_a_message_too_large_for_the_server_is_refused_before_publishing() -> None:
    """The server's own limit counts too, not only ours."""

    async def scenario() -> None:
        bus = Bus(MemoryBroker(max_payload_bytes=20).connect())
        with pytest.raises(PayloadTooLargeError):
            bus.publish("q", GetFleet(op_id="x" * 60))

    run(scenario())


def test_connection_watchers_hear_of_loss_and_return_until_they_stop() -> None:
    """Each is told; one that stopped isn't."""

    async def scenario() -> tuple[list[bool], list[bool]]:
        broker, client, _ = two()
        first: list[bool] = []
        second: list[bool] = []
        stop = client.watch_connection(first.append)
        client.watch_connection(second.append)
        broker.disconnect(client.transport)  # type: ignore[arg-type]
        await asyncio.sleep(1)
        stop()
        broker.reconnect(client.transport)  # type: ignore[arg-type]
        await asyncio.sleep(1)
        return first, second

    assert run(scenario()) == ([False], [False, True])


def test_ids_and_clock_are_the_ones_given() -> None:
    """By default ids are unique."""

    async def scenario() -> tuple[str, float, bool]:
        broker = MemoryBroker()
        bus = Bus(broker.connect(faults=Faults()), clock=LoopClock(), new_id=sequential_ids("op"))
        plain = Bus(broker.connect())
        return bus.new_id(), bus.clock.now() - LoopClock().now(), plain.new_id() != plain.new_id()

    assert run(scenario()) == ("op-1", 0.0, True)
