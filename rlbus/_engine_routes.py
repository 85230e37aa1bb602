"""Which names of Dynamo's a worker has under `<system_url>/engine/`, by what it serves on the bus. Pure.

For the worker, which answers Dynamo's query with them, and for whoever lists workers as Dynamo does.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from rlbus.schemas import RoutesAnswer

# Name under `/engine/` -> routes of the bus of which the worker has to serve one; none: every worker serves it.
_NEEDS: dict[str, tuple[str, ...]] = {
    "liveness_probe": (),
    "get_weight_version": (),
    "pause_generation": ("pause_generation",),
    "resume_generation": ("resume_generation",),
    "flush_cache": ("flush_cache",),
    "abort_request": ("abort_request",),
    "set_weight_version": ("set_weight_version",),
    "update_weights_from_disk": ("update_weights_from_disk",),
    # From a folder that the trainer has written, or by its own transfer engine.
    "update_weights_from_distributed": ("update_weights_from_disk", "update_weights"),
    "init_weights_update_group": ("init_weight_transfer_engine",),
    "destroy_weights_update_group": ("shutdown_weight_transfer_engine",),
    "load_lora": ("load_lora",),
    "unload_lora": ("unload_lora",),
}
# The same for what Dynamo serves as `control/<name>`, and doesn't list.
_CONTROL_NEEDS: dict[str, tuple[str, ...]] = {"sleep": ("sleep",), "wake_up": ("wake_up",)}


def has_engine_route(name: str, routes: frozenset[str]) -> bool:
    """Whether a worker that serves these routes of the bus answers `/engine/<name>`, listed or not."""
    needs = (_NEEDS | _CONTROL_NEEDS).get(name)
    return needs is not None and (not needs or bool(routes & set(needs)))


def engine_routes(routes: Iterable[str]) -> tuple[str, ...]:
    """What a worker that serves these routes of the bus has under `/engine/`, sorted."""
    served = frozenset(routes)
    return tuple(sorted(name for name, needs in _NEEDS.items() if not needs or served & set(needs)))


def answer_routes(query: bytes, routes: Iterable[str], system_url: str | None, world_size: int) -> RoutesAnswer | None:
    """Answer a query; None for one that doesn't name a method: it isn't Dynamo's."""
    try:
        asked: Any = msgspec.json.decode(query)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(asked, dict) or "method" not in asked:
        return None
    method = asked["method"]
    if not isinstance(method, str) or not method:
        return RoutesAnswer(status="error", message="rl_dispatch: missing 'method' (str)")
    if method != "routes":
        return RoutesAnswer(status="error", method=method, message="only method 'routes' is answered here")
    if not isinstance(asked.get("kwargs", {}), dict):
        return RoutesAnswer(status="error", method=method, message="rl_dispatch: 'kwargs' must be an object")
    return RoutesAnswer(status="ok", routes=engine_routes(routes), system_url=system_url, world_size=world_size)
