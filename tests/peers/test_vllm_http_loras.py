"""`rlbus lora` on a real `vllm serve` from outside: revisions generate what merged models do, over HTTP."""

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus.workers.supervisor.processes import tree
from rlbus.workers.torch_lm.make import make_tiny_adapter, make_tiny_model
from rlbus.workers.vllm_server.lora_routes import LIST, LOAD
from tests.integration.test_vllm_loras import PROMPT, merged_tokens
from tests.peers.fleet import Fleet
from tests.peers.programs import Programs, free_port

KEY = "sesame-open"
AUTH = {"Authorization": f"Bearer {KEY}"}
TRANSFER = ("--weight-transfer-config", '{"backend": "gloo"}')
# On a CPU one slot more than adapters (docs/loras.md).
LORAS = ("--enable-lora", "--max-loras", "3", "--max-cpu-loras", "3", "--max-lora-rank", "8")
ROUTES = {"load_lora", "unload_lora", "list_loras"}
pytestmark = [pytest.mark.peers, pytest.mark.timeout(1800)]


class Scene:
    """A server that needs a key and takes two adapters, and a worker beside it."""

    def __init__(self, programs: Programs, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.fleet = Fleet(programs, folder)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        programs.start_vllm(model, port, *TRANSFER, *LORAS, "--api-key", KEY).until_answers(f"{self.url}/health")
        self.worker = self.fleet.start(
            "worker",
            "worker",
            "vllm-http",
            *("--url", self.url, "--api-key-env", "MY_KEY", "--instance-id", "7", "--json"),
            *("--weight-root", str(folder), "--weight-root", str(model.parent)),
            MY_KEY=KEY,
        )
        self.worker.document()

    def tokens(self, model: str) -> tuple[int, list[int]]:
        """Status, and what is generated greedily for that name."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, headers=AUTH, timeout=120.0, trust_env=False)
        return answer.status_code, answer.json()["choices"][0]["token_ids"] if answer.is_success else []

    def models(self) -> list[str]:
        """What the server lists."""
        answer = httpx.get(f"{self.url}/v1/models", headers=AUTH, timeout=60.0, trust_env=False)
        return [entry["id"] for entry in answer.raise_for_status().json()["data"]]

    def load(self, adapter: Path, *options: str, **more: Any) -> Any:
        """`rlbus lora load policy`, by the bus's own store."""
        return self.fleet.rlbus("lora", "load", "policy", "--from", str(adapter), *options, **more)


@pytest.fixture(scope="module")
def scene(programs: Programs, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Up, with the worker on the bus."""
    return Scene(programs, tiny_model, tmp_path_factory.mktemp("scene"))


def test_revisions_generate_what_their_merged_models_do(scene: Scene, tmp_path: Path) -> None:
    """SCENARIOS 31, 32, 35: one after the other and beside each other, over an update of the base weights, after the
    agent's death, and until they are unloaded.
    """
    member = scene.fleet.until("7", lambda m: bool(m["admitted"]))
    assert set(member["descriptor"]["routes"]) >= ROUTES
    base = str(scene.model)
    adapters = [make_tiny_adapter(tmp_path / str(n), scene.model, seed=n) for n in (1, 2, 3)]
    expected = [merged_tokens(scene.model, a, tmp_path / f"merged-{a.name}") for a in adapters[:2]]
    plain = merged_tokens(scene.model, None, tmp_path)
    assert len({tuple(tokens) for tokens in (*expected, plain)}) == 3
    assert scene.tokens(base) == (200, plain)
    assert scene.tokens("policy")[0] == 404
    for revision, tokens in enumerate(expected, start=1):
        scene.load(adapters[revision - 1])
        assert scene.tokens("policy") == scene.tokens(f"policy@{revision}") == (200, tokens)
    assert scene.tokens("policy@1") == (200, expected[0])
    assert scene.tokens(base) == (200, plain)
    assert scene.models() == [base, "policy@1", "policy@2"]
    scene.load(adapters[2], expected=(3,))
    # The agent dies, and its copies of the files don't.
    os.kill(tree(scene.worker.pid)[1].pid, signal.SIGKILL)
    scene.fleet.until("7", lambda m: bool(m["admitted"]) and m["boot_id"] != member["boot_id"])
    other = make_tiny_model(scene.folder / "other", vocab_size=512, seed=5)
    scene.fleet.rlbus("update", "--from", str(other), "--version", "1")
    moved = [merged_tokens(other, a, tmp_path / f"moved-{a.name}") for a in adapters[:2]]
    assert scene.tokens("policy@1") == (200, moved[0])
    assert scene.tokens("policy@2") == (200, moved[1])
    scene.fleet.rlbus("lora", "unload", "policy@2")
    assert scene.tokens("policy@2")[0] == 404
    assert scene.tokens("policy") == (200, moved[0])
    scene.fleet.rlbus("lora", "unload", "policy")
    assert scene.models() == [base]
    assert scene.tokens("policy")[0] == 404


def test_routes_of_the_plugin_want_the_key_and_bodies_that_make_sense(scene: Scene) -> None:
    """SCENARIOS 43, on the real server's application; nothing changes."""
    with httpx.Client(base_url=scene.url, timeout=60.0, trust_env=False) as client:
        assert client.get(LIST).status_code == 401
        assert client.post(LOAD, json={}).status_code == 401
        answer = client.post(LOAD, json={"name": "policy"}, headers=AUTH)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")
        body = {"boot_id": "of another start", "name": "policy", "revision": 9, "folder": "/nowhere"}
        answer = client.post(LOAD, json=body, headers=AUTH)
        assert (answer.status_code, answer.json()["rlbus"]["code"]) == (409, "stale_epoch")
        assert client.get(LIST, headers=AUTH).json() == {"loras": []}
