"""What every store promises (rlbus/_kv.py), in memory and on a real NATS server alike."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import pytest

from rlbus._jetstream import OffError
from rlbus._kv import Entry, Kv, NoStoreError
from rlbus.bus import Bus
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus, kv_there, open_kv
from rlbus.errors import BrokenError, ConfigError, ConflictError, DeadlineError, PayloadTooLargeError
from rlbus.server import EmbeddedServer
from rlbus.testing import MemoryBroker, MemoryKv, MemoryTransport
from tests.tries import best_of_async, in_time

pytestmark = pytest.mark.integration

LIMIT_S = 60.0


class Stage(Protocol):
    """A store that can be opened several times, cut off and brought back."""

    async def open(self) -> Kv:
        """The same bucket over a new connection."""
        ...

    async def cut(self) -> None:
        """Take every connection down; returns when each knows."""
        ...

    async def restore(self) -> None:
        """Bring them back; returns when each knows."""
        ...


class MemoryStage:
    """The store in memory."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.transports: list[MemoryTransport] = []

    async def open(self) -> Kv:
        """See Stage."""
        self.transports.append(self.broker.connect())
        return MemoryKv(self.transports[-1])

    async def cut(self) -> None:
        """See Stage."""
        for transport in self.transports:
            self.broker.disconnect(transport)

    async def restore(self) -> None:
        """See Stage."""
        for transport in self.transports:
            self.broker.reconnect(transport)


