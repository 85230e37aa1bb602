"""Options that commands share, and the way every command runs: connect, do, end with a code, bounded and without
tracebacks.
"""

import asyncio
import contextlib
import getpass
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from rlbus.cli.interrupts import interrupts
from rlbus.cli.output import ExitCode, Output, complain, one_line
from rlbus.client import FleetClient
from rlbus.config import BusConfig
from rlbus.errors import ConfigError, RLBusError
from rlbus.schemas import Target, Version, WorkerId, is_instance_id, is_token, split_worker_id
from rlbus.schemas.requests import MAX_DEADLINE_S
from rlbus.schemas.weights import MAX_VERSION_NUMBER

# Below it no answer can come back, in seconds.
MIN_DEADLINE_S = 0.1

Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="nats://[token@]host:port of the server. [env: RLBUS_URL]"),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="NAME", help="The fleet. [env: RLBUS_NAMESPACE] [default: default]"),
]
HttpHost = Annotated[
    str | None,
    typer.Option(
        "--http-host", metavar="HOST", help="Address to listen on for HTTP. [env: RLBUS_HTTP_HOST] [default: 127.0.0.1]"
    ),
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        "--http-port",
        metavar="PORT",
        min=0,
        max=65535,
        help="Serve discovery and the fleet's verbs over HTTP; 0 takes a free port. [env: RLBUS_HTTP_PORT] "
        "[default: no HTTP] RLBUS_HTTP_TOKEN is what callers need, and required unless only this machine can call.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout, and nothing else.")]


def check_seconds(given: float | None) -> float | None:
    """Of an option. Not `min` and `max`, which let nan pass."""
    if given is not None and not MIN_DEADLINE_S <= given <= MAX_DEADLINE_S:
        raise typer.BadParameter(f"use {MIN_DEADLINE_S:g} to {MAX_DEADLINE_S:g} seconds (a day), not {given:g}.")
    return given


Deadline = Annotated[
    float | None,
    typer.Option(
        "--deadline", metavar="SECONDS", callback=check_seconds, help="How long the whole may take; 0.1 to 86400."
    ),
]
Components = Annotated[
    list[str] | None,
    typer.Option("--component", "-c", metavar="NAME", help="Only workers of this component; may be repeated."),
]
Workers = Annotated[
    list[str] | None,
    typer.Option("--worker", "-w", metavar="COMPONENT/ID", help="Only this worker; may be repeated."),
]

_log = logging.getLogger("rlbus.cli")
_Meant = TypeVar("_Meant")


def caller_name() -> str:
    """Who types, for the controller's log: `cli:<user>@<host>`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        user = "?"
    return f"cli:{user}@{socket.gethostname()}"


def target_of(components: list[str] | None, workers: list[str] | None) -> Target:
    """The target that the options mean. Raises ConfigError for a name that can't be one."""
    if components and workers:
        raise ConfigError("--worker", ", ".join(workers), "give --component or --worker, not both")
    for component in components or ():
        if not is_token(component):
            raise ConfigError("--component", component, "use 1 to 64 of A-Z a-z 0-9 _ -")
    for worker in workers or ():
        component, instance_id = split_worker_id(WorkerId(worker))
        if not is_token(component) or not is_instance_id(instance_id):
            raise ConfigError("--worker", worker, "use COMPONENT/ID as `rlbus workers` shows it")
    return Target(
        components=tuple(components) if components else None,
        workers=tuple(WorkerId(worker) for worker in workers) if workers else None,
    )


def version_of(text: str | None) -> Version | None:
    """`7` or `1.7` (incarnation.step) as a version. Raises ConfigError."""
    if text is None:
        return None
    incarnation, _, step = text.rpartition(".")
    if not step.isdecimal() or not (incarnation or "0").isdecimal():
        raise ConfigError("--version", text, "use a step such as 7, or incarnation.step such as 1.7")
    # Longer ones aren't read at all: that takes time, and Python refuses it.
    longest = len(str(MAX_VERSION_NUMBER))
    if any(len(n) > longest or int(n) > MAX_VERSION_NUMBER for n in (incarnation or "0", step)):
        shown = text if len(text) <= 2 * longest + 1 else f"{text[:longest]}..."
        raise ConfigError("--version", shown, "steps and incarnations go up to 2**53")
    return Version(incarnation=int(incarnation or 0), step=int(step))


def roots_of(option: str, given: Sequence[str] | None) -> tuple[str, ...]:
    """The folders of `--weight-root` or `--lora-root`, absolute. Raises ConfigError: one has the sign that is between
    folders in the variable by which they are handed on.
    """
    for root in given or ():
        if os.pathsep in root:
            raise ConfigError(option, root, f"give it once for each folder, whose name has no {os.pathsep!r}")
    return tuple(str(Path(root).absolute()) for root in given or ())


def op_id_of(text: str | None, shown_by: str) -> str | None:
    """The id of an op as it was typed, which `shown_by` shows. Raises ConfigError: it can't be one."""
    if text is not None and not is_token(text):
        raise ConfigError("OP", text, f"no op can be called so; `{shown_by}` shows its id")
    return text


def checked(out: Output, read: Callable[[], _Meant]) -> _Meant:
    """What options mean, read before anything is connected: what is wrong in itself is said without a server.

    Raises: typer.Exit with 2, for a ConfigError of `read`.
    """
    try:
        return read()
    except ConfigError as exc:
        raise typer.Exit(int(out.error(exc))) from exc


def run_command(out: Output, work: Callable[[], Coroutine[Any, Any, ExitCode]]) -> NoReturn:
    """Run a command's coroutine to its end; everything that ends it becomes an exit code and one line. Once its outcome
    is settled, at its end at the latest, it ends as that, whatever closing comes to.

    Raises: typer.Exit with the code.
    """

    async def to_the_end() -> ExitCode:
        return out.settle(await work())

    try:
        interrupts.count()
        code = asyncio.run(to_the_end())
    except (RLBusError, KeyboardInterrupt) as exc:
        code = _end(out, exc)
    except Exception as exc:  # noqa: BLE001 - a bug of ours: one line for the user, the traceback with -vv
        _log.debug("the command failed", exc_info=True)
        code = _end(out, exc)
    raise typer.Exit(int(code))


def _end(out: Output, error: BaseException) -> ExitCode:
    """How a command ends that `error` ended, maybe after its outcome was settled; then Ctrl-C is no news."""
    if out.outcome is None:
        return out.error(error)
    interrupts.settle(int(out.outcome))  # Ctrl-C may have come before that was through
    if not isinstance(error, KeyboardInterrupt):
        complain(f"rlbus: {one_line(error)}")
    return out.outcome


def run_on_fleet(
    out: Output, url: str | None, namespace: str | None, work: Callable[[FleetClient], Awaitable[ExitCode]]
) -> NoReturn:
    """Connect, run `work` with a client of the controller, close, and end with its code.

    Raises: typer.Exit with the code.
    """

    async def connected() -> ExitCode:
        config = BusConfig.from_env(url=url, namespace=namespace)
        from rlbus.connecting import connect_bus

        caller = caller_name()
        async with contextlib.AsyncExitStack() as stack:
            bus = await connect_bus(config, name=caller)
            stack.push_async_callback(bus.aclose)
            # Before it closes, which is when Ctrl-C is likely: the user has read the outcome.
            return out.settle(await work(FleetClient(bus, config.namespace, caller=caller)))

    run_command(out, connected)
