"""Words of vLLM's HTTP server that rlbus speaks in two places: on a worker, and for a whole fleet on the controller."""

from http import HTTPStatus
from typing import Any

# What a client that is told "later" should wait, in seconds; an op takes milliseconds to minutes.
RETRY_AFTER_S = 1
# Why prime-rl's `/init_broadcaster` is answered, and not left out: it takes a 404 for "needs none", and its trainer
# would wait in the group for ever.
NO_BROADCASTER = "prime-rl's own NCCL group isn't served; set its weight broadcast to filesystem, or use rlbus.Trainer"


def error_body(status: HTTPStatus, message: str, param: str | None = None) -> dict[str, Any]:
    """An error as vLLM's server words it; `param` is the field that it is about."""
    kind = "BadRequestError" if status is HTTPStatus.BAD_REQUEST else status.phrase
    return {"error": {"message": message, "type": kind, "param": param, "code": int(status)}}
