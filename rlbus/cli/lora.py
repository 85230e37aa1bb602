"""`rlbus lora`: give the fleet an adapter, take one away, list them."""

import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit

import typer

from rlbus._conversation import ProgressHandler
from rlbus.cli.options import Components, Deadline, Json, Namespace, Url, Workers, checked, run_on_fleet, target_of
from rlbus.cli.output import ExitCode, Output, complain, exit_code_of_report
from rlbus.cli.views import failure_text, lora_text, show_loras, show_report
from rlbus.client import FleetClient
from rlbus.errors import ConfigError
from rlbus.lora_verbs import LIST_DEADLINE_S, LOAD_DEADLINE_S, UNLOAD_DEADLINE_S, check_name
from rlbus.schemas import MAX_REVISION, PauseMode, Report, Target, is_lora_name, is_sha256, split_lora_id
from rlbus.schemas.loras import DEFAULT_DRAIN_S, MAX_DRAIN_S

if TYPE_CHECKING:
    from rlbus.controller.frontend import Frontend

app = typer.Typer(help="Adapters (LoRA) of the whole fleet.", no_args_is_help=True, rich_markup_mode=None)

FrontendUrl = Annotated[
    str | None,
    typer.Option(
        "--frontend-url",
        metavar="URL",
        help="Frontend that has to show an adapter (GET URL/v1/models) before its load is done; RLBUS_FRONTEND_KEY is "
        "its API key. [env: RLBUS_FRONTEND_URL]",
    ),
]
Verb = Callable[[FleetClient, Target, ProgressHandler], Awaitable[Report]]


def frontend_of(url: str | None) -> "Frontend | None":
    """The frontend that the option or the environment names. Raises ConfigError: the URL is none."""
    from rlbus.controller.frontend import Frontend

    given = url or os.environ.get("RLBUS_FRONTEND_URL")
    return Frontend(given, os.environ.get("RLBUS_FRONTEND_KEY") or None) if given else None


@app.command()
def load(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the adapter, without a revision.")],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="DIR|URI",
            help="PEFT folder, which is put into the bus's store; or file:///DIR, which every worker reads by itself.",
        ),
    ],
    revision: Annotated[
        int | None,
        typer.Option("--revision", metavar="N", min=1, max=MAX_REVISION, help="[default: the name's next one]"),
    ] = None,
    checksum: Annotated[
        str | None,
        typer.Option("--checksum", metavar="SHA256", help="Of a file:// folder that can't be read from here."),
    ] = None,
    hot_swap: Annotated[
        bool,
        typer.Option("--hot-swap", help="Replace the newest older revision without a pause, if every engine can."),
    ] = False,
    evict_idle: Annotated[
        bool, typer.Option("--evict-idle", help="Where there is no room, idle older revisions of the name go.")
    ] = False,
    where_possible: Annotated[
        bool,
        typer.Option("--where-possible", help="Leave out workers whose engine takes no adapters; else it is refused."),
    ] = False,
    url: Url = None,
    namespace: Namespace = None,
    component: Components = None,
    worker: Workers = None,
    pause_mode: Annotated[PauseMode, typer.Option(help="What happens to requests in flight.")] = PauseMode.KEEP,
    deadline: Deadline = None,
    json: Json = False,
) -> None:
    """Let requests name an adapter on every worker, or on none.

    All are paused meanwhile. Requests then name NAME@N, or NAME for the newest.
    """

    out = Output(json)
    checked(out, lambda: check_name(name))
    folder, is_shared = checked(out, lambda: _folder_of(source, checksum))

    async def verb(fleet: FleetClient, target: Target, on_progress: ProgressHandler) -> Report:
        return await fleet.load_lora(
            name,
            folder,
            target,
            revision=revision,
            shared=is_shared,
            checksum=checksum,
            hot_swap=hot_swap,
            evict_idle=evict_idle,
            where_possible=where_possible,
            pause_mode=pause_mode,
            deadline_s=LOAD_DEADLINE_S if deadline is None else deadline,
            on_progress=on_progress,
            check=False,
        )

    _run("lora load", json, url, namespace, component, worker, verb)


