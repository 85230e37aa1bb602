"""Where others reach a server of this machine: never at a wildcard, IPv6 literals in brackets."""

import ipaddress
import logging
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from rlbus._addresses import best, is_elsewhere, is_loopback, own_address
from rlbus.errors import ConfigError

_log = logging.getLogger("rlbus.workers")

# The host that others reach a server of this machine at, where the user knows it better.
ADVERTISE_HOST = "RLBUS_ADVERTISE_HOST"

# Addresses to listen on that are none to reach.
WILDCARDS = frozenset({"", "*", "0.0.0.0", "::"})

# Towards any other machine, where there is no bus elsewhere: an address for documentation (RFC 5737), never reached.
ELSEWHERE = "nats://192.0.2.1:4222"
# Where nothing else is known.
LOOPBACK = "127.0.0.1"


# A part of a host's name. Underscores aren't in the standard (RFC 1123), and in many a name all the same.
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
MAX_HOST_CHARS = 253


def advertised_host(environ: Mapping[str, str]) -> str | None:
    """What the environment says of it. Raises ConfigError: nobody could reach it there."""
    host = environ.get(ADVERTISE_HOST) or None
    check_advertised(host)
    return host


def check_advertised(host: str | None) -> None:
    """Raises ConfigError for what is no host name and no address, an IPv6 one with or without brackets."""
    if host is None:
        return
    try:
        ipaddress.ip_address(host[1:-1] if host[:1] + host[-1:] == "[]" else host)
        is_host = "%" not in host  # a zone is of use on one machine only
    except ValueError:
        labels = host.removesuffix(".").split(".")
        is_host = len(host) <= MAX_HOST_CHARS and all(_LABEL.fullmatch(label) and _decodes(label) for label in labels)
    if not is_host:
        raise ConfigError(ADVERTISE_HOST, host, "use a host name or an address, without a scheme and a port")


def _decodes(label: str) -> bool:
    """Whether a name's part that says that it is Punycode is. HTTP clients look, and refuse it otherwise."""
    if not label.lower().startswith("xn--"):
        return True
    try:
        return bool(label.encode("ascii").decode("idna"))
    except UnicodeError:
        return False


def reachable_host(listens_on: str, advertised: str | None, bus_url: str) -> str:
    """The host to announce of a server: what the user said, else the address that it listens on; of a wildcard the one
    from which this machine reaches the bus.
    """
    if advertised is not None:
        return advertised.removeprefix("[").removesuffix("]")
    return local_address_towards(bus_url) if listens_on in WILDCARDS else listens_on


def reachable_url(url: str, advertised: str | None, bus_url: str) -> str:
    """A URL of a server of this machine as others need it: one with a wildcard gets the host to announce."""
    parts = urlsplit(url)
    if (parts.hostname or "") not in WILDCARDS:
        return url
    host = reachable_host(parts.hostname or "", advertised, bus_url)
    return parts._replace(netloc=f"{f'[{host}]' if ':' in host else host}:{parts.port}").geturl()


def local_address_towards(url: str) -> str:
    """The address of this machine from which it reaches the bus: where others on the bus can reach it, most likely.

    `url`: of one server, or of several with commas, any of which may be gone. Blocks while names are looked up.
    """
    found: list[str] = []
    why = ""
    servers = url.split(",")
    for server in servers:
        try:
            found.append(own_address(server))
        except (OSError, UnicodeError) as exc:
            why = why or f" ({exc})"
            continue
        if not is_loopback(found[-1]):
            break
    own = best(found) or LOOPBACK
    if is_loopback(own) and is_elsewhere(servers):
        text = "no way to %s but by loopback is known%s: others don't reach this machine at %s; set %s"
        _log.warning(text, url, why, own, ADVERTISE_HOST)
    return own
