"""Dynamo's routes that concern the weights: their version, and updates from folders.

Invariants: `engine_rpc` only chooses among what is listed here, and no name of a caller reaches the engine; neither do
`allow_unpaused` and `reset_prefix_cache`. An update that may come unpaused is made on an engine that stands still all
the same: a pause before it, a resume after it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from rlbus.schemas import (
    FlushCache,
    LoadWeights,
    PauseGeneration,
    PauseMode,
    ResumeGeneration,
    SetVersion,
    Version,
)
from rlbus.workers.system.calls import Call
from rlbus.workers.system.dynamo_bodies import Empty, FromDisk, FromFolder, SetLabel, fields_of, parsed, said
from rlbus.workers.system.versions import Labels, next_version, version_of

Reply = dict[str, Any]
# What `engine_rpc` may be, by route.
DISK_RPCS = frozenset({"reload_weights"})
FOLDER_RPC = "update_weights_from_path"
# Keys of `update_weights_from_distributed` that steer the route, and are no arguments of what it does.
STEERING = frozenset({"engine_rpc", "allow_unpaused", "reset_prefix_cache"})


class Weights:
    """The handlers. One per surface: it remembers what the weights were called."""

    def __init__(self) -> None:
        self._labels = Labels()

    async def get_version(self, call: Call) -> Reply:
        """What the weights are called; null while nobody can say."""
        parsed(call, Empty)
        version = call.agent.state.weights.version
        label, is_declared = (None, False) if version is None else self._labels.of(version)
        return {"status": "ok", "version": label, "version_declared": is_declared}

    async def set_version(self, call: Call) -> Reply:
        """Call clean weights so."""
        body = parsed(call, SetLabel)
        if body.weight_version is msgspec.UNSET:
            raise said("Missing 'weight_version' in body")
        version = _named(body.weight_version, call)
        await call.do(SetVersion(version=version, allow_rollback=body.allow_rollback))
        self._labels.note(version, body.weight_version)
        return {"status": "ok", "version": body.weight_version}

    async def from_disk(self, call: Call) -> Reply:
        """Load a folder below one of the weight roots, and empty the caches."""
        body = parsed(call, FromDisk)
        if body.engine_rpc not in DISK_RPCS:
            raise _not_allowed(body.engine_rpc, DISK_RPCS)
        if not body.model_path:
            raise said("Missing 'model_path' in body")
        return await self._load(call, body.model_path, body.weight_version, body.allow_rollback, resets=True)

    async def from_distributed(self, call: Call) -> Reply:
        """Whichever way `engine_rpc` names."""
        fields = fields_of(call)
        allows = _flag(fields, "allow_unpaused", False)
        resets = _flag(fields, "reset_prefix_cache", True)
        if allows and resets:
            raise said(
                "Unpaused weight updates cannot reset the prefix cache. "
                "Set 'reset_prefix_cache' to false or pause generation first."
            )
        rpc = fields.get("engine_rpc", FOLDER_RPC)
        if rpc != FOLDER_RPC:
            raise _not_allowed(rpc, {FOLDER_RPC})
        body = parsed(call, FromFolder, without=STEERING)
        if not body.weight_dir:
            raise said("Missing 'weight_dir' in body")
        return await self._while_still(call, allows, body, resets)

    async def _while_still(self, call: Call, allows_unpaused: bool, body: FromFolder, resets: bool) -> Reply:
        """On a worker that runs, and may be updated so, a pause before and a resume after: nothing generates meanwhile.

        Cancel: the pause ends with its lease.
        """
        pauses = allows_unpaused and call.agent.state.pause is None
        if pauses:
            await call.do(PauseGeneration(mode=PauseMode.KEEP, clear_cache=False), "pause")
        try:
            return await self._load(call, body.weight_dir, body.weight_version, body.allow_rollback, resets)
        finally:
            # Torn weights stay paused: the agent refuses this then.
            if pauses:
                await call.submit(ResumeGeneration(), "resume")

    async def _load(self, call: Call, path: str, label: Any, allow_rollback: bool, resets: bool) -> Reply:
        is_named = label is not msgspec.UNSET
        version = _named(label, call) if is_named else _unnamed(call)
        await call.do(LoadWeights(path=path, version=version, allow_rollback=allow_rollback))
        if is_named:
            self._labels.note(version, label)
        if resets:
            # Else the resume does it: an engine never generates on caches of other weights.
            await call.do(FlushCache(), "flush")
        return {"status": "ok", "version": label if is_named else "unknown", "version_declared": is_named}


def _named(label: Any, call: Call) -> Version:
    version = version_of(label, call.agent.state)
    if version is None:
        raise said("'weight_version' has to be a step, as 7, 'v7' or '1.7'")
    return version


def _unnamed(call: Call) -> Version:
    """The next one; for a repeat of a call that has ended well, the one that it has made."""
    agent = call.agent
    record = agent.journal.find(call.name)
    made = agent.state.weights.version
    if record is not None and record.result is not None and made is not None:
        return made
    return next_version(agent.state)


def _flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise said(f"'{name}' must be a boolean")
    return value


def _not_allowed(rpc: Any, allowed: set[str] | frozenset[str]) -> Exception:
    return said(f"engine_rpc {rpc!r} is not allowed here; use {', '.join(sorted(allowed))}")
