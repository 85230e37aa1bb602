"""Where the controller listens for HTTP, and who may use it.

| variable | field | meaning |
|---|---|---|
| `RLBUS_HTTP_HOST` | `host` | address to listen on; 127.0.0.1 |
| `RLBUS_HTTP_PORT` | `port` | 0 takes a free one; unset: no HTTP at all |
| `RLBUS_HTTP_TOKEN` | `token` | bearer token that every request needs; none on loopback |
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlbus._addresses import is_loopback
from rlbus.errors import ConfigError

DEFAULT_HOST = "127.0.0.1"
HOST_VARIABLE = "RLBUS_HTTP_HOST"
PORT_VARIABLE = "RLBUS_HTTP_PORT"
TOKEN_VARIABLE = "RLBUS_HTTP_TOKEN"
MAX_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """The HTTP side of one controller process.

    Raises:
        ConfigError: a field is wrong; or others can reach it, and it has no token. The token is never shown.
    """

    host: str = DEFAULT_HOST
    port: int = 0
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(PORT_VARIABLE, self.port, "use a port, or 0 for a free one")
        if self.token is not None and not is_header_text(self.token):
            raise ConfigError(TOKEN_VARIABLE, "***", "use printable ASCII characters without spaces")
        if self.token is None and not is_loopback(self.host):
            problem = f"others can reach it: set a token in {TOKEN_VARIABLE}, or listen on {DEFAULT_HOST}"
            raise ConfigError(HOST_VARIABLE, self.host, problem)

    @classmethod
    def from_env(
        cls, *, host: str | None = None, port: int | None = None, environ: Mapping[str, str] | None = None
    ) -> "HttpConfig | None":
        """Build from the environment; what is given wins over its variable. None: nobody asked for HTTP, with a port.

        Raises:
            ConfigError: a value is wrong; names the variable. Or a host is given without a port.
        """
        env = os.environ if environ is None else environ
        text = env.get(PORT_VARIABLE, "")
        used_port = _port(text) if port is None and text else port
        if used_port is None:
            if host is not None:
                raise ConfigError("--http-host", host, "give --http-port, too (0 takes a free one)")
            return None
        used_host = env.get(HOST_VARIABLE) or DEFAULT_HOST if host is None else host
        try:
            return cls(host=used_host, port=used_port, token=env.get(TOKEN_VARIABLE) or None)
        except ConfigError as exc:
            option = {HOST_VARIABLE: ("--http-host", host), PORT_VARIABLE: ("--http-port", port)}.get(exc.name)
            if option is None or option[1] is None:
                raise
            raise ConfigError(option[0], exc.value, exc.problem) from None


def is_header_text(text: str) -> bool:
    """Whether `text` can stand in a header as one word."""
    return bool(text) and all("!" <= character <= "~" for character in text)


def _port(text: str) -> int:
    if not text.isdecimal() or not text.isascii():
        raise ConfigError(PORT_VARIABLE, text, "use a port, or 0 for a free one")
    return int(text)
