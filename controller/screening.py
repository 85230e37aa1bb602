"""What a worker's message must keep to before the registry believes any of it. Pure.

One wrong announcement must cost nobody else anything: its name becomes part of subjects, its numbers of group sizes.
"""

from rlbus import subjects
from rlbus.errors import ConfigError
from rlbus.schemas import Goodbye, WorkerMessage

# Ranks that one worker may claim.
MAX_WORLD_SIZE = 65_536
# Heartbeat intervals that a worker may claim, in seconds.
MIN_CLAIMED_INTERVAL_S = 0.05
MAX_CLAIMED_INTERVAL_S = 600.0
# Routes, and backends, that a worker may list; an agent of today serves some twenty.
MAX_LISTED = 256


def problem_of(message: WorkerMessage, subject: str, namespace: str) -> str | None:
    """What is wrong with a message that came on `subject`, in words; None: nothing."""
    who = message if isinstance(message, Goodbye) else message.descriptor
    try:
        expected = subjects.worker(namespace, who.component, who.instance_id)
    except ConfigError as exc:
        return str(exc)
    if subject != expected:
        return f"it names {who.component}/{who.instance_id}, which announces itself on {expected}"
    if isinstance(message, Goodbye):
        return None
    descriptor = message.descriptor
    if descriptor.namespace != namespace:
        return f"it names namespace {descriptor.namespace}"
    if not 1 <= descriptor.world_size <= MAX_WORLD_SIZE:
        return f"world_size is {descriptor.world_size}; use 1 to {MAX_WORLD_SIZE}"
    if not MIN_CLAIMED_INTERVAL_S <= message.interval_s <= MAX_CLAIMED_INTERVAL_S:
        limits = f"{MIN_CLAIMED_INTERVAL_S:g} to {MAX_CLAIMED_INTERVAL_S:g}"
        return f"interval_s is {message.interval_s:g}; use {limits} seconds"
    if max(len(descriptor.routes), len(descriptor.backends)) > MAX_LISTED:
        return f"it lists {len(descriptor.routes)} routes and {len(descriptor.backends)} backends, at most {MAX_LISTED}"
    return None
