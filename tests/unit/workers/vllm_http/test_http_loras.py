"""The adapters of a vLLM server from outside: the sidecar against the plugin's own routes, on a stand-in for vLLM."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from rlbus.errors import EngineDeadError, EngineError, FaultError
from rlbus.schemas import LORA_ROUTES, FaultCode, Version
from rlbus.testing import run
from rlbus.workers.engines.base import UpdateFailedError
from rlbus.workers.peer_http import Peer
from rlbus.workers.vllm_http.engine import VllmHttpEngine
from rlbus.workers.vllm_server.lora_routes import LIST, LOAD, RESTORE
from tests.unit.workers.vllm_http.fake_server import FakeServer
from tests.unit.workers.vllm_server.fake_loras import without_vllm, write
from tests.unit.workers.vllm_server.lora_server import BOOT_ID, LoraServer

pytestmark = pytest.mark.unit

PEER = Peer.of("http://127.0.0.1:8000", api_key="key")


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)


class Both(httpx.AsyncBaseTransport):
    """A server whose RL routes are a stand-in's, and whose adapters the plugin's."""

    def __init__(self, model: Path, *, num_ranks: int = 1) -> None:
        self.rl = FakeServer(model, num_ranks=num_ranks)
        self.loras = LoraServer(keys=("key",))
        self.rl.about = {"boot_id": BOOT_ID, "worker": None, "requests": [], "lora_capacity": 2}
        # By path: what to answer instead.
        self.instead: dict[str, Callable[[], Awaitable[httpx.Response]]] = {}
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One request."""
        path = request.url.path
        if not path.startswith(LIST):
            return self.rl.answer(request)
        self.asked.append(path)
        if path in self.instead:
            return await self.instead[path]()
        answer = await self.loras.transport.handle_async_request(request)
        return httpx.Response(answer.status_code, content=await answer.aread(), request=request)


Check = Callable[[VllmHttpEngine], Awaitable[None]]


@pytest.fixture
def both(tmp_path: Path) -> Both:
    """A healthy one, with a checkpoint of one tensor."""
    return Both(model_in(tmp_path))


