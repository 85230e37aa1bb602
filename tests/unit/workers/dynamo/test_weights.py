"""The adapter's weights on a stand-in for Dynamo's HTTP: reloads, checksums, manifests."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlbus.errors import EngineDeadError, EngineError, FaultError
from rlbus.schemas import FaultCode, TensorSpec, Version
from rlbus.testing import run
from rlbus.workers.dynamo.engine import DynamoEngine
from rlbus.workers.dynamo.rpc import DynamoRpc
from rlbus.workers.dynamo.surface import Surface
from rlbus.workers.engines.base import NO_LABEL, ReceiveOrder, UpdateFailedError
from rlbus.workers.peer_http import Peer, PeerClient
from rlbus.workers.vllm_server.calls import EngineCalls
from rlbus.workers.vllm_server.exchange import CallFolder, Exchange, FolderError
from rlbus.workers.vllm_server.updates import Updates
from tests.unit.workers.dynamo.fake_dynamo import URL, FakeDynamo, FakeWorker, on_engine
from tests.unit.workers.vllm_server.full_disk import full_disk

pytestmark = pytest.mark.unit

V1 = Version(step=1)


def test_a_reload_is_labelled_torn_until_it_is_done(tmp_path: Path) -> None:
    """Dynamo loads on when the sidecar dies: then nobody takes the new weights for the old ones."""
    worker = FakeWorker(is_paused=True, label="0.7")
    labels: list[str | None] = []
    rpc = worker._rpc

    def watched(method: str, kwargs: dict[str, Any]) -> str | None:
        labels.append(worker.label)
        return rpc(method, kwargs)

    worker._rpc = watched  # type: ignore[method-assign]

    async def check(engine: DynamoEngine) -> None:
        labels.clear()
        await engine.load_weights(str(tmp_path / "model"), V1)
        assert labels == ["torn"]
        assert worker.label == "0.1"
        assert worker.rpcs[-1] == ("reload_weights", {"weights_path": str(tmp_path / "model")})

    on_engine(worker, tmp_path, check)


def test_update_whose_manifest_finds_no_room_leaves_the_weights_alone_and_costs_no_restart(tmp_path: Path) -> None:
    """Dynamo was never asked, so its ranks are in step, and hold what they held."""
    worker = FakeWorker(is_paused=True, world_size=2)

    async def main() -> None:
        client = PeerClient(Peer.of(URL), transport=FakeDynamo({URL: worker}))
        rpc = DynamoRpc(Surface(client))
        calls = EngineCalls(rpc, 2)
        exchange = Exchange(str(tmp_path))
        updates = Updates(rpc, calls, exchange, world_size=2, first_dp_index=0, expected=None, has_transfer=True)
        updates._ranks.epoch = 1
        order = ReceiveOrder("op", 1, V1, (TensorSpec(name="w", dtype="float32", shape=(2,)),), 16)
        folder = exchange.open("update")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Exchange, "open", lambda self, what: folder)
            with full_disk(), pytest.raises(UpdateFailedError, match="No space") as caught:
                await updates.receive(order, lambda: None, lambda done, total: None)
        assert not caught.value.weights_touched
        assert calls.death is None
        await updates.abort()
        assert not worker.is_open
        assert worker.label is None
        await client.aclose()

    run(main())


def test_worker_is_not_adopted_for_less_than_it_can_because_the_disk_is_full(tmp_path: Path) -> None:
    """It is tried again: without the folder nobody knows whether it has our backend."""

    async def check(engine: DynamoEngine) -> None:
        raise AssertionError("it was adopted")

    opened = Exchange.open

    def full(self: Exchange, what: str) -> CallFolder:
        with full_disk():
            return opened(self, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "open", full)
        with pytest.raises(FolderError):
            on_engine(FakeWorker(), tmp_path, check)


def test_worker_whose_label_is_gone_is_another_process(tmp_path: Path) -> None:
    """Also where it doesn't say for how long it runs."""
    worker = FakeWorker(label="0.7")

    async def check(engine: DynamoEngine) -> None:
        await engine.observe()
        worker.label = None
        with pytest.raises(EngineDeadError, match="restarted"):
            await engine.observe()
        assert engine.is_gone

    on_engine(worker, tmp_path, check)


