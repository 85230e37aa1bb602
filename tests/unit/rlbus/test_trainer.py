"""Trainer against a scripted controller and a scripted data plane, on the in-memory bus under virtual time."""

import asyncio
import itertools

import msgspec
import pytest

from rlbus import subjects
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.errors import (
    BrokenError,
    BusyError,
    DeadlineError,
    ManifestError,
    PartialError,
    TransferError,
    VersionRegressionError,
)
from rlbus.schemas import (
    NO_EPOCH,
    CancelOp,
    Fault,
    FaultCode,
    JoinTask,
    LeaveTask,
    OpAccepted,
    OpProgress,
    OpResult,
    OpStatus,
    PauseMode,
    PutManifestPage,
    Refusal,
    SenderSignal,
    SenderStep,
    SendTask,
    Target,
    UpdateWeights,
    Version,
)
from rlbus.testing import LoopClock, MemoryBroker, run
from rlbus.trainer import Trainer
from rlbus.transfer.manifest import digest
from tests.unit.rlbus.scripted_controller import (
    NAMESPACE,
    SPECS,
    Controller,
    ScriptedPlane,
    Source,
    Tell,
    plan_of,
    play,
    report_of,
    well,
)

pytestmark = pytest.mark.unit


def test_an_update_announces_joins_sends_and_returns_the_report() -> None:
    """The messages come in the documented order, and the report has the controller's and the sender's numbers."""

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        seen: list[str] = []
        report = await trainer.update_weights(
            Source(),
            version=7,
            incarnation=2,
            target=Target(components=("decode",)),
            require=1,
            pause_mode="wait",
            reset_prefix_cache=False,
            on_progress=lambda progress: seen.append(progress.phase),
        )
        steps = [entry for entry in controller.log if entry != "alive"]
        assert steps == ["PutManifestPage", "UpdateWeights", "joined", "sent"]
        [request] = controller.updates()
        assert request.version == Version(incarnation=2, step=7)
        assert request.manifest_digest == digest(SPECS)
        assert (request.backend, request.sender_id, request.num_trainer_ranks) == ("fake", "me", 1)
        assert (request.target, request.require) == (Target(components=("decode",)), 1)
        assert (request.pause_mode, request.reset_prefix_cache) == (PauseMode.WAIT, False)
        page = controller.requests[0]
        assert isinstance(page, PutManifestPage)
        assert page.page.tensors == SPECS
        assert report.ok
        assert (report.num_bytes, report.num_tensors, report.paused_s) == (32, 2, 0.3)
        assert report.phases_s == {"group": 0.1, "transfer": 0.2}
        assert trainer.version == Version(incarnation=2, step=7)
        assert seen == ["transfer"]

    assert play(scenario) == ["join 1", "send", "aclose"]


def test_a_second_update_uses_group_and_manifest_again() -> None:
    """Nothing is announced or joined twice when nothing changed."""

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        await trainer.update_weights(Source(), version=1)
        await trainer.update_weights(Source(), version=2)
        steps = [entry for entry in controller.log if entry != "alive"]
        assert steps == ["PutManifestPage", "UpdateWeights", "joined", "sent", "UpdateWeights", "sent"]

    assert play(scenario) == ["join 1", "send", "send", "aclose"]


def test_a_manifest_that_the_controller_forgot_is_announced_again() -> None:
    """`manifest_unknown` (a restarted controller) costs the pages once more, not the update; it stays one op, so that a
    late copy of the first request isn't somebody else's (simulation, seed 4837).
    """

    async def forgetful(controller: Controller, request: UpdateWeights, tell: Tell) -> None:
        if controller.log.count("UpdateWeights") == 1:
            fault = Fault(code=FaultCode.MANIFEST_UNKNOWN, message="which?")
            return tell(Refusal(op_id=request.op_id, fault=fault))
        return await well(controller, request, tell)

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        assert (await trainer.update_weights(Source(), version=1)).ok
        assert controller.log[:4] == ["PutManifestPage", "UpdateWeights", "PutManifestPage", "UpdateWeights"]
        first, second = controller.updates()
        assert first.op_id == second.op_id

    play(scenario, forgetful)


