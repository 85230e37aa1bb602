"""How a trainer answers a controller that asks it to send its snapshot again."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rlbus._catching_up import CatchUpService
from rlbus._snapshots import Kept, Snapshots
from rlbus.bus import Bus
from rlbus.controller.testing import request_of
from rlbus.errors import BrokenError, DeadlineError
from rlbus.schemas import (
    CatchUpTask,
    ControlReply,
    FaultCode,
    OpAccepted,
    OpStatus,
    Refusal,
    SnapshotKind,
    TensorSpec,
    Version,
    WorkerId,
)
from rlbus.testing import LoopClock, MemoryBroker, run
from rlbus.transfer.fake import FakeRecording, FakeSource

pytestmark = pytest.mark.unit

SPECS = (TensorSpec(name="a", dtype="float32", shape=(2,)),)
V1, V2 = Version(step=1), Version(step=2)


class Rig:
    """A service that keeps version 1, and the controller's end. `runs` are the tasks that it began, `ends` how."""

    def __init__(self, trainer_bus: Bus, bus: Bus, snapshots: Snapshots) -> None:
        self.is_busy = False
        self.runs: list[str] = []
        self.ends: list[str] = []
        self.error: Exception | None = None
        self.bus = bus
        self.trainer_bus = trainer_bus
        self.service = CatchUpService(trainer_bus, snapshots, self._run, lambda: self.is_busy)
        self.inbox = self.service.inbox

    async def _run(self, kept: Kept, task: CatchUpTask) -> None:
        self.runs.append(task.op_id)
        assert kept.request.version == task.version
        try:
            await asyncio.sleep(10.0)
            if self.error is not None:
                raise self.error
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            await asyncio.sleep(2.0)  # what taking it back takes
            raise
        self.ends.append("done")

    async def ask(self, op_id: str, version: Version = V1) -> FaultCode | None:
        """Ask for it; why not, None: accepted."""
        task = CatchUpTask(op_id=op_id, version=version, workers=(WorkerId("backend/2"),))
        answer: ControlReply = await self.bus.request(self.inbox, task, ControlReply, limit_s=1.0)
        assert isinstance(answer, OpAccepted | Refusal)
        assert answer.op_id == op_id
        return answer.fault.code if isinstance(answer, Refusal) else None


def play(scenario: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    """Run it in virtual time."""

    async def main() -> None:
        broker = MemoryBroker()
        snapshots = Snapshots(SnapshotKind.MEMORY, lambda _, specs: FakeRecording(specs))
        request = request_of(version=V1)
        source = snapshots.record(request, FakeSource(SPECS), SPECS)
        list(source)
        await snapshots.settle(request, source, SPECS, OpStatus.OK)
        async with Bus(broker.connect(), clock=LoopClock()) as trainer_bus, Bus(broker.connect()) as bus:
            rig = Rig(trainer_bus, bus, snapshots)
            try:
                await scenario(rig)
            finally:
                await rig.service.aclose()

    run(main())


def test_a_task_is_accepted_and_a_repeat_changes_nothing() -> None:
    """The answer may have been lost."""

    async def scenario(rig: Rig) -> None:
        assert [await rig.ask("one"), await rig.ask("one")] == [None, None]
        await asyncio.sleep(11.0)
        assert (rig.runs, rig.ends) == (["one"], ["done"])
        assert await rig.ask("two") is None
        assert rig.runs == ["one", "two"]

    play(scenario)


def test_one_at_a_time_and_none_while_an_update_runs() -> None:
    """The controller asks again later."""

    async def scenario(rig: Rig) -> None:
        rig.is_busy = True
        assert await rig.ask("one") is FaultCode.BUSY
        rig.is_busy = False
        assert await rig.ask("two") is None
        assert await rig.ask("three") is FaultCode.BUSY
        assert rig.runs == ["two"]

    play(scenario)


def test_a_version_that_is_not_kept_is_refused() -> None:
    """It was never sent by this trainer, or is forgotten."""

    async def scenario(rig: Rig) -> None:
        assert await rig.ask("one", V2) is FaultCode.UNKNOWN_OP
        assert rig.runs == []

    play(scenario)


def test_stopping_waits_until_it_is_taken_back() -> None:
    """So that the update which follows finds the group free."""

    async def scenario(rig: Rig) -> None:
        await rig.service.stop()
        await rig.ask("one")
        await asyncio.sleep(1.0)
        began_s = asyncio.get_running_loop().time()
        await rig.service.stop()
        assert (rig.ends, asyncio.get_running_loop().time() - began_s) == (["cancelled"], 2.0)

    play(scenario)


@pytest.mark.parametrize("error", [BrokenError("the bus", "is away"), ZeroDivisionError()])
def test_one_that_fails_is_logged_and_the_next_is_taken(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody awaits it; the controller sees for itself how it ended."""

    async def scenario(rig: Rig) -> None:
        rig.error = error
        await rig.ask("one")
        await asyncio.sleep(11.0)
        assert await rig.ask("two") is None

    play(scenario)
    assert "catch-up one of backend/2" in caplog.text


def test_a_closed_trainer_is_not_there_for_anybody() -> None:
    """Its task is ended, and nobody answers any more."""

    async def scenario(rig: Rig) -> None:
        await rig.ask("one")
        await asyncio.sleep(1.0)
        await rig.service.aclose()
        assert rig.ends == ["cancelled"]
        with pytest.raises(DeadlineError):
            await rig.ask("two")

    play(scenario)


def test_what_is_no_task_is_counted_and_harms_nobody() -> None:
    """The inbox is an address like any other."""

    async def scenario(rig: Rig) -> None:
        with pytest.raises(DeadlineError):
            await rig.bus.request(rig.inbox, OpAccepted(op_id="x"), ControlReply, limit_s=1.0)
        assert rig.trainer_bus.num_bad_messages == 1
        assert await rig.ask("one") is None

    play(scenario)
