"""The bodies of Dynamo's routes. Strict: an unknown field, or one of another type, is named and nothing is done."""

from typing import Any, TypeVar

import msgspec

from rlbus.workers.system.calls import Call, CallError

T = TypeVar("T")


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


def said(message: str) -> CallError:
    """What a handler of Dynamo's says with 200: nothing was done, for this reason."""
    return CallError(200, "Handler error", message)


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
