"""LoRA adapters in PEFT's format: read, checked against a model, and added to its projections row by row.

Every tensor is read into memory of its own. What the torch engine doesn't apply exactly (DoRA, trained biases, whole
modules, ranks of their own for some layers) is refused, not approximated.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlbus.adapter import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE, AdapterError
from rlbus.files import read_file, why
from rlbus.transfer.tensor_file import read_tensor
from rlbus.workers.checkpoint import CheckpointError, open_safetensors

# Before the names of a checkpoint. Source: PEFT's names of a wrapped model's tensors.
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
# What a configuration may say and still mean plain LoRA.
_REQUIRED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "trainable_token_indices": (None,),
}


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter: by the name of each projection A [rank, in] and B [out, rank], the latter with the scale in it."""

    parts: Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Which rows of a batch have which adapter; those of the base model are in none of the groups."""

    groups: tuple[tuple[Tensor, Adapter], ...]

    @classmethod
    def of(cls, adapters: Sequence[Adapter | None]) -> "LoraBatch | None":
        """From the adapter of each row; None if there is none at all."""
        rows: dict[Adapter, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                rows.setdefault(adapter, []).append(row)
        groups = tuple((torch.tensor(where), adapter) for adapter, where in rows.items())
        return cls(groups) if groups else None

    def add(self, key: str, x: Tensor, out: Tensor) -> Tensor:
        """Add to `out`, the projection `key` of `x` [batch, length, in], what the rows' adapters make of it."""
        for rows, adapter in self.groups:
            part = adapter.parts.get(key)
            if part is not None:
                out[rows] += (x[rows] @ part[0].T) @ part[1].T
        return out


def read_adapter(folder: Path, projections: Mapping[str, tuple[int, int]]) -> Adapter:
    """Read an adapter for a model whose projections have these names and (out, in) sizes. Blocks.

    Raises:
        AdapterError: a file is missing or garbled, or it isn't for this model (names the first tensor).
    """
    rank, scale = _read_config(folder / CONFIG_FILE)
    tensors = _read_tensors(folder / WEIGHTS_FILE)
    parts: dict[str, tuple[Tensor, Tensor]] = {}
    for name in tensors:
        key = name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)
        if name not in (f"{_PREFIX}{key}{_A}", f"{_PREFIX}{key}{_B}") or key not in projections:
            raise AdapterError(str(folder), f"tensor {name!r} belongs to nothing that this model can adapt")
        num_out, num_in = projections[key]
        for half, shape in ((_A, (rank, num_in)), (_B, (num_out, rank))):
            found = tensors.get(f"{_PREFIX}{key}{half}")
            if found is None or tuple(found.shape) != shape:
                has = "is missing" if found is None else f"has shape {tuple(found.shape)}, not {shape}"
                raise AdapterError(str(folder), f"tensor {_PREFIX + key + half!r} {has}")
        parts[key] = (tensors[f"{_PREFIX}{key}{_A}"].float(), tensors[f"{_PREFIX}{key}{_B}"].float() * scale)
    if not parts:
        raise AdapterError(str(folder), "it has no tensors")
    return Adapter(parts)


def _read_config(path: Path) -> tuple[int, float]:
    """Rank and scale."""
    try:
        raw: Any = json.loads(read_file(path, MAX_CONFIG_BYTES))
    except OSError as exc:
        raise AdapterError(str(path), f"can't be read ({why(exc)})") from exc
    except (ValueError, RecursionError) as exc:
        raise AdapterError(str(path), f"can't be read ({type(exc).__name__})") from exc
    if not isinstance(raw, dict):
        raise AdapterError(str(path), "holds no JSON object")
    for name, values in _REQUIRED.items():
        if raw.get(name, values[0]) not in values:
            raise AdapterError(str(path), f"{name}={raw[name]!r} is not supported, only {values[0]!r}")
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise AdapterError(str(path), f"r={rank!r} and lora_alpha={alpha!r} are no rank and scale")
    return rank, alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with open_safetensors(path) as file:
            return {entry.spec.name: read_tensor(file, entry) for entry in file.entries}
    except CheckpointError as exc:
        raise AdapterError(exc.path, exc.problem) from exc
