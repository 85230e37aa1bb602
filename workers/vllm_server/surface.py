"""rlbus' HTTP surface inside a vLLM API server: on its port, before vLLM's own routes of the same paths."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from rlbus._addresses import is_loopback
from rlbus.errors import ConfigError
from rlbus.workers.system.app import Door, make_routes
from rlbus.workers.system.calls import Provider
from rlbus.workers.system.settings import ENV_NAMES, NO_PORT, check_token
from rlbus.workers.system.surfaces import all_endpoints

_log = logging.getLogger("rlbus.workers")

# Where rlbus' health, metrics and outcomes are: vLLM has the bare paths.
BASE_PREFIX = "/rlbus"
# vLLM's own variable; its option --api-key wins.
API_KEY = "VLLM_API_KEY"


def token_of(environ: Mapping[str, str]) -> str | None:
    """The token of the surface, if one is set. Raises ConfigError: it can't stand in a header."""
    token = environ.get(ENV_NAMES["token"]) or None
    check_token(token)
    return token


def keys_of(args: Any, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The server's API keys, from where vLLM takes them: the option, else its variable."""
    given = args.api_key or environ.get(API_KEY, "")
    return tuple(key for key in ([given] if isinstance(given, str) else given) if key)


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether there is to be a surface. Raises ConfigError: no port; one of its own it can't have here."""
    text = environ.get(ENV_NAMES["port"], "")
    if text in ("", "0", str(NO_PORT)):
        return text != str(NO_PORT)
    raise ConfigError(ENV_NAMES["port"], text, f"inside vLLM it is on vLLM's port; use 0, or {NO_PORT} for none")


def mount(app: Any, args: Any, token: str | None, num_servers: int, provider: Provider) -> bool:
    """Put the surface before the application's own routes; whether it is there. Called once, before it serves.

    It is guarded by `token`, and by the API keys of the server, each of which will do. Without any of them only a
    server on loopback, or on a Unix socket, has it. With several server processes on one port there is none: only one
    of them has the agent, and no client can choose it.
    """
    if num_servers > 1:
        _log.warning("rlbus: with %d API servers on one port there is no HTTP surface of rlbus", num_servers)
        return False
    tokens = [key for key in (token, *keys_of(args, os.environ)) if key]
    is_private = bool(args.uds) or is_loopback(args.host or "")
    if not tokens and not is_private:
        text = "rlbus: others can reach this server, so without a token it has no HTTP surface of rlbus; set %s"
        _log.warning(text, ENV_NAMES["token"])
        return False
    door = Door(provider, tokens)
    app.router.routes[:0] = make_routes(all_endpoints(door, BASE_PREFIX), door)
    return True
