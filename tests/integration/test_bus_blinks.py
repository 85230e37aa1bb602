"""The NATS server stops for 20 s and starts on the same port, under real controllers and workers (issue 3, point 8)."""

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from rlbus import _nats
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.fanout import Limits, fanout
from rlbus.schemas import ControllerEvent, FaultCode, PauseGeneration, Target, Version, WorkerId, WorkerLeft
from rlbus.server import EmbeddedServer
from rlbus.trainer import Trainer
from rlbus.transfer.fake import FakePlane, FakePlaneScript, FakeSource
from rlbus.workers.engines.fake import DEFAULT_TENSORS, FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.run import serve
from tests.integration.commands import again_until, forgive_late_op, played, rlbus
from tests.integration.test_failover import NAMESPACE, stage_of_two
from tests.tries import best_of_async
from tests.unit.rlbus.scripted_workers import NS, ScriptedWorker

pytestmark = [pytest.mark.integration, pytest.mark.alone, pytest.mark.timeout(600)]

OUTAGE_S = 20.0
# The transfer that is under way when the server stops, in seconds.
TRANSFER_S = 8.0
NUM_WORKERS = 4
# How soon after the server's return is measured in virtual time, in tests/unit/controller/test_blink.py.
LIMIT_S = 120.0
# Fan-outs to whoever wasn't heard, each of which is heard from more.
MAX_ROUNDS = 10
SLOW = Target(components=("slow",))


@contextlib.asynccontextmanager
async def slow_workers(url: str) -> AsyncIterator[list[FakeEngine]]:
    """Two workers of component "slow", in this process: their transfers take TRANSFER_S."""
    engines = [FakeEngine(FakeScript({"receive_weights": {1: Step(transfer_s=TRANSFER_S)}})) for _ in range(2)]
    config = BusConfig(url=url, namespace=NAMESPACE)
    serving = [
        asyncio.create_task(serve(engine, config, component="slow", instance_id=str(n), handle_signals=False))
        for n, engine in enumerate(engines, 1)
    ]
    try:
        yield engines
    finally:
        for task in serving:
            task.cancel()
        await asyncio.wait(serving)


def one(number: int) -> Target:
    return Target(workers=(WorkerId(f"backend/{number}"),))


async def update(trainer: Trainer, steps: Iterator[int]) -> Version:
    """Bring the slow ones to the next version; which it is."""
    version = Version(step=next(steps))
    updated = await trainer.update_weights(FakeSource(DEFAULT_TENSORS), version=version, target=SLOW, check=False)
    forgive_late_op(updated.report)
    assert updated.ok
    return version


async def shown(url: str, generations: Sequence[str] = ()) -> dict[str, Any]:
    """`rlbus status --json`, once all four are listed as alive: of each liveness, what it does, and its weights.

    `generations`: of backend/1 and backend/2, if they are waited for, too.
    """
    until_s = time.monotonic() + LIMIT_S
    while True:
        done = await asyncio.to_thread(rlbus, "status", "--json", "--deadline", "60", url=url, namespace=NAMESPACE)
        # Until a controller and the workers are connected again: nothing there, not all, or too late an answer.
        assert done.code in (0, 4, 5), done
        members = done.document["members"] if done.code == 0 else []
        if len(members) == NUM_WORKERS:
            found = {m["worker"]: (m["liveness"], m["status"]["generation"], m["status"]["weights"]) for m in members}
            is_so = not generations or [found[f"backend/{n}"][1] for n in (1, 2)] == list(generations)
            if is_so and {liveness for liveness, _, _ in found.values()} == {"alive"}:
                return found
        assert time.monotonic() < until_s, done
        await asyncio.sleep(0.2)


