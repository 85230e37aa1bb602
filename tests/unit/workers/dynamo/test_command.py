"""`rlbus worker dynamo`: what is wrong with its options is said before anything starts; what is right reaches it."""

from typing import Any

import pytest
from typer.testing import CliRunner

from rlbus.cli.app import app
from rlbus.cli.output import ExitCode
from rlbus.workers.dynamo import run as run_module
from rlbus.workers.dynamo import supervisor

pytestmark = pytest.mark.unit

BUS = ("--bus", "nats://127.0.0.1:9")


def invoke(*options: str, **env: str) -> Any:
    """Run the command."""
    return CliRunner().invoke(app, ["worker", "dynamo", *BUS, *options], env={"RLBUS_STATE_DIR": None, **env})


@pytest.mark.parametrize("how", [(), ("--no-restart",)])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--discovery"),
        (("--url", "http://a:1", "--system-host", "0.0.0.0"), "RLBUS_SYSTEM_TOKEN"),
        (("--url", "http://[::]:1"), "address to listen on"),
        (("--url", "http://a:1", "--url", "http://a:1/"), "given twice"),
        (("--url", "http://a:1", "--header", "nothing"), "NAME=VALUE"),
        (("--url", "http://a:1", "--api-key-env", "RLBUS_TEST_NO_SUCH"), "RLBUS_TEST_NO_SUCH"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(options: tuple[str, ...], words: str, how: tuple[str, ...]) -> None:
    """SCENARIOS 58: status 2, whether it is supervised or not."""
    done = invoke(*options, *how)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert words in done.stderr
    assert "Traceback" not in done.output


def test_what_was_given_reaches_the_sidecar(monkeypatch: pytest.MonkeyPatch) -> None:
    """SCENARIOS 43: credentials by the name of their variable, never by themselves."""
    seen: list[Any] = []

    async def serve(bus_config: Any, where: Any, **how: Any) -> None:
        seen.append((bus_config, where, how))

    monkeypatch.setattr(run_module, "serve", serve)
    options = ("--discovery", "http://a:1", "--url", "http://b:2", "--component", "decode", "--no-transfer")
    more = ["--header", "X-Tenant=blue", "--api-key-env", "SOME_KEY", "--weight-root", "/weights", "--model-dir", "/m"]
    more += ["--trust-host", "c", "--max-loras", "4"]
    done = invoke(*options, *more, "-n", "prod", "--no-restart", SOME_KEY="sesame")
    assert done.exit_code == ExitCode.OK, done.output
    ((bus_config, where, how),) = seen
    assert (bus_config.url, bus_config.namespace) == (BUS[1], "prod")
    assert (where.discovery, where.system_urls, where.component) == (("http://a:1",), ("http://b:2",), "decode")
    assert (where.api_key, where.headers) == ("sesame", {"X-Tenant": "blue"})
    assert where.trusted_hosts == ("c",)
    assert how["config"].weight_roots == ("/weights",)
    assert how["config"].state_dir is not None
    assert (str(how["options"].model_dir), how["options"].has_transfer) == ("/m", False)
    assert how["options"].max_loras == 4
    assert (how["system"].host, how["system"].port) == ("127.0.0.1", 0)


def test_the_supervised_process_is_given_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not the token."""
    seen: list[list[str]] = []

    class NoBus:
        async def aclose(self) -> None:
            """Nothing to close."""

    async def connect(config: Any, *, name: str) -> NoBus:
        return NoBus()

    async def supervise(arguments: list[str], verbosity: int, **how: Any) -> int:
        seen.append(arguments)
        assert how["weight_roots"] == ("/weights",)
        return 0

    monkeypatch.setattr(supervisor, "supervise", supervise)
    monkeypatch.setattr("rlbus.connecting.connect_bus", connect)
    options = ["--discovery", "http://a:1", "--url", "http://b:2", "--header", "X-Tenant=blue"]
    options += ["--trust-host", "c", "--component", "decode"]
    options += ["--model-dir", "/m", "--api-key-env", "SOME_KEY", "--system-host", "::1", "--system-port", "-1"]
    options += ["--max-loras", "4", "--transfer"]
    done = invoke(*options, "--weight-root", "/weights", SOME_KEY="sesame")
    assert done.exit_code == ExitCode.OK, done.output
    assert seen == [options]


@pytest.mark.parametrize("how", [(), ("--no-restart",)])
def test_one_port_for_the_surfaces_of_all_workers_is_refused(how: tuple[str, ...]) -> None:
    """Only one of them could have it."""
    done = invoke("--url", "http://a:1", *how, RLBUS_SYSTEM_PORT="8080")
    assert done.exit_code == ExitCode.USAGE
    assert "port of its own" in done.stderr


@pytest.mark.parametrize("given", [None, "/shared/copies"])
def test_copies_of_adapters_lie_where_they_outlive_the_sidecar(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    """Dynamo goes on without it, and reads them again; a folder that the user names counts."""
    seen: list[Any] = []

    async def serve(bus_config: Any, where: Any, **how: Any) -> None:
        seen.append(how["config"])

    monkeypatch.setattr(run_module, "serve", serve)
    done = invoke("--url", "http://a:1", "--no-restart", RLBUS_STATE_DIR="/state", RLBUS_LORA_CACHE_DIR=given)
    assert done.exit_code == ExitCode.OK, done.output
    assert seen[0].lora_cache_dir == (given or "/state/lora.copies")
