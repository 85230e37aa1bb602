"""vLLM's RL verbs of a worker: the paths, bodies and answers of vLLM's own server, under the agent's rules.

vLLM's `HTTPVLLMWeightSyncClient`, and what else was written for a `vllm serve` in dev mode, work on them unchanged, on
any engine. Inside a vLLM server they stand before vLLM's own routes of the same paths, which know no key and no rules.
"""

import dataclasses
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import JSONResponse, PlainTextResponse, Response

from rlbus.schemas import (
    AbortedData,
    AbortRequest,
    FaultCode,
    FlushCache,
    Generation,
    PauseGeneration,
    PauseMode,
    ResultStatus,
    ResumeGeneration,
    Sleep,
    SleepTag,
    WakeUp,
)
from rlbus.workers.system.calls import Call, Endpoint, OpError, pause
from rlbus.workers.system.dynamo_bodies import HandlerError
from rlbus.workers.system.dynamo_loras import load_lora, unload_lora
from rlbus.workers.system.vllm_weights import VllmWeights
from rlbus.workers.system.vllm_words import (
    VLLM_SHAPE,
    Abort,
    AbortNamed,
    LoadAdapter,
    NoBody,
    UnloadAdapter,
    body_of,
    flag,
    mode_of,
    nothing,
    query_of,
    wrong,
)


def vllm_endpoints() -> list[Endpoint]:
    """All of vLLM's paths that are served."""
    weights = VllmWeights()
    posts = {
        "/pause": _pause,
        "/resume": _resume,
        "/abort_requests": _abort,
        "/reset_prefix_cache": _reset_prefix_cache,
        "/reset_mm_cache": _reset_cache,
        "/reset_encoder_cache": _reset_cache,
        "/sleep": _sleep,
        "/release_kv_cache_memory": _release_kv_cache,
        "/wake_up": _wake_up,
        "/init_weight_transfer_engine": weights.init,
        "/shutdown_weight_transfer_engine": weights.shutdown,
        "/start_weight_update": weights.start,
        "/start_draft_weight_update": weights.no_draft,
        "/update_weights": weights.update,
        "/finish_weight_update": weights.finish,
        "/update_weight_version": weights.set_version,
        "/weight_checker": weights.check,
        "/collective_rpc": weights.rpc,
        "/init_broadcaster": weights.no_broadcaster,
        "/scale_elastic_ep": _supervised,
        "/fault_tolerance/apply": _supervised,
        "/v1/load_lora_adapter": _load_adapter,
        "/v1/unload_lora_adapter": _unload_adapter,
        "/inference/v1/abort_requests": _abort_named,
        "/adapters": _by_name_only,
    }
    gets = {
        "/is_paused": _is_paused,
        "/is_sleeping": _is_sleeping,
        "/get_world_size": _world_size,
        "/weight_info": weights.info,
    }
    return [
        *(Endpoint(path, "POST", handler, VLLM_SHAPE) for path, handler in posts.items()),
        *(Endpoint(path, "GET", handler, VLLM_SHAPE) for path, handler in gets.items()),
        Endpoint("/adapters/{adapter_name}", "DELETE", _by_name_only, VLLM_SHAPE),
    ]


async def _pause(call: Call) -> Response:
    """The pause is the caller's, and ends by itself unless it is renewed by another one."""
    query = query_of(call, {"mode", "clear_cache"})
    mode, clear_cache = mode_of(query), flag(query, "clear_cache", True)
    body_of(call, NoBody)
    await pause(call, PauseGeneration(mode=mode, clear_cache=clear_cache))
    return JSONResponse({"status": "paused"})


async def _resume(call: Call) -> Response:
    nothing(call)
    await call.do(ResumeGeneration())
    return JSONResponse({"status": "resumed"})


async def _supervised(call: Call) -> Response:
    """Answered, and not left to vLLM's own routes: the group of an update is formed for ranks that would change."""
    why = "a worker's ranks are fixed, and its supervisor restarts what fails; start it anew to change them"
    raise wrong(why, HTTPStatus.NOT_IMPLEMENTED)


async def _by_name_only(call: Call) -> Response:
    """SageMaker's routes for adapters, answered too: vLLM's own load any folder, past roots and revisions."""
    why = "adapters are loaded by /v1/load_lora_adapter and unloaded by /v1/unload_lora_adapter"
    raise wrong(why, HTTPStatus.NOT_IMPLEMENTED)


async def _is_paused(call: Call) -> Response:
    query_of(call)
    await call.agent.observe()
    generation = call.agent.status().generation
    if generation is Generation.UNKNOWN:
        raise wrong("the engine doesn't say how it is", HTTPStatus.INTERNAL_SERVER_ERROR)
    return JSONResponse({"is_paused": generation is not Generation.RUNNING})


