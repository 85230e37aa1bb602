"""What a trainer keeps of what it sent."""

import asyncio
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlbus import _snapshots
from rlbus._snapshots import Snapshots, open_snapshots, to_spare
from rlbus.controller.testing import request_of
from rlbus.errors import ConfigError
from rlbus.schemas import OpStatus, SnapshotKind, SnapshotOffer, TensorSpec, UpdateWeights, Version
from rlbus.transfer.fake import FakeRecording, FakeSource

pytestmark = pytest.mark.unit

SPECS = (TensorSpec(name="a", dtype="float32", shape=(2,)), TensorSpec(name="b", dtype="float32", shape=(3,)))


class Noted(FakeRecording):
    """A recording that is looked at afterwards."""

    def __init__(self, specs: Sequence[TensorSpec], fails_at: str | None = None) -> None:
        super().__init__(specs)
        self.is_discarded = False
        self.is_finished = False
        # What `finish` waits for: a slow disk.
        self.disk: threading.Event | None = None
        self._fails_at = fails_at

    def begin(self) -> None:
        """Again whole."""
        super().begin()
        self.is_discarded = False

    def take(self, name: str, tensor: Any) -> None:
        """Fail as told."""
        if self._fails_at in (name, f"discard {name}"):
            raise OSError(28, "No space left on device")
        super().take(name, tensor)

    def finish(self) -> FakeSource:
        """Fail as told, or note it."""
        if self._fails_at == "finish":
            raise OSError(28, "No space left on device")
        if self.disk is not None:
            assert self.disk.wait(60.0)
        self.is_finished = True
        return super().finish()

    def discard(self) -> None:
        """Note it; fail as told."""
        super().discard()
        self.is_discarded = True
        if self._fails_at is not None and self._fails_at.startswith("discard"):
            raise OSError(30, "Read-only file system")


def v(step: int) -> Version:
    return Version(step=step)


def until_written() -> None:
    """Wait for those that nobody waits for."""
    for thread in threading.enumerate():
        if thread.name == "rlbus snapshot":
            thread.join(60.0)


class Keeper:
    """A trainer's snapshots, and what was recorded."""

    def __init__(self) -> None:
        self.made: dict[Version, Noted] = {}
        self.fails_at: str | None = None
        self.tidied: list[Collection[Version]] = []
        self.snapshots = Snapshots(SnapshotKind.MEMORY, self._new, tidy=self.tidied.append)

    def _new(self, version: Version, specs: Sequence[TensorSpec]) -> Noted:
        self.made[version] = Noted(specs, self.fails_at)
        return self.made[version]

    def send(self, step: int, status: OpStatus | None, *, num_read: int = 2, num_times: int = 1) -> list[str]:
        """One update, in which so many tensors are read; what was read."""
        request: UpdateWeights = request_of(version=v(step))
        source = self.snapshots.record(request, FakeSource(SPECS), SPECS)
        for _ in range(num_times):
            reader = iter(source)
            names = [name for _, (name, _) in zip(range(num_read), reader, strict=False)]
            if num_read == len(SPECS):
                assert next(reader, None) is None
        asyncio.run(self.snapshots.settle(request, source, SPECS, status))
        until_written()
        return names

    def kept(self) -> list[int]:
        """The steps that can be sent again."""
        return [version.step for version in self.made if self.snapshots.get(version) is not None]


def test_the_last_version_that_was_committed_is_kept_and_no_other() -> None:
    """Its tensors and its request, to be sent again."""
    keeper = Keeper()
    assert keeper.send(1, OpStatus.OK) == ["a", "b"]
    keeper.send(2, OpStatus.PARTIAL)
    assert keeper.kept() == [2]
    assert keeper.made[v(1)].is_discarded
    kept = keeper.snapshots.get(v(2))
    assert kept is not None
    assert kept.source is not None
    assert (kept.request.version, kept.specs, [name for name, _ in kept.source]) == (v(2), SPECS, ["a", "b"])


@pytest.mark.parametrize("status", [OpStatus.FAILED, None])
def test_what_the_fleet_has_is_kept_however_many_updates_fail(status: OpStatus | None) -> None:
    """And beside it the newest that nobody can say of: the fleet may be at either."""
    keeper = Keeper()
    keeper.send(1, OpStatus.OK)
    keeper.send(2, status)
    assert keeper.kept() == [1, 2]
    keeper.send(3, status)
    assert keeper.kept() == [1, 3]
    assert keeper.made[v(2)].is_discarded
    keeper.send(4, status, num_read=1)
    assert keeper.kept() == [1]
    keeper.send(5, OpStatus.OK)
    assert keeper.kept() == [5]