def test_a_manifest_that_stays_unknown_ends_in_an_error() -> None:
    """Announcing again is bounded."""

    async def never(_controller: Controller, request: UpdateWeights, tell: Tell) -> None:
        tell(Refusal(op_id=request.op_id, fault=Fault(code=FaultCode.MANIFEST_UNKNOWN, message="which?")))

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        with pytest.raises(ManifestError):
            await trainer.update_weights(Source(), version=1)
        assert len(controller.updates()) == 3

    play(scenario, never)


def test_a_long_send_says_that_it_lives_every_second() -> None:
    """While 10 s of sending pass, no two signs of life are more than a second apart."""
    at: list[float] = []

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        def on_signal(signal: SenderSignal, _message: Message) -> None:
            if signal.step is SenderStep.ALIVE and signal.epoch == 1:
                at.append(asyncio.get_running_loop().time())

        controller.bus.subscribe(subjects.control(NAMESPACE, "sender"), SenderSignal, on_signal)
        assert (await trainer.update_weights(Source(), version=1)).send_s == 10.0
        assert len(at) >= 10
        assert max(b - a for a, b in itertools.pairwise(at)) <= 1.0

    play(scenario, plane=ScriptedPlane(send_s=10.0))


def test_a_long_join_says_that_it_lives_every_second() -> None:
    """A trainer that waits for others to join isn't taken for one that died."""
    at: list[float] = []

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        def on_signal(signal: SenderSignal, _message: Message) -> None:
            if signal.step is SenderStep.ALIVE:
                assert signal.num_bytes == 0
                at.append(asyncio.get_running_loop().time())

        controller.bus.subscribe(subjects.control(NAMESPACE, "sender"), SenderSignal, on_signal)
        await trainer.update_weights(Source(), version=1)
        assert len(at) >= 10
        assert max(b - a for a, b in itertools.pairwise(at)) <= 1.0

    play(scenario, plane=ScriptedPlane(join_s=10.0))


def test_a_trainer_that_waits_says_that_it_lives_from_the_first_reply_to_the_end() -> None:
    """Engines stand still for it while they are paused, however long that takes."""
    at: list[float] = []

    async def slow(controller: Controller, request: UpdateWeights, tell: Tell) -> None:
        await asyncio.sleep(0.5)
        assert not at
        tell(OpAccepted(op_id=request.op_id))
        await asyncio.sleep(10.0)
        await well(controller, request, tell)

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        def on_signal(signal: SenderSignal, _message: Message) -> None:
            if signal.step is SenderStep.ALIVE:
                assert signal.epoch in (NO_EPOCH, 1)
                at.append(asyncio.get_running_loop().time())

        controller.bus.subscribe(subjects.control(NAMESPACE, "sender"), SenderSignal, on_signal)
        assert (await trainer.update_weights(Source(), version=1)).ok
        ended_s = asyncio.get_running_loop().time()
        assert max(b - a for a, b in itertools.pairwise([*at, ended_s])) <= 1.0
        assert ended_s - at[0] >= 10.0

    play(scenario, slow)


def test_a_leave_task_releases_a_send_that_is_stuck() -> None:
    """The controller gives the group up while we send: the plane leaves at once, and the report says what failed."""
    fault = Fault(code=FaultCode.TRANSFER_FAILED, message="worker backend/1 is gone")

    async def breaking(controller: Controller, request: UpdateWeights, tell: Tell) -> None:
        tell(JoinTask(op_id=request.op_id, plan=plan_of(request)))
        await controller.signal()
        tell(SendTask(op_id=request.op_id, epoch=1, version=request.version))
        await asyncio.sleep(1.0)
        tell(LeaveTask(op_id=request.op_id, epoch=1, reason="worker lost"))
        await asyncio.sleep(1.0)
        tell(report_of(request, OpStatus.FAILED, fault))

    async def scenario(trainer: Trainer, _controller: Controller) -> None:
        started = asyncio.get_running_loop().time()
        with pytest.raises(PartialError) as caught:
            await trainer.update_weights(Source(), version=1)
        assert caught.value.report.fault == fault
        assert asyncio.get_running_loop().time() - started < 5.0
        assert trainer.version is None

    assert play(scenario, breaking, ScriptedPlane(send_s=1000.0)) == ["join 1", "send", "leave: worker lost", "aclose"]


