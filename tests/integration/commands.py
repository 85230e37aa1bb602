"""`rlbus` as a user runs it, in this process or as processes of their own, and questions that are asked until answered.

A controller whose store, or which itself, stands still for 2 s loses its lease: the next leader, often the same process
under the next term, has to find its workers first. What a test reads at one moment may fall into that.
"""

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from typer.testing import CliRunner

from rlbus.cli.app import app
from rlbus.codec import encode
from rlbus.errors import FaultError, PartialError, RLBusError
from rlbus.schemas import Report
from tests.tries import TooLateError, best_of

NAMESPACE = "cli"
# What has to come.
LIMIT_S = 120.0
# What is about something else gives a server that stands still this much to let it in.
CONNECT_S = "60"
# Faults of an op in which somebody only stood still for seconds.
LATE = {"no_ack", "stalled", "worker_lost", "controller_lost", "not_recorded"}

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str
    took_s: float

    @property
    def document(self) -> Any:
        """The one JSON document on stdout; nothing may stand beside it."""
        assert self.stdout.count("\n") == 1
        return json.loads(self.stdout)


def rlbus(*argv: str, url: str | None = None, namespace: str = NAMESPACE) -> Done:
    """Run a command in this process, with the bus in the environment as a user would have it."""
    env: dict[str, str | None] = {name: None for name in os.environ if name.startswith("RLBUS_")}
    env |= {"RLBUS_NAMESPACE": namespace, "RLBUS_CONNECT_S": CONNECT_S} | ({} if url is None else {"RLBUS_URL": url})
    started = time.monotonic()
    result = CliRunner().invoke(app, list(argv), env=env)
    return Done(result.exit_code, result.stdout, result.stderr, time.monotonic() - started)


class Process:
    """A long-running command with `--json`: its first line is its document.

    stderr goes to a file, since nobody reads it before the end, and a full pipe would hold the process up.
    """

    def __init__(self, *argv: str, **environ: str) -> None:
        env = {name: text for name, text in os.environ.items() if not name.startswith("RLBUS_")}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._said = ""
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "rlbus", *argv],
            env=env | {"RLBUS_CONNECT_S": CONNECT_S} | environ,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            start_new_session=True,
        )

    def document(self) -> Any:
        """The document; waits for it."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, self.kill()
        return json.loads(line)

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Send it a signal, unless it has ended; its exit code, and what was on stderr."""
        self.popen.send_signal(signal.SIGCONT)
        self.popen.send_signal(number)
        self.popen.communicate(timeout=LIMIT_S)
        if not self._stderr.closed:
            self._stderr.seek(0)
            self._said = self._stderr.read().decode()
            self._stderr.close()
        return self.popen.returncode, self._said

    def kill(self) -> str:
        """End it in any case; what was on stderr."""
        return self.end(signal.SIGKILL)[1]


def program(*argv: str, url: str | None = None) -> Process:
    """Start a command in NAMESPACE, on this server if it is one that there is."""
    return Process(*argv, RLBUS_NAMESPACE=NAMESPACE, **({} if url is None else {"RLBUS_URL": url}))


def again_until(is_so: Callable[[], bool]) -> None:
    """Ask until it is so."""
    until_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.2)


def asked(url: str, *argv: str, namespace: str = NAMESPACE) -> Any:
    """The document of a question, asked until somebody answers it (4: no controller, or no worker yet; 5: too late)."""
    until_s = time.monotonic() + LIMIT_S
    while (done := rlbus(*argv, "--json", "--deadline", "60", url=url, namespace=namespace)).code in (4, 5):
        assert time.monotonic() < until_s, done
        time.sleep(0.2)
    assert done.code == 0, done
    return done.document


def are_alive(url: str, num_workers: int) -> bool:
    """Whether so many are listed, and no others."""
    return [worker["liveness"] for worker in asked(url, "workers")["workers"]] == ["alive"] * num_workers


def until_listed(url: str, num_workers: int) -> None:
    """Until the controller knows so many workers."""
    again_until(lambda: len(asked(url, "workers")["workers"]) >= num_workers)


def until_all_run(url: str, num_workers: int) -> None:
    """Let everybody run, once so many of them can be reached."""
    again_until(lambda: are_alive(url, num_workers) and rlbus("resume", url=url).code == 0)


def running_op(url: str, process: Process) -> str:
    """The op that the controller runs for a command, once it does."""
    until_s = time.monotonic() + LIMIT_S
    while (op_id := asked(url, "status")["op_id"]) is None:
        if process.popen.poll() is not None:
            raise TooLateError("the op was over before it was seen")
        assert time.monotonic() < until_s
    return str(op_id)


@contextlib.contextmanager
def one_term(url: str, namespace: str = NAMESPACE) -> Iterator[None]:
    """What fails inside came too late if another leads then than before: for a moment it knew no worker."""
    before = asked(url, "status", namespace=namespace)["term"]
    try:
        yield
    except TooLateError:
        raise
    except (AssertionError, LookupError, StopIteration, RLBusError) as exc:
        after = asked(url, "status", namespace=namespace)["term"]
        if after == before:
            raise
        raise TooLateError(f"term {after} began after term {before}") from exc


def forgive_late_op(report: dict[str, Any] | Report) -> None:
    """Raises TooLateError if all that was wrong with an op, or a command, is that somebody stood still."""
    told: dict[str, Any] = json.loads(encode(report)) if isinstance(report, Report) else report
    faults = [told.get("error"), told.get("fault"), *(outcome.get("fault") for outcome in told.get("outcomes", ()))]
    codes = {fault["code"] for fault in faults if fault is not None}
    if codes and codes <= LATE:
        raise TooLateError(f"somebody stood still: {told}")


@contextlib.contextmanager
def late_ops_forgiven() -> Iterator[None]:
    """The same of an op that raises inside."""
    try:
        yield
    except PartialError as exc:
        forgive_late_op(exc.report)
        raise
    except FaultError as exc:
        if exc.fault.code in LATE:
            raise TooLateError(f"somebody stood still: {exc}") from exc
        raise


def played(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run it; again if an op in it failed only because somebody stood still."""

    def play() -> T:
        with late_ops_forgiven():
            return asyncio.run(main())

    return best_of(play)


def in_one_term(num_workers: int) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """A test of a fleet of so many at `url`, which run when it begins; played again if the lease moved in it, or an
    op in it was late.
    """

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(test)
        def played(*args: P.args, **kwargs: P.kwargs) -> None:
            url = str(kwargs["url"])

            def play() -> None:
                until_all_run(url, num_workers)
                with one_term(url), late_ops_forgiven():
                    test(*args, **kwargs)

            best_of(play)

        return played

    return decorate


@contextlib.contextmanager
def programs_forgiven(url: str, namespace: str) -> Iterator[None]:
    """What fails inside came too late if another leads then, or if one of the ops of the programs in it was late."""
    before = {item["op_id"] for item in asked(url, "history", namespace=namespace)["items"]}
    with one_term(url, namespace):
        try:
            yield
        except AssertionError:
            for item in asked(url, "history", namespace=namespace)["items"]:
                if item["op_id"] not in before and item.get("status") != "ok":
                    forgive_late_op(asked(url, "history", item["op_id"], namespace=namespace)["report"] or {})
            raise


def done_well(url: str, *argv: str) -> Any:
    """The document of a command that must end well."""
    done = rlbus(*argv, "--json", url=url)
    if done.code != 0:
        forgive_late_op(done.document)
    assert done.code == 0, done
    return done.document
