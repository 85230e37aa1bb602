"""Where the bus is and how to get in. `BusConfig.from_env` is the one place that reads the environment for it.

| variable | field | meaning |
|---|---|---|
| `RLBUS_URL` | `url` | `nats://host:port` or `tls://`, several with commas; also with `token@`, `user:password@` |
| `RLBUS_NAMESPACE` | `namespace` | fleet; "default" |
| `RLBUS_TOKEN` | `token` | NATS token |
| `RLBUS_USER`, `RLBUS_PASSWORD` | `user`, `password` | NATS user |
| `RLBUS_CREDS` | `creds_file` | path of a NATS credentials file |
| `RLBUS_CONNECT_S` | `connect_s` | seconds that connecting may take |
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from rlbus.errors import ConfigError
from rlbus.schemas.ids import is_token

DEFAULT_NAMESPACE = "default"
DEFAULT_CONNECT_S = 5.0
SCHEMES = ("nats", "tls")

# field -> environment variable
ENV_NAMES: dict[str, str] = {
    "url": "RLBUS_URL",
    "namespace": "RLBUS_NAMESPACE",
    "token": "RLBUS_TOKEN",
    "user": "RLBUS_USER",
    "password": "RLBUS_PASSWORD",
    "creds_file": "RLBUS_CREDS",
    "connect_s": "RLBUS_CONNECT_S",
}


@dataclass(frozen=True, slots=True)
class BusConfig:
    """How to reach the bus. Credentials that stood in `url` are moved to their fields, and never shown by repr.

    Raises:
        ConfigError: a field is wrong, or two kinds of credentials are given; names the field, never a secret.
    """

    # "nats://host:port"; several servers of one cluster with commas. Without credentials once constructed.
    url: str
    namespace: str = DEFAULT_NAMESPACE
    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    # Path of a NATS credentials file (JWT and seed); read when connecting.
    creds_file: str | None = None
    # How long connecting may take in all, in seconds.
    connect_s: float = DEFAULT_CONNECT_S

    def __post_init__(self) -> None:
        parts = [_split(text.strip()) for text in self.url.split(",")]
        for part in parts:
            if part.username is not None:
                self._take_credentials(part)
        hosts = [f"{p.scheme}://{p.netloc.rpartition('@')[2]}" for p in parts]
        object.__setattr__(self, "url", ",".join(hosts))
        if not is_token(self.namespace):
            raise ConfigError("namespace", self.namespace, "use 1 to 64 of A-Z a-z 0-9 _ -")
        if not 0 < self.connect_s < float("inf"):
            raise ConfigError("connect_s", self.connect_s, "use a number of seconds above 0")
        kinds = [self.token is not None, self.user is not None, self.creds_file is not None]
        if sum(kinds) > 1:
            raise ConfigError("credentials", "***", "give one of token, user with password, or creds file")
        if (self.user is None) != (self.password is None):
            raise ConfigError("user", self.user, "user and password belong together")

    def _take_credentials(self, part: SplitResult) -> None:
        username = unquote(part.username or "")
        given = {"token": username} if part.password is None else {"user": username, "password": unquote(part.password)}
        for name, value in given.items():
            if getattr(self, name) not in (None, value):
                raise ConfigError(name, "***", "differs from the one in the URL")
            object.__setattr__(self, name, value)

    @property
    def servers(self) -> tuple[str, ...]:
        """The URLs of `url`, one by one, without credentials."""
        return tuple(self.url.split(","))

    def redacted(self) -> dict[str, str]:
        """The settings for logs; secrets as `***`."""
        shown = {name: getattr(self, name) for name in ENV_NAMES if getattr(self, name) is not None}
        return {name: "***" if name in ("token", "password") else str(value) for name, value in shown.items()}

    @classmethod
    def from_env(cls, *, environ: Mapping[str, str] | None = None, **overrides: Any) -> "BusConfig":
        """Build from the environment; a keyword that isn't None wins over its variable.

        An explicit `url` or credential doesn't mix with another kind of credential from the environment: those of the
        environment count only when the caller gives none.

        Raises:
            ConfigError: no URL at all, an unknown keyword, or a wrong value; names the variable.
        """
        env = os.environ if environ is None else environ
        unknown = sorted(set(overrides) - set(ENV_NAMES))
        if unknown:
            raise ConfigError(unknown[0], overrides[unknown[0]], f"unknown setting; use one of {', '.join(ENV_NAMES)}")
        given = {name: value for name, value in overrides.items() if value is not None}
        has_credentials = _has_credentials(given)
        for name, variable in ENV_NAMES.items():
            text = env.get(variable, "")
            if name in given or not text or (has_credentials and name in _CREDENTIALS):
                continue
            given[name] = _number(variable, text) if name == "connect_s" else text
        if "url" not in given:
            raise ConfigError(
                "RLBUS_URL", "", "set it to nats://host:port (`rlbus up` starts a server and prints its URL)"
            )
        return cls(**given)


_CREDENTIALS = ("token", "user", "password", "creds_file")


def _has_credentials(given: Mapping[str, Any]) -> bool:
    return any(name in given for name in _CREDENTIALS) or "@" in str(given.get("url", ""))


def _number(variable: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(variable, text, "use a number of seconds") from None


def _split(text: str) -> SplitResult:
    """Parse one URL. The text isn't shown in errors when it may hold a secret."""
    shown = text if "@" not in text else "***@" + text.rpartition("@")[2]
    try:
        parts = urlsplit(text if "://" in text else f"nats://{text}")
        is_bad = parts.scheme not in SCHEMES or not parts.hostname or parts.port == 0 or parts.path not in ("", "/")
    except ValueError:
        is_bad = True
    if is_bad:
        raise ConfigError("url", shown, "use nats://host:port or tls://host:port (there is no WebSocket)")
    return parts
