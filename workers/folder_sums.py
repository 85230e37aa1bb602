"""The checksums of a safetensors folder, by which a worker knows that it is what a trainer sent before it loads it."""

import asyncio
import json
import struct
from io import BufferedReader
from pathlib import Path

import torch

from rlbus.errors import refused
from rlbus.schemas import FaultCode, TensorSum
from rlbus.transfer.checksum import RunningChecksum
from rlbus.transfer.folder import LENGTH, MAX_HEADER_BYTES
from rlbus.workers.checkpoint import CheckpointError, checkpoint_files

# What is read at once.
CHUNK_BYTES = 4 * 1024 * 1024


async def read_sums(path: str) -> tuple[TensorSum, ...]:
    """What an engine's `checkpoint_sums` does: `folder_sums` in a thread. Cancel: the thread reads on.

    Raises:
        ManifestError: the folder can't be read.
    """
    try:
        return await asyncio.to_thread(folder_sums, Path(path))
    except CheckpointError as exc:
        raise refused(FaultCode.MANIFEST_MISMATCH, str(exc), path=exc.path) from exc


def folder_sums(folder: Path) -> tuple[TensorSum, ...]:
    """The checksum of every tensor's bytes (`rlbus.transfer.checksum`). Blocks: reads all of it, in parts.

    Raises:
        CheckpointError: no folder, no safetensors in it, or a file that is missing, truncated or garbled.
    """
    sums: list[TensorSum] = []
    for path in checkpoint_files(folder):
        try:
            with path.open("rb") as file:
                sums.extend(_file_sums(file))
        except OSError as exc:
            raise CheckpointError(str(path), exc.strerror or type(exc).__name__) from exc
        except (struct.error, ValueError, KeyError, AttributeError, TypeError) as exc:
            raise CheckpointError(str(path), f"is no complete safetensors file ({type(exc).__name__})") from exc
    return tuple(sums)


def _file_sums(file: BufferedReader) -> list[TensorSum]:
    (length,) = LENGTH.unpack(file.read(LENGTH.size))
    if length > MAX_HEADER_BYTES:
        raise ValueError("its header has no such length")
    header = json.loads(file.read(length))
    begin = LENGTH.size + length
    row = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    sums: list[TensorSum] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, end = (int(offset) for offset in entry["data_offsets"])
        file.seek(begin + first)
        running = RunningChecksum(row.device)
        left = end - first
        while left > 0:
            part = row[: min(left, CHUNK_BYTES)]
            if file.readinto(part.numpy().data) != part.numel():
                raise ValueError(f"it ends within tensor {name!r}")
            running.update(part)
            left -= part.numel()
        sums.append(TensorSum(name=name, checksum=running.hexdigest()))
    return sums
