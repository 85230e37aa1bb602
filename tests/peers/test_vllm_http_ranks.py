"""A vLLM server of two ranks beside a worker of another size: each has its own place in the group."""

from pathlib import Path

import pytest

from rlbus.sync import Trainer
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.torch_lm.model import load_model
from tests.peers.fleet import Fleet, completion
from tests.peers.programs import Programs, free_port

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]


def test_update_reaches_every_rank_of_workers_of_unequal_size(
    programs: Programs, tiny_model: Path, tmp_path: Path
) -> None:
    """Tensor parallel 2 over HTTP, and one rank of torch: four members with the trainer. Group and disk give the same
    tokens.
    """
    fleet, port = Fleet(programs, tmp_path), free_port()
    other = make_tiny_model(tmp_path / "other", seed=5)
    url = f"http://127.0.0.1:{port}"
    options = ("--tensor-parallel-size", "2", "--weight-transfer-config", '{"backend": "gloo"}')
    # Two ranks need a core each to be bound to (facts/vllm-cpu.md 6).
    server = programs.start_vllm(tiny_model, port, *options, VLLM_CPU_OMP_THREADS_BIND="0|1")
    server.until_answers(f"{url}/health")
    roots = ("--weight-root", str(tmp_path), "--weight-root", str(tiny_model.parent), "--json")
    fleet.start("http", "worker", "vllm-http", "--url", url, "--instance-id", "7", *roots).document()
    fleet.start("torch", "worker", "torch", str(tiny_model), "--instance-id", "8", *roots).document()
    assert fleet.until("7", lambda m: bool(m["admitted"]))["descriptor"]["world_size"] == 2

    def tokens() -> list[int]:
        return completion(url, str(tiny_model))

    first = tokens()
    with Trainer(fleet.url, backend="gloo") as trainer:
        trainer.wait_ready(world_size=3)
        for step in (1, 2):
            assert trainer.update_weights(load_model(other), version=step, on_failure="stop").ok
    second = tokens()
    assert second != first
    fleet.rlbus("update", "--from", str(tiny_model), "--version", "3")
    assert tokens() == first
    fleet.rlbus("update", "--from", str(other), "--version", "4")
    assert tokens() == second
    for worker in ("7", "8"):
        assert fleet.until(worker, lambda m: bool(m["admitted"]))["status"]["weights"]["version"] == [0, 4]
