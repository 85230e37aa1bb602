"""Where a worker keeps what outlives its process, and what it is told."""

from pathlib import Path

import pytest

from rlbus.config import BusConfig
from rlbus.workers.supervisor.environment import Named, state_dir_for, worker_env
from rlbus.workers.supervisor.worker import own_command

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("instance_id", "environ", "expected"),
    [
        (None, {}, "/run/state"),
        ("7", {"XDG_STATE_HOME": "/s"}, "/s/rlbus"),
        (None, {"RLBUS_INSTANCE_ID": "7", "XDG_STATE_HOME": "/s"}, "/s/rlbus"),
        ("7", {"XDG_STATE_HOME": "not/absolute"}, str(Path.home() / ".local/state/rlbus")),
        (None, {"RLBUS_STATE_DIR": "/given"}, "/given"),
    ],
)
def test_drawn_id_keeps_nothing_beyond_its_supervisor(
    instance_id: str | None, environ: dict[str, str], expected: str
) -> None:
    """A given one is the same worker tomorrow; a folder that was given counts for both."""
    assert state_dir_for(Named.of(None, instance_id, environ), "/run", environ) == expected


def test_environment_names_the_worker_and_leaves_nothing_of_another_bus() -> None:
    """Empty variables hide inherited ones."""
    named = Named.of("decode", "7", {})
    env = worker_env(BusConfig(url="nats://h:1", namespace="ns"), named.identity, ["/a", "/b"], "/s", ["/l", "/m"])
    assert env["RLBUS_URL"] == "nats://h:1"
    assert env["RLBUS_TOKEN"] == ""
    assert (env["RLBUS_COMPONENT"], env["RLBUS_INSTANCE_ID"], env["RLBUS_STATE_DIR"]) == ("decode", "7", "/s")
    assert env["RLBUS_WEIGHT_ROOTS"] == "/a:/b"
    assert env["RLBUS_LORA_ROOTS"] == "/l:/m"


def test_own_process_is_not_supervised_once_more() -> None:
    """And says as much as its supervisor does."""
    command = own_command(("fake", "--world-size", "2"), 2)({"A": "b"}, "/run")
    assert command.argv[1:] == ("-m", "rlbus", "-vv", "worker", "fake", "--world-size", "2", "--no-restart")
    assert command.env == {"A": "b"}
