"""`rlbus demo` while somebody kills its processes by hand: it recovers, and goes on learning (issue 3, Done when)."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.processes import descendants, strike

# About 50 s on 2 quiet cores; a loaded machine takes longer for the same.
LIMIT_S = 240.0
pytestmark = [pytest.mark.faults, pytest.mark.timeout(LIMIT_S + 30.0)]

# Enough that it still learns when the last blow is over: an engine's start takes as long as a dozen steps.
NUM_UPDATES = 60
NUM_WORKERS = 2
# The step under way when a blow falls may end as if nothing was; the one after it has felt it.
FELT = 2
STEP = re.compile(r"^step +(\d+)  reward \S+  versions (.*?)  update .*  probe (.*)$")


@dataclass(frozen=True)
class Step:
    """A line of the demo: the step's number, the version of each admitted worker, and the verdict of the probes."""

    number: int
    versions: tuple[str, ...]
    verdict: str

    @property
    def is_whole(self) -> bool:
        """Whether every worker is admitted."""
        return len(self.versions) == NUM_WORKERS


class Demo:
    """`rlbus demo`, read line by line. It is killed when LIMIT_S is over, which ends whoever reads."""

    def __init__(self) -> None:
        argv = [sys.executable, "-m", "rlbus", "demo", "--engine", "torch"]
        argv += ["--workers", str(NUM_WORKERS), "--updates", str(NUM_UPDATES)]
        env = {name: text for name, text in os.environ.items() if not name.startswith("RLBUS_")}
        self.popen = subprocess.Popen(
            argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", start_new_session=True
        )
        self.lines: list[str] = []
        self.steps: list[Step] = []

    def read(self) -> bool:
        """Read a line; False at the end."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline().rstrip("\n")
        if found := STEP.match(line):
            number, versions, verdict = found.groups()
            texts = tuple(text.partition("=")[2] for text in versions.split())
            self.steps.append(Step(int(number), texts, verdict))
        if line:
            self.lines.append(line)
        return bool(line)

    def until(self, is_so: Callable[[Step], bool]) -> None:
        """Read on until a step that is so."""
        while self.read():
            if self.steps and self.steps[-1].number == len(self.steps) and is_so(self.steps[-1]):
                return
        raise AssertionError("\n".join(["the demo ended first:", *self.lines[-20:]]))

    def pid_of(self, words: str, below: int | None = None) -> int:
        """The first of its processes, below one of them, whose command line has these words."""
        for pid in descendants(self.popen.pid if below is None else below)[1:]:
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if words in line:
                    return pid
        raise AssertionError(f"no process of the demo is {words}")


@contextlib.contextmanager
def running_demo() -> Iterator[Demo]:
    """Nothing of it is left afterwards: its processes end with it."""
    demo = Demo()
    watchdog = threading.Timer(LIMIT_S, demo.popen.kill)
    watchdog.start()
    try:
        yield demo
    finally:
        watchdog.cancel()
        demo.popen.kill()
        demo.popen.communicate()


def test_the_demo_goes_on_learning_whatever_of_it_is_killed() -> None:
    """An engine's server, then the controller, then the NATS server: each is there again, and nothing is torn or lost.

    After each blow every worker is admitted again, at the version of the step.
    """
    with running_demo() as demo:
        demo.until(lambda step: step.is_whole)

        def until_recovered() -> None:
            struck_in = demo.steps[-1].number
            demo.until(lambda step: step.is_whole and step.number >= struck_in + FELT)

        supervisor = demo.pid_of("worker torch")
        engine = demo.pid_of("--no-restart", below=supervisor)
        strike(engine, signal.SIGKILL)
        until_recovered()
        assert demo.pid_of("--no-restart", below=supervisor) != engine
        assert any(not step.is_whole for step in demo.steps)  # the other one went on alone
        strike(demo.pid_of("rlbus controller"), signal.SIGKILL)
        until_recovered()
        strike(demo.pid_of("nats-server"), signal.SIGKILL)
        until_recovered()
        while demo.read():
            pass
        assert demo.popen.wait(LIMIT_S) == 0, "\n".join(demo.lines[-20:])

    told = "\n".join(demo.lines)
    assert "controller ended with status -9, and was started again" in told
    assert "nats-server ended with status -9; starting it again" in told
    assert [step.number for step in demo.steps] == list(range(1, NUM_UPDATES + 1))
    for step in demo.steps:
        assert set(step.versions) == {f"0.{step.number}"}
        assert step.verdict.startswith("equal")
    summary = json.loads(demo.lines[-1])
    assert summary["updates"] == NUM_UPDATES
    assert (summary["probe_mismatches"], summary["mixed_versions"]) == (0, 0)
    assert summary["reward_last"] > summary["reward_first"]
