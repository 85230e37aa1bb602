"""Real processes, real engines and a real process group: a killed worker comes back by itself, and nobody is paused."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
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
from tests.integration.commands import NAMESPACE, Process, again_until, asked, forgive_late_op, program
from tests.tries import TooLateError, best_of, in_time

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
        self._steps = itertools.count(1)
        self.controller = program("controller", "--json", url=url)
        self.workers = {number: self.start(number) for number in ("1", "2")}
        for process in (self.controller, *self.workers.values()):
            process.document()

    def start(self, number: str) -> Process:
        """Start a worker; not waited for."""
        argv = ["worker", "torch", str(self.model), "--json", "--instance-id", number]
        return program(*argv, "--weight-root", str(self.roots), url=self.url)

    def member(self, number: str, is_so: Callable[[dict[str, Any]], bool] = bool) -> dict[str, Any]:
        """What the controller says of a worker, once it knows it, and it is so."""
        until_s = time.monotonic() + START_S
        while True:
            members = asked(self.url, "workers")["workers"]
            for member in members:
                if member["worker"] == f"backend/{number}" and is_so(member):
                    return member  # type: ignore[no-any-return]
            assert time.monotonic() < until_s, members
            time.sleep(0.05)

    def update(self, trainer: Trainer) -> int:
        """Bring both workers to the next step; which it is."""

        def play() -> int:
            step = next(self._steps)
            report = trainer.update_weights(self.weights, version=step, check=False).report
            forgive_late_op(report)
            assert [outcome.outcome.value for outcome in report.outcomes] == ["ok", "ok"]
            return step

        return best_of(play)

    def greedy(self, number: str) -> list[str]:
        """What a worker's engine generates."""
        descriptor = self.member(number)["descriptor"]
        base = descriptor["completions_url"]
        body = {
            "model": descriptor["model"],
            "prompt": [7, 8, 9],
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
        }
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
        bus = await connect_bus(BusConfig(url=url, connect_s=START_S), name="spy")
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


@pytest.mark.parametrize("snapshot", ["memory", "disk"])
def test_a_killed_worker_is_admitted_again_without_another_update(fleet: Fleet, snapshot: str) -> None:
    """SIGKILL, started again under its id: it has the fleet's version and generates what the other one does.

    The other is never paused for it, and the next update has both.
    """
    options: dict[str, Any] = {"snapshot": snapshot}
    if snapshot == "disk":
        options["snapshot_dir"] = fleet.roots
    with contextlib.closing(Spy(fleet.url)) as spy, Trainer(fleet.url, namespace=NAMESPACE, **options) as trainer:
        trainer.wait_ready(num_workers=2)
        step = fleet.update(trainer)
        expected = fleet.greedy("1")
        first_boot = fleet.member("2")["boot_id"]

        def play() -> dict[str, Any]:
            """Kill it and start it again; the worker as it is then."""
            before = {boot_id for _, boot_id in spy.boots} | {first_boot}
            spy.paused.clear()
            fleet.workers["2"].kill()
            fleet.workers["2"] = fleet.start("2")
            fleet.workers["2"].document()
            member = fleet.member("2", lambda found: found["admitted"] and found["boot_id"] not in before)
            admitted_s = time.monotonic()
            again_until(lambda: "2" in spy.paused and any(boot_id not in before for _, boot_id in spy.boots))
            in_time("the catch-up", admitted_s - next(at for at, id_ in spy.boots if id_ not in before), BOUND_S)
            assert "1" not in spy.paused
            if len(spy.paused) > 1:
                raise TooLateError(f"a controller that stood still began twice: {spy.paused}")
            return member

        member = best_of(play)
        assert member["status"]["weights"]["version"] == [0, step]
        assert member["status"]["generation"] == "running"
        assert fleet.greedy("2") == expected
        assert spy.paused == ["2"]
        fleet.update(trainer)
        done = [item["op"] for item in asked(fleet.url, "history")["items"]]
        assert done[0] == "update_weights"
        assert next(op for op in done if op != "update_weights") == "catch_up"
