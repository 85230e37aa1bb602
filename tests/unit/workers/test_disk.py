"""Folders that callers name, on a disk that hangs: what that costs the process."""

import asyncio
import logging
import os
import re
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import rlbus.workers
from rlbus.errors import BusyError
from rlbus.schemas import FaultCode, FolderSource, Version
from rlbus.testing import hangs, run
from rlbus.workers import disk as disk_module
from rlbus.workers import folder_sums, preconditions
from rlbus.workers.config import AgentConfig
from rlbus.workers.disk import DiskThreads, mounted, place_of, warn_of_absent
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.folder_sums import read_sums
from rlbus.workers.lora_files import LoraFiles
from rlbus.workers.system.testing import Front, on_surface

pytestmark = pytest.mark.unit

DEAD = "/dead/x"
# What is lent a thread of the loop's: on the machine's own files when an engine starts, or on no file.
LENT = {"find_tokenizer", "self._generator.close", "expected_tensors", "expected_draft", "model_tensors"}
LENT |= {"expected_of", "expected_from", "_slim"}
# Or on folders that only rlbus writes in: copies of adapters that a sidecar has left.
LENT |= {"written.wait", "sweep"}


def join_all() -> None:
    """Returns when no thread reads any more."""
    for thread in threading.enumerate():
        if thread.name == "rlbus disk":
            thread.join()


class HungDisk:
    """Whoever looks at DEAD waits until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self._looks = threading.Semaphore(0)

    def look(self, path: Any) -> Any:
        """Stands for `os.path.realpath`, or all that looks deeper."""
        if not str(path).startswith(DEAD):
            return str(path)
        self._looks.release()
        with hangs():
            self.released.wait()
        raise OSError("gone")

    def come_back(self) -> None:
        """From now on nobody hangs; returns when no thread is in it."""
        self.released.set()
        join_all()

    async def hold(self, call: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Make a call; returns once it hangs."""
        task = asyncio.ensure_future(call)
        while not self._looks.acquire(blocking=False):
            await asyncio.sleep(0)
            assert not task.done(), task.result()
        return task

    async def meets(self, call: Coroutine[Any, Any, Any]) -> None:
        """Make a call, and take it back once it hangs."""
        task = await self.hold(call)
        task.cancel()
        await asyncio.wait({task})


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:
    """It comes back when the test ends, and then no thread is in it."""
    found = HungDisk()
    paths = {"realpath": staticmethod(found.look), "join": staticmethod(os.path.join)}
    fake_path = type("os", (), {"path": type("path", (), paths)})
    monkeypatch.setattr(preconditions, "os", fake_path)
    monkeypatch.setattr(folder_sums, "folder_sums", found.look)
    yield found
    found.come_back()


def copy_of(path: str) -> Coroutine[Any, Any, Any]:
    """A worker's copy of an adapter that lies there."""
    bus: Any = None  # only handed to what fetches
    files = LoraFiles(AgentConfig(lora_roots=("/",)), bus, "w")
    return files.bring(FolderSource(path=path), "0" * 64, frozenset())


@pytest.mark.parametrize("use", [copy_of, read_sums])
def test_a_disk_that_hangs_takes_no_thread_that_names_are_looked_up_in(
    hung: HungDisk, use: Callable[[str], Coroutine[Any, Any, Any]]
) -> None:
    """Else a worker that lost the bus finds it no more: `getaddrinfo` waits for such a thread."""

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await hung.meets(use(DEAD))
        try:
            async with asyncio.timeout(30.0):
                assert await asyncio.to_thread(os.getpid) == os.getpid()
        finally:
            hung.come_back()

    asyncio.run(main())


