"""What a worker answers to NVIDIA Dynamo's parts over the bus, in Dynamo's words.

Source: Dynamo 1.6.1, `dynamo/common/rl/admin.py`.
"""

from rlbus.schemas.base import Wire


class RoutesAnswer(Wire, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to `{"method": "routes"}`: what the worker has under `<system_url>/engine/`, sorted, each once.

    `status` is "ok", or "error" with a `message`; `system_url` is left out if there is none.
    """

    status: str
    routes: tuple[str, ...] | None = None
    system_url: str | None = None
    world_size: int | None = None
    method: str | None = None
    message: str | None = None
