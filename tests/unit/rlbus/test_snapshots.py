"""What a trainer keeps of what it sent."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlbus._snapshots import MAX_KEPT, Snapshots, open_snapshots
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
        self._fails_at = fails_at

    def take(self, name: str, tensor: Any) -> None:
        """Fail as told."""
        if name == self._fails_at:
            raise OSError(28, "No space left on device")
        super().take(name, tensor)

    def discard(self) -> None:
        """Note it."""
        super().discard()
        self.is_discarded = True


def v(step: int) -> Version:
    return Version(step=step)


class Keeper:
    """A trainer's snapshots, and what was recorded."""

    def __init__(self) -> None:
        self.made: dict[Version, Noted] = {}
        self.fails_at: str | None = None
        self.snapshots = Snapshots(SnapshotKind.MEMORY, self._new)

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
def test_an_update_that_failed_or_that_nobody_can_say_of_leaves_the_one_before(status: OpStatus | None) -> None:
    """The fleet may be at either; there are never more than two."""
    keeper = Keeper()
    keeper.send(1, OpStatus.OK)
    keeper.send(2, status)
    assert keeper.kept() == [1, 2]
    keeper.send(3, status)
    assert len(keeper.kept()) == MAX_KEPT
    keeper.send(4, OpStatus.OK)
    assert keeper.kept() == [4]


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


def test_the_offer_says_where_a_worker_or_the_controller_finds_it(tmp_path: Path) -> None:
    """An inbox, a folder, or nothing."""
    assert Snapshots().offer(v(1), "inbox") == SnapshotOffer()
    assert open_snapshots("memory", None).offer(v(1), "inbox") == SnapshotOffer(kind=SnapshotKind.MEMORY, inbox="inbox")
    offer = SnapshotOffer(kind=SnapshotKind.DISK, path=str(tmp_path / "0.1"))
    assert open_snapshots("disk", tmp_path).offer(v(1), "inbox") == offer


@pytest.mark.parametrize(("kind", "folder"), [("ram", None), ("disk", None), ("memory", "/tmp"), ("none", "/tmp")])
def test_a_setting_that_makes_no_sense_is_refused(kind: str, folder: str | None) -> None:
    """Before anything is connected."""
    with pytest.raises(ConfigError):
        open_snapshots(kind, folder)
