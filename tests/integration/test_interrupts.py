"""Ctrl-C in a command that waits: it ends with 130, says what became of its op, and nobody stays held by it."""

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rlbus.schemas import Version
from rlbus.workers.engines.fake import FakeEngine
from tests.integration import test_cli
from tests.integration.test_cli import BOUND_S, Process, rlbus

pytestmark = [pytest.mark.integration, pytest.mark.alone]

url, controller, fleet = test_cli.url, test_cli.controller, test_cli.fleet

# How long an interrupted command may take to ask for its op's end, and to end.
ENDS_S = 6.0


@pytest.fixture
def frozen(fleet: dict[str, Process]) -> Iterator[Process]:
    """A worker that is stopped, so that ops wait for it."""
    process = fleet["prefill/7"]
    process.popen.send_signal(signal.SIGSTOP)
    yield process
    process.popen.send_signal(signal.SIGCONT)


def wait_for_op(url: str, *, running: bool) -> None:
    """Until the controller runs an op, or none."""
    until_s = time.monotonic() + 45.0
    while (rlbus("status", "--json", url=url).document["op_id"] is not None) != running:
        assert time.monotonic() < until_s
        time.sleep(0.1)


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
    url: str, frozen: Process, tmp_path: Path, command: Sequence[str]
) -> None:
    """Said on stderr in one line; afterwards nobody is paused, and the next verb isn't refused as busy."""
    FakeEngine().save(tmp_path, Version(step=1))
    argv = [str(tmp_path) if word == "FOLDER" else word for word in command]
    waiting = Process(*argv, "--deadline", "60", url=url)
    wait_for_op(url, running=True)
    sent_s = time.monotonic()
    code, stderr = waiting.end(signal.SIGINT)
    assert time.monotonic() - sent_s < ENDS_S
    assert code == 130
    assert stderr.count("\n") == 1
    assert stderr.startswith("rlbus: interrupted; ")
    assert stderr.endswith(" is taken back\n")
    frozen.popen.send_signal(signal.SIGCONT)
    wait_for_op(url, running=False)
    done = rlbus("versions", url=url)
    assert done.code == 0
    until_s = time.monotonic() + BOUND_S
    while "!!" in rlbus("status", url=url).stdout:
        assert time.monotonic() < until_s
        time.sleep(0.1)
    last = rlbus("history", "--json", "--limit", "1", url=url).document["items"][0]
    assert last["op_id"] in stderr
    assert (last["op"], last["status"] == "ok") == ({"update": "reload"}.get(argv[0], argv[0]), False)
