"""An adapter as one object of the bus's store: put there by who has its folder, fetched by workers that don't.

The object is what a person would call an archive: a header that names the files and their sizes, then their bytes. Its
key is the adapter's checksum, so the same adapter is there once, whoever puts it and however often. Invariants: nothing
here holds more than a few parts in memory; a fetch that fails leaves nothing that anybody takes for an adapter, since
the folder it writes to is thrown away by its owner.
"""

import hashlib
import struct
import threading
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from rlbus._objects import PART_BYTES, Objects
from rlbus.adapter import ADAPTER_FILES, CONFIG_FILE, MAX_CONFIG_BYTES, AdapterError, AdapterHash, adapter_sum
from rlbus.bus import Bus
from rlbus.connecting import open_objects
from rlbus.errors import BrokenError, ConfigError, DeadlineError, MissingError, refused
from rlbus.files import open_file
from rlbus.schemas import FaultCode, ObjectSource
from rlbus.transfer.bounded import run_in_thread, start_in_thread

# Before everything: the length of the header, which is JSON.
_LENGTH = struct.Struct(">I")
MAX_HEADER_BYTES = 4096
# Name of the threads that read and write.
THREAD = "rlbus adapter"


class PackedFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One file in an object, in the order of ADAPTER_FILES. `num_bytes` follow the header, and the files before."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Uploaded:
    """Where an adapter lies now, and the checksum that its name@revision stands for."""

    source: ObjectSource
    checksum: str


async def upload(objects: Objects, namespace: str, folder: Path) -> Uploaded:
    """Put the adapter of `folder` into the store; its files are read twice, in threads, part by part.

    One that is there already is put again, which changes nothing but when it ends.

    Raises: AdapterError: the folder is none, or changed while it was read. What `Objects.put` raises.
    Cancel: parts may be there, which nobody sees, until their TTL.
    """
    checksum = (await run_in_thread(partial(adapter_sum, folder), name=THREAD)).checksum
    digest = hashlib.sha256()

    async def hashed() -> AsyncGenerator[bytes, None]:
        sent = AdapterHash()
        async for piece in pieces_of(folder, sent):
            digest.update(piece)
            yield piece
        if sent.result().checksum != checksum:
            raise AdapterError(str(folder), "its files changed while they were read")

    info = await objects.put(checksum, hashed())
    source = ObjectSource(bucket=namespace, key=checksum, sha256=digest.hexdigest(), num_bytes=info.size_bytes)
    return Uploaded(source, checksum)


async def pieces_of(folder: Path, hashes: AdapterHash) -> AsyncGenerator[bytes, None]:
    """An adapter's folder as the bytes of its object, in pieces of at most PART_BYTES; `hashes` hears of each file.

    Raises: AdapterError: a file is missing, or can't be read. Cancel: leaves nothing.
    """
    sizes = await run_in_thread(lambda: [_size_of(folder / name) for name in ADAPTER_FILES], name=THREAD)
    files = [PackedFile(name, num_bytes) for name, num_bytes in zip(ADAPTER_FILES, sizes, strict=True)]
    header = msgspec.json.encode(files)
    yield _LENGTH.pack(len(header)) + header
    for file in files:
        path, left, digest = folder / file.name, file.num_bytes, hashlib.sha256()
        opened = _File(path, "rb")
        try:
            await run_in_thread(opened.open, name=THREAD)
            while left:
                piece = await run_in_thread(partial(opened.read, min(left, PART_BYTES)), name=THREAD)
                if not piece:
                    raise AdapterError(str(path), "became shorter while it was read")
                left -= len(piece)
                digest.update(piece)
                yield piece
        except OSError as exc:
            raise AdapterError(str(path), exc.strerror or type(exc).__name__) from exc
        finally:
            start_in_thread(opened.close, name=THREAD)
        hashes.add(file.name, file.num_bytes, digest.hexdigest())


async def fetch_object(bus: Bus, source: ObjectSource, folder: Path) -> None:
    """Put the adapter's files into the empty `folder`; what an agent's `AgentConfig.fetch_object` is.

    Raises: FaultError: `manifest_mismatch` (the object is gone, or isn't what `source` says) or `transfer_failed` (the
        store doesn't answer), which may be tried again. OSError: `folder` can't be written.
    Cancel: the folder has a part of it, and is thrown away by its owner.
    """
    try:
        objects = open_objects(bus, source.bucket, is_writer=False)
        try:
            await unpack(objects.get(source.key), source, folder)
        finally:
            objects.close()
    except MissingError as exc:
        raise refused(FaultCode.MANIFEST_MISMATCH, str(exc), key=source.key) from exc
    except (BrokenError, DeadlineError, ConfigError, ConnectionError, TimeoutError) as exc:
        message = f"object {source.key}: {exc}"
        raise refused(FaultCode.TRANSFER_FAILED, message, retryable=True, key=source.key) from exc


