"""What a trainer keeps of the versions that it sent, so that a worker that comes back can be given them again.

A snapshot is recorded while its tensors are sent, tensor by tensor from the very same source, and completed when the
update has ended: a disk is waited for while no engine stands still for us, and one that hangs isn't. Invariants: the
last version that was committed is kept, and beside it at most one, which may have been committed or is being recorded;
a snapshot that can't be kept (no memory, a full disk), completed or removed costs the snapshot, never the update.
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
from rlbus.transfer.bounded import run_in_thread
from rlbus.transfer.plane import WeightSource

_log = logging.getLogger("rlbus.trainer")

# How long an update waits for its snapshot to be completed; beyond it that goes on behind the caller's back.
SETTLE_LIMIT_S = 30.0
# The same when nobody knows how the update ended: whoever asked for it has left.
LEFT_LIMIT_S = 5.0


class Recording(Protocol):
    """Takes the tensors of one version, in the order of its specs: in the thread that sends, while others wait for it.

    Only `finish` waits for a disk, in a thread of its own.
    """

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


class Snapshot:
    """One recording, and what became of it. No method raises: what keeps it from being kept is logged.

    `name` is what a log calls it.
    """

    def __init__(self, recording: Recording, name: str) -> None:
        # It has taken something, or all, that `discard` frees.
        self.is_held = False
        # All was taken: `finish` may follow.
        self.is_complete = False
        # What to send from again; set by `finish`, unless workers read it by themselves.
        self.again: WeightSource | None = None
        self._recording = recording
        self._name = name

    def begin(self) -> None:
        """From the first tensor on."""
        self.is_held, self.is_complete = True, False
        self._try(self._recording.begin)

    def take(self, name: str, tensor: Any) -> None:
        """The next tensor; nothing, if one before it couldn't be kept."""
        if self.is_held:
            self._try(partial(self._recording.take, name, tensor))

    def finish(self) -> None:
        """All were taken. Blocks as long as a disk takes for all of it."""
        self._try(self._finish)

    def discard(self) -> None:
        """Free what it holds. Idempotent."""
        self.is_held, self.is_complete, self.again = False, False, None
        try:
            self._recording.discard()
        except OSError as exc:
            _log.warning("snapshot %s isn't removed: %s", self._name, exc)

    def _finish(self) -> None:
        self.again = self._recording.finish()

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as exc:  # noqa: BLE001 - no memory, a full disk: the update goes on without a snapshot
            _log.error("no snapshot is kept of this version: %s: %s", type(exc).__name__, exc)
            self.discard()


@dataclass(frozen=True, slots=True)
class Kept:
    """One version that can be given again: `request` is the update that it was first sent in."""

    request: UpdateWeights
    specs: tuple[TensorSpec, ...]
    snapshot: Snapshot

    @property
    def source(self) -> WeightSource | None:
        """What to send; None: nothing, or workers read it by themselves."""
        return self.snapshot.again


