"""The examples run as their first lines say: a server, a controller, a torch worker, and the script."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlbus.workers.torch_lm.make import make_tiny_model
from tests.integration.commands import CONNECT_S, asked, programs_forgiven
from tests.tries import best_of

# Importing torch takes most of it.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

LIMIT_S = 250.0
NAMESPACE = "default"

EXAMPLES = Path(__file__).parents[2] / "examples"


def environ(url: str | None) -> dict[str, str]:
    """What a user would have set, for this bus if it is one that there is."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("RLBUS_")}
    env |= {"OMP_NUM_THREADS": "1", "RLBUS_CONNECT_S": CONNECT_S}
    return env if url is None else env | {"RLBUS_URL": url, "RLBUS_NAMESPACE": NAMESPACE}


def start(*argv: str, url: str | None = None) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Start a command with `--json`; the process, and its document once it is ready."""
    command = [sys.executable, "-m", "rlbus", *argv, "--json"]
    process = subprocess.Popen(command, env=environ(url), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that trainers write to, and the worker may load from."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def document(model: Path, weights: Path) -> Iterator[dict[str, str]]:
    """A bus with a controller, which serves HTTP, and one torch worker."""
    up, document = start("up", "--http-port", "0")
    worker, _ = start("worker", "torch", str(model), "--weight-root", str(weights), url=document["url"])
    yield document
    for process in (worker, up):
        process.terminate()
        process.communicate(timeout=LIMIT_S)


@pytest.fixture(scope="module")
def url(document: dict[str, str]) -> str:
    """Of the bus."""
    return document["url"]


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ("train_loop.py", ["1 workers are ready", "step {0}: loss", "step {1}: loss", "step {2}: loss"]),
        ("trl_like.py", ["step 1: 8 rollouts, reward", "step 2: 8 rollouts, reward", "step 3: 8 rollouts, reward"]),
        ("async_loop.py", ["step {0}: 1 rollouts;", "step {1}: 1 rollouts;", "step {2}: 1 rollouts;"]),
    ],
)
def test_an_example_runs_and_every_update_is_ok(url: str, model: Path, script: str, lines: list[str]) -> None:
    """Three updates each, every script going on from the version that the one before left."""

    def play() -> None:
        first = fleet_of(url)[0] + 1
        with programs_forgiven(url, NAMESPACE):
            told = run(script, str(model), url=url)
            assert len(told) == len(lines)
            for text, begin in zip(told, lines, strict=True):
                assert text.startswith(begin.format(first, first + 1, first + 2))
                assert "step" not in begin or ": ok, 1 of 1 workers" in text

    best_of(play)


def run(script: str, *argv: str, cwd: Path | None = None, url: str | None = None) -> list[str]:
    """The lines that an example prints, in this folder."""
    command = [sys.executable, str(EXAMPLES / script), *argv]
    done = subprocess.run(command, env=environ(url), cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def fleet_of(url: str) -> tuple[int, str]:
    """The step that the fleet is at, and where its one torch worker serves completions."""
    until_s = time.monotonic() + LIMIT_S
    members: list[Any] = []
    while not members:
        assert time.monotonic() < until_s
        fleet = asked(url, "status", namespace=NAMESPACE)
        members = [m for m in fleet["members"] if m["descriptor"]["component"] == "backend"]
    [member] = members
    return 0 if fleet["version"] is None else fleet["version"][1], member["descriptor"]["completions_url"]


def test_the_orchestrator_of_prime_rl_needs_nothing_but_http(
    document: dict[str, str], model: Path, weights: Path
) -> None:
    """Discovery, pause, a folder, resume; the fleet is at the next versions then, whatever it had before. The folder
    may be named as seen from here, and be that of an earlier run.
    """

    def play() -> None:
        before, completions = fleet_of(document["url"])
        where = (document["http_url"], str(model), weights.name, completions)
        with programs_forgiven(document["url"], NAMESPACE):
            assert run("prime_rl_like.py", *where, cwd=weights.parent) == [
                "1 workers with 1 ranks are ready",
                f"step {before + 1}: 2 rollouts; the fleet is at 0.{before + 1}",
                f"step {before + 2}: 2 rollouts; the fleet is at 0.{before + 2}",
            ]

    for _ in range(2):
        best_of(play)


def test_the_orchestrator_of_nemo_rl_refits_while_workers_generate(
    document: dict[str, str], model: Path, weights: Path
) -> None:
    """Dynamo's discovery, and its routes on the workers' own addresses; the fleet knows of it all the same. Its folder
    may be named as seen from here, and have steps of a fleet that is no more.
    """

    def play() -> None:
        before, completions = fleet_of(document["url"])
        (weights / f"nemo_step_{before + 1}").mkdir(exist_ok=True)
        where = (document["http_url"], str(model), weights.name, completions)
        with programs_forgiven(document["url"], NAMESPACE):
            assert run("nemo_rl_like.py", *where, cwd=weights.parent) == [
                "1 workers with 1 ranks are ready",
                f"step {before + 1}: refitted paused; 64 tokens",
                f"step {before + 2}: refitted while it generated; 64 tokens",
            ]
            assert fleet_of(document["url"])[0] == before + 2

    best_of(play)


def test_the_custom_engine_is_paused_and_resumed_and_refuses_the_rest(url: str) -> None:
    """An adapter of one's own in a component of its own; a flush is refused, since it does not serve that."""
    env = environ(url) | {"RLBUS_COMPONENT": "ticker"}
    engine = subprocess.Popen([sys.executable, str(EXAMPLES / "custom_engine.py")], env=env, stdout=subprocess.PIPE)
    assert engine.stdout is not None

    def play() -> None:
        with programs_forgiven(url, NAMESPACE):
            found = {}
            for verb in ("pause", "resume", "flush"):
                command = [sys.executable, "-m", "rlbus", verb, "--component", "ticker", "--json"]
                done = subprocess.run(command, env=env, capture_output=True, timeout=LIMIT_S)
                found[verb] = (done.returncode, json.loads(done.stdout))
            assert found["pause"][0] == found["resume"][0] == 0, found
            assert found["flush"][0] == 3, found
            assert found["flush"][1]["error"]["code"] == "no_route", found

    try:
        assert engine.stdout.readline() == b"ready\n"
        best_of(play)
    finally:
        engine.terminate()
        engine.communicate(timeout=LIMIT_S)
    assert engine.returncode == 0
