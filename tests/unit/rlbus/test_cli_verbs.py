"""Commands that ask the fleet: what they are given is checked before anything is connected, and how they end."""

import asyncio
import errno
import io
import itertools
import json
import os
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from rlbus.bus import Bus
from rlbus.cli.app import app
from rlbus.cli.fleet import WATCH_S, _watch
from rlbus.cli.output import ExitCode, Output
from rlbus.client import FleetClient
from rlbus.errors import BrokenError, DeadlineError, RLBusError
from rlbus.schemas import Fault, FaultCode, FleetView, OpStatus, Report
from rlbus.testing import LoopClock, MemoryBroker, run

pytestmark = pytest.mark.unit

# Nobody listens there: whatever looks for the bus ends with 4.
NOWHERE = {"RLBUS_URL": "nats://127.0.0.1:9", "RLBUS_CONNECT_S": "0.2"}


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1"])
@pytest.mark.parametrize(
    "command", [("pause", "--lease"), ("lora", "unload", "policy", "--drain"), ("resume", "--deadline")]
)
def test_a_number_of_seconds_that_is_none_is_wrong_usage(command: tuple[str, ...], seconds: str) -> None:
    """`--lease inf` would be no lease at all."""
    done = CliRunner().invoke(app, [*command, seconds], env=NOWHERE)
    assert done.exit_code == ExitCode.USAGE, done.stderr
    assert command[-1] in done.stderr


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (("pause", "-c", "backend", "-w", "backend/1"), "--component or --worker"),
        (("versions", "-w", "nobody"), "COMPONENT/ID"),
        (("update", "--from", "/weights", "--version", "newest"), "--version"),
        (("update", "--from", "/weights", "--version", "99999999999999999999999"), "2**53"),
        (("update", "--from", "/weights", "--version", "1" * 5000), "2**53"),
        (("cancel", "bad id"), "`rlbus status`"),
        (("history", "bad id"), "`rlbus history`"),
        (("status", "--watch", "--json"), "--watch"),
        (("lora", "list", "-c", "a b"), "--component"),
        (("lora", "load", "policy", "--from", "s3://bucket/policy"), "--from"),
        (("lora", "load", "policy", "--from", "/nonexistent"), "no such folder"),
        (("lora", "load", "policy", "--from", "file:///nope"), "--checksum"),
        (("lora", "load", "policy", "--from", "file:///nope", "--checksum", "zz"), "64 digits"),
        (("lora", "load", "policy", "--from", ".", "--checksum", "A" * 64), "64 digits"),
        (("lora", "load", "policy", "--from", "file://", "--checksum", "a" * 64), "--from"),
        (("lora", "load", "policy@7", "--from", "."), "revision"),
        (("lora", "unload", "policy@@"), "NAME@N"),
        (("lora", "unload", "policy@9999999999999999"), "NAME@N"),
    ],
)
def test_what_is_wrong_in_itself_is_said_without_a_server(command: tuple[str, ...], problem: str) -> None:
    """With 2: "nobody listens there" would send the user looking for the wrong thing."""
    done = CliRunner().invoke(app, [*command], env=NOWHERE)
    assert done.exit_code == ExitCode.USAGE, done.stderr
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1
    assert "^" not in done.stderr  # no regular expression


@pytest.mark.parametrize(
    "command",
    [
        ("pause", "--lease", "90000"),
        ("pause", "--lease", "1e9"),
        ("status", "--deadline", "1e9"),
        ("lora", "load", "policy", "--from", ".", "--revision", "99999999999999999999"),
    ],
)
def test_a_number_beyond_what_the_controller_takes_is_wrong_usage(command: tuple[str, ...]) -> None:
    """The limit is known here, and said; a server is not looked for."""
    done = CliRunner().invoke(app, [*command], env=NOWHERE)
    assert done.exit_code == ExitCode.USAGE, done.stderr
    assert command[-2] in done.stderr
    assert ("86400" if command[-1] != "99999999999999999999" else "9007199254740992") in done.stderr


