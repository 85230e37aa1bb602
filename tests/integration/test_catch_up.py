"""Real processes, real engines and a real process group: a killed worker comes back by itself, and nobody is paused."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus.bus import Bus
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.schemas import Announcement, GenerationPaused, WorkerEvent, WorkerMessage
from rlbus.server import EmbeddedServer
from rlbus.sync import LoopThread, Trainer
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.torch_lm.model import load_model
from tests.integration.test_cli import NAMESPACE, Process, rlbus
from tests.tries import best_of, in_time

pytestmark = [pytest.mark.integration, pytest.mark.alone, pytest.mark.timeout(600)]

# Issue 3: admitted within 5 s plus its own start and one transfer.
BOUND_S = 5.0
START_S = 120.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A real server on loopback."""
    loop = LoopThread("test-server")
    server = EmbeddedServer()
    loop.call(server.__aenter__())
    yield server.url
    loop.call(server.__aexit__(None, None, None))
    loop.stop()


class Fleet:
    """A controller and two torch engines, each a process; `events` is what the workers say of pauses."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.model = make_tiny_model(folder / "a", seed=1)
        self.weights = load_model(make_tiny_model(folder / "b", seed=2))
        self.roots = folder / "snapshots"
        self.controller = Process("controller", "--json", url=url)
        self.workers = {number: self.start(number) for number in ("1", "2")}
        for process in (self.controller, *self.workers.values()):
            process.document()

    def start(self, number: str) -> Process:
        """Start a worker; not waited for."""
        argv = ["worker", "torch", str(self.model), "--json", "--instance-id", number]
        return Process(*argv, "--weight-root", str(self.roots), url=self.url)

    def member(self, number: str) -> dict[str, Any]:
        """What the controller says of a worker."""
        document = rlbus("workers", "--json", url=self.url).document
        return next(m for m in document["workers"] if m["worker"] == f"backend/{number}")

    def greedy(self, number: str) -> list[str]:
        """What a worker's engine generates."""
        base = self.member(number)["descriptor"]["completions_url"]
        model = self.member(number)["descriptor"]["model"]
        body = {"model": model, "prompt": [7, 8, 9], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{base}/v1/completions", json=body, timeout=START_S)
        answer.raise_for_status()
        return [choice["text"] for choice in answer.json()["choices"]]

    def close(self) -> None:
        """End everything."""
        for process in (*self.workers.values(), self.controller):
            process.kill()


class Spy:
    """Hears the workers: who was paused, and when which boot of worker 2 spoke."""

    def __init__(self, url: str) -> None:
        self.paused: list[str] = []
        self.boots: list[tuple[float, str]] = []
        self._loop = LoopThread("test-spy")
        self._bus = self._loop.call(self._open(url))

    async def _open(self, url: str) -> Bus:
        bus = await connect_bus(BusConfig(url=url), name="spy")
        bus.subscribe(f"dyn.{NAMESPACE}.backend.event.*", WorkerEvent, lambda event, _: self._hear(event))
        bus.subscribe(f"dyn.{NAMESPACE}.backend.worker.2", WorkerMessage, lambda message, _: self._note(message))
        await bus.barrier(START_S)
        return bus

    def _hear(self, event: WorkerEvent) -> None:
        if isinstance(event, GenerationPaused):
            self.paused.append(event.instance_id)

    def _note(self, message: WorkerMessage) -> None:
        if isinstance(message, Announcement):
            self.boots.append((time.monotonic(), message.boot_id))

    def close(self) -> None:
        """Disconnect."""
        self._loop.call(self._bus.aclose())
        self._loop.stop()


@pytest.fixture(scope="module")
def fleet(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Both workers are there."""
    with contextlib.closing(Fleet(url, tmp_path_factory.mktemp("catch-up"))) as running:
        yield running


@pytest.mark.parametrize(("snapshot", "step"), [("memory", 1), ("disk", 3)])
def test_a_killed_worker_is_admitted_again_without_another_update(fleet: Fleet, snapshot: str, step: int) -> None:
    """SIGKILL, started again under its id: it has the fleet's version and generates what the other one does.

    The other is never paused for it, and the next update has both.
    """
    options: dict[str, Any] = {"snapshot": snapshot}
    if snapshot == "disk":
        options["snapshot_dir"] = fleet.roots
    with contextlib.closing(Spy(fleet.url)) as spy, Trainer(fleet.url, namespace=NAMESPACE, **options) as trainer:
        trainer.wait_ready(num_workers=2)
        assert trainer.update_weights(fleet.weights, version=step).ok
        expected = fleet.greedy("1")
        first_boot = fleet.member("2")["boot_id"]

        def play() -> dict[str, Any]:
            """Kill it and start it again; the worker as it is then."""
            before = {boot_id for _, boot_id in spy.boots} | {first_boot}
            spy.paused.clear()
            fleet.workers["2"].kill()
            fleet.workers["2"] = fleet.start("2")
            fleet.workers["2"].document()
            until_s = time.monotonic() + START_S
            while not (member := fleet.member("2"))["admitted"] or member["boot_id"] in before:
                assert time.monotonic() < until_s, member
                time.sleep(0.05)
            took_s = time.monotonic() - next(at for at, boot_id in spy.boots if boot_id not in before)
            in_time("the catch-up", took_s, BOUND_S)
            return member

        member = best_of(play)
        assert member["status"]["weights"]["version"] == [0, step]
        assert member["status"]["generation"] == "running"
        assert fleet.greedy("2") == expected
        assert spy.paused == ["2"]
        report = trainer.update_weights(fleet.weights, version=step + 1)
        assert [outcome.outcome.value for outcome in report.report.outcomes] == ["ok", "ok"]
        history = rlbus("history", "--json", url=fleet.url).document["items"]
        assert [item["op"] for item in history[:2]] == ["update_weights", "catch_up"]
