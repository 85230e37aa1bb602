"""A fleet of real programs: `rlbus up` (a NATS server and a controller), workers, and commands, as a user has them."""

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
from tests.peers.programs import START_S, Program, Programs, clean_env

POLL_S = 0.25
# A list of workers is one, too, when none of them is there.
ANY_CODE = range(6)


class Fleet:
    """One namespace on a bus of its own. Its programs end with `programs`; `options` are those of `rlbus up`."""

    def __init__(self, programs: Programs, folder: Path, *options: str) -> None:
        self._programs = programs
        self._env = {"XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        up = programs.start("up", [sys.executable, "-m", "rlbus", "up", *options, "--json"], clean_env(**self._env))
        self.url: str = up.document()["url"]

    def env(self, **more: str) -> dict[str, str]:
        """The environment of a program that belongs to the fleet."""
        return clean_env(**self._env, RLBUS_URL=self.url, **more)

    def start(self, name: str, *argv: str, **env: str) -> Program:
        """Start `rlbus <argv>`, a service."""
        return self._programs.start(name, [sys.executable, "-m", "rlbus", *argv], self.env(**env))

    def rlbus(self, *argv: str, expected: Container[int] = (0,)) -> Any:
        """Run a command to its end, in this process; its JSON document. `expected` are exit codes that are fine."""
        env: dict[str, str | None] = {name: None for name in os.environ if name.startswith("RLBUS_")}
        done = CliRunner().invoke(app, [*argv, "--json"], env={**env, "RLBUS_URL": self.url})
        assert done.exit_code in expected, f"{argv}: {done.exit_code}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    def member(self, instance_id: str) -> dict[str, Any] | None:
        """What the controller says of a worker; None if it doesn't know it."""
        found = self.rlbus("workers", expected=ANY_CODE)["workers"]
        return next((m for m in found if m["worker"].endswith(f"/{instance_id}")), None)

    def until(self, instance_id: str, is_true: Callable[[dict[str, Any]], bool], limit_s: float = START_S) -> Any:
        """Wait until what the controller says of a worker is so; what it says then."""
        ends_s = time.monotonic() + limit_s
        while True:
            member = self.member(instance_id)
            if member is not None and is_true(member):
                return member
            assert time.monotonic() < ends_s, f"not within {limit_s:g} s: {member}"
            time.sleep(POLL_S)


def completion(
    url: str, model: str, *, num_tokens: int = 16, headers: dict[str, str] | None = None, limit_s: float = 60.0
) -> list[int]:
    """Greedy token ids from a vLLM server."""
    body = {
        "model": model,
        "prompt": [7, 8, 9, 10],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=limit_s, trust_env=False)
    answer.raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


def is_gone(pid: int) -> bool:
    """Whether a process has ended, or waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"