class Unwritable(io.StringIO):
    """A stdout or stderr on a full disk, or with nobody who reads it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str, /) -> int:
        """Never works."""
        raise OSError(self._number, os.strerror(self._number))


REPORT = Report(op_id="o", op="pause", status=OpStatus.OK, outcomes=(), phases_s={}, took_s=0.0)
VIEW = FleetView(namespace="n", term=1, version=None, epoch=None, op_id=None, members=())
BUSY = Fault(code=FaultCode.BUSY, message="another op runs")
REFUSED = Report(op_id="o", op="pause", status=OpStatus.REFUSED, outcomes=(), phases_s={}, took_s=0.0, fault=BUSY)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Report]:
    """A fleet without a bus that answers each verb with the report in here."""
    answers: dict[str, Report] = {}

    class NoBus:
        async def aclose(self) -> None:
            """Nothing to close."""

        def new_id(self) -> str:
            return "o"

    async def connect(config: Any, *, name: str) -> NoBus:
        return NoBus()

    async def run(self: FleetClient, request: Any, on_progress: Any, check: bool) -> Report:
        return answers["report"]

    async def cancel(self: FleetClient, op_id: str, **how: Any) -> None:
        return None

    monkeypatch.setenv("RLBUS_URL", NOWHERE["RLBUS_URL"])
    monkeypatch.setattr("rlbus.connecting.connect_bus", connect)
    monkeypatch.setattr(FleetClient, "_run", run)
    monkeypatch.setattr(FleetClient, "cancel", cancel)
    answers["report"] = REPORT
    return answers


def end_of(*command: str) -> int:
    """The exit code, with stdout and stderr as they are."""
    with pytest.raises(SystemExit) as ended:
        app(list(command))
    return int(ended.value.code or 0)


@pytest.mark.parametrize("flags", [(), ("--json",)])
@pytest.mark.parametrize("command", [("pause",), ("lora", "unload", "policy"), ("cancel", "o")])
@pytest.mark.parametrize("broken", [errno.EPIPE, errno.ENOSPC, None])
def test_what_was_done_ends_as_it_did_though_nobody_can_be_told(
    answers: dict[str, Report],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: int | None,
    command: tuple[str, ...],
    flags: tuple[str, ...],
) -> None:
    """Of a full disk one line is said; a reader that has enough, or a stdout that isn't there, is nobody's business."""
    monkeypatch.setattr(sys, "stdout", None if broken is None else Unwritable(broken))
    assert end_of(*command, *flags) == ExitCode.OK
    told = capsys.readouterr().err
    assert told == ("rlbus: stdout: No space left on device\n" if broken == errno.ENOSPC else "")


@pytest.mark.parametrize("broken", [errno.EPIPE, errno.ENOSPC, None])
def test_a_refusal_stays_one_though_neither_stdout_nor_stderr_takes_it(
    answers: dict[str, Report], monkeypatch: pytest.MonkeyPatch, broken: int | None
) -> None:
    """The code is all that is left to say it."""
    answers["report"] = REFUSED
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None if broken is None else Unwritable(broken))
    assert end_of("pause") == ExitCode.REFUSED
    assert end_of("pause", "-c", "a", "-w", "b/1", "--json") == ExitCode.USAGE


def test_an_answer_that_does_not_arrive_is_a_failure(
    answers: dict[str, Report], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever asks a question into a file on a full disk, or into nothing, has no answer."""
    for stdout, why in ((Unwritable(errno.ENOSPC), "No space left on device"), (None, "it is closed")):
        monkeypatch.setattr(sys, "stdout", stdout)
        assert end_of("versions", "--json") == ExitCode.FAILED
        assert capsys.readouterr().err == f"rlbus: stdout: {why}\n"


def test_a_verb_whose_output_is_read_has_it(answers: dict[str, Report], capsys: pytest.CaptureFixture[str]) -> None:
    """As ever."""
    assert end_of("pause", "--json") == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["op_id"] == "o"


def test_a_watch_outlives_a_server_and_a_controller_that_are_away(capsys: pytest.CaptureFixture[str]) -> None:
    """It says so and looks again; only the first look may fail, which is a command that finds nothing there."""
    away = [BrokenError("nats", "gone"), DeadlineError("status", 10.0), BrokenError("namespace n", "no controller")]
    looks: list[RLBusError | FleetView | asyncio.CancelledError] = [VIEW, *away, VIEW, asyncio.CancelledError()]
    times: list[float] = []

    class Watched(FleetClient):
        async def status(self, *, deadline_s: float = 1.0) -> FleetView:
            times.append(asyncio.get_running_loop().time())
            look = looks.pop(0)
            if isinstance(look, FleetView):
                return look
            raise look

    async def watch() -> None:
        async with Bus(MemoryBroker().connect(), clock=LoopClock()) as bus:
            await _watch(Output(False), Watched(bus, "n"), 1.0)

    with pytest.raises(asyncio.CancelledError):
        run(watch())
    told = capsys.readouterr().out
    assert (told.count("controller term 1"), told.count("; looking again\n")) == (2, 3)
    assert "nats: gone; looking again\n" in told
    assert [later - time for time, later in itertools.pairwise(times)] == [WATCH_S] * 5
    looks[:] = [BrokenError("namespace n", "no controller")]
    with pytest.raises(BrokenError):
        run(watch())