async def _abort(call: Call) -> Response:
    query_of(call)
    num = await _aborted(call, body_of(call, Abort).request_ids or None)
    return JSONResponse({"status": "aborted", "aborted": num})


async def _abort_named(call: Call) -> Response:
    """As vLLM's route for servers that hand requests on: an empty answer, and an empty list means none, not all."""
    query_of(call)
    if request_ids := body_of(call, AbortNamed).request_ids:
        await _aborted(call, request_ids)
    return Response()


async def _aborted(call: Call, request_ids: tuple[str, ...] | None) -> int:
    data = (await call.do(AbortRequest(request_ids=request_ids))).data
    # Those that end at their first token are aborted, too.
    return (data.num_aborted or 0) + data.num_deferred if isinstance(data, AbortedData) else 0


async def _reset_prefix_cache(call: Call) -> Response:
    """rlbus empties all caches, and preempts for it where the engine needs that: no less than the flags ask for."""
    query = query_of(call, {"reset_running_requests", "reset_external"})
    for name in ("reset_running_requests", "reset_external"):
        flag(query, name, False)
    body_of(call, NoBody)
    return JSONResponse({"success": await _flushed(call)})


async def _reset_cache(call: Call) -> Response:
    nothing(call)
    if not await _flushed(call):
        raise wrong("not every cache could be emptied; try again", HTTPStatus.SERVICE_UNAVAILABLE)
    return Response()


async def _flushed(call: Call) -> bool:
    result = await call.submit(FlushCache())
    if result.fault is not None and result.fault.code is FaultCode.FLUSH_FAILED:
        return False
    if result.status is not ResultStatus.OK:
        raise OpError(result)
    return True


async def _sleep(call: Call) -> Response:
    query = query_of(call, {"level", "mode"})
    level = query.get("level", "1")
    if level not in ("1", "2"):
        raise wrong(f"level={level[:8]!r}: use 1 or 2; pause does what 0 does")
    mode = mode_of(query)
    body_of(call, NoBody)
    await call.do(Sleep(level=int(level), mode=mode))
    return JSONResponse({"status": "sleeping", "level": int(level)})


async def _release_kv_cache(call: Call) -> Response:
    nothing(call)
    await call.do(Sleep(tags=(SleepTag.KV_CACHE,), mode=PauseMode.KEEP))
    return JSONResponse({"status": "kv_cache_released"})


async def _wake_up(call: Call) -> Response:
    """It never ends a pause: who paused resumes."""
    names = query_of(call, {"tags"}, {"tags"}).getlist("tags")
    unknown = [name[:64] for name in names if name not in tuple(SleepTag)]
    if unknown:
        raise wrong(f"there is no tag {unknown[0]!r}; use {', '.join(SleepTag)}")
    body_of(call, NoBody)
    await call.do(WakeUp(tags=tuple(SleepTag(name) for name in names) or None))
    status = "sleeping" if call.agent.state.asleep else "awake"
    return JSONResponse({"status": status, "tags": names or None})


async def _is_sleeping(call: Call) -> Response:
    query_of(call)
    await call.agent.observe()
    return JSONResponse({"is_sleeping": bool(call.agent.status().asleep)})


async def _world_size(call: Call) -> Response:
    if not flag(query_of(call, {"include_dp"}), "include_dp", True):
        raise wrong("include_dp=false isn't served: a worker's world size is that of all its ranks")
    return JSONResponse({"world_size": call.agent.descriptor.world_size})


async def _load_adapter(call: Call) -> Response:
    """A name has revisions here: other files under it are its next, loaded in place or not."""
    query_of(call)
    body = body_of(call, LoadAdapter)
    if body.is_3d_lora_weight:
        raise wrong("is_3d_lora_weight isn't served", HTTPStatus.NOT_IMPLEMENTED)
    asked = {"lora_name": body.lora_name, "source": {"uri": body.lora_path}}
    await _as_dynamo(call, asked, load_lora)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def _unload_adapter(call: Call) -> Response:
    query_of(call)
    body = body_of(call, UnloadAdapter)
    await _as_dynamo(call, {"lora_name": body.lora_name}, unload_lora)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _as_dynamo(call: Call, fields: dict[str, Any], handler: Callable[[Call], Awaitable[Any]]) -> None:
    """Do what Dynamo's route does; its 200 with an error in it has a status of its own here."""
    if "load_lora" not in call.agent.descriptor.routes:
        raise wrong("there are no adapters here", HTTPStatus.NOT_FOUND)
    inner = dataclasses.replace(call, body=msgspec.json.encode(fields), op_id=call.name)
    try:
        await handler(inner)
    except HandlerError as exc:
        raise wrong(exc.message, exc.meant) from exc
    finally:
        call.has_op = inner.has_op
