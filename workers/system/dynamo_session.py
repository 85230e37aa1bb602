"""Dynamo's routes for updates that a trainer sends by itself, to the engine's own transfer backend.

`init_weights_update_group`, then per update `update_weights_from_distributed` with the RPCs `start_weight_update`,
`update_weights` and `finish_weight_update` (as NeMo-RL does), or once with everything in its body. To the agent it is
an update like any other: one at a time, op ids, an engine that stands still, torn weights after a failure.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from rlbus.schemas import ApplyUpdate, FinishUpdate, FlushCache, InitTransfer, ShutdownTransfer, StartUpdate, Version
from rlbus.workers.system.calls import Call
from rlbus.workers.system.dynamo_bodies import (
    STEERING,
    DestroyGroup,
    Finish,
    InitGroup,
    NamedGroup,
    Start,
    Update,
    WholeUpdate,
    fields_of,
    parsed,
    said,
)
from rlbus.workers.system.own_pause import Do, OwnPause, next_of
from rlbus.workers.system.versions import Labels, version_of

T = TypeVar("T")
Reply = dict[str, Any]
INIT_RPC = "init_weight_transfer_engine"
DESTROY_RPC = "shutdown_weight_transfer_engine"
# No `engine_rpc`: the whole update in one call.
WHOLE = ""


class Lasting:
    """Calls of several ops that are carried through to their end, also when the client hangs up in the middle: half of
    an update would leave the weights torn. Each op is bounded, so that they are.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises what it raises. Cancel: it goes on."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._on_end)
        return await asyncio.shield(task)

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits, if anybody does; the agent's log has the op's end


class ForeignSession:
    """The handlers. One per surface. Cancel, of every coroutine: its ops go on to their end."""

    def __init__(self, labels: Labels, lasting: Lasting) -> None:
        self._labels = labels
        self._lasting = lasting
        self.pause = OwnPause()
        self.ways: Mapping[str, Callable[[Call, bool, bool], Awaitable[Reply]]] = {
            "start_weight_update": self._start,
            "update_weights": self._update,
            "finish_weight_update": self._finish,
            WHOLE: self._whole,
        }

    async def init(self, call: Call) -> Reply:
        """Join the trainer's group."""
        fields = fields_of(call)
        _check_rpc(fields, INIT_RPC)
        if "init_info" in fields:
            info = parsed(call, InitGroup).init_info
        else:
            group = parsed(call, NamedGroup)
            kept = ("master_address", "master_port", "rank_offset", "world_size")
            info = {name: getattr(group, name) for name in kept}
        await self._lasting.run(self._ending(call, InitTransfer(info=json.dumps(info))))
        return {"status": "ok", "message": "Weight update group initialized"}

    async def destroy(self, call: Call) -> Reply:
        """Leave it."""
        _check_rpc(fields_of(call), DESTROY_RPC)
        parsed(call, DestroyGroup)
        await self._lasting.run(self._ending(call, ShutdownTransfer()))
        return {"status": "ok", "message": "Weight update group destroyed"}

    async def _ending(self, call: Call, body: InitTransfer | ShutdownTransfer) -> None:
        """Do what gives up an open update, and with it its pause."""
        async with self.pause.step(call):
            await call.do(body)

    async def _start(self, call: Call, allows_unpaused: bool, resets: bool) -> Reply:
        if not parsed(call, Start, without=STEERING).is_checkpoint_format:
            raise said("'is_checkpoint_format' has to be true: tensors come by their checkpoint names")

        async def start() -> Reply:
            # It holds until the finish, or until its lease ends: then the agent gives the update up.
            is_own = allows_unpaused and await self.pause.make(call)
            try:
                async with self.pause.kept(call):
                    await next_of(call)(StartUpdate())
            except Exception:
                if is_own:
                    await self.pause.end(call)
                raise
            return _done(msgspec.UNSET)

        return await self._lasting.run(start())

    async def _update(self, call: Call, allows_unpaused: bool, resets: bool) -> Reply:
        body = parsed(call, Update, without=STEERING)

        async def update() -> Reply:
            async with self.pause.step(call):
                await call.do(ApplyUpdate(info=json.dumps(body.update_info)))
            return _done(msgspec.UNSET)

        return await self._lasting.run(update())

    async def _finish(self, call: Call, allows_unpaused: bool, resets: bool) -> Reply:
        label = parsed(call, Finish, without=STEERING).weight_version
        version = _maybe_named(label, call)

        async def finish() -> Reply:
            async with self.pause.step(call):
                await self._close(call, call.do, label, version, resets)
            # Also for the repeat of one after which the worker didn't go on.
            await self.pause.end(call)
            return _done(label)

        return await self._lasting.run(finish())

    async def _whole(self, call: Call, allows_unpaused: bool, resets: bool) -> Reply:
        if not fields_of(call).keys() - STEERING - {"weight_version"}:
            raise said("Missing 'weight_dir', or 'names', 'dtypes' and 'shapes', in body")
        body = parsed(call, WholeUpdate, without=STEERING)
        info, label = body.info(), body.weight_version
        version = _maybe_named(label, call)

        async def update() -> Reply:
            async with self.pause.standing_still(call, allows_unpaused) as do:
                await do(StartUpdate(), "start")
                await call.then(ApplyUpdate(info=json.dumps(info), update_op_id=f"{call.name}-start"), "update")
                await self._close(call, call.then, label, version, resets)
            return _done(label)

        return await self._lasting.run(update())

    async def _close(self, call: Call, do: Do, label: Any, version: Version | None, resets: bool) -> None:
        await do(FinishUpdate(version=version))
        if version is not None:
            self._labels.note(version, label)
        if resets:
            # Else the resume does it: an engine never generates on caches of other weights.
            await call.then(FlushCache(), "flush")


def named(label: Any, call: Call) -> Version:
    """The version that a caller names. Raises CallError: it is none."""
    version = version_of(label, call.agent.state)
    if version is None:
        raise said("'weight_version' has to be a step, as 7, 'v7' or '1.7'")
    return version


def _maybe_named(label: Any, call: Call) -> Version | None:
    return None if label is msgspec.UNSET else named(label, call)


def _check_rpc(fields: Mapping[str, Any], allowed: str) -> None:
    rpc = fields.get("engine_rpc", allowed)
    if rpc != allowed:
        raise said(f"engine_rpc {rpc!r} is not allowed here; use {allowed}")


def _done(label: Any) -> Reply:
    is_named = label is not msgspec.UNSET
    return {"status": "ok", "version": label if is_named else "unknown", "version_declared": is_named}
