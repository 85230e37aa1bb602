"""How `rlbus up`, `controller` and `worker` live and end, without a server."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import typer

from rlbus.cli import run
from rlbus.controller import app as controller_app
from rlbus.controller.http.config import HttpConfig
from rlbus.schemas import Lease

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
