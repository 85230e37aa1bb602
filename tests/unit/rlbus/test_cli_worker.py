"""`rlbus worker ...`: how it ends when its process did, and that it says nothing before it is known to start."""

import importlib.metadata
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rlbus.cli.app import app
from rlbus.cli.options import run_command
from rlbus.cli.output import ExitCode, Output
from rlbus.cli.services import log_as_service
from rlbus.errors import BrokenError

pytestmark = pytest.mark.unit

ENV = {"RLBUS_URL": "nats://127.0.0.1:9", "RLBUS_STATE_DIR": None, "RLBUS_INSTANCE_ID": "7"}


class NoBus:
    """A bus that is there."""

    async def aclose(self) -> None:
        """Nothing to close."""


@pytest.fixture(autouse=True)
def bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one."""

    async def connect(config: Any, *, name: str) -> NoBus:
        return NoBus()

    monkeypatch.setattr("rlbus.connecting.connect_bus", connect)


def ended(monkeypatch: pytest.MonkeyPatch, supervisor: str, status: int) -> None:
    """Have the supervised process end so."""

    async def supervise(*_: Any, **how: Any) -> int:
        return status

    monkeypatch.setattr(supervisor, supervise)


FAKE = (("worker", "fake"), "rlbus.workers.supervisor.worker.supervise_worker")
DYNAMO = (
    ("worker", "dynamo", "--url", "http://a:1", "--bus", "nats://h:1"),
    "rlbus.workers.dynamo.supervisor.supervise",
)


@pytest.mark.parametrize(("command", "supervisor"), [FAKE, DYNAMO])
@pytest.mark.parametrize(
    ("status", "code", "name", "why"),
    [
        (1, ExitCode.FAILED, "BrokenError", "died again and again"),
        (2, ExitCode.USAGE, "ConfigError", "called in a wrong way"),
    ],
)
def test_the_document_of_a_worker_that_failed_has_the_code_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    supervisor: str,
    status: int,
    code: ExitCode,
    name: str,
    why: str,
) -> None:
    """And the reason of that code: one that was called in a wrong way has died once."""
    ended(monkeypatch, supervisor, status)
    done = CliRunner().invoke(app, [*command, "--json"], env=ENV)
    document = json.loads(done.stdout)
    assert (done.exit_code, document["exit_code"], document["error"]["code"]) == (code, code, name)
    assert why in document["error"]["message"]
    assert why in done.stderr


@pytest.mark.parametrize(
    ("is_installed", "options", "problem"),
    [(False, (), "vLLM is not installed"), (True, ("--api-server-count", "2"), "--api-server-count")],
)
def test_a_vllm_server_that_cannot_be_started_has_one_document_the_error(
    monkeypatch: pytest.MonkeyPatch, is_installed: bool, options: tuple[str, ...], problem: str
) -> None:
    """It isn't told as a worker before it is known what to start."""

    def version(name: str) -> str:
        if is_installed:
            return "1"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    done = CliRunner().invoke(app, ["worker", "vllm", "MODEL", "--json", *options], env=ENV)
    document = json.loads(done.stdout)
    assert (done.exit_code, document["exit_code"]) == (ExitCode.USAGE, ExitCode.USAGE)
    assert problem in document["error"]["message"]


def test_a_vllm_server_is_told_once_it_is_known_what_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first life, which takes minutes until it is there."""
    seen: list[Any] = []

    async def keep_running(command: Any, *_: Any) -> int:
        seen.append(command)
        return 0

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    monkeypatch.setattr("rlbus.workers.supervisor.worker.keep_running", keep_running)
    done = CliRunner().invoke(app, ["worker", "vllm", "MODEL", "--json"], env=ENV)
    assert (done.exit_code, json.loads(done.stdout)["worker"], len(seen)) == (ExitCode.OK, "backend/7", 1)


@pytest.mark.parametrize(
    ("level", "is_shown"), [(logging.CRITICAL, False), (logging.INFO, False), (logging.DEBUG, True)]
)
def test_a_service_shows_a_traceback_only_if_asked(
    caplog: pytest.LogCaptureFixture, level: int, is_shown: bool
) -> None:
    """Though it logs what it does: by `-vv`."""

    async def work() -> ExitCode:
        raise ZeroDivisionError("oops")

    caplog.set_level(level)
    log_as_service()
    with pytest.raises(typer.Exit) as caught:
        run_command(Output(False), work)
    assert caught.value.exit_code == ExitCode.FAILED
    assert any(record.exc_info for record in caplog.records) is is_shown


@pytest.mark.parametrize("flags", [(), ("--no-restart",)])
@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        (("torch", "."), "torch", "torch"),
        (("torch", "."), "safetensors", "torch"),
        (("vllm-http", "--url", "http://h:1"), "torch", "torch"),
        (("dynamo", "--url", "http://h:1"), "torch", "torch"),
        (("dynamo", "--url", "http://h:1"), "numpy", "torch"),
        (("vllm-grpc", "--target", "h:1"), "grpc", "grpc"),
        (("vllm-grpc", "--target", "h:1"), "google", "grpc"),
        (("vllm-grpc", "--target", "h:1"), "torch", "grpc"),
    ],
)
def test_a_worker_whose_modules_are_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: tuple[str, ...],
    missing: str,
    extra: str,
    flags: tuple[str, ...],
) -> None:
    """At once, instead of a process that dies again and again of an error that asks to be reported."""
    monkeypatch.chdir(tmp_path)
    # What else it needs is there: the modules that it doesn't get to are never imported.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name.split(".")[0] == missing else name)
    monkeypatch.setitem(sys.modules, missing, None)
    done = CliRunner().invoke(app, ["worker", *command, *flags], env=ENV)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert f"it needs {missing}" in done.stderr
    assert f'pip install "rlbus[{extra}]"' in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("vllm", "MODEL"), ("vllm-http", "--", "MODEL")])
def test_a_vllm_that_is_not_installed_is_said_before_a_server_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """With what brings it, and all that the worker itself needs."""

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    async def connect(config: Any, *, name: str) -> NoBus:
        raise BrokenError("nats", "no server")

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr("rlbus.connecting.connect_bus", connect)
    done = CliRunner().invoke(app, ["worker", *command], env=ENV)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert 'pip install "rlbus[vllm]"' in done.stderr


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("fake",), "--weight-root"),
        (("fake",), "--lora-root"),
        (("dynamo", "--url", "http://h:1"), "--weight-root"),
    ],
)
def test_two_folders_in_one_root_option_are_wrong_usage(command: tuple[str, ...], option: str) -> None:
    """Its variable has them so; a process that is handed them on would have two other folders."""
    done = CliRunner().invoke(app, ["worker", *command, option, "/a:/b"], env=ENV)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert f"{option}='/a:/b': give it once for each folder" in done.stderr
