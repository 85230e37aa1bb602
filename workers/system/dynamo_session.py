"""Dynamo's routes for updates that a trainer sends by itself, to the engine's own transfer backend.

`init_weights_update_group`, then per update `update_weights_from_distributed` with the RPCs `start_weight_update`,
`update_weights` and `finish_weight_update` (as NeMo-RL does), or once with everything in its body. To the agent it is
an update like any other: one at a time, op ids, an engine that stands still, torn weights after a failure.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgspec

from rlbus.schemas import WHOLE as WHOLE_STATES
from rlbus.schemas import (
    ApplyUpdate,
    FinishUpdate,
    FlushCache,
    InitTransfer,
    PauseGeneration,
    PauseMode,
    PauseView,
    ResumeGeneration,
    ShutdownTransfer,
    StartUpdate,
    Version,
)
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
from rlbus.workers.system.versions import Labels, version_of

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

    async def run(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        """The result of `work`. Raises what it raises. Cancel: it goes on."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._on_end)
        return await asyncio.shield(task)

    def _on_end(self, task: asyncio.Task[Reply]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits, if anybody does; the agent's log has the op's end


class ForeignSession:
    """The handlers. One per surface. Cancel, of every coroutine: its ops go on to their end."""

    def __init__(self, labels: Labels, lasting: Lasting) -> None:
        self._labels = labels
        self._lasting = lasting
        # The pause that an unpaused update began with, as long as that is open.
        self._made: PauseView | None = None
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
        await call.do(InitTransfer(info=json.dumps(info)))
        return {"status": "ok", "message": "Weight update group initialized"}

    async def destroy(self, call: Call) -> Reply:
        """Leave it."""
        _check_rpc(fields_of(call), DESTROY_RPC)
        parsed(call, DestroyGroup)
        await call.do(ShutdownTransfer())
        return {"status": "ok", "message": "Weight update group destroyed"}

    async def _start(self, call: Call, allows_unpaused: bool, resets: bool) -> Reply:
        if not parsed(call, Start, without=STEERING).is_checkpoint_format:
            raise said("'is_checkpoint_format' has to be true: tensors come by their checkpoint names")

        async def start() -> Reply:
            made: PauseView | None = None
            if allows_unpaused and call.agent.state.pause is None:
                # It holds until the finish, or until its lease ends: then the agent gives the update up.
                await call.do(PauseGeneration(mode=PauseMode.KEEP, clear_cache=False), "pause")
                made = call.agent.state.pause
            try:
                await call.do(StartUpdate())
            except Exception:
                await _go_on(call, made)
                raise
            # A repeat of a start that went well makes none, and leaves it.
            self._made = made or self._made
            return _done(msgspec.UNSET)

        return await self._lasting.run(start())

    async def _update(self, call: Call, allows_unpaused: bool, resets: bool) -> Reply:
        body = parsed(call, Update, without=STEERING)
        await call.do(ApplyUpdate(info=json.dumps(body.update_info)))
        return _done(msgspec.UNSET)

    async def _finish(self, call: Call, allows_unpaused: bool, resets: bool) -> Reply:
        label = parsed(call, Finish, without=STEERING).weight_version
        version = _maybe_named(label, call)

        async def finish() -> Reply:
            await self._close(call, label, version, resets)
            made, self._made = self._made, None
            await _go_on(call, made)
            return _done(label)

        return await self._lasting.run(finish())

    async def _whole(self, call: Call, allows_unpaused: bool, resets: bool) -> Reply:
        if not fields_of(call).keys() - STEERING - {"weight_version"}:
            raise said("Missing 'weight_dir', or 'names', 'dtypes' and 'shapes', in body")
        body = parsed(call, WholeUpdate, without=STEERING)
        info, label = body.info(), body.weight_version
        version = _maybe_named(label, call)

        async def update() -> Reply:
            async with standing_still(call, allows_unpaused):
                await call.do(StartUpdate(), "start")
                await call.do(ApplyUpdate(info=json.dumps(info), update_op_id=f"{call.name}-start"), "update")
                await self._close(call, label, version, resets)
            return _done(label)

        return await self._lasting.run(update())

    async def _close(self, call: Call, label: Any, version: Version | None, resets: bool) -> None:
        await call.do(FinishUpdate(version=version))
        if version is not None:
            self._labels.note(version, label)
        if resets:
            # Else the resume does it: an engine never generates on caches of other weights.
            await call.do(FlushCache(), "flush")


@contextlib.asynccontextmanager
async def standing_still(call: Call, allows_unpaused: bool) -> AsyncIterator[None]:
    """On a worker that runs, and may be updated so, a pause before and a resume after: nothing generates meanwhile.

    Cancel: the pause ends with its lease.
    """
    made: PauseView | None = None
    if allows_unpaused and call.agent.state.pause is None:
        await call.do(PauseGeneration(mode=PauseMode.KEEP, clear_cache=False), "pause")
        made = call.agent.state.pause
    try:
        yield
    finally:
        # Torn weights stay paused, for whoever heals them.
        if call.agent.state.weights.state in WHOLE_STATES:
            await _go_on(call, made)


async def _go_on(call: Call, made: PauseView | None) -> None:
    """Resume from the pause `made` here, unless it is somebody else's by now, or a hold; None: there was none."""
    state = call.agent.state
    if made is None or state.pause is None or (state.running and isinstance(state.running.body, PauseGeneration)):
        # A pause that is being made just now is its owner's; if it fails, the lease of the one made here ends.
        return
    known, now = ((p.owner, p.since, p.expires_at is None) for p in (made, state.pause))
    if known == now:
        await call.submit(ResumeGeneration(), "resume")


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
