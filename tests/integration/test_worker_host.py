"""`rlbus worker torch --host` as a real process: where its engine listens, and what it announces of that."""

import asyncio
import json
import os
import sys
from pathlib import Path

import httpx
import pytest

from rlbus import subjects
from rlbus.bus import Bus
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.schemas import Announcement, WorkerMessage
from rlbus.server import EmbeddedServer
from rlbus.workers.torch_lm.make import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

# A start takes some 5 s here, and much longer on a loaded machine.
LIMIT_S = 180.0
# Another address of this machine than the default one: who listens on 127.0.0.1 isn't reached here.
ELSEWHERE = "127.0.0.2"


async def check_answers_elsewhere(bus: Bus, url: str, folder: Path) -> None:
    """Start a worker that listens everywhere and is told where it is reached; its engine answers there."""
    heard: asyncio.Queue[Announcement] = asyncio.Queue()

    def hear(message: WorkerMessage, _: object) -> None:
        if isinstance(message, Announcement):
            heard.put_nowait(message)

    bus.subscribe(subjects.worker("default", "backend", "7"), WorkerMessage, hear)
    env = {k: v for k, v in os.environ.items() if not k.startswith("RLBUS_")}
    env |= {"RLBUS_URL": url, "RLBUS_ADVERTISE_HOST": ELSEWHERE, "XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = ("worker", "torch", str(folder / "model"), "--instance-id", "7", "--host", "0.0.0.0", "--json")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rlbus", *command, env=env, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            assert json.loads(await process.stdout.readline())["worker"] == "backend/7"
            descriptor = (await heard.get()).descriptor
        assert descriptor.completions_url is not None
        assert httpx.URL(descriptor.completions_url).host == ELSEWHERE
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            assert (await client.get(f"{descriptor.completions_url}/health")).status_code == 200
    finally:
        process.terminate()
        await process.wait()


def test_host_of_the_command_reaches_the_engine_of_the_supervised_process(tmp_path: Path) -> None:
    """Without --host it listens on 127.0.0.1 only, and nobody reaches it where it says."""
    make_tiny_model(tmp_path / "model", vocab_size=64)

    async def main() -> None:
        async with EmbeddedServer() as server, await connect_bus(BusConfig(url=server.url), name="test") as bus:
            await check_answers_elsewhere(bus, server.url, tmp_path)

    asyncio.run(main())
