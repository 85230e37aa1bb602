"""The commands of a supervised vllm-rs and its agent."""

import json
import sys
from typing import Any

import pytest

from rlbus.errors import ConfigError
from rlbus.workers.vllm_grpc.supervisor import binary, check_options, pair_of, split
from rlbus.workers.vllm_http.supervisor import Pair

pytestmark = pytest.mark.unit

AGENT_ENV = {"RLBUS_URL": "nats://bus:4222", "RLBUS_INSTANCE_ID": "7"}


def pair(*server: str, **more: Any) -> Pair:
    """For `vllm-rs serve <server>`."""
    given: dict[str, Any] = {
        "binary_path": "/bin/vllm-rs",
        "http_port": 8123,
        "grpc_port": 8124,
        "environ": {},
        "arguments": ("--header", "a=b"),
        "agent_env": AGENT_ENV,
        "verbosity": 0,
        "run_dir": "/run",
    }
    return pair_of(server, **{**given, **more})


def test_server_gets_what_updates_need_and_stays_off_the_bus() -> None:
    """Its own options before the dashes, those of its engine after them; a user's are kept."""
    environ = {"RLBUS_URL": "nats://bus:4222", "VLLM_PLUGINS": "other"}
    server = pair("MODEL", "--dtype", "float32", "--", "--enforce-eager", environ=environ).server
    at = server.argv.index("--")
    assert server.argv[:5] == ("/bin/vllm-rs", "serve", "MODEL", "--dtype", "float32")
    front = server.argv[5:at]
    assert front == ("--port", "8123", "--grpc-port", "8124", "--python", sys.executable)
    assert server.argv[at + 1 : at + 3] == ("--enforce-eager", "--weight-transfer-config")
    assert json.loads(server.argv[at + 3]) == {"backend": "rlbus"}
    assert (server.env["RLBUS_URL"], server.env["VLLM_PLUGINS"]) == ("", "rlbus,other")
    assert not server.beats


def test_what_the_user_says_wins() -> None:
    """Ports, interpreter and transfer, in either spelling; nothing is said twice."""
    server = pair(
        "M", "--port=1", "--grpc-port", "2", "--python=py", "--", '--weight-transfer-config={"backend":"gloo"}'
    )
    assert server.server.argv == (
        *("/bin/vllm-rs", "serve", "M", "--port=1", "--grpc-port", "2", "--python=py", "--"),
        '--weight-transfer-config={"backend":"gloo"}',
    )


def test_agent_is_told_where_its_server_is_and_who_it_is() -> None:
    """By the address that it can reach, and the one that others can."""
    agent = pair("M").agent
    assert agent.argv[3:] == (
        *("worker", "vllm-grpc", "--target", "127.0.0.1:8124", "--http-url", "http://127.0.0.1:8123"),
        *("--header", "a=b", "--no-restart"),
    )
    assert {**AGENT_ENV, "RLBUS_RUN_DIR": "/run"}.items() <= agent.env.items()
    wild = pair("M", "--host", "0.0.0.0", advertise_host="10.0.0.7").agent.argv
    assert wild[wild.index("--target") + 1] == "127.0.0.1:8124"
    assert wild[wild.index("--http-url") + 1] == "http://10.0.0.7:8123"
    six = pair("M", "--host", "::", advertise_host="fd00::7").agent.argv
    assert six[six.index("--target") + 1] == "[::1]:8124"
    assert six[six.index("--http-url") + 1] == "http://[fd00::7]:8123"


@pytest.mark.parametrize(
    ("server", "name"),
    [
        ([], "MODEL"),
        (["--dtype", "float32"], "MODEL"),
        (["--", "--enforce-eager"], "MODEL"),
        (["M", "--uds", "/tmp/s"], "--uds"),
        (["M", "--port", "0"], "--port"),
        (["M", "--grpc-port=0"], "--grpc-port"),
        (["M", "--ssl-certfile", "x.pem"], "--ssl-certfile"),
    ],
)
def test_options_with_which_no_sidecar_reaches_the_server_are_refused(server: list[str], name: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError) as caught:
        check_options(server)
    assert caught.value.name == name


def test_only_the_first_dashes_divide() -> None:
    """What comes after them is the engine's."""
    assert split(["M", "-a", "--", "-b", "--", "-c"]) == (["M", "-a"], ["-b", "--", "-c"])
    assert split(["M"]) == (["M"], [])


def test_missing_binary_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With where it lies."""
    monkeypatch.setenv("PATH", "")
    assert binary({"VLLM_RUST_FRONTEND_PATH": sys.executable}) == sys.executable
    for wrong in ("/no/such/program", __file__, "/"):
        with pytest.raises(ConfigError) as caught:
            binary({"VLLM_RUST_FRONTEND_PATH": wrong})
        assert (caught.value.name, caught.value.value) == ("VLLM_RUST_FRONTEND_PATH", wrong)
    with pytest.raises(ConfigError, match="vllm/vllm-rs"):
        binary({})
