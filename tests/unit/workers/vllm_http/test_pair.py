"""The commands of a supervised server and its agent."""

import json
import socket
from typing import Any

import pytest

from rlbus.errors import ConfigError
from rlbus.workers.vllm_http.supervisor import KEY_ENV, Pair, kept_port, pair_of

pytestmark = pytest.mark.unit

AGENT_ENV = {"RLBUS_URL": "nats://bus:4222", "RLBUS_INSTANCE_ID": "7"}


def pair(*options: str, **more: Any) -> Pair:
    """For these vLLM options."""
    given: dict[str, Any] = {
        "port": 8123,
        "is_cpu_build": False,
        "arguments": ("--header", "a=b"),
        "environ": {},
    } | more
    return pair_of("MODEL", options, agent_env=AGENT_ENV, verbosity=0, run_dir="/run", **given)


def test_server_gets_what_a_sidecar_needs_and_stays_off_the_bus() -> None:
    """Dev mode, plugin, transfer and port; but not where the bus is, also if this process knows it."""
    server = pair("--dtype", "float32", environ={"RLBUS_URL": "nats://bus:4222", "VLLM_PLUGINS": "other"}).server
    assert server.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert server.env["VLLM_PLUGINS"] == "rlbus,other"
    assert server.env["RLBUS_URL"] == ""
    assert not server.beats
    argv = list(server.argv)
    assert argv[argv.index("serve") + 1 :][:3] == ["MODEL", "--dtype", "float32"]
    assert argv[argv.index("--port") + 1] == "8123"
    assert json.loads(argv[argv.index("--weight-transfer-config") + 1]) == {"backend": "rlbus"}


def test_agent_is_told_where_its_server_is_and_who_it_is() -> None:
    """And nobody else starts it again."""
    agent = pair().agent
    assert agent.argv[3:] == (
        *("worker", "vllm-http", "--url", "http://127.0.0.1:8123", "--api-key-env", KEY_ENV),
        *("--header", "a=b", "--no-restart"),
    )
    assert {**AGENT_ENV, "RLBUS_RUN_DIR": "/run", KEY_ENV: ""}.items() <= agent.env.items()


def test_copies_of_adapters_outlive_an_agent_unless_the_user_has_a_place_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server, which goes on, reads them again after every update of its weights."""
    monkeypatch.delenv("RLBUS_LORA_CACHE_DIR", raising=False)
    assert pair().agent.env["RLBUS_LORA_CACHE_DIR"] == "/run/loras"
    monkeypatch.setenv("RLBUS_LORA_CACHE_DIR", "/mine")
    assert "RLBUS_LORA_CACHE_DIR" not in pair().agent.env


@pytest.mark.parametrize(
    ("options", "environ", "api_key", "expected"),
    [
        (("--api-key", "one"), {}, None, "one"),
        ((), {"VLLM_API_KEY": "two"}, None, "two"),
        (("--api-key", "one"), {"VLLM_API_KEY": "two"}, None, "one"),
        ((), {}, "three", "three"),
        ((), {"VLLM_API_KEY": "two", "RLBUS_SYSTEM_TOKEN": "four"}, None, "two"),
        ((), {"RLBUS_SYSTEM_TOKEN": "four"}, None, "four"),
    ],
)
def test_servers_key_is_the_agents(
    options: tuple[str, ...], environ: dict[str, str], api_key: str | None, expected: str
) -> None:
    """SCENARIOS 43: wherever vLLM would take it from; never on the agent's command line. Without one rlbus' token opens
    the plugin's routes.
    """
    both = pair(*options, environ=environ, api_key=api_key)
    assert both.agent.env[KEY_ENV] == expected
    assert expected not in both.agent.argv
    assert both.server.env.get("VLLM_API_KEY") == api_key


@pytest.mark.parametrize(
    ("options", "url"),
    [
        (("--host", "0.0.0.0"), "http://127.0.0.1:8123"),
        (("--host", "::"), "http://[::1]:8123"),
        (("--host=::1",), "http://[::1]:8123"),
        (("--host", "box", "--ssl-certfile", "x"), "https://box:8123"),
    ],
)
def test_url_of_every_host_can_be_reached(options: tuple[str, ...], url: str) -> None:
    """SCENARIOS 58: a wildcard by loopback, IPv6 in brackets."""
    assert pair(*options).agent.argv[6] == url


def test_wildcard_is_advertised_by_a_name_that_others_reach() -> None:
    """SCENARIOS 58."""
    assert pair("--host", "0.0.0.0", advertise_host="box").agent.env["RLBUS_ADVERTISE_HOST"] == "box"
    assert "RLBUS_ADVERTISE_HOST" not in pair("--host", "box", advertise_host="other").agent.env


def test_port_0_is_replaced_and_a_given_one_is_kept() -> None:
    """The agent has to know it."""
    for options in (("--port", "0", "--seed", "1"), ("--port=0", "--seed", "1")):
        argv = pair(*options).server.argv
        assert [argv[i + 1] for i, option in enumerate(argv) if option == "--port"] == ["8123"]
        assert "--port=0" not in argv
        assert "--seed" in argv
    argv = pair("--port", "9000", port=9000).server.argv
    assert argv.count("--port") == 1


def test_unix_socket_is_refused() -> None:
    """There is no URL for it."""
    with pytest.raises(ConfigError, match="--uds"):
        pair("--uds", "/tmp/x")


def test_free_port_stays_taken_for_the_server() -> None:
    """SCENARIOS 25: vLLM can bind and listen on it, again and again; nobody gets it by chance."""
    with kept_port(()) as port:
        for _ in range(2):
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("127.0.0.1", port))
                server.listen()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    with kept_port(("--port", "9000")) as given:
        assert given == 9000


def test_host_on_which_nothing_can_listen_is_told() -> None:
    """As a setting that is wrong."""
    with pytest.raises(ConfigError) as caught, kept_port(("--host", "203.0.113.1")):
        pass
    assert caught.value.name == "--host"
