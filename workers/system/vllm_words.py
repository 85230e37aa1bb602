"""How vLLM's RL routes are asked and how they answer: queries, bodies, and the shape of an error.

Strict where vLLM isn't: a query parameter or a field that nobody knows is an error that names it, since a typo in
`clear_cach` must not pause an engine in another way than was meant.
"""

from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse, Response

from rlbus._vllm_words import RETRY_AFTER_S, error_body
from rlbus.schemas import Fault, FaultCode, PauseMode, Result
from rlbus.workers.system.calls import STATUS_OF, Call, CallError, Shape

B = TypeVar("B", bound=msgspec.Struct)

# As on the controller's surface: what passes by itself is 503, which clients try again.
VLLM_STATUS_OF: Mapping[FaultCode, int] = {**STATUS_OF, FaultCode.BUSY: 503, FaultCode.ASLEEP: 409}
_TRUE = frozenset({"true", "1", "yes", "on", "t", "y"})
_FALSE = frozenset({"false", "0", "no", "off", "f", "n"})
MAX_NAME_CHARS = 64


class VllmShape:
    """How vLLM spells what goes wrong; `rlbus` beside it has what rlbus knows."""

    def error(self, error: CallError) -> Response:
        """A request that wasn't carried out."""
        return _answer(error.status, error.message)

    def fault(self, result: Result) -> Response:
        """An op that was refused, or failed."""
        fault = result.fault or Fault(code=FaultCode.INTERNAL, message="no reason was given")
        known = {"op_id": result.op_id, "code": fault.code.value, "retryable": fault.retryable}
        status = VLLM_STATUS_OF.get(fault.code, 500)
        return _answer(status, fault.message, {"rlbus": {**known, "detail": dict(fault.detail)}})


VLLM_SHAPE: Shape = VllmShape()


def _answer(status: int, message: str, more: Mapping[str, Any] | None = None) -> Response:
    headers = {"retry-after": str(RETRY_AFTER_S)} if status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    body = error_body(HTTPStatus(status), message) | dict(more or {})
    return JSONResponse(body, status_code=status, headers=headers)


def wrong(message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> CallError:
    """The request itself is wrong, or asks for what isn't served."""
    return CallError(status, status.phrase, message)


def query_of(call: Call, known: Collection[str] = (), repeatable: Collection[str] = ()) -> QueryParams:
    """The query. Raises CallError for a parameter that isn't known, or is given twice."""
    query = call.request.query_params
    unknown = sorted(name[:MAX_NAME_CHARS] for name in set(query) - set(known))
    if unknown:
        has = ", ".join(sorted(known)) or "none"
        raise wrong(f"unknown query parameter {unknown[0]!r}; this route has: {has}")
    for name in query:
        if name not in repeatable and len(query.getlist(name)) > 1:
            raise wrong(f"query parameter {name} is given twice")
    return query


def flag(query: QueryParams, name: str, default: bool) -> bool:
    """A boolean of the query, as pydantic reads them. Raises CallError: it is none."""
    text = query.get(name, str(default)).lower()
    if text not in _TRUE | _FALSE:
        raise wrong(f"{name}={text[:MAX_NAME_CHARS]!r}: use true or false")
    return text in _TRUE


def mode_of(query: QueryParams) -> PauseMode:
    """`mode`, by default vLLM's, "abort". Raises CallError: it is none."""
    text = query.get("mode", "abort")
    if text not in tuple(PauseMode):
        raise wrong(f"mode={text[:MAX_NAME_CHARS]!r}: use abort, wait or keep")
    return PauseMode(text)


def nothing(call: Call) -> None:
    """Raises CallError for a route that is told nothing and was told something."""
    query_of(call)
    body_of(call, NoBody)


def body_of(call: Call, as_type: type[B]) -> B:
    """The body, strict. Raises CallError: it isn't one; names the field."""
    return call.parse(as_type)


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the bodies."""


class NoBody(Body, frozen=True):
    """Of routes that are told nothing."""


class Abort(Body, frozen=True):
    """`/abort_requests`: no or empty `request_ids` means all."""

    request_ids: tuple[str, ...] | None = None


class AbortNamed(Body, frozen=True):
    """`/inference/v1/abort_requests`."""

    request_ids: tuple[str, ...]


class Init(Body, frozen=True):
    """`/init_weight_transfer_engine`."""

    init_info: dict[str, Any]


class Update(Body, frozen=True):
    """`/update_weights`: vLLM's (`update_info`), or prime-rl's (`weight_dir`). Caches are always emptied, so
    `skip_prefix_cache_reset` changes nothing.
    """

    update_info: dict[str, Any] | list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    weight_dir: str | msgspec.UnsetType | None = msgspec.UNSET
    skip_prefix_cache_reset: bool = False


class Finish(Body, frozen=True):
    """`/finish_weight_update`."""

    weight_version: str | None = None


class NewVersion(Body, frozen=True):
    """`/update_weight_version`."""

    new_version: str


class Check(Body, frozen=True):
    """`/weight_checker`."""

    action: str
    baseline: dict[str, str] | None = None


class Rpc(Body, frozen=True):
    """`/collective_rpc`."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class LoadAdapter(Body, frozen=True):
    """`/v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadAdapter(Body, frozen=True):
    """`/v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None
