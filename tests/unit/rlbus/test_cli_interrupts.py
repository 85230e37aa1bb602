"""Ctrl-C at each point of a command's life, each struck exactly: a process of its own, with a bus that isn't there."""

import json
import signal
import subprocess
import sys
import time

import pytest

from rlbus.cli.interrupts import Interrupts
from rlbus.cli.options import run_command
from rlbus.cli.output import ExitCode, Output
from rlbus.errors import BrokenError

pytestmark = pytest.mark.unit

LIMIT_S = 60.0

# Runs `rlbus ARGV`, whose one verb ends with STATUS, and strikes with SIGINT WHEN that is so.
PROGRAM = """
import asyncio, atexit, os, runpy, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)

def strike(when):
    if when == WHEN:
        os.kill(os.getpid(), signal.SIGINT)

class AtTheEnd:
    def __init__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT, when=WHEN):
        self.strike = lambda: when == "modules go" and kill(pid, number)
    def __del__(self):
        self.strike()

import rlbus.cli.app, rlbus.cli.options, rlbus.client, rlbus.connecting, rlbus.sync
from rlbus.cli.output import Output
from rlbus.errors import BrokenError
from rlbus.schemas import OpStatus, Report

class Bus:
    async def aclose(self):
        strike("closing begins")
        if WHEN == "closing hangs":
            print("hangs", file=sys.stderr, flush=True)
            await asyncio.sleep(600)
        await asyncio.sleep(0)
        strike("closing")
        await asyncio.sleep(0)
        if WHEN == "closing fails":
            raise BrokenError("nats", "gone")

async def connect_bus(*_, **__):
    if WHEN == "after an error":
        raise BrokenError("nats", "gone")
    return Bus()

async def pause(*_, **__):
    if WHEN == "the op runs":
        strike(WHEN)
        await asyncio.sleep(600)
    strike("the report is there")
    return Report(op_id="op", op="pause", status=OpStatus(STATUS), outcomes=(), phases_s={}, took_s=1.0)

def struck_after(when, function):
    def both(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        finally:
            strike(when)
    return both

rlbus.connecting.connect_bus = connect_bus
rlbus.client.FleetClient.pause = pause
Output.document = struck_after("it is told" if WHEN != "after an error" else WHEN, Output.document)
asyncio.run = struck_after("the loop is closed", asyncio.run)
rlbus.cli.app.main = struck_after("main ends", rlbus.cli.app.main)

def in_thread():
    threading.main_thread().join()
    strike("threads are joined")
    if WHEN == "a thread hangs":
        print("hangs", file=sys.stderr, flush=True)
        time.sleep(600)

threading.Thread(target=in_thread).start()
atexit.register(strike, "the last of atexit")
rlbus.at_the_end = AtTheEnd()
sys.argv[1:] = ARGV
runpy.run_module("rlbus", run_name="__main__")
"""


def start(when: str, status: str, *argv: str) -> "subprocess.Popen[str]":
    """`rlbus <argv>` that is struck there."""
    program = PROGRAM.replace("WHEN", repr(when)).replace("STATUS", repr(status)).replace("ARGV", repr(list(argv)))
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


PAUSE = ("pause", "--url", "nats://nowhere:1", "--json")


@pytest.mark.parametrize(
    "when",
    [
        "never",
        "the report is there",
        "it is told",
        "closing begins",
        "closing",
        "the loop is closed",
        "main ends",
        "threads are joined",
        "the last of atexit",
        "modules go",
    ],
)
@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("failed", 1)])
def test_ctrl_c_after_the_report_changes_nothing(when: str, status: str, code: int) -> None:
    """Neither the exit code nor a line: the document stays true."""
    child = start(when, status, *PAUSE)
    stdout, stderr = child.communicate(timeout=LIMIT_S)
    assert (child.returncode, json.loads(stdout)["status"]) == (code, status)
    assert stderr.count("\n") == code
    assert "interrupted" not in stderr


@pytest.mark.parametrize("when", ["closing hangs", "a thread hangs"])
def test_a_second_ctrl_c_ends_what_hangs_after_the_report_with_its_code(when: str) -> None:
    """The first one is ignored: whatever closes has a limit of its own."""
    child = start(when, "ok", *PAUSE)
    try:
        assert child.stderr is not None
        assert child.stderr.readline() == "hangs\n"
        child.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
        until_s = time.monotonic() + LIMIT_S
        while child.poll() is None and time.monotonic() < until_s:
            # Python sees two as one when the first comes just as it begins to wait.
            child.send_signal(signal.SIGINT)
            time.sleep(0.1)
        stdout, stderr = child.communicate(timeout=LIMIT_S)
    finally:
        child.kill()
    assert (child.returncode, json.loads(stdout)["status"], stderr) == (0, "ok", "")


def test_ctrl_c_while_the_op_runs_ends_with_130_and_says_so() -> None:
    """As ever: nothing was told yet."""
    child = start("the op runs", "ok", *PAUSE)
    stdout, stderr = child.communicate(timeout=LIMIT_S)
    assert (child.returncode, json.loads(stdout)["exit_code"], stderr) == (130, 130, "rlbus: interrupted\n")


def test_ctrl_c_after_the_document_of_an_error_changes_nothing() -> None:
    """It has the exit code in it."""
    child = start("after an error", "ok", *PAUSE)
    stdout, stderr = child.communicate(timeout=LIMIT_S)
    assert child.returncode == json.loads(stdout)["exit_code"] == ExitCode.NOTHING_THERE
    assert stderr.count("\n") == 1


def test_closing_that_fails_after_the_report_is_said_and_changes_no_exit_code() -> None:
    """What was asked for is done."""
    child = start("closing fails", "ok", *PAUSE)
    stdout, stderr = child.communicate(timeout=LIMIT_S)
    assert (child.returncode, json.loads(stdout)["status"]) == (0, "ok")
    assert stderr.count("\n") == 1


def test_what_was_settled_first_is_how_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """An error after it is told, and no second document is written."""
    out = Output(True)
    assert out.settle(ExitCode.REFUSED) is ExitCode.REFUSED
    assert out.settle(ExitCode.OK) is ExitCode.REFUSED

    async def work() -> ExitCode:
        raise BrokenError("nats", "gone")

    with pytest.raises(Exception) as caught:  # noqa: PT011 - typer's Exit, which is no public name of click's
        run_command(out, work)
    assert getattr(caught.value, "exit_code", None) == ExitCode.REFUSED
    assert capsys.readouterr().out == ""


def test_where_ctrl_c_is_ignored_nothing_is_put_in_its_place() -> None:
    """A shell does that to what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts = Interrupts()
        interrupts.begin()
        interrupts.count()
        assert interrupts.settle(3) == 3
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
