"""The HTTP surfaces of adopted Dynamo workers: real sockets, each worker behind an address of its own."""

import asyncio
import os
from pathlib import Path

import httpx
import pytest

from rlbus.bus import Bus
from rlbus.testing import MemoryBroker
from rlbus.workers.config import AgentConfig
from rlbus.workers.dynamo.adoption import Adopting, Adoption, StaticUrl
from rlbus.workers.dynamo.engine import EngineOptions
from rlbus.workers.peer_http import Peer
from rlbus.workers.system.settings import SystemConfig
from tests.integration.test_server import listening_ports
from tests.unit.workers.dynamo.fake_dynamo import FakeDynamo, FakeWorker, make_checkpoint

pytestmark = pytest.mark.integration

ONE, TWO = "http://one:9000", "http://two:9000"
LIMIT_S = 90.0


def test_each_adopted_worker_has_a_surface_of_its_own(tmp_path: Path) -> None:
    """SCENARIOS 25: what one is told the other isn't; who leaves isn't listened for any more."""
    make_checkpoint(tmp_path / "model")
    dynamo = FakeDynamo({ONE: FakeWorker(number=1), TWO: FakeWorker(number=2)})

    async def main() -> None:
        bus = Bus(MemoryBroker().connect("sidecar"))
        how = Adopting(
            namespace="test",
            agent=AgentConfig(),
            peer_of=Peer.of,
            options=EngineOptions(model_dir=tmp_path / "model", run_dir=str(tmp_path)),
            system=SystemConfig(token="sesame"),
            bus_url="nats://127.0.0.1:4222",
            transport=dynamo,
        )
        sources = [StaticUrl(Peer.of(url), transport=dynamo) for url in (ONE, TWO)]
        adoption, stopped = Adoption(bus, sources, how), asyncio.Event()
        running = asyncio.ensure_future(adoption.run(stopped))
        headers = {"authorization": "Bearer sesame"}
        async with asyncio.timeout(LIMIT_S), httpx.AsyncClient(timeout=LIMIT_S, headers=headers) as client:
            try:
                while len(adoption.agents) < 2:  # noqa: ASYNC110 - adoption tells people, not programs
                    await asyncio.sleep(0.05)
                await asyncio.gather(*(agent.ready.wait() for agent in adoption.agents))
                urls = {a.descriptor.instance_id: a.descriptor.system_url for a in adoption.agents}
                assert len(set(urls.values())) == 2
                assert (await client.get(f"{urls['1']}/health", headers={"authorization": "no"})).status_code == 401
                answer = await client.post(f"{urls['1']}/engine/pause_generation", json={"mode": "keep"})
                assert answer.json()["status"] == "ok"
                assert [dynamo.workers[url].is_paused for url in (ONE, TWO)] == [True, False]
                assert (await client.get(f"{urls['2']}/status")).json()["descriptor"]["instance_id"] == "2"
            finally:
                stopped.set()
                await running
                for source in sources:
                    await source.aclose()
                await bus.aclose()
            # Not by connecting: anybody may have been given the ports meanwhile.
            assert not {httpx.URL(url or "").port for url in urls.values()} & listening_ports(os.getpid())

    asyncio.run(main())
