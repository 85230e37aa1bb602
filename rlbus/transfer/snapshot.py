"""Recordings of what was sent: a copy in host memory, or a safetensors folder; and the checksums of such a file.

See `rlbus._snapshots`.
"""

import contextlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from rlbus.errors import TransferError
from rlbus.schemas import TensorSpec, TensorSum, Version
from rlbus.transfer.checksum import RunningChecksum
from rlbus.transfer.disk_line import DiskLine
from rlbus.transfer.flat import copy_bytes, new_row
from rlbus.transfer.folder import SafetensorsFile, header_of
from rlbus.transfer.manifest import num_bytes

_log = logging.getLogger("rlbus.trainer")

FILE = "model.safetensors"
# A folder of this kind: a version, or one that is being written.
_NAME = re.compile(r"[0-9]+\.[0-9]+(\.[0-9a-f]{8}\.tmp)?")
CPU = torch.device("cpu")
# What is read or written of a file at once.
CHUNK_BYTES = 4 * 1024 * 1024
# How long the disk may take for all of a snapshot once its last tensor was taken; it is dropped then.
FINISH_LIMIT_S = 300.0


class MemoryRecording:
    """A copy of every tensor in host memory: as much as the model has, from the first tensor on until `discard`."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = tuple(specs)
        self._tensors: list[tuple[str, Tensor]] = []

    def begin(self) -> None:
        """See `Recording`."""
        self._tensors = []

    def take(self, name: str, tensor: Tensor) -> None:
        """See `Recording`."""
        self._tensors.append((name, host_copy(tensor)))

    def finish(self) -> "MemoryRecording":
        """See `Recording`: this itself is the source. Raises: TransferError: a tensor is missing."""
        if len(self._tensors) != len(self._specs):
            raise _incomplete(len(self._tensors), len(self._specs))
        return self

    def discard(self) -> None:
        """See `Recording`."""
        self._tensors = []

    def specs(self) -> tuple[TensorSpec, ...]:
        """What was announced when it was recorded."""
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor), all on the CPU."""
        return iter(self._tensors)


class DiskRecording:
    """A safetensors folder `<folder>/<version>`: written beside it as `<version>.<random>.tmp`, renamed when complete.

    It holds the weights alone, which is all that a reload of an engine reads. The sending thread only copies, part by
    part; `line` (None: one of its own) does all that touches the disk. What is too slow for it is dropped.
    """

    def __init__(
        self, folder: Path, version: Version, specs: Sequence[TensorSpec], line: DiskLine | None = None
    ) -> None:
        self._specs = tuple(specs)
        self._line = DiskLine() if line is None else line
        # Touched by the line's thread alone.
        self._files = _Files(folder, version, self._specs)
        # What was begun last; None before that, and when it was discarded.
        self._attempt: _Attempt | None = None
        self._num_taken = 0

    def begin(self) -> None:
        """See `Recording`. Raises: DeadlineError: the disk hangs over what was put in its line before."""
        self.discard()
        self._line.check()
        self._num_taken = 0
        self._attempt = _Attempt()
        self._line.put(self._attempt.step(self._files.begin))

    def take(self, name: str, tensor: Tensor) -> None:
        """See `Recording`. Raises: TransferError: it isn't what was announced. DeadlineError: the disk takes no more.
        OSError: it couldn't take what came before.
        """
        spec = self._specs[self._num_taken] if self._num_taken < len(self._specs) else None
        size = tensor.numel() * tensor.element_size()
        if self._attempt is None or spec is None or spec.name != name or num_bytes(spec) != size:
            raise TransferError("write a snapshot", f"tensor {name!r} isn't what was announced")
        for offset in range(0, size, CHUNK_BYTES):
            self._attempt.check()
            row = new_row(min(CHUNK_BYTES, size - offset), CPU)
            copy_bytes(tensor, offset, row)
            self._line.put(self._attempt.step(partial(self._files.write, row)), row.numel())
        self._num_taken += 1

    def finish(self) -> None:
        """See `Recording`. Raises: OSError. TransferError: a tensor is missing. DeadlineError."""
        attempt = self._attempt
        if attempt is None or self._num_taken != len(self._specs):
            raise _incomplete(self._num_taken, len(self._specs))
        self._line.call(attempt.step(self._files.finish), FINISH_LIMIT_S)
        attempt.check()

    def discard(self) -> None:
        """See `Recording`. Its place in the line is taken at once, the disk is free when that is reached."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.is_over = True
            self._line.put(self._files.discard)


class _Attempt:
    """What was put into the line since one `begin`: done until something fails, or nobody wants it any more."""

    def __init__(self) -> None:
        self.is_over = False
        self._error: Exception | None = None

    def step(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work`, as a job of a line."""

        def job() -> None:
            if self.is_over:
                return
            try:
                work()
            except Exception as exc:  # noqa: BLE001 - `check` raises it, in the thread that records
                self.is_over, self._error = True, exc

        return job

    def check(self) -> None:
        """Raises what a step raised."""
        if self._error is not None:
            raise self._error