def test_there_are_never_more_than_two_models() -> None:
    """What has to go for the next one goes before its first tensor is taken, and not before: it may be refused."""
    keeper = Keeper()
    keeper.send(1, OpStatus.OK)
    keeper.send(2, OpStatus.FAILED)
    source = keeper.snapshots.record(request_of(version=v(3)), FakeSource(SPECS), SPECS)
    assert keeper.kept() == [1, 2]
    next(iter(source))
    assert (keeper.kept(), keeper.made[v(2)].is_discarded, keeper.made[v(3)].names) == ([1], True, ["a"])


def test_an_update_that_was_refused_changes_nothing_of_what_is_kept() -> None:
    """Nothing of it was read."""
    keeper = Keeper()
    keeper.send(1, OpStatus.OK)
    keeper.send(2, None)
    keeper.send(3, OpStatus.REFUSED, num_read=0)
    assert keeper.kept() == [1, 2]


def test_what_stays_beside_the_next_is_what_the_fleet_has_and_else_the_newest() -> None:
    """A fleet whose snapshot couldn't be kept may be at the newest."""
    assert to_spare([v(1), v(2)], v(1)) == v(1)
    assert to_spare([v(2), v(3)], v(1)) == v(3)
    assert to_spare([v(2)], None) == v(2)
    assert to_spare([], v(1)) is None


def test_a_snapshot_is_completed_when_the_update_has_ended_and_not_while_it_is_sent() -> None:
    """What reads the source is at its end before it has sent the last tensor."""
    keeper = Keeper()
    request = request_of(version=v(1))
    source = keeper.snapshots.record(request, FakeSource(SPECS), SPECS)
    assert [name for name, _ in source] == ["a", "b"]
    assert not keeper.made[v(1)].is_finished
    asyncio.run(keeper.snapshots.settle(request, source, SPECS, OpStatus.OK))
    assert keeper.made[v(1)].is_finished


def test_a_snapshot_that_can_not_be_completed_is_none(caplog: pytest.LogCaptureFixture) -> None:
    """The update isn't told; the next version is kept again."""
    keeper = Keeper()
    keeper.fails_at = "finish"
    keeper.send(1, OpStatus.OK)
    assert keeper.kept() == []
    assert keeper.made[v(1)].is_discarded
    assert "no snapshot is kept of this version: OSError: [Errno 28] No space left on device" in caplog.text
    keeper.fails_at = None
    keeper.send(2, OpStatus.FAILED)
    assert keeper.kept() == [2]


def test_who_has_left_does_not_wait_for_a_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how the update ended: its snapshot is completed all the same, behind the caller's back."""
    monkeypatch.setattr(_snapshots, "LEFT_LIMIT_S", 0.01)
    keeper = Keeper()

    async def scenario() -> None:
        request = request_of(version=v(1))
        source = keeper.snapshots.record(request, FakeSource(SPECS), SPECS)
        list(source)
        disk = keeper.made[v(1)].disk = threading.Event()
        await keeper.snapshots.settle(request, source, SPECS, None)
        assert keeper.kept() == []
        disk.set()

    asyncio.run(scenario())
    until_written()
    assert keeper.kept() == [1]


def test_a_cancelled_end_is_done_in_the_background_and_tidies_nothing_that_began_since() -> None:
    """The one before goes when this one is complete; a half-written folder of the next looks like a dead process's."""
    keeper = Keeper()
    keeper.send(1, OpStatus.OK)
    assert len(keeper.tidied) == 1

    async def scenario() -> None:
        request = request_of(version=v(2))
        source = keeper.snapshots.record(request, FakeSource(SPECS), SPECS)
        list(source)
        disk = keeper.made[v(2)].disk = threading.Event()
        settling = asyncio.create_task(keeper.snapshots.settle(request, source, SPECS, OpStatus.OK))
        await asyncio.sleep(0)
        settling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await settling
        keeper.snapshots.record(request_of(version=v(3)), FakeSource(SPECS), SPECS)
        disk.set()

    asyncio.run(scenario())
    until_written()
    assert (keeper.kept(), keeper.made[v(1)].is_discarded, len(keeper.tidied)) == ([2], True, 1)


