"""`rlbus worker vllm-grpc`: an agent beside a `vllm-rs` server, each supervised as a process of its own.

As `rlbus.workers.vllm_http.supervisor`, with vllm-rs's command line: options of its own, then `--`, then those of the
Python engine that it starts. Both of its ports are kept as that one keeps its one.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlbus.config import ENV_NAMES, BusConfig
from rlbus.errors import ConfigError
from rlbus.workers.addresses import advertised_host
from rlbus.workers.supervisor.environment import Named, state_dir_for, worker_env
from rlbus.workers.supervisor.farewell import Farewells
from rlbus.workers.supervisor.restarts import RestartPolicy
from rlbus.workers.supervisor.supervise import Supervision, WorkerCommand, stop_signal
from rlbus.workers.vllm_http.supervisor import LOST, Pair, agent_command, given_port, kept_port, run_pair
from rlbus.workers.vllm_server.attachment import RUN_DIR
from rlbus.workers.vllm_server.command import DEFAULT_TRANSFER, HOST, PLUGIN, option_value, small_machine_env

# Names the binary, for vLLM and for us.
BINARY_ENV = "VLLM_RUST_FRONTEND_PATH"
_PORT, _GRPC_PORT, _HOST, _UDS, _PYTHON = "--port", "--grpc-port", "--host", "--uds", "--python"
_TLS, _TRANSFER = "--ssl-certfile", "--weight-transfer-config"


def binary(environ: Mapping[str, str]) -> str:
    """Where vllm-rs is.

    Raises:
        ConfigError: nowhere, or not where the environment says.
    """
    named = environ.get(BINARY_ENV)
    found = shutil.which(named or "vllm-rs")
    if not found and named:
        raise ConfigError(BINARY_ENV, named, "there is no program; name vllm-rs, or leave it out to look on the path")
    if not found:
        raise ConfigError(BINARY_ENV, "", "vllm-rs isn't on the path; it lies in vLLM's package, as vllm/vllm-rs")
    return found


def split(server: Sequence[str]) -> tuple[list[str], list[str]]:
    """(options of vllm-rs, options of its Python engine)."""
    at = server.index("--") if "--" in server else len(server)
    return list(server[:at]), list(server[at + 1 :])


def check_options(server: Sequence[str]) -> None:
    """Raises: ConfigError: options with which no sidecar can reach the server."""
    front, _ = split(server)
    if not front or front[0].startswith("-"):
        raise ConfigError("MODEL", front[0] if front else "", "give the model first, then vllm-rs's options")
    if option_value(front, _UDS) is not None:
        raise ConfigError(_UDS, option_value(front, _UDS), "a sidecar reaches its server by a port; leave it out")
    if option_value(front, _TLS) is not None:
        raise ConfigError(_TLS, option_value(front, _TLS), "start a server with TLS yourself, and give --target")
    for name in (_PORT, _GRPC_PORT):
        if option_value(front, name) == "0":
            raise ConfigError(name, "0", "leave it out; a free port is taken then, and kept")
        given_port(front, name)


def pair_of(
    server: Sequence[str],
    *,
    binary_path: str,
    http_port: int,
    grpc_port: int,
    agent_env: Mapping[str, str],
    arguments: Sequence[str],
    verbosity: int,
    environ: Mapping[str, str],
    run_dir: str,
    advertise_host: str | None = None,
    is_small: bool = False,
) -> Pair:
    """Both commands. Pure. `server` has passed `check_options`.

    Args:
        agent_env: who the worker is and where the bus is; the server doesn't get it, or its engine would go there, too.
        arguments: the agent's own, without those that say where its server is.
        advertise_host: under which others reach a server that listens on a wildcard.
    """
    front, engine = split(server)
    given = {name: option_value(front, name) for name in (_PORT, _GRPC_PORT, _PYTHON)}
    wanted = {_PORT: str(http_port), _GRPC_PORT: str(grpc_port), _PYTHON: sys.executable}
    front += [part for name, value in wanted.items() if given[name] is None for part in (name, value)]
    if not any(option.partition("=")[0].partition(".")[0] == _TRANSFER for option in engine):
        engine += [_TRANSFER, DEFAULT_TRANSFER]
    plugins = [name for name in environ.get("VLLM_PLUGINS", "").split(",") if name and name != PLUGIN]
    env = dict.fromkeys(ENV_NAMES.values(), "") | (small_machine_env() if is_small else {})
    env |= {"VLLM_PLUGINS": ",".join([PLUGIN, *plugins]), BINARY_ENV: binary_path, RUN_DIR: run_dir}
    host = option_value(front, _HOST) or HOST
    near = {"0.0.0.0": HOST, "::": "::1"}.get(host, host)
    shown = advertise_host if near != host and advertise_host else near
    where = ("--target", f"{_bracketed(near)}:{grpc_port}", "--http-url", f"http://{_bracketed(shown)}:{http_port}")
    agent = agent_command("vllm-grpc", (*where, *arguments), verbosity)(agent_env, run_dir)
    # The server gives signs of life to nobody: the agent asks it how it is.
    argv = (binary_path, "serve", *front, "--", *engine)
    return Pair(server=WorkerCommand(argv, env, beats=False), agent=agent)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def supervise_pair(
    server: Sequence[str],
    arguments: Sequence[str],
    *,
    bus_config: BusConfig,
    named: Named,
    verbosity: int = 0,
    advertise_host: str | None = None,
    weight_roots: Sequence[str] = (),
    is_small: bool = False,
    policy: RestartPolicy | None = None,
    on_ready: Callable[[int], None] = lambda pid: None,
) -> int:
    """Run a server and its agent until SIGTERM or SIGINT; the exit code. The CLI calls it, on the main thread.

    Args:
        server: MODEL, vllm-rs's options, `--`, the engine's options.
        on_ready: called with the agent's process id whenever it can be reached on the bus.

    Raises:
        ConfigError: no vllm-rs.
    Cancel: both are stopped, and killed after `supervise.STOP_S`.
    """
    who = f"{named.identity.component}/{named.identity.instance_id}"
    front, _ = split(server)
    host = option_value(front, _HOST) or HOST
    path = binary(os.environ)
    with contextlib.ExitStack() as stack:
        run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlbus-worker-", ignore_cleanup_errors=True))
        ports = [
            stack.enter_context(kept_port(("--host", host, "--port", option_value(front, name) or "0")))
            for name in (_PORT, _GRPC_PORT)
        ]
        state_dir = state_dir_for(named, run_dir, os.environ)
        pair = pair_of(
            server,
            binary_path=path,
            http_port=ports[0],
            grpc_port=ports[1],
            agent_env=worker_env(bus_config, named.identity, weight_roots, state_dir),
            arguments=arguments,
            verbosity=verbosity,
            environ=os.environ,
            run_dir=run_dir,
            advertise_host=advertised_host(os.environ) or advertise_host,
            is_small=is_small,
        )
        async with stop_signal() as stopped, Farewells(bus_config, named.identity) as farewells:
            of_agent = Supervision(who=who, on_ready=on_ready, on_death=farewells.say)
            restarts = RestartPolicy() if policy is None else policy
            return await run_pair(pair, of_agent, restarts, stopped, lost=Path(run_dir, LOST))
