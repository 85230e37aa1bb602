"""An adapter as an object: what is put is what is fetched, and a bad one is refused before anybody loads it."""

import asyncio
import hashlib
import io
import struct
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlbus.adapter import ADAPTER_FILES, CONFIG_FILE, WEIGHTS_FILE, AdapterError, adapter_sum
from rlbus.adapter_objects import MAX_HEADER_BYTES, fetch_object, unpack, upload
from rlbus.bus import Bus
from rlbus.connecting import open_objects
from rlbus.errors import FaultError
from rlbus.schemas import FaultCode, ObjectSource
from rlbus.testing import Faults, LoopClock, MemoryBroker, run

pytestmark = pytest.mark.unit


def adapter(folder: Path, size_bytes: int = 700_000) -> Path:
    folder.mkdir()
    (folder / CONFIG_FILE).write_text('{"peft_type": "LORA"}')
    (folder / WEIGHTS_FILE).write_bytes(bytes(range(251)) * (size_bytes // 251))
    (folder / "README.md").write_text("not part of it")
    return folder


def emptied(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def one_part(data: bytes) -> AsyncGenerator[bytes, None]:
    yield data


def packed(files: list[tuple[str, bytes]], header: bytes | None = None) -> bytes:
    text = msgspec.json.encode([(name, len(data)) for name, data in files]) if header is None else header
    return struct.pack(">I", len(text)) + text + b"".join(data for _, data in files)


def source_of(data: bytes) -> ObjectSource:
    return ObjectSource(bucket="test", key="5a" * 32, sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))


GOOD = [(CONFIG_FILE, b"{}"), (WEIGHTS_FILE, b"w" * 100)]


def test_a_worker_fetches_what_a_trainer_put(tmp_path: Path) -> None:
    """The files of an adapter and no other, byte by byte; the checksum is that of the folder."""
    folder, to = adapter(tmp_path / "a"), emptied(tmp_path / "b")

    async def scenario() -> None:
        broker = MemoryBroker()
        async with Bus(broker.connect(), clock=LoopClock()) as trainer, Bus(broker.connect()) as worker:
            put = await upload(open_objects(trainer, "test"), "test", folder)
            assert put.checksum == adapter_sum(folder).checksum
            await fetch_object(worker, put.source, to)
            again = await upload(open_objects(trainer, "test"), "test", folder)
            assert again == put

    run(scenario())
    assert sorted(p.name for p in to.iterdir()) == sorted(ADAPTER_FILES)
    assert adapter_sum(to) == adapter_sum(folder)


def test_a_folder_that_hangs_takes_neither_the_loop_nor_a_thread_that_names_are_looked_up_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is done there is done in threads that can be left behind, and nobody waits for their last."""
    data, to, by = packed(GOOD), emptied(tmp_path / "to"), set[tuple[str, bool]]()
    done = threading.Event()

    class File(io.BytesIO):
        """A file that tells in which thread it is used."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self._name = name
            self._tell("opened")

        def _tell(self, what: str) -> None:
            this = threading.current_thread()
            by.add((f"{what} {self._name}", this.daemon and this is not threading.main_thread()))

        def write(self, data: Any, /) -> int:
            self._tell("written")
            if self._name == WEIGHTS_FILE:
                raise OSError("full")
            return len(data)

        def close(self) -> None:
            if not self.closed:
                self._tell("closed")
                super().close()
                if self._name == WEIGHTS_FILE:
                    done.set()

    monkeypatch.setattr(Path, "open", lambda path, *_: File(path.name))
    with pytest.raises(OSError, match="full"):
        asyncio.run(unpack(one_part(data), source_of(data), to))
    assert done.wait(60.0)
    assert by == {(f"{what} {name}", True) for what in ("opened", "written", "closed") for name in ADAPTER_FILES}


def test_a_folder_that_cannot_be_written_is_no_fault_of_the_store(tmp_path: Path) -> None:
    """Another try wouldn't help."""
    folder = adapter(tmp_path / "a")

    async def scenario() -> None:
        broker = MemoryBroker()
        async with Bus(broker.connect(), clock=LoopClock()) as trainer, Bus(broker.connect()) as worker:
            put = await upload(open_objects(trainer, "test"), "test", folder)
            with pytest.raises(FileNotFoundError):
                await fetch_object(worker, put.source, tmp_path / "gone")

    run(scenario())


def test_a_folder_that_changes_while_it_is_read_is_never_seen(tmp_path: Path) -> None:
    """Its checksum was told before: other bytes must not lie under it."""
    folder = adapter(tmp_path / "a")

    async def scenario() -> None:
        async with Bus(MemoryBroker().connect(), clock=LoopClock()) as bus:
            objects = open_objects(bus, "test")
            put = objects.put

            async def late(name: str, pieces: AsyncGenerator[bytes, None], **options: int) -> object:
                (folder / WEIGHTS_FILE).write_bytes(b"other")
                return await put(name, pieces, **options)

            objects.put = late  # type: ignore[method-assign,assignment]
            key = adapter_sum(folder).checksum
            with pytest.raises(AdapterError, match="changed while"):
                await upload(objects, "test", folder)
            assert await objects.look(key) is None

    run(scenario())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (packed(GOOD)[:-1], "ends too early"),
        (packed(GOOD) + b"x", "more bytes follow"),
        (b"\x00", "ends too early"),
        (struct.pack(">I", MAX_HEADER_BYTES + 1), "no such length"),
        (packed([], b"{}"), "isn't an adapter's"),
        (packed(GOOD[:1]), "which has adapter_config.json and adapter_model.safetensors"),
        (packed([("../evil", b""), GOOD[1]]), "which has"),
        (packed(GOOD, msgspec.json.encode([(CONFIG_FILE, -1), (WEIGHTS_FILE, 103)])), "no such size"),
        (packed(GOOD, msgspec.json.encode([(CONFIG_FILE, 2**21), (WEIGHTS_FILE, 103)])), "no such size"),
    ],
)
def test_an_object_that_is_no_adapter_is_refused_by_what_is_wrong_with_it(
    tmp_path: Path, data: bytes, problem: str
) -> None:
    """Whoever can write to the store must not be able to write files elsewhere, or fill the disk."""
    to = emptied(tmp_path / "to")

    async def scenario() -> None:
        with pytest.raises(FaultError, match=problem) as caught:
            await unpack(one_part(data), source_of(data), to)
        assert caught.value.code is FaultCode.MANIFEST_MISMATCH

    run(scenario())
    assert {p.name for p in to.iterdir()} <= set(ADAPTER_FILES)
    assert not (tmp_path / "evil").exists()