def test_a_weight_root_that_hangs_costs_a_few_threads_and_then_503(
    hung: HungDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often an orchestrator tries; once the disk is back, so is the worker."""
    threads = DiskThreads(max_hung=2)
    monkeypatch.setattr(disk_module.DISK, "run", threads.run)

    async def load(front: Front) -> tuple[int, str]:
        answer = await front.post("/update_weights", {"weight_dir": DEAD}, x_rlbus_limit_s="0.01")
        return answer.status_code, answer.json()["rlbus"]["code"]

    async def scenario(front: Front) -> None:
        await front.post("/pause")
        try:
            assert [await load(front) for _ in range(4)] == [
                (504, FaultCode.DEADLINE),
                (504, FaultCode.DEADLINE),
                (503, FaultCode.BUSY),
                (503, FaultCode.BUSY),
            ]
            await front.post("/resume")
        finally:
            hung.come_back()
        assert (await load(front))[0] == 409

    on_surface(scenario, config=AgentConfig(weight_roots=("/",)))


def test_only_reads_for_nobody_count(hung: HungDisk) -> None:
    """Work that is merely slow, of many workers in one process, isn't refused; what it raises is raised."""

    async def main() -> None:
        threads = DiskThreads(max_hung=1, mounts=lambda: ["/dead"])
        slow = [await hung.hold(threads.run(lambda: hung.look(DEAD), DEAD)) for _ in range(4)]
        assert await threads.run(lambda: "read", "/tmp") == "read"
        await hung.meets(threads.run(lambda: hung.look(DEAD), DEAD))
        with pytest.raises(BusyError, match="/dead/y isn't read: 1 reads on /dead") as refused:
            await threads.run(lambda: "read", "/dead/y")
        assert refused.value.fault.retryable
        hung.come_back()
        assert all(isinstance(found, OSError) for found in await asyncio.gather(*slow, return_exceptions=True))
        assert await threads.run(lambda: "read", "/dead/y") == "read"

    run(main())


def test_a_mount_that_hangs_costs_only_what_lies_on_it(hung: HungDisk) -> None:
    """Whatever else is mounted, or a root or a copies' folder of a worker, is read on."""

    async def main() -> None:
        threads = DiskThreads(max_hung=1, mounts=lambda: ["/", "/dead"])
        threads.know(AgentConfig(weight_roots=("/dead/x/link",), lora_roots=("/loras",), lora_cache_dir="/cache"))
        await hung.meets(threads.run(lambda: hung.look(DEAD), DEAD))
        for path in ("/good/step_1", "/dead/x/link/step_1", "/cache/w", "/deadly", "relative"):
            assert await threads.run(lambda: "read", path) == "read"
        for path in ("/dead", "/dead/x", "//dead/y", "/cache/../dead/y"):
            with pytest.raises(BusyError):
                await threads.run(lambda: "read", path)
        hung.come_back()

    run(main())


def test_a_root_that_is_a_link_to_a_dead_disk_does_not_cost_the_disk_that_it_is_on(hung: HungDisk) -> None:
    """Where it leads can't be asked, so it counts for itself, as does the folder of a worker's copies beside it."""

    async def main() -> None:
        threads = DiskThreads(max_hung=1, mounts=lambda: ["/"])
        threads.know(AgentConfig(weight_roots=(DEAD,), lora_cache_dir="/cache"))
        await hung.meets(threads.run(lambda: hung.look(DEAD), f"{DEAD}/step_1"))
        assert await threads.run(lambda: "read", "/cache/w") == "read"
        with pytest.raises(BusyError):
            await threads.run(lambda: "read", f"{DEAD}/step_2")
        hung.come_back()

    run(main())


def test_a_heal_of_a_worker_with_two_roots_goes_on_while_one_of_them_hangs(
    hung: HungDisk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each counts for itself, and the other isn't looked at. The limit ends a read that never does."""
    good = str(tmp_path / "step_1")
    FakeEngine.save(Path(good), Version(step=1))
    threads = DiskThreads(max_hung=1, mounts=lambda: ["/"])
    for name in ("run", "know"):
        monkeypatch.setattr(disk_module.DISK, name, getattr(threads, name))

    async def scenario(front: Front) -> None:
        await front.post("/pause")
        for path, limit_s, status in ((DEAD, 0.01, 504), (DEAD, 0.01, 503), (good, 60.0, 200)):
            answer = await front.post("/update_weights", {"weight_dir": path}, x_rlbus_limit_s=f"{limit_s}")
            assert answer.status_code == status, answer.text
        hung.come_back()

    on_surface(scenario, config=AgentConfig(weight_roots=(DEAD, str(tmp_path))))


def test_what_is_mounted_is_read_from_the_list_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are unescaped; a system without the list has one disk."""
    (tmp_path / "mounts").write_text("overlay / overlay rw 0 0\nnas:/a /mnt/my\\040nas nfs4 rw 0 0\n")
    monkeypatch.setattr(disk_module, "MOUNTS", tmp_path / "mounts")
    assert mounted() == ("/", "/mnt/my nas")
    assert place_of("/mnt/my nas/x", mounted()) == "/mnt/my nas"
    monkeypatch.setattr(disk_module, "MOUNTS", tmp_path / "none")
    assert place_of("/mnt/my nas/x", mounted()) == "/"


def test_workers_read_no_named_folder_in_the_threads_of_the_loop() -> None:
    """By their source: a new read goes through `DiskThreads`, or is listed here with a reason."""
    (root,) = rlbus.workers.__path__
    found = {
        name for path in Path(root).rglob("*.py") for name in re.findall(r"to_thread\(\s*([\w.]+)", path.read_text())
    }
    assert found <= LENT


def test_a_root_that_is_not_there_is_warned_of_and_waited_for(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """By its name, when a worker starts; it is no error, since it may be mounted later."""
    away, there = str(tmp_path / "away"), str(tmp_path)
    config = AgentConfig(weight_roots=(away, there), lora_roots=(away,))

    async def start() -> None:
        warn_of_absent(config)

    with caplog.at_level(logging.WARNING):
        run(start())
        join_all()
    told = {record.getMessage().partition(" is no folder")[0] for record in caplog.records}
    assert told == {f"the weight root {away}", f"the adapter root {away}"}


def test_a_root_that_hangs_keeps_no_worker_from_starting(hung: HungDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the look at it."""
    monkeypatch.setattr("rlbus.workers.disk.os.path.isdir", hung.look)

    async def start() -> None:
        await hung.hold(warned())

    async def warned() -> None:
        warn_of_absent(AgentConfig(weight_roots=(DEAD,)))
        await asyncio.Event().wait()

    asyncio.run(asyncio.wait_for(start(), 30.0))
    hung.come_back()
