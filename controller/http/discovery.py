"""`GET /v1/rl/workers` as Dynamo answers it, from the controller's view of the fleet. Pure.

Exactly Dynamo's fields, and none that is null: its clients forbid others. A worker with an `error` has identity and
model only, as there: whoever reads nothing but `system_url` must not take it for a healthy one.
Source: Dynamo's crate `dynamo-rl` (`RlWorkerInfo`, `RlWorkersResponse`); prime-rl's client of it bounds `error`.
"""

import ipaddress
import socket
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from rlbus import subjects
from rlbus._engine_routes import engine_routes
from rlbus.errors import ConfigError
from rlbus.schemas import FleetView, Liveness, MemberView

PROTOCOL_VERSION = 1
# Dynamo's name of the endpoint that a worker describes itself on.
ENDPOINT = "rl"
# The last token of the subject that answers Dynamo's `{"method": "routes"}`.
ROUTES_QUERY = "routes"
# How long a worker that died stays listed, with its error, in seconds since its last word. Dynamo lists nobody whose
# lease is over; but who waits for a complete fleet wants to hear who is missing. Then its successor counts.
LISTED_DEAD_S = 60.0
# prime-rl refuses an answer with a longer error: 2,048 bytes; a character has 4 at most.
MAX_ERROR_CHARS = 500


def listed(view: FleetView, components: Collection[str] | None, namespaces: Collection[str] = ()) -> list[MemberView]:
    """The members to answer with: in a stable order, without those that said goodbye or died a while ago."""
    if namespaces and view.namespace not in namespaces:
        return []
    members = [m for m in view.members if _is_listed(m) and (components is None or _component(m) in components)]
    return sorted(members, key=lambda m: (_component(m), int(m.descriptor.instance_id)))


def _is_listed(member: MemberView) -> bool:
    if member.liveness is Liveness.DEAD:
        return member.age_s <= LISTED_DEAD_S
    return member.liveness is not Liveness.LEFT


def _component(member: MemberView) -> str:
    return member.descriptor.component


def urls_of(members: Collection[MemberView]) -> tuple[str, ...]:
    """The addresses that are worth a probe: of members that live, and that can be advertised."""
    urls = []
    for member in members:
        if member.liveness is Liveness.ALIVE and member.descriptor.system_url is not None:
            try:
                urls.append(advertised(member.descriptor.system_url))
            except ConfigError:
                continue  # `answer` says so
    return tuple(dict.fromkeys(urls))


def answer(view: FleetView, members: Collection[MemberView], probed: Mapping[str, str | None]) -> dict[str, Any]:
    """The answer about `members` of `view`. `probed` has for each address of `urls_of` what is wrong, or None."""
    there = (Liveness.ALIVE, Liveness.SUSPECT)
    claims = Counter(m.descriptor.system_url for m in view.members if m.liveness in there)
    workers = [_row(view.namespace, m, probed, claims) for m in members]
    return {"protocol_version": PROTOCOL_VERSION, "namespace": view.namespace, "workers": workers}


def _row(
    namespace: str, member: MemberView, probed: Mapping[str, str | None], claims: Mapping[str | None, int]
) -> dict[str, Any]:
    descriptor = member.descriptor
    where = subjects.command_to(namespace, descriptor.component, ROUTES_QUERY, descriptor.instance_id)
    row: dict[str, Any] = {
        "namespace": namespace,
        "component": descriptor.component,
        "endpoint": ENDPOINT,
        "instance_id": int(descriptor.instance_id),
        "transport": {"nats_tcp": where},
        "request_plane_url": f"dyn://{namespace}.{descriptor.component}.{ENDPOINT}",
    }
    model = {"model": descriptor.model} if descriptor.model else {}
    problem = _silence(member)
    url = None
    if problem is None and descriptor.system_url is not None:
        try:
            url = advertised(descriptor.system_url)
        except ConfigError as exc:
            problem = str(exc)
        else:
            problem = _shared(member, claims) or probed.get(url, "it wasn't probed")
    if problem is not None:
        return row | model | {"routes": [], "error": plain(problem)}
    if url is not None:
        row |= {"system_url": url, "admin_base_url": url}
    return row | model | {"routes": list(engine_routes(descriptor.routes)), "world_size": descriptor.world_size}


def _silence(member: MemberView) -> str | None:
    match member.liveness:
        case Liveness.ALIVE:
            return None
        case Liveness.SUSPECT:
            return f"no heartbeat for {member.age_s:.0f} s; it may be gone"
        case _:
            return f"dead: no heartbeat for {member.age_s:.0f} s"


def _shared(member: MemberView, claims: Mapping[str | None, int]) -> str | None:
    """Behind one address there is one worker: calls for the others would reach it (SCENARIOS 25)."""
    num_claims = claims.get(member.descriptor.system_url, 0)
    return f"{num_claims} workers announce {member.descriptor.system_url}" if num_claims > 1 else None


def advertised(url: str) -> str:
    """The address under which others reach a worker, in canonical form: IPv6 in brackets, no slash at the end.

    Raises: ConfigError: nobody can use it (a wildcard, no HTTP, no host), or it says too much (credentials, a query).
    """
    parts, host, port = _split(url)
    if parts.username is not None or parts.password is not None:
        raise ConfigError("system_url", "***", "has credentials in it, and isn't passed on")
    if parts.query or parts.fragment:
        raise ConfigError("system_url", parts.hostname, "has a query or a fragment; announce a base URL")
    if is_wildcard(host):
        problem = "is an address to listen on, and none to reach; set RLBUS_ADVERTISE_HOST on the worker"
        raise ConfigError("system_url", url, problem)
    if "%" in host:
        raise ConfigError("system_url", url, "is a link-local address with a zone, of use on one machine only")
    at = f"[{host}]" if ":" in host else host
    tail = "" if port is None else f":{port}"
    return f"{parts.scheme}://{at}{tail}{parts.path.rstrip('/')}"


def _split(url: str) -> tuple[SplitResult, str, int | None]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        shown = "***" if "@" in url else url
        raise ConfigError("system_url", shown, f"is no URL ({exc}); IPv6 addresses stand in brackets") from exc
    if parts.scheme not in ("http", "https") or host is None or port == 0:
        shown = "***" if "@" in url else url
        raise ConfigError("system_url", shown, "is no http://host:port; IPv6 addresses stand in brackets")
    return parts, host, port


def is_wildcard(host: str) -> bool:
    """Whether `host` means "every address of this machine", however written: 0.0.0.0, ::, 0, *, ::ffff:0.0.0.0."""
    if host == "*":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return _is_zero(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address.is_unspecified or (mapped is not None and mapped.is_unspecified)


def _is_zero(host: str) -> bool:
    """Short and hexadecimal forms, which the system's own parser takes for 0.0.0.0."""
    try:
        return socket.inet_aton(host) == bytes(4)
    except OSError:
        return False


def plain(text: str) -> str:
    """One printable line of bounded length: clients refuse control and directional characters."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return line if len(line) <= MAX_ERROR_CHARS else line[: MAX_ERROR_CHARS - 3] + "..."
