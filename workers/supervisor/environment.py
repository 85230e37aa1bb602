"""What a supervised process is told in its environment: the bus, who it is, and where it keeps what it knows."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlbus.config import ENV_NAMES, BusConfig
from rlbus.workers.config import ENV_NAMES as WORKER_NAMES
from rlbus.workers.config import Identity, user_state_dir


@dataclass(frozen=True, slots=True)
class Named:
    """Who a worker is over all its restarts, and whether its id was given to it, or drawn."""

    identity: Identity
    is_given: bool

    @classmethod
    def of(cls, component: str | None, instance_id: str | None, environ: Mapping[str, str] | None = None) -> "Named":
        """From arguments and environment, the former first. Raises: ConfigError."""
        env = os.environ if environ is None else environ
        is_given = bool(instance_id or env.get(WORKER_NAMES["instance_id"]))
        return cls(Identity.from_env(environ=env, component=component, instance_id=instance_id), is_given)


def worker_env(
    config: BusConfig,
    identity: Identity,
    weight_roots: Sequence[str],
    state_dir: str,
    lora_roots: Sequence[str] = (),
) -> dict[str, str]:
    """The variables of one worker. All of the bus's are set, empty ones too, so that nothing else is inherited.

    No `weight_roots` leave RLBUS_WEIGHT_ROOTS as it is, no `lora_roots` RLBUS_LORA_ROOTS.
    """
    env = dict.fromkeys(ENV_NAMES.values(), "")
    for name, variable in ENV_NAMES.items():
        value = getattr(config, name)
        if value is not None:
            env[variable] = str(value)
    env |= {
        WORKER_NAMES["component"]: identity.component,
        WORKER_NAMES["instance_id"]: identity.instance_id,
        WORKER_NAMES["state_dir"]: state_dir,
    }
    if weight_roots:
        env[WORKER_NAMES["weight_roots"]] = os.pathsep.join(weight_roots)
    if lora_roots:
        env[WORKER_NAMES["lora_roots"]] = os.pathsep.join(lora_roots)
    return env


def state_dir_for(named: Named, run_dir: str, environ: Mapping[str, str]) -> str:
    """Where a worker keeps what has to outlive its process.

    RLBUS_STATE_DIR if it is set. Else a worker that was given its id will be itself again when it is started again,
    maybe by another supervisor, and keeps it in the user's own folder; one whose id was drawn ends with this
    supervisor, and so does its folder, below `run_dir`.
    """
    if given := environ.get(WORKER_NAMES["state_dir"]):
        return str(Path(given).absolute())
    return str(user_state_dir(environ)) if named.is_given else str(Path(run_dir) / "state")
