"""`rlbus worker vllm-grpc`: a worker beside a vllm-rs server."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from rlbus.cli.options import Json
from rlbus.cli.run import Component, InstanceId, NoRestart, SystemHost, SystemPort, WeightRoots, _Worker
from rlbus.cli.services import PLANE, check_installed
from rlbus.cli.sidecars import ApiKeyEnv, Bus, FleetName, Header, beside, headers_of, key_of, verbosity
from rlbus.config import BusConfig
from rlbus.errors import ConfigError

if TYPE_CHECKING:
    from rlbus.workers.engines.base import Engine
    from rlbus.workers.peer_http import Peer
    from rlbus.workers.supervisor.environment import Named


def worker_vllm_grpc(
    server: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- MODEL [VLLM-RS OPTIONS] [-- ENGINE OPTIONS]]", help="Start this, too, as `vllm-rs serve` does."
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="HOST:PORT", help="gRPC address of a running one.")
    ] = None,
    http_url: Annotated[
        str | None, typer.Option("--http-url", metavar="URL", help="Where its /v1/completions answers, for others.")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Talk to --target with TLS; SSL_CERT_FILE as usual.")] = False,
    api_key_env: ApiKeyEnv = None,
    header: Header = None,
    bus: Bus = None,
    namespace: FleetName = None,
    component: Component = None,
    instance_id: InstanceId = None,
    weight_root: WeightRoots = None,
    system_host: SystemHost = None,
    system_port: SystemPort = None,
    small: Annotated[bool, typer.Option("--small", help="Leave room for others on a machine without a GPU.")] = False,
    no_restart: NoRestart = False,
    json: Json = False,
) -> None:
    """Put a vllm-rs server on the bus from outside, by its gRPC service: one that runs, or one that is started here.

    Updates need VLLM_PLUGINS=rlbus and --weight-transfer-config '{"backend": "gloo"}' at the server, on this machine.
    One that is started here gets both. Needs `pip install "rlbus[grpc]"`.
    """
    worker = _Worker(
        bus,
        namespace,
        component,
        instance_id,
        weight_root,
        json,
        system_host=system_host,
        system_port=system_port,
    )
    try:
        headers, key = headers_of(header), key_of(api_key_env)
        _check(server, target, no_restart=no_restart)
        _check_place(server, http_url, tls=tls, is_small=small)
        peer = None if target is None else _peer(target, tls, key, headers)
    except ConfigError as exc:
        worker.fail(exc)
    arguments = [part for text in header or () for part in ("--header", text)]
    arguments += [part for root in worker.roots for part in ("--weight-root", root)]
    arguments += worker.system_arguments
    arguments += [] if api_key_env is None else ["--api-key-env", api_key_env]
    if peer is None:
        _with_server(worker, server or [], arguments, small)
        return

    def make() -> "Engine":
        from rlbus.workers.vllm_grpc.control import Control
        from rlbus.workers.vllm_grpc.engine import VllmGrpcEngine
        from rlbus.workers.vllm_server.attachment import RUN_DIR

        run_dir = os.environ.get(RUN_DIR) or None
        return VllmGrpcEngine(Control(peer), completions_url=http_url, run_dir=run_dir)

    if no_restart:
        worker.run(make)
        return
    where = ["--target", str(target), *(["--tls"] if tls else []), *(["--http-url", http_url] if http_url else [])]
    beside(worker, "vllm-grpc", [*where, *arguments])


def _check(server: list[str] | None, target: str | None, *, no_restart: bool) -> None:
    """Raises: ConfigError."""
    from rlbus.workers.vllm_grpc.supervisor import binary, check_options

    check_installed("vllm-grpc", "grpc", ("grpc", "google.protobuf", *PLANE))
    if (target is None) == (not server):
        problem = "give either the address of a running server, or `-- MODEL [vllm-rs options]`"
        raise ConfigError("--target", target, problem)
    if server and no_restart:
        raise ConfigError("--no-restart", True, "it goes with --target; start the server yourself")
    if server:
        check_options(server)
        binary(os.environ)


def _check_place(server: list[str] | None, http_url: str | None, *, tls: bool, is_small: bool) -> None:
    """Raises: ConfigError: an option that only the other way to run it has; it would be dropped without a word."""
    if server and http_url is not None:
        raise ConfigError("--http-url", http_url, "it goes with --target; a server that is started here has its own")
    if server and tls:
        raise ConfigError("--tls", True, "it goes with --target; start a server with TLS yourself")
    if not server and is_small:
        raise ConfigError("--small", True, "it is for a server that is started here, not for one that runs")


def _peer(target: str, tls: bool, key: str | None, headers: dict[str, str]) -> "Peer":
    from rlbus.workers.peer_http import Peer

    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal() or "/" in target:
        raise ConfigError("--target", target, "use HOST:PORT, an IPv6 address in brackets")
    return Peer.of(f"{'https' if tls else 'http'}://{target}", api_key=key, headers=headers)


def _with_server(worker: _Worker, server: list[str], arguments: list[str], is_small: bool) -> None:
    """A server and its agent, each a process that is started again."""

    async def serve(bus_config: BusConfig, named: "Named") -> int:
        from rlbus.workers.addresses import local_address_towards
        from rlbus.workers.vllm_grpc.supervisor import supervise_pair

        return await supervise_pair(
            server,
            arguments,
            bus_config=bus_config,
            named=named,
            verbosity=verbosity(),
            advertise_host=local_address_towards(bus_config.url),
            weight_roots=worker.roots,
            is_small=is_small,
            on_ready=lambda pid: worker.tell(pid, "is up; Ctrl-C ends both"),
        )

    worker.run_supervised(serve)
