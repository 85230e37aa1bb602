"""A worker's own copies of adapter files: what the engine reads is what was checked, and nobody changes it afterwards.

One folder per checksum. Source folders are read below the worker's adapter roots only, links followed; what comes is
summed up while it is copied, and put in its place only when the checksum is right. Copies that no loaded adapter needs
go, oldest first, when there is no room. The folder is changed under a lock, and only by a call that somebody still
waits for: one that hung in a disk knows neither what is loaded since, nor what it would be in the way of.
"""

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlbus.adapter import (
    ADAPTER_FILES,
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    AdapterError,
    AdapterHash,
    adapter_sum,
    copy_file,
)
from rlbus.bus import Bus
from rlbus.errors import RLBusError, error_from_fault, refused
from rlbus.schemas import FaultCode, FolderSource, LoraSource, ObjectSource
from rlbus.transfer.bounded import start_in_thread
from rlbus.workers.config import AgentConfig
from rlbus.workers.disk import DISK
from rlbus.workers.preconditions import adapter_problem

_log = logging.getLogger("rlbus.workers")

# Prefix of temporary folders; behind it the process that it belongs to.
_PREFIX = "rlbus-loras-"
# Begins the name of a copy that isn't complete.
_PART = "part-"


@dataclass(slots=True)
class _Call:
    """One call of `bring`, and whether somebody still waits for it."""

    checksum: str
    in_use: frozenset[str]
    is_wanted: bool = True

    def check(self) -> None:
        """End the thread that works for nobody."""
        if not self.is_wanted:
            raise _LeftError


class _LeftError(Exception):
    """The caller has gone; nobody hears it."""


class LoraFiles:
    """The copies of one worker. `bring` is called by one mutation at a time.

    With a folder of the configuration they lie below it in one of this worker's own (`who`), and stay until `drop`;
    otherwise in a temporary one that goes with this object, or with the process. What killed processes have left of
    those is removed when the first copy is made. No two workers share a folder, since one doesn't know what the other's
    engine has.
    """

    def __init__(self, config: AgentConfig, bus: Bus, who: str, before: "LoraFiles | None" = None) -> None:
        self._config = config
        self._bus = bus
        self._who = who
        # The folder of an agent that ended while its engine went on, with the object that it goes with.
        self._before = before
        self._folder: Path | None = None if before is None else before._folder
        # Checksums of copies that were compared by this process: what is found may have been cut off by a power loss.
        self._proven: set[str] = set() if before is None else before._proven
        # Held around all that changes the folder, never around a read of a source, and never on the loop.
        self._lock: threading.Lock = threading.Lock() if before is None else before._lock

    async def bring(self, source: LoraSource, checksum: str, in_use: frozenset[str]) -> Path:
        """A folder with the files of `checksum`, from `source` unless they are here already. Those `in_use` stay.

        Raises:
            RefusedError: the source may not be read, is too large, or isn't what its checksum says; or the copy can't
                be written. FaultError: it can't be fetched.
        Cancel: a copy that is being made comes to nothing; what is there of it goes by itself, or when room is needed.
        """
        call = _Call(checksum, in_use)
        try:
            with self._written():
                return await self._bring(source, call)
        finally:
            call.is_wanted = False

    async def _bring(self, source: LoraSource, call: _Call) -> Path:
        """Reads of the source and work among the copies are apart: a disk that hangs costs what lies on it."""
        if isinstance(source, FolderSource):
            await DISK.run(lambda: self._check(source), source.path)
        elif not source.has_good_key:
            raise refused(FaultCode.BAD_MESSAGE, "the key of the adapter's object is no checksum", key=source.key)
        elif self._config.fetch_object is None:
            raise refused(FaultCode.WRONG_STATE, "this worker can't fetch objects; give it a folder", key=source.key)
        place, has = await DISK.run(lambda: self._found(call), self._kept_in)
        if not has:
            await self._make(source, place, call)
        return place

    async def _make(self, source: LoraSource, place: Path, call: _Call) -> None:
        if isinstance(source, FolderSource):
            sizes = await DISK.run(lambda: _sizes(source), source.path)
        else:
            sizes = (source.num_bytes,)
        part = await DISK.run(lambda: self._prepare(sum(sizes), place, call), self._kept_in)
        try:
            if isinstance(source, FolderSource):
                await DISK.run(lambda: _copy(source, sizes, part, call.checksum), source.path)
            else:
                assert self._config.fetch_object is not None, "it was asked for"
                await self._config.fetch_object(self._bus, source, part)
                await DISK.run(lambda: _check_fetched(part, source, call.checksum), self._kept_in)
            await DISK.run(lambda: self._keep(part, place, call), self._kept_in)
        except BaseException:
            # This is on the loop, and it may be this very folder that hangs.
            call.is_wanted = False
            start_in_thread(lambda: self._remove(part), name="rlbus disk")
            raise

    @contextlib.contextmanager
    def _changing(self, call: _Call) -> Iterator[None]:
        """Nobody else changes the folder meanwhile, nor looks whether a copy is there."""
        with self._lock:
            call.check()
            yield

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """A copy that can't be written is a refusal: the engine hasn't heard of it."""
        try:
            yield
        except RLBusError:  # one that is a time-out, too
            raise
        except OSError as exc:
            message = f"the adapter's files can't be kept in {self._kept_in} ({exc.strerror or exc}): make room there"
            raise refused(FaultCode.WRONG_STATE, message, path=self._kept_in) from exc

    @property
    def _kept_in(self) -> str:
        return str(self._folder or self._config.lora_cache_dir or tempfile.gettempdir())

    def drop(self) -> None:
        """Remove all of them: the engine's process has ended, and has no successor under this worker's name. Blocks."""
        folder = self._folder or self._own_folder()
        if folder is not None:
            with self._lock:
                self._proven.clear()
                shutil.rmtree(folder, ignore_errors=True)

    def _own_folder(self) -> Path | None:
        """The one that stays; None: the configuration names no place."""
        return None if self._config.lora_cache_dir is None else Path(self._config.lora_cache_dir, self._who)

    def _found(self, call: _Call) -> tuple[Path, bool]:
        """The place of a copy, and whether it is there."""
        with self._changing(call):
            place = self._place(call.checksum)
            return place, self._has(place)

    def _has(self, place: Path) -> bool:
        """Whether a copy is there, and is what its name says; then it was used just now. A damaged one goes."""
        if not place.is_dir():
            return False
        if place.name not in self._proven:
            if not _is_whole(place):
                _log.warning("%s is no copy of the adapter with that checksum, and is made anew", place)
                shutil.rmtree(place)
                return False
            self._proven.add(place.name)
        os.utime(place)
        return True

    def _check(self, source: FolderSource) -> None:
        if (problem := adapter_problem(source.path, self._config.lora_roots)) is not None:
            raise error_from_fault(problem)

    def _place(self, checksum: str) -> Path:
        if self._folder is None:
            if (folder := self._own_folder()) is not None:
                folder.mkdir(parents=True, exist_ok=True)
                self._folder = folder
            else:
                _sweep(Path(tempfile.gettempdir()))
                self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
                weakref.finalize(self, shutil.rmtree, self._folder, True)
        return self._folder / checksum

    def _prepare(self, num_bytes: int, place: Path, call: _Call) -> Path:
        with self._changing(call):
            self._make_room(num_bytes, call)
            return _new_part(place.parent)

    def _keep(self, part: Path, place: Path, call: _Call) -> None:
        with self._changing(call):
            _put(part, place)
            self._proven.add(place.name)

    def _remove(self, part: Path) -> None:
        with self._lock:
            shutil.rmtree(part, ignore_errors=True)

    def _make_room(self, num_bytes: int, call: _Call) -> None:
        """Drop the copies that were used longest ago until `num_bytes` more fit."""
        limit = self._config.lora_cache_bytes
        if num_bytes > limit:
            message = f"the adapter has {num_bytes} bytes, this worker keeps at most {limit} (lora_cache_bytes)"
            raise refused(FaultCode.TOO_LARGE, message, size_bytes=num_bytes, limit_bytes=limit)
        assert self._folder is not None
        copies = [(p.stat().st_mtime, _size(p), p) for p in self._folder.iterdir() if p.is_dir()]
        total = sum(size for _, size, _ in copies) + num_bytes
        for _, size, path in sorted(copies):
            if total <= limit:
                return
            if path.name not in call.in_use:
                call.check()
                self._proven.discard(path.name)
                shutil.rmtree(path, ignore_errors=True)
                total -= size


