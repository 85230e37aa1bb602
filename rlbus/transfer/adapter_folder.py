"""Writes an adapter that a trainer holds in memory as the PEFT folder that workers load. Needs torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlbus.adapter import CONFIG_FILE, WEIGHTS_FILE
from rlbus.errors import ConfigError
from rlbus.schemas import TensorSpec
from rlbus.transfer.flat import byte_view
from rlbus.transfer.folder import header_of
from rlbus.transfer.snapshot import host_copy


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Any) -> None:
    """Write `tensors` (what PEFT's `get_peft_model_state_dict` gives) and `config` into an empty folder.

    `config` is a mapping, or has `to_dict()` as PEFT's LoraConfig. Blocks: copies one tensor at a time from its device.

    Raises: ConfigError: it isn't a LoRA's. TransferError: safetensors has no such dtype. OSError.
    """
    if not tensors:
        raise ConfigError("adapter", "{}", "it has no tensors; pass get_peft_model_state_dict(model)")
    names = sorted(tensors)
    specs = [
        TensorSpec(name=n, dtype=str(tensors[n].dtype).removeprefix("torch."), shape=tuple(tensors[n].shape))
        for n in names
    ]
    (folder / CONFIG_FILE).write_text(_config_text(config))
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(header_of(specs))
        for name in names:
            row = byte_view(host_copy(tensors[name].detach()))
            assert row is not None  # a copy of ours is contiguous
            file.write(row.numpy().data)


def _config_text(config: Any) -> str:
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping) or "r" not in values or "target_modules" not in values:
        raise ConfigError("config", type(config).__name__, "pass the LoraConfig, or its values: r, target_modules, ...")
    return json.dumps({"peft_type": "LORA", **values}, default=_plain, sort_keys=True)


def _plain(value: Any) -> Any:
    """PEFT's configurations have sets and enums in them."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", str(value))
