"""Reloads over gRPC: what the ranks are asked, how the weights are called meanwhile, and a disk without room."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

pytest.importorskip("grpc")

from rlbus.errors import EngineError
from rlbus.schemas import Fault, FaultCode
from rlbus.testing import run
from rlbus.workers.engines.base import UpdateFailedError
from rlbus.workers.vllm_grpc.control import Control
from rlbus.workers.vllm_grpc.engine import VllmGrpcEngine
from rlbus.workers.vllm_grpc.weights import GrpcWeights
from rlbus.workers.vllm_server.calls import EngineCalls
from rlbus.workers.vllm_server.checkpoint import expect
from rlbus.workers.vllm_server.exchange import TORN, CallFolder, Exchange, FolderError, RankOutcome
from rlbus.workers.vllm_server.updates import Updates
from tests.unit.workers.vllm_grpc.test_capabilities import OURS, facts
from tests.unit.workers.vllm_server.full_disk import full_disk
from tests.unit.workers.vllm_server.test_updates import TENSORS, V2, save

pytestmark = pytest.mark.unit


class Server:
    """Two ranks that load what they are told to. `labels` is how the weights were called when the ranks were asked."""

    errored = False

    def __init__(self) -> None:
        self.label = "0.1"
        self.labels: list[str] = []
        self.log: list[str] = []
        self.refuses_labels = False

    async def set_version(self, label: str) -> None:
        if self.refuses_labels:
            raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message="no connection"))
        self.label = label

    async def start_update(self, limit_s: float) -> None:
        self.log.append("start")

    async def update_weights(self, info: bytes, limit_s: float) -> None:
        self.labels.append(self.label)
        self._say(CallFolder(msgspec.json.decode(info)["folder"]), "receive")

    async def finish_update(self, limit_s: float) -> None:
        self.log.append("finish")
        if self.folder is not None:
            self._say(self.folder, "finish")

    folder: CallFolder | None = None

    def _say(self, folder: CallFolder, step: str) -> None:
        self.folder = folder
        for rank in range(2):
            folder.end(step, rank, RankOutcome())


Check = Callable[[Updates, EngineCalls, Server], Awaitable[None]]


@pytest.fixture
def on_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Check], None]:
    """Runs a check; what reads a folder runs inline, since a thread would not run in virtual time."""

    async def inline(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    monkeypatch.setattr("asyncio.to_thread", inline)
    save(tmp_path)

    def go(check: Check) -> None:
        async def main() -> None:
            server = Server()
            exchange = Exchange(str(tmp_path))
            calls = EngineCalls(server, 2)
            updates = Updates(
                GrpcWeights(cast(Control, server), exchange, 2),
                calls,
                exchange,
                world_size=2,
                first_dp_index=0,
                expected=expect(TENSORS, is_head_tied=False, source="test"),
                has_transfer=True,
            )
            await check(updates, calls, server)

        run(main())

    return go


def test_a_reload_is_labelled_torn_until_it_is_done(on_server: Callable[[Check], None], tmp_path: Path) -> None:
    """The ranks load on when the agent dies: then nobody takes the new weights for the old ones."""

    async def check(updates: Updates, calls: EngineCalls, server: Server) -> None:
        await updates.load(str(tmp_path), V2)
        assert (server.labels, server.label) == ([TORN], str(V2))

    on_server(check)


def test_reload_without_room_for_its_folder_leaves_weights_and_label_alone(
    on_server: Callable[[Check], None], tmp_path: Path
) -> None:
    """The ranks weren't asked, so they are in step; with room again it goes well."""

    async def check(updates: Updates, calls: EngineCalls, server: Server) -> None:
        with full_disk(), pytest.raises(UpdateFailedError, match="No space") as caught:
            await updates.load(str(tmp_path), V2)
        assert not caught.value.weights_touched
        assert calls.death is None
        await updates.abort()
        assert server.label == "0.1"
        await updates.load(str(tmp_path), V2)
        assert server.label == str(V2)

    on_server(check)


def test_label_that_fails_before_a_reload_costs_no_restart(on_server: Callable[[Check], None], tmp_path: Path) -> None:
    """It isn't a call of the ranks."""

    async def check(updates: Updates, calls: EngineCalls, server: Server) -> None:
        server.refuses_labels = True
        with pytest.raises(UpdateFailedError, match="no connection"):
            await updates.load(str(tmp_path), V2)
        assert calls.death is None
        assert server.labels == []

    on_server(check)


def test_server_is_not_taken_for_one_without_our_backend_because_the_disk_is_full(tmp_path: Path) -> None:
    """Its ranks weren't asked: the start fails by what it is, and is tried again."""

    async def main() -> None:
        control = cast(Control, Server())
        engine = VllmGrpcEngine(control)
        engine._weights = GrpcWeights(control, Exchange(str(tmp_path)), 1)
        with full_disk(), pytest.raises(FolderError):
            await engine._greet(facts(**OURS))

    run(main())
