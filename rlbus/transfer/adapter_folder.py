"""Writes an adapter that a trainer holds in memory as the PEFT folder that workers load. Needs torch."""

import enum
import json
import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from torch import Tensor

from rlbus.adapter import CONFIG_FILE, WEIGHTS_FILE
from rlbus.errors import ConfigError
from rlbus.transfer.flat import byte_view
from rlbus.transfer.folder import header_of
from rlbus.transfer.snapshot import host_copy
from rlbus.transfer.source import checked, is_gathered, spec_of, whole


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Any) -> None:
    """Write `tensors` (what PEFT's `get_peft_model_state_dict` gives) and `config` into an empty folder.

    `config` is a mapping, or has `to_dict()` as PEFT's LoraConfig. Blocks: copies one tensor at a time from its device.

    Raises: ConfigError, before anything is written: it isn't a LoRA's, or has values that JSON has not; a tensor can't
        be read, or lies on several ranks. TransferError: safetensors has no such dtype. OSError.
    """
    if not isinstance(tensors, Mapping):
        raise ConfigError("adapter", type(tensors).__name__, "pass a folder, or get_peft_model_state_dict(model)")
    if not tensors:
        raise ConfigError("adapter", "{}", "it has no tensors; pass get_peft_model_state_dict(model)")
    named = sorted(((name, _readable(name, value)) for name, value in tensors.items()), key=lambda pair: pair[0])
    text = _config_text(config)
    header = header_of([spec_of(name, tensor) for name, tensor in named])
    (folder / CONFIG_FILE).write_text(text)
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(header)
        for _, tensor in named:
            row = byte_view(host_copy(whole(tensor)))
            assert row is not None  # a copy of ours is contiguous
            file.write(row.numpy().data)


def _readable(name: Any, value: Any) -> Tensor:
    """A tensor of this process. Nobody tells other ranks to gather an adapter with us: it would wait for them."""
    tensor = checked(name, value)
    if is_gathered(tensor):
        problem = "is a DTensor of several ranks: gather it on all of them (full_tensor()) before load_lora"
        raise ConfigError("adapter", name, problem)
    return tensor


def _config_text(config: Any) -> str:
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping) or "r" not in values or "target_modules" not in values:
        raise ConfigError("config", type(config).__name__, "pass the LoraConfig, or its values: r, target_modules, ...")
    try:
        return json.dumps({"peft_type": "LORA", **values}, default=_plain, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        if isinstance(exc, ConfigError):
            raise
        raise ConfigError("config", type(config).__name__, f"can't be written as JSON: {exc}") from exc


def _plain(value: Any) -> Any:
    """What PEFT's configurations, and those of others, have in them beside what JSON has."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return sorted(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()  # a number of numpy or torch
    raise ConfigError("config", f"{value!r:.80}", f"is a {type(value).__name__}, which can't be written as JSON")
