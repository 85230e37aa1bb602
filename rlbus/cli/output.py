"""What the CLI writes and how it ends: one document on stdout, errors and progress on stderr, an exit code.

With `--json` stdout has exactly one JSON document, also for an error. Without it stdout has plain tables that are never
cut to the terminal's width, so that instance ids stay whole. Progress is shown only when stderr is a terminal.
"""

import asyncio
import contextlib
import enum
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import msgspec
import typer

from rlbus._conversation import ProgressHandler
from rlbus.cli.interrupts import INTERRUPTED, interrupts
from rlbus.errors import (
    BrokenError,
    ConfigError,
    DeadlineError,
    FaultError,
    NoWorkerError,
    PartialError,
    RefusedError,
    RLBusError,
)
from rlbus.schemas import FaultCode, OpProgress, OpStatus, Report


class ExitCode(enum.IntEnum):
    """How a command ends; the table of docs/cli.md."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    NOTHING_THERE = 4
    DEADLINE = 5
    INTERRUPTED = INTERRUPTED


EXIT_CODES = {
    ExitCode.OK: "ok",
    ExitCode.FAILED: "failed, or ok on some workers only",
    ExitCode.USAGE: "wrong usage or setting",
    ExitCode.REFUSED: "refused, nothing changed",
    ExitCode.NOTHING_THERE: "nothing there: no server, wrong credentials, no controller, or no worker",
    ExitCode.DEADLINE: "deadline passed",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
}

_CODE_OF_FAULT = {
    FaultCode.NO_WORKER: ExitCode.NOTHING_THERE,
    FaultCode.DEADLINE: ExitCode.DEADLINE,
    FaultCode.NO_ACK: ExitCode.DEADLINE,
    FaultCode.STALLED: ExitCode.DEADLINE,
}


def exit_code_of_report(report: Report) -> ExitCode:
    """How a command ends that got `report`."""
    if report.status is OpStatus.OK:
        return ExitCode.OK
    fault_code = None if report.fault is None else report.fault.code
    if report.status is OpStatus.REFUSED:
        return _CODE_OF_FAULT.get(fault_code, ExitCode.REFUSED) if fault_code else ExitCode.REFUSED
    return ExitCode.DEADLINE if fault_code is FaultCode.DEADLINE else ExitCode.FAILED


def exit_code_of_error(error: BaseException) -> ExitCode:
    """How a command ends that `error` ended."""
    if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        return ExitCode.INTERRUPTED
    if isinstance(error, ConfigError):
        return ExitCode.USAGE
    if isinstance(error, PartialError):
        return exit_code_of_report(error.report)
    if isinstance(error, DeadlineError):
        return ExitCode.DEADLINE
    if isinstance(error, BrokenError | NoWorkerError):
        return ExitCode.NOTHING_THERE
    return ExitCode.REFUSED if isinstance(error, RefusedError) else ExitCode.FAILED


class UnwrittenError(RLBusError):
    """What stdout says why it takes nothing; a reader that has enough is a BrokenPipeError."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return f"stdout: {self.problem}"


def complain(text: str) -> None:
    """Write lines to stderr, whatever becomes of them: that nobody can be told changes no exit code."""
    try:
        typer.echo(text, err=True)
    except OSError:
        _drop(sys.stderr)


def _drop(stream: TextIO | None) -> None:
    """Let the rest of a stream go nowhere, or the interpreter's own end would fail on it, and end with 120."""
    with contextlib.suppress(OSError):
        if stream is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def interruption(error: BaseException) -> str:
    """What to say of Ctrl-C: also what became of the op, which the client notes on the cancellation behind it."""
    notes: list[str] = getattr(error.__context__, "__notes__", [])
    return "; ".join(["interrupted", *notes])


