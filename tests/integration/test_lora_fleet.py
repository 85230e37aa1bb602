"""Adapters on a fleet of real engines over a real server: two torch workers, one of which can't read the folder."""

import asyncio
import contextlib
import http.server
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

pytest.importorskip("torch")

from safetensors.torch import load_file

from rlbus.adapter import CONFIG_FILE, WEIGHTS_FILE, adapter_sum
from rlbus.adapter_objects import fetch_object
from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus, open_objects
from rlbus.controller.app import serve
from rlbus.controller.frontend import Frontend
from rlbus.controller.service import Settings
from rlbus.errors import ConfigError, PartialError
from rlbus.schemas import FaultCode, Generation, OpStatus
from rlbus.server import EmbeddedServer
from rlbus.trainer import Trainer
from rlbus.transfer.fake import FakePlane
from rlbus.workers.agent import Agent
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.torch_engine import TorchEngine
from rlbus.workers.torch_lm.make import make_tiny_adapter, make_tiny_model, merge_tiny_adapter
from tests.integration.http_servers import served
from tests.tries import TooLateError, best_of_async, in_time

pytestmark = pytest.mark.integration

PROMPT = tuple(range(10, 40))
LIMIT_S = 240.0


@dataclass
class Adapters:
    """A model, two adapters for it, and what it generates with each (merged into it, without any adapter code)."""

    model: Path
    folders: list[Path]
    expected: list[list[int]]


@dataclass
class Fleet:
    """Two workers with real engines behind a real controller; `client` asks it."""

    url: str
    bus: Bus
    client: FleetClient
    trainer: Trainer
    engines: list[TorchEngine]

    async def generations(self) -> list[Generation]:
        return [(await engine.observe()).generation for engine in self.engines]

    async def ask(self, model: str) -> list[list[int] | int]:
        """What each worker's HTTP route answers for this model: tokens, or a status."""
        return [await ask(engine.info.completions_url or "", model) for engine in self.engines]


