"""Who a worker is, and the settings of its agent. Durations are in seconds; each bounds exactly one thing.

| variable | field | meaning |
|---|---|---|
| `RLBUS_COMPONENT` | `component` | part of the fleet; "backend" |
| `RLBUS_INSTANCE_ID` | `instance_id` | decimal unsigned 64-bit integer; random per start |
| `RLBUS_WEIGHT_ROOTS` | `weight_roots` | folders, with ":" between, below which weights may be loaded from disk |
| `RLBUS_LORA_ROOTS` | `lora_roots` | folders, with ":" between, below which adapters may be loaded from |
| `RLBUS_LORA_CACHE_DIR` | `lora_cache_dir` | where the worker keeps its copies of adapters; a temporary folder |
| `RLBUS_STATE_DIR` | `state_dir` | folder for what a worker knows after a restart: outcomes of ops, its term; none |
"""

import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlbus.adapter_objects import fetch_object
from rlbus.bus import Bus
from rlbus.errors import ConfigError
from rlbus.schemas import ObjectSource, is_instance_id
from rlbus.schemas.ids import is_token
from rlbus.subjects import CONTROLLER

DEFAULT_COMPONENT = "backend"
# DESIGN section 3: heartbeats about every 5 s, with jitter.
DEFAULT_HEARTBEAT_S = 5.0
# What the supervisor calls this life of the process, in its environment: it says goodbye for a dead one by that name.
BOOT_ID = "RLBUS_BOOT_ID"
# Room for a few adapters of a large model (hundreds of MiB each at rank 64).
DEFAULT_LORA_CACHE_BYTES = 8 << 30
# `fetch(bus, source, folder)` puts the files of `rlbus.adapter.ADAPTER_FILES`, and nothing else, into an empty folder,
# in bounded memory, at most `source.num_bytes` of them. Raises FaultError. Cancel: the folder is thrown away.
FetchObject = Callable[[Bus, ObjectSource, Path], Awaitable[None]]
# field -> environment variable
ENV_NAMES = {
    "component": "RLBUS_COMPONENT",
    "instance_id": "RLBUS_INSTANCE_ID",
    "weight_roots": "RLBUS_WEIGHT_ROOTS",
    "lora_roots": "RLBUS_LORA_ROOTS",
    "lora_cache_dir": "RLBUS_LORA_CACHE_DIR",
    "state_dir": "RLBUS_STATE_DIR",
}


