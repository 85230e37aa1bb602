"""The draft models of a real vLLM server and a real vllm-rs, each behind its sidecar: the whole way over the bus, and
what comes of a sidecar that is killed in the middle of an update.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlbus.errors import PartialError
from rlbus.schemas import TensorSpec
from rlbus.sync import Trainer
from rlbus.transfer.source import weight_source
from rlbus.workers.supervisor.processes import tree
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.torch_lm.model import load_model
from tests.peers import vllm_rs
from tests.peers.fleet import Fleet, completion
from tests.peers.programs import Programs, free_port

TRANSFER = ("--weight-transfer-config", '{"backend": "gloo"}')
# How long an update may take, and one that its worker has left.
UPDATE_S, LEFT_S = 600.0, 60.0
pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]


class Scene:
    """A server that speculates, a worker beside it, and other weights for its draft."""

    def __init__(self, programs: Programs, fleet: Fleet, model: Path, folder: Path, engine: str) -> None:
        self.fleet, self.model = fleet, model
        self.draft = make_tiny_model(folder / "draft", vocab_size=512, layers=1, seed=2)
        self.other = make_tiny_model(folder / "other", vocab_size=512, layers=1, seed=3)
        port, grpc_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        config = {"method": "draft_model", "model": str(self.draft), "num_speculative_tokens": 3}
        options = (*TRANSFER, "--speculative-config", json.dumps(config))
        if engine == "vllm-http":
            server = programs.start_vllm(model, port, *options)
            where = ("--url", self.url)
        else:
            server = programs.start_vllm_rs(model, port, grpc_port, *options)
            where = ("--target", f"127.0.0.1:{grpc_port}")
        server.until_answers(f"{self.url}/health")
        self.worker = fleet.start("worker", "worker", engine, *where, "--instance-id", "7", "--json")
        self.worker.document()

    def tokens(self) -> list[int]:
        """What it generates greedily."""
        return completion(self.url, str(self.model))

    def agent(self) -> int:
        """The process of the agent, below its supervisor."""
        return tree(self.worker.pid)[1].pid

    def update(self, step: int, weights: Any, *, draft: bool, limit_s: float = UPDATE_S) -> Any:
        """From a trainer, over Gloo."""
        with Trainer(self.fleet.url, backend="gloo") as trainer:
            return trainer.update_weights(
                weights, version=step, draft=draft, on_failure="stop", deadline_s=limit_s, bucket_bytes=1 << 14
            )


class Killing:
    """Weights whose last tensor is read only when a process has been killed."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._source = weight_source(load_model(folder))
        self._pid = pid

    def specs(self) -> tuple[TensorSpec, ...]:
        """All of them."""
        return self._source.specs()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        pairs = list(self._source)
        yield from pairs[:-1]
        os.kill(self._pid, signal.SIGKILL)
        yield pairs[-1]


@pytest.fixture(scope="module", params=["vllm-http", "vllm-grpc"])
def scene(
    programs: Programs, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Scene:
    """Up, with the worker on the bus."""
    if request.param == "vllm-grpc":
        vllm_rs.fetch()
    folder = tmp_path_factory.mktemp(request.param)
    return Scene(programs, Fleet(programs, folder), tiny_model, folder, request.param)


def view(member: dict[str, Any], kind: str) -> tuple[str, Any]:
    """State and version of its "weights" or "draft"."""
    found = member["status"][kind]
    return found["state"], found.get("version")


def is_admitted(member: dict[str, Any]) -> bool:
    """Whether it may be sent rollouts."""
    return bool(member["admitted"])


def test_draft_is_updated_through_a_sidecar_beside_its_target(scene: Scene) -> None:
    """Each has its own version; no token changes by the draft."""
    assert "prepare_draft_update" in scene.fleet.until("7", is_admitted)["descriptor"]["routes"]
    assert scene.update(4, load_model(scene.model), draft=False).ok
    expected = scene.tokens()
    assert scene.update(2, load_model(scene.other), draft=True).ok
    member = scene.fleet.until("7", is_admitted)
    assert (view(member, "weights"), view(member, "draft")) == (("clean", [0, 4]), ("clean", [0, 2]))
    assert scene.tokens() == expected


def test_sidecar_that_dies_alone_finds_the_version_of_the_draft(scene: Scene) -> None:
    """By its ranks' label, and the worker's notes."""
    boot_id = scene.fleet.until("7", is_admitted)["boot_id"]
    os.kill(scene.agent(), signal.SIGKILL)
    member = scene.fleet.until("7", lambda m: is_admitted(m) and m["boot_id"] != boot_id)
    assert (view(member, "weights"), view(member, "draft")) == (("clean", [0, 4]), ("clean", [0, 2]))


def test_sidecar_that_is_killed_in_mid_transfer_comes_back_with_a_torn_draft_that_an_update_heals(scene: Scene) -> None:
    """The target is whole and keeps its version; the server stands still until the draft is whole, too."""
    expected, boot_id = scene.tokens(), scene.fleet.until("7", is_admitted)["boot_id"]
    killing = Killing(scene.draft, scene.agent())
    # Whichever is seen first, of a worker that is gone.
    with pytest.raises(PartialError, match=r"the worker is gone|gave no sign of life"):
        scene.update(3, killing, draft=True, limit_s=LEFT_S)
    member = scene.fleet.until("7", lambda m: m["liveness"] == "alive" and m["boot_id"] != boot_id)
    assert (view(member, "weights"), view(member, "draft")[0]) == (("clean", [0, 4]), "dirty")
    assert not is_admitted(member)
    scene.fleet.until("7", lambda m: m["status"]["generation"] == "paused")
    assert scene.update(4, load_model(scene.draft), draft=True).ok
    member = scene.fleet.until("7", lambda m: is_admitted(m) and m["status"]["generation"] == "running")
    assert (view(member, "weights"), view(member, "draft")) == (("clean", [0, 4]), ("clean", [0, 4]))
    assert scene.tokens() == expected
