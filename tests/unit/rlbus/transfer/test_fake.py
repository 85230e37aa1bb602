"""The data plane without tensors behaves like one, and fails as it is told to."""

import asyncio

import pytest

from rlbus.errors import TransferError
from rlbus.schemas import GroupPlan, Rendezvous, TensorSpec, Version
from rlbus.testing import run
from rlbus.transfer.fake import FakePlane, FakePlaneScript, FakeSource, fake_sum
from rlbus.transfer.plane import SenderPlane, Sent

pytestmark = pytest.mark.unit

SPECS = (TensorSpec(name="a", dtype="float32", shape=(2, 3)), TensorSpec(name="b", dtype="int8", shape=(5,)))
PLAN = GroupPlan(
    epoch=4,
    group_id="g",
    backend="fake",
    num_trainer_ranks=1,
    world_size=1,
    spans=(),
    rendezvous=Rendezvous(host="127.0.0.1", port=1, prefix="p"),
    bucket_bytes=64,
)
V7 = Version(step=7)


async def send(plane: SenderPlane, done: list[int]) -> Sent:
    return await plane.send(
        FakeSource(SPECS),
        SPECS,
        bucket_bytes=64,
        version=V7,
        stream_id="op",
        on_progress=lambda now, _total: done.append(now),
    )


def test_both_ends_compute_the_same_sums() -> None:
    """Name, version and shape make a sum; progress and time follow the script."""

    async def scenario() -> None:
        plane = FakePlane(FakePlaneScript(join_s=2.0, send_s=3.0, send_parts=3))
        done: list[int] = []
        await plane.join(PLAN)
        sent = await send(plane, done)
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        assert done == [9, 19, 29]
        assert (sent.num_bytes, sent.num_tensors) == (29, 2)
        assert sent.send_s == pytest.approx(3.0)
        assert [s.checksum for s in sent.sums] == [fake_sum("a", V7, (2, 3)), fake_sum("b", V7, (5,))]
        await plane.aclose()
        assert plane.calls == ["join 4", "send op 0.7", "leave"]

    run(scenario())


def test_sums_differ_by_name_version_and_shape() -> None:
    """16 hex digits, none equal."""
    sums = {
        fake_sum("a", V7, (2, 3)),
        fake_sum("b", V7, (2, 3)),
        fake_sum("a", Version(step=8), (2, 3)),
        fake_sum("a", V7, (6,)),
    }
    assert len(sums) == 4
    assert {len(s) for s in sums} == {16}


def test_leave_releases_a_send_and_a_join() -> None:
    """With the reason."""

    async def scenario() -> None:
        plane = FakePlane(FakePlaneScript(join_s=100.0, send_s=100.0))
        joining = asyncio.create_task(plane.join(PLAN))
        await asyncio.sleep(1)
        await plane.leave("the op was cancelled")
        with pytest.raises(TransferError, match="the op was cancelled"):
            await joining
        plane.script.join_s = 0.0
        await plane.join(PLAN)
        sending = asyncio.create_task(send(plane, []))
        await asyncio.sleep(1)
        await plane.leave("stuck")
        with pytest.raises(TransferError, match="stuck"):
            await sending
        with pytest.raises(TransferError, match="no group was joined"):
            await send(plane, [])

    run(scenario())


def test_scripted_faults_come_where_they_were_put() -> None:
    """A join that fails leaves no group; a send fails after its parts; a sum is off."""

    async def scenario() -> None:
        plane = FakePlane(FakePlaneScript(fail_join="no route"))
        with pytest.raises(TransferError, match="no route"):
            await plane.join(PLAN)
        plane.script = FakePlaneScript(fail_send="cut", send_parts=4, fail_after_parts=2, wrong_sum_of="b")
        await plane.join(PLAN)
        done: list[int] = []
        with pytest.raises(TransferError, match="cut"):
            await send(plane, done)
        assert done == [7, 14]
        plane.script.fail_send = None
        sent = await send(plane, done)
        assert sent.sums[1].checksum != fake_sum("b", V7, (5,))
        assert sent.sums[0].checksum == fake_sum("a", V7, (2, 3))

    run(scenario())