def random_instance_id() -> str:
    """An instance id that no other worker has (64 random bits)."""
    return str(secrets.randbits(64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which worker this is within its namespace. Without an instance id it gets a random one, for one start.

    Raises:
        ConfigError: a field is wrong; names it.
    """

    component: str = DEFAULT_COMPONENT
    instance_id: str = field(default_factory=random_instance_id)

    def __post_init__(self) -> None:
        if not is_token(self.component) or self.component == CONTROLLER:
            raise ConfigError("component", self.component, "use 1 to 64 of A-Z a-z 0-9 _ -, and not 'controller'")
        if not is_instance_id(self.instance_id):
            raise ConfigError("instance_id", self.instance_id, "use the decimal form of an unsigned 64-bit integer")

    @classmethod
    def from_env(
        cls, *, environ: Mapping[str, str] | None = None, component: str | None = None, instance_id: str | None = None
    ) -> "Identity":
        """Build from the environment; an argument that isn't None wins over its variable.

        Raises:
            ConfigError: a value is wrong.
        """
        env = os.environ if environ is None else environ
        given = {
            "component": env.get(ENV_NAMES["component"]) if component is None else component,
            "instance_id": env.get(ENV_NAMES["instance_id"]) if instance_id is None else instance_id,
        }
        return cls(**{name: text for name, text in given.items() if text})


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The bounds that an agent keeps.

    Raises:
        ConfigError: a field is wrong; names it.
    """

    # Folders below which `update_weights_from_disk` may read. Empty: it is refused, whatever the path.
    weight_roots: tuple[str, ...] = ()
    # Folders below which `load_lora` may read. Empty: adapters come from the object store only.
    lora_roots: tuple[str, ...] = ()
    # Where the worker's own copies of adapters lie, one folder per checksum; the engine reads them there. None: in a
    # temporary folder that goes with the process. An engine on another machine needs one that both can see.
    lora_cache_dir: str | None = None
    # What those copies may take together; an adapter that is loaded stays whatever it takes.
    lora_cache_bytes: int = DEFAULT_LORA_CACHE_BYTES
    # Brings an adapter's object out of the bus's object store. None: such sources are refused.
    fetch_object: FetchObject | None = None
    # How often a draining adapter is looked at.
    lora_poll_s: float = 0.5
    # Where the worker's ledger lies. None: a restarted worker remembers nothing.
    state_dir: str | None = None
    # Names this start of the worker in all that it says. None: drawn.
    boot_id: str | None = None
    # Mean time between heartbeats; each one is moved by up to `jitter` of it, so that a fleet doesn't beat as one.
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    jitter: float = 0.2
    # Between two Progress messages of a running command; the contract says at least one a second.
    progress_s: float = 0.5
    # How long the engine may take to say how it is. After that its generation is "unknown".
    observe_s: float = 1.0
    # How long the engine may take to list its adapters for who asks. Below the 10 s that a question of users' has.
    list_s: float = 8.0
    # After a passed deadline: how long a stuck receive may take to end by itself once its group was dropped.
    release_s: float = 2.0
    # After cancelling an engine call: how long it may take to let go before it counts as stuck.
    cancel_s: float = 2.0
    # How long an engine call may go on after all of that, before the engine counts as lost.
    cling_s: float = 120.0
    # How long undoing (resume, abort_update, leave_group) may take after a failure, each.
    undo_s: float = 5.0
    # For how long after each announcement silence means nothing while declared work (a collective, a load) runs.
    work_lease_s: float = 30.0
    # How long a running mutation may go on when the agent is told to stop.
    drain_s: float = 5.0

    def __post_init__(self) -> None:
        for name in (
            "heartbeat_s",
            "progress_s",
            "observe_s",
            "list_s",
            "release_s",
            "cancel_s",
            "cling_s",
            "undo_s",
            "work_lease_s",
            "drain_s",
            "lora_poll_s",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(name, getattr(self, name), "use a number of seconds above 0")
        if self.lora_cache_bytes <= 0:
            raise ConfigError("lora_cache_bytes", self.lora_cache_bytes, "use a number of bytes above 0")
        if not 0 <= self.jitter < 1:
            raise ConfigError("jitter", self.jitter, "use a share from 0 up to, but not, 1")
        if self.progress_s > 1:
            raise ConfigError("progress_s", self.progress_s, "progress is due at least every second")
        if self.boot_id is not None and not is_token(self.boot_id):
            raise ConfigError("boot_id", self.boot_id, "use 1 to 64 of A-Z a-z 0-9 _ -")
        for name in ("weight_roots", "lora_roots"):
            for root in getattr(self, name):
                if not Path(root).is_absolute():
                    raise ConfigError(name, root, "use absolute paths")
        for name in ("state_dir", "lora_cache_dir"):
            folder = getattr(self, name)
            if folder is not None and not Path(folder).is_absolute():
                raise ConfigError(name, folder, "use an absolute path")

    @classmethod
    def from_env(cls, *, environ: Mapping[str, str] | None = None, **overrides: Any) -> "AgentConfig":
        """Build from the environment; a keyword that isn't None wins over its variable.

        Raises:
            ConfigError: a value is wrong.
        """
        env = os.environ if environ is None else environ
        given = {name: value for name, value in overrides.items() if value is not None}
        for name in ("weight_roots", "lora_roots"):
            roots = env.get(ENV_NAMES[name], "")
            if roots and name not in given:
                given[name] = tuple(part for part in roots.split(os.pathsep) if part)
        for name in ("state_dir", "lora_cache_dir"):
            given.setdefault(name, env.get(ENV_NAMES[name]) or None)
        given.setdefault("boot_id", env.get(BOOT_ID) or None)
        given.setdefault("fetch_object", fetch_object)
        return cls(**given)


def user_state_dir(environ: Mapping[str, str]) -> Path:
    """Where programs of this user keep what has to outlive them. Source: XDG base directory specification."""
    base = environ.get("XDG_STATE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state") / "rlbus"
