"""A worker's own copies of adapters: checked, shared by checksum, bounded, and cleaned."""

import asyncio
import errno
import gc
import io
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlbus.adapter import ADAPTER_FILES, WEIGHTS_FILE, adapter_sum
from rlbus.bus import Bus
from rlbus.errors import BusyError, FaultError
from rlbus.schemas import FaultCode, FolderSource, ObjectSource
from rlbus.workers import disk, lora_files
from rlbus.workers.config import AgentConfig
from rlbus.workers.disk import DiskThreads
from rlbus.workers.lora_files import LoraFiles
from rlbus.workers.lora_testing import config_for, fake_adapter
from tests.unit.workers.lora_stage import threads_end

pytestmark = pytest.mark.unit

NOBODY: frozenset[str] = frozenset()
NO_BUS: Any = None  # only handed to what fetches


def files_of(root: Path, **settings: Any) -> LoraFiles:
    """Copies below `root`, of folders below it."""
    return LoraFiles(config_for(root, **settings), NO_BUS, "w")


def folder_source(folder: Path) -> tuple[FolderSource, str]:
    """A source and the checksum of what is in it."""
    return FolderSource(path=str(folder)), adapter_sum(folder).checksum


def object_source(num_bytes: int = 100, key: str = "5a" * 32) -> ObjectSource:
    """An object in the store."""
    return ObjectSource(bucket="b", key=key, sha256="0" * 64, num_bytes=num_bytes)


def refusal(call: Awaitable[Path]) -> FaultCode:
    """The code with which it is refused."""

    async def main() -> Path:
        return await call

    with pytest.raises(FaultError) as caught:
        asyncio.run(main())
    return caught.value.code


def test_copy_has_the_bytes_and_outlives_a_change_of_the_source(tmp_path: Path) -> None:
    """What the engine reads later is what was checked."""
    source, checksum = folder_source(fake_adapter(tmp_path / "a", "bytes"))
    (tmp_path / "a" / "README.md").write_text("not a part of it")
    files = files_of(tmp_path)
    place = asyncio.run(files.bring(source, checksum, NOBODY))
    assert sorted(p.name for p in place.iterdir()) == sorted(ADAPTER_FILES)
    fake_adapter(tmp_path / "a", "other")
    assert adapter_sum(place).checksum == checksum
    assert asyncio.run(files.bring(source, checksum, NOBODY)) == place


@pytest.mark.parametrize("damage", ["cut off", "other bytes", "a file is missing"])
def test_copy_that_was_damaged_since_is_made_anew(tmp_path: Path, damage: str) -> None:
    """By a power loss, say: what is found under a checksum is compared with it once in the life of a process."""
    source, checksum = folder_source(fake_adapter(tmp_path / "a", "bytes"))
    place = asyncio.run(files_of(tmp_path).bring(source, checksum, NOBODY))
    weights = place / WEIGHTS_FILE
    match damage:
        case "cut off":
            weights.write_bytes(b"")
        case "other bytes":
            weights.write_text("other")
        case _:
            weights.unlink()
    assert asyncio.run(files_of(tmp_path).bring(source, checksum, frozenset({checksum}))) == place
    assert adapter_sum(place).checksum == checksum


def test_copies_that_nobody_uses_go_when_there_is_no_room(tmp_path: Path) -> None:
    """The one that was used longest ago first; never one that is loaded."""
    files = files_of(tmp_path, lora_cache_bytes=350)
    sums = []
    for number in range(4):
        source, checksum = folder_source(fake_adapter(tmp_path / str(number), f"{number}" * 98))
        sums.append(checksum)
        place = asyncio.run(files.bring(source, checksum, frozenset(sums[:1])))
        os.utime(place, (number, number))
    kept = {p.name for p in (tmp_path / "cache" / "w").iterdir()}
    assert kept == {sums[0], sums[2], sums[3]}


def test_adapter_larger_than_all_room_is_refused(tmp_path: Path) -> None:
    """Before a byte is copied."""
    source, checksum = folder_source(fake_adapter(tmp_path / "a", "x" * 1000))
    assert refusal(files_of(tmp_path, lora_cache_bytes=500).bring(source, checksum, NOBODY)) is FaultCode.TOO_LARGE


