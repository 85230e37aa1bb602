"""Weights that give their memory back: kept in a file without a name meanwhile, or not at all.

The engine is one for CPUs, so its weights are host memory themselves; a second copy there would free nothing. The file
is on the disk of the system's temporary folder, and gone with the process, however that ends.
"""

import ctypes
import tempfile
import threading
from collections.abc import Mapping
from typing import IO

import torch
from torch import Tensor


class SleepingTensors:
    """The tensors of one model, awake or asleep. The objects stay the same; their storages shrink to nothing.

    Nothing may read or write the tensors while they sleep. Calls may come from several threads; they wait for each
    other.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in self._tensors.items()}
        self._lock = threading.Lock()
        self._is_asleep = False
        # What they were; None: nothing is kept.
        self._file: IO[bytes] | None = None

    @property
    def num_bytes(self) -> int:
        """What the tensors take when they are awake."""
        return sum(self._sizes.values())

    def sleep(self, *, keeps: bool) -> int:
        """Free them; with `keeps` they are written down before. The bytes that it freed; 0 if they slept already.

        Raises: OSError: the file can't be written; nothing was freed.
        """
        with self._lock:
            if self._is_asleep:
                return 0
            self._file = self._written() if keeps else None
            self._is_asleep = True
            self._shrink()
            return self.num_bytes

    def wake(self) -> int:
        """Take the memory again, with what was kept in it, or with NaN. The bytes that it took; 0 if awake.

        Raises: OSError, RuntimeError: the file can't be read, or there is no memory; they sleep on, nothing is lost.
        """
        with self._lock:
            if not self._is_asleep:
                return 0
            try:
                for name, tensor in self._tensors.items():
                    tensor.untyped_storage().resize_(self._sizes[name])
                self._fill()
            except BaseException:
                self._shrink()
                raise
            self._is_asleep = False
            if self._file is not None:
                self._file.close()
                self._file = None
            return self.num_bytes

    def close(self) -> None:
        """Forget what was kept. Idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _written(self) -> IO[bytes]:
        file = tempfile.TemporaryFile(prefix="rlbus-sleep-")  # noqa: SIM115 - it lives as long as the sleep
        try:
            for tensor in self._tensors.values():
                file.write(_bytes_of(tensor))
            file.flush()
        except BaseException:
            file.close()
            raise
        return file

    def _fill(self) -> None:
        if self._file is None:
            for tensor in self._tensors.values():
                tensor.fill_(torch.nan)
            return
        self._file.seek(0)
        for name, tensor in self._tensors.items():
            # Into the tensor itself: a second copy of the largest would be needed otherwise.
            view = _bytes_of(tensor)
            if self._file.readinto(view) != len(view):  # type: ignore[attr-defined]
                raise OSError(f"the file of sleeping weights ends before {name}")

    def _shrink(self) -> None:
        for tensor in self._tensors.values():
            tensor.untyped_storage().resize_(0)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a dense tensor. Not by numpy: torch never lets a storage shrink that was shown to it."""
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr()))
