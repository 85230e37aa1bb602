"""Commands that run the pieces: up, controller, worker, demo. They end with 0 on SIGINT or SIGTERM."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from rlbus.cli.options import Json, Namespace, Url, run_command
from rlbus.cli.output import ExitCode, Output
from rlbus.config import DEFAULT_NAMESPACE, BusConfig
from rlbus.errors import ConfigError

worker_app = typer.Typer(
    help="Run a worker: an inference engine with its agent on the bus.", no_args_is_help=True, rich_markup_mode=None
)

Component = Annotated[
    str | None,
    typer.Option("--component", "-c", metavar="NAME", help="Part of the fleet. [env: RLBUS_COMPONENT] [default: backend]"),
]
InstanceId = Annotated[
    str | None,
    typer.Option("--instance-id", metavar="ID", help="64-bit number. [env: RLBUS_INSTANCE_ID] [default: random]"),
]
WeightRoots = Annotated[
    list[str] | None,
    typer.Option("--weight-root", metavar="DIR", help="Folder below which `rlbus update` may load; may be repeated."),
]


async def until_stopped(service: Coroutine[Any, Any, None]) -> ExitCode:
    """Run a service until it ends, or SIGINT or SIGTERM cancels it, which is how a service is stopped: exit code 0."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(service)
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped:
            raise
    return ExitCode.OK


def log_as_service() -> None:
    """A service says on stderr what it does; client commands don't, unless `-v`."""
    root = logging.getLogger()
    if root.level > logging.INFO:
        root.setLevel(logging.INFO)


def up(
    port: Annotated[int, typer.Option(help="Port of the server; 0 takes a free one.", min=0, max=65535)] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="Token that clients need. [env: RLBUS_TOKEN] [default: generated]")
    ] = None,
    store_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where JetStream keeps its data. [default: temporary]")
    ] = None,
    namespace: Namespace = None,
    json: Json = False,
) -> None:
    """Start an embedded NATS server and a controller, until Ctrl-C. Prints the URL for workers and trainers."""
    out = Output(json)
    log_as_service()

    async def serve() -> None:
        from rlbus.controller.app import serve as serve_controller
        from rlbus.server import EmbeddedServer

        name = namespace or os.environ.get("RLBUS_NAMESPACE") or DEFAULT_NAMESPACE
        secret = token or os.environ.get("RLBUS_TOKEN") or None
        async with EmbeddedServer(store_dir=store_dir, port=port, host=host, token=secret) as server:
            config = BusConfig(url=server.url, namespace=name)

            def on_ready() -> None:
                if json:
                    out.document({"url": server.url, "namespace": name, "pid": os.getpid()})
                out.line(f"rlbus is up. In other terminals:\n\n  export RLBUS_URL={server.url}")
                if name != DEFAULT_NAMESPACE:
                    out.line(f"  export RLBUS_NAMESPACE={name}")
                out.line("  rlbus worker fake        # or: rlbus worker torch DIR, rlbus worker vllm MODEL")
                out.line("  rlbus status\n\nCtrl-C ends it.")

            await serve_controller(config, on_ready=on_ready)

    run_command(out, lambda: until_stopped(serve()))


def controller(url: Url = None, namespace: Namespace = None, json: Json = False) -> None:
    """Run the controller of a namespace, until Ctrl-C."""
    out = Output(json)
    log_as_service()

    async def serve() -> None:
        from rlbus.controller.app import serve as serve_controller

        config = BusConfig.from_env(url=url, namespace=namespace)

        def on_ready() -> None:
            if json:
                out.document({"namespace": config.namespace, "pid": os.getpid()})
            out.line(f"controller of namespace {config.namespace} is up on {config.url}; Ctrl-C ends it")

        await serve_controller(config, on_ready=on_ready)

    run_command(out, lambda: until_stopped(serve()))


def demo(
    engine: Annotated[str, typer.Option(help="torch, or vllm.")] = "torch",
    workers: Annotated[int, typer.Option(help="How many engines.", min=1)] = 2,
    updates: Annotated[int, typer.Option(help="How many training steps.", min=1)] = 20,
    json: Annotated[bool, typer.Option("--json", help="Only the last line, one JSON document, on stdout.")] = False,
) -> None:
    """Train a tiny model on real engines: rollouts from them, weights to them through rlbus, every step checked."""
    from rlbus.demo.run import main

    raise typer.Exit(main(engine=engine, workers=workers, updates=updates, as_json=json))
