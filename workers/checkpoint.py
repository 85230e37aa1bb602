"""What adapters share about safetensors folders: which files belong to one, what is in them by their headers, and which
dtypes convert. No torch.
"""

import json
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlbus.errors import RLBusError
from rlbus.files import read_file, why
from rlbus.schemas import TensorSpec
from rlbus.transfer.folder import FormatError, SafetensorsFile

INDEX = "model.safetensors.index.json"
# Copying a tensor into a parameter converts between these.
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


class CheckpointError(RLBusError):
    """A folder can't be loaded. `path` is the file or folder, `problem` what is wrong with it."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


def accepts(expected: str, announced: str) -> bool:
    """Whether a tensor of dtype `announced` can be copied into one of `expected`."""
    return expected == announced or (expected in FLOATS and announced in FLOATS)


def checkpoint_files(folder: Path) -> list[Path]:
    """The files that belong to the checkpoint of a folder: those that its index names, else all.

    Raises:
        CheckpointError: no folder, no safetensors in it, an index that is none or that names a file elsewhere.
    """
    if not folder.is_dir():
        raise CheckpointError(str(folder), "there is no such folder")
    index = folder / INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(str(folder), "there is no *.safetensors in it")
        return files
    try:
        names = {str(name) for name in json.loads(read_file(index))["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as exc:
        raise CheckpointError(str(index), f"is no index of a checkpoint ({type(exc).__name__})") from exc
    bad = next((name for name in sorted(names) if Path(name).name != name), None)
    if bad is not None:
        raise CheckpointError(str(index), f"names a file outside of the folder: {bad!r}")
    return [folder / name for name in sorted(names)]


@contextmanager
def open_safetensors(path: Path) -> Iterator[SafetensorsFile]:
    """A file with its header read, until the block ends. What reading in it raises is translated, too.

    Raises:
        CheckpointError: it is missing, no regular file, can't be read, or is truncated or garbled.
    """
    try:
        with SafetensorsFile(path) as file:
            yield file
    except OSError as exc:
        raise CheckpointError(str(path), why(exc)) from exc
    except FormatError as exc:
        raise CheckpointError(str(path), f"is no complete safetensors file ({exc})") from exc


def read_specs(path: Path) -> tuple[TensorSpec, ...]:
    """The tensors of one safetensors file, by its header alone.

    Raises:
        CheckpointError: as `open_safetensors`.
    """
    with open_safetensors(path) as file:
        return tuple(entry.spec for entry in file.entries)


def read_folder(folder: Path) -> tuple[TensorSpec, ...]:
    """Every tensor of a safetensors folder, by the headers alone. Each file is checked to be as long as its header
    says.

    Raises:
        CheckpointError: no folder, no safetensors in it, a file as in `open_safetensors`, or a tensor in two of them.
    """
    found: dict[str, TensorSpec] = {}
    for path in checkpoint_files(folder):
        for spec in read_specs(path):
            check_is_new(path, spec.name, found)
            found[spec.name] = spec
    return tuple(found.values())


def check_is_new(path: Path, name: str, found: Container[str]) -> None:
    """Raise CheckpointError if a tensor of a file was found in another one before."""
    if name in found:
        raise CheckpointError(str(path), f"tensor {name!r} is in another file too")