class Recorded:
    """A source that is recorded as it is read; a WeightSource itself. `in_the_way` is discarded before that begins."""

    def __init__(self, source: WeightSource, snapshot: Snapshot, in_the_way: Sequence[Snapshot] = ()) -> None:
        self.snapshot = snapshot
        self._source = source
        self._in_the_way = list(in_the_way)
        self._passes = 0

    def specs(self) -> tuple[TensorSpec, ...]:
        """As the source."""
        return self._source.specs()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield what the source yields."""
        self._passes += 1
        this = self._passes
        while self._in_the_way:
            self._in_the_way.pop().discard()
        self.snapshot.begin()
        for name, tensor in self._source:
            # A sender that was left behind in the source may come back beside the next one.
            if this == self._passes:
                self.snapshot.take(name, tensor)
            yield name, tensor
        if this == self._passes:
            # Not `finish`: a sender comes to the source's end while the last tensor is still to be sent.
            self.snapshot.is_complete = self.snapshot.is_held


class Snapshots:
    """The snapshots of one trainer. `new_recording` makes one for a version and its specs; `folder` is where they lie,
    if not in memory; `tidy` removes there what processes before this one left, except some versions; `is_stuck` says
    that its disk hangs.
    """

    def __init__(
        self,
        kind: SnapshotKind = SnapshotKind.NONE,
        new_recording: Callable[[Version, Sequence[TensorSpec]], Recording] | None = None,
        folder: Path | None = None,
        tidy: Callable[[Collection[Version]], None] | None = None,
        is_stuck: Callable[[], bool] = lambda: False,
    ) -> None:
        self.kind = kind
        self._is_stuck = is_stuck
        self._tidy = tidy
        self._new_recording = new_recording
        self._folder = folder
        # By version, oldest first.
        self._kept: dict[Version, Kept] = {}
        # What the fleet has, as far as our updates tell.
        self._committed: Version | None = None
        # The one that was begun last.
        self._last: Snapshot | None = None

    def offer(self, version: Version, inbox: str | None) -> SnapshotOffer:
        """What an update to `version` says of it: nothing, if it can't be recorded as it is."""
        if self._is_stuck():
            return SnapshotOffer()
        path = None if self._folder is None else str(self._folder / str(version))
        return SnapshotOffer(kind=self.kind, inbox=inbox if self.kind is SnapshotKind.MEMORY else None, path=path)

    def record(self, request: UpdateWeights, source: WeightSource, specs: Sequence[TensorSpec]) -> WeightSource:
        """What to send in place of `source`. When it is first read, at most one other version stays."""
        if self._new_recording is None:
            return source
        self._drop_freed()
        name = str(request.version if self._folder is None else self._folder / str(request.version))
        self._last = Snapshot(self._new_recording(request.version, specs), name)
        spared = to_spare(tuple(self._kept), self._committed)
        return Recorded(source, self._last, [kept.snapshot for v, kept in self._kept.items() if v != spared])

    async def settle(
        self, request: UpdateWeights, source: WeightSource, specs: tuple[TensorSpec, ...], status: OpStatus | None
    ) -> None:
        """The update has ended so (None: nobody knows); `source` is what was sent. Complete and keep it, and forget
        what it ends. Takes as long as the disk does, at most SETTLE_LIMIT_S; LEFT_LIMIT_S if nobody knows.

        Cancel: it is completed, and what is to be forgotten is, in a thread.
        """
        if not isinstance(source, Recorded):
            return
        is_committed = status in (OpStatus.OK, OpStatus.PARTIAL)
        ended = self._note(Kept(request, specs, source.snapshot), is_committed)
        # In a thread that keeps no process alive. Not awaited here: it goes on when we are cancelled.
        end = partial(self._end, source.snapshot, ended, is_committed)
        ending = asyncio.ensure_future(run_in_thread(end, name="rlbus snapshot"))
        await asyncio.wait({ending}, timeout=LEFT_LIMIT_S if status is None else SETTLE_LIMIT_S)
        if ending.done():
            ending.result()
        else:
            _log.warning("the snapshot of version %s is still being written", request.version)

    def _note(self, sent: Kept, is_committed: bool) -> list[Snapshot]:
        """Keep what was sent, if it was recorded to its end; what has to go."""
        version, ended = sent.request.version, []
        self._drop_freed()
        if sent.snapshot.is_complete:
            # What was kept under the same version before is replaced when this one is finished.
            self._kept.pop(version, None)
            self._kept[version] = sent
        else:
            ended.append(sent.snapshot)
        if is_committed:
            self._committed = version
            ended += [self._kept.pop(v).snapshot for v in tuple(self._kept) if v != version]
        return ended

    def _drop_freed(self) -> None:
        """What made room for another, or couldn't be completed, is kept no more."""
        self._kept = {v: kept for v, kept in self._kept.items() if kept.snapshot.is_held}

    def _end(self, sent: Snapshot, ended: Sequence[Snapshot], is_committed: bool) -> None:
        if sent.is_complete:
            sent.finish()
        for snapshot in ended:
            snapshot.discard()
        # Not beside one that was begun meanwhile, whose files look like those of a process that died.
        if is_committed and self._tidy is not None and sent is self._last:
            try:
                self._tidy(tuple(self._kept))
            except OSError as exc:
                _log.warning("old snapshots stay in %s: %s", self._folder, exc)

    def get(self, version: Version) -> Kept | None:
        """What can be sent again, None if this version isn't kept in memory."""
        kept = self._kept.get(version)
        return None if kept is None or kept.source is None else kept


def to_spare(kept: Sequence[Version], committed: Version | None) -> Version | None:
    """Of what is kept, oldest first, the one that stays beside the next: what the fleet has, else the newest."""
    return committed if committed in kept else next(reversed(kept), None)


def open_snapshots(kind: SnapshotKind | str, folder: Path | str | None, namespace: str) -> Snapshots:
    """What a user asked for: "none", "memory", or "disk" with a folder.

    There is one trainer per namespace, and versions are its own: in the folder each namespace has one of its name.

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
        from rlbus.transfer.snapshot import MemoryRecording, SnapshotFolder
    except ImportError as exc:
        raise ConfigError("snapshot", kind.value, f'needs torch: pip install "rlbus[torch]" ({exc})') from exc
    if folder is None:
        return Snapshots(kind, lambda _, specs: MemoryRecording(specs))
    where = SnapshotFolder(Path(folder).absolute() / namespace)
    return Snapshots(kind, where.recording, where.path, where.tidy, lambda: where.is_stuck)
