"""The checksums of a safetensors folder, by which a worker knows that it is what a trainer sent before it loads it."""

from pathlib import Path

from rlbus.errors import refused
from rlbus.schemas import FaultCode, TensorSum
from rlbus.transfer.snapshot import file_sums
from rlbus.workers.checkpoint import CheckpointError, checkpoint_files, open_safetensors
from rlbus.workers.disk import DISK


async def read_sums(path: str) -> tuple[TensorSum, ...]:
    """What an engine's `checkpoint_sums` does: `folder_sums` in a thread. Cancel: the thread reads on.

    Raises:
        ManifestError: the folder can't be read. BusyError: see `DiskThreads.run`.
    """
    try:
        return await DISK.run(lambda: folder_sums(Path(path)), path)
    except CheckpointError as exc:
        raise refused(FaultCode.MANIFEST_MISMATCH, str(exc), path=exc.path) from exc


def folder_sums(folder: Path) -> tuple[TensorSum, ...]:
    """The checksum of every tensor's bytes (`rlbus.transfer.checksum`). Blocks: reads all of it, in parts.

    Raises:
        CheckpointError: no folder, no safetensors in it, or a file that is missing, truncated or garbled.
    """
    sums: list[TensorSum] = []
    for path in checkpoint_files(folder):
        with open_safetensors(path) as file:
            sums.extend(file_sums(file))
    return tuple(sums)
