"""Recordings with real tensors: a copy in memory, and a folder that engines load."""

import asyncio
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlbus._snapshots import Snapshots, open_snapshots
from rlbus.controller.testing import request_of
from rlbus.errors import TransferError
from rlbus.schemas import OpStatus, SnapshotKind, SnapshotOffer, TensorSpec, TensorSum, Version
from rlbus.transfer import disk_line
from rlbus.transfer.checksum import tensor_checksum
from rlbus.transfer.folder import DTYPES, header_of
from rlbus.transfer.sender import send
from rlbus.transfer.snapshot import FILE, DiskRecording, MemoryRecording, remove_others
from rlbus.transfer.source import weight_source
from rlbus.transfer.sums import sums_digest
from rlbus.workers.checkpoint import CheckpointError, read_folder
from rlbus.workers.folder_sums import folder_sums
from tests.unit.rlbus.transfer.test_sender import Wire

pytestmark = pytest.mark.unit

V1, V2 = Version(step=1), Version(step=2)
TENSORS: dict[str, Tensor] = {
    "z.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "turned": torch.arange(12, dtype=torch.float64).reshape(3, 4).t(),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "fp8": torch.tensor([1.0, 2.0, 3.0]).to(torch.float8_e4m3fn),
    "flag": torch.tensor([True, False, True]),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 3),
}
SPECS = weight_source(TENSORS).specs()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that gets no CPU for a while isn't taken for a disk that hangs."""
    monkeypatch.setattr(disk_line, "FULL_LIMIT_S", 60.0)


def sums() -> tuple[TensorSum, ...]:
    """What a sender says of them."""
    return tuple(TensorSum(name=name, checksum=tensor_checksum(tensor)) for name, tensor in TENSORS.items())


def written(recording: DiskRecording) -> None:
    """Wait until the disk has done what it was given."""
    recording._line.call(lambda: None, 30.0)


def record(recording: MemoryRecording | DiskRecording, tensors: dict[str, Tensor] = TENSORS) -> None:
    """Take all of them."""
    recording.begin()
    for name, tensor in tensors.items():
        recording.take(name, tensor)


def test_memory_holds_what_was_taken_whatever_becomes_of_the_model() -> None:
    """A copy, not a view; the same bytes in the same order, also of what isn't contiguous."""
    model = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in TENSORS.items()}
    recording = MemoryRecording(SPECS)
    record(recording, model)
    source = recording.finish()
    model["z.weight"].zero_()
    again = dict(source)
    assert (list(again), source.specs()) == (list(TENSORS), SPECS)
    assert tuple(TensorSum(name=n, checksum=tensor_checksum(t)) for n, t in again.items()) == sums()
    assert all(t.is_contiguous() and t.dtype == TENSORS[n].dtype for n, t in again.items())
    recording.discard()
    assert list(source) == []


def test_memory_that_lacks_a_tensor_is_no_snapshot() -> None:
    """The source ended early."""
    recording = MemoryRecording(SPECS)
    record(recording, {"z.weight": TENSORS["z.weight"]})
    with pytest.raises(TransferError, match="1 tensors came, 7 were announced"):
        recording.finish()


def test_a_folder_is_what_safetensors_itself_reads(tmp_path: Path) -> None:
    """Every tensor, bit by bit; and its checksums are those of what was sent."""
    recording = DiskRecording(tmp_path, V1, SPECS)
    record(recording)
    written(recording)
    assert not (tmp_path / "0.1").exists()
    recording.finish()
    found = load_file(tmp_path / "0.1" / FILE)
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert tensor_checksum(found[name]) == tensor_checksum(tensor)
    assert {spec.name: spec for spec in read_folder(tmp_path / "0.1")} == {spec.name: spec for spec in SPECS}
    assert sums_digest(folder_sums(tmp_path / "0.1")) == sums_digest(sums())
    assert [path.name for path in tmp_path.iterdir()] == ["0.1"]
    recording.discard()
    written(recording)
    assert list(tmp_path.iterdir()) == []


