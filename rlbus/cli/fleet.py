"""Commands that ask the controller: workers, status, history, versions, pause, sleep, flush, abort, update, cancel."""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from rlbus._conversation import ProgressHandler
from rlbus.cli.options import (
    Components,
    Deadline,
    Json,
    Namespace,
    Url,
    Workers,
    check_seconds,
    checked,
    op_id_of,
    run_on_fleet,
    target_of,
    version_of,
)
from rlbus.cli.output import ExitCode, Output, complain, exit_code_of_report, one_line
from rlbus.cli.views import failure_text, present, show_history, show_report, show_status, show_workers
from rlbus.client import QUESTION_DEADLINE_S, RELOAD_DEADLINE_S, SLEEP_DEADLINE_S, VERB_DEADLINE_S, FleetClient
from rlbus.errors import BrokenError, ConfigError, DeadlineError, refused
from rlbus.schemas import FaultCode, FleetView, PauseMode, Report, SleepTag, Target

# How long `--watch` waits for an event before it looks again anyway (ages grow).
WATCH_S = 2.0
# Moves to the top of the terminal and clears it.
CLEAR = "\x1b[H\x1b[2J"

# Runs one verb: (client, target, progress handler) -> report.
Verb = Callable[[FleetClient, Target, ProgressHandler], Awaitable[Report]]


def _deadline(given: float | None, default_s: float) -> float:
    return default_s if given is None else given


def _run_verb(
    what: str,
    json: bool,
    url: str | None,
    namespace: str | None,
    components: list[str] | None,
    workers: list[str] | None,
    verb: Verb,
    *,
    is_question: bool = False,
) -> None:
    """Run one verb on the fleet, show its report, and end with its code. Of a question the report is all there is: it
    has failed if that can't be written.
    """
    out = Output(json)
    target = checked(out, lambda: target_of(components, workers))

    async def work(fleet: FleetClient) -> ExitCode:
        with out.progress(what) as on_progress:
            report = await verb(fleet, target, on_progress)
        code = exit_code_of_report(report)
        if not is_question:
            out.settle(code)
        with contextlib.nullcontext() if is_question else out.aside():
            if json:
                out.document(report)
            else:
                show_report(out, report)
        if code is not ExitCode.OK:
            complain(f"rlbus: {failure_text(report)}")
        return code

    run_on_fleet(out, url, namespace, work)


def pause(
    url: Url = None,
    namespace: Namespace = None,
    component: Components = None,
    worker: Workers = None,
    mode: Annotated[
        PauseMode, typer.Option(help="What happens to requests in flight: frozen, finished first, or ended.")
    ] = PauseMode.KEEP,
    keep_cache: Annotated[bool, typer.Option("--keep-cache", help="Leave the prefix cache as it is.")] = False,
    lease: Annotated[
        float | None,
        typer.Option(
            "--lease",
            metavar="SECONDS",
            callback=check_seconds,
            help="Resume by themselves after it; 0.1 to 86400. [default: never]",
        ),
    ] = None,
    deadline: Deadline = None,
    json: Json = False,
) -> None:
    """Hold the engines still.

    If one fails, the others are resumed again. Without --lease they stay paused until `rlbus resume`; with it, the same
    command again renews it.
    """

    async def verb(fleet: FleetClient, target: Target, on_progress: ProgressHandler) -> Report:
        return await fleet.pause(
            target,
            mode=mode,
            clear_cache=not keep_cache,
            lease_s=lease,
            deadline_s=_deadline(deadline, VERB_DEADLINE_S),
            on_progress=on_progress,
            check=False,
        )

    _run_verb("pause", json, url, namespace, component, worker, verb)


def resume(
    url: Url = None,
    namespace: Namespace = None,
    component: Components = None,
    worker: Workers = None,
    force: Annotated[bool, typer.Option("--force", help="Also those with dirty weights. This is logged.")] = False,
    deadline: Deadline = None,
    json: Json = False,
) -> None:
    """Let the engines generate again."""

    async def verb(fleet: FleetClient, target: Target, on_progress: ProgressHandler) -> Report:
        deadline_s = _deadline(deadline, VERB_DEADLINE_S)
        return await fleet.resume(target, force=force, deadline_s=deadline_s, on_progress=on_progress, check=False)

    _run_verb("resume", json, url, namespace, component, worker, verb)


def flush(
    url: Url = None,
    namespace: Namespace = None,
    component: Components = None,
    worker: Workers = None,
    deadline: Deadline = None,
    json: Json = False,
) -> None:
    """Empty every cache of the engines."""

    async def verb(fleet: FleetClient, target: Target, on_progress: ProgressHandler) -> Report:
        deadline_s = _deadline(deadline, VERB_DEADLINE_S)
        return await fleet.flush(target, deadline_s=deadline_s, on_progress=on_progress, check=False)

    _run_verb("flush", json, url, namespace, component, worker, verb)


