"""A fleet of real programs: the NATS server of `rlbus up`, a controller, workers, and commands, as a user has them."""

import json
import os
import sys
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from rlbus.cli.app import app
from tests.peers.programs import CONNECT_S, START_S, Program, Programs, clean_env

POLL_S = 0.25
# What each command may take: its own limit is for users, and a program may stand still here for longer.
COMMAND_S = 300.0
# What a request may take, which a pause may hold.
ANSWER_S = 600.0
# A list of workers is one, too, when none of them is there.
ANY_CODE = range(6)


class Fleet:
    """One namespace on a bus of its own. Its programs end with `programs`; `options` are the controller's.

    It has no lease, which a controller that stands still for 2 s loses, and with it the op that runs. So the controller
    of `rlbus up` has another namespace, for itself.
    """

    def __init__(self, programs: Programs, folder: Path, *options: str) -> None:
        self._programs = programs
        self._env = {"XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        rlbus = (sys.executable, "-m", "rlbus")
        up = programs.start("up", [*rlbus, "up", "--namespace", "nobody", "--json"], clean_env(**self._env))
        self.url: str = up.document()["url"]
        single = ("controller", "--single", *options, "--json")
        programs.start("controller", [*rlbus, *single], self.env()).document()

    def env(self, **more: str) -> dict[str, str]:
        """The environment of a program that belongs to the fleet."""
        return clean_env(**self._env, RLBUS_URL=self.url, **more)

    def start(self, name: str, *argv: str, **env: str) -> Program:
        """Start `rlbus <argv>`, a service."""
        return self._programs.start(name, [sys.executable, "-m", "rlbus", *argv], self.env(**env))

    def rlbus(self, *argv: str, expected: Container[int] = (0,)) -> Any:
        """Run a command to its end, in this process; its JSON document. `expected` are exit codes that are fine."""
        env: dict[str, str | None] = {name: None for name in os.environ if name.startswith("RLBUS_")}
        env |= {"RLBUS_URL": self.url, "RLBUS_CONNECT_S": str(CONNECT_S)}
        done = CliRunner().invoke(app, [*argv, "--deadline", str(COMMAND_S), "--json"], env=env)
        assert done.exit_code in expected, f"{argv}: {done.exit_code}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    def workers(self) -> list[dict[str, Any]]:
        """What the controller says of each worker; nothing while it doesn't answer."""
        return list(self.rlbus("workers", expected=ANY_CODE).get("workers", ()))

    def member(self, instance_id: str) -> dict[str, Any] | None:
        """What the controller says of a worker; None if it doesn't know it."""
        return next((m for m in self.workers() if m["worker"].endswith(f"/{instance_id}")), None)

    def until(self, instance_id: str, is_true: Callable[[dict[str, Any]], bool], limit_s: float = START_S) -> Any:
        """Wait until what the controller says of a worker is so; what it says then."""
        ends_s = time.monotonic() + limit_s
        while True:
            member = self.member(instance_id)
            if member is not None and is_true(member):
                return member
            assert time.monotonic() < ends_s, f"not within {limit_s:g} s: {member}"
            time.sleep(POLL_S)


def completion(url: str, model: str, *, num_tokens: int = 16, headers: dict[str, str] | None = None) -> list[int]:
    """Greedy token ids from a vLLM server, which may be held by a pause meanwhile."""
    body = {
        "model": model,
        "prompt": [7, 8, 9, 10],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=ANSWER_S, trust_env=False)
    answer.raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


def is_gone(pid: int) -> bool:
    """Whether a process has ended, or waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"
