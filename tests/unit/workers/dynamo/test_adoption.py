"""Adoption of a Dynamo fleet on a bus in memory: who comes, who goes, and that nobody costs anybody else anything."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from rlbus import subjects
from rlbus.bus import Bus
from rlbus.errors import ConfigError
from rlbus.schemas import Announcement, Goodbye, WeightsState, WorkerMessage
from rlbus.testing import LoopClock, MemoryBroker, hangs, run, sequential_ids
from rlbus.workers.adoption import FOUND_LEASE_S
from rlbus.workers.config import AgentConfig
from rlbus.workers.dynamo import adoption as adoption_module
from rlbus.workers.dynamo.adoption import MAX_LIST_S, Adopting, Adoption, Discovery, Source, StaticUrl
from rlbus.workers.dynamo.engine import DynamoEngine, EngineOptions
from rlbus.workers.dynamo.run import Where
from rlbus.workers.lora_files import LoraFiles
from rlbus.workers.peer_http import Peer
from rlbus.workers.vllm_server.calls import EngineCalls
from tests.unit.workers.dynamo.fake_dynamo import (
    RL_URL,
    FakeDynamo,
    FakeWorker,
    answer_of,
    descriptor,
    make_checkpoint,
)

pytestmark = pytest.mark.unit

ONE, TWO = "http://one:9000", "http://two:9000"
NAMESPACE = "test"


class Stage:
    """Dynamo, the sidecar, and somebody who listens to the bus."""

    def __init__(self, dynamo: FakeDynamo, adoption: Adoption, said: list[str]) -> None:
        self.dynamo = dynamo
        self.adoption = adoption
        self.said = said
        self.stopped = asyncio.Event()
        # The last announcement of each worker that hasn't said goodbye, and all goodbyes.
        self.there: dict[str, Announcement] = {}
        self.goodbyes: list[Goodbye] = []

    def hear(self, message: Announcement | Goodbye) -> None:
        """A worker says something."""
        if isinstance(message, Goodbye):
            self.goodbyes.append(message)
            self.there.pop(message.instance_id, None)
        else:
            self.there[message.descriptor.instance_id] = message

    async def until(self, is_true: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Wait until it is."""
        async with asyncio.timeout(limit_s):
            while not is_true():  # noqa: ASYNC110 - many things change
                await asyncio.sleep(0.25)

    def lists(self, *workers: Any) -> None:
        """From now on Dynamo lists these."""
        self.dynamo.listing = answer_of(*workers)


Act = Callable[[Stage], Coroutine[Any, Any, None]]


def play(dynamo: FakeDynamo, tmp_path: Path, act: Act, urls: tuple[str, ...] = (), **agent: Any) -> None:
    """Run the sidecar of a front end, or of static URLs, beside `act`; then stop it."""
    make_checkpoint(tmp_path / "model")

    async def main() -> None:
        said: list[str] = []
        broker = MemoryBroker()
        bus = Bus(broker.connect("sidecar"), clock=LoopClock(), new_id=sequential_ids("sidecar"))
        ears = Bus(broker.connect("ears"), clock=LoopClock(), new_id=sequential_ids("ears"))
        how = Adopting(
            namespace=NAMESPACE,
            agent=AgentConfig(**agent),
            peer_of=Peer.of,
            options=EngineOptions(model_dir=tmp_path / "model", run_dir=str(tmp_path)),
            on_change=said.append,
            transport=dynamo,
        )
        static: list[Source] = [StaticUrl(Peer.of(url), transport=dynamo) for url in urls]
        sources = static or [Discovery(Peer.of(RL_URL), transport=dynamo)]
        stage = Stage(dynamo, Adoption(bus, sources, how), said)
        ears.subscribe(subjects.all_workers(NAMESPACE), WorkerMessage, lambda m, _: stage.hear(m))
        running = asyncio.ensure_future(stage.adoption.run(stage.stopped))
        try:
            await act(stage)
        finally:
            stage.stopped.set()
            await running
            await ears.aclose()
            await bus.aclose()
            for source in sources:
                await source.aclose()
        assert stage.there == {}
        assert stage.adoption.agents == ()

    run(main())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("rlbus-")] == []


def two_workers() -> FakeDynamo:
    """A fleet of two."""
    big = 2**64 - 1
    dynamo = FakeDynamo({ONE: FakeWorker(1), TWO: FakeWorker(big)})
    dynamo.listing = answer_of(descriptor(1, ONE), descriptor(big, TWO, component="prefill"))
    return dynamo


