"""`rlbus worker vllm-http` beside real vLLM servers: the whole way over the bus, and what comes of a death."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus.sync import Trainer
from rlbus.workers.supervisor.processes import tree
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.torch_lm.model import load_model
from tests.peers.fleet import Fleet, completion
from tests.peers.programs import START_S, Program, Programs, free_port
from tests.peers.trainers import expected_tokens, trainer
from tests.tries import TooLateError, best_of

KEY = "sesame-open"
AUTH = {"Authorization": f"Bearer {KEY}"}
TRANSFER = ("--weight-transfer-config", '{"backend": "gloo"}')
# More than its memory holds at once, each nearly as long as it can be.
NUM_REQUESTS, NUM_TOKENS = 160, 480
pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]


class Scene:
    """A server that needs a key, a worker beside it, and two sets of weights for it."""

    def __init__(self, programs: Programs, fleet: Fleet, model: Path, folder: Path) -> None:
        self.programs, self.fleet, self.model, self.folder = programs, fleet, model, folder
        self.other = make_tiny_model(folder / "other", seed=5)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = self.start_server()
        self.worker = fleet.start(
            "worker",
            "worker",
            "vllm-http",
            *("--url", self.url, "--api-key-env", "MY_KEY", "--header", "X-Tenant=blue"),
            *("--instance-id", "7", "--weight-root", str(folder), "--weight-root", str(model.parent), "--json"),
            MY_KEY=KEY,
        )
        self.worker.document()

    def start_server(self) -> Program:
        """On the same port each time."""
        server = self.programs.start_vllm(self.model, self.port, *TRANSFER, "--api-key", KEY)
        server.until_answers(f"{self.url}/health")
        return server

    def tokens(self) -> list[int]:
        """What it generates greedily."""
        return completion(self.url, str(self.model), headers=AUTH)

    def is_paused(self) -> bool:
        """As the server itself says."""
        return bool(httpx.get(f"{self.url}/is_paused", trust_env=False, timeout=START_S).json()["is_paused"])

    def num_requests(self) -> int:
        """How many the server has, by rlbus's plugin in it."""
        answer = httpx.get(f"{self.url}/rlbus", headers=AUTH, trust_env=False, timeout=START_S)
        return len(answer.json()["requests"])

    def label(self) -> str:
        """The server's own label of its weights."""
        return str(httpx.get(f"{self.url}/weight_info", trust_env=False, timeout=START_S).json()["weight_version"])

    def agent(self) -> int:
        """The process of the agent, below its supervisor."""
        return tree(self.worker.pid)[1].pid

    def update(self, step: int, folder: Path) -> Any:
        """From a trainer, over Gloo."""
        with Trainer(self.fleet.url, backend="gloo") as trainer:
            return trainer.update_weights(load_model(folder), version=step, on_failure="stop")


