"""The examples run as their first lines say: a server, a controller, a torch worker, and the script."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbus.workers.torch_lm.make import make_tiny_model

pytestmark = pytest.mark.integration

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
def url(model: Path) -> Iterator[str]:
    """A bus with a controller and one torch worker."""
    up, document = start("up")
    worker, _ = start("worker", "torch", str(model), url=document["url"])
    yield document["url"]
    for process in (worker, up):
        process.terminate()
        process.communicate(timeout=30.0)


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ("train_loop.py", ["1 workers are ready", "step 1: loss", "step 2: loss", "step 3: loss"]),
        ("async_loop.py", ["step 4: 1 rollouts;", "step 5: 1 rollouts;", "step 6: 1 rollouts;"]),
    ],
)
def test_an_example_runs_and_every_update_is_ok(url: str, model: Path, script: str, lines: list[str]) -> None:
    """Three updates each, the second script going on from the version that the first one left."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), str(model)],
        env={**os.environ, "RLBUS_URL": url, "RLBUS_NAMESPACE": "default", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == len(lines)
    for text, begin in zip(told, lines, strict=True):
        assert text.startswith(begin)
        assert "step" not in begin or ": ok, 1 of 1 workers" in text


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
            done = subprocess.run(command, env=env, capture_output=True, timeout=60)
            found[verb] = (done.returncode, json.loads(done.stdout))
        assert found["pause"][0] == found["resume"][0] == 0, found
        assert found["flush"][0] == 3, found
        assert found["flush"][1]["error"]["code"] == "no_route", found
    finally:
        engine.terminate()
        engine.communicate(timeout=30.0)
    assert engine.returncode == 0