def test_a_whole_fleet_is_adopted_under_its_own_names_and_leaves_with_goodbyes(tmp_path: Path) -> None:
    """Ids, components and models are Dynamo's; the namespace is ours."""

    async def act(stage: Stage) -> None:
        await stage.until(lambda: len(stage.there) == 2)
        found = {(a.descriptor.component, i): a.descriptor for i, a in stage.there.items()}
        assert set(found) == {("backend", "1"), ("prefill", "18446744073709551615")}
        assert {(d.namespace, d.engine, d.model) for d in found.values()} == {(NAMESPACE, "dynamo", "model")}
        assert "backend/1 is adopted from http://one:9000" in stage.said
        stage.stopped.set()
        await stage.until(lambda: len(stage.goodbyes) == 2)
        assert {bye.reason for bye in stage.goodbyes} == {"the sidecar stops"}

    play(two_workers(), tmp_path, act)


def test_new_workers_are_adopted_and_vanished_ones_leave(tmp_path: Path) -> None:
    """The others don't notice."""

    async def act(stage: Stage) -> None:
        stage.lists(descriptor(1, ONE))
        await stage.until(lambda: "1" in stage.there)
        stage.lists(descriptor(1, ONE), descriptor(2, TWO))
        stage.dynamo.workers[TWO].number = 2
        await stage.until(lambda: "2" in stage.there)
        boot = stage.there["1"].boot_id
        stage.lists(descriptor(1, ONE))
        await stage.until(lambda: "2" not in stage.there)
        assert stage.goodbyes[-1].reason == "Dynamo doesn't list it any more"
        assert stage.there["1"].boot_id == boot

    play(two_workers(), tmp_path, act)


def test_a_dead_worker_leaves_and_its_successor_comes_as_another_one(tmp_path: Path) -> None:
    """SCENARIOS 8: at the same URL, before Dynamo's list has noticed."""

    async def act(stage: Stage) -> None:
        await stage.until(lambda: len(stage.there) == 2)
        await asyncio.sleep(30.0)
        now_s = asyncio.get_running_loop().time()
        stage.dynamo.workers[ONE] = FakeWorker(5, began_s=now_s)
        await stage.until(lambda: "1" not in stage.there, 3.0)
        assert "was restarted" in stage.goodbyes[-1].reason
        stage.lists(descriptor(5, ONE), descriptor(2**64 - 1, TWO, component="prefill"))
        await stage.until(lambda: "5" in stage.there)
        stage.dynamo.workers[ONE].began_s = None
        await stage.until(lambda: "5" not in stage.there, 3.0)
        assert "nobody listens" in stage.goodbyes[-1].reason

    play(two_workers(), tmp_path, act)


def test_a_process_that_was_given_up_stays_out_until_it_is_restarted(tmp_path: Path) -> None:
    """It answers again, but what it last did isn't known."""

    async def act(stage: Stage) -> None:
        await stage.until(lambda: len(stage.there) == 2)
        stage.adoption.agents[0].lose("its ranks are out of step; restart it")
        await stage.until(lambda: len(stage.there) == 1)
        await asyncio.sleep(200.0)
        assert len(stage.there) == 1
        assert any("could not be adopted" in text and "restart it" in text for text in stage.said)
        stage.dynamo.workers[ONE].began_s = asyncio.get_running_loop().time()
        await stage.until(lambda: len(stage.there) == 2, 100.0)

    play(two_workers(), tmp_path, act)


def test_a_worker_that_was_labelled_before_comes_with_unknown_weights(tmp_path: Path) -> None:
    """Somebody updated it before this sidecar came; a fresh one has what it was started with."""
    dynamo = two_workers()
    dynamo.workers[TWO].label = "0.9"

    async def act(stage: Stage) -> None:
        await stage.until(lambda: len(stage.there) == 2)
        states = {i: a.status.weights.state for i, a in stage.there.items()}
        assert states == {"1": WeightsState.CLEAN, str(2**64 - 1): WeightsState.UNKNOWN}

    play(dynamo, tmp_path, act)


def test_a_worker_that_can_not_be_adopted_costs_the_others_nothing_and_is_tried_again(tmp_path: Path) -> None:
    """Nobody listens there yet; and one whose descriptor has an error."""
    dynamo = two_workers()
    gone = dynamo.workers.pop(TWO)
    sick = {**descriptor(3, "http://three:1"), "error": "probe failed"}
    dynamo.listing = answer_of(sick, *dynamo.listing["workers"])

    async def act(stage: Stage) -> None:
        await stage.until(lambda: "1" in stage.there)
        assert "backend/3 is left out: Dynamo says: probe failed" in stage.said
        await asyncio.sleep(20.0)
        assert any("could not be adopted" in text and "nobody listens" in text for text in stage.said)
        stage.dynamo.workers[TWO] = gone
        await stage.until(lambda: str(2**64 - 1) in stage.there, 100.0)
        assert stage.said.count("backend/3 is left out: Dynamo says: probe failed") == 1

    play(dynamo, tmp_path, act)


