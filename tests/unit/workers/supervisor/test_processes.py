"""What is seen of real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from rlbus.workers.supervisor.processes import kill_left, left_of, look, tree

pytestmark = pytest.mark.unit

SLEEPS = "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPS!r}], start_new_session=True)"


def until(is_true: Callable[[], bool]) -> None:
    """Look until it is."""
    end_s = time.monotonic() + 60.0
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_tree_has_processes_of_other_sessions_and_ends_with_them() -> None:
    """A group alone would miss them."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT])
    try:
        until(lambda: len(tree(parent.pid)) == 2)
        seen = tree(parent.pid)
        assert seen[0].pid == parent.pid
        parent.kill()
        parent.wait()
        assert (tree(parent.pid), left_of(seen)) == ([], [seen[1].pid])
        assert kill_left(seen) == [seen[1].pid]
        until(lambda: left_of(seen) == [])
    finally:
        parent.kill()
        parent.wait()


def test_stopped_process_shows_as_stopped() -> None:
    """Until it goes on."""
    child = subprocess.Popen([sys.executable, "-c", SLEEPS])
    try:
        child.send_signal(signal.SIGSTOP)
        until(lambda: (p := look(child.pid)) is not None and p.is_stopped)
        child.send_signal(signal.SIGCONT)
        until(lambda: (p := look(child.pid)) is not None and not p.is_stopped)
    finally:
        child.kill()
        child.wait()


def test_ended_process_is_over_and_then_not_there() -> None:
    """First a zombie, then nothing."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    until(lambda: (p := look(child.pid)) is not None and p.is_over)
    assert tree(child.pid) == []
    child.wait()
    assert look(child.pid) is None


def test_another_process_with_the_same_id_is_left_alone() -> None:
    """Ids come back."""
    own = look(os.getpid())
    assert own is not None
    assert kill_left([replace(own, started=own.started - 1)]) == []
