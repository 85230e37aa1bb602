"""docker-compose.yml on real containers, from up to down, with a worker that is killed and a bus that is restarted.

In the order of a user's day: the tests share one fleet.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import rlbus
from rlbus.client import EventStream
from rlbus.demo.events import NO_VERSION, summarise
from rlbus.errors import DeadlineError
from rlbus.schemas import OpEnded, OpStarted
from tests.compose.daemon import ASK_S, ROOT
from tests.compose.fleet import HEALTHY_S, NAMESPACE, SERVICES, TRAIN_S, Fleet, until
from tests.peers.programs import CONNECT_S

# The first test waits for a daemon, a base image, wheels and a build.
pytestmark = [pytest.mark.compose, pytest.mark.timeout(2400)]

# A dead worker is known as such after 15 s; under load more.
GO_ON_S = 120.0
# An update takes a tenth of a second, freezing a container half of that.
NUM_TRIES = 60
HELD_S = 2.0
UPDATE = "update_weights"
NUM_UPDATES = 24
WORKERS = {"prefill/1": 1, "decode/2": 2}
MAX_GAP = 1e-3


def test_everything_becomes_healthy_and_the_demo_learns(taught: Fleet) -> None:
    """Updates reach both workers, proven by greedy tokens, and the trainer ends with 0.

    A worker that stands still for seconds is left out of one and caught up: most of them, and none at another version.
    """
    assert taught.state("trainer")["ExitCode"] == 0
    steps = taught.steps()
    assert [step.step for step in steps] == list(range(1, NUM_UPDATES + 1))
    for step in steps:
        assert set(step.versions) <= set(WORKERS)
        assert set(step.versions.values()) <= {f"0.{step.step}", NO_VERSION}
    num_on_all = sum(step.versions == dict.fromkeys(WORKERS, f"0.{step.step}") for step in steps)
    assert num_on_all > NUM_UPDATES // 2
    assert summarise("torch", len(WORKERS), steps).problems == []
    assert max(step.logprob_gap for step in steps) < MAX_GAP


def test_status_and_discovery_answer_outside_through_published_ports(taught: Fleet) -> None:
    """Both workers, of unequal size in two components, at addresses that others can reach; not without the token."""
    members: list[dict[str, Any]] = []

    def are_admitted() -> bool:
        members[:] = taught.members()
        return {m["worker"]: m["descriptor"]["world_size"] for m in members} == WORKERS

    until(are_admitted, HEALTHY_S, "both workers are admitted")
    for member in members:
        for url in (member["descriptor"]["completions_url"], member["descriptor"]["system_url"]):
            assert httpx.URL(url).host not in ("0.0.0.0", "127.0.0.1", "localhost")
    stranger = taught.rlbus("status", token="sesame")
    assert stranger.returncode != 0
    assert "sesame" not in stranger.stderr

    workers = f"http://127.0.0.1:{taught.http_port}/v1/rl/workers"

    def discovered() -> dict[str, int]:
        answer = httpx.get(workers, headers={"Authorization": f"Bearer {taught.token}"}, timeout=ASK_S)
        found = answer.json()["workers"] if answer.is_success else []
        return {f"{w['component']}/{w['instance_id']}": w["world_size"] for w in found}

    until(lambda: discovered() == WORKERS, HEALTHY_S, "both workers are discovered")
    assert httpx.get(workers, timeout=ASK_S).status_code == 401


def test_no_container_runs_as_root_or_is_published_beyond_loopback(fleet: Fleet) -> None:
    """The user of the image has no rights, and ports are this machine's only."""
    for service in SERVICES:
        uid = fleet.docker.run("exec", fleet.container(service), "id", "-u").strip()
        assert uid == "10001"
        ports = json.loads(
            fleet.docker.run("inspect", "--format", "{{json .HostConfig.PortBindings}}", fleet.container(service))
        )
        assert {b["HostIp"] for bound in (ports or {}).values() for b in bound} <= {"127.0.0.1"}


def test_a_second_trainer_teaches_the_same_fleet_anew(training: Fleet) -> None:
    """It opens an incarnation of its own, since its first step is older than the other's last."""
    steps = training.wait_for_steps(2, TRAIN_S)
    versions = {version for step in steps for version in step.versions.values()} - {NO_VERSION}
    assert {version.split(".")[0] for version in versions} == {"1"}
    assert sum(step.mismatches for step in steps) == 0


