"""The HTTP surface of a worker that runs by itself: real sockets, as others reach it."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from rlbus.config import BusConfig
from rlbus.errors import ConfigError
from rlbus.server import EmbeddedServer
from rlbus.workers.agent import Agent
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.run import serve
from rlbus.workers.system.settings import SystemConfig
from tests.integration.test_server import listening_ports

pytestmark = pytest.mark.integration

LIMIT_S = 90.0


@contextlib.asynccontextmanager
async def worker(system: SystemConfig) -> AsyncIterator[Agent]:
    """A fake worker on a real bus."""
    async with EmbeddedServer(jetstream=False) as server:
        ready: asyncio.Future[Agent] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(
            serve(
                FakeEngine(),
                BusConfig(url=server.url),
                system=system,
                on_ready=ready.set_result,
                handle_signals=False,
            )
        )
        either: set[asyncio.Future[Any]] = {running, ready}
        await asyncio.wait(either, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        agent = ready.result()
        try:
            yield agent
        finally:
            agent.stop()
            await asyncio.wait_for(running, LIMIT_S)


def test_a_worker_announces_a_surface_that_answers() -> None:
    """On loopback with the port that it really has."""

    async def main() -> None:
        async with worker(SystemConfig()) as agent, httpx.AsyncClient(timeout=LIMIT_S) as client:
            url = agent.descriptor.system_url
            assert url is not None
            assert (await client.get(f"{url}/health")).json()["status"] == "ready"
        # Not by connecting: anybody may have been given the port meanwhile.
        assert httpx.URL(url).port not in listening_ports(os.getpid())

    asyncio.run(main())


def test_a_worker_on_a_wildcard_announces_an_address_and_wants_its_token() -> None:
    """SCENARIOS 58 and 43."""

    async def main() -> None:
        system = SystemConfig(host="0.0.0.0", token="right")
        async with worker(system) as agent, httpx.AsyncClient(timeout=LIMIT_S) as client:
            url = agent.descriptor.system_url
            assert url is not None
            assert "0.0.0.0" not in url
            assert (await client.get(f"{url}/health")).status_code == 401
            headers = {"Authorization": "Bearer right"}
            assert (await client.get(f"{url}/health", headers=headers)).status_code == 200

    asyncio.run(main())


def test_an_ipv6_address_stands_in_brackets() -> None:
    """SCENARIOS 58."""

    async def main() -> None:
        async with worker(SystemConfig(host="::1")) as agent, httpx.AsyncClient(timeout=LIMIT_S) as client:
            url = agent.descriptor.system_url
            assert url is not None
            assert url.startswith("http://[::1]:")
            assert (await client.get(f"{url}/health")).status_code == 200

    asyncio.run(main())


def test_without_a_surface_none_is_announced() -> None:
    """Port -1."""

    async def main() -> None:
        async with worker(SystemConfig(port=-1)) as agent:
            assert agent.descriptor.system_url is None

    asyncio.run(main())


def test_a_port_that_is_taken_is_told_before_the_worker_is_on_the_bus() -> None:
    """And nothing is left behind."""

    async def main() -> None:
        async with worker(SystemConfig()) as agent:
            url = httpx.URL(agent.descriptor.system_url or "")
            with pytest.raises(ConfigError, match="can't listen"):
                async with worker(SystemConfig(port=url.port or 0)):
                    pass

    asyncio.run(main())


def test_two_workers_of_one_machine_have_two_surfaces() -> None:
    """SCENARIOS 25."""

    async def main() -> None:
        async with worker(SystemConfig()) as one, worker(SystemConfig()) as other:
            assert one.descriptor.system_url != other.descriptor.system_url

    asyncio.run(main())
