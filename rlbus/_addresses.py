"""Our own address on the way to the bus: where others on the bus can be expected to reach this machine.

Of several servers any one may be gone, its name with it, so each is looked at; no connection is needed.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from functools import partial
from urllib.parse import urlsplit

from rlbus.transfer.bounded import run_in_thread

DEFAULT_PORT = 4222


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_elsewhere(servers: Iterable[str]) -> bool:
    """Whether none of these URLs is one of loopback: others may be on this bus who aren't on this machine."""
    return not any(is_loopback(urlsplit(server).hostname or "localhost") for server in servers)


def own_address(server: str) -> str:
    """The address of this machine from which it reaches `server`. Blocks while a name is looked up.

    Raises: OSError: it has no address, or no way leads there. UnicodeError: its name is none.
    """
    parts = urlsplit(server)
    found = socket.getaddrinfo(parts.hostname or "127.0.0.1", parts.port or DEFAULT_PORT, type=socket.SOCK_DGRAM)
    error: OSError | None = None
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # a datagram socket: this asks the routing table, and sends nothing
                return str(probe.getsockname()[0])
        except OSError as exc:
            error = exc
    raise OSError(f"no address of {parts.hostname}") if error is None else error


def best(found: Sequence[str]) -> str | None:
    """Of our addresses on the ways to several servers, the first that others reach; else one of loopback."""
    return next((own for own in found if not is_loopback(own)), next(iter(found), None))


async def own_address_towards(servers: Sequence[str], limit_s: float) -> str:
    """`best` of our addresses towards them. A server that is still looked up after `limit_s` doesn't count.

    Raises: OSError (TimeoutError, too) or UnicodeError, that of the first: no way to any is known.
    Cancel: names may still be looked up, in threads that keep nobody.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + limit_s
    lookups = [asyncio.ensure_future(_looked_up(server)) for server in servers]
    found: list[str] = []
    errors: list[Exception] = []
    try:
        for lookup in lookups:
            await asyncio.wait({lookup}, timeout=max(0.0, until_s - loop.time()))
            result = lookup.result() if lookup.done() else TimeoutError("time-out")
            if isinstance(result, Exception):
                errors.append(result)
                continue
            found.append(result)
            if not is_loopback(result):
                break
    finally:
        for lookup in lookups:
            lookup.cancel()
    own = best(found)
    if own is None:
        raise errors[0]
    return own


async def _looked_up(server: str) -> str | Exception:
    try:
        return await run_in_thread(partial(own_address, server), name="rlbus address")
    except (OSError, UnicodeError) as exc:
        return exc