def test_no_disk_is_waited_for_between_two_broadcasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow one would hold the whole fleet up until it counts as stalled: the folder is completed after the update."""
    wire, synced = Wire(), []

    def fsync(_: int) -> None:
        synced.append(len(wire.rows))

    monkeypatch.setattr(os, "fsync", fsync)
    snapshots = open_snapshots("disk", tmp_path, "ns")
    request = request_of(version=V1)
    source = snapshots.record(request, weight_source(TENSORS), SPECS)
    send(wire, source, SPECS, 64, lambda _done, _total: None, stream_id="op")
    assert (synced, (tmp_path / "ns" / "0.1").exists()) == ([], False)
    asyncio.run(snapshots.settle(request, source, SPECS, OpStatus.OK))
    assert synced == [len(wire.rows)]
    assert sums_digest(folder_sums(tmp_path / "ns" / "0.1")) == sums_digest(sums())


class FullDisk(io.RawIOBase):
    """Takes nothing, neither at first nor when it is closed."""

    def writable(self) -> bool:
        """It says so."""
        return True

    def write(self, _: Any) -> int:
        """Fail."""
        raise OSError(28, "No space left on device")


def test_a_full_disk_costs_the_snapshot_and_not_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is still in the buffer is refused once more when the file is closed. Everything is sent, nothing stays."""
    weights = {f"layer{i}": torch.full((1024,), float(i)) for i in range(4)}
    specs = weight_source(weights).specs()
    monkeypatch.setattr(Path, "open", lambda *_: io.BufferedWriter(FullDisk()))
    snapshots = open_snapshots("disk", tmp_path, "ns")
    request = request_of(version=V1)
    source = snapshots.record(request, weight_source(weights), specs)
    sent = send(Wire(), source, specs, 4096, lambda _done, _total: None, stream_id="op")
    assert [each.name for each in sent.sums] == list(weights)
    asyncio.run(snapshots.settle(request, source, specs, OpStatus.OK))
    assert list((tmp_path / "ns").iterdir()) == []
    assert "no snapshot is kept of this version: OSError: [Errno 28] No space left on device" in caplog.text


class HungFile(io.RawIOBase):
    """Of a disk that doesn't answer before `heal`."""

    def __init__(self) -> None:
        self._is_well = threading.Event()
        self.is_reached = threading.Event()
        self.num_written = 0
        self.heal = self._is_well.set

    def writable(self) -> bool:
        """It says so."""
        return True

    def write(self, data: Any) -> int:
        """Hang; what comes then is written."""
        self.is_reached.set()
        self._is_well.wait(60.0)
        self.num_written += 1
        return len(data)

    def fileno(self) -> int:
        """None that can be flushed."""
        raise OSError(9, "Bad file descriptor")


@pytest.mark.parametrize(
    ("max_bytes", "why"),
    [
        (3 * 4096, "writing to the disk did not end within 0.05 s: 12288 bytes wait for it"),
        (1 << 20, "an earlier write to the disk did not end within 0.05 s"),
    ],
)
def test_a_disk_that_hangs_costs_the_snapshot_and_no_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, max_bytes: int, why: str
) -> None:
    """Whether or not it all fits into what may wait for it, everything is sent. While it hangs no snapshot is offered,
    begun, or waited for; no folder gets a name when it is well again, and the next snapshot is kept.
    """
    monkeypatch.setattr(disk_line, "FULL_LIMIT_S", 0.05)
    monkeypatch.setattr(disk_line, "POLL_S", 0.01)
    monkeypatch.setattr(disk_line, "MAX_WAITING_BYTES", max_bytes)
    weights = {f"layer{i}": torch.full((1024,), float(i)) for i in range(8)}
    specs = weight_source(weights).specs()
    hung = HungFile()
    snapshots = open_snapshots("disk", tmp_path, "ns")

    class Awaiting:
        """The weights; between the first two the disk has come to hang."""

        def specs(self) -> tuple[TensorSpec, ...]:
            return specs

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for number, pair in enumerate(weight_source(weights)):
                assert number != 1 or hung.is_reached.wait(60.0)
                yield pair

    def update(step: int) -> SnapshotOffer:
        request = request_of(version=Version(step=step))
        offer = snapshots.offer(request.version, None)
        source = snapshots.record(request, Awaiting(), specs)
        sent = send(Wire(), source, specs, 4096, lambda _done, _total: None, stream_id="op")
        assert [each.name for each in sent.sums] == list(weights)
        asyncio.run(snapshots.settle(request, source, specs, OpStatus.OK))
        return offer

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: hung)
        assert update(1).kind is SnapshotKind.DISK
        assert f"no snapshot is kept of this version: DeadlineError: {why}" in caplog.text
        assert [update(step) for step in (2, 3)] == [SnapshotOffer(), SnapshotOffer()]
    # From here on all is well, and how long a thread waits for the CPU is no matter.
    monkeypatch.setattr(disk_line, "FULL_LIMIT_S", 60.0)
    hung.heal()
    assert snapshots._new_recording is not None
    written(snapshots._new_recording(V1, specs))  # type: ignore[arg-type]
    assert (hung.num_written, list((tmp_path / "ns").iterdir())) == (1, [])
    assert update(4).path == str(tmp_path / "ns" / "0.4")
    assert [path.name for path in (tmp_path / "ns").iterdir()] == ["0.4"]


