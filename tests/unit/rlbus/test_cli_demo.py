"""How `rlbus demo` ends when it can't: as every command does."""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlbus._process import Child
from rlbus.cli.app import app
from rlbus.demo import run
from rlbus.errors import BrokenError

pytestmark = pytest.mark.unit


def demo(*options: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the one document on stdout, and stderr."""
    done = CliRunner().invoke(app, ["demo", *options, "--json"])
    return done.exit_code, json.loads(done.stdout), done.stderr


def test_an_engine_that_it_does_not_know_is_one_document_and_wrong_usage() -> None:
    """With `--json`; the line on stderr says what to use."""
    code, document, told = demo("--engine", "foo")
    assert (code, document["exit_code"]) == (2, 2)
    assert document["error"]["code"] == "ConfigError"
    assert document["error"]["message"] in told
    assert "use one of torch, vllm" in told


def test_a_piece_of_the_demo_that_fails_is_one_document_and_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It isn't "nothing there": what it misses, it has started itself."""

    async def fail(*_: object) -> None:
        raise BrokenError("trainer", "ended after 3 of 20 updates")

    monkeypatch.setattr(run, "_run", fail)
    code, document, told = demo()
    assert (code, document["exit_code"], document["error"]["code"]) == (1, 1, "BrokenError")
    assert told == "rlbus: trainer: ended after 3 of 20 updates\n"


def test_a_demo_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong usage, as `rlbus worker torch` says it; nothing is started, and no folder kept."""

    @contextlib.contextmanager
    def no_folder() -> Iterator[Path]:
        raise AssertionError
        yield

    monkeypatch.setattr(run, "_folder", no_folder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    code, document, told = demo()
    assert (code, document["error"]["code"]) == (2, "ConfigError")
    assert 'pip install "rlbus[torch]"' in told


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_ends_a_demo_as_ctrl_c_does_and_its_folder_goes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ctrl_c: Any
) -> None:
    """What it started is taken down on the way. Also in a shell's background, where Ctrl-C is ignored."""
    pytest.importorskip("torch")
    made: list[str] = []

    class Server:
        def __init__(self, **_: object) -> None:
            self.url = "nats://t@h:1"

        async def __aenter__(self) -> "Server":
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(10.0)
            return self

        async def __aexit__(self, *_: object) -> None:
            raise AssertionError

    def make_model(folder: Path) -> Path:
        made.append(str(folder.parent))
        return folder

    monkeypatch.setattr(run, "EmbeddedServer", Server)
    monkeypatch.setattr(run, "_make_model", make_model)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.signal(signal.SIGINT, ctrl_c)
    try:
        code, document, _ = demo()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, document["exit_code"]) == (130, 130)
    assert (len(made), list(tmp_path.iterdir())) == (1, [])


def test_the_token_is_no_argument_of_the_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everybody on the machine could read it; the environment is its owner's."""
    started: list[tuple[Sequence[str], Mapping[str, str]]] = []

    class Started:
        async def stop(self) -> None:
            return None

    async def start(_name: str, argv: Sequence[str], *, env: Mapping[str, str], **_: object) -> Started:
        started.append((argv, env))
        return Started()

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await run._start_trainer(stack, "nats://hunter2@h:1", "torch", 2, 3, tmp_path, tmp_path)

    monkeypatch.setattr(Child, "start", start)
    asyncio.run(main())
    [(argv, env)] = started
    assert not any("hunter2" in part for part in argv)
    assert (env["RLBUS_URL"], env["RLBUS_NAMESPACE"]) == ("nats://hunter2@h:1", "demo")
