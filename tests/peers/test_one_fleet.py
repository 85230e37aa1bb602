"""One fleet of everything: a real Dynamo worker, `vllm serve`, `vllm-rs`, and vLLM with the agent in it, each put on
the bus as docs/engines.md says, all on the NATS server that `rlbus up` has started.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from rlbus import BusWeightSyncClient
from rlbus.schemas import LORA_ROUTES
from rlbus.sync import Trainer
from rlbus.workers.torch_lm.make import make_tiny_adapter, make_tiny_model, merge_tiny_adapter
from rlbus.workers.torch_lm.model import load_model
from tests.peers import dynamo, vllm_rs
from tests.peers.fleet import Fleet, completion
from tests.peers.programs import Program, Programs, free_port
from tests.peers.trainers import trainer

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]

GLOO = ("--weight-transfer-config", json.dumps({"backend": "gloo"}))
SMALL = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20))
# vLLM on a CPU keeps the last slot empty (docs/loras.md).
LORA = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "8")
PROMPT = (7, 8, 9, 10)
NUM_TOKENS = 12
# Four engines start at the same time, on two cores.
ALL_START_S = 900.0
# How long a held request is watched for not being answered.
HELD_S = 1.0
PLUGIN, HTTP, GRPC = "backend/1", "backend/2", "backend/3"


class Scene:
    """Four engines of one model on one bus, by the names of their workers."""

    def __init__(self, programs: Programs, folder: Path) -> None:
        self.programs, self.folder = programs, folder
        self.fleet = Fleet(programs, folder)
        self.dynamo = dynamo.on_nats(folder, programs, self.fleet.url)
        self.model = self.dynamo.model
        self.other = make_tiny_model(folder / "other", seed=5, max_positions=dynamo.MAX_TOKENS)
        self.roots = ("--weight-root", str(folder))
        self.urls: dict[str, str] = {}
        sidecars = [self._start_dynamo(), self._start_plugin(), self._start_http(), self._start_grpc()]
        for worker in (PLUGIN, HTTP, GRPC):
            self.urls[worker] = self._until_admitted(worker)["descriptor"]["completions_url"]
        self.dynamo_worker = f"backend/{self.dynamo.until_listed(*self._dynamo_worker)}"
        self._until_admitted(self.dynamo_worker)
        assert all(sidecar.is_running for sidecar in sidecars)

    def _until_admitted(self, worker: str) -> Any:
        return self.fleet.until(worker.rpartition("/")[2], lambda m: bool(m["admitted"]), ALL_START_S)

    def _worker(self, *argv: str, **env: str) -> Program:
        return self.fleet.start(argv[0], "worker", *argv, **env)

    def _start_dynamo(self) -> Program:
        self.dynamo.start_frontend()
        self._dynamo_worker = self.dynamo.start_worker(*GLOO, *dynamo.lora_options(2), env=dynamo.LORA_ENV)
        return self._worker("dynamo", "--discovery", self.dynamo.rl_url, "--max-loras", "1", *self.roots)

    def _start_plugin(self) -> Program:
        """`rlbus worker vllm`: the agent lives in the server."""
        options = ("--port", str(free_port()), *SMALL, *LORA)
        return self._worker("vllm", str(self.model), "--instance-id", "1", "--small", *self.roots, *options)

    def _start_http(self) -> Program:
        """A server of somebody else's, and a sidecar of ours."""
        port = free_port()
        self.programs.start_vllm(self.model, port, *GLOO, *LORA)
        return self._worker("vllm-http", "--url", f"http://127.0.0.1:{port}", "--instance-id", "2", *self.roots)

    def _start_grpc(self) -> Program:
        http_port, grpc_port = free_port(), free_port()
        self.programs.start_vllm_rs(self.model, http_port, grpc_port, *GLOO)
        where = ("--target", f"127.0.0.1:{grpc_port}", "--http-url", f"http://127.0.0.1:{http_port}")
        return self._worker("vllm-grpc", *where, "--instance-id", "3", *self.roots)

    @property
    def workers(self) -> set[str]:
        """All four."""
        return {PLUGIN, HTTP, GRPC, self.dynamo_worker}

    def generate(self) -> dict[str, Callable[[], list[int]]]:
        """By worker, what generates greedily with it."""
        found: dict[str, Callable[[], list[int]]] = {
            worker: lambda url=url: completion(url, str(self.model), num_tokens=NUM_TOKENS)  # type: ignore[misc]
            for worker, url in self.urls.items()
        }
        return {**found, self.dynamo_worker: lambda: self.dynamo.tokens(NUM_TOKENS, PROMPT)}

    def tokens(self) -> dict[str, list[int]]:
        """What each generates."""
        return {worker: generate() for worker, generate in self.generate().items()}

    def until_all(self, generation: str) -> None:
        """Wait until all say so; a sidecar whose engine didn't answer in time says "unknown", and asks again."""
        self.until(lambda worker, member: member["status"]["generation"] == generation)

    def until(self, is_true: Callable[[str, dict[str, Any]], bool]) -> dict[str, dict[str, Any]]:
        """Wait until what the controller says of each is so, one after the other; what it said of each then."""

        def wait_for(worker: str) -> Any:
            return self.fleet.until(worker.rpartition("/")[2], lambda member: is_true(worker, member))

        return {worker: wait_for(worker) for worker in sorted(self.workers)}


