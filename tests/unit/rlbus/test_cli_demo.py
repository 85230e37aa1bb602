"""How `rlbus demo` ends when it can't: as every command does."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

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
