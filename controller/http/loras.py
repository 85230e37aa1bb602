"""Adapters (LoRA) on the whole fleet by vLLM's routes, and by prime-rl's; and the models that a fleet shows.

vLLM loads a name from a path; here a name has revisions, whose bytes never change. `policy@7` asks for that revision.
Of `policy` alone the files decide: those of its newest revision keep that, others get the next one, and requests that
name `policy` get the newest. A caller that names its op tells repeats by that instead. As in vLLM, a name that is there
already is loaded anew with `load_inplace` only.
"""

from collections.abc import Collection
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rlbus.client import FleetClient
from rlbus.controller.http import reading
from rlbus.controller.http.answers import OP_ID, BadRequestError, error_of
from rlbus.controller.http.calls import Calls, answered, done
from rlbus.controller.http.summing import Summing
from rlbus.controller.lora_book import should_have
from rlbus.controller.lora_reach import reach, reach_of
from rlbus.errors import RLBusError
from rlbus.lora_verbs import LIST_DEADLINE_S, LOAD_DEADLINE_S, UNLOAD_DEADLINE_S
from rlbus.schemas import FleetLora, FleetView, FolderSource, Report, Target, is_lora_name, lora_id, split_lora_id

# Response header: what the adapter is called, "policy@7".
LORA = "x-rlbus-lora"
# Request header: the checksum of the files, for a folder that only the workers can read.
CHECKSUM_HEADER = "x-rlbus-lora-checksum"
_HEX = frozenset("0123456789abcdef")
CHECKSUM_CHARS = 64


class LoadBody(msgspec.Struct):
    """As vLLM's."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadBody(msgspec.Struct):
    """As vLLM's, which looks at the name only, too."""

    lora_name: str
    lora_int_id: int | None = None


