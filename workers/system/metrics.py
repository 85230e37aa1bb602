"""A worker's metrics in Prometheus' text format: few, of bounded cardinality, read when asked for."""

from collections.abc import Iterable, Mapping

from rlbus.schemas import Generation, WeightsState, route_of
from rlbus.workers.agent import Agent
from rlbus.workers.system.app import Door

# Source: Prometheus exposition formats, text version 0.0.4.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[Mapping[str, str], int]


def worker_metrics(agent: Agent, door: Door) -> bytes:
    """All of them, for one worker."""
    descriptor, status, state = agent.descriptor, agent.status(), agent.state
    version = status.weights.version
    about = {
        "namespace": descriptor.namespace,
        "component": descriptor.component,
        "instance_id": descriptor.instance_id,
        "engine": descriptor.engine,
        "model": descriptor.model,
    }
    running = {} if state.running is None else {route_of(state.running.body): 1}
    parts = [
        _family("worker_info", "gauge", "Who it is.", [(about, 1)]),
        _family("worker_world_size", "gauge", "Ranks of the engine.", [({}, descriptor.world_size)]),
        _family(
            "worker_generation", "gauge", "What the engine says that it does.", _one_of(Generation, status.generation)
        ),
        _family(
            "worker_weights_state",
            "gauge",
            "Whether its weights can be trusted.",
            _one_of(WeightsState, status.weights.state),
        ),
        _family("worker_paused", "gauge", "1 while a pause is commanded.", [({}, status.pause is not None)]),
        _family(
            "worker_drift",
            "gauge",
            "1 while the engine differs from what it was told.",
            [({}, status.drift is not None)],
        ),
        _family(
            "worker_op_running", "gauge", "The mutation in progress.", [({"route": r}, n) for r, n in running.items()]
        ),
        _family("worker_term", "gauge", "Largest term of a controller that it has seen.", [({}, status.term)]),
        _family(
            "worker_announcements_total",
            "counter",
            "Heartbeats and changes announced.",
            [({}, agent.answers.num_announced)],
        ),
        _family("worker_refused_messages_total", "counter", "Commands refused.", [({}, status.num_refused_messages)]),
        _family("worker_http_unauthorized_total", "counter", "HTTP requests without right.", [({}, door.num_refused)]),
        _family("worker_http_requests_total", "counter", "HTTP requests, by path and status.", _requests(door)),
    ]
    if version is not None:
        parts.append(_family("worker_weights_step", "gauge", "Version of the weights: step.", [({}, version.step)]))
        text = "Version of the weights: incarnation."
        parts.append(_family("worker_weights_incarnation", "gauge", text, [({}, version.incarnation)]))
    return "".join(parts).encode()


def _requests(door: Door) -> list[Sample]:
    counted = sorted(door.num_requests.items())
    return [({"path": path, "status": str(status)}, count) for (path, status), count in counted]


def _one_of(kinds: Iterable[Generation] | Iterable[WeightsState], is_now: str) -> list[Sample]:
    return [({"state": kind.value}, kind == is_now) for kind in kinds]


def _family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP rlbus_{name} {text}", f"# TYPE rlbus_{name} {kind}"]
    lines += [f"rlbus_{name}{_labels(labels)} {int(value)}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
