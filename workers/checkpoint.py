"""What adapters share about safetensors folders: which files belong to one, and which dtypes convert. No torch."""

import json
from pathlib import Path

from rlbus.errors import RLBusError

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
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as exc:
        raise CheckpointError(str(index), f"is no index of a checkpoint ({type(exc).__name__})") from exc
    bad = next((name for name in sorted(names) if Path(name).name != name), None)
    if bad is not None:
        raise CheckpointError(str(index), f"names a file outside of the folder: {bad!r}")
    return [folder / name for name in sorted(names)]