def test_temporary_folder_goes_with_its_owner_and_so_do_those_of_killed_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living process's is left alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, living = (tmp_path / "tmp" / f"rlbus-loras-{pid}-x" for pid in (ended.pid, os.getppid()))
    for folder in (dead, living):
        folder.mkdir(parents=True)
    files = LoraFiles(AgentConfig(lora_roots=(str(tmp_path),)), NO_BUS, "w")
    source, checksum = folder_source(fake_adapter(tmp_path / "a", "bytes"))
    place = asyncio.run(files.bring(source, checksum, NOBODY))
    assert place.is_dir()
    assert not dead.exists()
    assert living.exists()
    heir = LoraFiles(AgentConfig(lora_roots=(str(tmp_path),)), NO_BUS, "w", before=files)
    del files
    gc.collect()
    assert asyncio.run(heir.bring(source, checksum, NOBODY)) == place
    threads_end()
    del heir
    gc.collect()
    assert not place.parent.exists()


class Gate:
    """Holds who comes through it, in a thread, until it is opened; who comes to it on the loop has waited in vain."""

    def __init__(self) -> None:
        self.is_reached, self.is_open = threading.Event(), threading.Event()
        self.num_on_loop = 0

    def pass_through(self) -> None:
        """Wait there."""
        self.is_reached.set()
        if threading.current_thread() is threading.main_thread():
            self.num_on_loop += 1
        else:
            self.is_open.wait()

    def open(self) -> None:
        """Nobody waits any more; returns when all who did have ended."""
        self.is_open.set()
        threads_end()

    async def leave(self, call: Awaitable[Path]) -> None:
        """Make a call, and take it back once it hangs here."""
        task = asyncio.ensure_future(call)
        while not self.is_reached.is_set():
            await asyncio.sleep(0)
            assert not task.done(), task.result()
        task.cancel()
        await asyncio.wait({task})


@pytest.fixture
def gate() -> Iterator[Gate]:
    """It is open when the test ends."""
    made = Gate()
    yield made
    made.open()


def held(gate: Gate, function: Callable[..., Any], is_held: Callable[..., bool]) -> Callable[..., Any]:
    """The same function, which hangs at the gate for some arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_held(*args):
            gate.pass_through()
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("where", ["adapter_problem", "copy_file"])
def test_copy_whose_caller_has_gone_changes_nothing_when_its_disk_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate, where: str
) -> None:
    """What was loaded since then stays: who asked before didn't know of it."""
    files = files_of(tmp_path, lora_cache_bytes=350)
    late, *others = [folder_source(fake_adapter(tmp_path / name, name * 98)) for name in "abcd"]
    hangs = held(gate, getattr(lora_files, where), lambda path, *_: str(path).startswith(late[0].path))
    monkeypatch.setattr(lora_files, where, hangs)

    async def main() -> None:
        await gate.leave(files.bring(*late, NOBODY))
        in_use: frozenset[str] = NOBODY
        for source, checksum in others:
            await files.bring(source, checksum, in_use)
            in_use |= {checksum}
        gate.open()

    asyncio.run(main())
    assert {path.name for path in (tmp_path / "cache" / "w").iterdir()} == {checksum for _, checksum in others}


def test_room_that_is_made_for_nobody_takes_no_copy_that_is_wanted_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """Who comes next waits for what is going just now, and the rest stays."""
    files = files_of(tmp_path, lora_cache_bytes=350)
    large = folder_source(fake_adapter(tmp_path / "a", "a" * 298))
    others = [folder_source(fake_adapter(tmp_path / name, name * 98)) for name in "bcd"]
    hangs = held(gate, shutil.rmtree, lambda path, *_: path.name == others[0][1])
    monkeypatch.setattr("rlbus.workers.lora_files.shutil.rmtree", hangs)

    async def main() -> None:
        for number, (source, checksum) in enumerate(others):
            os.utime(await files.bring(source, checksum, NOBODY), (number, number))
        await gate.leave(files.bring(*large, NOBODY))
        again = asyncio.ensure_future(files.bring(*others[1], NOBODY))
        await asyncio.sleep(0)
        gate.is_open.set()
        assert adapter_sum(await again).checksum == others[1][1]

    asyncio.run(main())
    gate.open()
    assert {path.name for path in (tmp_path / "cache" / "w").iterdir()} == {checksum for _, checksum in others[1:]}


