"""`rlbus worker dynamo`: the sidecar as a process that is started again when it dies or hangs.

The next one finds Dynamo's workers as the one before has left them: paused, in a group, in the middle of an update.
"""

import os
import tempfile
from collections.abc import Callable, Sequence

from rlbus.config import BusConfig
from rlbus.workers.config import Identity, user_state_dir
from rlbus.workers.supervisor.environment import Named, state_dir_for, worker_env
from rlbus.workers.supervisor.restarts import RestartPolicy, Restarts
from rlbus.workers.supervisor.supervise import Supervision, keep_running, stop_signal
from rlbus.workers.supervisor.worker import own_command

# Before each line of its output.
WHO = "dynamo"


async def supervise(
    arguments: Sequence[str],
    verbosity: int,
    *,
    bus_config: BusConfig,
    weight_roots: Sequence[str] = (),
    on_ready: Callable[[int], None] = lambda pid: None,
) -> int:
    """Run the sidecar until SIGTERM or SIGINT; the exit code. The CLI calls it, on the main thread.

    Args:
        arguments: those of `rlbus worker dynamo`, without where the bus is.
        on_ready: called with its process id whenever it is on the bus.

    Cancel: the sidecar is stopped, and killed after `supervise.STOP_S`.
    """
    # The workers' ids are Dynamo's; this one is only for the supervisor.
    named = Named(Identity(), is_given=True)
    with tempfile.TemporaryDirectory(prefix="rlbus-dynamo-", ignore_cleanup_errors=True) as run_dir:
        env = worker_env(bus_config, named.identity, weight_roots, sidecar_state_dir())
        command = own_command(("dynamo", *arguments), verbosity)(env, run_dir)
        async with stop_signal() as stopped:
            how = Supervision(who=WHO, on_ready=on_ready)
            return await keep_running(command, how, Restarts(RestartPolicy()), stopped)


def sidecar_state_dir() -> str:
    """Where the agents keep what outlives them. Dynamo's instance ids are those of its processes: whoever is met again
    is the same one, maybe by another sidecar.
    """
    return state_dir_for(Named(Identity(), is_given=True), str(user_state_dir(os.environ)), os.environ)
