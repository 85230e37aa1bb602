"""A vLLM worker of two data-parallel ranks beside one of another size: every rank is a member, and none steps alone."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlbus.sync import Trainer
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.torch_lm.model import load_model
from tests.peers.fleet import Fleet, completion
from tests.peers.programs import Programs

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

NUM_RANKS = 2
NUM_REQUESTS = 50
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--kv-cache-memory-bytes", str(32 << 20))


def test_every_data_parallel_rank_is_updated_and_what_arrives_meanwhile_waits(
    programs: Programs, tiny_model: Path, tmp_path: Path
) -> None:
    """SCENARIOS 27: 50 requests reach a paused fleet. No rank steps, the updates go through, and after the resume all
    50 have the tokens of the new weights. Over a group of four members and from a folder.
    """
    fleet = Fleet(programs, tmp_path)
    other = make_tiny_model(tmp_path / "other", seed=5)
    roots = ("--weight-root", str(tmp_path), "--weight-root", str(tiny_model.parent), "--json")
    # Each rank of vLLM needs a process of its own.
    multi = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    ranks = ("--data-parallel-size", str(NUM_RANKS))
    command = ("worker", "vllm", str(tiny_model), "--small", "--instance-id", "7", *roots, *OPTIONS, *ranks)
    fleet.start("vllm", *command, **multi).document()
    fleet.start("torch", "worker", "torch", str(tiny_model), "--instance-id", "8", *roots).document()
    member = fleet.until("7", lambda m: bool(m["admitted"]))
    assert member["descriptor"]["world_size"] == NUM_RANKS
    url = member["descriptor"]["completions_url"]

    def tokens() -> list[int]:
        """Of every rank."""
        found = [completion(url, str(tiny_model), headers={"X-data-parallel-rank": str(n)}) for n in range(NUM_RANKS)]
        assert found == [found[0]] * NUM_RANKS
        return found[0]

    first = tokens()
    fleet.rlbus("pause", "--mode", "keep")
    with ThreadPoolExecutor(NUM_REQUESTS) as pool, Trainer(fleet.url, backend="gloo") as trainer:
        waiting = [pool.submit(completion, url, str(tiny_model)) for _ in range(NUM_REQUESTS)]
        trainer.wait_ready(world_size=NUM_RANKS + 1)
        for step in (1, 2):
            assert trainer.update_weights(load_model(other), version=step).ok
        assert not any(request.done() for request in waiting)
        fleet.rlbus("resume")
        answers = [request.result() for request in waiting]
    second = tokens()
    assert second != first
    assert answers == [second] * NUM_REQUESTS
    fleet.rlbus("update", "--from", str(tiny_model), "--version", "3")
    assert tokens() == first
    states = {m["worker"]: m["status"]["weights"]["version"] for m in fleet.rlbus("workers")["workers"]}
    assert states == {"backend/7": [0, 3], "backend/8": [0, 3]}
