"""The `rlbus` command: what it has, and how it ends (docs/cli.md)."""

import logging
from typing import Annotated

import typer

from rlbus.cli import fleet, run
from rlbus.cli.output import EXIT_CODES

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
_RUN = "Run the pieces"
_SEE = "See the fleet"
_STEER = "Steer the fleet"

app.command(rich_help_panel=_RUN)(run.up)
app.command(rich_help_panel=_RUN)(run.controller)
app.add_typer(run.worker_app, name="worker", rich_help_panel=_RUN)
app.command(rich_help_panel=_RUN)(run.demo)
app.command(rich_help_panel=_SEE)(fleet.workers)
app.command(rich_help_panel=_SEE)(fleet.status)
app.command(rich_help_panel=_SEE)(fleet.versions)
app.command(rich_help_panel=_STEER)(fleet.pause)
app.command(rich_help_panel=_STEER)(fleet.resume)
app.command(rich_help_panel=_STEER)(fleet.flush)
app.command(rich_help_panel=_STEER)(fleet.abort)
app.command(rich_help_panel=_STEER)(fleet.update)


@app.callback()
def configure(
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Log to stderr; twice for everything, with tracebacks.")
    ] = 0,
) -> None:
    """Keeps a fleet of LLM inference engines in step with a trainer, over NATS."""
    level = {0: logging.CRITICAL, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True)


def main() -> None:
    """Entry of the `rlbus` command."""
    app()
