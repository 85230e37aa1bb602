"""Reads the safetensors of a model folder, all or nothing: what is missing or garbled is found before anything is used.

Every tensor is read into memory of its own, so that a file that is overwritten later changes nothing.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from rlbus.errors import ManifestError
from rlbus.schemas import TensorSpec
from rlbus.transfer.flat import dtype_name
from rlbus.transfer.manifest import compare
from rlbus.transfer.tensor_file import read_tensor
from rlbus.workers.checkpoint import (
    CheckpointError,
    accepts,
    check_is_new,
    checkpoint_files,
    open_safetensors,
    read_folder,
)


def specs_of(module: nn.Module) -> tuple[TensorSpec, ...]:
    """The tensors of a module, by the names of its checkpoint."""
    return tuple(spec_of(name, tensor) for name, tensor in module.state_dict().items())


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """What a manifest says of this tensor."""
    return TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))


def read_tensors(folder: Path, expected: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Every tensor of a folder, by name, in memory of its own.

    Raises:
        CheckpointError: no folder, no safetensors in it, a file that is missing, truncated or garbled, or other tensors
            than `expected` (names the first).
    """
    found: dict[str, Tensor] = {}
    for path in checkpoint_files(folder):
        with open_safetensors(path) as file:
            for entry in file.entries:
                check_is_new(path, entry.spec.name, found)
                found[entry.spec.name] = read_tensor(file, entry)
    _compare(folder, expected, [spec_of(name, tensor) for name, tensor in found.items()])
    return found


def check_tensors(folder: Path, expected: Sequence[TensorSpec]) -> None:
    """Find by the headers alone what `read_tensors` would raise.

    Raises:
        CheckpointError: as `read_tensors`.
    """
    _compare(folder, expected, read_folder(folder))


def _compare(folder: Path, expected: Sequence[TensorSpec], found: Sequence[TensorSpec]) -> None:
    try:
        compare(expected, found, accepts=accepts)
    except ManifestError as exc:
        raise CheckpointError(str(folder), exc.fault.message) from exc
