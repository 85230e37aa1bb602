"""Where others reach a server of this machine: never at a wildcard, IPv6 literals in brackets."""

import ipaddress
import socket
from urllib.parse import urlsplit

# Addresses to listen on that are none to reach.
WILDCARDS = frozenset({"", "*", "0.0.0.0", "::"})


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reachable_host(listens_on: str, advertised: str | None, bus_url: str) -> str:
    """The host to announce of a server: what the user said, else the address that it listens on; of a wildcard the one
    from which this machine reaches the bus.
    """
    if advertised is not None:
        return advertised.removeprefix("[").removesuffix("]")
    return local_address_towards(bus_url) if listens_on in WILDCARDS else listens_on


def local_address_towards(url: str) -> str:
    """The address of this machine from which it reaches the bus: where others on the bus can reach it, most likely."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 4222
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