class Output:
    """Where one command writes; `is_json` is its `--json`.

    Writing raises UnwrittenError, also without any stdout, or BrokenPipeError.
    """

    def __init__(self, is_json: bool) -> None:
        self.is_json = is_json
        # A service that fails later has already written its document; there is never a second one.
        self.has_document = False
        self._outcome: ExitCode | None = None

    @property
    def outcome(self) -> ExitCode | None:
        """How the command ends, once that is known."""
        return self._outcome

    def settle(self, code: ExitCode) -> ExitCode:
        """The command ends with `code`, whatever comes: also Ctrl-C changes it no more. Call it before that is told.
        Returns what was settled first.
        """
        if self._outcome is None:
            self._outcome = code
            interrupts.settle(int(code))
        return self._outcome

    def document(self, document: Any) -> None:
        """Write the one JSON document; Structs may be in it."""
        self.has_document = True
        self._write(json.dumps(msgspec.to_builtins(document, str_keys=True), ensure_ascii=False))

    def line(self, text: str) -> None:
        """Write a line of text for people; with `--json` it is left out."""
        if not self.is_json:
            self._write(text)

    def loud(self, text: str) -> None:
        """Write a line that must not be overlooked."""
        if not self.is_json:
            self._write(typer.style(f"!! {text}", fg="red", bold=True))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write aligned columns, as wide as they need to be."""
        for text in aligned([head, *rows]):
            self.line(text)

    @staticmethod
    def _write(text: str) -> None:
        if sys.stdout is None:
            raise UnwrittenError("it is closed")
        try:
            typer.echo(text)  # which flushes
        except BrokenPipeError:
            raise
        except OSError as exc:
            raise UnwrittenError(exc.strerror or type(exc).__name__) from exc

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For what is written about something that has been done: the command ends as that did, read or not. A reader
        that has enough, or a stdout that was closed, is no news; anything else is said on stderr.
        """
        try:
            yield
        except BrokenPipeError:
            _drop(sys.stdout)
        except UnwrittenError as exc:
            _drop(sys.stdout)
            if sys.stdout is not None:
                complain(f"rlbus: {exc}")

    def error(self, error: BaseException, code: ExitCode | None = None) -> ExitCode:
        """Write what went wrong: one line on stderr, with `--json` also the document. Settles and returns how to end:
        as the error says, or with `code`.
        """
        code = self.settle(exit_code_of_error(error) if code is None else code)
        if isinstance(error, BrokenPipeError | UnwrittenError):
            _drop(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return code  # whoever reads our output has enough of it (`| head`): not a word
        text = interruption(error) if code is ExitCode.INTERRUPTED else one_line(error)
        if self.is_json and not self.has_document:
            named = error.code.value if isinstance(error, FaultError) else type(error).__name__
            detail = error.fault.detail if isinstance(error, FaultError) else {}
            with self.aside():
                self.document({"error": {"code": named, "message": text, "detail": detail}, "exit_code": int(code)})
        complain(f"rlbus: {text}")
        return code

    @contextmanager
    def progress(self, what: str) -> Iterator[ProgressHandler]:
        """Show how a long op moves on, if stderr is a terminal; yields the handler to pass as `on_progress`."""
        if sys.stderr is None or not sys.stderr.isatty():
            yield _ignore
            return
        from rich.console import Console

        with Console(stderr=True).status(f"{what} ...") as status:

            def on_progress(progress: OpProgress) -> None:
                status.update(f"{what}: {progress_text(progress)}")

            yield on_progress


def _ignore(_progress: OpProgress) -> None:
    return None


def progress_text(progress: OpProgress) -> str:
    """`transfer 12.0/64.0 MiB`, `pause 1/2 workers`."""
    if progress.total is None:
        return progress.phase if progress.done == 0 else f"{progress.phase} {progress.done} {progress.unit}"
    if progress.unit == "bytes":
        return f"{progress.phase} {progress.done / 2**20:.1f}/{progress.total / 2**20:.1f} MiB"
    return f"{progress.phase} {progress.done}/{progress.total} {progress.unit}"


def one_line(error: BaseException) -> str:
    """The text of an error without line breaks; one that isn't ours is named, since it is a bug."""
    text = " ".join(str(error).split())
    if isinstance(error, RLBusError):
        return text
    return f"unexpected {type(error).__name__}: {text} (run with `rlbus -vv` for the traceback, and please report it)"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, with columns padded to their widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def age(seconds: float) -> str:
    """A duration as people say it: `0.4 s`, `12 s`, `5 min`, `3 h`, `2 d`."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
