"""What Dynamo's discovery says of its workers (`GET /v1/rl/workers`), checked. Pure.

One bad descriptor never costs the others: it becomes a `LeftOut` with a reason. Fields that we don't know are ignored.
Source: NVIDIA Dynamo 1.6.1; its answer as seen is in docs/engines.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlbus.errors import ConfigError, EngineError
from rlbus.schemas import Fault, FaultCode, worker_id
from rlbus.schemas.ids import is_token
from rlbus.subjects import CONTROLLER
from rlbus.workers.peer_http import Peer

PROTOCOL_VERSION = 1
DISCOVERY_PATH = "/v1/rl/workers"
# More workers than that in one answer is no fleet of ours; so many routes no worker has.
MAX_WORKERS = 10_000
MAX_ROUTES = 256
# Length of a foreign text in a reason.
MAX_REASON_CHARS = 300
_MAX_ID = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Listed:
    """A worker of Dynamo's that can be adopted. `instance_id` is decimal, as rlbus writes it.

    `world_size` is None where the descriptor doesn't say; `model` may be a folder or a served name.
    """

    component: str
    instance_id: str
    system_url: str
    model: str
    routes: frozenset[str]
    world_size: int | None = None

    @property
    def who(self) -> str:
        """As rlbus names it."""
        return worker_id(self.component, self.instance_id)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A descriptor that can't be used, and why. `who` is as much of its name as could be read.

    `is_known` says that the name is whole: then it is a worker that Dynamo lists, though it can't say more now.
    """

    who: str
    reason: str
    is_known: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of discovery, in the order of the list, without what another entry contradicts."""

    workers: tuple[Listed, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def parse_answer(data: Any, component: str | None = None) -> Answer:
    """Check an answer. With `component` only that part of the fleet counts.

    Raises:
        EngineError: it isn't an answer of Dynamo's discovery, or of a version that we don't know.
    """
    if not isinstance(data, dict) or not isinstance(data.get("workers"), list):
        raise _foreign(f"answered {DISCOVERY_PATH} with something that has no list of workers")
    version = data.get("protocol_version")
    if version != PROTOCOL_VERSION or isinstance(version, bool):
        raise _foreign(f"speaks version {version!r} of Dynamo's RL discovery; this rlbus knows {PROTOCOL_VERSION}")
    if len(data["workers"]) > MAX_WORKERS:
        raise _foreign(f"lists {len(data['workers'])} workers; at most {MAX_WORKERS} are taken")
    workers: list[Listed] = []
    left_out: list[LeftOut] = []
    for item in data["workers"]:
        if component is not None and isinstance(item, dict) and item.get("component") != component:
            continue
        found = parse_worker(item)
        if isinstance(found, Listed):
            workers.append(found)
        else:
            left_out.append(found)
    kept, contradicting = _consistent(workers)
    return Answer(kept, (*left_out, *contradicting))


def parse_worker(item: Any) -> Listed | LeftOut:
    """Check one descriptor."""
    if not isinstance(item, dict):
        return LeftOut("?", f"its descriptor is {_short(item)}, not an object")
    component, number = item.get("component"), item.get("instance_id")
    who = f"{component}/{number}"[:MAX_REASON_CHARS]
    if not isinstance(component, str) or not is_token(component) or component == CONTROLLER:
        return LeftOut(who, f"its component {_short(component)} can't be a component of rlbus")
    instance_id = _instance_id(number)
    if instance_id is None:
        return LeftOut(who, f"its instance_id {_short(number)} is no unsigned 64-bit integer")
    who = worker_id(component, instance_id)
    if item.get("error"):
        return LeftOut(who, f"Dynamo says: {_text(item['error'])}", is_known=True)
    try:
        url = _url(item.get("system_url"))
        routes = _routes(item.get("routes"))
        world_size = _world_size(item.get("world_size"))
    except ValueError as exc:
        return LeftOut(who, str(exc), is_known=True)
    model = item.get("model")
    return Listed(component, instance_id, url, model if isinstance(model, str) else "", routes, world_size)


def _instance_id(number: Any) -> str | None:
    """Decimal; None if it isn't exact: a float has been rounded by somebody on the way."""
    if isinstance(number, str) and number.isascii() and number.isdecimal() and len(number) <= len(str(_MAX_ID)):
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _MAX_ID:
        return None
    return str(number)


def _url(url: Any) -> str:
    if not isinstance(url, str) or not url:
        raise ValueError("it names no system_url; start it with DYN_SYSTEM_PORT set")
    try:
        return Peer.of(url).url
    except ConfigError as exc:
        raise ValueError(f"its system_url can't be used: {exc}") from exc


def _routes(routes: Any) -> frozenset[str]:
    if not isinstance(routes, list) or len(routes) > MAX_ROUTES or not all(isinstance(name, str) for name in routes):
        raise ValueError("its routes are no list of names; start it with --enable-rl")
    return frozenset(routes)


def _world_size(size: Any) -> int | None:
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"its world_size {_short(size)} is no number of ranks")
    return size


def _consistent(workers: list[Listed]) -> tuple[tuple[Listed, ...], tuple[LeftOut, ...]]:
    """Each name once and each URL once. Of entries that say the same, one stays; of others, none is believed."""
    by_name: dict[str, Listed] = {}
    by_url: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for worker in workers:
        before = by_name.setdefault(worker.who, worker)
        if before != worker:
            wrong[worker.who] = "it is listed twice, with different descriptors"
            continue
        owner = by_url.setdefault(worker.system_url, worker.who)
        if owner != worker.who:
            reason = f"the same system_url {worker.system_url} is listed for"
            wrong[worker.who] = f"{reason} {owner}"
            wrong.setdefault(owner, f"{reason} {worker.who}")
    left_out = tuple(LeftOut(who, reason, is_known=True) for who, reason in wrong.items())
    return tuple(worker for who, worker in by_name.items() if who not in wrong), left_out


def identity_of(metrics: str) -> Mapping[str, str]:
    """The labels that a Dynamo worker puts on its metrics, of the first series that has them: `worker_id` (hex),
    `dynamo_component`, `dynamo_namespace`, `model`. Empty if it has none.
    """
    for line in metrics.splitlines():
        head, brace, rest = line.partition("{")
        if not brace or head.startswith("#") or 'worker_id="' not in rest or 'dynamo_component="' not in rest:
            continue
        labels = {}
        for part in rest.rpartition("}")[0].split('",'):
            name, _, value = part.partition('="')
            labels[name.strip().strip(",")] = value.rstrip('"')
        return labels
    return {}


def _foreign(problem: str) -> EngineError:
    return EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=f"Dynamo's discovery {problem}"))


def _text(value: Any) -> str:
    return " ".join(str(value).split())[:MAX_REASON_CHARS]


def _short(value: Any) -> str:
    return repr(value)[:80]
