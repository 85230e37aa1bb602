"""Where a surface listens and what is announced of it."""

import pytest

from rlbus._addresses import is_loopback
from rlbus.errors import ConfigError
from rlbus.workers import addresses
from rlbus.workers.addresses import reachable_host
from rlbus.workers.system.settings import SystemConfig

pytestmark = pytest.mark.unit


def test_a_surface_is_on_loopback_with_a_free_port_unless_told_otherwise() -> None:
    """Nobody else reaches it then, so that it needs no token."""
    config = SystemConfig.from_env(environ={})
    assert (config.host, config.port, config.token, config.is_on) == ("127.0.0.1", 0, None, True)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.1", "worker.example", "127.0.0.1.evil", "::ffff:1.2.3.4"]
)
def test_where_others_reach_it_a_token_is_needed(host: str) -> None:
    """SCENARIOS 43: the default is loopback, and nothing else goes without a token."""
    with pytest.raises(ConfigError, match="RLBUS_SYSTEM_TOKEN"):
        SystemConfig(host=host)
    assert SystemConfig(host=host, token="t").host == host
    assert not SystemConfig(host=host, port=-1).is_on


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    """By any of its names."""
    assert is_loopback(host)
    assert SystemConfig(host=host).token is None


@pytest.mark.parametrize("port", ["-2", "65536", "x", "1.5"])
def test_a_port_that_is_none_is_named(port: str) -> None:
    """By its setting."""
    with pytest.raises(ConfigError, match=r"(?i)system_port"):
        SystemConfig.from_env(environ={"RLBUS_SYSTEM_PORT": port})


@pytest.mark.parametrize("token", ["a b", "ä", "a\n", "\x00"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    """Else nobody could ever use it."""
    with pytest.raises(ConfigError) as refusal:
        SystemConfig(token=token)
    assert token not in str(refusal.value)


def test_the_token_is_not_shown() -> None:
    """In no repr."""
    assert "secret" not in repr(SystemConfig(token="secret"))


def test_an_argument_wins_over_its_variable() -> None:
    """As everywhere."""
    env = {"RLBUS_SYSTEM_PORT": "1", "RLBUS_SYSTEM_HOST": "::1", "RLBUS_ADVERTISE_HOST": "me"}
    config = SystemConfig.from_env(environ=env, port=2)
    assert (config.port, config.host, config.advertise_host) == (2, "::1", "me")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "*"])
def test_a_wildcard_is_never_announced(host: str) -> None:
    """SCENARIOS 58."""
    assert reachable_host(host, None, "nats://127.0.0.1:4222") == "127.0.0.1"
    assert reachable_host(host, "me", "nats://127.0.0.1:4222") == "me"
    assert reachable_host(host, "[::1]", "nats://127.0.0.1:4222") == "::1"


def test_a_server_without_an_address_does_not_have_loopback_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another server of the bus leads to ours. Where none does, the log says that nobody else reaches it."""

    def own(server: str) -> str:
        if "nats-0" in server:
            raise OSError(-2, "Name or service not known")
        return {"nats://far:4222": "10.0.0.5", "nats://me:4222": "127.0.1.1", "nats://localhost:4222": "::1"}[server]

    monkeypatch.setattr(addresses, "own_address", own)
    assert reachable_host("0.0.0.0", None, "nats://nats-0:4222,nats://far:4222") == "10.0.0.5"
    assert reachable_host("0.0.0.0", None, "nats://localhost:4222,nats://nats-0:4222") == "::1"
    assert caplog.messages == []
    assert reachable_host("0.0.0.0", None, "nats://nats-0:4222,nats://me:4222") == "127.0.1.1"
    assert reachable_host("0.0.0.0", None, "nats://nats-0:4222") == "127.0.0.1"
    assert [("not known" in line, "set RLBUS_ADVERTISE_HOST" in line) for line in caplog.messages] == [(True, True)] * 2


def test_an_address_is_announced_as_it_is() -> None:
    """Unless the user knows better."""
    assert reachable_host("10.0.0.1", None, "nats://127.0.0.1:4222") == "10.0.0.1"
    assert reachable_host("10.0.0.1", "me", "nats://127.0.0.1:4222") == "me"


@pytest.mark.parametrize(
    "host",
    ["http://me", "me:8000", "a b", "me/x", "a..b", "xn--gpu_1", "a" * 64, "-", "[::1", "m\u00fcller", "::1%eth0"],
)
def test_a_host_that_nobody_could_reach_it_at_is_refused(host: str) -> None:
    """Before it is announced to a whole fleet."""
    with pytest.raises(ConfigError, match="RLBUS_ADVERTISE_HOST"):
        SystemConfig(advertise_host=host)


@pytest.mark.parametrize(
    "host", ["me", "gpu-3.example.org", "my_box.", "10.0.0.1", "::1", "[fd00::1]", "xn--mller-kva"]
)
def test_a_host_is_a_name_or_an_address(host: str) -> None:
    """Underscores, too, as Docker has them; IPv6 with or without brackets."""
    assert SystemConfig(advertise_host=host).advertise_host == host
