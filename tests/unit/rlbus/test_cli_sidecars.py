"""`rlbus worker vllm-http`: what it is given is checked before anything is started or connected."""

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