@app.command()
def unload(
    name: Annotated[str, typer.Argument(metavar="NAME[@N]", help="One revision, or all of a name.")],
    drain: Annotated[
        float,
        typer.Option("--drain", metavar="SECONDS", min=0.0, max=MAX_DRAIN_S, help="How long requests may keep it."),
    ] = DEFAULT_DRAIN_S,
    url: Url = None,
    namespace: Namespace = None,
    component: Components = None,
    worker: Workers = None,
    deadline: Deadline = None,
    json: Json = False,
) -> None:
    """Let an adapter go.

    New requests that name it are refused at once; those in flight keep it until they end.
    """

    plain, revision = checked(Output(json), lambda: _named(name))

    async def verb(fleet: FleetClient, target: Target, on_progress: ProgressHandler) -> Report:
        return await fleet.unload_lora(
            plain,
            target,
            revision=revision,
            drain_s=drain,
            deadline_s=UNLOAD_DEADLINE_S if deadline is None else deadline,
            on_progress=on_progress,
            check=False,
        )

    _run("lora unload", json, url, namespace, component, worker, verb)


@app.command(name="list")
def list_(
    url: Url = None,
    namespace: Namespace = None,
    component: Components = None,
    worker: Workers = None,
    deadline: Deadline = None,
    json: Json = False,
) -> None:
    """List the adapters.

    Those that the fleet has, and what each engine says of its own: state and requests in flight.
    """
    out = Output(json)
    target = checked(out, lambda: target_of(component, worker))

    async def work(fleet: FleetClient) -> ExitCode:
        deadline_s = LIST_DEADLINE_S if deadline is None else deadline
        report = await fleet.loras(target, deadline_s=deadline_s, check=False)
        view = await fleet.status(deadline_s=deadline_s)
        if json:
            behind = {member.worker: member.loras_behind for member in view.members if member.loras_behind}
            extra = {member.worker: member.loras_extra for member in view.members if member.loras_extra}
            out.document({"loras": view.loras, "behind": behind, "extra": extra, "report": report})
        else:
            show_loras(out, view, report)
        return _end(report)

    run_on_fleet(out, url, namespace, work)


def _run(
    what: str,
    json: bool,
    url: str | None,
    namespace: str | None,
    components: Sequence[str] | None,
    workers: Sequence[str] | None,
    verb: Verb,
) -> None:
    out = Output(json)
    target = checked(out, lambda: target_of(list(components or ()), list(workers or ())))

    async def work(fleet: FleetClient) -> ExitCode:
        with out.progress(what) as on_progress:
            report = await verb(fleet, target, on_progress)
        out.settle(exit_code_of_report(report))
        with out.aside():
            if json:
                out.document(report)
            else:
                show_report(out, report)
                if report.lora is not None:
                    out.line(lora_text(report.lora))
        return _end(report)

    run_on_fleet(out, url, namespace, work)


def _end(report: Report) -> ExitCode:
    code = exit_code_of_report(report)
    if code is not ExitCode.OK:
        complain(f"rlbus: {failure_text(report)}")
    return code


def _folder_of(source: str, checksum: str | None) -> tuple[Path, bool]:
    """The folder that `--from` means, and whether the workers read it by themselves. Raises ConfigError."""
    if checksum is not None and not is_sha256(checksum):
        raise ConfigError("--checksum", checksum, "use the 64 digits (0-9 a-f) of a SHA-256")
    if "://" not in source:
        folder = Path(source).absolute()
        if not folder.is_dir():
            raise ConfigError("--from", source, "no such folder here; file:///DIR is one that every worker reads")
        return folder, False
    parts = urlsplit(source)
    folder = Path(unquote(parts.path))
    is_elsewhere = parts.scheme != "file" or parts.netloc not in ("", "localhost") or parts.query or parts.fragment
    if is_elsewhere or not folder.is_absolute():
        raise ConfigError("--from", source, "use a folder, or file:///DIR for one that every worker can read")
    if checksum is None and not folder.is_dir():
        problem = "no such folder here; one that only the workers see needs its --checksum"
        raise ConfigError("--from", source, problem)
    return folder, True


def _named(text: str) -> tuple[str, int | None]:
    """(name, revision) of NAME[@N]. Raises ConfigError."""
    parts = split_lora_id(text)
    if parts is not None and parts[1] <= MAX_REVISION:
        return parts
    if not is_lora_name(text):
        raise ConfigError("NAME", text, "use NAME, or NAME@N with a revision such as 7")
    return text, None