def test_worker_whose_label_was_declared_to_be_none_is_the_same_process(tmp_path: Path) -> None:
    """Dynamo takes `null` as a declaration. What tells another process is that nothing was declared."""
    worker = FakeWorker(label="0.7")

    async def check(engine: DynamoEngine) -> None:
        await engine.observe()
        worker.broken["get_weight_version"] = (200, b'{"status":"ok","version":null,"version_declared":true}')
        assert (await engine.observe()).weight_version == NO_LABEL
        del worker.broken["get_weight_version"]
        worker.label = None
        with pytest.raises(EngineDeadError, match="restarted"):
            await engine.observe()

    on_engine(worker, tmp_path, check)


def test_weights_can_be_named_without_loading_any(tmp_path: Path) -> None:
    """By Dynamo's own route; what the engine says of itself follows."""
    worker = FakeWorker()

    async def check(engine: DynamoEngine) -> None:
        assert "set_weight_version" in engine.info.routes
        await engine.label_weights(Version(incarnation=3, step=9))
        assert (worker.label, (await engine.observe()).weight_version) == ("3.9", "3.9")
        worker.broken["set_weight_version"] = (200, b'{"status":"error","message":"boom"}')
        with pytest.raises(EngineError, match="boom"):
            await engine.label_weights(V1)

    on_engine(worker, tmp_path, check)


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_reload_that_dynamo_refuses_counts_as_touched(is_paused: bool, tmp_path: Path) -> None:
    """Doubt is yes; a folder that isn't there costs nothing."""
    worker = FakeWorker(is_paused=is_paused)

    async def check(engine: DynamoEngine) -> None:
        with pytest.raises(UpdateFailedError) as caught:
            await engine.load_weights(str(tmp_path / "nothing"), V1)
        assert not caught.value.weights_touched
        worker.broken["update_weights_from_disk"] = (200, b'{"status":"error","message":"boom"}')
        with pytest.raises(UpdateFailedError, match="boom") as caught:
            await engine.load_weights(str(tmp_path / "model"), V1)
        assert caught.value.weights_touched

    on_engine(worker, tmp_path, check)


def test_checksums_come_from_our_backend_and_are_refused_without_it(tmp_path: Path) -> None:
    """The first 64 bits of vLLM's."""

    async def check(engine: DynamoEngine) -> None:
        (found,) = (await engine.checksums()).sums
        assert (found.name, found.checksum) == ("tp0:w", "ab" * 8)

    on_engine(FakeWorker(), tmp_path, check)

    async def refuses(engine: DynamoEngine) -> None:
        with pytest.raises(FaultError) as caught:
            await engine.checksums()
        assert caught.value.code is FaultCode.NO_ROUTE

    on_engine(FakeWorker(has_transfer=False), tmp_path, refuses)


def test_a_large_manifest_goes_through_the_folder_and_not_through_dynamo(tmp_path: Path) -> None:
    """Dynamo takes 2 MB; the tensors of a mixture of experts are more."""
    worker = FakeWorker(is_paused=True)
    tensors = [
        {"name": f"model.layers.{i}.mlp.experts.weight", "dtype": "bfloat16", "shape": [1]} for i in range(40_000)
    ]

    async def main() -> None:
        client = PeerClient(Peer.of(URL), transport=FakeDynamo({URL: worker}))
        rpc = DynamoRpc(Surface(client))
        await rpc.collective_rpc("update_weights", {"update_info": {"folder": str(tmp_path), "tensors": tensors}})
        await client.aclose()

    run(main())
    route, body = worker.calls[-1]
    assert route == "update_weights_from_distributed"
    assert len(json.dumps(body)) < 1000
    assert body["reset_prefix_cache"] is False
    assert CallFolder(str(tmp_path)).tensors() == tensors


def test_a_manifest_is_compared_with_the_checkpoint(tmp_path: Path) -> None:
    """Before anything is sent."""

    async def check(engine: DynamoEngine) -> None:
        engine.check_manifest((TensorSpec(name="w", dtype="float32", shape=(2,)),))
        with pytest.raises(FaultError) as caught:
            engine.check_manifest((TensorSpec(name="w", dtype="float32", shape=(3,)),))
        assert caught.value.code is FaultCode.MANIFEST_MISMATCH

    on_engine(FakeWorker(), tmp_path, check)
