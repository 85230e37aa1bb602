"""vLLM's `VLLMWeightSyncClient` for a whole fleet: ours over the bus, and vLLM's own over the controller's HTTP."""

import ast
import asyncio
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlbus
from rlbus.errors import ClosedError, ConfigError, WrongStateError
from rlbus.schemas import FleetView, Generation, OpStatus, Version
from rlbus.sync_client import BusWeightSyncClient, version_of

pytestmark = pytest.mark.integration

LIMIT_S = 280.0
INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1}
# What runs vLLM's own client; its imports take seconds.
THEIRS = """
import sys
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
client = HTTPVLLMWeightSyncClient(sys.argv[1], timeout=60)
client.init_weight_transfer_engine({"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 4})
for step in (11, 12):
    client.start_weight_update()
    client.update_weights({"step": step})
    client.finish_weight_update(f"{step}")
client.shutdown_weight_transfer_engine()
"""


def start(*argv: str, url: str | None = None) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A command with `--json`, and its document."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("RLBUS_")}
    env |= {} if url is None else {"RLBUS_URL": url}
    command = [sys.executable, "-m", "rlbus", *argv, "--json"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def ready(url: str) -> FleetView:
    """The fleet, once whoever leads it knows both workers: after a lease was lost, the next one has to find them."""

    async def main() -> FleetView:
        async with rlbus.connect(url, namespace="default") as bus:
            return await bus.fleet.wait_ready(num_workers=2, deadline_s=LIMIT_S)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def services() -> Iterator[dict[str, Any]]:
    """A server, a controller with HTTP, and two workers with 1 and 2 ranks."""
    process, document = start("up", "--http-port", "0")
    processes = [process]
    for number in (1, 2):
        argv = ("worker", "fake", "--instance-id", str(number), "--world-size", str(number), "--no-restart")
        processes.append(start(*argv, url=document["url"])[0])
    yield document
    for process in reversed(processes):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60.0)


@pytest.fixture
def up(services: dict[str, Any]) -> dict[str, Any]:
    """They, once the fleet is complete."""
    ready(services["url"])
    return services


def test_it_has_the_methods_of_vllms_protocol() -> None:
    """Names and parameters, read from the installed vLLM without importing it; the protocol is structural."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM isn't installed")
    source = Path(found.origin).parent / "distributed" / "weight_transfer" / "base.py"
    [protocol] = [
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "VLLMWeightSyncClient"
    ]
    theirs = {f.name: [a.arg for a in f.args.args] for f in protocol.body if isinstance(f, ast.FunctionDef)}
    assert len(theirs) == 4
    ours = {name: list(inspect.signature(getattr(BusWeightSyncClient, name)).parameters) for name in theirs}
    assert ours == theirs


def test_one_client_updates_a_mixed_fleet(up: dict[str, Any]) -> None:
    """One init_info for workers of unequal size, two rounds over one group, the fleet's next versions."""
    with BusWeightSyncClient(up["url"]) as client:
        assert client.world_size() == 3
        client.init_weight_transfer_engine(INIT | {"world_size": 4})
        for step in (1, 2):
            client.start_weight_update()
            client.update_weights({"step": step})
            client.update_weights([{"step": step}] * 3)
            client.finish_weight_update()
            assert client.report is not None
            assert (client.report.status, client.report.version) == (OpStatus.OK, Version(step=step))
        client.start_weight_update()
        client.update_weights({"step": 5})
        client.finish_weight_update("5")
        assert client.report is not None
        assert client.report.version == Version(step=5)
        client.shutdown_weight_transfer_engine()


def test_what_cannot_work_is_said_before_anything_is_done(up: dict[str, Any]) -> None:
    """A group that never comes together, a version that has no order, info that can't travel."""
    with BusWeightSyncClient(up["url"]) as client:
        with pytest.raises(WrongStateError, match=r"backend/1 1, backend/2 2"):
            client.init_weight_transfer_engine(INIT | {"world_size": 3})
        with pytest.raises(ConfigError, match="weight_version"):
            client.finish_weight_update("latest")
        with pytest.raises(ConfigError, match="JSON"):
            client.update_weights({"ipc_handles": object()})
        with pytest.raises(WrongStateError, match="no update of this kind is open"):
            client.update_weights({"step": 1})
    with pytest.raises(ClosedError):
        client.start_weight_update()
    with pytest.raises(ClosedError), client:
        pass


@pytest.mark.timeout(1000)  # vLLM's imports take a minute beside others on two cores, and more on a busy machine
def test_vllms_own_http_client_drives_the_whole_fleet(up: dict[str, Any]) -> None:
    """Unchanged, on the controller's address."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM isn't installed")
    done = subprocess.run(
        [sys.executable, "-c", THEIRS, up["http_url"]], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    fleet = ready(up["url"])
    assert fleet.version == Version(step=12)
    assert [member.status.generation for member in fleet.members] == [Generation.RUNNING] * 2


@pytest.mark.parametrize("text", ["", "v1", "1.2.3", "-1", ".", "1.", "\u0661", "9" * 17])
def test_a_version_that_has_no_order_is_refused(text: str) -> None:
    """Versions are compared here, so that none goes backwards."""
    with pytest.raises(ConfigError):
        version_of(text)


def test_versions_are_steps_or_incarnations_with_steps() -> None:
    """As the CLI takes them."""
    assert (version_of("7"), version_of("2.7")) == (Version(step=7), Version(incarnation=2, step=7))