def abort(
    url: Url = None,
    namespace: Namespace = None,
    component: Components = None,
    worker: Workers = None,
    request: Annotated[
        list[str] | None, typer.Option("--request", metavar="ID", help="Only this request; may be repeated.")
    ] = None,
    deadline: Deadline = None,
    json: Json = False,
) -> None:
    """End requests in flight: all, or those named."""

    async def verb(fleet: FleetClient, target: Target, on_progress: ProgressHandler) -> Report:
        return await fleet.abort(
            target,
            request_ids=request or None,
            deadline_s=_deadline(deadline, VERB_DEADLINE_S),
            on_progress=on_progress,
            check=False,
        )

    _run_verb("abort", json, url, namespace, component, worker, verb)


# Of `sleep` and `wake`.
Tags = Annotated[
    list[SleepTag] | None,
    typer.Option("--tags", metavar="TAG", help="weights or kv_cache; may be repeated. [default: all]"),
]


def sleep(
    url: Url = None,
    namespace: Namespace = None,
    component: Components = None,
    worker: Workers = None,
    tags: Tags = None,
    level: Annotated[
        int, typer.Option("--level", min=1, max=2, help="1 keeps the weights in host memory, 2 discards them.")
    ] = 1,
    mode: Annotated[
        PauseMode, typer.Option(help="What happens to requests in flight: frozen, finished first, or ended.")
    ] = PauseMode.ABORT,
    deadline: Deadline = None,
    json: Json = False,
) -> None:
    """Let the engines give their memory back.

    They generate nothing until `rlbus wake`. If one fails, the others are woken again (not with --level 2).
    """

    async def verb(fleet: FleetClient, target: Target, on_progress: ProgressHandler) -> Report:
        return await fleet.sleep(
            target,
            tags=tags or None,
            level=level,
            mode=mode,
            deadline_s=_deadline(deadline, SLEEP_DEADLINE_S),
            on_progress=on_progress,
            check=False,
        )

    _run_verb("sleep", json, url, namespace, component, worker, verb)


def wake(
    url: Url = None,
    namespace: Namespace = None,
    component: Components = None,
    worker: Workers = None,
    tags: Tags = None,
    deadline: Deadline = None,
    json: Json = False,
) -> None:
    """Let the engines take their memory again.

    Those that are awake then, and that nobody holds paused, generate.
    """

    async def verb(fleet: FleetClient, target: Target, on_progress: ProgressHandler) -> Report:
        deadline_s = _deadline(deadline, SLEEP_DEADLINE_S)
        return await fleet.wake(target, tags=tags or None, deadline_s=deadline_s, on_progress=on_progress, check=False)

    _run_verb("wake", json, url, namespace, component, worker, verb)


def versions(
    url: Url = None,
    namespace: Namespace = None,
    component: Components = None,
    worker: Workers = None,
    deadline: Deadline = None,
    json: Json = False,
) -> None:
    """Ask each worker which weights it has."""

    async def verb(fleet: FleetClient, target: Target, _on_progress: ProgressHandler) -> Report:
        return await fleet.versions(target, deadline_s=_deadline(deadline, QUESTION_DEADLINE_S), check=False)

    _run_verb("versions", json, url, namespace, component, worker, verb, is_question=True)


def update(
    folder: Annotated[
        Path,
        typer.Option("--from", metavar="DIR", help="Safetensors folder, as the workers see it."),
    ],
    version: Annotated[
        str | None,
        typer.Option("--version", metavar="STEP", help="Step, or incarnation.step; without it the fleet's next."),
    ] = None,
    url: Url = None,
    namespace: Namespace = None,
    component: Components = None,
    worker: Workers = None,
    pause_mode: Annotated[PauseMode, typer.Option(help="What happens to requests in flight.")] = PauseMode.KEEP,
    allow_rollback: Annotated[bool, typer.Option("--allow-rollback", help="Take an older version too.")] = False,
    deadline: Deadline = None,
    json: Json = False,
) -> None:
    """Give the engines the weights of a folder.

    A safetensors folder that each of them can read, below one of their --weight-root.
    """
    meant = checked(Output(json), lambda: version_of(version))

    async def verb(fleet: FleetClient, target: Target, on_progress: ProgressHandler) -> Report:
        return await fleet.reload(
            str(folder.absolute()),
            target,
            version=meant,
            pause_mode=pause_mode,
            allow_rollback=allow_rollback,
            deadline_s=_deadline(deadline, RELOAD_DEADLINE_S),
            on_progress=on_progress,
            check=False,
        )

    _run_verb("update", json, url, namespace, component, worker, verb)


