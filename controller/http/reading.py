"""What a request says, checked before anything is begun: query, headers and body, each strict, bounded and named.

Unknown names are an error that names them: a typo in `clear_cach` must not pause a fleet in another way than was meant.
"""

import asyncio
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request

from rlbus._json_body import BodyError, read_json
from rlbus._seconds import read_seconds
from rlbus.controller.http.answers import BadRequestError
from rlbus.schemas import is_token

B = TypeVar("B", bound=msgspec.Struct)

# Largest body that is read: a list of 10,000 request ids fits.
MAX_BODY_BYTES = 1 << 20
# How long a body may take to arrive, in seconds.
BODY_S = 30.0
# Names that are listed in an error, each at most so long.
MAX_NAMED = 8
MAX_NAME_CHARS = 64
# Longest name that a caller may give itself.
MAX_CALLER_CHARS = 128

# Headers that any caller may send. An op_id makes a repeat join the first.
OP_ID_HEADER = "x-rlbus-op-id"
CALLER_HEADER = "x-rlbus-caller"
LEASE_HEADER = "x-rlbus-lease-s"
LIMIT_HEADER = "x-rlbus-limit-s"
# A lease of this word is none: a hold until somebody resumes.
HOLD = "hold"

_TRUE = frozenset({"true", "1", "yes", "on", "t", "y"})
_FALSE = frozenset({"false", "0", "no", "off", "f", "n"})


def check_query(query: QueryParams, known: Collection[str], repeatable: Collection[str] = ()) -> None:
    """Raises BadRequestError for a parameter that isn't known, or given twice."""
    check_names(query.keys(), known, "query parameter")
    for name in query:
        if name not in repeatable and len(query.getlist(name)) > 1:
            raise BadRequestError(f"query parameter {name} is given twice", name)


def check_names(given: Collection[str], known: Collection[str], what: str) -> None:
    """Raises BadRequestError that lists whatever of `given` isn't known."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        listed = ", ".join(repr(name[:MAX_NAME_CHARS]) for name in unknown[:MAX_NAMED])
        tail = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
        allowed = ", ".join(sorted(known)) or "none"
        raise BadRequestError(f"unknown {what} {listed}{tail}; use {allowed}", unknown[0][:MAX_NAME_CHARS])


def flag(query: QueryParams, name: str, default: bool) -> bool:
    """A boolean parameter as FastAPI reads it. Raises BadRequestError."""
    text = query.get(name)
    if text is None:
        return default
    word = text.lower()
    if word not in _TRUE | _FALSE:
        raise BadRequestError(f"query parameter {name}={text[:MAX_NAME_CHARS]!r}: use true or false", name)
    return word in _TRUE


def components_of(query: QueryParams) -> tuple[str, ...] | None:
    """The components that `?component=` names, repeated or with commas; None: all. Raises BadRequestError."""
    given = query.getlist("component")
    if not given:
        return None
    names = [name for text in given for name in text.split(",")]
    for name in names:
        if not is_token(name):
            problem = f"component={name[:MAX_NAME_CHARS]!r}: use 1 to 64 of A-Z a-z 0-9 _ -"
            raise BadRequestError(problem, "component")
    return tuple(dict.fromkeys(names))


def seconds_of(request: Request, header: str, default: float, most_s: float) -> float:
    """A duration in a header. Raises BadRequestError unless it is a plain number above 0 and at most `most_s`."""
    text = request.headers.get(header)
    if text is None:
        return default
    given_s = read_seconds(text, most_s)
    if given_s is None:
        use = f"use more than 0 and at most {most_s:g} seconds, as plain digits such as 60 or 0.5"
        raise BadRequestError(f"header {header}: {text[:MAX_NAME_CHARS]!r}: {use}", header)
    return given_s


def op_id_of(request: Request) -> str | None:
    """The op that the caller names, None if it leaves that to us. Raises BadRequestError."""
    text = request.headers.get(OP_ID_HEADER)
    if text is not None and not is_token(text):
        raise BadRequestError(f"header {OP_ID_HEADER}: use 1 to 64 of A-Z a-z 0-9 _ -", OP_ID_HEADER)
    return text


def caller_of(request: Request) -> str:
    """Who asks, for events, history and the owner of leases: what it calls itself, and its address.

    Raises: BadRequestError: the name can't be shown.
    """
    client = request.client
    peer = "unknown" if client is None else client.host
    name = request.headers.get(CALLER_HEADER)
    if name is None:
        return f"http:{peer}"
    if not 0 < len(name) <= MAX_CALLER_CHARS or not name.isprintable():
        problem = f"header {CALLER_HEADER}: use 1 to {MAX_CALLER_CHARS} printable characters"
        raise BadRequestError(problem, CALLER_HEADER)
    return f"http:{name}@{peer}"


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object in the body; an empty body is an empty one.

    Raises: BadRequestError: too large, not JSON, no object, another content type, or too slow.
    Cancel: leaves nothing.
    """
    data = await _read(request)
    if not data:
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        problem = f"content type {kind[:MAX_NAME_CHARS]!r}; send application/json"
        raise BadRequestError(problem, "content-type", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
    try:
        body = read_json(data)
    except BodyError as exc:
        raise BadRequestError(str(exc)) from exc
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


async def read_body(request: Request, kind: type[B]) -> B:
    """The body as `kind`. Raises: BadRequestError: as `read_object`; or fields are unknown, missing or wrong; named.

    Cancel: leaves nothing.
    """
    return parse(await read_object(request), kind)


def parse(body: Mapping[str, Any], kind: type[B]) -> B:
    """An object as `kind`, without any coercion. Raises BadRequestError that names the field."""
    check_names(body.keys(), kind.__struct_fields__, "field")
    try:
        return msgspec.convert(body, kind, strict=True)
    except msgspec.ValidationError as exc:
        _, _, path = str(exc).partition("$.")
        field = path.split("`")[0].split(".")[0].split("[")[0]
        raise BadRequestError(str(exc), field or None) from exc


async def _read(request: Request) -> bytes:
    too_large = BadRequestError(
        f"the body has more than {MAX_BODY_BYTES} bytes", None, HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise too_large
    parts: list[bytes] = []
    size_bytes = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size_bytes += len(part)
                if size_bytes > MAX_BODY_BYTES:
                    raise too_large
                parts.append(part)
    except TimeoutError as exc:
        problem = f"the body didn't arrive within {BODY_S:g} s"
        raise BadRequestError(problem, None, HTTPStatus.REQUEST_TIMEOUT) from exc
    return b"".join(parts)