async def _end_of(events: EventStream, op_id: str, limit_s: float) -> OpEnded | None:
    """The end of an op, None if it hasn't ended in that time."""
    until_s = time.monotonic() + limit_s
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            event = await events.next(left_s)
        except DeadlineError:
            return None
        if isinstance(event, OpEnded) and event.op_id == op_id:
            return event
    return None


async def _freeze_within_update(fleet: Fleet, service: str) -> str:
    """Freeze a container while the fleet is updated, so that the update waits for it; the op's id."""
    container = fleet.container(service)
    async with rlbus.connect(fleet.url, namespace=NAMESPACE, token=fleet.token, connect_s=CONNECT_S) as bus:
        for _ in range(NUM_TRIES):
            async with bus.fleet.watch() as events:
                started = await events.next(GO_ON_S)
                while not (isinstance(started, OpStarted) and started.op == UPDATE):
                    started = await events.next(GO_ON_S)
                await asyncio.to_thread(fleet.docker.post, f"/containers/{container}/pause")
                # Its end may not have been heard: the controller may stand still, or be another.
                is_over = await _end_of(events, started.op_id, HELD_S) is not None
                if not is_over and (await bus.fleet.glance(deadline_s=GO_ON_S)).op_id == started.op_id:
                    return started.op_id
                await asyncio.to_thread(fleet.docker.post, f"/containers/{container}/unpause")
    raise AssertionError(f"each of {NUM_TRIES} updates was over before the container was frozen")


def until_on(training: Fleet, workers: set[str]) -> None:
    """Wait until the newest step is on these, and no others."""
    until(lambda: set(training.steps()[-1].versions) == workers, GO_ON_S, f"an update reaches {sorted(workers)}")


@pytest.mark.parametrize("service", ["decode"])
def test_a_worker_killed_in_mid_update_costs_no_update_and_comes_back(training: Fleet, service: str) -> None:
    """The update ends on the others, the next ones too; started again, it is caught up and takes part."""
    worker = next(w for w in WORKERS if w.startswith(service))
    training.wait_for_steps(1, TRAIN_S)
    op_id = asyncio.run(_freeze_within_update(training, service))
    training.docker.run("kill", training.container(service))

    steps = training.wait_for_steps(3, GO_ON_S)
    assert not any(worker in step.versions for step in steps[1:])
    until_on(training, set(WORKERS) - {worker})
    struck: list[dict[str, Any]] = []

    def is_told() -> bool:
        history = training.rlbus("history", "--limit", "100", "--json")
        items = json.loads(history.stdout)["items"] if history.returncode == 0 else []
        struck[:] = [item for item in items if item["op_id"] == op_id]
        return bool(struck)

    until(is_told, GO_ON_S, "the history has the update")
    # On the other it is ok, unless that one or the controller stood still for seconds.
    assert struck[0]["num_ok"] < struck[0]["num_workers"] == len(WORKERS)

    training.docker.run("start", training.container(service))
    until(lambda: training.is_healthy(service), HEALTHY_S, f"{service} is healthy")
    until(lambda: worker in training.admitted(), GO_ON_S, f"{worker} is admitted")
    steps = training.wait_for_steps(3, GO_ON_S)
    until_on(training, set(WORKERS))
    assert sum(step.mismatches + step.mixed for step in steps) == 0


def test_updates_go_on_when_the_bus_was_restarted(training: Fleet) -> None:
    """Everybody connects again by itself."""
    training.wait_for_steps(1, TRAIN_S)
    training.docker.run("restart", "--time", "10", training.container("nats"), limit_s=GO_ON_S)
    until(lambda: training.is_healthy("nats"), HEALTHY_S, "nats is healthy")
    training.wait_for_steps(3, GO_ON_S)
    until_on(training, set(WORKERS))
    until(lambda: training.admitted() == WORKERS, GO_ON_S, "both workers are admitted")
    assert training.state("controller")["Running"]


def test_down_leaves_nothing(other_fleet: Fleet) -> None:
    """No container, no network, no volume; that the large fleet leaves none is seen when it is taken down."""
    other_fleet.up("nats", "controller")
    assert {line.split()[0] for line in other_fleet.leftovers()} == {"ps", "network", "volume"}
    other_fleet.down()
    assert other_fleet.leftovers() == []


def test_everything_in_the_image_is_named() -> None:
    """What Docker gets of this folder is a list, so that no secret or build output of a user gets into an image."""
    lines = (Path(ROOT) / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
