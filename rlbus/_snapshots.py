"""What a trainer keeps of the versions that it sent, so that a worker that comes back can be given them again.

A snapshot is recorded while its tensors are sent, tensor by tensor from the very same source, and is complete before
the trainer says that it sent everything: so it is there before anybody is committed. Invariants: the last version that
was committed on somebody is kept, and beside it at most one that may have been; a snapshot that can't be kept (no
memory, a full disk) costs the snapshot, never the update.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlbus.errors import ConfigError
from rlbus.schemas import OpStatus, SnapshotKind, SnapshotOffer, TensorSpec, UpdateWeights, Version
from rlbus.transfer.plane import WeightSource

_log = logging.getLogger("rlbus.trainer")

# Versions that are kept after an update: the last one committed, and one that nobody can say of.
MAX_KEPT = 2


class Recording(Protocol):
    """Takes the tensors of one version, in the order of its specs. Called from the thread that sends."""

    def begin(self) -> None:
        """From the first tensor on; also in place of what was taken before."""
        ...

    def take(self, name: str, tensor: Any) -> None:
        """The next tensor. Raises: whatever keeps it from being kept."""
        ...

    def finish(self) -> WeightSource | None:
        """All were taken. The source to send from again, None where workers read it by themselves."""
        ...

    def discard(self) -> None:
        """Free what it holds. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Kept:
    """One version that can be given again: `request` is the update that it was first sent in."""

    request: UpdateWeights
    specs: tuple[TensorSpec, ...]
    source: WeightSource | None
    recording: Recording


class Recorded:
    """A source that is recorded as it is read; a WeightSource itself. `is_complete` when it was read to its end."""

    def __init__(self, source: WeightSource, recording: Recording) -> None:
        self.is_complete = False
        self.again: WeightSource | None = None
        self.recording = recording
        self._source = source

    def specs(self) -> tuple[TensorSpec, ...]:
        """As the source."""
        return self._source.specs()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield what the source yields."""
        self.is_complete = False
        is_good = self._try(self.recording.begin)
        for name, tensor in self._source:
            is_good = is_good and self._try(partial(self.recording.take, name, tensor))
            yield name, tensor
        self.is_complete = is_good and self._try(self._finish)

    def _finish(self) -> None:
        self.again = self.recording.finish()

    def _try(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except Exception as exc:  # noqa: BLE001 - no memory, a full disk: the update goes on without a snapshot
            _log.error("no snapshot is kept of this version: %s: %s", type(exc).__name__, exc)
            self.recording.discard()
            return False
        return True


class Snapshots:
    """The snapshots of one trainer. `new_recording` makes one for a version and its specs; `folder` is where they lie,
    if not in memory; `tidy` removes there what processes before this one left, except some versions.
    """

    def __init__(
        self,
        kind: SnapshotKind = SnapshotKind.NONE,
        new_recording: Callable[[Version, Sequence[TensorSpec]], Recording] | None = None,
        folder: Path | None = None,
        tidy: Callable[[Collection[Version]], None] | None = None,
    ) -> None:
        self.kind = kind
        self._tidy = tidy
        self._new_recording = new_recording
        self._folder = folder
        # By version, oldest first.
        self._kept: dict[Version, Kept] = {}

    def offer(self, version: Version, inbox: str | None) -> SnapshotOffer:
        """What an update to `version` says of it."""
        path = None if self._folder is None else str(self._folder / str(version))
        return SnapshotOffer(kind=self.kind, inbox=inbox if self.kind is SnapshotKind.MEMORY else None, path=path)

    def record(self, request: UpdateWeights, source: WeightSource, specs: Sequence[TensorSpec]) -> WeightSource:
        """What to send in place of `source`."""
        if self._new_recording is None:
            return source
        return Recorded(source, self._new_recording(request.version, specs))

    async def settle(
        self, request: UpdateWeights, source: WeightSource, specs: tuple[TensorSpec, ...], status: OpStatus | None
    ) -> None:
        """The update has ended so (None: nobody knows); `source` is what was sent. Keep it, and forget what it ends.

        Cancel: what is to be forgotten is, in a thread.
        """
        if not isinstance(source, Recorded):
            return
        version, ended = request.version, []
        if source.is_complete:
            # What was kept under the same version before was replaced when this one was complete.
            self._kept.pop(version, None)
            self._kept[version] = Kept(request, specs, source.again, source.recording)
        else:
            ended.append(source.recording)
        is_committed = status in (OpStatus.OK, OpStatus.PARTIAL)
        while len(self._kept) > MAX_KEPT or (is_committed and set(self._kept) - {version}):
            ended.append(self._kept.pop(next(v for v in self._kept if v != version)).recording)
        await asyncio.to_thread(self._end, ended, is_committed)

    def _end(self, ended: Sequence[Recording], is_committed: bool) -> None:
        for recording in ended:
            recording.discard()
        if is_committed and self._tidy is not None:
            self._tidy(tuple(self._kept))

    def get(self, version: Version) -> Kept | None:
        """What can be sent again, None if this version isn't kept in memory."""
        kept = self._kept.get(version)
        return None if kept is None or kept.source is None else kept


def open_snapshots(kind: SnapshotKind | str, folder: Path | str | None) -> Snapshots:
    """What a user asked for: "none", "memory", or "disk" with a folder.

    Raises: ConfigError: another word, a folder without "disk" or the reverse, or torch isn't installed.
    """
    try:
        kind = SnapshotKind(kind)
    except ValueError as exc:
        raise ConfigError("snapshot", kind, f"use one of {', '.join(SnapshotKind)}") from exc
    if (folder is None) is (kind is SnapshotKind.DISK):
        raise ConfigError("snapshot_dir", folder, 'goes with snapshot="disk", and with nothing else')
    if kind is SnapshotKind.NONE:
        return Snapshots()
    try:
        from rlbus.transfer.snapshot import DiskRecording, MemoryRecording, remove_others
    except ImportError as exc:
        raise ConfigError("snapshot", kind.value, f'needs torch: pip install "rlbus[torch]" ({exc})') from exc
    if folder is None:
        return Snapshots(kind, lambda _, specs: MemoryRecording(specs))
    where = Path(folder).absolute()
    return Snapshots(
        kind, lambda version, specs: DiskRecording(where, version, specs), where, partial(remove_others, where)
    )
