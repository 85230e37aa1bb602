"""`rlbus demo` while somebody kills its processes by hand: it recovers, and goes on learning (issue 3, Done when)."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlbus.demo.events import NO_VERSION
from tests.chaos.processes import descendants, strike
from tests.tries import TRIES, TooLateError, best_of

# About 50 s on 2 quiet cores; a loaded machine takes longer for the same.
LIMIT_S = 360.0
pytestmark = [pytest.mark.faults, pytest.mark.timeout(TRIES * LIMIT_S + 30.0)]

# Enough that it still learns when the last blow is over: an engine's start takes as long as a dozen steps.
NUM_UPDATES = 50
NUM_WORKERS = 2
# The step under way when a blow falls may end as if nothing was, and its line be on its way; one after it has felt it.
FELT = 3
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
    """`rlbus demo`, whose lines a thread reads as they come. Use as a context manager: nothing of it is left."""

    def __init__(self) -> None:
        argv = [sys.executable, "-m", "rlbus", "demo", "--engine", "torch"]
        argv += ["--workers", str(NUM_WORKERS), "--updates", str(NUM_UPDATES)]
        env = {name: text for name, text in os.environ.items() if not name.startswith("RLBUS_")}
        self.popen = subprocess.Popen(
            argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", start_new_session=True
        )
        self.lines: list[str] = []
        self.steps: list[Step] = []
        self._has_ended = False
        self._came = threading.Condition()
        self._reading = threading.Thread(target=self._read, name="demo-lines")
        self._reading.start()

    def __enter__(self) -> "Demo":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.popen.kill()
        self.popen.wait()
        self._reading.join()
        assert self.popen.stdout is not None
        self.popen.stdout.close()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._came:
                self.lines.append(line.rstrip("\n"))
                if found := STEP.match(self.lines[-1]):
                    number, versions, verdict = found.groups()
                    texts = tuple(text.partition("=")[2] for text in versions.split())
                    self.steps.append(Step(int(number), texts, verdict))
                self._came.notify_all()
        with self._came:
            self._has_ended = True
            self._came.notify_all()

    def until(self, is_so: Callable[[Step], bool], after: int = 0) -> None:
        """Until a step after that number is so. It learns on meanwhile, and may come to its end: that is too late."""
        with self._came:
            self._came.wait_for(lambda: self._has_ended or any(map(is_so, self.steps[after:])), LIMIT_S)
            if not any(map(is_so, self.steps[after:])):
                has_learned = len(self.steps) == NUM_UPDATES
                problem = TooLateError if has_learned else AssertionError
                raise problem("\n".join(["it never came to that:", *self.lines[-20:]]))

    def end(self) -> int:
        """Wait for its end; its exit status."""
        with self._came:
            self._came.wait_for(lambda: self._has_ended, LIMIT_S)
        return self.popen.wait(LIMIT_S)

    def pid_of(self, words: str, below: int | None = None) -> int:
        """The first of its processes, below one of them, whose command line has these words."""
        for pid in descendants(self.popen.pid if below is None else below)[1:]:
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if words in line:
                    return pid
        raise AssertionError(f"no process of the demo is {words}")


def test_the_demo_goes_on_learning_whatever_of_it_is_killed() -> None:
    """An engine's server, then the controller, then the NATS server: each is there again, and nothing is torn or lost.

    After each blow every worker is admitted again, at the version of the step.
    """
    best_of(play)


def play() -> None:
    """One demo, from its start to its end."""
    with Demo() as demo:

        def until_recovered() -> None:
            demo.until(lambda step: step.is_whole, after=len(demo.steps) + FELT)

        demo.until(lambda step: step.is_whole)
        supervisor = demo.pid_of("worker torch")
        engine = demo.pid_of("--no-restart", below=supervisor)
        strike(engine, signal.SIGKILL)
        demo.until(lambda step: not step.is_whole)  # the other one goes on alone
        until_recovered()
        assert demo.pid_of("--no-restart", below=supervisor) != engine
        strike(demo.pid_of("rlbus controller"), signal.SIGKILL)
        until_recovered()
        strike(demo.pid_of("nats-server"), signal.SIGKILL)
        until_recovered()
        assert demo.end() == 0, "\n".join(demo.lines[-20:])

    told = "\n".join(demo.lines)
    assert "controller ended with status -9, and was started again" in told
    assert "nats-server ended with status -9; starting it again" in told
    assert [step.number for step in demo.steps] == list(range(1, NUM_UPDATES + 1))
    for step in demo.steps:
        assert step.versions
        assert set(step.versions) <= {f"0.{step.number}", NO_VERSION}
        assert step.verdict.startswith("equal")
    summary = json.loads(demo.lines[-1])
    assert summary["updates"] == NUM_UPDATES
    assert (summary["probe_mismatches"], summary["mixed_versions"]) == (0, 0)
    assert summary["reward_last"] > summary["reward_first"]
    if any(NO_VERSION in step.versions for step in demo.steps):
        raise TooLateError("a worker that was admitted didn't say its version in time")