def test_other_bytes_than_announced_are_refused(tmp_path: Path) -> None:
    """A wrong checksum, and more bytes than were said, which are not even written."""
    data = packed(GOOD)
    other = data[:-1] + b"x"

    async def scenario() -> None:
        with pytest.raises(FaultError, match="its checksum is"):
            await unpack(one_part(other), source_of(data), emptied(tmp_path / "1"))
        with pytest.raises(FaultError, match=f"more than {len(data)} bytes"):
            await unpack(one_part(data + bytes(10)), source_of(data), emptied(tmp_path / "2"))

    run(scenario())
    assert list((tmp_path / "2").iterdir()) == []


def test_an_object_that_is_gone_or_a_store_that_is_silent_is_a_fault_not_a_hang(tmp_path: Path) -> None:
    """The first won't come back by itself; the second may."""
    source = source_of(b"x")

    async def scenario() -> None:
        broker = MemoryBroker()
        async with Bus(broker.connect(), clock=LoopClock()) as bus:
            with pytest.raises(FaultError, match="isn't in the bus's store") as caught:
                await fetch_object(bus, source, emptied(tmp_path / "1"))
            assert (caught.value.code, caught.value.fault.retryable) == (FaultCode.MANIFEST_MISMATCH, False)
        async with Bus(broker.connect(faults=Faults(drop=1.0)), clock=LoopClock()) as bus:
            with pytest.raises(FaultError) as caught:
                await fetch_object(bus, source, emptied(tmp_path / "2"))
            assert (caught.value.code, caught.value.fault.retryable) == (FaultCode.TRANSFER_FAILED, True)

    run(scenario())
