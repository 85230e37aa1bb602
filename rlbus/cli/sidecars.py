"""Workers beside an engine that is a program of its own: `rlbus worker vllm-http`."""

import logging
import os
from typing import TYPE_CHECKING, Annotated

import typer

from rlbus.cli.options import Json
from rlbus.cli.run import Component, InstanceId, LoraRoots, NoRestart, SystemHost, SystemPort, WeightRoots, _Worker
from rlbus.cli.services import PLANE, check_installed
from rlbus.config import BusConfig
from rlbus.errors import ConfigError

if TYPE_CHECKING:
    from rlbus.workers.engines.base import Engine
    from rlbus.workers.supervisor.environment import Named

# What comes after `--` belongs to the engine.
PASS_ON = {"ignore_unknown_options": False, "allow_interspersed_args": True}

Header = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="NAME=VALUE", help="Sent with every call to the server; may be repeated."),
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option("--api-key-env", metavar="NAME", help="Variable with the server's API key, sent with every call."),
]
Bus = Annotated[str | None, typer.Option("--bus", metavar="URL", help="nats://[token@]host:port. [env: RLBUS_URL]")]
FleetName = Annotated[str | None, typer.Option("--namespace", "-n", metavar="NAME", help="The fleet.")]


def headers_of(given: list[str] | None) -> dict[str, str]:
    """The headers of `--header NAME=VALUE`. Raises: ConfigError, without the value, which may be a secret."""
    found: dict[str, str] = {}
    for text in given or ():
        name, has_value, value = text.partition("=")
        if not has_value or not name.strip():
            raise ConfigError("--header", name if has_value else "...", "use NAME=VALUE")
        found[name.strip()] = value
    return found


def key_of(name: str | None) -> str | None:
    """The API key in the variable of that name; None without a name. Raises: ConfigError: it isn't set."""
    if name is None:
        return None
    key = os.environ.get(name)
    if key is None:
        raise ConfigError("--api-key-env", name, "there is no variable of that name")
    return key or None


def worker_vllm_http(
    server: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- MODEL [VLLM OPTIONS]]", help="Start this server, too, as `vllm serve` takes it."),
    ] = None,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="http://HOST:PORT of a running one.")] = None,
    api_key_env: ApiKeyEnv = None,
    header: Header = None,
    bus: Bus = None,
    namespace: FleetName = None,
    component: Component = None,
    instance_id: InstanceId = None,
    weight_root: WeightRoots = None,
    lora_root: LoraRoots = None,
    system_host: SystemHost = None,
    system_port: SystemPort = None,
    small: Annotated[bool, typer.Option("--small", help="Leave room for others on a machine without a GPU.")] = False,
    no_restart: NoRestart = False,
    json: Json = False,
) -> None:
    """Put a vLLM server on the bus from outside, by its HTTP routes: one that runs, or one that is started here.

    The server needs VLLM_SERVER_DEV_MODE=1; for updates over a group also VLLM_PLUGINS=rlbus and
    --weight-transfer-config '{"backend": "gloo"}', for adapters VLLM_PLUGINS=rlbus and --enable-lora. One that is
    started here gets all that, except --enable-lora.
    """
    worker = _Worker(
        bus,
        namespace,
        component,
        instance_id,
        weight_root,
        json,
        lora_root,
        system_host=system_host,
        system_port=system_port,
    )
    try:
        headers, key = headers_of(header), key_of(api_key_env)
        if (url is None) == (not server):
            raise ConfigError("--url", url, "give either the URL of a running server, or `-- MODEL [vllm options]`")
        if server and server[0].startswith("-"):
            raise ConfigError("MODEL", server[0], "give the model first, then vLLM's options")
        if server and no_restart:
            raise ConfigError("--no-restart", True, "it goes with --url; start the server yourself")
        if server:
            from rlbus.workers.vllm_http.supervisor import given_port
            from rlbus.workers.vllm_server.supervisor import is_cpu_build

            given_port(server[1:])
            is_cpu_build()
        elif small:
            raise ConfigError("--small", True, "it is for a server that is started here, not for one that runs")
        if url is not None:
            from rlbus.workers.peer_http import Peer

            peer = Peer.of(url, api_key=key, headers=headers)
        check_installed("vllm-http", "torch", PLANE)
    except ConfigError as exc:
        worker.fail(exc)
    arguments = [part for text in header or () for part in ("--header", text)]
    arguments += [part for root in worker.roots for part in ("--weight-root", root)]
    arguments += worker.system_arguments
    if url is None:
        _with_server(worker, server or [], arguments, key, small)
        return

    def make() -> "Engine":
        from rlbus.workers.addresses import advertised_host
        from rlbus.workers.vllm_http.engine import VllmHttpEngine
        from rlbus.workers.vllm_server.attachment import RUN_DIR

        advertise_host, run_dir = advertised_host(os.environ), os.environ.get(RUN_DIR) or None
        return VllmHttpEngine(peer, advertise_host=advertise_host, run_dir=run_dir)

    if no_restart:
        worker.run(make)
        return
    if api_key_env is not None:
        arguments += ["--api-key-env", api_key_env]
    beside(worker, "vllm-http", ["--url", url, *arguments])


def verbosity() -> int:
    """Of the processes that are started from here: as that of this one."""
    return 2 if logging.getLogger().level <= logging.DEBUG else 0


def beside(worker: _Worker, kind: str, arguments: list[str]) -> None:
    """The agent of a server that runs, `rlbus worker <kind>`, as a process that is started again."""

    async def serve(bus_config: BusConfig, named: "Named") -> int:
        from rlbus.workers.supervisor.worker import supervise_worker
        from rlbus.workers.vllm_http.supervisor import agent_command

        return await supervise_worker(
            agent_command(kind, arguments, verbosity()),
            bus_config=bus_config,
            named=named,
            weight_roots=worker.roots,
            lora_roots=worker.lora_roots,
            on_ready=lambda pid: worker.tell(pid, "is up; Ctrl-C ends it"),
        )

    worker.run_supervised(serve)


def _with_server(worker: _Worker, server: list[str], arguments: list[str], key: str | None, is_small: bool) -> None:
    """A server and its agent, each a process that is started again."""

    async def serve(bus_config: BusConfig, named: "Named") -> int:
        from rlbus.workers.addresses import advertised_host, local_address_towards
        from rlbus.workers.vllm_http.supervisor import supervise_pair
        from rlbus.workers.vllm_server.supervisor import is_cpu_build

        advertise_host = advertised_host(os.environ) or local_address_towards(bus_config.url)
        return await supervise_pair(
            server[0],
            server[1:],
            arguments,
            bus_config=bus_config,
            named=named,
            is_cpu_build=is_cpu_build(),
            verbosity=verbosity(),
            advertise_host=advertise_host,
            api_key=key,
            weight_roots=worker.roots,
            lora_roots=worker.lora_roots,
            is_small=is_small,
            on_ready=lambda pid: worker.tell(pid, "is up; Ctrl-C ends both"),
        )

    worker.run_supervised(serve)
