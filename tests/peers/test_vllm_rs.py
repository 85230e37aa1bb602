"""`rlbus worker vllm-grpc` beside a real vllm-rs: the whole way over the bus, and what comes of a death."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlbus.demo.policy import TorchModel, greedy
from rlbus.sync import Trainer
from rlbus.workers.supervisor.processes import tree
from rlbus.workers.torch_lm.make import make_tiny_model
from tests.peers import vllm_rs
from tests.peers.fleet import Fleet, completion, is_gone
from tests.peers.programs import Program, Programs, free_port

TRANSFER = ("--weight-transfer-config", '{"backend": "gloo"}')
PROMPT = (7, 8, 9, 10)
NUM_TOKENS = 16
pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]


class Scene:
    """A server that runs by itself, a worker beside it, and two sets of weights for it."""

    def __init__(self, programs: Programs, fleet: Fleet, model: Path, folder: Path) -> None:
        self.programs, self.fleet, self.model = programs, fleet, model
        self.other = make_tiny_model(folder / "other", seed=5)
        self.http_port, self.grpc_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.server = self.start_server()
        self.worker = fleet.start(
            "worker",
            "worker",
            "vllm-grpc",
            *("--target", f"127.0.0.1:{self.grpc_port}", "--http-url", self.url),
            *("--instance-id", "7", "--weight-root", str(folder), "--weight-root", str(model.parent), "--json"),
        )
        self.worker.document()

    def start_server(self) -> Program:
        """On the same ports each time."""
        server = self.programs.start_vllm_rs(self.model, self.http_port, self.grpc_port, *TRANSFER)
        server.until_answers(f"{self.url}/health")
        return server

    def tokens(self) -> list[int]:
        """What it generates greedily."""
        return completion(self.url, str(self.model), num_tokens=NUM_TOKENS)

    def member(self) -> dict[str, Any]:
        """What the controller says of the worker."""
        found: dict[str, Any] = self.fleet.until("7", lambda m: True)
        return found

    def update(self, step: int, folder: Path) -> list[int]:
        """From a trainer, over Gloo; what the trainer's own model generates."""
        model = TorchModel(str(folder))
        with Trainer(self.fleet.url, backend="gloo") as trainer:
            report = trainer.update_weights(model.module, version=step, on_failure="stop")
        assert report.ok
        return list(greedy(model, PROMPT, NUM_TOKENS).tokens)


