"""How commands that run a piece of rlbus live and end: until a signal, with the server that they need kept alive."""

import asyncio
import contextlib
import importlib.util
import logging
import signal
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import typer

from rlbus.cli.output import ExitCode, Output, complain
from rlbus.errors import BrokenError, ConfigError

if TYPE_CHECKING:
    from rlbus.server import EmbeddedServer


# Of the data plane: what every worker needs that takes part in a transfer by itself.
PLANE = ("torch", "numpy")


def check_installed(engine: str, extra: str, modules: tuple[str, ...]) -> None:
    """Whether all modules of a worker are there; none is imported, which takes seconds.

    Raises: ConfigError: one is missing; says what to install.
    """
    for module in modules:
        if not _is_installed(module):
            raise ConfigError("engine", engine, f'it needs {module}: pip install "rlbus[{extra}]"')


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


async def until_stopped(service: Coroutine[Any, Any, ExitCode | None]) -> ExitCode:
    """Run a service until it ends, or SIGINT or SIGTERM cancels it, which is how a service is stopped: exit code 0,
    unless the service names one. Cancel: the service is cancelled, and its end awaited.
    """
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
        code = await task
    except asyncio.CancelledError:
        if not stopped:
            raise
        code = None
    return ExitCode.OK if code is None else code


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Inside, below `run_command`, SIGTERM does what Ctrl-C does: all is taken down, and the code is 130."""
    interrupted = signal.getsignal(signal.SIGINT)
    # A shell lets what it starts in the background ignore Ctrl-C, and that is no way to end.
    ends = interrupted if callable(interrupted) else signal.default_int_handler
    before = signal.signal(signal.SIGTERM, ends)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def notice(text: str) -> None:
    """Say on stderr what a service has just done by itself, to whoever is there to read it."""
    complain(f"rlbus: {text}")


async def supervised(service: Coroutine[Any, Any, None], server: "EmbeddedServer", out: Output) -> ExitCode:
    """Run a service until it ends, and start the server that it needs again whenever that ends by itself.

    Cancel: ends both.
    """
    loop = asyncio.get_running_loop()
    serving = loop.create_task(service)
    watching = loop.create_task(server.supervise(notice))
    try:
        await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        serving.cancel()
        await asyncio.wait({serving, watching})
    if not watching.cancelled() and isinstance(broken := watching.exception(), BrokenError):
        out.error(BrokenError(broken.what, broken.problem.partition("\n")[0]))
        typer.echo(broken.problem.partition("\n")[2], err=True)
        return ExitCode.FAILED
    if not watching.cancelled():
        watching.result()
    serving.result()
    return ExitCode.OK


def end_of_worker(status: int, who: str, out: Output) -> ExitCode:
    """How a command ends whose supervised process ended for good with `status`; says why, with the same code."""
    if status == ExitCode.OK:
        return ExitCode.OK
    if status == ExitCode.USAGE:
        return out.error(ConfigError("worker", who, "its process was called in a wrong way; its output above says how"))
    return out.error(BrokenError(who, "it died again and again; its output above says why"), ExitCode.FAILED)


def log_as_service() -> None:
    """A service says on stderr what it does; client commands don't, unless `-v`."""
    root = logging.getLogger()
    if root.level > logging.INFO:
        root.setLevel(logging.INFO)
    if root.level > logging.DEBUG:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # a sidecar asks its engine several times a second
