"""The `rlbus` command: what it has, and how it ends (docs/cli.md)."""

import logging
from typing import Annotated

import typer

from rlbus.cli import dynamo, fleet, lora, run, sidecar_grpc, sidecars
from rlbus.cli.output import EXIT_CODES, Output, UnwrittenError

_EPILOG = "Exit codes: " + "; ".join(f"{int(code)} {meaning}" for code, meaning in EXIT_CODES.items()) + "."

app = typer.Typer(
    name="rlbus",
    help="Keeps a fleet of LLM inference engines in step with a trainer, over NATS.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# In the order of the help: run the pieces, see the fleet, steer it.
app.command()(run.up)
app.command()(run.controller)
run.worker_app.command("vllm-http", context_settings=sidecars.PASS_ON)(sidecars.worker_vllm_http)
run.worker_app.command("dynamo")(dynamo.worker_dynamo)
run.worker_app.command("vllm-grpc", context_settings=sidecars.PASS_ON)(sidecar_grpc.worker_vllm_grpc)
app.add_typer(run.worker_app, name="worker")
app.command()(run.demo)
app.command()(fleet.workers)
app.command()(fleet.status)
app.command()(fleet.history)
app.command()(fleet.versions)
app.command()(fleet.pause)
app.command()(fleet.resume)
app.command()(fleet.sleep)
app.command()(fleet.wake)
app.command()(fleet.flush)
app.command()(fleet.abort)
app.command()(fleet.update)
app.add_typer(lora.app, name="lora")
app.command()(fleet.cancel)


@app.callback()
def configure(
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Log to stderr; twice for everything, with tracebacks.")
    ] = 0,
) -> None:
    """Keeps a fleet of LLM inference engines in step with a trainer, over NATS."""
    level = {0: logging.CRITICAL, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")


def main() -> None:
    """Entry of the `rlbus` command, once it is loaded. Raises: SystemExit."""
    try:
        app()
    except OSError as exc:  # of help and usage, which nobody else writes
        raise SystemExit(int(Output(False).error(UnwrittenError(exc.strerror or type(exc).__name__)))) from None
