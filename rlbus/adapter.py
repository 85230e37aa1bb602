"""A LoRA adapter as files: which ones belong to it, and the checksum that a name@revision stands for.

Invariant: the checksum depends on the files' bytes alone, not on where they lie or how they travel, so that a trainer,
an object store and every worker compute the same.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rlbus.errors import RLBusError
from rlbus.files import open_file, why

# The files of an adapter as PEFT writes it. Source: PEFT's `save_pretrained`, and what vLLM reads of it. Pickled
# weights (adapter_model.bin) are never read: they are programs.
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
# Largest configuration that is read.
MAX_CONFIG_BYTES = 1 << 20
# Read at a time.
CHUNK_BYTES = 1 << 20


class AdapterError(RLBusError):
    """A folder is no adapter. `path` is the file or folder, `problem` what is wrong with it."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


@dataclass(frozen=True, slots=True)
class AdapterSum:
    """What an adapter's files come to. `checksum` is 64 hex digits."""

    checksum: str
    num_bytes: int


class AdapterHash:
    """Builds an adapter's checksum file by file, in the order of ADAPTER_FILES, from chunks as they come."""

    def __init__(self) -> None:
        self._files: list[tuple[str, int, str]] = []

    def add(self, name: str, num_bytes: int, sha256: str) -> None:
        """One file is complete."""
        self._files.append((name, num_bytes, sha256))

    def result(self) -> AdapterSum:
        """Of all files. The sha256 of their names, sizes and own sha256, as compact JSON."""
        text = json.dumps(self._files, separators=(",", ":"))
        total = sum(num_bytes for _, num_bytes, _ in self._files)
        return AdapterSum(hashlib.sha256(text.encode()).hexdigest(), total)


def adapter_sum(folder: Path) -> AdapterSum:
    """The checksum of an adapter's folder; files that don't belong to an adapter are not looked at.

    Blocks: reads all of it, in chunks of CHUNK_BYTES.

    Raises:
        AdapterError: a file is missing or can't be read, or the configuration is over MAX_CONFIG_BYTES.
    """
    hashes = AdapterHash()
    for name in ADAPTER_FILES:
        hashes.add(name, *copy_file(folder / name, None, MAX_CONFIG_BYTES if name == CONFIG_FILE else None))
    return hashes.result()


def copy_file(path: Path, to: BinaryIO | None, limit_bytes: int | None) -> tuple[int, str]:
    """Read a file in chunks, write them to `to` if there is one; its size and sha256. Blocks, but never for ever.

    Raises:
        AdapterError: it is missing, can't be read, is no regular file (a pipe, a device), has more than `limit_bytes`,
            or more than when it was opened. OSError: `to` can't be written.
    """
    digest, num_bytes = hashlib.sha256(), 0
    for chunk in _chunks(path, limit_bytes):
        num_bytes += len(chunk)
        digest.update(chunk)
        if to is not None:
            to.write(chunk)
    return num_bytes, digest.hexdigest()


def _chunks(path: Path, limit_bytes: int | None) -> Iterator[bytes]:
    num_bytes = 0
    try:
        with open_file(path) as file:
            limit_bytes = os.fstat(file.fileno()).st_size if limit_bytes is None else limit_bytes
            while chunk := file.read(CHUNK_BYTES):
                num_bytes += len(chunk)
                if num_bytes > limit_bytes:
                    raise AdapterError(str(path), f"has more than {limit_bytes} bytes")
                yield chunk
    except OSError as exc:
        raise AdapterError(str(path), why(exc)) from exc
