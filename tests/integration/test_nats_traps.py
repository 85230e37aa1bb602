"""Each trap of nats-py 2.16 that was reproduced (facts/nats.md B) is sprung here on a real server, and does no harm."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlbus import _nats, _supervised
from rlbus._nats import NatsConnection, connect_nats
from rlbus._supervised import SupervisedTransport
from rlbus._transport import Message
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.errors import BrokenError, PayloadTooLargeError
from rlbus.server import EmbeddedServer
from tests.tries import best_of_async, in_time

pytestmark = [pytest.mark.integration, pytest.mark.alone]

LIMIT_S = 30.0
# Limits that have to run out: so that a frozen server is found in a second instead of 15, and a silent one in two.
WATCHDOG_S = 0.2
CONNECT_S = 2.0
# What a busy machine may add to a limit, far below what would pass without it.
LATE_S = 20.0


@contextlib.contextmanager
def watched(*transports: SupervisedTransport) -> Iterator[None]:
    """Inside, their watchdogs look often. Before and after it a slow server is no lost one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_supervised, "WATCHDOG_S", WATCHDOG_S)
        for transport in transports:
            # The one that runs waits for its next look by the usual limit.
            assert transport._supervisor is not None
            transport._supervisor.cancel()
            transport._supervisor = asyncio.get_running_loop().create_task(transport._supervise())
        yield


def run(scenario: Callable[[EmbeddedServer], Awaitable[None]]) -> None:
    """Run it on a server of its own, and see that it leaves no task behind."""

    async def whole() -> None:
        async with EmbeddedServer() as server:
            await scenario(server)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(whole())


@contextlib.asynccontextmanager
async def connected(server: EmbeddedServer) -> AsyncIterator[SupervisedTransport]:
    transport = await connect_nats(BusConfig(url=server.url, connect_s=LIMIT_S), name="trap")
    try:
        yield transport
    finally:
        await transport.aclose()


def thread_states(pid: int) -> set[str]:
    """Of each thread, as in /proc; one that ends while we look has none."""
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.add(stat.read_text().rpartition(")")[2].split()[0])
    return states


