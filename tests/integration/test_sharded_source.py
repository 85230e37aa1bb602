"""A module whose parameters are DTensors, as FSDP2 makes them, is announced and read whole on every rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers.programs import free_port

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parent / "sharded_source.py"


def test_sharded_parameters_are_announced_with_their_full_shape_and_gathered() -> None:
    """Unequal shards, a tied one once; both ranks read the same."""
    port = free_port()
    members = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(rank), str(port)], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        outs = [json.loads(process.communicate(timeout=200)[0].splitlines()[-1]) for process in members]
    finally:
        for process in members:
            process.kill()
            process.wait()
    assert outs[0] == outs[1]
    assert outs[0]["specs"] == [["weight", "float32", [5, 2]], ["plain", "float32", [1]]]
    assert outs[0]["values"] == {"weight": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], "plain": [1]}
