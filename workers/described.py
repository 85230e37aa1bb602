"""What another trainer says that it sends, in the words of vLLM's weight transfer. Pure.

Between that trainer and the engine's backend these words are theirs; here they only tell whether an update brings all
of a model, which torn weights need. What can't be understood describes nothing, and so heals nothing.
"""

from typing import Any

import msgspec

from rlbus.schemas import TensorSpec


class _Item(msgspec.Struct):
    """One item of an update's info, as far as it is understood. Source: vLLM's NCCLWeightTransferUpdateInfo."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[tuple[int, ...]]


def described(info: str) -> tuple[TensorSpec, ...]:
    """The tensors that an `ApplyUpdate`'s info names with dtype and shape, in its order."""
    try:
        data = msgspec.json.decode(info)
    except (msgspec.DecodeError, RecursionError):
        return ()
    return tuple(spec for item in (data if isinstance(data, list) else [data]) for spec in _specs(item))


def _specs(data: Any) -> list[TensorSpec]:
    try:
        item = msgspec.convert(data, _Item)
    except msgspec.ValidationError:
        return []
    if not len(item.names) == len(item.dtype_names) == len(item.shapes):
        return []
    parts = zip(item.names, item.dtype_names, item.shapes, strict=True)
    return [TensorSpec(name=name, dtype=dtype.removeprefix("torch."), shape=shape) for name, dtype, shape in parts]
