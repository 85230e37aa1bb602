"""How `rlbus up`, `controller` and `worker` live and end, without a server."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rlbus.cli import run
from rlbus.cli.app import app
from rlbus.controller import app as controller_app
from rlbus.schemas import Lease
from rlbus.workers import run as worker_run
from rlbus.workers.engines import torch_engine

pytestmark = pytest.mark.unit


def test_a_controller_whose_stdout_is_gone_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands by, and as it takes over: what it says is for people, and they may have gone."""
    roles: list[str] = []

    async def serve(
        _config: object, *, on_ready: Callable[[None], None], on_standby: Callable[[Lease], None], **_rest: Any
    ) -> None:
        on_standby(Lease(holder="a", name="other/1", since=0.0))
        roles.append("standby")
        on_ready(None)
        roles.append("leader")

    monkeypatch.setattr(controller_app, "serve", serve)
    for as_json in (False, True):
        roles.clear()
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            with pytest.raises(typer.Exit) as ended:
                run.controller(url="nats://h:1", json=as_json)
            monkeypatch.undo()
            monkeypatch.setattr(controller_app, "serve", serve)
        assert (ended.value.exit_code, roles) == (0, ["standby", "leader"])


def test_torch_engine_may_read_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """RLBUS_WEIGHT_ROOTS alone is enough, as for the agent; an option wins over it."""
    made: list[dict[str, Any]] = []

    async def serve(*_: object, **__: object) -> None:
        return None

    monkeypatch.setattr(torch_engine, "TorchEngine", lambda _model, **given: made.append(given))
    monkeypatch.setattr(worker_run, "serve", serve)
    command = ["worker", "torch", str(tmp_path), "--no-restart", "--url", "nats://h:1"]
    for options in ([], ["--weight-root", "/given"]):
        done = CliRunner().invoke(app, [*command, *options], env={"RLBUS_WEIGHT_ROOTS": "/a:/b"})
        assert done.exit_code == 0, done.output
    assert [tuple(given["roots"]) for given in made] == [("/a", "/b"), ("/given",)]