def test_a_trainer_that_still_leaves_a_broken_group_says_that_it_lives_to_who_forms_the_next() -> None:
    """A thread that hangs in the old one may take seconds to come back; the others wait for us in the new one."""
    at: list[float] = []

    async def again(controller: Controller, request: UpdateWeights, tell: Tell) -> None:
        tell(JoinTask(op_id=request.op_id, plan=plan_of(request)))
        await controller.signal()
        tell(SendTask(op_id=request.op_id, epoch=1, version=request.version))
        await asyncio.sleep(1.0)
        tell(LeaveTask(op_id=request.op_id, epoch=1, reason="worker lost"))
        second = msgspec.structs.replace(plan_of(request), epoch=2, group_id="second")
        tell(JoinTask(op_id=request.op_id, plan=second))
        while (await controller.signal()).step is not SenderStep.JOINED:
            pass
        tell(report_of(request))

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        def on_signal(signal: SenderSignal, _message: Message) -> None:
            if signal.step is SenderStep.ALIVE and signal.epoch == 2:
                at.append(asyncio.get_running_loop().time())

        controller.bus.subscribe(subjects.control(NAMESPACE, "sender"), SenderSignal, on_signal)
        await trainer.update_weights(Source(), version=1)
        assert len(at) >= 4
        assert max(b - a for a, b in itertools.pairwise(at)) <= 1.0

    play(scenario, again, ScriptedPlane(send_s=1000.0, leave_s=4.0))


@pytest.mark.parametrize(
    ("plane", "code", "calls"),
    [
        (
            ScriptedPlane(join_error=TransferError("join", "no route to host")),
            FaultCode.GROUP_FAILED,
            ["join 1", "leave: join: no route to host", "aclose"],
        ),
        (
            ScriptedPlane(send_error=ValueError("my source is broken")),
            FaultCode.SENDER_FAILED,
            ["join 1", "send", "leave: ValueError: my source is broken", "aclose"],
        ),
    ],
    ids=["join", "send"],
)
def test_what_fails_on_our_side_is_told_and_is_the_cause_of_the_error(
    plane: ScriptedPlane, code: FaultCode, calls: list[str]
) -> None:
    """The controller hears `failed` with the reason; the caller gets the report, and its own exception as the cause."""

    async def failing(controller: Controller, request: UpdateWeights, tell: Tell) -> None:
        tell(JoinTask(op_id=request.op_id, plan=plan_of(request)))
        signal = await controller.signal()
        if signal.step is SenderStep.JOINED:
            tell(SendTask(op_id=request.op_id, epoch=1, version=request.version))
            signal = await controller.signal()
        assert signal.step is SenderStep.FAILED
        tell(report_of(request, OpStatus.FAILED, signal.fault))

    async def scenario(trainer: Trainer, _controller: Controller) -> None:
        with pytest.raises(PartialError) as caught:
            await trainer.update_weights(Source(), version=1)
        assert caught.value.report.fault.code is code
        assert caught.value.__cause__ in (plane._join_error, plane._send_error)

    assert play(scenario, failing, plane) == calls


def test_a_cancelled_update_is_taken_back_and_its_group_left() -> None:
    """CancelledError passes; the controller was told first, and the plane is clean for the next update."""

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        task = asyncio.create_task(trainer.update_weights(Source(), version=1))
        await asyncio.sleep(2.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        [cancel] = [r for r in controller.requests if isinstance(r, CancelOp)]
        assert cancel.of_op_id == controller.updates()[0].op_id

    calls = play(scenario, plane=ScriptedPlane(send_s=1000.0))
    assert calls == ["join 1", "send", "leave: the trainer gave the update up", "aclose"]


def test_an_update_after_a_cancelled_one_forms_a_new_group() -> None:
    """The group that was left isn't sent in; the new one is joined."""

    async def script(controller: Controller, request: UpdateWeights, tell: Tell) -> None:
        nth = len(controller.updates())
        tell(JoinTask(op_id=request.op_id, plan=plan_of(request, epoch=nth)))
        await controller.signal()
        if nth == 2:
            tell(SendTask(op_id=request.op_id, epoch=nth, version=request.version))
            assert (await controller.signal()).step is SenderStep.SENT
            tell(report_of(request))

    async def scenario(trainer: Trainer, _controller: Controller) -> None:
        task = asyncio.create_task(trainer.update_weights(Source(), version=1))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await trainer.update_weights(Source(), version=1)).ok

    assert play(scenario, script)[-3:] == ["join 2", "send", "aclose"]


