"""What was reported is what the next leader goes on from, although the journal is written behind the ops."""

import pytest

from rlbus.controller.takeover import PHASE
from rlbus.errors import FaultError
from rlbus.schemas import Command, CommitWeights, OpStatus, ResumeGeneration, Version
from rlbus.testing import Faults, MemoryTransport
from tests.unit.controller.failover_stage import Stage, play
from tests.unit.controller.scene import worker

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("dies", [False, True])
def test_a_version_is_reported_when_the_next_leader_would_know_it(dies: bool) -> None:
    """From the commit on the leader reaches everybody but the store. It keeps its report, loses the lease, and the next
    leader tells what became of the op: also when nobody who had the new version lives (simulation, seed 848).
    """

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(6)).status is OpStatus.OK
        leader = stage.processes[0]

        def cut(command: Command) -> None:
            if isinstance(command.body, CommitWeights):
                leader.transport.faults = Faults(drop=1.0, only="$KV.>")
            elif isinstance(command.body, ResumeGeneration) and dies:
                transport = stage.workers[0].worker_bus.transport
                assert isinstance(transport, MemoryTransport)
                stage.broker.partition(transport)

        stage.on_command = cut
        report = await stage.update(7)
        assert report.outcomes[0].phase == PHASE
        expected = Version(step=6) if dies else Version(step=7)
        assert (await stage.client.status()).version == expected
        assert (report.status is OpStatus.OK) is (not dies)

    play([worker(1)], scenario)


def test_how_an_op_ended_on_each_worker_is_in_the_journal() -> None:
    """`rlbus history OP`, also of the next leader: the report that the caller got."""

    async def scenario(stage: Stage) -> None:
        report = await stage.update(6)
        assert (await stage.client.history(of_op_id=report.op_id)).report == report
        stage.kill(stage.processes[0])
        await stage.leader()
        view = await stage.client.history(of_op_id=report.op_id)
        assert (view.report, [i.op_id for i in view.items]) == (report, [report.op_id])
        with pytest.raises(FaultError, match="the journal has no op nonsense"):
            await stage.client.history(of_op_id="nonsense")

    play([worker(1), worker(2)], scenario)
