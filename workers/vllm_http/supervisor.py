"""`rlbus worker vllm-http`: an agent beside a vLLM server, each supervised as a process of its own.

Two ways: beside a server that somebody else runs, only the agent is started, and again when it ends; or the server is
started, too. Then each is started again when it ends, whatever becomes of the other: an agent that died alone finds the
server as it was, and one whose server died ends with it, and waits for the next.

The server's port: without one given, a free one is taken here and kept bound, without listening, for as long as this
lives, so that nobody else gets it between two starts of the server (SCENARIOS 25), and the address stays the same.
"""

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlbus.config import ENV_NAMES, BusConfig
from rlbus.errors import ConfigError
from rlbus.workers.addresses import ADVERTISE_HOST
from rlbus.workers.config import ENV_NAMES as WORKER_NAMES
from rlbus.workers.peer_http import WILDCARDS
from rlbus.workers.supervisor.environment import Named, state_dir_for, worker_env
from rlbus.workers.supervisor.farewell import Farewells
from rlbus.workers.supervisor.restarts import RestartPolicy, Restarts
from rlbus.workers.supervisor.supervise import Supervision, WorkerCommand, keep_running, stop_signal
from rlbus.workers.supervisor.worker import Build, own_command
from rlbus.workers.system.settings import ENV_NAMES as SYSTEM_NAMES
from rlbus.workers.vllm_server.attachment import RUN_DIR
from rlbus.workers.vllm_server.command import HOST, option_value, server_command, small_machine_env

_log = logging.getLogger("rlbus.workers")

# Written into the run folder by an agent whose server lives, and whose engine is lost all the same.
LOST = "engine-lost"
# How often is looked for it.
LOST_POLL_S = 0.5
# The variable in which the agent of a server that we start finds its key.
KEY_ENV = "RLBUS_SERVER_API_KEY"
LORA_CACHE_DIR = WORKER_NAMES["lora_cache_dir"]
# vLLM's own.
VLLM_KEY_ENV = "VLLM_API_KEY"
_PORT, _HOST, _UDS, _KEY, _TLS = "--port", "--host", "--uds", "--api-key", "--ssl-certfile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The two commands of a server and the agent beside it."""

    server: WorkerCommand
    agent: WorkerCommand


def agent_command(kind: str, arguments: Sequence[str], verbosity: int) -> Build:
    """The command of an agent, `rlbus worker <kind>`, with a folder of its own for what the server answers in.

    Its copies of adapters lie there, too, unless the user has named a folder: they outlive an agent, as the server
    does, which reads them again after every update of its weights.
    """
    inner = own_command((kind, *arguments), verbosity)

    def build(env: Mapping[str, str], run_dir: str) -> WorkerCommand:
        command = inner(env, run_dir)
        copies = {} if os.environ.get(LORA_CACHE_DIR) else {LORA_CACHE_DIR: str(Path(run_dir, "loras"))}
        return replace(command, env={**command.env, RUN_DIR: run_dir, **copies})

    return build


def pair_of(
    model: str,
    options: Sequence[str],
    *,
    port: int,
    is_cpu_build: bool,
    agent_env: Mapping[str, str],
    arguments: Sequence[str],
    verbosity: int,
    environ: Mapping[str, str],
    run_dir: str,
    advertise_host: str | None = None,
    api_key: str | None = None,
    is_small: bool = False,
) -> Pair:
    """Both commands, for a server on `port`. Pure.

    Args:
        agent_env: who the worker is and where the bus is; the server doesn't get it, or it would put itself there.
        arguments: the agent's own, without those that say where its server is.
        advertise_host: under which others reach a server that listens on a wildcard.
        api_key: for both. None takes the one that vLLM's own options, or its own variable, name; without any of these
            the agent has rlbus' token, which the plugin's routes then want.

    Raises:
        ConfigError: options with which no sidecar can reach the server.
    """
    if option_value(options, _UDS) is not None:
        raise ConfigError(_UDS, option_value(options, _UDS), "a sidecar reaches its server by a port; leave it out")
    host = option_value(options, _HOST) or HOST
    near = {"0.0.0.0": HOST, "*": HOST, "::": "::1"}.get(host, host)
    scheme = "https" if option_value(options, _TLS) is not None else "http"
    url = f"{scheme}://{f'[{near}]' if ':' in near else near}:{port}"
    own_port = () if _has_port(options) else (_PORT, str(port))
    server_env = dict.fromkeys(ENV_NAMES.values(), "") | {"VLLM_SERVER_DEV_MODE": "1"}
    if is_small:
        server_env |= small_machine_env()
    if api_key and option_value(options, _KEY) is None:
        server_env[VLLM_KEY_ENV] = api_key
    server = server_command(
        model,
        (*_without_port(options), *own_port),
        is_cpu_build=is_cpu_build,
        bus_env=server_env,
        environ=environ,
        run_dir=run_dir,
    )
    key = api_key or option_value(options, _KEY) or environ.get(VLLM_KEY_ENV) or environ.get(SYSTEM_NAMES["token"], "")
    agent = agent_command("vllm-http", ("--url", url, "--api-key-env", KEY_ENV, *arguments), verbosity)(
        {**agent_env, KEY_ENV: key}, run_dir
    )
    if host in WILDCARDS and advertise_host is not None:
        agent = replace(agent, env={**agent.env, ADVERTISE_HOST: advertise_host})
    # The server gives signs of life to nobody: the agent asks it how it is.
    return Pair(server=replace(server, beats=False), agent=agent)


def _has_port(options: Sequence[str]) -> bool:
    return option_value(options, _PORT) not in (None, "0")


