"""Every subject string is built and parsed here. Tokens are validated; a bad one is a ConfigError.

nats-py publishes to `a..b` or `a.*` without complaint and nobody gets it, and an over-long subject closes its client
for good (facts/nats.md A2), so nothing reaches the client that these functions didn't build.
"""

from typing import NamedTuple

from rlbus.errors import ConfigError
from rlbus.schemas.ids import is_instance_id, is_token

# Reserved as a component name: its subjects are the controller's.
CONTROLLER = "controller"
MAX_SUBJECT_CHARS = 255


def _token(name: str, text: str) -> str:
    if not is_token(text):
        raise ConfigError(name, text, "use 1 to 64 of A-Z a-z 0-9 _ -")
    return text


def _component(text: str) -> str:
    if text == CONTROLLER:
        raise ConfigError("component", text, "this name is reserved")
    return _token("component", text)


def _instance(text: str) -> str:
    if not is_instance_id(text):
        raise ConfigError("instance_id", text, "use the decimal form of an unsigned 64-bit integer")
    return text


def command(namespace: str, component: str, route: str) -> str:
    """Subject of a command to every worker of a component."""
    return f"dyn.{_token('namespace', namespace)}.{_component(component)}.rl.{_token('route', route)}"


def command_to(namespace: str, component: str, route: str, instance_id: str) -> str:
    """Subject of the same command to one worker."""
    return f"{command(namespace, component, route)}.{_instance(instance_id)}"


def commands_for(namespace: str, component: str, instance_id: str) -> tuple[str, str]:
    """The two subscriptions of a worker: broadcast, and its own."""
    base = f"dyn.{_token('namespace', namespace)}.{_component(component)}.rl.*"
    return base, f"{base}.{_instance(instance_id)}"


def worker(namespace: str, component: str, instance_id: str) -> str:
    """Where a worker announces itself."""
    return f"dyn.{_token('namespace', namespace)}.{_component(component)}.worker.{_instance(instance_id)}"


def all_workers(namespace: str) -> str:
    """Subscription to every worker's announcements."""
    return f"dyn.{_token('namespace', namespace)}.*.worker.*"


def worker_event(namespace: str, component: str, instance_id: str) -> str:
    """Where a worker publishes facts."""
    return f"dyn.{_token('namespace', namespace)}.{_component(component)}.event.{_instance(instance_id)}"


def all_worker_events(namespace: str) -> str:
    """Subscription to every worker's facts. It also matches the controller's events: both are `*.event.*`."""
    return f"dyn.{_token('namespace', namespace)}.*.event.*"


def control(namespace: str, op: str) -> str:
    """Where the controller takes requests of kind `op`."""
    return f"dyn.{_token('namespace', namespace)}.{CONTROLLER}.{_token('op', op)}"


def all_control(namespace: str) -> str:
    """The controller's subscription. One token after `controller`, so it doesn't match its own events (two)."""
    return f"dyn.{_token('namespace', namespace)}.{CONTROLLER}.*"


def controller_event(namespace: str, kind: str) -> str:
    """Where the controller publishes facts of one kind."""
    return f"dyn.{_token('namespace', namespace)}.{CONTROLLER}.event.{_token('kind', kind)}"


def controller_events(namespace: str) -> str:
    """Subscription to the controller's facts."""
    return f"dyn.{_token('namespace', namespace)}.{CONTROLLER}.event.>"


class CommandSubject(NamedTuple):
    """A parsed command subject; `instance_id` is None for a broadcast."""

    namespace: str
    component: str
    route: str
    instance_id: str | None


def parse_command(subject: str) -> CommandSubject | None:
    """Parse a command subject; None if it is none."""
    parts = subject.split(".")
    if len(parts) not in (5, 6) or parts[0] != "dyn" or parts[3] != "rl" or parts[2] == CONTROLLER:
        return None
    if not all(is_token(p) for p in parts[1:5]):
        return None
    instance_id = parts[5] if len(parts) == 6 else None
    if instance_id is not None and not is_instance_id(instance_id):
        return None
    return CommandSubject(parts[1], parts[2], parts[4], instance_id)