@pytest.fixture(scope="module")
def scene(programs: Programs, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Up, with the worker on the bus."""
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
    """Ranks as the server counts them, only the routes that it has, and where clients reach it; no secret in it."""
    member = scene.fleet.until("7", lambda m: True)
    descriptor = member["descriptor"]
    assert (descriptor["engine"], descriptor["world_size"]) == ("vllm_http", 1)
    assert (descriptor["completions_url"], descriptor["backends"]) == (scene.url, ["gloo"])
    assert {"pause_generation", "abort_request", "update_weights_from_distributed"} <= set(descriptor["routes"])
    assert KEY not in str(member)
    assert httpx.get(f"{scene.url}/v1/models", trust_env=False, timeout=START_S).status_code == 401
    assert KEY not in scene.worker.log.read_text()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause_and_resume_reach_the_server(scene: Scene, mode: str) -> None:
    """SCENARIOS 49: in every mode, as the server itself says."""
    scene.fleet.rlbus("pause", "--mode", mode)
    assert scene.is_paused()
    scene.fleet.rlbus("resume")
    assert not scene.is_paused()


def test_a_pause_is_acked_beside_requests_that_fill_the_server(scene: Scene) -> None:
    """SCENARIOS 51: it waits behind none of them, and neither does what the worker says of itself; then all go on."""

    def ask() -> list[int]:
        return completion(scene.url, str(scene.model), num_tokens=NUM_TOKENS, headers=AUTH)

    def play() -> None:
        scene.fleet.rlbus("pause", "--mode", "keep")
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            running = [pool.submit(ask) for _ in range(NUM_REQUESTS)]
            scene.server.until(lambda: scene.num_requests() == NUM_REQUESTS)
            scene.fleet.rlbus("resume")
            scene.fleet.rlbus("pause", "--mode", "keep")
            num_done = sum(request.done() for request in running)
            scene.fleet.until("7", lambda m: m["status"]["generation"] == "paused")
            scene.fleet.rlbus("resume")
            assert [len(request.result()) for request in running] == [NUM_TOKENS] * NUM_REQUESTS
        if num_done:
            raise TooLateError(f"{num_done} of {NUM_REQUESTS} requests had ended before the pause was acked")

    best_of(play)


def test_update_from_a_trainer_and_from_disk_give_the_same_tokens(scene: Scene) -> None:
    """SCENARIOS 47: over Gloo, then back and forth from folders; the server's own label follows."""
    first = scene.tokens()
    assert scene.update(1, scene.other).ok
    second = scene.tokens()
    assert second != first
    assert scene.label() == "0.1"
    scene.fleet.rlbus("update", "--from", str(scene.model), "--version", "2")
    assert (scene.tokens(), scene.label()) == (first, "0.2")
    scene.fleet.rlbus("update", "--from", str(scene.other), "--version", "3")
    assert scene.tokens() == second
    member = scene.fleet.until("7", is_admitted)
    assert weights_of(member)["version"] == [0, 3]
    assert not scene.is_paused()


def test_vllms_http_client_updates_the_server_through_its_worker(scene: Scene) -> None:
    """By the worker's `system_url`, under the agent's rules: refused unless paused, then the trainer's own tokens."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    trained = make_tiny_model(scene.folder / "trained", seed=13)
    expected = expected_tokens(trained)
    assert scene.tokens() != expected
    url = scene.fleet.until("7", is_admitted)["descriptor"]["system_url"]
    sync = HTTPVLLMWeightSyncClient(url)
    engine = trainer(trained, sync, 2)
    with pytest.raises(Exception, match="409"):
        engine.send_weights()
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as admin:
        assert admin.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
        engine.send_weights()
        assert scene.is_paused()
        assert admin.post("/resume").json() == {"status": "resumed"}
    engine.shutdown()
    sync.shutdown_weight_transfer_engine()
    assert scene.tokens() == expected
    assert weights_of(scene.fleet.until("7", is_admitted))["state"] == "clean"


def test_agent_that_dies_alone_finds_the_server_as_it_was(scene: Scene) -> None:
    """The server goes on; the next agent knows its weights by their label, and closes the update that was left open."""
    scene.update(10, scene.other)
    expected, agent = scene.tokens(), scene.agent()
    boot_id = scene.fleet.until("7", is_admitted)["boot_id"]
    httpx.post(f"{scene.url}/start_weight_update", trust_env=False, timeout=START_S).raise_for_status()
    os.kill(agent, signal.SIGKILL)
    member = scene.fleet.until("7", lambda m: is_admitted(m) and m["boot_id"] != boot_id)
    assert weights_of(member)["state"] == "clean"
    assert weights_of(member)["version"] == [0, 10]
    assert scene.server.is_running
    assert scene.tokens() == expected
    scene.update(11, scene.model)
    assert scene.tokens() != expected


def test_engine_that_its_dead_agent_left_paused_resumes(scene: Scene) -> None:
    """Nobody stays paused because somebody else died."""
    scene.fleet.rlbus("pause", "--mode", "keep", "--lease", "600")
    assert scene.is_paused()
    os.kill(scene.agent(), signal.SIGKILL)
    ends_s = time.monotonic() + START_S
    while scene.is_paused():
        assert time.monotonic() < ends_s
        time.sleep(0.2)
    scene.fleet.until("7", is_admitted)


def test_server_that_dies_takes_its_worker_off_and_a_new_one_is_not_admitted(scene: Scene) -> None:
    """SCENARIOS 59: its weights are unknown until an update, which it joins; under the same id."""
    scene.update(20, scene.other)
    expected = scene.tokens()
    scene.server.kill()
    left = scene.fleet.until("7", lambda m: m["liveness"] == "left")
    # Its API server may be heard once more, saying that its engine died, before nobody listens there.
    assert any(f"the engine is lost: {words}" in left["reason"] for words in ("vLLM is gone", "the engine died"))
    scene.server = scene.start_server()
    member = scene.fleet.until("7", lambda m: m["liveness"] == "alive")
    assert weights_of(member)["state"] == "unknown"
    assert not member["admitted"]
    scene.update(21, scene.other)
    assert is_admitted(scene.fleet.until("7", is_admitted))
    assert scene.tokens() == expected


def test_wrong_key_is_told_at_once(scene: Scene) -> None:
    """SCENARIOS 43: not a worker that looks ready and fails later; the key isn't shown, and nothing is tried again."""
    worker = scene.fleet.start(
        "wrong", "worker", "vllm-http", "--url", scene.url, "--api-key-env", "MY_KEY", MY_KEY="another-key"
    )
    assert worker.wait() == 2
    said = worker.log.read_text()
    assert "refuses our credentials (401)" in said
    assert "--api-key-env" in said
    assert "another-key" not in said


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Programs]:
    """Programs of one test."""
    started = Programs(tmp_path)
    yield started
    started.close()


def test_server_that_lacks_something_is_told_apart(own: Programs, scene: Scene, tmp_path: Path) -> None:
    """Without dev mode: which variable is missing. Without our plugin: no update over a group, and all else."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = own.start_vllm(scene.model, port, dev_mode=False, plugins="")
    server.until_answers(f"{url}/health")
    worker = scene.fleet.start("no-dev-mode", "worker", "vllm-http", "--url", url)
    assert worker.wait() == 2
    assert "start it with VLLM_SERVER_DEV_MODE=1" in worker.log.read_text()
    server.stop()
    own.start_vllm(scene.model, port, plugins="").until_answers(f"{url}/health")
    plain = scene.fleet.start("plain", "worker", "vllm-http", "--url", url, "--instance-id", "8", "--json")
    plain.document()
    routes = scene.fleet.until("8", lambda m: True)["descriptor"]["routes"]
    assert "update_weights_from_distributed" not in routes
    assert {"pause_generation", "update_weights_from_disk", "abort_request"} <= set(routes)
    scene.fleet.rlbus("pause", "--worker", "backend/8")
    scene.fleet.rlbus("abort", "--worker", "backend/8")
    scene.fleet.rlbus("resume", "--worker", "backend/8")
    plain.stop()


def test_server_that_is_on_the_bus_by_itself_gets_no_second_worker(own: Programs, scene: Scene) -> None:
    """With RLBUS_URL in its environment its plugin is the worker."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = own.start_vllm(scene.model, port, *TRANSFER, RLBUS_URL=scene.fleet.url, RLBUS_INSTANCE_ID="9")
    server.until_answers(f"{url}/health")
    worker = scene.fleet.start("second", "worker", "vllm-http", "--url", url)
    assert worker.wait() == 2
    assert "on the bus by itself, as backend/9" in worker.log.read_text()