def test_copies_on_a_disk_that_hangs_cost_the_disk_of_their_sources_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """Weights may lie beside the adapters: what is looked for among the copies counts there."""
    threads = DiskThreads(max_hung=1)
    monkeypatch.setattr(disk.DISK, "run", threads.run)
    files = files_of(tmp_path)
    threads.know(AgentConfig(lora_cache_dir=str(tmp_path / "cache"), lora_roots=(str(tmp_path),)))
    source, checksum = folder_source(fake_adapter(tmp_path / "a", "bytes"))
    monkeypatch.setattr(files, "_has", held(gate, files._has, lambda *_: True))

    async def main() -> None:
        await gate.leave(files.bring(source, checksum, NOBODY))
        assert await threads.run(lambda: "read", str(tmp_path / "step_7")) == "read"
        with pytest.raises(BusyError, match="cache"):
            await files.bring(source, checksum, NOBODY)

    asyncio.run(main())


def fetching(content: str, fails: BaseException | None = None) -> Callable[[Bus, ObjectSource, Path], Awaitable[None]]:
    """A download that puts an adapter with this content there, or fails half way."""

    async def fetch(bus: Bus, source: ObjectSource, folder: Path) -> None:
        assert os.listdir(folder) == []
        fake_adapter(folder, content)
        if fails is not None:
            raise fails

    return fetch


def test_object_is_fetched_once_and_checked(tmp_path: Path) -> None:
    """The second time it is here already."""
    checksum = adapter_sum(fake_adapter(tmp_path / "a", "bytes")).checksum
    files = files_of(tmp_path, fetch_object=fetching("bytes"))
    place = asyncio.run(files.bring(object_source(), checksum, NOBODY))
    again = files_of(tmp_path, fetch_object=fetching("never fetched"))
    assert asyncio.run(again.bring(object_source(), checksum, NOBODY)) == place
    assert adapter_sum(place).checksum == checksum


@pytest.mark.parametrize("way", ["other bytes", "fails", "cancelled"])
def test_fetch_that_goes_wrong_leaves_nothing(tmp_path: Path, way: str) -> None:
    """And the next one can be tried."""
    checksum = adapter_sum(fake_adapter(tmp_path / "a", "bytes")).checksum
    error = {"fails": OSError("gone"), "cancelled": asyncio.CancelledError()}.get(way)
    files = files_of(tmp_path, fetch_object=fetching("others" if way == "other bytes" else "bytes", error))
    with pytest.raises((FaultError, OSError, asyncio.CancelledError)):
        asyncio.run(files.bring(object_source(), checksum, NOBODY))
    threads_end()
    assert list((tmp_path / "cache" / "w").iterdir()) == []


@pytest.mark.parametrize("way", ["fails", "cancelled"])
def test_cache_folder_that_hangs_holds_nobody_up_who_cleans_up_after_a_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate, way: str
) -> None:
    """The end of a call is on the loop, where the worker's heartbeats are."""
    checksum = adapter_sum(fake_adapter(tmp_path / "a", "bytes")).checksum
    error = {"fails": OSError("gone"), "cancelled": asyncio.CancelledError()}[way]
    files = files_of(tmp_path, fetch_object=fetching("bytes", error))
    monkeypatch.setattr("rlbus.workers.lora_files.shutil.rmtree", held(gate, shutil.rmtree, lambda *_: True))
    with pytest.raises((FaultError, asyncio.CancelledError)):
        asyncio.run(files.bring(object_source(), checksum, NOBODY))
    assert gate.num_on_loop == 0
    gate.open()
    assert list((tmp_path / "cache" / "w").iterdir()) == []


