"""A worker under supervision, as `rlbus worker ...` runs it: who it is, where it keeps what it knows, when it ends."""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlbus.config import BusConfig
from rlbus.workers.supervisor.environment import Named, state_dir_for, worker_env
from rlbus.workers.supervisor.farewell import Farewells
from rlbus.workers.supervisor.restarts import RestartPolicy, Restarts
from rlbus.workers.supervisor.supervise import Supervision, WorkerCommand, keep_running, stop_signal

# Makes the command of (variables for its environment, a folder that ends with the supervisor).
Build = Callable[[Mapping[str, str], str], WorkerCommand]


async def supervise_worker(
    build: Build,
    *,
    bus_config: BusConfig,
    named: Named,
    weight_roots: Sequence[str] = (),
    lora_roots: Sequence[str] = (),
    log: Path | None = None,
    policy: RestartPolicy | None = None,
    on_ready: Callable[[int], None] = lambda pid: None,
) -> int:
    """Run a worker until SIGTERM or SIGINT; the exit code. The CLI calls it, on the main thread.

    Args:
        log: where its output goes; None is stderr, with its name before each line.
        on_ready: called with its process id whenever it can be reached on the bus.

    Raises: ConfigError: its program isn't there. Cancel: the worker is stopped, and killed after `supervise.STOP_S`.
    """
    restarts = Restarts(RestartPolicy() if policy is None else policy)
    with tempfile.TemporaryDirectory(prefix="rlbus-worker-", ignore_cleanup_errors=True) as run_dir:
        state_dir = state_dir_for(named, run_dir, os.environ)
        command = build(worker_env(bus_config, named.identity, weight_roots, state_dir, lora_roots), run_dir)
        identity = named.identity
        async with stop_signal() as stopped, Farewells(bus_config, identity) as farewells:
            how = Supervision(
                who=f"{identity.component}/{identity.instance_id}",
                log=log,
                on_ready=on_ready,
                on_death=farewells.say,
            )
            return await keep_running(command, how, restarts, stopped)


def own_command(arguments: Sequence[str], verbosity: int) -> Build:
    """The command of `rlbus worker <arguments>` in a process of its own that nobody else restarts."""
    flags = ("-" + "v" * verbosity,) if verbosity else ()

    def build(env: Mapping[str, str], _run_dir: str) -> WorkerCommand:
        return WorkerCommand((sys.executable, "-m", "rlbus", *flags, "worker", *arguments, "--no-restart"), env)

    return build