@contextlib.contextmanager
def frozen(server: EmbeddedServer) -> Any:
    """SIGSTOP: the kernel keeps the connection, and nobody answers. Returns when every thread stands still."""
    os.kill(server.pid, signal.SIGSTOP)
    until_s = time.monotonic() + LIMIT_S
    while thread_states(server.pid) != {"T"}:
        assert time.monotonic() < until_s
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def until(is_true: Callable[[], bool], limit_s: float = LIMIT_S) -> float:
    """Poll for something that another process causes; how long it took."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    async with asyncio.timeout(limit_s):
        while not is_true():  # noqa: ASYNC110 - another process sets it
            await asyncio.sleep(0.001)
    return loop.time() - started_s


def native(transport: SupervisedTransport) -> Any:
    """The client of nats-py under the transport."""
    connection = transport._connection
    assert isinstance(connection, NatsConnection)
    return connection._client


class Ears:
    """Hears `subject` and knows each reconnect."""

    def __init__(self, transport: SupervisedTransport, subject: str) -> None:
        self.transport = transport
        self.subject = subject
        self.heard: list[str] = []
        self.num_reconnects = 0
        transport.subscribe(subject, lambda m: self.heard.append(m.data.decode()))
        transport.on_reconnect(self._count)

    def _count(self) -> None:
        self.num_reconnects += 1

    async def proven(self, word: str) -> None:
        """They hear what is said now."""
        self.transport.publish(self.subject, word.encode())
        await self.transport.barrier(LIMIT_S)
        assert self.heard[-1] == word


# -- connecting -------------------------------------------------------------------------------------------------------


async def refused(url: str, **settings: Any) -> str:
    """Connect in vain, within the limit; the one line that says why."""
    given: dict[str, Any] = {"url": url, "connect_s": LIMIT_S} | settings
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    with pytest.raises(BrokenError) as caught:
        await connect_bus(BusConfig(**given), name="trap")
    assert loop.time() - started_s < CONNECT_S + LATE_S
    text = str(caught.value)
    assert "\n" not in text
    assert "secret" not in text
    return text


def test_wrong_credentials_are_one_clear_line() -> None:
    """SCENARIOS 43: a wrong token, none, and a user instead of a token: at once, and without showing them."""

    async def scenario(server: EmbeddedServer) -> None:
        bare = f"nats://127.0.0.1:{server.port}"
        for settings in ({"token": "secret"}, {}, {"user": "secret", "password": "secret"}):
            assert "wrong credentials" in await refused(bare, **settings)

    run(scenario)


def test_a_port_where_nobody_listens_is_one_clear_line() -> None:
    """nats-py would try it 60 times, 2 s apart (B9); a second server that is there is found."""

    async def scenario(server: EmbeddedServer) -> None:
        url = server.url
        async with connected(server) as transport:
            await server.stop()
            assert "nobody listens there" in await refused(url)
            await server.start()
            await until(lambda: transport.is_connected)
        both = BusConfig(url=f"nats://127.0.0.1:1,{url}", connect_s=LIMIT_S)
        second = await connect_nats(both, name="second")
        await second.aclose()

    run(scenario)


def test_a_server_that_says_nothing_or_isnt_nats_is_one_clear_line() -> None:
    """A port that accepts and is silent ends with the limit, an HTTP server with what it is not."""

    async def scenario(server: EmbeddedServer) -> None:
        open_writers: list[asyncio.StreamWriter] = []

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            open_writers.append(writer)

        async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            open_writers.append(writer)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        nothing = f"no connection within {CONNECT_S:g} s"
        for handler, words, connect_s in ((silent, nothing, CONNECT_S), (http, "INFO", LIMIT_S)):
            async with await asyncio.start_server(handler, "127.0.0.1", 0) as listener:
                port = listener.sockets[0].getsockname()[1]
                assert words in await refused(f"nats://127.0.0.1:{port}", connect_s=connect_s)
                for writer in open_writers:
                    writer.transport.abort()

    run(scenario)


def test_a_server_that_is_slow_at_each_step_has_one_limit_for_all() -> None:
    """nats-py's own limit is for each read: INFO after 2.7 s and never a PONG would take 5.7 s."""

    async def scenario(server: EmbeddedServer) -> None:
        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(2.7)
            writer.write(b'INFO {"max_payload": 1048576}\r\n')
            await reader.read()
            writer.transport.abort()

        loop = asyncio.get_running_loop()

        async def connect() -> None:
            async with await asyncio.start_server(slow, "127.0.0.1", 0) as listener:
                url = f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
                started_s = loop.time()
                with pytest.raises(BrokenError, match="no connection within 3 s"):
                    await connect_bus(BusConfig(url=url, connect_s=3.0), name="trap")
                in_time("the connecting", loop.time() - started_s, 5.5)

        await best_of_async(connect)
        await until(lambda: len(asyncio.all_tasks()) == 1)

    run(scenario)


def test_a_cancelled_connect_leaves_nothing() -> None:
    """No task (checked by `run`), no connection."""

    async def scenario(server: EmbeddedServer) -> None:
        with frozen(server):
            task = asyncio.create_task(connect_nats(BusConfig(url=server.url), name="trap"))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(scenario)


# -- what ends or deafens a client ------------------------------------------------------------------------------------


def test_an_error_that_closes_the_client_for_good_is_survived() -> None:
    """B7: after any `-ERR` nats-py is CLOSED and stays so; the next client has the same subscriptions."""

    async def scenario(server: EmbeddedServer) -> None:
        async with connected(server) as transport:
            ears = Ears(transport, "a")
            await ears.proven("before")
            first = native(transport)
            first._transport.write(b"THIS IS NO COMMAND\r\n")
            await until(lambda: ears.num_reconnects == 1)
            assert first.is_closed
            assert native(transport) is not first
            await ears.proven("after")
            assert ears.heard == ["before", "after"]

    run(scenario)