class LoraRoutes:
    """`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`; `/load_lora_adapter` as prime-rl's servers have it."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._summing = Summing(f"of a folder that only the workers see give {CHECKSUM_HEADER}")

    def routes(self) -> list[Route]:
        """To be mounted at the root, as vLLM has them."""
        return [
            Route("/v1/load_lora_adapter", answered("load the adapter", self._load), methods=["POST"]),
            Route("/v1/unload_lora_adapter", answered("unload the adapter", self._unload), methods=["POST"]),
            Route("/load_lora_adapter", answered("load the adapter", self._load_again), methods=["POST"]),
        ]

    async def _load(self, request: Request) -> Response:
        body = await self._body(request)
        report = await self._run_load(request, body)
        return _said(f"Success: LoRA adapter '{body.lora_name}' added successfully.", report)

    async def _load_again(self, request: Request) -> Response:
        # prime-rl's servers are patched to load a name anew, and its client gives one name a new folder each step.
        body = msgspec.structs.replace(await self._body(request), load_inplace=True)
        try:
            report = await self._run_load(request, body)
        except RLBusError as exc:
            # Of adapters, prime-rl's client asks again after 404 and 500 only: 504, too, would end its run.
            later = HTTPStatus.INTERNAL_SERVER_ERROR
            return error_of(exc, "load the adapter", request.scope.get(OP_ID), later=later)
        answer = done({"status": "ok"}, report)
        answer.headers[LORA] = _ids(report)
        return answer

    async def _body(self, request: Request) -> LoadBody:
        reading.check_query(request.query_params, {"component"}, {"component"})
        body = await reading.read_body(request, LoadBody)
        if not body.lora_name or not body.lora_path:
            raise BadRequestError("Both 'lora_name' and 'lora_path' must be provided.")
        if body.is_3d_lora_weight:
            problem = "is_3d_lora_weight=true isn't served: the engines find the format in the files"
            raise BadRequestError(problem, "is_3d_lora_weight", HTTPStatus.NOT_IMPLEMENTED)
        _split(body.lora_name)
        return body

    async def _run_load(self, request: Request, body: LoadBody) -> Report:
        given, is_named = _checksum_of(request), reading.op_id_of(request) is not None

        async def load(fleet: FleetClient, *, target: Target, op_id: str, deadline_s: float) -> Report:
            view = await fleet.status(deadline_s=LIST_DEADLINE_S)
            name, revision = _split(body.lora_name)
            _check_free(view, body, target, op_id)
            folder = _folder_of(body.lora_path)
            checksum = await self._summing.sum_of(folder, deadline_s) if given is None else given
            if revision is None and not is_named:  # of a named op, the name says what is a repeat
                revision = _same(view.loras, name, checksum)
            return await fleet.load_lora(
                name,
                body.lora_path,
                target,
                revision=revision,
                shared=True,
                checksum=checksum,
                hot_swap=body.load_inplace,
                evict_idle=True,  # one adapter a step must not pile up
                deadline_s=deadline_s,
                op_id=op_id,
            )

        what = ("load_lora", body.lora_name, body.lora_path, body.load_inplace, given)
        return await self._calls.run(request, LOAD_DEADLINE_S, what, load)

    async def _unload(self, request: Request) -> Response:
        reading.check_query(request.query_params, {"component"}, {"component"})
        body = await reading.read_body(request, UnloadBody)
        if not body.lora_name:
            raise BadRequestError("'lora_name' needs to be provided to unload a LoRA adapter.")
        name, revision = _split(body.lora_name)
        is_named = reading.op_id_of(request) is not None

        async def unload(fleet: FleetClient, *, target: Target, op_id: str, deadline_s: float) -> Report:
            # A repeat, which only a named op can be, has its report.
            if not is_named and not _has(await fleet.status(deadline_s=LIST_DEADLINE_S), name, revision):
                problem = f"The lora adapter '{body.lora_name}' cannot be found."
                raise BadRequestError(problem, "lora_name", HTTPStatus.NOT_FOUND)
            return await fleet.unload_lora(name, target, revision=revision, deadline_s=deadline_s, op_id=op_id)

        report = await self._calls.run(request, UNLOAD_DEADLINE_S, ("unload_lora", body.lora_name), unload)
        return _said(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", report)


def cards(view: FleetView, created: int) -> list[dict[str, Any]]:
    """The models of workers that may be sent rollouts, as OpenAI lists them, and the adapters as vLLM does. Pure.

    An adapter is shown under its id, and the newest of a name under that, too, if one of these workers has it.
    """
    admitted = [m for m in view.members if m.admitted]
    common = {"object": "model", "created": created, "owned_by": "rlbus"}
    names = sorted({m.descriptor.model for m in admitted if m.descriptor.model})
    found: list[dict[str, Any]] = [{"id": name, **common} for name in names]
    newest: dict[str, dict[str, Any]] = {}
    for one in sorted(view.loras, key=lambda lora: (lora.name, lora.revision)):
        own = lora_id(one.name, one.revision)
        having = [
            m
            for m in admitted
            if should_have(one, m.worker)
            and "load_lora" in m.descriptor.routes
            and all(behind.id != own for behind in m.loras_behind)
        ]
        if having:
            root = one.source.path if isinstance(one.source, FolderSource) else None
            card = {"id": own, **common, "root": root, "parent": having[0].descriptor.model or None}
            found.append(card)
            newest[one.name] = {**card, "id": one.name}
    return [*found, *newest.values()]


def _split(name: str) -> tuple[str, int | None]:
    """(name, revision) of "policy@7" or "policy". Raises BadRequestError."""
    if (both := split_lora_id(name)) is not None:
        return both
    if not is_lora_name(name):
        problem = f"lora_name={name[: reading.MAX_NAME_CHARS]!r}: use 1 to 64 of A-Z a-z 0-9 _ . -, and maybe @revision"
        raise BadRequestError(problem, "lora_name")
    return name, None


def _checksum_of(request: Request) -> str | None:
    text = request.headers.get(CHECKSUM_HEADER)
    if text is not None and (len(text) != CHECKSUM_CHARS or not set(text) <= _HEX):
        raise BadRequestError(f"header {CHECKSUM_HEADER}: use {CHECKSUM_CHARS} lower-case hex digits", CHECKSUM_HEADER)
    return text


def _check_free(view: FleetView, body: LoadBody, target: Target, op_id: str) -> None:
    """Raises BadRequestError: the name is a model's, or loaded already and may not be loaded anew. vLLM's words."""
    if body.lora_name in {m.descriptor.model for m in view.members}:
        problem = f"The lora adapter '{body.lora_name}' conflicts with a served base model."
        raise BadRequestError(problem, "lora_name")
    name, revision = _split(body.lora_name)
    loaded = [one for one in view.loras if one.name == name and revision in (None, one.revision)]
    if not body.load_inplace and any(one.op_id != op_id and _meet(one, target) for one in loaded):
        problem = (
            f"The lora adapter '{body.lora_name}' has already been loaded. If you want to load the adapter in place, "
            "set 'load_inplace' to True."
        )
        raise BadRequestError(problem, "lora_name")


def _meet(one: FleetLora, asked: Target) -> bool:
    """Whether an adapter may be that of some worker of those that are asked for."""
    return bool(reach(one) & reach_of(asked))


def _has(view: FleetView, name: str, revision: int | None) -> bool:
    """Whether the fleet, or any worker by its own word, has it."""
    ids = {lora_id(one.name, one.revision) for one in view.loras}
    for member in view.members:
        ids |= set(() if member.status.loras is None else member.status.loras.ids)
    wanted = [split_lora_id(text) for text in ids]
    return any(both is not None and both[0] == name and revision in (None, both[1]) for both in wanted)


def _same(loras: Collection[FleetLora], name: str, checksum: str) -> int | None:
    """The newest revision of a name, if it has these bytes; None: the next one."""
    newest = max((one for one in loras if one.name == name), key=lambda one: one.revision, default=None)
    return newest.revision if newest is not None and newest.checksum == checksum else None


def _folder_of(path: str) -> Path:
    """Raises BadRequestError."""
    folder = Path(path)
    if not folder.is_absolute():
        problem = f"lora_path={path[: reading.MAX_NAME_CHARS]!r}: give the absolute path under which the workers see it"
        raise BadRequestError(problem, "lora_path")
    return folder


def _ids(report: Report) -> str:
    return "" if report.lora is None else ",".join(report.lora.ids)


def _said(text: str, report: Report) -> Response:
    """vLLM's answer, which is one line of text, and what rlbus knows in headers."""
    return Response(text, headers={OP_ID: report.op_id, LORA: _ids(report)})
