"""What a trainer hands over, as a source of named tensors that can be read as often as needed."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rlbus.errors import ConfigError
from rlbus.schemas import TensorSpec
from rlbus.transfer.flat import dtype_name
from rlbus.transfer.manifest import DTYPE_BYTES
from rlbus.transfer.plane import WeightSource


def weight_source(weights: Any, *, keep_tied: bool = False) -> WeightSource:
    """Make a source of a module, a state dict, or a re-iterable of (name, tensor); a WeightSource passes unchanged.

    Module: its `state_dict()`, read anew each time, so parameters and persistent buffers. Tied weights of a module or
    state dict (two names for the very same storage, place in it, shape and strides) are sent once, under the first
    name, as checkpoints have them, unless `keep_tied`; what a mapping makes as it is read is tied to nothing. DTensors
    (FSDP2, tensor parallel) are announced with their full shape, and gathered one at a time as they are read: that is a
    collective, so every rank has to read the source, in the same order, once for each `update_weights` of rank 0
    (`for _ in source: pass`), and holds one full tensor meanwhile.

    Args:
        weights: a re-iterable starts anew whenever it is iterated (a list, or an object with `__iter__`); a generator
            can be read once only and is refused. Announcing it reads it once.

    Raises:
        ConfigError: none of these, or a value in it isn't a tensor with plain memory; names it.
    """
    if isinstance(weights, torch.nn.Module):
        return _ModuleSource(weights, keep_tied)
    if isinstance(weights, Mapping):
        return _MappingSource(weights, keep_tied)
    if isinstance(weights, WeightSource):
        return weights
    if not isinstance(weights, Iterable):
        raise ConfigError("weights", type(weights).__name__, "give a module, a state dict, or (name, tensor) pairs")
    if isinstance(weights, Iterator):
        text = "can be read once only; give a list, or an object whose __iter__ starts anew"
        raise ConfigError("weights", type(weights).__name__, text)
    return _PairsSource(weights)


class _MappingSource:
    """A state dict. The mapping is read anew each time, so replaced values are seen."""

    def __init__(self, weights: Mapping[str, Any], keep_tied: bool) -> None:
        self._weights = weights
        self._keep_tied = keep_tied

    def specs(self) -> tuple[TensorSpec, ...]:
        """Names, dtypes and full shapes; nothing is gathered."""
        return tuple(spec_of(name, tensor) for name, tensor in self._tensors())

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have to read it with us (`rlbus.transfer.one_pass`)."""
        return any(is_gathered(tensor) for _, tensor in self._tensors())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor)."""
        for name, tensor in self._tensors():
            yield name, whole(tensor)

    def _named(self) -> Mapping[str, Any]:
        return self._weights

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        # With what keeps a storage's identity from being given to another one; its memory may go.
        seen: dict[tuple[object, ...], StorageWeakRef] = {}
        for name, value in self._named().items():
            tensor = checked(name, value)
            # Of the whole tensor: every rank has to find the same ties, also one whose shard is empty.
            if not self._keep_tied and tensor.numel() > 0:
                local = _local(tensor)
                storage = StorageWeakRef(local.untyped_storage())  # type: ignore[no-untyped-call]
                memory = _memory(tensor, local, storage)
                if memory in seen:
                    continue
                seen[memory] = storage
            yield name, tensor


class _ModuleSource(_MappingSource):
    """A module's parameters and persistent buffers, as `state_dict()` names them."""

    def __init__(self, module: torch.nn.Module, keep_tied: bool) -> None:
        super().__init__({}, keep_tied)
        self._module = module

    def _named(self) -> Mapping[str, Any]:
        return self._module.state_dict()


class _PairsSource:
    """A re-iterable of (name, tensor), taken as it is."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None:
        self._pairs = pairs
        self._is_shared: bool | None = None

    def specs(self) -> tuple[TensorSpec, ...]:
        """Names, dtypes and full shapes, by reading all pairs once."""
        specs, is_shared = [], False
        for name, value in self._pairs:
            tensor = checked(name, value)
            specs.append(spec_of(name, tensor))
            is_shared = is_shared or is_gathered(tensor)
        self._is_shared = is_shared
        return tuple(specs)

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have to read it with us, as it was when it was announced."""
        if self._is_shared is None:
            self.specs()
        return bool(self._is_shared)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor)."""
        for name, value in self._pairs:
            yield name, whole(checked(name, value))


def checked(name: Any, value: Any) -> Tensor:
    """`value`, if it is a tensor that can be read. Raises: ConfigError: why not, with its name."""
    if not isinstance(name, str):
        raise ConfigError("weights", repr(name)[:80], "names of tensors are text")
    if not isinstance(value, Tensor):
        raise ConfigError("weights", name, f"is a {type(value).__name__}, not a tensor")
    if value.layout is not torch.strided:
        raise ConfigError("weights", name, f"has layout {value.layout}; only strided tensors can be sent")
    if value.is_meta:
        raise ConfigError("weights", name, "is on the meta device and has no values")
    if dtype_name(value.dtype) not in DTYPE_BYTES:
        raise ConfigError("weights", name, f"has dtype {dtype_name(value.dtype)}, which can't be sent")
    return value


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """How it is announced."""
    return TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))


def whole(tensor: Tensor) -> Tensor:
    """All of it: a DTensor is gathered, by a collective if several ranks have it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if _is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def _is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Its module takes a second to import, and without it there can't be one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_gathered(tensor: Tensor) -> bool:
    """Whether reading it takes a collective. One rank has all there is."""
    return _is_distributed(tensor) and tensor.device_mesh.size() > 1  # type: ignore[attr-defined]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if _is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def _memory(tensor: Tensor, local: Tensor, storage: StorageWeakRef) -> tuple[object, ...]:
    """What tells that two tensors are one. Not their address alone: a tensor that is made as it is read often gets
    that of one before it, which is gone by then.
    """
    # dtype, conjugation and sign count: a view as another dtype has other bytes or another meaning.
    place = (storage.cdata, local.data_ptr(), local.stride())
    return (*place, tuple(tensor.shape), local.dtype, local.device, local.is_conj(), local.is_neg())
