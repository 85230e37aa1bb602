"""`rlbus worker vllm-http`: what it is given is checked before anything is started or connected."""

from typing import Any

import pytest
from typer.testing import CliRunner

from rlbus.cli.app import app
from rlbus.cli.output import ExitCode
from rlbus.cli.sidecars import headers_of, key_of
from rlbus.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "either the URL of a running server"),
        (("--url", "http://h:1", "--", "MODEL"), "either the URL of a running server"),
        (("--url", "h:1"), "use http://HOST:PORT"),
        (("--url", "http://u:hunter2@h:1"), "credentials don't belong into a URL"),
        (("--url", "http://h:1", "--header", "hunter2"), "use NAME=VALUE"),
        (("--url", "http://h:1", "--api-key-env", "NOT_SET"), "there is no variable of that name"),
        (("--", "--dtype", "float32"), "give the model first"),
        (("--no-restart", "--", "MODEL"), "it goes with --url"),
        (("--url", "http://h:1", "--small"), "--small"),
        (("--", "MODEL", "--port", "abc"), "--port='abc'"),
        (("--", "MODEL", "--port=70000"), "--port='70000'"),
        (("--bus", "nats://h:1", "--url", "http://h:1", "--system-host", "::"), "RLBUS_SYSTEM_TOKEN"),
        (("--bus", "nats://h:1", "--url", "http://h:1", "--no-restart", "--system-host", "::"), "RLBUS_SYSTEM_TOKEN"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], problem: str
) -> None:
    """Status 2, in one line, without a secret in it; no bus is looked for."""
    monkeypatch.delenv("NOT_SET", raising=False)
    done = CliRunner().invoke(app, ["worker", "vllm-http", *arguments], env={"RLBUS_URL": None})
    assert done.exit_code == ExitCode.USAGE
    assert problem in done.stderr
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("--http-url", "http://h:1", "--", "MODEL"), "--http-url"),
        (("--tls", "--", "MODEL"), "--tls"),
        (("--small", "--target", "h:1"), "--small"),
        (("--", "MODEL", "--port", "abc"), "--port"),
        (("--", "MODEL", "--grpc-port", "-1"), "--grpc-port"),
    ],
)
def test_an_option_of_the_other_way_to_run_a_grpc_sidecar_is_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], name: str
) -> None:
    """Not dropped without a word."""
    pytest.importorskip("grpc")
    monkeypatch.setenv("VLLM_RUST_FRONTEND_PATH", "/bin/true")
    done = CliRunner().invoke(app, ["worker", "vllm-grpc", *arguments], env={"RLBUS_URL": None})
    assert done.exit_code == ExitCode.USAGE, done.output
    assert f"rlbus: {name}" in done.stderr


def test_headers_and_key_are_read_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value may have a `=`, and be empty; an empty key is none."""
    assert headers_of(["X-Tenant=blue", "Authorization=Basic a==", "X-Empty="]) == {
        "X-Tenant": "blue",
        "Authorization": "Basic a==",
        "X-Empty": "",
    }
    assert headers_of(None) == {}
    monkeypatch.setenv("MY_KEY", "sesame")
    monkeypatch.setenv("EMPTY", "")
    assert (key_of("MY_KEY"), key_of("EMPTY"), key_of(None)) == ("sesame", None, None)


def test_secret_in_a_bad_header_is_not_shown() -> None:
    """Only the name is."""
    with pytest.raises(ConfigError) as caught:
        headers_of(["=hunter2"])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "where"), [("vllm-http", ("--url", "http://h:1")), ("vllm-grpc", ("--target", "h:1"))]
)
def test_the_agent_of_a_sidecar_is_told_where_its_surface_is(
    monkeypatch: pytest.MonkeyPatch, name: str, where: tuple[str, str]
) -> None:
    """By options, as those of the other workers; the token by its variable only."""
    if name == "vllm-grpc":
        pytest.importorskip("grpc")
    seen: list[tuple[str, ...]] = []

    class NoBus:
        async def aclose(self) -> None:
            """Nothing to close."""

    async def connect(config: Any, *, name: str) -> NoBus:
        return NoBus()

    async def supervise(build: Any, **how: Any) -> int:
        seen.append(build({}, "/run").argv)
        return 0

    monkeypatch.setattr("rlbus.connecting.connect_bus", connect)
    monkeypatch.setattr("rlbus.workers.supervisor.worker.supervise_worker", supervise)
    given = ("--system-host", "::1", "--system-port", "8123")
    env = {"RLBUS_URL": "nats://127.0.0.1:9", "RLBUS_SYSTEM_TOKEN": "hunter2"}
    done = CliRunner().invoke(app, ["worker", name, *where, *given], env=env)
    assert done.exit_code == ExitCode.OK, done.output
    text = " ".join(seen[0])
    assert " ".join(where) in text
    assert " ".join(given) in text
    assert "hunter2" not in text