async def unpack(parts: AsyncGenerator[bytes, None], source: ObjectSource, folder: Path) -> None:
    """Write the files of an object into `folder`. Cancel: closes `parts`; the folder has a part of it.

    Raises: FaultError `manifest_mismatch`: the bytes aren't what `source` says, or no adapter. OSError. What `parts`
        raises.
    """
    digest, num_bytes = hashlib.sha256(), 0

    async def checked() -> AsyncGenerator[bytes, None]:
        nonlocal num_bytes
        async for part in parts:
            num_bytes += len(part)
            if num_bytes > source.num_bytes:
                raise _mismatch(source, f"it has more than {source.num_bytes} bytes")
            digest.update(part)
            yield part

    try:
        reader = _Reader(checked())
        (length,) = _LENGTH.unpack(await reader.exactly(_LENGTH.size, source))
        if length > MAX_HEADER_BYTES:
            raise _mismatch(source, "it isn't an adapter's: its header has no such length")
        for file in _files_of(await reader.exactly(length, source), source):
            await reader.to_file(folder / file.name, file.num_bytes, source)
        await reader.end(source)
    finally:
        await parts.aclose()
    if (num_bytes, digest.hexdigest()) != (source.num_bytes, source.sha256):
        raise _mismatch(source, f"its checksum is {digest.hexdigest()[:12]}, not {source.sha256[:12]}")


class _Reader:
    """Exactly so many bytes at a time out of a stream of parts."""

    def __init__(self, parts: AsyncIterable[bytes]) -> None:
        self._parts = parts.__aiter__()
        self._rest = b""

    async def exactly(self, num_bytes: int, source: ObjectSource) -> bytes:
        """The next `num_bytes`, few of them."""
        while len(self._rest) < num_bytes:
            self._rest += await self._next(source)
        taken, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return taken

    async def to_file(self, path: Path, num_bytes: int, source: ObjectSource) -> None:
        """The next `num_bytes` into a new file, in threads that can be left behind: its disk may hang."""
        file = _File(path, "xb")
        try:
            await run_in_thread(file.open, name=THREAD)
            while num_bytes:
                part = self._rest or await self._next(source)
                part, self._rest = part[:num_bytes], part[num_bytes:]
                await run_in_thread(partial(file.write, part), name=THREAD)
                num_bytes -= len(part)
        except BaseException:
            start_in_thread(file.close, name=THREAD)
            raise
        await run_in_thread(file.close, name=THREAD)

    async def end(self, source: ObjectSource) -> None:
        """Nothing may follow."""
        if self._rest or await anext(self._parts, b""):
            raise _mismatch(source, "more bytes follow than its header says")

    async def _next(self, source: ObjectSource) -> bytes:
        part = await anext(self._parts, b"")
        if not part:
            raise _mismatch(source, "it ends too early")
        return part


class _File:
    """One that threads read or write, of which one that hangs may be left behind: closing waits for that one."""

    def __init__(self, path: Path, mode: Literal["rb", "xb"]) -> None:
        self._path = path
        self._mode: Literal["rb", "xb"] = mode
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._is_closed = False

    def open(self) -> None:
        """Open or make it, unless it was closed meanwhile. Raises OSError."""
        with self._lock:
            if not self._is_closed:
                self._file = open_file(self._path) if self._mode == "rb" else self._path.open(self._mode)

    def read(self, num_bytes: int) -> bytes:
        """The next ones. Raises OSError."""
        with self._lock:
            return b"" if self._file is None else self._file.read(num_bytes)

    def write(self, part: bytes) -> None:
        """At its end. Raises OSError."""
        with self._lock:
            if self._file is not None:
                self._file.write(part)

    def close(self) -> None:
        """No more is read or written. Idempotent. Raises OSError."""
        with self._lock:
            self._is_closed = True
            file, self._file = self._file, None
            if file is not None:
                file.close()


def _files_of(header: bytes, source: ObjectSource) -> list[PackedFile]:
    try:
        files = msgspec.json.decode(header, type=list[PackedFile])
    except msgspec.MsgspecError as exc:
        raise _mismatch(source, f"it isn't an adapter's: {exc}") from exc
    if tuple(file.name for file in files) != ADAPTER_FILES:
        raise _mismatch(source, f"it isn't an adapter's, which has {' and '.join(ADAPTER_FILES)}")
    sizes = {file.name: file.num_bytes for file in files}
    if min(sizes.values()) < 0 or sizes[CONFIG_FILE] > MAX_CONFIG_BYTES:
        raise _mismatch(source, "a file in it has no such size")
    return files


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as exc:
        raise AdapterError(str(path), exc.strerror or type(exc).__name__) from exc


def _mismatch(source: ObjectSource, problem: str) -> Exception:
    return refused(FaultCode.MANIFEST_MISMATCH, f"object {source.key}: {problem}", key=source.key)
