"""`GET /rlbus` of a vLLM server with rlbus's plugin: what a sidecar can't learn from vLLM's own routes.

Only a server with VLLM_SERVER_DEV_MODE=1 has it, as it has vLLM's own RL routes. Where the server has API keys, or
rlbus' token, it wants one of them: the ids of requests in flight are their clients' business.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rlbus.errors import EngineError
from rlbus.schemas import Fault, FaultCode
from rlbus.workers.system.app import has_key

ABOUT = "/rlbus"
_DEV_MODE = "VLLM_SERVER_DEV_MODE"


class About(msgspec.Struct, frozen=True, kw_only=True):
    """`boot_id` is another one for every start of the server. `worker` is its name on the bus, if it is there by
    itself. `requests` are the ids under which vLLM knows what is in flight; None if this process sees only a part.
    `lora_capacity` is how many adapters a sidecar may load by the routes of `lora_routes`; None: there are no such.
    """

    boot_id: str
    worker: str | None = None
    requests: tuple[str, ...] | None = None
    lora_capacity: int | None = None

    @classmethod
    def parse(cls, data: Any) -> "About":
        """From an answer. Raises: EngineError: it is none of ours."""
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as exc:
            text = f"{ABOUT} answers in another shape than this version of rlbus: {exc}"
            raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text)) from exc


def requests_of(llm: Any) -> tuple[str, ...] | None:
    """The ids of what is in flight, by AsyncLLM's own book; None if other API servers have requests, too."""
    if llm is None or llm.vllm_config.parallel_config._api_process_count != 1:
        return None
    states = llm.output_processor.request_states
    found = (str(state.external_req_id or own) for own, state in states.items())
    return tuple(dict.fromkeys(found))


def has_dev_mode(environ: Mapping[str, str]) -> bool:
    """Whether a server has vLLM's RL routes."""
    return environ.get(_DEV_MODE, "0") != "0"


def unauthorized() -> Response:
    """For who brings none of the keys, in vLLM's own words: entrypoints/serve/middleware/authenticate.py"""
    return JSONResponse({"error": "Unauthorized"}, status_code=401, headers={"www-authenticate": "Bearer"})


def attach(
    app: Any,
    tell: Callable[[], About],
    keys: Callable[[], Sequence[str]] = tuple,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Add the route to vLLM's application, if it has vLLM's RL routes, too. A server with `keys` wants one of them."""
    if not has_dev_mode(os.environ if environ is None else environ):
        return

    async def about(request: Request) -> Response:
        wanted = keys()
        if wanted and not has_key(request.headers, wanted):
            return unauthorized()
        return JSONResponse(msgspec.to_builtins(tell()))

    app.add_api_route(ABOUT, about, methods=["GET"], include_in_schema=False)