def test_what_would_close_the_client_is_refused_before() -> None:
    """B7: an over-long subject or reply, and a payload that fits only without what travels with it."""

    async def scenario(server: EmbeddedServer) -> None:
        async with connected(server) as transport:
            ears = Ears(transport, "a")
            with pytest.raises(PayloadTooLargeError, match="subject"):
                transport.publish("s" * 5000, b"")
            with pytest.raises(PayloadTooLargeError, match="subject"):
                transport.publish("a", b"", "r" * 5000)
            with pytest.raises(PayloadTooLargeError):
                transport.publish("a", b"x" * native(transport).max_payload)
            await ears.proven("alive")
            assert ears.num_reconnects == 0

    run(scenario)


def test_a_dead_read_loop_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """B2: a PONG that finds its future finished kills nats-py's read loop, which then says connected, and is deaf."""
    # Nobody looks at it within the test.
    monkeypatch.setattr(_supervised, "WATCHDOG_S", 10 * LIMIT_S)

    async def scenario(server: EmbeddedServer) -> None:
        async with connected(server) as transport:
            ears = Ears(transport, "a")
            await ears.proven("before")
            late: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            late.set_result(True)
            await native(transport)._send_ping(late)
            await until(lambda: ears.num_reconnects == 1)
            await ears.proven("after")

    run(scenario)


def test_raising_connection_handlers_cost_nobody_the_reconnect(caplog: pytest.LogCaptureFixture) -> None:
    """B4, B5: an exception in nats-py's own callbacks ends its reconnecting."""

    async def scenario(server: EmbeddedServer) -> None:
        async with connected(server) as transport:

            def planted() -> None:
                raise RuntimeError("planted")

            transport.on_disconnect(planted)
            transport.on_reconnect(planted)
            ears = Ears(transport, "a")
            await server.restart()
            await until(lambda: ears.num_reconnects == 1)
            await ears.proven("after")

    run(scenario)
    assert sum("planted" in (r.exc_text or "") for r in caplog.records) == 2


def test_drops_of_a_slow_consumer_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """SCENARIOS 55, B23: nothing else tells of them; each message is delivered or counted, the connection lives on."""
    monkeypatch.setattr(_nats, "PENDING_MSGS", 100)

    async def scenario(server: EmbeddedServer) -> None:
        async with connected(server) as near, connected(server) as far:
            heard: list[Message] = []
            far.subscribe("burst", heard.append)
            await far.barrier(LIMIT_S)
            for _ in range(20_000):
                near.publish("burst", b"x")
            await near.barrier(LIMIT_S)
            await until(lambda: len(heard) + far.num_dropped == 20_000)
            assert far.num_dropped > 0
            assert far.is_connected
            assert near.num_dropped == 0

    run(scenario)


# -- a frozen server --------------------------------------------------------------------------------------------------


def test_a_frozen_server_is_noticed_and_found_again() -> None:
    """nats-py's own pings would take 30 s, its defaults 6 minutes."""

    async def scenario(server: EmbeddedServer) -> None:
        async with connected(server) as transport:
            ears = Ears(transport, "a")
            await ears.proven("before")
            with frozen(server):
                with watched(transport):
                    took_s = await until(lambda: not transport.is_connected)
                assert took_s < WATCHDOG_S + LATE_S
                with pytest.raises(BrokenError):
                    transport.publish("a", b"zombie")
            await until(lambda: transport.is_connected)
            await ears.proven("after")
            assert "zombie" not in ears.heard

    run(scenario)


def test_a_frozen_server_with_full_buffers_is_noticed_and_what_waits_is_never_delivered() -> None:
    """B3, B8: nats-py hangs in its flush for ever, and would write the rest when the server wakes up.

    The outbox is bounded: at last a publish is refused. What the kernel took is the server's; what it didn't is gone.
    """

    async def scenario(server: EmbeddedServer) -> None:
        async with connected(server) as transport, connected(server) as other:
            ears = Ears(other, "big")
            await ears.proven("hello")
            numbers: list[int] = []
            other.subscribe("bulk.*", lambda m: numbers.append(int(m.subject.removeprefix("bulk."))))
            await other.barrier(LIMIT_S)
            sent: list[int] = []

            async def fill() -> None:
                for number in range(10_000):
                    transport.publish(f"bulk.{number}", b"x" * 65_536)
                    sent.append(number)
                    if number % 16 == 0:
                        await asyncio.sleep(0)

            with frozen(server):
                with pytest.raises(BrokenError, match="wait to be written"):
                    await fill()
                with watched(transport, other):
                    await until(lambda: not transport.is_connected and not other.is_connected)
            await until(lambda: transport.is_connected and other.is_connected)
            await transport.barrier(LIMIT_S)
            transport.publish("bulk.77777", b"")
            await until(lambda: 77777 in numbers)
            assert len(numbers) < len(sent)

    run(scenario)


