"""Where a worker's HTTP surface listens, and who may use it.

| variable | field | meaning |
|---|---|---|
| `RLBUS_SYSTEM_HOST` | `host` | address to listen on; 127.0.0.1 |
| `RLBUS_SYSTEM_PORT` | `port` | 0 takes a free one (the default), -1 has none at all |
| `RLBUS_SYSTEM_TOKEN` | `token` | bearer token that every request needs; none on loopback |
| `RLBUS_ADVERTISE_HOST` | `advertise_host` | host that others reach it at |
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlbus._addresses import is_loopback
from rlbus.errors import ConfigError
from rlbus.workers.addresses import ADVERTISE_HOST, check_advertised

DEFAULT_HOST = "127.0.0.1"
# No surface at all.
NO_PORT = -1
MAX_PORT = 65_535
# field -> environment variable
ENV_NAMES = {
    "host": "RLBUS_SYSTEM_HOST",
    "port": "RLBUS_SYSTEM_PORT",
    "token": "RLBUS_SYSTEM_TOKEN",
    "advertise_host": ADVERTISE_HOST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig:
    """The surface of one worker.

    Raises:
        ConfigError: a field is wrong; or it could be reached from elsewhere, and has no token.
    """

    host: str = DEFAULT_HOST
    port: int = 0
    token: str | None = field(default=None, repr=False)
    advertise_host: str | None = None

    def __post_init__(self) -> None:
        if not NO_PORT <= self.port <= MAX_PORT:
            raise ConfigError("system_port", self.port, f"use 0 for a free one, {NO_PORT} for none, or a port")
        check_token(self.token)
        check_advertised(self.advertise_host)
        if self.is_on and self.token is None and not is_loopback(self.host):
            raise ConfigError(
                "system_host", self.host, f"others can reach it; set a token in {ENV_NAMES['token']}, or use 127.0.0.1"
            )

    @property
    def is_on(self) -> bool:
        """Whether there is to be a surface."""
        return self.port != NO_PORT

    @classmethod
    def from_env(cls, *, environ: Mapping[str, str] | None = None, **overrides: Any) -> "SystemConfig":
        """Build from the environment; a keyword that isn't None wins over its variable.

        Raises:
            ConfigError: a value is wrong; names the variable.
        """
        env = os.environ if environ is None else environ
        given = {name: value for name, value in overrides.items() if value is not None}
        for name, variable in ENV_NAMES.items():
            if (text := env.get(variable, "")) and name not in given:
                given[name] = _port(variable, text) if name == "port" else text
        return cls(**given)


def check_token(token: str | None) -> None:
    """Raises ConfigError for a token that can't stand in a header. It isn't shown."""
    if token is not None and (not token or not token.isascii() or any(not c.isprintable() or c == " " for c in token)):
        raise ConfigError(ENV_NAMES["token"], "***", "use printable ASCII characters without spaces")


def _port(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(variable, text, "use the number of a port") from None