def test_object_whose_caller_has_gone_is_put_in_its_place_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """Never after the half of it was removed: the same checksum was compared before, and isn't again."""
    checksum = adapter_sum(fake_adapter(tmp_path / "a", "bytes")).checksum
    files = files_of(tmp_path, fetch_object=fetching("bytes"))
    shutil.rmtree(asyncio.run(files.bring(object_source(), checksum, NOBODY)))
    with monkeypatch.context() as patch:
        patch.setattr(lora_files, "_put", held(gate, lora_files._put, lambda *_: True))
        half = lambda folder, *_, **__: (folder / WEIGHTS_FILE).unlink(missing_ok=True)  # noqa: E731
        patch.setattr("rlbus.workers.lora_files.shutil.rmtree", half)
        asyncio.run(gate.leave(files.bring(object_source(), checksum, NOBODY)))
        gate.open()
    assert adapter_sum(asyncio.run(files.bring(object_source(), checksum, NOBODY))).checksum == checksum


@pytest.mark.parametrize("who", ["room is made", "dropped"])
def test_copy_of_which_only_a_part_could_be_removed_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """That it was compared once says nothing of what is left of it."""
    files = files_of(tmp_path, lora_cache_bytes=150)
    first, second = (folder_source(fake_adapter(tmp_path / name, name * 98)) for name in "ab")
    place = asyncio.run(files.bring(*first, NOBODY))
    with monkeypatch.context() as patch:
        patch.setattr("rlbus.workers.lora_files.shutil.rmtree", lambda *_, **__: (place / WEIGHTS_FILE).unlink(True))
        if who == "dropped":
            files.drop()
        else:
            asyncio.run(files.bring(*second, NOBODY))
    assert place.is_dir()
    assert asyncio.run(files.bring(*first, NOBODY)) == place
    assert adapter_sum(place).checksum == first[1]


def full(*_: Any, **__: Any) -> Any:
    """What a disk without room says."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("what", ["no folder", "half a file", "half an object"])
def test_copy_that_finds_no_room_on_the_disk_is_refused_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The worker's own folder is named, not the source."""
    folder, checksum = folder_source(fake_adapter(tmp_path / "a", "bytes"))
    is_object = what == "half an object"
    source = object_source() if is_object else folder
    files = files_of(tmp_path, fetch_object=full)
    with monkeypatch.context() as patch:
        if what == "no folder":
            patch.setattr(os, "mkdir", full)
        elif what == "half a file":
            patch.setattr(Path, "open", lambda *_: FullFile())
        with pytest.raises(FaultError, match="make room") as caught:
            asyncio.run(files.bring(source, checksum, NOBODY))
    assert caught.value.code is FaultCode.WRONG_STATE
    assert caught.value.fault.detail["path"].startswith(str(tmp_path / "cache"))
    assert asyncio.run(files.bring(folder, checksum, NOBODY)).is_dir()


class FullFile(io.BytesIO):
    """A file on such a disk."""

    def write(self, data: Any, /) -> int:
        """No."""
        return int(full())


def test_object_is_refused_by_a_worker_that_cant_fetch_or_hasnt_the_room(tmp_path: Path) -> None:
    """By its announced size."""
    assert refusal(files_of(tmp_path).bring(object_source(), "0" * 64, NOBODY)) is FaultCode.WRONG_STATE
    small = files_of(tmp_path, fetch_object=fetching("x"), lora_cache_bytes=50)
    assert refusal(small.bring(object_source(), "0" * 64, NOBODY)) is FaultCode.TOO_LARGE


def test_an_object_whose_key_is_no_checksum_is_not_fetched(tmp_path: Path) -> None:
    """It becomes a part of subjects of the bus: a wildcard asks for every object."""

    async def fetch(_: Bus, source: ObjectSource, folder: Path) -> None:
        raise AssertionError(source.key, folder)

    files = files_of(tmp_path, fetch_object=fetch)
    assert refusal(files.bring(object_source(key="*"), "0" * 64, NOBODY)) is FaultCode.BAD_MESSAGE