def model_in(folder: Path) -> Path:
    """A checkpoint with two float32."""
    model = folder / "model"
    model.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    (model / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    return model


def on_engine(both: Both, check: Check) -> None:
    """Run a check on a started engine."""

    async def main() -> None:
        engine = VllmHttpEngine(PEER, transport=both)
        try:
            await engine.start()
            await check(engine)
        finally:
            await engine.aclose()

    run(main())


def test_adapters_are_loaded_listed_drained_and_unloaded(both: Both, tmp_path: Path) -> None:
    """With the server's key on every call, and its own list as the answer."""
    files = write(tmp_path / "files")

    async def check(engine: VllmHttpEngine) -> None:
        assert engine.info.routes >= LORA_ROUTES
        assert (engine.lora_info.capacity, engine.lora_info.can_hot_swap) == (2, False)
        await engine.load_lora("policy", 1, files)
        await engine.load_lora("policy", 2, files)
        await engine.drain_lora("policy", 2)
        found = {(each.name, each.revision): each for each in await engine.list_loras()}
        assert {key: each.is_draining for key, each in found.items()} == {("policy", 1): False, ("policy", 2): True}
        request = both.loras.models.lora_requests["policy@1"]
        await both.loras.llm.add_request("r", "prompt", None, lora_request=request)
        assert await engine.unload_lora("policy", 1) == 1
        assert await engine.unload_lora("policy", 1) == 0
        assert [each.revision for each in await engine.list_loras()] == [2]

    on_engine(both, check)


@pytest.mark.parametrize(("what", "code"), [("files", FaultCode.MANIFEST_MISMATCH), ("room", FaultCode.NO_CAPACITY)])
def test_refusals_of_the_server_are_refusals_here(both: Both, tmp_path: Path, what: str, code: FaultCode) -> None:
    """SCENARIOS 35: they promise that nothing has changed; others don't."""
    files = write(tmp_path / "files")

    async def check(engine: VllmHttpEngine) -> None:
        for revision in range(1, 3 if what == "room" else 1):
            await engine.load_lora("policy", revision, files)
        with pytest.raises(FaultError) as caught:
            await engine.load_lora("policy", 9, tmp_path / "none" if what == "files" else files)
        assert caught.value.code is code
        assert not isinstance(caught.value, EngineError)

    on_engine(both, check)


@pytest.mark.parametrize("capacity", [None, "no plugin"])
def test_server_without_adapters_gets_no_routes_for_them(both: Both, capacity: str | None) -> None:
    """And nothing is asked that it doesn't have."""
    both.rl.about = None if capacity else {"boot_id": BOOT_ID, "worker": None, "requests": []}

    async def check(engine: VllmHttpEngine) -> None:
        assert not engine.info.routes & LORA_ROUTES
        await engine.label_weights(Version(step=1))

    on_engine(both, check)
    assert both.asked == []


def test_adapters_come_back_after_the_weights_have_changed(both: Both, tmp_path: Path) -> None:
    """vLLM drops them from its core; a request for one that isn't there would kill it."""
    files = write(tmp_path / "files")

    async def check(engine: VllmHttpEngine) -> None:
        await engine.load_lora("policy", 1, files)
        both.loras.llm.core.clear()
        await engine.load_weights(str(both.rl.model), Version(step=1))
        assert len(await engine.list_loras()) == 1
        both.loras.llm.core.clear()
        await engine.abort_update()
        assert len(await engine.list_loras()) == 1

    on_engine(both, check)


def test_weights_count_as_touched_while_nobody_knows_whether_adapters_came_back(both: Both) -> None:
    """So nothing generates before an update or a load that went well to its end."""

    async def check(engine: VllmHttpEngine) -> None:
        async def broken() -> httpx.Response:
            raise httpx.ReadError("connection reset")

        both.instead[RESTORE] = broken
        with pytest.raises(UpdateFailedError) as caught:
            await engine.load_weights(str(both.rl.model), Version(step=1))
        assert caught.value.weights_touched

    on_engine(both, check)


def test_lost_answer_is_no_refusal_and_the_list_tells(both: Both, tmp_path: Path) -> None:
    """SCENARIOS 31: it was loaded, and the connection broke."""
    files = write(tmp_path / "files")

    async def check(engine: VllmHttpEngine) -> None:
        async def lost() -> httpx.Response:
            body = {"boot_id": BOOT_ID, "name": "policy", "revision": 1, "folder": str(files)}
            headers = {"authorization": "Bearer key"}
            request = httpx.Request("POST", f"http://127.0.0.1{LOAD}", json=body, headers=headers)
            await both.loras.transport.handle_async_request(request)
            raise httpx.ReadError("connection reset")

        both.instead[LOAD] = lost
        with pytest.raises(EngineError):
            await engine.load_lora("policy", 1, files)
        assert [each.revision for each in await engine.list_loras()] == [1]

    on_engine(both, check)


def test_call_for_a_server_that_was_started_anew_is_a_death(both: Both, tmp_path: Path) -> None:
    """The next agent looks at what is there now."""
    files = write(tmp_path / "files")

    async def check(engine: VllmHttpEngine) -> None:
        both.loras = LoraServer(keys=("key",))
        both.loras.routes._boot_id = "b2"
        with pytest.raises(EngineDeadError):
            await engine.load_lora("policy", 1, files)
        with pytest.raises(EngineDeadError):
            await engine.observe()
        assert both.loras.llm.core == set()

    on_engine(both, check)


def test_ranks_out_of_step_in_the_server_are_a_death_here(tmp_path: Path) -> None:
    """The server goes on, so whoever supervises it is told (docs/engines.md)."""
    both = Both(model_in(tmp_path), num_ranks=2)
    files = write(tmp_path / "files")
    both.loras.llm.vllm_config.parallel_config.world_size = 2
    both.loras.llm.raises["add_lora"] = "rank 1 failed"

    async def check(engine: VllmHttpEngine) -> None:
        with pytest.raises(EngineError):
            await engine.load_lora("policy", 1, files)
        with pytest.raises(EngineDeadError, match="out of step"):
            await engine.observe()

    on_engine(both, check)


def test_next_agent_finds_adapters_as_they_were_and_ends_what_drained(both: Both, tmp_path: Path) -> None:
    """Its server went on; nobody else would end a drain that an agent began."""
    files = write(tmp_path / "files")

    async def before(engine: VllmHttpEngine) -> None:
        await engine.load_lora("policy", 1, files)
        await engine.load_lora("policy", 2, files)
        await engine.drain_lora("policy", 2)

    async def after(engine: VllmHttpEngine) -> None:
        found = [(each.revision, each.is_draining, each.files) for each in await engine.list_loras()]
        assert found == [(1, False, "files")], "the folder, by which the agent knows the bytes"

    on_engine(both, before)
    # It died within an update, with which vLLM drops them.
    both.loras.llm.core.clear()
    on_engine(both, after)


def test_list_of_another_version_is_an_error(both: Both) -> None:
    """Not a wrong guess."""

    async def check(engine: VllmHttpEngine) -> None:
        async def other() -> httpx.Response:
            return httpx.Response(200, json={"adapters": []})

        both.instead[LIST] = other
        with pytest.raises(EngineError, match="another shape"):
            await engine.list_loras()

    on_engine(both, check)


def test_native_routes_are_there_with_rlbus_transfer_only(both: Both) -> None:
    """Somebody else's trainer feeds it over Gloo; vLLM's own backends aren't driven from outside."""

    async def there(engine: VllmHttpEngine) -> None:
        assert "init_weight_transfer_engine" in engine.info.routes

    async def missing(engine: VllmHttpEngine) -> None:
        assert "init_weight_transfer_engine" not in engine.info.routes

    on_engine(both, there)
    both.rl.backend = "nccl"
    on_engine(both, missing)
