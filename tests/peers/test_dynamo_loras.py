"""Adapters on a real Dynamo worker: revision 1, then 2, through its front end, equal to their merged models."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlbus.server import EmbeddedServer
from rlbus.workers.torch_lm.make import make_tiny_adapter, merge_tiny_adapter
from rlbus.workers.torch_lm.model import load_model
from tests.peers import dynamo
from tests.peers.fleet import Fleet
from tests.peers.programs import Programs

LIMIT_S = 900.0
NUM_TOKENS = 12
PROMPT = (5, 6, 7, 8)
pytestmark = [pytest.mark.peers, pytest.mark.timeout(2 * LIMIT_S)]


@dataclass
class Scene:
    """One Dynamo worker that takes adapters, adopted; the controller waits for Dynamo's front end to show them."""

    dynamo: dynamo.Dynamo
    fleet: Fleet
    worker: str

    def tokens(self, model: str | None = None) -> list[int]:
        """What Dynamo's front end generates for that name."""
        return self.dynamo.tokens(NUM_TOKENS, PROMPT, model)

    def models(self) -> set[str]:
        """What Dynamo's front end shows besides the base model."""
        return self.dynamo.served()


def play(scenario: Any, folder: Path, programs: Programs) -> None:
    """Run it, with everything up."""
    dynamo.fetch()

    async def main() -> None:
        async with EmbeddedServer() as server:
            peer = dynamo.on_nats(folder, programs, server.url)
            await asyncio.to_thread(start, peer)

    def start(peer: dynamo.Dynamo) -> None:
        frontend = peer.start_frontend()
        worker, url = peer.start_worker(*dynamo.lora_options(4), env=dynamo.LORA_ENV)
        fleet = Fleet(programs, folder, "--frontend-url", peer.http_url)
        frontend.until_answers(f"{peer.rl_url}/v1/rl/workers")
        instance_id = str(peer.until_listed(worker, url))
        fleet.start("sidecar", "worker", "dynamo", "--discovery", peer.rl_url, "--max-loras", "3")
        member = fleet.until(instance_id, lambda found: found["admitted"])
        try:
            scenario(Scene(peer, fleet, member["worker"]))
        finally:
            programs.close()

    asyncio.run(main())


def greedy(model: Path) -> list[int]:
    """What plain torch generates."""
    import torch

    whole = load_model(model)
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            tokens.append(int(whole(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def test_dynamos_front_end_generates_with_revision_1_then_2_as_the_merged_models_do(
    tmp_path: Path, programs: Programs
) -> None:
    """One command each; the files come through the bus's store; the base model stays what it was."""

    def scenario(scene: Scene) -> None:
        model, rlbus = scene.dynamo.model, scene.fleet.rlbus
        base = greedy(model)
        assert scene.tokens() == base
        expected: list[list[int]] = []
        for revision in (1, 2):
            adapter = make_tiny_adapter(tmp_path / f"adapter-{revision}", model, seed=revision)
            report = rlbus("lora", "load", "policy", "--from", str(adapter))
            assert report["lora"]["ids"] == [f"policy@{revision}"]
            assert [one["outcome"] for one in report["outcomes"]] == ["ok"]
            expected.append(greedy(merge_tiny_adapter(tmp_path / f"merged-{revision}", model, adapter)))
            assert scene.tokens(f"policy@{revision}") == expected[-1]
        assert len({tuple(base), *map(tuple, expected)}) == 3
        assert scene.models() == {"policy@1", "policy@2"}
        assert scene.tokens("policy@1") == expected[0]
        assert scene.tokens() == base
        (listed,) = rlbus("lora", "list")["report"]["outcomes"]
        assert [(one["revision"], one["num_in_flight"]) for one in listed["data"]["loras"]] == [(1, None), (2, None)]
        rlbus("lora", "unload", "policy")
        assert rlbus("lora", "list")["loras"] == []
        # An unload doesn't wait for the front end.
        scene.dynamo.until_served()
        assert scene.tokens() == base

    play(scenario, tmp_path, programs)
