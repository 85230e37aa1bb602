"""vLLM's routes that concern the weights: updates that a trainer of its own drives, reloads, version and checksums."""

import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response

from rlbus._vllm_words import NO_BROADCASTER
from rlbus.schemas import (
    ApplyUpdate,
    ChecksumsData,
    FinishUpdate,
    FlushCache,
    GetChecksums,
    InitTransfer,
    LoadWeights,
    SetVersion,
    ShutdownTransfer,
    StartUpdate,
    Version,
)
from rlbus.workers.system.calls import Call, convert
from rlbus.workers.system.dynamo_session import Lasting, Reply
from rlbus.workers.system.dynamo_weights import unnamed
from rlbus.workers.system.versions import Labels, version_of
from rlbus.workers.system.vllm_words import (
    Check,
    Finish,
    Init,
    NewVersion,
    NoBody,
    Rpc,
    Update,
    body_of,
    nothing,
    query_of,
    wrong,
)

# What vLLM says of weights that nobody has named.
UNLABELLED = "default"


class ReloadArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `reload_weights`: a folder below one of the weight roots."""

    weights_path: str


class VllmWeights:
    """The handlers. One per surface. Cancel, of every coroutine: what has begun goes on to its end."""

    def __init__(self) -> None:
        self._labels = Labels()
        self._lasting = Lasting()
        # What `/collective_rpc` may be asked for; no name of a caller reaches the engine.
        self._rpcs: Mapping[str, Callable[[Call, dict[str, Any]], Awaitable[None]]] = {
            "init_weight_transfer_engine": self._rpc_init,
            "start_weight_update": self._rpc_start,
            "update_weights": self._rpc_update,
            "finish_weight_update": self._rpc_finish,
            "shutdown_weight_transfer_engine": self._rpc_shutdown,
            "reload_weights": self._rpc_reload,
        }

    async def init(self, call: Call) -> Response:
        """Join the trainer's group."""
        query_of(call)
        await self._init(call, body_of(call, Init))
        return JSONResponse({"message": "Weight transfer initialized"})

    async def shutdown(self, call: Call) -> Response:
        """Leave it."""
        nothing(call)
        await call.do(ShutdownTransfer())
        return JSONResponse({"message": "Weight transfer shut down"})

    async def start(self, call: Call) -> Response:
        """Open an update of a paused worker."""
        nothing(call)
        await call.do(StartUpdate())
        return JSONResponse({"message": "Weight update started"})

    async def no_draft(self, call: Call) -> Response:
        """Answered, and not left to vLLM's own route, which knows no rules."""
        raise wrong("updates of draft models aren't served", HTTPStatus.NOT_IMPLEMENTED)

    async def no_broadcaster(self, call: Call) -> Response:
        """See `NO_BROADCASTER`."""
        raise wrong(NO_BROADCASTER, HTTPStatus.NOT_IMPLEMENTED)

    async def update(self, call: Call) -> Response:
        """Receive what is described; or load a folder, as prime-rl asks for it."""
        query_of(call)
        body = body_of(call, Update)
        if (body.weight_dir is msgspec.UNSET) is (body.update_info is msgspec.UNSET):
            raise wrong("give update_info (vLLM's weight transfer) or weight_dir (a folder)")
        if not isinstance(body.update_info, msgspec.UnsetType):
            await self._update(call, body.update_info)
            return JSONResponse({"message": "Weights updated"})
        if not isinstance(body.weight_dir, str) or not body.weight_dir:
            raise wrong(f"weight_dir has to be a folder: {NO_BROADCASTER}", HTTPStatus.NOT_IMPLEMENTED)
        await self._load(call, body.weight_dir)
        return JSONResponse({"status": "ok"})

    async def finish(self, call: Call) -> Response:
        """Everything was sent. The caches are emptied before the worker generates again."""
        query_of(call)
        await self._finish(call, body_of(call, Finish).weight_version)
        return JSONResponse({"message": "Weight update finished"})

    async def set_version(self, call: Call) -> Response:
        """Call clean weights so."""
        query_of(call)
        label = body_of(call, NewVersion).new_version
        version = _named(call, label)
        await call.do(SetVersion(version=version))
        self._labels.note(version, label)
        return JSONResponse({"success": True, "new_version": label})

    async def info(self, call: Call) -> Response:
        """What the weights are called."""
        query_of(call)
        version = call.agent.state.weights.version
        label = UNLABELLED if version is None else str(self._labels.of(version)[0])
        return JSONResponse({"weight_version": label})

    async def check(self, call: Call) -> Response:
        """Checksums, by the engine's own names; or how they differ from some."""
        query_of(call)
        body = body_of(call, Check)
        if body.action not in ("checksum", "compare"):
            raise wrong(
                f"action {body.action[:64]!r} isn't served; use checksum or compare", HTTPStatus.NOT_IMPLEMENTED
            )
        if body.action == "compare" and body.baseline is None:
            raise wrong("action='compare' requires a 'baseline' object")
        result = await call.do(GetChecksums())
        assert isinstance(result.data, ChecksumsData)
        sums = {one.name: one.checksum for one in result.data.sums}
        if body.baseline is None or body.action == "checksum":
            return JSONResponse({"checksums": sums})
        bad = sorted(name for name in sums | body.baseline if sums.get(name) != body.baseline.get(name))
        return JSONResponse({"match": not bad, "mismatches": bad})

    async def rpc(self, call: Call) -> Response:
        """`/collective_rpc`, of what is listed."""
        query_of(call)
        body = body_of(call, Rpc)
        ask = self._rpcs.get(body.method)
        if ask is None:
            allowed = ", ".join(sorted(self._rpcs))
            raise wrong(f"method {body.method[:64]!r} is not allowed here; use {allowed}", HTTPStatus.FORBIDDEN)
        if body.args:
            raise wrong("name what the method is told in kwargs; args isn't taken")
        await ask(call, body.kwargs)
        return JSONResponse({"results": [None] * call.agent.descriptor.world_size})

    # --- the ops

    async def _init(self, call: Call, body: Init) -> None:
        await call.do(InitTransfer(info=json.dumps(body.init_info)))

    async def _update(self, call: Call, info: dict[str, Any] | list[dict[str, Any]]) -> None:
        await call.do(ApplyUpdate(info=json.dumps(info)))

    async def _finish(self, call: Call, label: str | None) -> None:
        version = None if label is None else _named(call, label)
        await call.do(FinishUpdate(version=version))
        if version is not None:
            self._labels.note(version, label)

    async def _load(self, call: Call, path: str) -> None:
        version = unnamed(call)

        async def load() -> Reply:
            await call.do(LoadWeights(path=path, version=version))
            await call.then(FlushCache(), "flush")
            return {}

        await self._lasting.run(load())

    # --- the same, as `/collective_rpc` spells it

    async def _rpc_init(self, call: Call, kwargs: dict[str, Any]) -> None:
        await self._init(call, convert(kwargs, Init))

    async def _rpc_start(self, call: Call, kwargs: dict[str, Any]) -> None:
        convert(kwargs, NoBody)
        await call.do(StartUpdate())

    async def _rpc_update(self, call: Call, kwargs: dict[str, Any]) -> None:
        info = convert(kwargs, Update).update_info
        if isinstance(info, msgspec.UnsetType):
            raise wrong("kwargs of update_weights: update_info is missing")
        await self._update(call, info)

    async def _rpc_finish(self, call: Call, kwargs: dict[str, Any]) -> None:
        convert(kwargs, NoBody)
        await self._finish(call, None)

    async def _rpc_shutdown(self, call: Call, kwargs: dict[str, Any]) -> None:
        convert(kwargs, NoBody)
        await call.do(ShutdownTransfer())

    async def _rpc_reload(self, call: Call, kwargs: dict[str, Any]) -> None:
        await self._load(call, convert(kwargs, ReloadArgs).weights_path)


def _named(call: Call, label: str) -> Version:
    version = version_of(label, call.agent.state)
    if version is None:
        raise wrong(f"version {label[:64]!r}: use a step, as 7, v7 or 1.7; versions are ordered here")
    return version