def test_a_front_end_that_is_gone_lets_nobody_go_and_is_asked_again_with_growing_pauses(tmp_path: Path) -> None:
    """SCENARIOS 22: no list is no verdict. It is said once."""

    async def act(stage: Stage) -> None:
        await stage.until(lambda: len(stage.there) == 2)
        stage.dynamo.is_deaf = True
        await asyncio.sleep(600.0)
        assert len(stage.there) == 2
        assert sum("can't be asked" in text for text in stage.said) == 1
        before = stage.dynamo.num_listed
        stage.dynamo.is_deaf = False
        await stage.until(lambda: stage.dynamo.num_listed > before, 2 * MAX_LIST_S)
        assert stage.goodbyes == []

    play(two_workers(), tmp_path, act)


@pytest.mark.parametrize("listing", [{"protocol_version": 9, "workers": []}, [], {"workers": None}])
def test_an_answer_that_is_none_lets_nobody_go(listing: Any, tmp_path: Path) -> None:
    """Another service on that port, or a newer Dynamo."""

    async def act(stage: Stage) -> None:
        await stage.until(lambda: len(stage.there) == 2)
        stage.dynamo.listing = listing
        await asyncio.sleep(60.0)
        assert len(stage.there) == 2
        assert stage.goodbyes == []

    play(two_workers(), tmp_path, act)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_front_end_that_lists_nobody_ends_no_work(tmp_path: Path, is_silent: bool) -> None:
    """Some seconds after its own restart. Unless the worker's process doesn't answer either."""
    dynamo = two_workers()
    # Found in the middle of somebody's update, whose pause holds for FOUND_LEASE_S.
    dynamo.workers[ONE].is_paused, dynamo.workers[ONE].label = True, "0.7"

    async def act(stage: Stage) -> None:
        loop = asyncio.get_running_loop()
        await stage.until(lambda: len(stage.there) == 2)
        began_s = loop.time()
        stage.lists()
        if is_silent:
            stage.dynamo.workers[ONE].late_s = 1000.0
        await stage.until(lambda: len(stage.goodbyes) == 1)
        await stage.until(lambda: len(stage.goodbyes) == 2)
        assert {bye.reason for bye in stage.goodbyes} == {"Dynamo doesn't list it any more"}
        assert [bye.instance_id for bye in stage.goodbyes][1] == "1"
        assert (loop.time() - began_s < FOUND_LEASE_S) is is_silent

    play(dynamo, tmp_path, act)


def test_static_urls_are_adopted_under_the_names_that_the_workers_say(tmp_path: Path) -> None:
    """Without discovery; one that isn't there yet is waited for."""
    dynamo = two_workers()
    two = dynamo.workers.pop(TWO)

    async def act(stage: Stage) -> None:
        await stage.until(lambda: "1" in stage.there)
        assert any(text.startswith(f"{TWO} can't be asked") for text in stage.said)
        stage.dynamo.workers[TWO] = two
        await stage.until(lambda: str(2**64 - 1) in stage.there, 100.0)
        routes = stage.there["1"].descriptor.routes
        assert {"pause_generation", "update_weights_from_disk", "update_weights_from_distributed"} <= set(routes)
        assert not {"pause_generation", "resume_generation"} & {r for r, body in two.calls if isinstance(body, dict)}

    play(dynamo, tmp_path, act, urls=(ONE, TWO))


def test_a_silent_process_is_given_up_after_a_while_and_not_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    """SCENARIOS 21: a stopped process refuses nothing, and says nothing."""
    monkeypatch.setattr(adoption_module, "MAX_SILENT", 3)

    async def act(stage: Stage) -> None:
        await stage.until(lambda: len(stage.there) == 2)
        blocked = asyncio.Event()
        handle = stage.dynamo.handle_async_request

        async def silent(request: Any) -> Any:
            if str(request.url).startswith(ONE):
                await blocked.wait()
            return await handle(request)

        stage.dynamo.handle_async_request = silent  # type: ignore[method-assign]
        await asyncio.sleep(10.0)
        assert "1" in stage.there
        await stage.until(lambda: "1" not in stage.there)
        assert "hasn't answered 3 times" in stage.goodbyes[-1].reason
        assert len(stage.there) == 1

    play(two_workers(), tmp_path, act)


@pytest.mark.parametrize("how", ["the sidecar stops", "the process ends", "a call is overdue"])
def test_copies_of_adapters_go_with_the_process_that_reads_them(tmp_path: Path, monkeypatch: Any, how: str) -> None:
    """And not with the sidecar, or with its patience. Its successor has another name."""
    copies = tmp_path / "copies"
    of_one = copies / f"{NAMESPACE}.backend.1"

    async def act(stage: Stage) -> None:
        await stage.until(lambda: len(stage.there) == 2)
        for path in (of_one, copies / f"{NAMESPACE}.prefill.{2**64 - 1}"):
            (path / ("a" * 64)).mkdir(parents=True)
        if how == "the process ends":
            del stage.dynamo.workers[ONE]
        if how == "a call is overdue":
            monkeypatch.setattr(EngineCalls, "_overdue", lambda calls: "its ranks don't answer")
        if how != "the sidecar stops":
            await stage.until(lambda: any("has left" in text for text in stage.said))
            assert "1" not in stage.there

    play(two_workers(), tmp_path, act, lora_cache_dir=str(copies))
    assert of_one.exists() is (how != "the process ends")
    assert len(list(copies.iterdir())) == (2 if of_one.exists() else 1)


