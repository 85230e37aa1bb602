"""vLLM's own trainer side drives real workers: its HTTP client one vLLM server, and the bus client a mixed fleet."""

import time
from pathlib import Path

import httpx
import pytest

from rlbus import BusWeightSyncClient
from rlbus.workers.torch_lm.make import make_tiny_model
from tests.peers.fleet import Fleet, completion
from tests.peers.programs import POLL_S, START_S, Programs
from tests.peers.trainers import expected_tokens, trainer

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--kv-cache-memory-bytes", str(32 << 20))
TORCH_RANKS = 2


@pytest.fixture(scope="module")
def fleet(programs: Programs, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A vLLM server with the plugin (7), and a torch engine of two ranks (8), which start with the same weights."""
    fleet = Fleet(programs, tmp_path_factory.mktemp("fleet"))
    fleet.start("vllm", "worker", "vllm", str(tiny_model), "--small", "--instance-id", "7", *OPTIONS)
    fleet.start("torch", "worker", "torch", str(tiny_model), "--ranks", str(TORCH_RANKS), "--instance-id", "8")
    for worker in ("7", "8"):
        fleet.until(worker, lambda member: member["liveness"] == "alive")
    return fleet


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of the same architecture with other weights."""
    folder = tmp_path_factory.mktemp("trained")
    return [make_tiny_model(folder / str(seed), seed=seed, vocab_size=512) for seed in (11, 12)]


def url_of(fleet: Fleet, worker: str, which: str) -> str:
    """Where a worker is reached."""
    return str(fleet.until(worker, lambda m: True)["descriptor"][which])


def test_vllms_http_client_updates_a_vllm_server_under_the_agents_rules(
    fleet: Fleet, tiny_model: Path, trained: list[Path]
) -> None:
    """Refused unless paused; a pause with owner and lease; busy meanwhile; then the trainer's tokens, one by one."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    url = url_of(fleet, "7", "system_url")
    expected = expected_tokens(trained[0])
    assert completion(url, str(tiny_model)) != expected
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as admin:
        meanwhile: list[httpx.Response] = []

        def also() -> None:
            # Its thread may come after us: what is answered is what the update, once it is begun, lets be answered.
            ends_s = time.monotonic() + START_S
            while admin.get("/rlbus/status").json()["status"]["op_id"] is None:
                assert time.monotonic() < ends_s
                time.sleep(POLL_S)
            meanwhile.append(admin.post("/init_weight_transfer_engine", json={"init_info": {}}))

        sync = HTTPVLLMWeightSyncClient(url)
        engine = trainer(trained[0], sync, 2, also)
        with pytest.raises(Exception, match="409"):
            engine.send_weights()
        assert meanwhile == []
        answer = admin.post("/pause?mode=keep", headers={"X-Rlbus-Caller": "trainer", "X-Rlbus-Lease-S": "120"})
        assert answer.json() == {"status": "paused"}
        pause = admin.get("/rlbus/status").json()["status"]["pause"]
        assert pause["owner"] == "http:trainer"
        assert 0 < pause["expires_at"] - time.time() <= 120
        engine.send_weights()
        assert [(m.status_code, m.json()["rlbus"]["code"]) for m in meanwhile] == [(503, "busy")]
        assert admin.get("/is_paused").json() == {"is_paused": True}
        assert admin.post("/resume").json() == {"status": "resumed"}
        assert completion(url, str(tiny_model)) == expected
        assert admin.get("/weight_info").json() == {"weight_version": "0.1"}
        assert admin.post("/collective_rpc", json={"method": "reset_weights"}).status_code == 403
        engine.shutdown()
        sync.shutdown_weight_transfer_engine()


def test_bus_client_updates_vllm_and_torch_as_one_fleet(fleet: Fleet, tiny_model: Path, trained: list[Path]) -> None:
    """One group over all ranks of unequal workers; both end with the trainer's tokens, running, at one version."""
    expected = expected_tokens(trained[1])
    with BusWeightSyncClient(fleet.url) as client:
        assert client.world_size() == 1 + TORCH_RANKS
        engine = trainer(trained[1], client, 1 + client.world_size())
        engine.send_weights()
        assert client.report is not None
        assert [outcome.outcome.value for outcome in client.report.outcomes] == ["ok", "ok"]
        engine.shutdown()
        client.shutdown_weight_transfer_engine()
    for worker in ("7", "8"):
        assert completion(url_of(fleet, worker, "completions_url"), str(tiny_model)) == expected
    weights = [fleet.until(worker, lambda m: m["admitted"])["status"]["weights"] for worker in ("7", "8")]
    assert [w["state"] for w in weights] == ["clean", "clean"]
    assert weights[0]["version"] == weights[1]["version"] != [0, 1]
