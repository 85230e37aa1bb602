"""The seam for engines that somebody else's trainer can feed, through the engine's own weight transfer backend.

Ordering contract, kept by the agent: init before start; start, then update (once or more), then exactly one of
`finish_native` or `Engine.abort_update`; each is a mutation, and the engine stands still from before start to after the
end. An engine that implements it lists the routes of `rlbus.schemas.native`.
"""

import json
from typing import Any, Protocol, runtime_checkable

from rlbus.errors import refused
from rlbus.schemas import FaultCode, Version

# The routes that belong together: whoever serves one serves all.
NATIVE_ROUTES = frozenset(
    {
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    }
)


class NativeEngine(Protocol):
    """The trainer's end is not ours. Errors are `EngineError`, of an update `UpdateFailedError`."""

    async def init_native(self, info: dict[str, Any]) -> None:
        """Join the group that `info` describes, with all ranks; any group before is left.

        Raises EngineError (`group_failed`): nobody came, or it makes no sense to the backend; RefusedError: see
            `ChecksInit`.
        Cancel or failure: no group.
        """
        ...

    async def shutdown_native(self) -> None:
        """Leave that group, in whatever state it is. Idempotent. Cancel: as `Engine.leave_group`."""
        ...

    async def start_native(self) -> None:
        """Open an update. No weight changes yet. Cancel: it may be open; `abort_update` follows."""
        ...

    async def update_native(self, info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive and load what is described. Raises UpdateFailedError, with the weights touched if an earlier part of
        this update came. Cancel: like a failure with weights touched.
        """
        ...

    async def finish_native(self, version: Version) -> None:
        """Make what was received the model's, and label it. Raises UpdateFailedError. Cancel: as `update_native`."""
        ...


@runtime_checkable
class ChecksInit(Protocol):
    """A `NativeEngine` that can tell what makes no sense before anything is done, so that it costs nobody's update."""

    def check_init(self, info: dict[str, Any]) -> None:
        """Raise RefusedError (`bad_message`) if `init_native` can't be called so. Quick; changes nothing."""
        ...


class TakesNative:
    """Base of an adapter of an engine: `_native`, which its `__init__` sets, is its `NativeEngine`."""

    _native: NativeEngine

    def check_init(self, info: dict[str, Any]) -> None:
        """See `ChecksInit`. What vLLM's own backends take, only they know."""
        if isinstance(self._native, ChecksInit):
            self._native.check_init(info)

    async def init_native(self, info: dict[str, Any]) -> None:
        """See `NativeEngine`."""
        await self._native.init_native(info)

    async def shutdown_native(self) -> None:
        """See `NativeEngine`."""
        await self._native.shutdown_native()

    async def start_native(self) -> None:
        """See `NativeEngine`."""
        await self._native.start_native()

    async def update_native(self, info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """See `NativeEngine`."""
        await self._native.update_native(info)

    async def finish_native(self, version: Version) -> None:
        """See `NativeEngine`."""
        await self._native.finish_native(version)


def info_of(text: str, *, may_be_list: bool = False) -> Any:
    """The JSON of a caller. Raises RefusedError (`bad_message`): it is none, or of another kind."""
    try:
        info = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise refused(FaultCode.BAD_MESSAGE, f"info is no JSON: {exc}") from exc
    items = info if may_be_list and isinstance(info, list) else [info]
    if not items or not all(isinstance(item, dict) for item in items):
        kinds = "an object, or a list of objects" if may_be_list else "an object"
        raise refused(FaultCode.BAD_MESSAGE, f"info has to be {kinds}")
    return info