def test_copies_that_cannot_be_removed_since_their_disk_hangs_keep_nobody(tmp_path: Path, monkeypatch: Any) -> None:
    """A worker that is gone can be met again; what is left goes with those that nobody meets any more."""
    monkeypatch.setattr(adoption_module, "DROP_S", 0.01)
    is_back, ended = threading.Event(), threading.Event()

    def drop(files: LoraFiles) -> None:
        with hangs():
            is_back.wait(60.0)
        ended.set()

    monkeypatch.setattr(LoraFiles, "drop", drop)

    async def act(stage: Stage) -> None:
        await stage.until(lambda: len(stage.there) == 2)
        del stage.dynamo.workers[ONE]
        await stage.until(lambda: any("has left" in text for text in stage.said))
        assert not ended.is_set()
        is_back.set()
        assert ended.wait(60.0)

    play(two_workers(), tmp_path, act)


def test_a_bug_of_ours_costs_one_worker_and_it_is_tried_again(tmp_path: Path, monkeypatch: Any) -> None:
    """It isn't left on the bus without anybody who looks whether its process is there."""

    async def act(stage: Stage) -> None:
        await stage.until(lambda: len(stage.there) == 2)
        check_alive = DynamoEngine.check_alive

        async def broken(engine: DynamoEngine, limit_s: float) -> None:
            if engine.info.model == "model" and limit_s == adoption_module.ALIVE_LIMIT_S:
                raise ZeroDivisionError
            await check_alive(engine, limit_s)

        monkeypatch.setattr(DynamoEngine, "check_alive", broken)
        await stage.until(lambda: len(stage.goodbyes) == 2, 5.0)
        monkeypatch.setattr(DynamoEngine, "check_alive", check_alive)
        assert {bye.reason for bye in stage.goodbyes} == {"nobody watches its process any more"}
        assert any("has left: ZeroDivisionError; see the log" in text for text in stage.said)
        await stage.until(lambda: len(stage.there) == 2)

    play(two_workers(), tmp_path, act)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (Where(), "name the RL port"),
        (Where(discovery=("http://a:1", "http://a:1/")), "given twice"),
        (Where(system_urls=("http://0.0.0.0:1",)), "address to listen on"),
        (Where(discovery=("a:1",)), "http://HOST:PORT"),
        (Where(discovery=("http://user:pw@a:1",)), "credentials"),
    ],
)
def test_a_wrong_url_is_refused_at_the_start(where: Where, words: str) -> None:
    """SCENARIOS 58: before anything is connected."""
    with pytest.raises(ConfigError, match=words):
        where.sources()


def test_credentials_go_to_discovery_and_to_the_workers_on_its_host() -> None:
    """SCENARIOS 43: and they don't show."""
    where = Where(discovery=("http://a:1",), api_key="sesame", headers={"X-Tenant": "blue"})
    peer = where.peer("http://a:2")
    assert dict(peer.headers) == {"Authorization": "Bearer sesame", "X-Tenant": "blue"}
    assert "sesame" not in repr(where)
    (source,) = where.sources()
    assert isinstance(source, Discovery)
    assert dict(source._peer.headers) == dict(peer.headers)


def test_the_url_of_discovery_may_be_given_with_its_path() -> None:
    """People paste it."""
    assert Discovery(Peer.of("http://a:1/v1/rl/workers")).name == "http://a:1"


def test_credentials_go_to_hosts_that_the_user_has_named_only(caplog: pytest.LogCaptureFixture) -> None:
    """SCENARIOS 43: who announces an address gets no key by that."""
    where = Where(
        ("http://front:8001",),
        ("http://one:9000",),
        api_key="sesame",
        headers={"X-Tenant": "blue"},
        trusted_hosts=("Two", "[::7]"),
    )
    for url in ("http://front:9000", "http://one:1", "http://two:9000", "http://[::7]:1", "http://front:8001"):
        assert where.peer(url).headers == {"Authorization": "Bearer sesame", "X-Tenant": "blue"}
    for url in ("http://evil:9000", "http://front.evil:8001", "http://[::8]:1"):
        assert where.peer(url).headers == {}
    assert "--trust-host evil" in caplog.text
    assert "sesame" not in caplog.text
