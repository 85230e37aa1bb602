"""`rlbus worker vllm-http -- MODEL`: a real server and its agent, each started again when it ends."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus.sync import Trainer
from rlbus.workers.supervisor.processes import tree
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.torch_lm.model import load_model
from tests.peers.fleet import Fleet, completion, is_gone
from tests.peers.programs import POLL_S, START_S, Programs

KEY = "pair-key"
# Until what was killed is seen to be gone.
GONE_S = 60.0
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "67108864")
pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]


def below(supervisor: int, word: str) -> int:
    """The first process below the supervisor with this in its command line."""
    found = (process.pid for process in tree(supervisor)[1:])
    return next(pid for pid in found if word in Path(f"/proc/{pid}/cmdline").read_text())


def test_server_and_agent_are_each_started_again_and_end_together(
    programs: Programs, tiny_model: Path, tmp_path: Path
) -> None:
    """One worker on the bus, with the server's key; a dead agent changes nothing, a dead server makes it unknown."""
    fleet = Fleet(programs, tmp_path)
    other = make_tiny_model(tmp_path / "other", seed=5)
    worker = fleet.start(
        "pair",
        *("worker", "vllm-http", "--instance-id", "7", "--small", "--json"),
        *("--", str(tiny_model), *OPTIONS, "--api-key", KEY),
    )
    worker.document()
    member = fleet.until("7", lambda m: bool(m["admitted"]))
    url: str = member["descriptor"]["completions_url"]
    assert member["descriptor"]["backends"] == ["gloo"]
    assert [m["worker"] for m in fleet.workers()] == ["backend/7"]
    assert httpx.get(f"{url}/v1/models", trust_env=False, timeout=START_S).status_code == 401

    def tokens() -> list[int]:
        return completion(url, str(tiny_model), headers={"Authorization": f"Bearer {KEY}"})

    def update(step: int) -> None:
        with Trainer(fleet.url, backend="gloo") as trainer:
            assert trainer.update_weights(load_model(other), version=step, on_failure="stop").ok

    def state(m: dict[str, Any]) -> str:
        return str(m["status"]["weights"]["state"])

    first = tokens()
    update(1)
    second, boot_id = tokens(), member["boot_id"]
    assert second != first
    server, agent = below(worker.pid, "api_server"), below(worker.pid, "--no-restart")
    os.kill(agent, signal.SIGKILL)
    fleet.until("7", lambda m: bool(m["admitted"]) and m["boot_id"] != boot_id)
    assert below(worker.pid, "api_server") == server
    assert tokens() == second
    os.kill(server, signal.SIGKILL)
    worker.until(lambda: is_gone(server))
    again = fleet.until("7", lambda m: m["liveness"] == "alive" and state(m) == "unknown")
    assert again["descriptor"]["completions_url"] == url
    assert not again["admitted"]
    assert tokens() == first
    update(2)
    assert tokens() == second
    left = [process.pid for process in tree(worker.pid)[1:]]
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    ends_s = time.monotonic() + GONE_S
    while not all(is_gone(pid) for pid in left):
        assert time.monotonic() < ends_s
        time.sleep(POLL_S)
