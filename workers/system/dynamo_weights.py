"""Dynamo's routes that concern the weights: their version, and updates from folders.

Invariants: `engine_rpc` only chooses among what is listed here, and no name of a caller reaches the engine; neither do
`allow_unpaused` and `reset_prefix_cache`. An update that may come unpaused is made on an engine that stands still all
the same: a pause before it, a resume after it.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from rlbus.schemas import FlushCache, LoadWeights, SetVersion, Version
from rlbus.workers.system.calls import Call
from rlbus.workers.system.dynamo_bodies import STEERING, Empty, FromDisk, FromFolder, SetLabel, fields_of, parsed, said
from rlbus.workers.system.dynamo_session import WHOLE, ForeignSession, Lasting, Reply, named
from rlbus.workers.system.own_pause import Do
from rlbus.workers.system.versions import Labels, next_version

# Carries an update out: (the call, whether it may come unpaused, whether the caches are emptied at once).
Way = Callable[[Call, bool, bool], Awaitable[Reply]]
# What `engine_rpc` may be, by route.
DISK_RPCS = frozenset({"reload_weights"})
FOLDER_RPC = "update_weights_from_path"


class Weights:
    """The handlers. One per surface: it remembers what the weights were called.

    Cancel, of every coroutine: what has begun goes on to its end.
    """

    def __init__(self) -> None:
        self._labels = Labels()
        self._lasting = Lasting()
        self.session = ForeignSession(self._labels, self._lasting)

    async def get_version(self, call: Call) -> Reply:
        """What the weights are called; null while nobody can say."""
        parsed(call, Empty)
        version = call.agent.state.weights.version
        label, is_declared = (None, False) if version is None else self._labels.of(version)
        return {"status": "ok", "version": label, "version_declared": is_declared}

    async def set_version(self, call: Call) -> Reply:
        """Call clean weights so, that came without a name."""
        body = parsed(call, SetLabel)
        if body.weight_version is msgspec.UNSET:
            raise said("Missing 'weight_version' in body")
        version = named(body.weight_version, call)
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
        load = self._load(call, call.do, body.model_path, body.weight_version, body.allow_rollback, resets=True)
        return await self._lasting.run(load)

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
        ways = self._ways(call)
        rpc = fields.get("engine_rpc", FOLDER_RPC if "weight_dir" in fields or WHOLE not in ways else WHOLE)
        way = ways.get(rpc) if isinstance(rpc, str) else None
        if way is None or (rpc == WHOLE and "engine_rpc" in fields):
            raise _not_allowed(rpc, set(ways) - {WHOLE})
        return await way(call, allows, resets)

    def _ways(self, call: Call) -> Mapping[str, Way]:
        """Those that this engine has."""
        routes = call.agent.descriptor.routes
        ways: dict[str, Way] = {FOLDER_RPC: self._from_folder} if "update_weights_from_disk" in routes else {}
        if "update_weights" in routes:
            ways |= self.session.ways
        return ways

    async def _from_folder(self, call: Call, allows_unpaused: bool, resets: bool) -> Reply:
        body = parsed(call, FromFolder, without=STEERING)
        if not body.weight_dir:
            raise said("Missing 'weight_dir' in body")

        async def load() -> Reply:
            async with self.session.pause.standing_still(call, allows_unpaused) as do:
                return await self._load(call, do, body.weight_dir, body.weight_version, body.allow_rollback, resets)

        return await self._lasting.run(load())

    async def _load(self, call: Call, do: Do, path: str, label: Any, allow_rollback: bool, resets: bool) -> Reply:
        is_named = label is not msgspec.UNSET
        version = named(label, call) if is_named else unnamed(call)
        await do(LoadWeights(path=path, version=version, allow_rollback=allow_rollback, is_named=is_named))
        if is_named:
            self._labels.note(version, label)
        if resets:
            # Else the resume does it: an engine never generates on caches of other weights.
            await call.then(FlushCache(), "flush")
        return {"status": "ok", "version": label if is_named else "unknown", "version_declared": is_named}


def unnamed(call: Call) -> Version:
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
