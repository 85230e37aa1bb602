"""Fan-out latency: rlbus' scatter-gather against a plain NATS gather without any logic.

Both go over the same server to the same responders (64 connections in a process of their own, or fewer). Prints one
line per fleet size with both medians and their ratio; the last line is JSON. The bar of DESIGN section 10 is a ratio of
at most 1.25.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from rlbus import subjects
from rlbus._process import Child
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.codec import decode, encode
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.fanout import Limits, fanout
from rlbus.schemas import Command, FlushCache, Result, ResultStatus, worker_id
from rlbus.server import EmbeddedServer

NAMESPACE = "bench"
COMPONENT = "backend"
MAX_CONNECTIONS = 64
LIMITS = Limits(ack_s=10.0, stall_s=10.0, deadline_s=30.0)
READY_S = 60.0


async def respond(url: str, num_workers: int) -> None:
    """The responders: each worker answers every command at once with a result. Ends with its parent."""
    config = BusConfig(url=url, namespace=NAMESPACE, connect_s=30.0)
    buses = [await connect_bus(config, name=f"responder-{i}") for i in range(min(num_workers, MAX_CONNECTIONS))]
    for i in range(num_workers):
        _serve(buses[i % len(buses)], str(i + 1))
    for bus in buses:
        await bus.barrier(10.0)
    print("ready", flush=True)
    await asyncio.Event().wait()


def _serve(bus: Bus, instance_id: str) -> None:
    def answer(message: Message) -> None:
        command: Command = decode(message.data, Command, message.subject)
        result = Result(
            op_id=command.op_id,
            component=COMPONENT,
            instance_id=instance_id,
            boot_id="boot",
            status=ResultStatus.OK,
        )
        assert message.reply is not None
        bus.transport.publish(f"{message.reply}.{instance_id}", encode(result))

    for pattern in subjects.commands_for(NAMESPACE, COMPONENT, instance_id):
        bus.transport.subscribe(pattern, answer)


async def plain_gather(client: Client, num_workers: int, data: bytes) -> None:
    """Publish once and count answers, with nats-py itself; nothing else."""
    inbox = client.new_inbox()
    done = asyncio.Event()
    count = 0

    async def on_answer(_: Msg) -> None:
        nonlocal count
        count += 1
        if count == num_workers:
            done.set()

    subscription = await client.subscribe(f"{inbox}.*", cb=on_answer)
    await client.publish(subjects.command(NAMESPACE, COMPONENT, "flush_cache"), data, reply=inbox)
    async with asyncio.timeout(LIMITS.deadline_s):
        await done.wait()
    await subscription.unsubscribe()


async def median_s(rounds: int, job: Callable[[], Awaitable[object]]) -> float:
    """Median wall time of `job`, after two rounds of warming up."""
    times = []
    for i in range(rounds + 2):
        began = time.perf_counter()
        await job()
        if i >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


async def measure(url: str, num_workers: int, rounds: int) -> dict[str, float]:
    """Both medians for one fleet size, interleaved in blocks so that drift hits both."""
    child = await Child.start(
        "responders",
        [sys.executable, __file__, "--respond", url, "--workers", str(num_workers)],
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(READY_S):
            assert await child.stdout.readline() == b"ready\n"
        client = await nats.connect(url)
        async with await connect_bus(BusConfig(url=url, namespace=NAMESPACE), name="bench") as bus:
            members = [worker_id(COMPONENT, str(i + 1)) for i in range(num_workers)]
            command = Command(op_id="plain", term=1, expires_at=time.time() + 3600, body=FlushCache())

            async def rlbus_fanout() -> None:
                found = await fanout(
                    bus,
                    NAMESPACE,
                    FlushCache(),
                    members=members,
                    op_id=bus.new_id(),
                    term=1,
                    limits=LIMITS,
                    everybody={COMPONENT: num_workers},
                )
                assert all(g.is_ok for g in found.values())

            blocks = []
            for _ in range(3):
                plain = await median_s(rounds, lambda: plain_gather(client, num_workers, encode(command)))
                blocks.append((plain, await median_s(rounds, rlbus_fanout)))
        await client.close()
    finally:
        await child.stop()
    plain_s, rlbus_s = (statistics.median(values) for values in zip(*blocks, strict=True))
    return {"workers": num_workers, "plain_ms": 1e3 * plain_s, "rlbus_ms": 1e3 * rlbus_s, "ratio": rlbus_s / plain_s}


async def main(sizes: list[int], rounds: int) -> None:
    """Measure each fleet size on a fresh set of responders."""
    rows = []
    async with EmbeddedServer() as server:
        for num_workers in sizes:
            row = await measure(server.url, num_workers, rounds)
            rows.append(row)
            print(
                "{workers:6.0f} workers  plain {plain_ms:8.2f} ms  rlbus {rlbus_ms:8.2f} ms  ratio {ratio:.2f}".format(
                    **row
                )
            )
    print(json.dumps({"bench": "fanout", "rows": rows}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--respond", metavar="URL")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="*", default=[8, 64, 512, 2048])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    if args.respond:
        asyncio.run(respond(args.respond, args.workers))
    else:
        asyncio.run(main(args.sizes, args.rounds))