def test_a_server_that_is_gone_for_20_s_costs_nobody_its_life_its_pause_or_its_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SCENARIOS 22: an idle fleet with a leased pause and a person's hold, beside it an update in mid-transfer."""

    async def main() -> float:
        async with stage_of_two() as (stage, _, _), slow_workers(stage.server.url) as engines:
            await stage.client.wait_ready(num_workers=NUM_WORKERS, deadline_s=LIMIT_S)
            left: list[ControllerEvent] = []
            stage.bus.subscribe(
                f"dyn.{NAMESPACE}.controller.event.>",
                ControllerEvent,
                lambda event, _: left.append(event) if isinstance(event, WorkerLeft) else None,
            )
            await stage.client.pause(one(1), lease_s=OUTAGE_S - 2.0)
            await stage.client.pause(one(2))
            before = await shown(stage.server.url)
            assert [before[f"backend/{n}"][1] for n in (1, 2)] == ["paused", "paused"]
            config = BusConfig(url=stage.server.url, connect_s=LIMIT_S)
            async with await connect_bus(config, name="trainer") as bus:
                plane = FakePlane(FakePlaneScript(send_s=TRANSFER_S))
                trainer = Trainer(bus, NAMESPACE, plane)
                updating = asyncio.create_task(
                    trainer.update_weights(
                        FakeSource(DEFAULT_TENSORS), version=7, target=SLOW, deadline_s=LIMIT_S, check=False
                    )
                )
                async with asyncio.timeout(LIMIT_S):
                    while not any(call.startswith("send") for call in plane.calls):  # noqa: ASYNC110 - a thread away
                        await asyncio.sleep(0.05)
                await asyncio.sleep(1.0)
                await stage.server.stop()
                await asyncio.sleep(OUTAGE_S)
                await stage.server.start()
                started_s = time.monotonic()
                after = await shown(stage.server.url, ("running", "paused"))
                report = (await updating).report
                back_s = time.monotonic() - started_s
                # Idle ones: alive as before; the lease has ended by itself, and the person's hold has not.
                assert (after["backend/1"][1], after["backend/2"]) == ("running", before["backend/2"])
                assert left == []
                # The update: one outcome each, nothing done twice, and the next one brings everybody to its version.
                assert {o.worker for o in report.outcomes} == {"slow/1", "slow/2"}
                assert [engine.calls.count("receive_weights") for engine in engines] == [1, 1]
                plane.script.send_s = 0.0
                newest = await best_of_async(functools.partial(update, trainer, itertools.count(8)))
            assert [engine.label for engine in engines] == [newest] * 2
            await asyncio.to_thread(
                again_until, lambda: rlbus("resume", url=stage.server.url, namespace=NAMESPACE).code == 0
            )
            assert {generation for _, generation, _ in (await shown(stage.server.url)).values()} == {"running"}
            assert [engine.violations for engine in engines] == [[], []]
            return back_s

    back_s = played(main)
    with capsys.disabled():
        print(f"\nthe server was gone for {OUTAGE_S:g} s; everything was settled {back_s:.1f} s after its return")


def test_answers_that_a_slow_consumer_loses_are_counted_and_never_taken_for_done_or_done_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """150 workers answer at once where 40 deliveries may wait: whoever wasn't heard is unknown, and a repeat joins."""

    async def main() -> None:
        async with (
            EmbeddedServer(jetstream=False) as server,
            await connect_bus(BusConfig(url=server.url), name="workers") as theirs,
            await connect_bus(BusConfig(url=server.url), name="controller") as ours,
        ):
            workers = [ScriptedWorker(theirs, str(n)) for n in range(150)]
            for worker in workers:
                worker.listen()
            await theirs.barrier(10.0)
            # The inbox of answers is subscribed with the first fan-out.
            monkeypatch.setattr(_nats, "PENDING_MSGS", 40)
            left = [worker.id for worker in workers]
            for _ in range(MAX_ROUNDS):
                gathered = await fanout(
                    ours,
                    NS,
                    PauseGeneration(),
                    members=left,
                    op_id="op",
                    term=1,
                    limits=Limits(ack_s=2.0, stall_s=10.0, deadline_s=30.0),
                )
                bad = [one for one in gathered.values() if not one.is_ok]
                assert {(one.is_unknown, one.fault is not None and one.fault.code) for one in bad} <= {
                    (True, FaultCode.NO_ACK)
                }
                left = [one.worker for one in bad]
                if not left:
                    break
            assert left == []
            assert ours.transport.num_dropped > 0
            assert [worker.runs for worker in workers] == [["op"]] * 150

    asyncio.run(main())
    assert any("were lost on this side" in record.getMessage() for record in caplog.records)
