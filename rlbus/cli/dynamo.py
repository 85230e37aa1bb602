"""`rlbus worker dynamo`: a whole Dynamo fleet, adopted by one command."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlbus.cli.options import Json, run_command
from rlbus.cli.output import ExitCode, Output
from rlbus.cli.run import NoRestart, SystemHost, WeightRoots
from rlbus.cli.services import log_as_service
from rlbus.cli.sidecars import ApiKeyEnv, Bus, FleetName, Header, headers_of, key_of
from rlbus.config import BusConfig
from rlbus.errors import BrokenError

if TYPE_CHECKING:
    from rlbus.workers.dynamo.run import Where
    from rlbus.workers.system.settings import SystemConfig

Transfer = Annotated[
    bool | None,
    typer.Option(
        "--transfer/--no-transfer",
        help="Whether the workers' vLLM has rlbus's transfer backend. [default: workers of one rank are asked]",
    ),
]


def worker_dynamo(
    discovery: Annotated[
        list[str] | None,
        typer.Option("--discovery", metavar="URL", help="RL port of a Dynamo front end; may be repeated."),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option("--url", metavar="URL", help="System port of a Dynamo worker; may be repeated."),
    ] = None,
    bus: Bus = None,
    namespace: FleetName = None,
    component: Annotated[
        str | None, typer.Option("--component", "-c", metavar="NAME", help="Only this part of Dynamo's fleet.")
    ] = None,
    weight_root: WeightRoots = None,
    model_dir: Annotated[
        Path | None,
        typer.Option("--model-dir", metavar="DIR", help="Checkpoint of the model, if its name isn't its folder."),
    ] = None,
    transfer: Transfer = None,
    max_loras: Annotated[
        int | None,
        typer.Option(
            "--max-loras",
            metavar="N",
            min=1,
            help="Adapters that each worker has room for (its own --max-loras; on a CPU one less). "
            "Dynamo doesn't tell; without it they are given none.",
        ),
    ] = None,
    system_host: SystemHost = None,
    system_port: Annotated[
        int | None,
        typer.Option(
            "--system-port",
            metavar="PORT",
            min=-1,
            max=0,
            help="0: the HTTP surface of each worker takes a free port; -1: none has one. "
            "[env: RLBUS_SYSTEM_PORT] [default: 0]",
        ),
    ] = None,
    api_key_env: ApiKeyEnv = None,
    header: Header = None,
    trust_host: Annotated[
        list[str] | None,
        typer.Option("--trust-host", metavar="HOST", help="Gets the credentials, too, if it is announced."),
    ] = None,
    no_restart: NoRestart = False,
    json: Json = False,
) -> None:
    """Put the workers of an NVIDIA Dynamo fleet on the bus, each as a worker of its own.

    New ones are adopted as they appear, and those that vanish leave. Start them with `--enable-rl`.
    """
    out = Output(json)
    log_as_service()
    # One line for each of their calls would be most of the log.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    roots = tuple(str(Path(root).absolute()) for root in weight_root or ())
    folder = None if model_dir is None else model_dir.absolute()

    def where() -> "Where":
        from rlbus.workers.dynamo.run import Where

        found = Where(discovery or (), url or (), component, key_of(api_key_env), headers_of(header), trust_host or ())
        found.sources()  # what is wrong is said now, and not by another process
        return found

    def tell(pid: int) -> None:
        if json:
            out.document({"namespace": config().namespace, "pid": os.getpid(), "worker_pid": pid})
        out.line(f"adopts Dynamo's workers into namespace {config().namespace}; Ctrl-C ends it")

    def config() -> BusConfig:
        return BusConfig.from_env(url=bus, namespace=namespace)

    def system() -> "SystemConfig":
        from rlbus.workers.dynamo.run import checked_system
        from rlbus.workers.system.settings import SystemConfig

        return checked_system(SystemConfig.from_env(host=system_host, port=system_port))

    async def serve() -> ExitCode:
        from rlbus.workers.config import AgentConfig
        from rlbus.workers.dynamo.engine import EngineOptions
        from rlbus.workers.dynamo.run import serve as serve_dynamo
        from rlbus.workers.dynamo.supervisor import sidecar_state_dir

        await serve_dynamo(
            config(),
            where(),
            config=AgentConfig.from_env(weight_roots=roots or None, state_dir=sidecar_state_dir()),
            options=EngineOptions(folder, transfer, max_loras=max_loras),
            system=system(),
            on_ready=lambda: tell(os.getpid()),
            on_change=lambda text: typer.echo(f"rlbus: {text}", err=True),
        )
        return ExitCode.OK

    async def supervise() -> ExitCode:
        from rlbus.connecting import connect_bus
        from rlbus.workers.dynamo.supervisor import supervise as supervise_dynamo

        where()
        system()
        given = (("--discovery", discovery), ("--url", url), ("--header", header), ("--trust-host", trust_host))
        arguments = [part for name, values in given for value in values or () for part in (name, value)]
        single: list[tuple[str, object]] = [("--component", component), ("--model-dir", folder)]
        single += [("--api-key-env", api_key_env), ("--system-host", system_host), ("--system-port", system_port)]
        single += [("--max-loras", max_loras)]
        arguments += [part for name, value in single if value is not None for part in (name, str(value))]
        if transfer is not None:
            arguments.append("--transfer" if transfer else "--no-transfer")
        await (await connect_bus(config(), name="rlbus-worker")).aclose()
        is_told: list[int] = []

        def on_ready(pid: int) -> None:
            if not is_told:
                tell(pid)
            is_told.append(pid)

        verbosity = 2 if logging.getLogger().level <= logging.DEBUG else 0
        code = await supervise_dynamo(arguments, verbosity, bus_config=config(), weight_roots=roots, on_ready=on_ready)
        if code != 0:
            out.error(BrokenError("the sidecar of Dynamo", "it died again and again; its output above says why"))
        return ExitCode(code) if code in (ExitCode.OK, ExitCode.USAGE) else ExitCode.FAILED

    run_command(out, serve if no_restart else supervise)
