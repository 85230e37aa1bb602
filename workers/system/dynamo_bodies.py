"""The bodies of Dynamo's routes. Strict: an unknown field, or one of another type, is named and nothing is done."""

from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from rlbus.workers.system.calls import Call, CallError

T = TypeVar("T")
# Keys of `update_weights_from_distributed` that steer the route, and are no arguments of what it does.
STEERING = frozenset({"engine_rpc", "allow_unpaused", "reset_prefix_cache"})


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all bodies."""


class Empty(Body, frozen=True):
    """A route that takes nothing."""


class Pause(Body, frozen=True):
    """`pause_generation`."""

    mode: str = "keep"
    clear_cache: bool = False


class Abort(Body, frozen=True):
    """`abort_request`."""

    request_id: str = ""


class Tags(Body, frozen=True):
    """`control/wake_up`: parts of the memory; null means all."""

    tags: tuple[str, ...] | None = None


class SleepLevel(Tags, frozen=True):
    """`control/sleep`."""

    level: int = 1


class SetLabel(Body, frozen=True):
    """`set_weight_version`. `allow_rollback` is rlbus' own, here and below."""

    weight_version: Any = msgspec.UNSET
    allow_rollback: bool = False


class FromDisk(Body, frozen=True):
    """`update_weights_from_disk`."""

    model_path: str = ""
    weight_version: Any = msgspec.UNSET
    engine_rpc: str = "reload_weights"
    allow_rollback: bool = False


class FromFolder(Body, frozen=True):
    """`update_weights_from_distributed` with the RPC that loads what the trainer has written into a folder."""

    weight_dir: str = ""
    weight_version: Any = msgspec.UNSET
    allow_rollback: bool = False


class Start(Body, frozen=True):
    """`update_weights_from_distributed` with `start_weight_update`. The format is always the checkpoint's."""

    is_checkpoint_format: bool = True


class Update(Body, frozen=True):
    """The same with `update_weights`. What is in `update_info` is between the trainer and the engine."""

    update_info: dict[str, Any] | list[dict[str, Any]]


class Finish(Body, frozen=True):
    """The same with `finish_weight_update`."""

    weight_version: Any = msgspec.UNSET


class WholeUpdate(Body, frozen=True):
    """The same without an RPC: what is broadcast, tensor by tensor, in Dynamo's or in vLLM's words."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] | None = None
    dtype_names: tuple[str, ...] | None = None
    packed: bool | None = None
    packed_buffer_size_bytes: int | None = None
    packed_num_buffers: int | None = None
    group_name: str = ""
    weight_version: Any = msgspec.UNSET

    def info(self) -> dict[str, Any]:
        """For vLLM's transfer engine. Raises CallError: the lists don't go together."""
        dtype_names = self.dtypes if self.dtype_names is None else self.dtype_names
        if not self.names or dtype_names is None or not len(self.names) == len(self.shapes) == len(dtype_names):
            raise said("'names', 'dtypes' (or 'dtype_names') and 'shapes' have to be lists of one length, above 0")
        info: dict[str, Any] = {"names": self.names, "dtype_names": dtype_names, "shapes": self.shapes}
        for name in ("packed", "packed_buffer_size_bytes", "packed_num_buffers"):
            if getattr(self, name) is not None:
                info[name] = getattr(self, name)
        return info


class InitGroup(Body, frozen=True):
    """`init_weights_update_group` with the transfer engine's own description."""

    init_info: dict[str, Any]
    engine_rpc: str = ""


class NamedGroup(Body, frozen=True):
    """The same with the group's parts; `group_name` and `backend` are what the worker was started with."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = ""
    backend: str = ""
    engine_rpc: str = ""


class DestroyGroup(Body, frozen=True):
    """`destroy_weights_update_group`."""

    group_name: str = ""
    engine_rpc: str = ""


class HandlerError(CallError):
    """What a handler of Dynamo's says with 200: nothing was done. `meant` is its status on a surface that has any."""

    def __init__(self, message: str, meant: HTTPStatus) -> None:
        super().__init__(HTTPStatus.OK, "Handler error", message)
        self.meant = meant


def said(message: str, meant: HTTPStatus = HTTPStatus.BAD_REQUEST) -> HandlerError:
    """See `HandlerError`; by default the request itself is wrong."""
    return HandlerError(message, meant)


def parsed(call: Call, as_type: type[T], without: frozenset[str] = frozenset()) -> T:
    """The body; fields in `without` are somebody else's.

    Raises:
        CallError: it isn't one; a handler's word, unless it is no JSON at all.
    """
    fields = {name: value for name, value in fields_of(call).items() if name not in without}
    try:
        return msgspec.convert(fields, as_type, strict=True)
    except msgspec.ValidationError as exc:
        raise said(str(exc)) from exc


def fields_of(call: Call) -> dict[str, Any]:
    """The body as an object.

    Raises:
        CallError: it is none.
    """
    try:
        return call.json()
    except CallError as exc:
        if exc.title == "Invalid body":
            raise said(exc.message) from exc
        raise
