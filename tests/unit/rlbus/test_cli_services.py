"""How `rlbus up`, `controller` and `worker` live and end, without a server."""

import asyncio
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import pytest
import typer
from typer.testing import CliRunner

from rlbus import server
from rlbus.cli import run
from rlbus.cli.app import app
from rlbus.cli.output import ExitCode, Output
from rlbus.cli.services import notice, supervised
from rlbus.config import BusConfig
from rlbus.controller import app as controller_app
from rlbus.errors import BrokenError
from rlbus.schemas import Lease
from rlbus.testing import run as virtual_run
from rlbus.workers import addresses
from rlbus.workers import run as worker_run

if TYPE_CHECKING:
    from rlbus.server import EmbeddedServer

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
    torch_engine = pytest.importorskip("rlbus.workers.engines.torch_engine", exc_type=ImportError)
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


class FakeServer:
    """A server whose supervision ends with `error`."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def supervise(self, _on_restart: object) -> NoReturn:
        """See EmbeddedServer."""
        raise self._error


def supervised_by(error: BaseException) -> ExitCode:
    """How a service ends whose server's supervision ends so."""

    async def main() -> ExitCode:
        failing = cast("EmbeddedServer", FakeServer(error))
        return await supervised(asyncio.sleep(3600.0), failing, Output(is_json=False))

    return virtual_run(main())


def test_service_whose_server_is_given_up_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """With what the server said last, and not with the cancellation of the service."""
    assert supervised_by(BrokenError("nats-server", "ended; its log ends:\nsome line")) is ExitCode.FAILED
    assert capsys.readouterr().err == "rlbus: nats-server: ended; its log ends:\nsome line\n"
    with pytest.raises(RuntimeError, match="a bug"):
        supervised_by(RuntimeError("a bug"))


def test_supervision_goes_on_when_nobody_reads_its_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart of the server is told; the restart itself counts."""

    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    gone = Gone()
    monkeypatch.setattr(sys, "stderr", gone)
    notice("nats-server ended with status 1; starting it again on port 4222")
    monkeypatch.undo()
    assert gone.getvalue() == "rlbus: nats-server ended with status 1; starting it again on port 4222\n"


class FakeEmbedded:
    """A server that listens where it is told to, at port 4222."""

    def __init__(self, host: str, **_rest: object) -> None:
        self._at = "127.0.0.1" if host == "0.0.0.0" else host

    async def __aenter__(self) -> "FakeEmbedded":
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    @property
    def url(self) -> str:
        """See EmbeddedServer."""
        return self.url_at(self._at)

    def url_at(self, host: str) -> str:
        """See EmbeddedServer."""
        return f"nats://t@{host}:4222"

    async def supervise(self, _on_restart: object) -> NoReturn:
        """See EmbeddedServer."""
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(
    ("host", "advertised", "host_shown"),
    [
        ("0.0.0.0", "gpu-7", "gpu-7"),
        ("0.0.0.0", "", "10.1.2.3"),
        ("127.0.0.1", "gpu-7", "127.0.0.1"),
        ("10.1.2.4", "gpu-7", "10.1.2.4"),
    ],
)
def test_up_says_where_others_reach_what_listens_everywhere(
    monkeypatch: pytest.MonkeyPatch, host: str, advertised: str, host_shown: str
) -> None:
    """RLBUS_ADVERTISE_HOST, or this machine's own address; its own controller takes the shortest way."""
    joined: list[str] = []

    async def serve(
        config: BusConfig, *, on_ready: Callable[[None], None], on_http: Callable[[str], None], **_rest: Any
    ) -> None:
        joined.append(config.url)
        on_http(f"http://{host}:8001")
        on_ready(None)

    monkeypatch.setattr(controller_app, "serve", serve)
    monkeypatch.setattr(server, "EmbeddedServer", FakeEmbedded)
    monkeypatch.setattr(addresses, "local_address_towards", lambda _url: "10.1.2.3")
    env = {"RLBUS_ADVERTISE_HOST": advertised}
    done = CliRunner().invoke(app, ["up", "--host", host, "--json"], env=env)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["url"], told["http_url"]) == (f"nats://t@{host_shown}:4222", f"http://{host_shown}:8001")
    assert joined == [f"nats://{'127.0.0.1' if host == '0.0.0.0' else host}:4222"]
    assert f"RLBUS_URL=nats://t@{host_shown}:4222\n" in CliRunner().invoke(app, ["up", "--host", host], env=env).stdout


def test_controller_says_where_others_reach_its_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a wildcard the address from which it reaches the bus."""

    async def serve(
        _config: object, *, on_ready: Callable[[None], None], on_http: Callable[[str], None], **_rest: Any
    ) -> None:
        on_http("http://[::]:8001")
        on_ready(None)

    monkeypatch.setattr(controller_app, "serve", serve)
    monkeypatch.setattr(addresses, "local_address_towards", lambda url: {"nats://h:1": "fd00::2"}[url])
    done = CliRunner().invoke(app, ["controller", "--url", "nats://h:1", "--json"], env={"RLBUS_ADVERTISE_HOST": ""})
    assert json.loads(done.stdout)["http_url"] == "http://[fd00::2]:8001"


def test_advertised_host_that_is_none_is_wrong_usage_before_anything_starts() -> None:
    """As for a worker."""
    for command in (["up"], ["controller", "--url", "nats://h:1"]):
        done = CliRunner().invoke(app, command, env={"RLBUS_ADVERTISE_HOST": "http://a"})
        assert (done.exit_code, "RLBUS_ADVERTISE_HOST" in done.stderr) == (2, True)
