"""Ctrl-C in a command that waits: it ends with 130, says what became of its op, and nobody stays held by it."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlbus.schemas import Version
from rlbus.workers.engines.fake import FakeEngine
from tests.integration import test_cli
from tests.integration.commands import Process, again_until, asked, program, rlbus, running_op, until_all_run
from tests.tries import TooLateError, best_of, in_time

pytestmark = [pytest.mark.integration, pytest.mark.alone]

url, controller, fleet = test_cli.url, test_cli.controller, test_cli.fleet

# How long an interrupted command may take to ask for its op's end, and to end.
ENDS_S = 6.0
# How a command ends whose op was over before it was interrupted: a report that isn't ok, a refusal, no answer in time.
ENDED = (1, 3, 5)


def until_idle(url: str) -> None:
    """Until the controller runs no op."""
    again_until(lambda: asked(url, "status")["op_id"] is None)


@pytest.mark.parametrize(
    "command",
    [
        ["pause", "--mode", "wait"],
        ["pause", "--mode", "keep", "--json"],
        ["pause", "--lease", "60"],
        ["update", "--from", "FOLDER"],
        ["flush"],
    ],
)
def test_ctrl_c_in_a_verb_ends_with_130_and_its_op_is_taken_back(
    url: str, fleet: dict[str, Process], tmp_path: Path, command: Sequence[str]
) -> None:
    """Said on stderr in one line; afterwards nobody is paused, and the next verb isn't refused as busy."""
    FakeEngine().save(tmp_path, Version(step=1))
    argv = [str(tmp_path) if word == "FOLDER" else word for word in command]
    worker = fleet["prefill/7"]

    def play() -> None:
        """The command waits for a worker that stands still, is interrupted, and the worker goes on."""
        until_all_run(url, 3)
        worker.popen.send_signal(signal.SIGSTOP)
        try:
            waiting = program(*argv, "--deadline", "60", url=url)
            try:
                running_op(url, waiting)
                sent_s = time.monotonic()
                code, stderr = waiting.end(signal.SIGINT)
                took_s = time.monotonic() - sent_s
            finally:
                waiting.kill()
        finally:
            worker.popen.send_signal(signal.SIGCONT)
        until_idle(url)
        if code in ENDED and "Traceback" not in stderr:
            raise TooLateError(f"the op was given up before it was interrupted: {code}, {stderr}")
        assert code == 130, stderr
        in_time("the end", took_s, ENDS_S)
        assert stderr.startswith("rlbus: interrupted; ")
        assert stderr.count("\n") == 1
        if not stderr.endswith(" is taken back\n"):
            raise TooLateError(f"the controller had no time to take it back: {stderr}")
        last = asked(url, "history", "--limit", "1")["items"][0]
        assert last["op_id"] in stderr
        assert last["op"] == {"update": "reload"}.get(argv[0], argv[0])
        if last["status"] == "ok":
            raise TooLateError("the worker went on, and answered, before it was taken back")

    best_of(play)
    done = rlbus("versions", "--deadline", "60", url=url)
    assert done.code == 0
    again_until(lambda: (shown := rlbus("status", url=url)).code == 0 and "!!" not in shown.stdout)
