"""One project of docker-compose.yml: up, what its containers say, down, what is left."""

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rlbus.demo.events import Failed, StepDone, TrainerEvent
from tests.compose.daemon import ASK_S, ROOT, Docker, SetupError
from tests.peers.programs import CONNECT_S, free_port

NAMESPACE = "demo"
SERVICES = ("nats", "controller", "prefill", "decode")
# Each of these takes some 40 s; on a loaded machine `up` has taken 300.
UP_S = 900.0
DOWN_S = 300.0
HEALTHY_S = 300.0
# A trainer's 24 updates, with its start.
TRAIN_S = 300.0
POLL_S = 0.3
TAIL_LINES = 40
# What a trainer does that is to train until it is stopped.
ENDLESS = 1_000_000


class Fleet:
    """A project of its own name, token and ports."""

    def __init__(self, docker: Docker, project: str, env: Mapping[str, str]) -> None:
        self.docker = docker
        self.project = project
        self.token = f"t{secrets.token_hex(8)}"
        self.port, self.http_port = free_port(), free_port()
        self._env = {
            **env,
            "RLBUS_TOKEN": self.token,
            "RLBUS_PORT": str(self.port),
            "RLBUS_HTTP_PORT": str(self.http_port),
        }

    @property
    def url(self) -> str:
        """The bus from outside."""
        return f"nats://127.0.0.1:{self.port}"

    def compose(self, *argv: str, limit_s: float, **env: str) -> str:
        """A command of Compose on the project."""
        return self.docker.compose("--project-name", self.project, *argv, env={**self._env, **env}, limit_s=limit_s)

    def up(self, *services: str, updates: int = 24) -> None:
        """Start it all, or these only, with a trainer that does so many updates."""
        only = ("--no-deps", *services) if services else ()
        self.compose("up", "--detach", *only, limit_s=UP_S, RLBUS_UPDATES=str(updates))

    def down(self) -> None:
        """Stop and remove it."""
        self.compose("down", "--volumes", "--timeout", "20", limit_s=DOWN_S)

    def leftovers(self) -> list[str]:
        """Containers, networks and volumes of the project."""
        label = ("--quiet", "--filter", f"label=com.docker.compose.project={self.project}")
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return [f"{kind[0]} {line}" for kind in kinds for line in self.docker.run(*kind, *label).split()]

    def container(self, service: str) -> str:
        """The id of a service's container."""
        labels = {"project": self.project, "service": service}
        filters = [part for k, v in labels.items() for part in ("--filter", f"label=com.docker.compose.{k}={v}")]
        (found,) = self.docker.run("ps", "--all", "--quiet", *filters).split()
        return found

    def state(self, service: str) -> dict[str, Any]:
        """What Docker says of a service's container."""
        found: dict[str, Any] = json.loads(
            self.docker.run("inspect", "--format", "{{json .State}}", self.container(service))
        )
        return found

    def is_healthy(self, service: str) -> bool:
        """By its own check."""
        return bool(self.state(service)["Health"]["Status"] == "healthy")

    def steps(self) -> list[StepDone]:
        """What the trainer that runs now has done."""
        lines, _ = self.docker.outputs(self.container("trainer"))
        events = [msgspec.json.decode(line, type=TrainerEvent) for line in lines.splitlines()]
        failed = [event.message for event in events if isinstance(event, Failed)]
        assert not failed, failed
        return [event for event in events if isinstance(event, StepDone)]

    def wait_for_steps(self, num: int, limit_s: float) -> list[StepDone]:
        """That many more than now; only those."""
        before = len(self.steps())
        until(lambda: len(self.steps()) >= before + num, limit_s, f"{num} more updates after {before}")
        return self.steps()[before:]

    def rlbus(self, *argv: str, token: str | None = None) -> "subprocess.CompletedProcess[str]":
        """The CLI on this machine, through the published port."""
        env = {"RLBUS_URL": self.url, "RLBUS_NAMESPACE": NAMESPACE, "RLBUS_TOKEN": token or self.token}
        env["RLBUS_CONNECT_S"] = str(CONNECT_S)
        return subprocess.run(
            (sys.executable, "-m", "rlbus", *argv), env=env, cwd=ROOT, capture_output=True, text=True, timeout=ASK_S
        )

    def members(self) -> list[dict[str, Any]]:
        """What is said of each worker that may be sent rollouts; empty also while nobody can say."""
        done = self.rlbus("status", "--json")
        members = json.loads(done.stdout)["members"] if done.returncode == 0 else []
        return [member for member in members if member["admitted"]]

    def admitted(self) -> dict[str, int]:
        """World size of each."""
        return {m["worker"]: m["descriptor"]["world_size"] for m in self.members()}

    def tails(self) -> list[tuple[str, str]]:
        """(service, the end of what it said), for the report of a failed test."""
        found = []
        for service in (*SERVICES, "model", "trainer"):
            try:
                said = "\n".join(self.docker.outputs(self.container(service)))
            except (ValueError, SetupError) as exc:
                said = f"(no container: {exc})"
            found.append((service, "\n".join(line[:400] for line in said.splitlines()[-TAIL_LINES:])))
        return found


def until(is_so: Callable[[], bool], limit_s: float, what: str) -> None:
    """Look until it is so. Raises: AssertionError: not within `limit_s`."""
    until_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < until_s, f"not within {limit_s:g} s: {what}"
        time.sleep(POLL_S)