def test_closing_is_bounded_when_the_server_is_frozen() -> None:
    """With a full buffer, too; nats-py's close waits for ever (B3)."""

    async def scenario(server: EmbeddedServer) -> None:
        transport = await connect_nats(BusConfig(url=server.url, connect_s=LIMIT_S), name="trap")
        loop = asyncio.get_running_loop()
        with frozen(server):
            for _ in range(200):
                transport.publish("bulk", b"x" * 65_536)
            started_s = loop.time()
            await transport.aclose()
            assert loop.time() - started_s < _supervised.CLOSE_ECHO_S + _supervised.CLOSE_REST_S + LATE_S

    run(scenario)


def test_a_cancelled_close_drops_the_connection_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to wait out the echo."""
    monkeypatch.setattr(_supervised, "CLOSE_ECHO_S", 2 * LIMIT_S)

    async def scenario(server: EmbeddedServer) -> None:
        transport = await connect_nats(BusConfig(url=server.url, connect_s=LIMIT_S), name="trap")
        connection = transport._connection
        loop = asyncio.get_running_loop()
        with frozen(server):
            task = asyncio.create_task(transport.aclose())
            await asyncio.sleep(0.01)
            started_s = loop.time()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert loop.time() - started_s < LIMIT_S
        assert connection is not None
        assert connection.lost.done()
        assert not transport.is_connected

    run(scenario)


# -- restart ----------------------------------------------------------------------------------------------------------


def test_a_stream_over_restarts_is_delivered_in_order_without_duplicates() -> None:
    """A3: what was in flight is lost; nothing comes twice, late or out of order, and each refusal is an error."""

    async def scenario(server: EmbeddedServer) -> None:
        async with connected(server) as near, connected(server) as far:
            numbers: list[int] = []
            far.subscribe("n", lambda m: numbers.append(int(m.data)))
            await far.barrier(LIMIT_S)
            is_done = asyncio.Event()
            refusals: list[int] = []

            async def speak() -> None:
                number = 0
                while not is_done.is_set():
                    number += 1
                    try:
                        near.publish("n", str(number).encode())
                    except BrokenError:
                        refusals.append(number)
                    await asyncio.sleep(0.001)

            speaker = asyncio.create_task(speak())
            for _ in range(3):
                await server.restart()
                await until(lambda: near.is_connected and far.is_connected)
                seen = len(numbers)
                await until(lambda seen=seen: len(numbers) > seen + 20)  # type: ignore[misc]
            is_done.set()
            await speaker
            assert numbers == sorted(set(numbers))
            assert refusals
            assert not set(refusals) & set(numbers)

    run(scenario)


def test_many_publishes_leave_the_loop_its_turns() -> None:
    """A1: nats-py never yields below 2 MiB; here nobody waits longer than a few hundred messages take."""

    async def scenario(server: EmbeddedServer) -> None:
        async with connected(server) as transport:
            loop = asyncio.get_running_loop()
            for number in range(8192):
                transport.publish("n", b"x" * 150, f"r.{number}")
            num_turns = 0
            connection = transport._connection
            assert isinstance(connection, NatsConnection)
            until_s = loop.time() + LIMIT_S
            while connection._outbox and loop.time() < until_s:
                num_turns += 1
                await asyncio.sleep(0)
            assert num_turns >= 8192 // _nats.YIELD_EVERY
            await transport.barrier(LIMIT_S)

    run(scenario)