def test_a_disk_that_hangs_keeps_no_process_alive() -> None:
    """What is completed there is completed in a thread that can be left behind."""
    threads: list[threading.Thread] = []
    keeper = Keeper()
    keeper.snapshots._tidy = lambda _: threads.append(threading.current_thread())
    keeper.send(1, OpStatus.OK)
    [thread] = threads
    assert thread.daemon
    assert thread is not threading.main_thread()


def test_what_was_not_sent_whole_is_no_snapshot() -> None:
    """It is freed, and the one before stays."""
    keeper = Keeper()
    keeper.send(1, OpStatus.OK)
    keeper.send(2, OpStatus.FAILED, num_read=1)
    assert keeper.kept() == [1]
    assert keeper.made[v(2)].is_discarded


def test_a_source_that_is_read_again_is_recorded_anew() -> None:
    """An update may send more than once."""
    keeper = Keeper()
    keeper.send(1, OpStatus.OK, num_times=2)
    assert keeper.kept() == [1]


def test_a_sender_that_was_left_behind_in_the_source_adds_nothing_to_what_the_next_one_records() -> None:
    """It comes back when the next one has begun."""
    keeper = Keeper()
    request: UpdateWeights = request_of(version=v(1))
    source = keeper.snapshots.record(request, FakeSource(SPECS), SPECS)
    left_behind, reader = iter(source), iter(source)
    next(left_behind)
    next(reader)
    list(left_behind)
    list(reader)
    asyncio.run(keeper.snapshots.settle(request, source, SPECS, OpStatus.OK))
    assert keeper.kept() == [1]


def test_the_same_version_sent_again_takes_the_place_of_the_first() -> None:
    """What replaced it on the way isn't removed with it."""
    keeper = Keeper()
    keeper.send(1, OpStatus.FAILED)
    first = keeper.made[v(1)]
    keeper.send(1, OpStatus.OK)
    assert keeper.kept() == [1]
    assert not first.is_discarded
    assert not keeper.made[v(1)].is_discarded


def test_a_snapshot_that_can_not_be_kept_costs_the_update_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Everything is sent; the log says why there is none, and what is older is given up, since the fleet has moved."""
    keeper = Keeper()
    keeper.send(1, OpStatus.OK)
    keeper.fails_at = "a"
    assert keeper.send(2, OpStatus.OK) == ["a", "b"]
    assert keeper.kept() == []
    assert keeper.made[v(2)].is_discarded
    assert "no snapshot is kept of this version: OSError: [Errno 28] No space left on device" in caplog.text


@pytest.mark.parametrize("fails_at", ["discard", "discard a"])
def test_a_snapshot_that_can_not_be_removed_costs_the_update_nothing(
    fails_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    """While it is sent or after it; the log says which one lies there."""
    keeper = Keeper()
    keeper.fails_at = fails_at
    assert keeper.send(1, OpStatus.OK) == ["a", "b"]
    assert keeper.send(2, OpStatus.OK) == ["a", "b"]
    assert "snapshot 0.1 isn't removed: [Errno 30] Read-only file system" in caplog.text


def test_the_offer_says_where_a_worker_or_the_controller_finds_it(tmp_path: Path) -> None:
    """An inbox, a folder, or nothing."""
    assert Snapshots().offer(v(1), "inbox") == SnapshotOffer()
    assert open_snapshots("memory", None, "ns").offer(v(1), "inbox") == SnapshotOffer(
        kind=SnapshotKind.MEMORY, inbox="inbox"
    )
    offer = SnapshotOffer(kind=SnapshotKind.DISK, path=str(tmp_path / "ns" / "0.1"))
    assert open_snapshots("disk", tmp_path, "ns").offer(v(1), "inbox") == offer


@pytest.mark.parametrize(("kind", "folder"), [("ram", None), ("disk", None), ("memory", "/tmp"), ("none", "/tmp")])
def test_a_setting_that_makes_no_sense_is_refused(kind: str, folder: str | None) -> None:
    """Before anything is connected."""
    with pytest.raises(ConfigError):
        open_snapshots(kind, folder, "ns")
