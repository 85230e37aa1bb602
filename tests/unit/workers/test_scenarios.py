"""What goes wrong in this field (SCENARIOS.md), at one worker: repeats, torn weights, commands that are none."""

import asyncio

import pytest

from rlbus import subjects
from rlbus.schemas import Announcement, FaultCode, Generation, PauseGeneration, ResultStatus, Version
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from rlbus.workers.engines.fake_script import Step
from rlbus.workers.testing import COMPONENT, INSTANCE_ID, NAMESPACE, Rig, Sent, code_of, on_worker

pytestmark = pytest.mark.unit

V7 = Version(step=7)


def test_an_update_that_is_sent_again_while_it_is_applied_joins_it() -> None:
    """SCENARIOS 3: sent each second for 5 s, applied once; another op is told which one runs."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V7, DEFAULT_TENSORS)
        sent = [rig.receive(V7, DEFAULT_TENSORS)]
        for _ in range(4):
            await asyncio.sleep(1.0)
            sent.append(rig.receive(V7, DEFAULT_TENSORS))
            await sent[-1].until(lambda s: s.is_accepted, limit_s=1.0)
            assert not sent[-1].results
        other = await rig.send(PauseGeneration())
        assert (code_of(other), other.fault and other.fault.detail["op_id"]) == (FaultCode.BUSY, "u-receive")
        results = [await s.result() for s in sent]
        assert results == [results[0]] * 5
        assert results[0].status is ResultStatus.OK
        late = await rig.receive(V7, DEFAULT_TENSORS).result()
        assert late == results[0]
        assert list(rig.engine.calls).count("receive_weights") == 1

    on_worker(scenario, {"receive_weights": {1: Step(transfer_s=5.0)}})


@pytest.mark.parametrize(
    ("route", "body", "code"),
    [
        ("pause_generation", '{"route":"pause_generation","mode":"freeze"}', FaultCode.BAD_MESSAGE),
        ("pause_generation", '{"route":"pause_generation","lease_s":"soon"}', FaultCode.BAD_MESSAGE),
        ("pause_generation", '{"route":"pause_generation","lease_s":-1}', FaultCode.BAD_MESSAGE),
        ("engine_rpc", '{"route":"engine_rpc","method":"shutdown"}', FaultCode.BAD_MESSAGE),
        ("shutdown", '{"route":"pause_generation"}', FaultCode.BAD_MESSAGE),
    ],
    ids=["a mode that is none", "a wrong type", "a lease that is none", "a method by name", "another route's body"],
)
def test_a_command_that_is_malformed_is_refused_before_any_change(route: str, body: str, code: FaultCode) -> None:
    """SCENARIOS 41, 45 and 49: no engine call, no announcement of a change; the worker is as ready as before."""

    async def scenario(rig: Rig) -> None:
        calls, state, num_announced = list(rig.engine.calls), rig.agent.state, len(rig.announcements)
        sent = Sent("bad")
        subject = subjects.command_to(NAMESPACE, COMPONENT, route, INSTANCE_ID)
        message = f'{{"op_id":"bad","term":1,"expires_at":1e12,"body":{body}}}'
        rig.bus.transport.publish(subject, message.encode(), rig.inbox(sent))
        result = await sent.result()
        assert (result.status, code_of(result)) == (ResultStatus.REFUSED, code)
        after = rig.agent.state
        assert [c for c in rig.engine.calls if c != "observe"] == [c for c in calls if c != "observe"]
        assert (after.pause, after.weights, after.running) == (state.pause, state.weights, state.running)
        said = [m.status.generation for m in rig.announcements[num_announced:] if isinstance(m, Announcement)]
        assert set(said) <= {Generation.RUNNING}

    on_worker(scenario)
