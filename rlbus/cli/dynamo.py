"""`rlbus worker dynamo`: a whole Dynamo fleet, adopted by one command."""

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from rlbus.cli.options import Json, Namespace, Url, run_command
from rlbus.cli.output import ExitCode, Output
from rlbus.cli.run import WeightRoots, log_as_service
from rlbus.config import BusConfig
from rlbus.errors import ConfigError

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
        typer.Option("--discovery", metavar="URL", help="RL port of a Dynamo frontend; may be repeated."),
    ] = None,
    system_url: Annotated[
        list[str] | None,
        typer.Option("--system-url", metavar="URL", help="System port of a Dynamo worker; may be repeated."),
    ] = None,
    url: Url = None,
    namespace: Namespace = None,
    component: Annotated[
        str | None, typer.Option("--component", "-c", metavar="NAME", help="Only this part of Dynamo's fleet.")
    ] = None,
    weight_root: WeightRoots = None,
    model_dir: Annotated[
        Path | None,
        typer.Option("--model-dir", metavar="DIR", help="Checkpoint of the model, if its name isn't its folder."),
    ] = None,
    transfer: Transfer = None,
    api_key_env: Annotated[
        str | None,
        typer.Option("--api-key-env", metavar="NAME", help="Variable with a bearer token for all calls to Dynamo."),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="NAME=VALUE", help="Header of all calls to Dynamo; may be repeated."),
    ] = None,
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

    async def serve() -> ExitCode:
        from rlbus.workers.config import AgentConfig, user_state_dir
        from rlbus.workers.dynamo.engine import EngineOptions
        from rlbus.workers.dynamo.run import Where
        from rlbus.workers.dynamo.run import serve as serve_dynamo

        bus_config = BusConfig.from_env(url=url, namespace=namespace)
        state_dir = os.environ.get("RLBUS_STATE_DIR") or str(user_state_dir(os.environ))
        where = Where(discovery or (), system_url or (), component, _key(api_key_env), _headers(header or []))

        def tell(_adoption: object) -> None:
            if json:
                out.document({"namespace": bus_config.namespace, "pid": os.getpid()})
            out.line(f"adopts Dynamo's workers into namespace {bus_config.namespace}; Ctrl-C ends it")

        await serve_dynamo(
            bus_config,
            where,
            # Dynamo's instance ids are those of its processes: whoever is met again is the same one.
            config=AgentConfig.from_env(weight_roots=roots or None, state_dir=state_dir),
            options=EngineOptions(model_dir, transfer),
            on_ready=tell,
            on_change=lambda text: typer.echo(f"rlbus: {text}", err=True),
        )
        return ExitCode.OK

    run_command(out, serve)


def _key(name: str | None) -> str | None:
    """The token in a variable, which may not be missing if it was named. A token on a command line others can read."""
    if name is None:
        return None
    if not os.environ.get(name):
        raise ConfigError("--api-key-env", name, "that variable is not set")
    return os.environ[name]


def _headers(given: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    wrong = next((name for name, equals, _ in pairs if not equals), None)
    if wrong is not None:
        raise ConfigError("--header", wrong, "use NAME=VALUE")
    return {name: value for name, _, value in pairs}
