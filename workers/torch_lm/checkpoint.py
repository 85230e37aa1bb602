"""Reads the safetensors of a model folder, all or nothing: what is missing or garbled is found before anything is used.

Every tensor is copied out of its file, so that a file that is overwritten later changes nothing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rlbus.errors import ManifestError
from rlbus.schemas import TensorSpec
from rlbus.transfer.flat import dtype_name
from rlbus.transfer.manifest import compare
from rlbus.workers.checkpoint import CheckpointError, accepts, checkpoint_files

T = TypeVar("T")


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
        _read_file(path, found, lambda _, tensor: tensor.clone())
    _compare(folder, expected, [spec_of(name, tensor) for name, tensor in found.items()])
    return found


def check_tensors(folder: Path, expected: Sequence[TensorSpec]) -> None:
    """Find by the headers alone what `read_tensors` would raise: the files are mapped, and their data isn't looked at.

    Raises:
        CheckpointError: as `read_tensors`.
    """
    found: dict[str, TensorSpec] = {}
    for path in checkpoint_files(folder):
        _read_file(path, found, spec_of)
    _compare(folder, expected, tuple(found.values()))


def _compare(folder: Path, expected: Sequence[TensorSpec], found: Sequence[TensorSpec]) -> None:
    try:
        compare(expected, found, accepts=accepts)
    except ManifestError as exc:
        raise CheckpointError(str(folder), exc.fault.message) from exc


def _read_file(path: Path, found: dict[str, T], take: Callable[[str, Tensor], T]) -> None:
    """Add what `take` makes of the tensors of one file, which are mapped, not read. safetensors itself checks that the
    file is as long as its header says.
    """
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in found:
                    raise CheckpointError(str(path), f"tensor {name!r} is in another file too")
                found[name] = take(name, file.get_tensor(name))
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(str(path), f"is no complete safetensors file ({exc})") from exc