def _without_port(options: Sequence[str]) -> tuple[str, ...]:
    """The options, without a port 0, which would be another one than the agent is told."""
    if _has_port(options) or option_value(options, _PORT) is None:
        return tuple(options)
    kept: list[str] = []
    skips = False
    for option in options:
        if not skips and option != _PORT and option != f"{_PORT}=0":
            kept.append(option)
        skips = option == _PORT
    return tuple(kept)


def given_port(options: Sequence[str], name: str = _PORT) -> int | None:
    """The port that the options name; None: they leave it to us.

    Raises:
        ConfigError: it is none.
    """
    text = option_value(options, name)
    if text in (None, "0"):
        return None
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 2**16:
        raise ConfigError(name, text, "use 1 to 65535, or leave it out; a free port is taken then, and kept")
    return int(text)


@contextlib.contextmanager
def kept_port(options: Sequence[str]) -> Iterator[int]:
    """The port for the server: the given one, or a free one that stays bound while inside.

    Linux lets two sockets with SO_REUSEADDR, which vLLM sets, share a port as long as only one of them listens.

    Raises:
        ConfigError: the port is none, or nothing can listen on the host.
    """
    if (given := given_port(options)) is not None:
        yield given
        return
    host = option_value(options, _HOST) or HOST
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, 0))
        except OSError as exc:
            raise ConfigError(_HOST, host, f"nothing can listen there: {exc.strerror or exc}") from exc
        yield int(sock.getsockname()[1])


async def supervise_pair(
    model: str,
    options: Sequence[str],
    arguments: Sequence[str],
    *,
    bus_config: BusConfig,
    named: Named,
    is_cpu_build: bool,
    verbosity: int = 0,
    advertise_host: str | None = None,
    api_key: str | None = None,
    weight_roots: Sequence[str] = (),
    lora_roots: Sequence[str] = (),
    is_small: bool = False,
    policy: RestartPolicy | None = None,
    on_ready: Callable[[int], None] = lambda pid: None,
) -> int:
    """Run a server and its agent until SIGTERM or SIGINT; the exit code. The CLI calls it, on the main thread.

    Args:
        on_ready: called with the agent's process id whenever it can be reached on the bus.

    Raises:
        ConfigError: options that can't work.
    Cancel: both are stopped, and killed after `supervise.STOP_S`.
    """
    who = f"{named.identity.component}/{named.identity.instance_id}"
    with contextlib.ExitStack() as stack:
        run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlbus-worker-", ignore_cleanup_errors=True))
        port = stack.enter_context(kept_port(options))
        state_dir = state_dir_for(named, run_dir, os.environ)
        pair = pair_of(
            model,
            options,
            port=port,
            is_cpu_build=is_cpu_build,
            agent_env=worker_env(bus_config, named.identity, weight_roots, state_dir, lora_roots),
            arguments=arguments,
            verbosity=verbosity,
            environ=os.environ,
            run_dir=run_dir,
            advertise_host=advertise_host,
            api_key=api_key,
            is_small=is_small,
        )
        async with stop_signal() as stopped, Farewells(bus_config, named.identity) as farewells:
            of_agent = Supervision(who=who, on_ready=on_ready, on_death=farewells.say)
            restarts = RestartPolicy() if policy is None else policy
            return await run_pair(pair, of_agent, restarts, stopped, lost=Path(run_dir, LOST))


async def run_pair(
    pair: Pair, of_agent: Supervision, policy: RestartPolicy, stopped: asyncio.Event, *, lost: Path | None = None
) -> int:
    """Keep both running until `stopped` (0), or until one of them gives up (its code). The agent is stopped first, so
    that it can say goodbye while its engine stands. Once there is a file `lost`, the server is started anew.

    Cancel: both are stopped, and killed after `supervise.STOP_S`.
    """
    agent_stopped, server_stopped = asyncio.Event(), asyncio.Event()
    restart = asyncio.Event()
    of_server = Supervision(who=f"{of_agent.who} server", restart=restart)
    server = asyncio.ensure_future(keep_running(pair.server, of_server, Restarts(policy), server_stopped))
    agent = asyncio.ensure_future(keep_running(pair.agent, of_agent, Restarts(policy), agent_stopped))
    stopping = asyncio.ensure_future(stopped.wait())
    watching = asyncio.ensure_future(_restart_when(lost, restart))
    try:
        await asyncio.wait({server, agent, stopping}, return_when=asyncio.FIRST_COMPLETED)
        given_up = [task.result() for task in (server, agent) if task.done()]
        agent_stopped.set()
        await asyncio.wait({agent})
        server_stopped.set()
        await asyncio.wait({server})
        return next((code for code in given_up if code != 0), 0)
    finally:
        for task in (watching, stopping, agent, server):
            task.cancel()
        await asyncio.wait({watching, stopping, agent, server})


async def _restart_when(lost: Path | None, restart: asyncio.Event) -> None:
    while lost is not None:
        await asyncio.sleep(LOST_POLL_S)
        if _taken(lost):
            _log.error("the agent says that the engine of its server is lost; the server is started anew")
            restart.set()


def _taken(lost: Path) -> bool:
    """Whether the file was there; it isn't any more."""
    try:
        lost.unlink()
    except FileNotFoundError:
        return False
    return True


def tell_lost(lost: Path) -> None:
    """Have the server started anew. Where the file can't be written the next agent of this server finds it as lost."""
    try:
        lost.touch()
    except OSError as exc:
        _log.error("%s can't be written (%s): start the server anew by hand", lost, exc)
