"""Where the controller's HTTP side listens, and that nobody opens it by accident."""

import pytest

from rlbus.controller.http.config import HttpConfig
from rlbus.errors import ConfigError

pytestmark = pytest.mark.unit


def test_there_is_no_http_unless_a_port_is_given() -> None:
    """Neither by flag nor by variable; a host alone is a mistake."""
    assert HttpConfig.from_env(environ={}) is None
    assert HttpConfig.from_env(environ={"RLBUS_HTTP_TOKEN": "t", "RLBUS_HTTP_HOST": "127.0.0.1"}) is None
    with pytest.raises(ConfigError, match="--http-port"):
        HttpConfig.from_env(host="127.0.0.1", environ={})


def test_flags_win_over_variables() -> None:
    """Each by itself."""
    env = {"RLBUS_HTTP_HOST": "0.0.0.0", "RLBUS_HTTP_PORT": "7", "RLBUS_HTTP_TOKEN": "secret"}
    assert HttpConfig.from_env(environ=env) == HttpConfig(host="0.0.0.0", port=7, token="secret")
    assert HttpConfig.from_env(host="::1", port=0, environ=env) == HttpConfig(host="::1", port=0, token="secret")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org", "192.168.0.3", "127.0.0.1.example.org"]
)
def test_others_are_let_in_only_with_a_token(host: str) -> None:
    """SCENARIOS 43: the default is loopback; as soon as it isn't, a token is required."""
    with pytest.raises(ConfigError, match="RLBUS_HTTP_TOKEN"):
        HttpConfig(host=host, port=1)
    assert HttpConfig(host=host, port=1, token="secret").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    """In each of its spellings."""
    assert HttpConfig(host=host, port=1).token is None


@pytest.mark.parametrize("token", ["two words", "caf\u00e9", "new\nline"])
def test_a_token_that_fits_no_header_is_refused_and_not_shown(token: str) -> None:
    """Nor is any token by repr."""
    with pytest.raises(ConfigError) as caught:
        HttpConfig(token=token)
    assert token not in str(caught.value)
    assert "secret" not in repr(HttpConfig(token="secret"))


@pytest.mark.parametrize("text", ["x", "-1", "70000", "1.5", "\u0661"])
def test_a_port_that_is_none_is_named(text: str) -> None:
    """With its variable."""
    with pytest.raises(ConfigError, match="RLBUS_HTTP_PORT"):
        HttpConfig.from_env(environ={"RLBUS_HTTP_PORT": text})


def test_what_was_given_by_an_option_is_blamed_on_the_option() -> None:
    """And what came by its variable on that."""
    with pytest.raises(ConfigError, match=r"--http-host='0\.0\.0\.0'"):
        HttpConfig.from_env(host="0.0.0.0", port=1, environ={})
    with pytest.raises(ConfigError, match=r"RLBUS_HTTP_HOST='0\.0\.0\.0'"):
        HttpConfig.from_env(port=1, environ={"RLBUS_HTTP_HOST": "0.0.0.0"})
