"""The controller as a process, on a real server: it serves, and a signal ends it within its bound."""

import asyncio
import os
import signal

import pytest

from rlbus.client import FleetClient
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.controller.app import serve
from rlbus.controller.service import Controller
from rlbus.errors import BrokenError
from rlbus.server import EmbeddedServer

pytestmark = pytest.mark.integration


def test_it_answers_on_a_real_server_until_it_is_told_to_stop() -> None:
    """SIGTERM ends it; afterwards nobody takes requests."""

    async def main() -> None:
        async with EmbeddedServer() as server:
            config = BusConfig(url=server.url, namespace="app")
            # One that stands still for as long as its lease lives leads again, in a later term.
            controllers: asyncio.Queue[Controller] = asyncio.Queue()
            serving = asyncio.create_task(serve(config, on_ready=controllers.put_nowait))
            controller = await controllers.get()
            async with await connect_bus(config, name="test") as bus:
                client = FleetClient(bus, "app")
                view = await client.status()
                assert view.term >= controller.term
                assert view.members == ()
                os.kill(os.getpid(), signal.SIGTERM)
                async with asyncio.timeout(60.0):
                    await serving
                with pytest.raises(BrokenError):
                    await client.status()

    asyncio.run(main())


def test_without_a_server_it_says_so_within_its_limit() -> None:
    """One clear error, no hang."""

    async def main() -> None:
        async with asyncio.timeout(60.0):
            await serve(BusConfig(url="nats://127.0.0.1:1", connect_s=1.0))

    with pytest.raises(BrokenError):
        asyncio.run(main())
