"""What every store of objects promises (rlbus/_objects.py), in memory and on a real NATS server alike."""

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from rlbus._objects import MAX_PARTS_IN_FLIGHT, PART_BYTES, Objects
from rlbus.bus import Bus
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus, open_objects
from rlbus.errors import BrokenError, ConfigError, DeadlineError, MissingError, PayloadTooLargeError
from rlbus.server import EmbeddedServer
from rlbus.testing import MemoryBroker

pytestmark = pytest.mark.integration

OpenObjects = Callable[[bool], Awaitable[Objects]]
Play = Callable[[Callable[[OpenObjects], Awaitable[None]]], None]


@contextlib.asynccontextmanager
async def stage_of(kind: str) -> AsyncIterator[OpenObjects]:
    """How to open the same store over a new connection; True: as one that writes."""
    buses: list[Bus] = []
    async with contextlib.AsyncExitStack() as stack:
        broker = MemoryBroker(max_payload_bytes=100_000)
        server = None if kind == "memory" else await stack.enter_async_context(EmbeddedServer())

        async def open_store(is_writer: bool) -> Objects:
            if server is None:
                buses.append(Bus(broker.connect()))
            else:
                buses.append(await connect_bus(BusConfig(url=server.url), name="objects"))
            return open_objects(buses[-1], "contract", is_writer=is_writer)

        try:
            yield open_store
        finally:
            for bus in buses:
                await bus.aclose()


@pytest.fixture(params=["memory", "nats"])
def play(request: pytest.FixtureRequest) -> Play:
    """Run a scenario on one kind of store."""

    def run(scenario: Callable[[OpenObjects], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with stage_of(request.param) as open_store:
                await scenario(open_store)

        asyncio.run(whole())

    return run


async def pieces_of(data: bytes, piece_bytes: int = 100_003) -> AsyncIterator[bytes]:
    for start in range(0, len(data), piece_bytes):
        yield data[start : start + piece_bytes]


async def read(objects: Objects, name: str) -> bytes:
    return b"".join([part async for part in objects.get(name)])


def test_what_was_put_is_read_by_another_connection(play: Play) -> None:
    """Bytes come back as they were, in order, whatever the pieces were cut like; also over what was there before."""
    data = bytes(range(256)) * (3 * PART_BYTES // 256) + b"tail"

    async def scenario(open_store: OpenObjects) -> None:
        writer, reader = await open_store(True), await open_store(False)
        assert await writer.look("a") is None
        info = await writer.put("a", pieces_of(data))
        assert (info.size_bytes, await reader.look("a")) == (len(data), info)
        assert await read(reader, "a") == data
        await writer.put("a", pieces_of(data, 7919))
        assert await read(reader, "a") == data

    play(scenario)


def test_an_object_that_was_put_half_way_is_not_there(play: Play) -> None:
    """Whoever puts it fails in the middle: nobody sees it."""

    async def broken() -> AsyncIterator[bytes]:
        yield bytes(2 * PART_BYTES)
        raise RuntimeError("the disk is gone")

    async def scenario(open_store: OpenObjects) -> None:
        objects = await open_store(True)
        with pytest.raises(RuntimeError, match="the disk is gone"):
            await objects.put("a", broken())
        assert await objects.look("a") is None
        with pytest.raises(MissingError, match="object a"):
            await read(objects, "a")

    play(scenario)


def test_one_that_was_deleted_is_gone_and_the_others_stay(play: Play) -> None:
    """Also twice."""

    async def scenario(open_store: OpenObjects) -> None:
        objects = await open_store(True)
        for name in ("a", "ab"):
            await objects.put(name, pieces_of(b"x" * 10))
        await objects.delete("a")
        await objects.delete("a")
        assert await objects.look("a") is None
        assert await read(objects, "ab") == b"x" * 10

    play(scenario)


def test_an_object_ends_by_itself(play: Play) -> None:
    """After its TTL, by the store's own clock."""

    async def scenario(open_store: OpenObjects) -> None:
        objects = await open_store(True)
        await objects.put("a", pieces_of(b"x"), ttl_s=1)
        async with asyncio.timeout(60.0):
            while await objects.look("a") is not None:  # noqa: ASYNC110 - another process ends it
                await asyncio.sleep(0.05)
        assert await objects.look("a") is None

    play(scenario)


def test_an_object_that_is_too_large_is_refused_and_not_seen(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is looked at while it is written, since nobody knows the size before."""
    for module in ("rlbus._objects_jetstream", "rlbus._objects_memory"):
        monkeypatch.setattr(f"{module}.MAX_OBJECT_BYTES", 1_000_000)

    async def scenario(open_store: OpenObjects) -> None:
        objects = await open_store(True)
        with pytest.raises(PayloadTooLargeError, match="1000000"):
            await objects.put("a", pieces_of(bytes(1_500_000)))
        assert await objects.look("a") is None

    play(scenario)


def test_a_reader_that_stops_early_leaves_nothing(play: Play) -> None:
    """Closing the generator ends what it had asked for."""

    async def scenario(open_store: OpenObjects) -> None:
        objects = await open_store(True)
        await objects.put("a", pieces_of(bytes(20 * PART_BYTES)))
        tasks = asyncio.all_tasks()
        parts = objects.get("a")
        async for _ in parts:
            break
        await parts.aclose()
        assert asyncio.all_tasks() == tasks

    play(scenario)


def test_a_large_object_takes_bounded_memory() -> None:
    """Writer and reader in one process stay within a few parts, however large the object is."""
    num_pieces = 64

    async def zeros() -> AsyncIterator[bytes]:
        for _ in range(num_pieces):
            yield bytes(1 << 20)

    async def main() -> int:
        async with stage_of("nats") as open_store:
            objects = await open_store(True)
            tracemalloc.start()
            try:
                await objects.put("a", zeros())
                num_bytes = 0
                async for part in objects.get("a"):
                    num_bytes += len(part)
                assert num_bytes == num_pieces << 20
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    # Each part also lies in the connection's own buffers, on its way in and out.
    assert asyncio.run(main()) < 4 * MAX_PARTS_IN_FLIGHT * PART_BYTES + (4 << 20)


def test_a_server_that_dies_is_an_error_not_a_hang() -> None:
    """In the middle of a read."""

    async def main() -> None:
        async with EmbeddedServer() as server:
            bus = await connect_bus(BusConfig(url=server.url), name="objects")
            objects = open_objects(bus, "contract")
            await objects.put("a", pieces_of(bytes(40 * PART_BYTES)))
            with pytest.raises((BrokenError, DeadlineError)):  # noqa: PT012 - it breaks in the middle
                async for _ in objects.get("a"):
                    await server.stop()
            await bus.aclose()

    asyncio.run(main())


def test_a_server_without_jetstream_is_named_with_what_to_do() -> None:
    """Not a bare time-out."""

    async def main() -> None:
        async with EmbeddedServer(jetstream=False) as server:
            bus = await connect_bus(BusConfig(url=server.url), name="objects")
            with pytest.raises(ConfigError, match="a folder that every worker can read"):
                await open_objects(bus, "contract").put("a", pieces_of(b"x"))
            await bus.aclose()

    asyncio.run(main())
