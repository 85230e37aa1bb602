"""What goes wrong in this field (SCENARIOS.md), on a real NATS server."""

import asyncio

import pytest

from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.fanout import Limits, fanout
from rlbus.schemas import ChecksumsData, GetChecksums, TensorSum
from rlbus.server import EmbeddedServer
from tests.unit.rlbus.scripted_workers import NS, ScriptedWorker

pytestmark = pytest.mark.integration

NUM_WORKERS, NUM_CONNECTIONS = 256, 8
# Names and sums of so many tensors take 64 kB.
NUM_SUMS = 1365
# Far beyond what it takes (about a second), for a machine that is busy with other things.
LIMITS = Limits(ack_s=30.0, stall_s=30.0, deadline_s=60.0)


def test_256_workers_that_answer_at_once_with_64_kb_are_all_heard() -> None:
    """SCENARIOS 55: an inbox of its own, 16 MB in one burst; each worker ran it once and is counted once."""
    sums = tuple(TensorSum(name=f"model.layers.{i:04}.weight", checksum="0" * 16) for i in range(NUM_SUMS))
    data = ChecksumsData(algorithm="x", sums=sums)

    async def scenario() -> None:
        async with EmbeddedServer() as server:
            config = BusConfig(url=server.url)
            buses = [await connect_bus(config, name=f"workers-{n}") for n in range(NUM_CONNECTIONS)]
            controller = await connect_bus(config, name="controller")
            try:
                workers = [
                    ScriptedWorker(buses[n % NUM_CONNECTIONS], str(n + 1), data=data) for n in range(NUM_WORKERS)
                ]
                for worker in workers:
                    worker.listen()
                for bus in buses:
                    await bus.barrier(30.0)
                got = await fanout(
                    controller, NS, GetChecksums(), members=[w.id for w in workers], op_id="op", term=1, limits=LIMITS
                )
                assert [g.is_ok for g in got.values()] == [True] * NUM_WORKERS
                assert {g.result.data for g in got.values() if g.result is not None} == {data}
                assert {tuple(w.runs) for w in workers} == {("op",)}
            finally:
                for bus in (controller, *buses):
                    await bus.aclose()

    asyncio.run(scenario())
