"""vLLM's weight transfer on the whole fleet: its own `HTTPVLLMWeightSyncClient` drives it as if it were one server."""

import json
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rlbus.client import TRANSFER_DEADLINE_S
from rlbus.controller.http import reading
from rlbus.controller.http.calls import Calls, answered, done
from rlbus.schemas import TransferStep, Version
from rlbus.sync_client import version_of


class InitBody(msgspec.Struct):
    """As vLLM's."""

    init_info: dict[str, Any]


class FinishBody(msgspec.Struct):
    """As vLLM's; but versions are ordered here."""

    weight_version: str | None = None


class NoBody(msgspec.Struct):
    """Of steps that are told nothing."""


class NativeRoutes:
    """The steps that have a route of their own; `update_weights` shares one with prime-rl's (`fleet.py`)."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def routes(self) -> list[Route]:
        """To be mounted at the root, as vLLM has them."""
        named = {
            "/init_weight_transfer_engine": ("initialize the weight transfer", self._init),
            "/start_weight_update": ("start a weight update", self._start),
            "/finish_weight_update": ("finish the weight update", self._finish),
            "/shutdown_weight_transfer_engine": ("shut down the weight transfer", self._shutdown),
        }
        return [Route(path, answered(what, handler), methods=["POST"]) for path, (what, handler) in named.items()]

    async def update(self, request: Request, info: dict[str, Any] | list[dict[str, Any]]) -> Response:
        """Receive what `info` describes, everywhere. Raises, Cancel: see `Calls.run`."""
        return await self._take(request, TransferStep.UPDATE, "Weights updated", info)

    async def _init(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"component"}, {"component"})
        body = await reading.read_body(request, InitBody)
        return await self._take(request, TransferStep.INIT, "Weight transfer initialized", body.init_info)

    async def _start(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"component"}, {"component"})
        await reading.read_body(request, NoBody)
        return await self._take(request, TransferStep.START, "Weight update started")

    async def _finish(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"component"}, {"component"})
        body = await reading.read_body(request, FinishBody)
        version = None if body.weight_version is None else version_of(body.weight_version)
        return await self._take(request, TransferStep.FINISH, "Weight update finished", version=version)

    async def _shutdown(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"component"}, {"component"})
        await reading.read_body(request, NoBody)
        return await self._take(request, TransferStep.SHUTDOWN, "Weight transfer shut down")

    async def _take(
        self, request: Request, step: TransferStep, message: str, info: Any = None, version: Version | None = None
    ) -> Response:
        text = None if info is None else json.dumps(info)
        report = await self._calls.run(
            request,
            TRANSFER_DEADLINE_S,
            ("transfer", step, text, version),
            lambda fleet, **op: fleet.transfer(step, text, version=version, **op),
        )
        return done({"message": message}, report)