def test_a_folder_that_is_not_complete_never_has_its_name(tmp_path: Path) -> None:
    """Another tensor than announced, or one too few; nothing stays."""
    recording = DiskRecording(tmp_path, V1, SPECS)
    recording.begin()
    with pytest.raises(TransferError, match="'half' isn't what was announced"):
        recording.take("half", TENSORS["half"])
    with pytest.raises(TransferError, match="0 tensors came, 7 were announced"):
        recording.finish()
    recording.discard()
    written(recording)
    assert list(tmp_path.iterdir()) == []


def test_a_send_that_begins_again_writes_the_folder_anew(tmp_path: Path) -> None:
    """And the same version again replaces the folder."""
    recording = DiskRecording(tmp_path, V1, SPECS)
    record(recording, {"z.weight": TENSORS["z.weight"]})
    record(recording)
    recording.finish()
    second = DiskRecording(tmp_path, V1, SPECS)
    record(second)
    second.finish()
    assert sums_digest(folder_sums(tmp_path / "0.1")) == sums_digest(sums())


def test_trainers_of_several_namespaces_share_a_folder_and_a_restarted_one_cleans_its_own(tmp_path: Path) -> None:
    """The versions of one say nothing of another's; what a process before left is gone after the next commit."""

    def update(snapshots: Snapshots, step: int) -> Path:
        request = request_of(version=Version(step=step))
        offer = snapshots.offer(request.version, None)
        source = snapshots.record(request, weight_source(TENSORS), SPECS)
        list(source)
        asyncio.run(snapshots.settle(request, source, SPECS, OpStatus.OK))
        assert offer.path is not None
        return Path(offer.path)

    first = update(open_snapshots("disk", tmp_path, "policy"), 5)
    other = open_snapshots("disk", tmp_path, "reward")
    newest = [update(other, step) for step in (5, 7)][-1]
    assert [sums_digest(folder_sums(path)) for path in (first, newest)] == [sums_digest(sums())] * 2
    again = update(open_snapshots("disk", tmp_path, "policy"), 6)
    assert sorted(path for path in tmp_path.rglob("*.*") if path.is_dir()) == [again, newest]


def test_only_what_recordings_left_is_removed(tmp_path: Path) -> None:
    """Other versions and halves of them; never what somebody else put there."""
    for name in ("0.1", "0.2", "0.3.0123abcd.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).touch()
    (tmp_path / "1.0").mkdir()
    (tmp_path / "1.0" / "config.json").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "0.9").touch()
    remove_others(tmp_path, [V2])
    assert {path.name for path in tmp_path.iterdir()} == {"0.2", "1.0", "notes", "0.9"}
    remove_others(tmp_path / "missing", [V2])


def test_a_folder_that_can_not_be_looked_into_keeps_no_other_from_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user's is named in the log; one that is gone meanwhile isn't."""
    for name in ("0.1", "0.2", "0.3"):
        (tmp_path / name).mkdir()
    look = Path.iterdir

    def iterdir(path: Path) -> Any:
        if path.name == "0.1":
            raise PermissionError(13, "Permission denied", str(path))
        if path.name == "0.2":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return look(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    remove_others(tmp_path, [])
    assert {path.name for path in look(tmp_path)} == {"0.1", "0.2"}
    assert f"old snapshot {tmp_path / '0.1'} stays: [Errno 13] Permission denied" in caplog.text
    assert "0.2" not in caplog.text


def test_a_dtype_that_safetensors_does_not_know_is_named() -> None:
    """complex128, say."""
    spec = TensorSpec(name="odd", dtype="complex128", shape=(1,))
    with pytest.raises(TransferError, match=r"no dtype complex128.*'odd'"):
        header_of([spec])
    assert len(set(DTYPES.values())) == len(DTYPES)


def test_a_truncated_folder_has_no_checksums(tmp_path: Path) -> None:
    """Nor one that is missing or garbled."""
    recording = DiskRecording(tmp_path, V1, SPECS)
    record(recording)
    recording.finish()
    path = tmp_path / "0.1" / FILE
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="is no complete safetensors file"):
        folder_sums(tmp_path / "0.1")
    path.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="is no complete safetensors file"):
        folder_sums(tmp_path / "0.1")
    with pytest.raises(CheckpointError, match="no such folder"):
        folder_sums(tmp_path / "0.2")


def test_the_digest_does_not_depend_on_the_order() -> None:
    """A folder keeps none; a changed sum or name does change it."""
    assert sums_digest(sums()) == sums_digest(tuple(reversed(sums())))
    other = (TensorSum(name="z.weight", checksum="0" * 16), *sums()[1:])
    assert sums_digest(other) != sums_digest(sums())