def workers(url: Url = None, namespace: Namespace = None, deadline: Deadline = None, json: Json = False) -> None:
    """List the workers.

    Who they are, whether they live, what they do, which weights they have.
    """
    out = Output(json)

    async def work(fleet: FleetClient) -> ExitCode:
        view = await fleet.status(deadline_s=_deadline(deadline, QUESTION_DEADLINE_S))
        if json:
            out.document({"namespace": view.namespace, "workers": view.members})
        else:
            show_workers(out, view)
        return _code_of_view(view)

    run_on_fleet(out, url, namespace, work)


def status(
    url: Url = None,
    namespace: Namespace = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again on every change, until Ctrl-C.")] = False,
    deadline: Deadline = None,
    json: Json = False,
) -> None:
    """Show the state of the fleet.

    Version, running op, who is admitted, who is paused by whom, who is dirty.
    """
    out = Output(json)
    if watch and json:
        raise typer.Exit(int(out.error(ConfigError("--watch", True, "goes without --json, which is one document"))))

    async def work(fleet: FleetClient) -> ExitCode:
        deadline_s = _deadline(deadline, QUESTION_DEADLINE_S)
        if watch:
            await _watch(out, fleet, deadline_s)
        view = await fleet.status(deadline_s=deadline_s)
        if json:
            out.document(view)
        else:
            show_status(out, view)
        return _code_of_view(view)

    run_on_fleet(out, url, namespace, work)


def history(
    op_id: Annotated[
        str | None, typer.Argument(metavar="[OP]", help="Show this one, with the outcome on every worker.")
    ] = None,
    url: Url = None,
    namespace: Namespace = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="How many.", min=1, max=256)] = 20,
    deadline: Deadline = None,
    json: Json = False,
) -> None:
    """Show what was done to the fleet: the journal, newest first.

    Who asked for what and when, how it ended, and what a new controller had to settle.
    """
    out = Output(json)
    checked(out, lambda: op_id_of(op_id, "rlbus history"))

    async def work(fleet: FleetClient) -> ExitCode:
        view = await fleet.history(limit, of_op_id=op_id, deadline_s=_deadline(deadline, QUESTION_DEADLINE_S))
        if json:
            out.document(view)
        else:
            show_history(out, view)
        return ExitCode.OK

    run_on_fleet(out, url, namespace, work)


def cancel(
    op_id: Annotated[
        str | None, typer.Argument(metavar="[OP]", help="As `rlbus status` shows it. [default: what runs]")
    ] = None,
    url: Url = None,
    namespace: Namespace = None,
    deadline: Deadline = None,
    json: Json = False,
) -> None:
    """Take back the op that runs, whoever asked for it.

    It ends like any other failure: undone, or reported. `rlbus history` then shows how.
    """
    out = Output(json)
    checked(out, lambda: op_id_of(op_id, "rlbus status"))

    async def work(fleet: FleetClient) -> ExitCode:
        deadline_s = _deadline(deadline, QUESTION_DEADLINE_S)
        op = op_id or (await fleet.glance(deadline_s=deadline_s)).op_id
        if op is None:
            raise refused(FaultCode.UNKNOWN_OP, "no op runs that changes anything")
        await fleet.cancel(op, deadline_s=deadline_s)
        out.settle(ExitCode.OK)
        with out.aside():
            if json:
                out.document({"op_id": op})
            out.line(f"op {op} is taken back; `rlbus history` shows how it ends")
        return ExitCode.OK

    run_on_fleet(out, url, namespace, work)


def _code_of_view(view: FleetView) -> ExitCode:
    return ExitCode.OK if present(view) else ExitCode.NOTHING_THERE


def _clear() -> None:
    if sys.stdout is not None and sys.stdout.isatty():
        typer.echo(CLEAR, nl=False)


async def _watch(out: Output, fleet: FleetClient, deadline_s: float) -> NoReturn:
    """Show the fleet after each event, and every WATCH_S, until cancelled. Once it was there, a server or a controller
    that is away is shown, too: it comes back.
    """
    view: FleetView | None = None
    async with fleet.watch() as events:
        while True:
            try:
                view = await fleet.status(deadline_s=deadline_s)
            except (BrokenError, DeadlineError) as exc:
                if view is None:
                    raise
                _clear()
                out.line(f"{one_line(exc)}; looking again")
                await asyncio.sleep(WATCH_S)
                continue
            _clear()
            show_status(out, view)
            with contextlib.suppress(DeadlineError):
                await events.next(WATCH_S)