class NatsStage:
    """JetStream on a real server, stopped and started again on its port."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.buses: list[Bus] = []

    async def open(self) -> Kv:
        """See Stage."""
        self.buses.append(await connect_bus(BusConfig(url=self.server.url, connect_s=LIMIT_S), name="kv"))
        return await open_kv(self.buses[-1], "contract")

    async def cut(self) -> None:
        """See Stage."""
        await self.server.stop()
        await _until(lambda: not any(b.transport.is_connected for b in self.buses))

    async def restore(self) -> None:
        """See Stage."""
        await self.server.start()
        await _until(lambda: all(b.transport.is_connected for b in self.buses))


async def _until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_true():  # noqa: ASYNC110 - another process sets it
            await asyncio.sleep(0.001)


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
            for bus in stage.buses:
                await bus.aclose()


Play = Callable[[Callable[[Stage], Awaitable[None]]], None]


@pytest.fixture(params=["memory", "nats"])
def play(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Run a scenario on one kind of stage. How long a call may take isn't what it is about."""
    monkeypatch.setattr("rlbus._kv_jetstream.CALL_LIMIT_S", LIMIT_S)

    def run(scenario: Callable[[Stage], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with stage_of(request.param) as stage:
                await scenario(stage)

        asyncio.run(whole())

    return run


def test_what_is_written_is_read_with_its_revision_by_everybody(play: Play) -> None:
    """Create, update, delete; another connection sees each."""

    async def scenario(stage: Stage) -> None:
        near, far = await stage.open(), await stage.open()
        assert await far.get("a.b") is None
        first = await near.create("a.b", b"1")
        assert await far.get("a.b") == Entry(b"1", first)
        second = await far.update("a.b", b"2", first)
        assert await near.get("a.b") == Entry(b"2", second)
        await near.delete("a.b", second)
        assert await far.get("a.b") is None
        assert await near.create("a.b", b"3") > second > first

    play(scenario)


def test_a_write_that_expects_another_revision_changes_nothing(play: Play) -> None:
    """Create over something, update and delete of an older write or of nothing."""

    async def scenario(stage: Stage) -> None:
        kv = await stage.open()
        old = await kv.create("k", b"1")
        new = await kv.update("k", b"2", old)
        attempts: list[Callable[[], Awaitable[object]]] = [
            lambda: kv.create("k", b"x"),
            lambda: kv.update("k", b"x", old),
            lambda: kv.delete("k", old),
            lambda: kv.update("nothing", b"x", new),
            lambda: kv.delete("nothing", new),
        ]
        for attempt in attempts:
            with pytest.raises(ConflictError):
                await attempt()
        assert await kv.get("k") == Entry(b"2", new)
        assert await kv.get("nothing") is None

    play(scenario)


def test_of_many_that_create_at_once_one_wins(play: Play) -> None:
    """Compare-and-set, over several connections."""

    async def scenario(stage: Stage) -> None:
        kvs = [await stage.open() for _ in range(4)]
        for number in range(5):
            tries = [kv.create(f"race.{number}", str(i).encode()) for i, kv in enumerate(kvs)]
            ended = await asyncio.gather(*tries, return_exceptions=True)
            won = [(i, one) for i, one in enumerate(ended) if isinstance(one, int)]
            assert (len(won), sum(isinstance(one, ConflictError) for one in ended)) == (1, 3)
            assert await kvs[0].get(f"race.{number}") == Entry(str(won[0][0]).encode(), won[0][1])

    play(scenario)


def test_a_write_with_a_ttl_ends_by_itself_and_an_update_prolongs_it(play: Play) -> None:
    """A lease: created for 3 s, renewed after 1.8 s, there after 3.6 s, gone soon after 4.8 s, free to be taken.

    A longer one where the machine stands still until that one is over.
    """
    ttls_s = iter((3, 9, 27))

    async def lease(stage: Stage) -> None:
        kv, other = await stage.open(), await stage.open()
        loop, ttl_s = asyncio.get_running_loop(), next(ttls_s)
        key = f"lease{ttl_s}"
        began_s = loop.time()
        first = await kv.create(key, b"me", ttl_s=ttl_s)
        await asyncio.sleep(0.6 * ttl_s)
        renewed_s = loop.time()
        try:
            second = await kv.update(key, b"me", first, ttl_s=ttl_s)
        except ConflictError:
            in_time("the renewal", loop.time() - began_s, ttl_s)
            raise
        await asyncio.sleep(0.6 * ttl_s)
        if await other.get(key) != Entry(b"me", second):
            in_time("the look at it", loop.time() - renewed_s, ttl_s)
            raise AssertionError("it ended before its time")
        began_s = loop.time()
        while await other.get(key) is not None:
            await asyncio.sleep(0.01)
            assert loop.time() - began_s < ttl_s + LIMIT_S
        with pytest.raises(ConflictError):
            await kv.update(key, b"me", second, ttl_s=ttl_s)
        assert await other.create(key, b"other", ttl_s=ttl_s) > second

    async def scenario(stage: Stage) -> None:
        await best_of_async(lambda: lease(stage), 3)

    play(scenario)


def test_keys_are_listed_by_prefix(play: Play) -> None:
    """By whole tokens, sorted, over any connection."""

    async def scenario(stage: Stage) -> None:
        kv = await stage.open()
        for key in ("op.b", "op.a", "ops.c", "version"):
            await kv.create(key, b"x")
        assert await (await stage.open()).keys("op") == ("op.a", "op.b")
        assert await kv.keys("none") == ()

    play(scenario)


def test_a_value_over_the_limit_is_refused_and_nothing_is_written(play: Play) -> None:
    """The connection lives on."""

    async def scenario(stage: Stage) -> None:
        kv = await stage.open()
        with pytest.raises(PayloadTooLargeError):
            await kv.create("big", b"x" * (2 << 20))
        assert await kv.get("big") is None

    play(scenario)


def test_it_survives_a_disconnect_and_says_so_meanwhile(play: Play) -> None:
    """Nothing is written while the server is down; what was there is there afterwards, and revisions go on growing."""

    async def scenario(stage: Stage) -> None:
        kv = await stage.open()
        first = await kv.create("k", b"1")
        await stage.cut()
        with pytest.raises((BrokenError, DeadlineError)):
            await kv.update("k", b"2", first)
        await stage.restore()
        async with asyncio.timeout(LIMIT_S):
            while True:  # a real server recovers its streams a moment after it takes connections
                try:
                    assert await kv.get("k") == Entry(b"1", first)
                    break
                except (BrokenError, DeadlineError):
                    await asyncio.sleep(0.05)
        assert await kv.update("k", b"3", first) > first

    play(scenario)


def test_a_server_without_jetstream_is_named_with_what_to_do() -> None:
    """One clear line, at once."""

    async def main() -> None:
        async with (
            EmbeddedServer(jetstream=False) as server,
            await connect_bus(BusConfig(url=server.url, connect_s=LIMIT_S), name="kv") as bus,
        ):
            with pytest.raises(ConfigError, match=r"JetStream isn't enabled.*nats-server -js.*--single"):
                await open_kv(bus, "contract")

    asyncio.run(main())


async def why_not(kv: Kv) -> BrokenError:
    """Why nothing can be read; an answer that is late, or lost with the connection, says nothing."""
    while True:
        try:
            await kv.get("k")
        except DeadlineError:
            continue
        except BrokenError as exc:
            return exc
        pytest.fail("there is a store")


@pytest.mark.parametrize("jetstream", [True, False])
def test_that_there_is_no_store_is_told_from_a_store_that_fails(jetstream: bool) -> None:
    """Nobody leads where there is no bucket, or no JetStream; who can't be asked may know of somebody."""

    async def main() -> None:
        async with (
            EmbeddedServer(jetstream=jetstream) as server,
            await connect_bus(BusConfig(url=server.url, connect_s=LIMIT_S), name="kv") as bus,
        ):
            async with asyncio.timeout(LIMIT_S):
                kv = kv_there(bus, "contract")
                assert type(await why_not(kv)) is (NoStoreError if jetstream else OffError)
                await server.stop()
                assert type(await why_not(kv)) is BrokenError
                kv.close()

    asyncio.run(main())