class _Files:
    """The files of one recording. Every method waits for the disk."""

    def __init__(self, folder: Path, version: Version, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self._path = folder / str(version)
        self._tmp = folder / f"{version}.{secrets.token_hex(4)}.tmp"
        self._file: BinaryIO | None = None
        self._is_named = False

    def begin(self) -> None:
        self._tmp.mkdir(parents=True)
        self._file = (self._tmp / FILE).open("wb")
        self._file.write(header_of(self._specs))

    def write(self, row: Tensor) -> None:
        assert self._file is not None
        self._file.write(row.numpy().data)

    def finish(self) -> None:
        assert self._file is not None
        file, self._file = self._file, None
        with file:
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(self._path, ignore_errors=True)
        self._tmp.rename(self._path)
        self._is_named = True

    def discard(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk refuses what is still in the buffer once more
                file.close()
        shutil.rmtree(self._path if self._is_named else self._tmp, ignore_errors=True)
        self._is_named = False


class SnapshotFolder:
    """Where one trainer's recordings lie, and the line of all that touches it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._line = DiskLine()

    @property
    def is_stuck(self) -> bool:
        """Whether its disk hangs: nothing can be recorded."""
        return self._line.is_stuck

    def recording(self, version: Version, specs: Sequence[TensorSpec]) -> DiskRecording:
        """One for the next version."""
        return DiskRecording(self.path, version, specs, self._line)

    def tidy(self, keep: Collection[Version]) -> None:
        """`remove_others`, after all that was put in the line before. Raises: OSError, also as the disk hangs."""
        self._line.check()
        self._line.call(partial(remove_others, self.path, keep), FINISH_LIMIT_S)


def remove_others(folder: Path, keep: Collection[Version]) -> None:
    """Remove what recordings of any process left in `folder`, except those of `keep`. Nothing else is touched.

    One that can't be looked into is logged. Raises: OSError: `folder` itself can't be.
    """
    names = {str(version) for version in keep}
    for path in folder.iterdir() if folder.is_dir() else ():
        if not _NAME.fullmatch(path.name) or path.name in names:
            continue
        try:
            if path.is_dir() and {file.name for file in path.iterdir()} <= {FILE}:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:  # somebody else was faster
            continue
        except OSError as exc:
            _log.warning("old snapshot %s stays: %s", path, exc)


def _incomplete(num_taken: int, num_announced: int) -> TransferError:
    return TransferError("keep a snapshot", f"{num_taken} tensors came, {num_announced} were announced")


def host_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory of its own; of one tensor there is never more than that."""
    row = new_row(tensor.numel() * tensor.element_size(), CPU)
    copy_bytes(tensor, 0, row)
    return row.view(tensor.dtype).view(tensor.shape)


def file_sums(file: SafetensorsFile) -> list[TensorSum]:
    """The checksum of every tensor of a file, in the order of their bytes. Blocks: reads all, in parts.

    Raises: FormatError: the file has become shorter. OSError.
    """
    row = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=CPU)
    sums: list[TensorSum] = []
    for entry in file.entries:
        running = RunningChecksum(CPU)
        for at in range(0, entry.num_bytes, CHUNK_BYTES):
            part = row[: min(entry.num_bytes - at, CHUNK_BYTES)]
            file.read_into(entry, at, part.numpy().data)
            running.update(part)
        sums.append(TensorSum(name=entry.spec.name, checksum=running.hexdigest()))
    return sums
