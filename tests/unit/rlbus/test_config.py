"""Where the bus is: from arguments, from the environment, never showing a secret."""

import dataclasses

import pytest

from rlbus.config import DEFAULT_CONNECT_S, BusConfig
from rlbus.errors import ConfigError

pytestmark = pytest.mark.unit

URL = "nats://host:4222"


def test_defaults_are_the_default_namespace_and_five_seconds() -> None:
    """Only the URL has to be given."""
    config = BusConfig(URL)
    assert (config.url, config.namespace, config.connect_s) == (URL, "default", DEFAULT_CONNECT_S)
    assert (config.token, config.user, config.password, config.creds_file) == (None, None, None, None)


@pytest.mark.parametrize(
    ("url", "clean", "token", "user", "password"),
    [
        ("nats://host:1", "nats://host:1", None, None, None),
        ("host:1", "nats://host:1", None, None, None),
        ("nats://s3cret@host:1", "nats://host:1", "s3cret", None, None),
        ("tls://me:s3cret@host:1", "tls://host:1", None, "me", "s3cret"),
        ("nats://me:p%40ss@host:1", "nats://host:1", None, "me", "p@ss"),
        ("nats://s3cret@a:1,nats://s3cret@b:2", "nats://a:1,nats://b:2", "s3cret", None, None),
        ("nats://[::1]:4222", "nats://[::1]:4222", None, None, None),
    ],
)
def test_credentials_move_from_the_url_to_their_fields(
    url: str, clean: str, token: str | None, user: str | None, password: str | None
) -> None:
    """The URL that stays can be logged."""
    config = BusConfig(url)
    assert (config.url, config.token, config.user, config.password) == (clean, token, user, password)
    assert config.servers == tuple(clean.split(","))


@pytest.mark.parametrize("url", ["nats://s3cret@host:1", "nats://me:s3cret@host:1"])
def test_secrets_are_shown_nowhere(url: str) -> None:
    """Neither by repr, str, nor redacted()."""
    config = BusConfig(url)
    for text in (repr(config), str(config), str(config.redacted())):
        assert "s3cret" not in text
    assert "***" in config.redacted().values()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"url": "http://host:1"}, "url"),
        ({"url": ""}, "url"),
        ({"url": "ws://host:1"}, "url"),
        ({"url": "nats://host:1,wss://s3cret@host:1"}, "url"),
        ({"url": "nats://"}, "url"),
        ({"url": "nats://s3cret@host:notaport"}, "url"),
        ({"url": "nats://host:1/path"}, "url"),
        ({"url": URL, "namespace": "a.b"}, "namespace"),
        ({"url": URL, "connect_s": 0.0}, "connect_s"),
        ({"url": URL, "connect_s": float("nan")}, "connect_s"),
        ({"url": URL, "token": "s3cret", "user": "me", "password": "s3cret"}, "credentials"),
        ({"url": URL, "token": "s3cret", "creds_file": "x"}, "credentials"),
        ({"url": URL, "user": "me"}, "user"),
        ({"url": "nats://s3cret@host:1", "token": "0ther"}, "token"),
    ],
)
def test_wrong_settings_are_named_and_never_show_a_secret(fields: dict[str, str], name: str) -> None:
    """One ConfigError with the field's name."""
    with pytest.raises(ConfigError) as caught:
        BusConfig(**fields)  # type: ignore[arg-type]
    assert caught.value.name == name
    assert "s3cret" not in str(caught.value)
    assert "0ther" not in str(caught.value)


def test_the_environment_gives_every_field() -> None:
    """Each variable reaches its field, with its type."""
    config = BusConfig.from_env(
        environ={
            "RLBUS_URL": URL,
            "RLBUS_NAMESPACE": "prod",
            "RLBUS_USER": "me",
            "RLBUS_PASSWORD": "pw",
            "RLBUS_CONNECT_S": "2.5",
        }
    )
    assert config == BusConfig(URL, namespace="prod", user="me", password="pw", connect_s=2.5)
    assert BusConfig.from_env(environ={"RLBUS_URL": URL, "RLBUS_TOKEN": "t"}).token == "t"
    assert BusConfig.from_env(environ={"RLBUS_URL": URL, "RLBUS_CREDS": "/c"}).creds_file == "/c"


def test_an_argument_wins_over_its_variable_and_none_does_not() -> None:
    """So that a CLI can pass its unset options on."""
    environ = {"RLBUS_URL": URL, "RLBUS_NAMESPACE": "env"}
    assert BusConfig.from_env(environ=environ, namespace="arg", url=None).namespace == "arg"
    assert BusConfig.from_env(environ=environ, namespace=None).namespace == "env"


def test_credentials_of_the_caller_do_not_mix_with_those_of_the_environment() -> None:
    """A URL with a token beats a user in the environment instead of contradicting it."""
    environ = {"RLBUS_USER": "me", "RLBUS_PASSWORD": "pw"}
    config = BusConfig.from_env(environ=environ, url="nats://t0ken@host:1")
    assert (config.token, config.user, config.password) == ("t0ken", None, None)


def test_no_url_is_an_error_that_says_what_to_do() -> None:
    """An empty variable counts as unset."""
    for environ in ({}, {"RLBUS_URL": ""}):
        with pytest.raises(ConfigError, match="rlbus up") as caught:
            BusConfig.from_env(environ=environ)
        assert caught.value.name == "RLBUS_URL"


@pytest.mark.parametrize(("key", "value"), [("RLBUS_CONNECT_S", "soon"), ("RLBUS_CONNECT_S", "-1")])
def test_a_wrong_number_in_the_environment_is_named(key: str, value: str) -> None:
    """Whether it is no number or out of range."""
    with pytest.raises(ConfigError):
        BusConfig.from_env(environ={"RLBUS_URL": URL, key: value})


def test_an_unknown_keyword_is_refused() -> None:
    """A typo doesn't pass in silence."""
    with pytest.raises(ConfigError) as caught:
        BusConfig.from_env(environ={"RLBUS_URL": URL}, tokn="x")
    assert caught.value.name == "tokn"


def test_a_config_is_frozen() -> None:
    """It can be shared."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        BusConfig(URL).url = "x"  # type: ignore[misc]
