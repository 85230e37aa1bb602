"""JSON bodies of HTTP callers, read strictly: RFC 8259 leaves a field that stands twice to each reader, and callers who
send one mean something that nobody here can know.
"""

import json
from typing import Any

import msgspec

MAX_NAME_CHARS = 64


class BodyError(ValueError):
    """A body is no JSON, or can't be meant. The text says why."""


def read_json(data: bytes) -> Any:
    """What a body says.

    Raises:
        BodyError: no JSON, too deep, or an object in it has a field twice; names it.
    """
    try:
        found = msgspec.json.decode(data)
        # msgspec doesn't tell. Only fields matter here, so numbers stay text.
        json.loads(data.decode(), object_pairs_hook=_once, parse_int=str, parse_float=str, parse_constant=str)
    except BodyError:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise BodyError(f"the body is no JSON: {exc}") from exc
    return found


def _once(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise BodyError(f"field {name[:MAX_NAME_CHARS]!r} is given twice")
        seen.add(name)