def below(pid: int, words: bytes) -> int | None:
    """The first process of a tree with these in its command line, if there is one."""
    for process in tree(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if words in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                return process.pid
    return None


@pytest.fixture(scope="module")
def scene(programs: Programs, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Up, with the worker on the bus."""
    vllm_rs.fetch()
    folder = tmp_path_factory.mktemp("scene")
    return Scene(programs, Fleet(programs, folder), tiny_model, folder)


def is_admitted(member: dict[str, Any]) -> bool:
    """Whether it may be sent rollouts."""
    return bool(member["admitted"])


def weights_of(member: dict[str, Any]) -> dict[str, Any]:
    """State and version."""
    found: dict[str, Any] = member["status"]["weights"]
    return found


def test_worker_says_what_the_server_is(scene: Scene) -> None:
    """Ranks as the server counts them, only the routes that it has, and where clients reach it."""
    descriptor = scene.member()["descriptor"]
    assert (descriptor["engine"], descriptor["world_size"]) == ("vllm_grpc", 1)
    assert (descriptor["completions_url"], descriptor["backends"]) == (scene.url, ["gloo"])
    assert {"pause_generation", "abort_request", "update_weights_from_distributed"} <= set(descriptor["routes"])
    assert not {"sleep", "wake_up", "load_lora"} & set(descriptor["routes"])


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause_and_resume_reach_the_server(scene: Scene, mode: str) -> None:
    """In every mode, as the engine itself says."""
    scene.fleet.rlbus("pause", "--mode", mode)
    scene.fleet.until("7", lambda m: m["status"]["generation"] == "paused")
    scene.fleet.rlbus("resume")
    scene.fleet.until("7", lambda m: m["status"]["generation"] == "running")


def test_update_from_a_trainer_gives_the_trainers_own_tokens(scene: Scene) -> None:
    """SCENARIOS 47: pause, update over Gloo, resume; token for token, twice."""
    first = scene.update(1, scene.other)
    assert scene.tokens() == first
    second = scene.update(2, scene.model)
    assert scene.tokens() == second
    assert first != second
    member = scene.fleet.until("7", is_admitted)
    assert (weights_of(member)["state"], weights_of(member)["version"]) == ("clean", [0, 2])


def test_update_from_disk_gives_the_same_as_from_a_trainer(scene: Scene) -> None:
    """Though the service has no call for it: the ranks' transfer backend reads the folder."""
    expected = scene.update(3, scene.other)
    scene.update(4, scene.model)
    scene.fleet.rlbus("update", "--from", str(scene.other), "--version", "5")
    assert scene.tokens() == expected
    assert weights_of(scene.fleet.until("7", is_admitted))["version"] == [0, 5]


def test_agent_that_dies_alone_finds_the_server_as_it_was(scene: Scene) -> None:
    """The server goes on; the next agent knows its weights by their label, and it stays admitted."""
    expected = scene.update(10, scene.other)
    boot_id = scene.member()["boot_id"]
    agent = tree(scene.worker.pid)[1].pid
    os.kill(agent, signal.SIGKILL)
    scene.worker.until(lambda: is_gone(agent) and len(tree(scene.worker.pid)) > 1)
    member = scene.fleet.until("7", lambda m: is_admitted(m) and m["boot_id"] != boot_id)
    assert (weights_of(member)["state"], weights_of(member)["version"]) == ("clean", [0, 10])
    assert scene.tokens() == expected


def test_dead_engine_behind_a_living_server_takes_the_worker_off(scene: Scene) -> None:
    """The server of a killed engine goes on, healthy; it is its answers that tell. A new one has unknown weights."""
    core = below(scene.server.pid, b"EngineCore")
    assert core is not None
    os.kill(core, signal.SIGKILL)
    scene.fleet.until("7", lambda m: m["liveness"] == "left")
    scene.server.stop()
    scene.server = scene.start_server()
    member = scene.fleet.until("7", lambda m: m["liveness"] == "alive")
    assert weights_of(member)["state"] == "unknown"
    assert not member["admitted"]
    expected = scene.update(20, scene.other)
    assert is_admitted(scene.fleet.until("7", is_admitted))
    assert scene.tokens() == expected


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Programs]:
    """Programs of one test."""
    started = Programs(tmp_path)
    yield started
    started.close()


def test_server_that_is_started_here_is_started_again_with_its_agent(
    own: Programs, scene: Scene, tmp_path: Path
) -> None:
    """At the same address, under the same id, with nothing of the old one left, and with unknown weights."""
    scene.worker.stop()
    scene.server.stop()
    model = str(scene.model)
    front, engine = ("--dtype", "float32", "--max-model-len", "512"), ("--enforce-eager", "--kv-cache-memory-bytes")
    command = [sys.executable, "-m", "rlbus", "worker", "vllm-grpc", "--instance-id", "8", "--small", "--json"]
    argv = [*command, "--", model, *front, "--", *engine, str(64 << 20)]
    worker = own.start("pair", argv, {**scene.fleet.env(), **vllm_rs.env(tmp_path)})
    worker.document()
    member = scene.fleet.until("8", lambda m: True)
    url = member["descriptor"]["completions_url"]
    expected = scene.update(30, scene.other)
    assert completion(url, model, num_tokens=NUM_TOKENS) == expected
    core = below(worker.pid, b"EngineCore")
    assert core is not None
    os.kill(core, signal.SIGKILL)
    worker.until(lambda: below(worker.pid, b"EngineCore") not in (None, core))
    scene.fleet.until("8", lambda m: m["liveness"] == "alive" and weights_of(m)["state"] == "unknown")
    assert scene.update(31, scene.other) == expected
    server = below(worker.pid, b"vllm-rs\0serve")
    assert server is not None
    old = [process.pid for process in tree(server)]
    os.kill(server, signal.SIGKILL)
    worker.until(lambda: all(is_gone(pid) for pid in old))
    member = scene.fleet.until("8", lambda m: m["liveness"] == "alive" and weights_of(m)["state"] == "unknown")
    assert member["descriptor"]["completions_url"] == url


def test_server_without_our_plugin_has_no_updates_and_all_else(own: Programs, scene: Scene) -> None:
    """Nothing is advertised that would fail; pause, resume and abort work."""
    http_port, grpc_port = free_port(), free_port()
    own.start_vllm_rs(scene.model, http_port, grpc_port, plugins="").until_answers(
        f"http://127.0.0.1:{http_port}/health"
    )
    plain = scene.fleet.start(
        "plain", "worker", "vllm-grpc", "--target", f"127.0.0.1:{grpc_port}", "--instance-id", "9", "--json"
    )
    plain.document()
    routes = set(scene.fleet.until("9", lambda m: True)["descriptor"]["routes"])
    assert not {"update_weights_from_distributed", "update_weights_from_disk", "get_weight_checksums"} & routes
    scene.fleet.rlbus("pause", "--worker", "backend/9")
    scene.fleet.rlbus("abort", "--worker", "backend/9")
    scene.fleet.rlbus("resume", "--worker", "backend/9")
    plain.stop()