def greedy(folder: Path) -> list[int]:
    """What plain torch generates with the weights of a folder."""
    import torch

    model = load_model(folder)
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def scene(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Everybody admitted."""
    vllm_rs.fetch()
    dynamo.fetch()
    return Scene(programs, tmp_path_factory.mktemp("scene"))


def test_each_is_there_with_the_engine_that_it_is(scene: Scene) -> None:
    """And all generate what the one model generates."""
    found = {one["worker"]: one["descriptor"]["engine"] for one in scene.fleet.workers()}
    assert found == {PLUGIN: "vllm", HTTP: "vllm_http", GRPC: "vllm_grpc", scene.dynamo_worker: "dynamo"}
    assert set(map(tuple, scene.tokens().values())) == {tuple(greedy(scene.model))}


def test_what_an_engine_has_not_is_not_advertised(scene: Scene) -> None:
    """So that nobody finds out by a command that fails half way (docs/engines.md, the cells that say no)."""
    # What one takes is unknown while its engine doesn't list what it has.
    members = scene.until(lambda worker, member: (member["status"]["loras"] is None) == (worker == GRPC))
    no_sleep = {"sleep", "wake_up"}
    lacks = {**dict.fromkeys(scene.workers, no_sleep), GRPC: {*no_sleep, *LORA_ROUTES}}
    for worker, routes in lacks.items():
        assert not routes & set(members[worker]["descriptor"]["routes"]), worker
    loras = {worker: member["status"]["loras"] for worker, member in members.items()}
    assert loras.pop(GRPC) is None
    assert {worker: has["can_hot_swap"] for worker, has in loras.items()} == dict.fromkeys(loras, False)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_one_pause_holds_all_and_one_resume_lets_all_go(scene: Scene, mode: str) -> None:
    """A request that comes meanwhile is answered by nobody, and by everybody afterwards."""
    generate = scene.generate()
    before = scene.tokens()
    report = scene.fleet.rlbus("pause", "--mode", mode)
    assert {one["worker"]: one["outcome"] for one in report["outcomes"]} == dict.fromkeys(scene.workers, "ok")
    scene.until_all("paused")
    with ThreadPoolExecutor(len(generate)) as pool:
        late = {worker: pool.submit(ask) for worker, ask in generate.items()}
        assert not wait(late.values(), timeout=HELD_S).done
        scene.fleet.rlbus("resume")
        assert {worker: asked.result() for worker, asked in late.items()} == before
    scene.until_all("running")


def test_one_update_from_a_folder_reaches_all_and_the_versions_agree(scene: Scene) -> None:
    """What each then generates is what the folder's model does."""
    report = scene.fleet.rlbus("update", "--from", str(scene.other), "--version", "1")
    assert {one["worker"]: one["outcome"] for one in report["outcomes"]} == dict.fromkeys(scene.workers, "ok")
    agree(scene, [0, 1])
    assert scene.tokens() == dict.fromkeys(scene.workers, greedy(scene.other))


def test_one_group_of_a_trainer_and_all_engines_carries_an_update(scene: Scene) -> None:
    """Over Gloo, with the checksum of each tensor compared on each of them."""
    with Trainer(scene.fleet.url, backend="gloo") as trainer:
        report = trainer.update_weights(load_model(scene.model), version=2, on_failure="stop")
    assert set(report.outcomes) == scene.workers
    assert report.ok
    agree(scene, [0, 2])
    assert scene.tokens() == dict.fromkeys(scene.workers, greedy(scene.model))


def agree(scene: Scene, version: list[int]) -> None:
    """`rlbus status` and `rlbus versions` say the same of everybody, and of the fleet."""
    assert scene.fleet.rlbus("status")["version"] == version
    for member in scene.until(lambda worker, member: bool(member["admitted"])).values():
        weights = member["status"]["weights"]
        assert (weights["state"], weights["version"]) == ("clean", version)
    found = scene.fleet.rlbus("versions")["outcomes"]
    assert {one["worker"]: one["data"]["weights"]["version"] for one in found} == dict.fromkeys(scene.workers, version)


def test_an_adapter_goes_to_those_that_can_and_who_can_not_is_named(scene: Scene) -> None:
    """For all it is refused as a whole, with what to do; for who can it is one command, and each generates with it."""
    adapter = make_tiny_adapter(scene.folder / "adapter", scene.model, seed=1)
    load = ("lora", "load", "policy", "--from", str(adapter))
    refused = scene.fleet.rlbus(*load, expected=(3,))["error"]
    assert refused["code"] == "no_route"
    assert f"{GRPC} (vllm_grpc)" in refused["message"]
    assert refused["message"].endswith("; or load it only where that is possible (--where-possible) [no_route]")
    scene.until_all("running")

    report = scene.fleet.rlbus(*load, "--where-possible")
    assert report["lora"]["ids"] == ["policy@1"]
    takers = scene.workers - {GRPC}
    outcomes = {one["worker"]: one["outcome"] for one in report["outcomes"]}
    assert outcomes == {**dict.fromkeys(takers, "ok"), GRPC: "skipped"}
    merged = greedy(merge_tiny_adapter(scene.folder / "merged", scene.model, adapter))
    for worker in (PLUGIN, HTTP):
        assert completion(scene.urls[worker], "policy@1", num_tokens=NUM_TOKENS) == merged
    scene.dynamo.until_served("policy@1")
    assert scene.dynamo.tokens(NUM_TOKENS, PROMPT, "policy@1") == merged
    listed = scene.fleet.rlbus("lora", "list")
    assert [(one["name"], one["revision"]) for one in listed["loras"]] == [("policy", 1)]
    assert {one["worker"] for one in listed["report"]["outcomes"]} == takers
    # Whom it isn't meant for lacks nothing.
    scene.until(lambda worker, member: not member["loras_behind"])
    assert scene.tokens() == dict.fromkeys(scene.workers, greedy(scene.model))
    scene.fleet.rlbus("lora", "unload", "policy")
    assert scene.fleet.rlbus("lora", "list")["loras"] == []


def test_vllms_own_trainer_updates_all_engines_as_one_fleet(scene: Scene) -> None:
    """Its trainer engine, unchanged, with the bus client: one group, and each engine has the trainer's tokens."""
    with BusWeightSyncClient(scene.fleet.url) as client:
        assert client.world_size() == len(scene.workers)
        engine = trainer(scene.other, client, 1 + client.world_size())
        engine.send_weights()
        report = client.report
        engine.shutdown()
        client.shutdown_weight_transfer_engine()
    assert report is not None
    assert {one.worker: one.outcome.value for one in report.outcomes} == dict.fromkeys(scene.workers, "ok")
    version = scene.fleet.rlbus("status")["version"]
    assert version > [0, 2]
    agree(scene, version)
    assert scene.tokens() == dict.fromkeys(scene.workers, greedy(scene.other))