async def ask(url: str, model: str) -> list[int] | int:
    body = {"model": model, "prompt": list(PROMPT), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
        answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
    if answer.status_code != 200:
        return answer.status_code
    return list(answer.json()["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    folder = tmp_path_factory.mktemp("adapters")
    model = make_tiny_model(folder / "model")
    folders = [make_tiny_adapter(folder / f"a{n}", model, seed=n) for n in (1, 2)]

    async def merged(number: int) -> list[int]:
        engine = TorchEngine(merge_tiny_adapter(folder / f"m{number}", model, folders[number]))
        try:
            await engine.start()
            answer = await ask(engine.info.completions_url or "", engine.info.model)
        finally:
            await engine.aclose()
        assert isinstance(answer, list)
        return answer

    expected = [asyncio.run(merged(number)) for number in (0, 1)]
    assert expected[0] != expected[1]
    return Adapters(model, folders, expected)


@contextlib.asynccontextmanager
async def worker(
    url: str, engine: TorchEngine, instance_id: str, roots: tuple[str, ...], cache: Path
) -> AsyncIterator[None]:
    config = AgentConfig(lora_roots=roots, fetch_object=fetch_object, lora_cache_dir=str(cache))
    async with await connect_bus(BusConfig(url=url), name=f"worker-{instance_id}") as bus:
        await engine.start()
        agent = Agent(engine, bus, namespace="default", component="backend", instance_id=instance_id, config=config)
        running = asyncio.create_task(agent.run())
        try:
            yield
        finally:
            agent.stop()
            await running
            await engine.aclose()


@contextlib.asynccontextmanager
async def fleet_of(adapters: Adapters, tmp_path: Path, settings: Settings | None = None) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer())
        stop, ready = asyncio.Event(), asyncio.Event()
        config = BusConfig(url=server.url)
        # Without a lease: engines and tests share its process, which they may keep longer than a lease lives.
        serving = asyncio.create_task(
            serve(config, settings=settings, stop=stop, on_ready=lambda _: ready.set(), is_single=True)
        )

        async def end() -> None:
            stop.set()
            await serving

        stack.push_async_callback(end)
        await ready.wait()
        engines = [TorchEngine(adapters.model) for _ in range(2)]
        for number, engine in enumerate(engines, 1):
            roots = (str(adapters.model.parent),) if number == 1 else ()
            cache = tmp_path / f"cache{number}"
            await stack.enter_async_context(worker(server.url, engine, str(number), roots, cache))
        bus = await stack.enter_async_context(await connect_bus(config, name="test"))
        fleet = Fleet(server.url, bus, FleetClient(bus, "default"), Trainer(bus, "default", FakePlane()), engines)
        await fleet.client.wait_ready(num_workers=2, deadline_s=LIMIT_S)
        yield fleet


def play(
    adapters: Adapters,
    tmp_path: Path,
    scenario: Callable[[Fleet], Coroutine[Any, Any, None]],
    settings: Settings | None = None,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), fleet_of(adapters, tmp_path, settings) as fleet:
            await scenario(fleet)

    asyncio.run(main())


def test_every_worker_generates_with_revision_1_then_2_as_the_merged_models_do(
    adapters: Adapters, tmp_path: Path
) -> None:
    """The first from a folder, the second from the trainer's memory; both through the store, cached by checksum."""

    async def scenario(fleet: Fleet) -> None:
        assert await fleet.ask("policy") == [404, 404]
        report = await fleet.client.load_lora("policy", adapters.folders[0])
        assert report.lora is not None
        assert (report.status, report.lora.ids) == (OpStatus.OK, ("policy@1",))
        assert await fleet.ask("policy@1") == [adapters.expected[0]] * 2
        tensors = load_file(adapters.folders[1] / WEIGHTS_FILE)
        config = json.loads((adapters.folders[1] / CONFIG_FILE).read_text())
        report = await fleet.trainer.load_lora("policy", tensors, config=config)
        assert report.lora is not None
        assert report.lora.ids == ("policy@2",)
        for name, expected in (("policy@2", 1), ("policy", 1), ("policy@1", 0)):
            assert await fleet.ask(name) == [adapters.expected[expected]] * 2
        assert await fleet.generations() == [Generation.RUNNING] * 2
        for number in (1, 2):
            copies = {path.parent.name for path in (tmp_path / f"cache{number}").rglob(WEIGHTS_FILE)}
            assert copies >= {adapter_sum(adapters.folders[0]).checksum}
        report = await fleet.client.unload_lora("policy", revision=1)
        assert await fleet.ask("policy@1") == [404, 404]
        assert await fleet.ask("policy") == [adapters.expected[1]] * 2
        objects = open_objects(fleet.bus, "default")
        assert await objects.look(adapter_sum(adapters.folders[0]).checksum) is None

    play(adapters, tmp_path, scenario)


def test_a_folder_that_one_worker_may_not_read_is_loaded_nowhere(adapters: Adapters, tmp_path: Path) -> None:
    """Worker 1 had it already, and lets it go again; everybody generates."""

    async def scenario(fleet: Fleet) -> None:
        with pytest.raises(PartialError) as caught:
            await fleet.client.load_lora("policy", adapters.folders[0], shared=True)
        report = caught.value.report
        assert [o.outcome.value for o in report.outcomes] == ["undone", "refused"]
        assert "RLBUS_LORA_ROOTS" in report.fault.message
        assert await fleet.ask("policy@1") == [404, 404]
        assert await fleet.generations() == [Generation.RUNNING] * 2

    play(adapters, tmp_path, scenario)


def test_a_worker_that_comes_later_is_given_it_from_the_store(adapters: Adapters, tmp_path: Path) -> None:
    """And answers like the others."""

    async def scenario(fleet: Fleet) -> None:
        await fleet.client.load_lora("policy", adapters.folders[0])
        late = TorchEngine(adapters.model)
        async with worker(fleet.url, late, "3", (), tmp_path / "cache3"):
            while True:
                answer = await ask(late.info.completions_url or "", "policy@1")
                if answer != 404:
                    break
                await asyncio.sleep(0.1)
            assert answer == adapters.expected[0]

    play(adapters, tmp_path, scenario)


class Models(http.server.BaseHTTPRequestHandler):
    """A frontend: shows `shown` at /v1/models to who has the key."""

    shown: ClassVar[list[str]] = []
    num_asked = 0
    answer: bytes | None = None

    def do_GET(self) -> None:
        """Answer."""
        type(self).num_asked += 1
        is_known = self.headers.get("Authorization") == "Bearer secret"
        body = json.dumps({"data": [{"id": name} for name in self.shown]}).encode()
        self.send_response(200 if is_known else 401)
        self.end_headers()
        if is_known:
            self.wfile.write(body if self.answer is None else self.answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Not on stderr."""


@pytest.fixture
def frontend() -> Iterator[tuple[str, type[Models]]]:
    kind = type("OwnModels", (Models,), {"shown": [], "num_asked": 0})
    with served(kind) as url:
        yield url, kind


def test_a_load_is_done_only_when_the_frontend_shows_it(
    adapters: Adapters, tmp_path: Path, frontend: tuple[str, type[Models]]
) -> None:
    """Until then everybody is paused; it shows it after a while, and then all go on."""
    url, models = frontend
    settings = Settings(frontend=Frontend(url, "secret"))

    async def scenario(fleet: Fleet) -> None:
        loading = asyncio.create_task(fleet.client.load_lora("policy", adapters.folders[0]))
        while models.num_asked < 2:  # noqa: ASYNC110 - another thread counts
            await asyncio.sleep(0.05)
        assert await fleet.generations() == [Generation.PAUSED] * 2
        assert not loading.done()
        models.shown = ["base", "policy@1"]
        report = await loading
        assert "frontend" in report.phases_s
        assert await fleet.generations() == [Generation.RUNNING] * 2

    play(adapters, tmp_path, scenario, settings)


def test_a_frontend_that_never_shows_it_takes_the_load_back(
    adapters: Adapters, tmp_path: Path, frontend: tuple[str, type[Models]]
) -> None:
    """Within the deadline, with what the frontend said last; nobody serves what can't be reached."""
    url, models = frontend
    models.shown = ["base"]
    settings = Settings(frontend=Frontend(url, "wrong"))

    deadlines_s = iter((6.0, 24.0, 72.0))

    async def load(fleet: Fleet) -> None:
        deadline_s = next(deadlines_s)
        report = await fleet.client.load_lora("policy", adapters.folders[0], deadline_s=deadline_s, check=False)
        assert report.fault is not None
        assert report.fault.code is FaultCode.DEADLINE
        if "401" not in report.fault.message:
            raise TooLateError(f"the frontend wasn't asked yet: {report.fault.message}")
        in_time("the load", report.took_s, deadline_s + 2.0)
        assert [o.outcome.value for o in report.outcomes] == ["undone", "undone"]

    async def scenario(fleet: Fleet) -> None:
        await best_of_async(lambda: load(fleet), 3)
        assert await fleet.ask("policy@1") == [404, 404]
        assert await fleet.generations() == [Generation.RUNNING] * 2

    play(adapters, tmp_path, scenario, settings)


@pytest.mark.parametrize("answer", [b"{}", b"[1]", b"no json", b'{"data": [{"name": "x"}]}'])
def test_a_frontend_that_answers_something_else_is_named(frontend: tuple[str, type[Models]], answer: bytes) -> None:
    """Never an exception of a library."""
    url, models = frontend
    models.answer = answer

    async def main() -> None:
        until_s = asyncio.get_running_loop().time()
        problem = await Frontend(url, "secret").until_shown("policy@1", until_s, lambda: False)
        assert problem is not None
        assert "something else than a list of models" in problem.message

    asyncio.run(main())


def test_a_frontend_url_is_checked_and_its_key_never_shown() -> None:
    """At start, not at the first load."""
    for url in ("localhost:8000", "ftp://host", "http://", "http://user:pass@host:8000"):
        with pytest.raises(ConfigError, match="use http://host:port"):
            Frontend(url)
    assert "secret" not in repr(Frontend("http://host:8000", "secret"))
