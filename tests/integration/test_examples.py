"""The examples run as their first lines say: a server, a controller, a torch worker, and the script."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbus.workers.torch_lm.make import make_tiny_model

# Importing torch takes most of it.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

LIMIT_S = 250.0

EXAMPLES = Path(__file__).parents[2] / "examples"


def start(*argv: str, url: str | None = None) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Start a command with `--json`; the process, and its document once it is ready."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("RLBUS_")}
    env |= {"OMP_NUM_THREADS": "1"} | ({} if url is None else {"RLBUS_URL": url})
    command = [sys.executable, "-m", "rlbus", *argv, "--json"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
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
        ("train_loop.py", ["1 workers are ready", "step 1: loss", "step 2: loss", "step 3: loss"]),
        ("trl_like.py", ["step 1: 8 rollouts, reward", "step 2: 8 rollouts, reward", "step 3: 8 rollouts, reward"]),
        ("async_loop.py", ["step 7: 1 rollouts;", "step 8: 1 rollouts;", "step 9: 1 rollouts;"]),
    ],
)
def test_an_example_runs_and_every_update_is_ok(url: str, model: Path, script: str, lines: list[str]) -> None:
    """Three updates each, every script going on from the version that the one before left."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), str(model)],
        env={**os.environ, "RLBUS_URL": url, "RLBUS_NAMESPACE": "default", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == len(lines)
    for text, begin in zip(told, lines, strict=True):
        assert text.startswith(begin)
        assert "step" not in begin or ": ok, 1 of 1 workers" in text


def run(script: str, *argv: str, cwd: Path) -> list[str]:
    """The lines that an example prints, in this folder."""
    command = [sys.executable, str(EXAMPLES / script), *argv]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def fleet_of(url: str) -> tuple[int, str]:
    """The step that the fleet is at, and where its one torch worker serves completions."""
    env = {**os.environ, "RLBUS_URL": url, "RLBUS_NAMESPACE": "default"}
    command = [sys.executable, "-m", "rlbus", "status", "--json"]
    asked = subprocess.run(command, env=env, capture_output=True, timeout=LIMIT_S, check=True)
    fleet = json.loads(asked.stdout)
    [member] = [m for m in fleet["members"] if m["descriptor"]["component"] == "backend"]
    return 0 if fleet["version"] is None else fleet["version"][1], member["descriptor"]["completions_url"]


def test_the_orchestrator_of_prime_rl_needs_nothing_but_http(
    document: dict[str, str], model: Path, weights: Path
) -> None:
    """Discovery, pause, a folder, resume; the fleet is at the next versions then, whatever it had before. The folder
    may be named as seen from here, and be that of an earlier run.
    """
    for _ in range(2):
        before, completions = fleet_of(document["url"])
        where = (document["http_url"], str(model), weights.name, completions)
        assert run("prime_rl_like.py", *where, cwd=weights.parent) == [
            "1 workers with 1 ranks are ready",
            f"step {before + 1}: 2 rollouts; the fleet is at 0.{before + 1}",
            f"step {before + 2}: 2 rollouts; the fleet is at 0.{before + 2}",
        ]


def test_the_orchestrator_of_nemo_rl_refits_while_workers_generate(
    document: dict[str, str], model: Path, weights: Path
) -> None:
    """Dynamo's discovery, and its routes on the workers' own addresses; the fleet knows of it all the same. Its folder
    may be named as seen from here, and have steps of a fleet that is no more.
    """
    before, completions = fleet_of(document["url"])
    (weights / f"nemo_step_{before + 1}").mkdir()
    assert run("nemo_rl_like.py", document["http_url"], str(model), weights.name, completions, cwd=weights.parent) == [
        "1 workers with 1 ranks are ready",
        f"step {before + 1}: refitted paused; 64 tokens",
        f"step {before + 2}: refitted while it generated; 64 tokens",
    ]
    assert fleet_of(document["url"])[0] == before + 2


def test_the_custom_engine_is_paused_and_resumed_and_refuses_the_rest(url: str) -> None:
    """An adapter of one's own in a component of its own; a flush is refused, since it does not serve that."""
    env = {**os.environ, "RLBUS_URL": url, "RLBUS_NAMESPACE": "default", "RLBUS_COMPONENT": "ticker"}
    engine = subprocess.Popen([sys.executable, str(EXAMPLES / "custom_engine.py")], env=env, stdout=subprocess.PIPE)
    assert engine.stdout is not None
    try:
        assert engine.stdout.readline() == b"ready\n"
        found = {}
        for verb in ("pause", "resume", "flush"):
            command = [sys.executable, "-m", "rlbus", verb, "--component", "ticker", "--json"]
            done = subprocess.run(command, env=env, capture_output=True, timeout=LIMIT_S)
            found[verb] = (done.returncode, json.loads(done.stdout))
        assert found["pause"][0] == found["resume"][0] == 0, found
        assert found["flush"][0] == 3, found
        assert found["flush"][1]["error"]["code"] == "no_route", found
    finally:
        engine.terminate()
        engine.communicate(timeout=LIMIT_S)
    assert engine.returncode == 0
