"""A trainer whose snapshot takes its time on the disk, after the update has ended."""

import asyncio
import threading
from typing import Any

import pytest

from rlbus._snapshots import Snapshots
from rlbus.bus import Bus
from rlbus.schemas import SnapshotKind, Version
from rlbus.testing import LoopClock, MemoryBroker, run
from rlbus.trainer import Trainer
from rlbus.transfer.bounded import run_in_thread
from rlbus.transfer.fake import FakeRecording, FakeSource
from rlbus.transfer.plane import Sent
from tests.unit.rlbus.scripted_controller import NAMESPACE, SPECS, Controller, ScriptedPlane, Source, well

pytestmark = pytest.mark.unit


def test_an_update_that_was_committed_is_noted_also_when_it_is_cancelled_while_the_disk_is_waited_for() -> None:
    """The fleet is at its version; whoever cancelled reads so."""
    disk, is_writing = threading.Event(), threading.Event()

    class Slow(FakeRecording):
        def finish(self) -> FakeSource:
            is_writing.set()
            assert disk.wait(30.0)
            return super().finish()

    class Reading(ScriptedPlane):
        async def send(self, source: Any, specs: Any, **options: Any) -> Sent:
            assert len(list(source)) == len(SPECS)
            return await super().send(source, specs, **options)

    async def body() -> None:
        broker = MemoryBroker()
        snapshots = Snapshots(SnapshotKind.MEMORY, lambda _, specs: Slow(specs))
        async with Bus(broker.connect(), clock=LoopClock()) as theirs, Bus(broker.connect(), clock=LoopClock()) as ours:
            controller = Controller(theirs, well)
            trainer = Trainer(ours, NAMESPACE, Reading(), snapshots=snapshots)
            task = asyncio.create_task(trainer.update_weights(Source(), version=7))
            await run_in_thread(lambda: is_writing.wait(30.0), name="test")
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as caught:
                await task
            assert trainer.version == Version(step=7)
            assert caught.value.__notes__ == [f"update op {controller.updates()[0].op_id} had ended: ok"]
            disk.set()
            await trainer.aclose()
            await controller.aclose()

    run(body())