def test_a_deadline_takes_the_op_back_and_leaves_the_group() -> None:
    """The controller never ends the op: DeadlineError after the deadline and its grace, plane clean."""

    async def endless(_controller: Controller, request: UpdateWeights, tell: Tell) -> None:
        while True:
            tell(OpProgress(op_id=request.op_id, phase="group"))
            await asyncio.sleep(1.0)

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        with pytest.raises(DeadlineError, match="update_weights did not end within 20 s"):
            await trainer.update_weights(Source(), version=1, deadline_s=20.0)
        assert 115.0 <= asyncio.get_running_loop().time() < 120.0
        assert controller.log[-1] == "CancelOp"

    assert play(scenario, endless) == ["leave: the trainer gave the update up", "aclose"]


def test_versions_grow_and_an_older_one_is_refused_before_anything_is_sent() -> None:
    """An int below the last version is a mistake; allow_rollback says that it is meant."""

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        await trainer.update_weights(Source(), version=5)
        num_before = len(controller.requests)
        with pytest.raises(VersionRegressionError, match=r"version 0\.4 is older than 0\.5"):
            await trainer.update_weights(Source(), version=4)
        assert len(controller.requests) == num_before
        assert (await trainer.update_weights(Source(), version=4, allow_rollback=True)).ok
        assert trainer.version == Version(step=4)

    play(scenario)


def test_a_refusal_raises_its_class_and_without_check_is_a_report() -> None:
    """`busy` of the controller: BusyError, or a report with status refused that raises when asked to."""
    fault = Fault(code=FaultCode.BUSY, message="u9 runs", detail={"op_id": "u9"})

    async def busy(_controller: Controller, request: UpdateWeights, tell: Tell) -> None:
        tell(Refusal(op_id=request.op_id, fault=fault))

    async def scenario(trainer: Trainer, _controller: Controller) -> None:
        with pytest.raises(BusyError) as caught:
            await trainer.update_weights(Source(), version=1)
        assert caught.value.running_op_id == "u9"
        report = await trainer.update_weights(Source(), version=1, check=False)
        assert (report.status, report.version, report.report.fault) == (OpStatus.REFUSED, Version(step=1), fault)
        with pytest.raises(BusyError):
            report.raise_for_status()

    assert play(scenario, busy) == ["aclose"]


def test_two_updates_at_once_are_refused_on_this_side() -> None:
    """The second names the first; the first isn't disturbed."""

    async def scenario(trainer: Trainer, _controller: Controller) -> None:
        first = asyncio.create_task(trainer.update_weights(Source(), version=1))
        await asyncio.sleep(1.0)
        with pytest.raises(BusyError, match="of this trainer still runs"):
            await trainer.update_weights(Source(), version=2)
        assert (await first).ok

    play(scenario, plane=ScriptedPlane(send_s=5.0))


def test_a_lost_report_is_fetched_by_the_same_op_id() -> None:
    """The result is lost on the way: the request is sent again, joins, and nothing is sent twice."""

    async def lossy(controller: Controller, request: UpdateWeights, tell: Tell) -> None:
        if len(controller.updates()) == 1:
            await well(controller, request, lambda m: None if isinstance(m, OpResult) else tell(m))
        else:
            tell(report_of(request))

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        assert (await trainer.update_weights(Source(), version=1)).ok
        first, second = controller.updates()
        assert first.op_id == second.op_id

    assert play(scenario, lossy) == ["join 1", "send", "aclose"]


def test_no_controller_is_one_clear_error() -> None:
    """Nobody takes the manifest: BrokenError that says what to start."""

    async def body() -> None:
        async with Bus(MemoryBroker().connect(), clock=LoopClock()) as bus:
            trainer = Trainer(bus, NAMESPACE, ScriptedPlane())
            with pytest.raises(BrokenError, match="no controller answers; start one with `rlbus controller`"):
                await trainer.update_weights(Source(), version=1)

    run(body())