def _is_whole(place: Path) -> bool:
    try:
        return adapter_sum(place).checksum == place.name
    except AdapterError:
        return False


def _new_part(folder: Path) -> Path:
    part = folder / f"{_PART}{secrets.token_hex(8)}"
    part.mkdir()
    return part


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _check_sum(found: str, expected: str, where: str) -> None:
    if found != expected:
        message = f"{where} isn't the adapter that was announced: its checksum is {found[:12]}, not {expected[:12]}"
        raise refused(FaultCode.MANIFEST_MISMATCH, message, path=where, found=found, expected=expected)


def _sizes(source: FolderSource) -> tuple[int, ...]:
    try:
        return tuple((Path(source.path) / name).stat().st_size for name in ADAPTER_FILES)
    except OSError as exc:
        message = f"{source.path} is no adapter: {exc.strerror or type(exc).__name__} ({exc.filename})"
        raise refused(FaultCode.MANIFEST_MISMATCH, message, path=source.path) from exc


def _copy(source: FolderSource, sizes: tuple[int, ...], part: Path, checksum: str) -> None:
    hashes = AdapterHash()
    try:
        for name, size in zip(ADAPTER_FILES, sizes, strict=True):
            limit = MAX_CONFIG_BYTES if name == CONFIG_FILE else size
            with (part / name).open("xb") as to:
                hashes.add(name, *copy_file(Path(source.path) / name, to, limit))
    except AdapterError as exc:
        raise refused(FaultCode.MANIFEST_MISMATCH, str(exc), path=exc.path) from exc
    _check_sum(hashes.result().checksum, checksum, source.path)


def _check_fetched(part: Path, source: ObjectSource, checksum: str) -> None:
    try:
        found = adapter_sum(part)
    except AdapterError as exc:
        raise refused(FaultCode.MANIFEST_MISMATCH, f"object {source.key}: {exc.problem}", key=source.key) from exc
    _check_sum(found.checksum, checksum, source.key)


def _put(part: Path, place: Path) -> None:
    """In one step; another process that shares the folder may have been first, with the same bytes."""
    try:
        part.rename(place)
    except OSError:
        if not place.is_dir():
            raise
        shutil.rmtree(part, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed have left."""
    for path in folder.glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and path.stat().st_uid == os.getuid() and not _lives(int(pid)):
                shutil.rmtree(path, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
