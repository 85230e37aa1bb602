"""Group, transfer, finish, abort and reload on a stand-in for vLLM with two ranks."""

import asyncio
import contextlib
import json
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlbus.errors import EngineError, FaultError
from rlbus.schemas import Fault, FaultCode, GroupPlan, RankSpan, Rendezvous, TensorSpec, TensorSum, Version
from rlbus.testing import run
from rlbus.workers.engines.base import ReceiveOrder, UpdateFailedError
from rlbus.workers.vllm_server.calls import EngineCalls
from rlbus.workers.vllm_server.checkpoint import expect
from rlbus.workers.vllm_server.exchange import TORN, Exchange, RankOutcome
from rlbus.workers.vllm_server.ranks import JOIN_GRACE_S
from rlbus.workers.vllm_server.updates import Updates
from tests.unit.workers.vllm_server.fake_llm import SUMS, FakeLLM

pytestmark = pytest.mark.unit

TENSORS = (TensorSpec(name="w", dtype="float32", shape=(2,)),)
V1, V2 = Version(step=1), Version(step=2)


def plan(epoch: int = 1, num_ranks: int = 2) -> GroupPlan:
    """One trainer rank and those of ours."""
    return GroupPlan(
        epoch=epoch,
        group_id="g",
        backend="gloo",
        num_trainer_ranks=1,
        world_size=1 + num_ranks,
        spans=(RankSpan(component="backend", instance_id="1", first=1, num_ranks=num_ranks),),
        rendezvous=Rendezvous(host="127.0.0.1", port=1, prefix="g"),
        bucket_bytes=16,
        timeout_s=10.0,
    )


def order(version: Version = V1, epoch: int = 1) -> ReceiveOrder:
    """A transfer of one tensor."""
    return ReceiveOrder("op", epoch, version, TENSORS, 16)


def on_updates(llm: FakeLLM, tmp_path: Path, check: Callable[[Updates], Awaitable[None]]) -> None:
    """Run a check, joined to group 1."""

    async def main() -> None:
        updates = Updates(
            llm,
            EngineCalls(llm, llm.world_size),
            Exchange(str(tmp_path)),
            world_size=llm.world_size,
            first_dp_index=0,
            expected=expect(TENSORS, is_head_tied=False, source="test"),
            has_transfer=llm.backend is not None,
        )
        group = plan(num_ranks=llm.world_size)
        await updates.join(group, group.spans[0])
        llm.calls.clear()
        await check(updates)

    run(main())


async def receive(updates: Updates, version: Version = V1, epoch: int = 1) -> tuple[Any, list[str], list[int]]:
    """(received, what was called, counts)"""
    heard: list[str] = []
    counts: list[int] = []
    data = await updates.receive(
        order(version, epoch), lambda: heard.append("ready"), lambda done, _: counts.append(done)
    )
    return data, heard, counts


def failing(rank: int, *, touched: bool) -> Callable[[int], RankOutcome]:
    """An outcome in which one rank failed."""
    fault = Fault(code=FaultCode.TRANSFER_FAILED, message="the sender went away")

    def outcome(of: int) -> RankOutcome:
        return RankOutcome(fault=fault if of == rank else None, weights_touched=touched)

    return outcome


def test_join_reports_every_rank(tmp_path: Path) -> None:
    """As the group itself numbers them."""

    async def check(updates: Updates) -> None:
        joined = await updates.join(plan(2), plan(2).spans[0])
        assert (joined.epoch, joined.ranks, joined.world_size) == (2, (1, 2), 3)

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)
    assert llm.calls == ["leave", "init"]


def test_rank_that_cannot_join_fails_the_join_at_once(tmp_path: Path) -> None:
    """Nobody waits for the time-out; the rank is named."""

    async def check(updates: Updates) -> None:
        fault = Fault(code=FaultCode.GROUP_FAILED, message="no way")
        llm.joined = lambda rank: RankOutcome(fault=fault) if rank == 1 else None
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(EngineError, match="rank 1 of the engine: no way") as caught:
            await updates.join(plan(2), plan(2).spans[0])
        assert caught.value.code is FaultCode.GROUP_FAILED
        assert loop.time() - began_s < 0.1
        with pytest.raises(UpdateFailedError) as failed:
            await receive(updates, epoch=2)
        assert not failed.value.weights_touched

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)


def test_rank_that_says_nothing_ends_the_join_in_time(tmp_path: Path) -> None:
    """At the plan's time-out and what its answer may take."""

    async def check(updates: Updates) -> None:
        llm.joined = lambda rank: None
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(EngineError, match="not every rank"):
            await updates.join(plan(2), plan(2).spans[0])
        assert loop.time() - began_s == pytest.approx(10.0 + JOIN_GRACE_S, abs=0.1)

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)


def test_update_is_received_finished_and_labelled(tmp_path: Path) -> None:
    """In vLLM's order; the slowest rank's times; ready once; the last count is all."""

    async def check(updates: Updates) -> None:
        data, heard, _ = await receive(updates)
        assert (data.num_bytes, data.num_tensors, data.sums, data.receive_s) == (8, 1, SUMS, 0.2)
        assert heard == ["ready"]
        assert llm.label == "default"
        await updates.finish(V1)
        assert llm.calls == ["start", "update", "finish", "label"]
        assert llm.label == "0.1"
        await updates.abort()
        assert llm.calls[-1] == "label"

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)
    assert [path.name for path in next(tmp_path.iterdir()).iterdir()] == []


@pytest.mark.parametrize("touched", [False, True])
def test_failure_of_one_rank_fails_the_transfer_and_is_closed(tmp_path: Path, touched: bool) -> None:
    """Touched as soon as one says so; only torn weights are labelled torn."""

    async def check(updates: Updates) -> None:
        llm.updated = failing(1, touched=touched)
        with pytest.raises(UpdateFailedError, match="the sender went away") as caught:
            await receive(updates)
        assert caught.value.weights_touched is touched
        await updates.abort()
        await updates.abort()
        assert llm.calls == (["start", "update", "label", "finish"] if touched else ["start", "update", "finish"])
        assert llm.label == (TORN if touched else "default")

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)


def test_silent_rank_counts_as_touched(tmp_path: Path) -> None:
    """Doubt is not "nothing happened"."""

    async def check(updates: Updates) -> None:
        llm.updated = lambda rank: None
        with pytest.raises(UpdateFailedError) as caught:
            await receive(updates)
        assert caught.value.weights_touched

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)


def test_ranks_that_received_different_bytes_are_a_failure(tmp_path: Path) -> None:
    """It names the tensor."""

    async def check(updates: Updates) -> None:
        def outcome(rank: int) -> RankOutcome:
            sums = (TensorSum(name="w", checksum=str(rank) * 16),)
            return RankOutcome(weights_touched=True, num_bytes=8, num_tensors=1, sums=sums)

        llm.updated = outcome
        with pytest.raises(UpdateFailedError) as caught:
            await receive(updates)
        assert caught.value.fault.code is FaultCode.CHECKSUM_MISMATCH
        assert caught.value.fault.detail == {"tensor": "w"}

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)


def test_leaving_the_group_ends_a_stuck_transfer(tmp_path: Path) -> None:
    """The rank says itself that nothing was touched."""

    async def check(updates: Updates) -> None:
        llm.update_may_end = asyncio.Event()
        receiving = asyncio.ensure_future(receive(updates))
        await asyncio.sleep(1.0)
        assert not receiving.done()
        await updates.leave()
        with pytest.raises(UpdateFailedError) as caught:
            await receiving
        assert not caught.value.weights_touched

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)


def test_cancelled_transfer_is_stopped_before_the_caller_goes(tmp_path: Path) -> None:
    """The next call finds a core that came back."""

    async def check(updates: Updates) -> None:
        llm.update_may_end = asyncio.Event()
        receiving = asyncio.ensure_future(receive(updates))
        await asyncio.sleep(1.0)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        await updates.abort()
        assert llm.calls == ["start", "update", "finish"]

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)


def test_finish_that_fails_inside_a_rank_is_a_failure_and_can_be_aborted(tmp_path: Path) -> None:
    """The label stays; vLLM's session is opened anew to put things together."""

    async def check(updates: Updates) -> None:
        await receive(updates)
        llm.finished = failing(0, touched=True)
        with pytest.raises(UpdateFailedError) as caught:
            await updates.finish(V1)
        assert caught.value.weights_touched
        assert llm.label == "default"
        with pytest.raises(UpdateFailedError) as again:
            await updates.finish(V1)
        assert again.value.weights_touched
        await updates.abort()
        assert llm.label == TORN
        assert llm.calls == ["start", "update", "finish", "label", "start", "finish"]

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)


async def begin(updates: Updates, llm: FakeLLM) -> None:
    """A first part that came."""
    await receive(updates)
    llm.calls.clear()


def test_next_part_of_an_update_is_a_session_of_its_own_and_torn_until_the_end(tmp_path: Path) -> None:
    """vLLM refuses a start while one is open; no folder of a part is left behind."""

    async def check(updates: Updates) -> None:
        await begin(updates, llm)
        await receive(updates, V2)
        assert llm.label == TORN
        await updates.finish(V2)
        assert llm.calls == ["finish", "label", "start", "update", "finish", "label"]
        assert llm.label == str(V2)

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)
    assert [path.name for path in next(tmp_path.iterdir()).iterdir()] == []


@pytest.mark.parametrize("wrong", ["nothing came", "no group", "no end of the first"])
def test_part_that_fails_untouched_after_one_that_came_leaves_the_engine_torn(tmp_path: Path, wrong: str) -> None:
    """The bytes of the earlier one are in place, and the engine's label says so."""

    async def check(updates: Updates) -> None:
        await begin(updates, llm)
        match wrong:
            case "nothing came":
                llm.updated = failing(0, touched=False)
            case "no end of the first":
                llm.finished = failing(0, touched=True)
        with pytest.raises(UpdateFailedError) as caught:
            await receive(updates, V2, epoch=2 if wrong == "no group" else 1)
        assert caught.value.weights_touched
        llm.finished = lambda rank: RankOutcome()
        await updates.abort()
        assert llm.label == TORN
        llm.updated = FakeLLM.updated
        await receive(updates)
        await updates.finish(V1)
        assert llm.label == str(V1)

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)


def test_finish_without_a_transfer_changes_nothing(tmp_path: Path) -> None:
    """It is a mistake of the caller."""

    async def check(updates: Updates) -> None:
        with pytest.raises(UpdateFailedError) as caught:
            await updates.finish(V1)
        assert not caught.value.weights_touched
        assert llm.calls == []

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)


def save(folder: Path, name: str = "w") -> None:
    """A checkpoint of one tensor."""
    header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


@pytest.fixture
def checkpoint(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder; what reads it runs inline, since a thread would not run in virtual time."""

    async def inline(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    return tmp_path_factory.mktemp("checkpoint")


def test_update_after_a_reload_that_could_not_be_cleaned_up_begins_with_that(tmp_path: Path, checkpoint: Path) -> None:
    """The session that was opened for it has no folder, and nothing came in it."""
    save(checkpoint)

    async def check(updates: Updates) -> None:
        llm.raises |= {"reload_weights": "no space", "finish": "not now"}
        with pytest.raises(UpdateFailedError):
            await updates.load(str(checkpoint), V1)
        with contextlib.suppress(FaultError):
            await updates.abort()
        llm.raises.clear()
        await begin(updates, llm)
        await updates.finish(V2)
        assert llm.label == str(V2)

    llm = FakeLLM(world_size=1)
    on_updates(llm, tmp_path, check)


def test_folder_is_loaded_and_labelled(tmp_path: Path, checkpoint: Path) -> None:
    """vLLM's own reload doesn't label."""
    save(checkpoint)

    async def check(updates: Updates) -> None:
        await updates.load(str(checkpoint), V2)
        assert llm.calls == ["reload_weights", "label"]
        assert llm.label == "0.2"

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)


@pytest.mark.parametrize("name", [None, "v"])
def test_folder_that_does_not_fit_is_refused_before_vllm_hears_of_it(
    tmp_path: Path, checkpoint: Path, name: str | None
) -> None:
    """Empty, or with other tensors; vLLM would take the latter."""
    if name is not None:
        save(checkpoint, name)

    async def check(updates: Updates) -> None:
        with pytest.raises(UpdateFailedError) as caught:
            await updates.load(str(checkpoint), V2)
        assert not caught.value.weights_touched
        assert llm.calls == []

    llm = FakeLLM()
    on_updates(llm, tmp_path, check)


def test_failed_reload_is_touched_and_put_together_by_the_abort(tmp_path: Path, checkpoint: Path) -> None:
    """One rank only: with several the engine would count as lost."""
    save(checkpoint)

    async def main() -> None:
        llm = FakeLLM(world_size=1, raises={"reload_weights": "no space"})
        updates = Updates(
            llm,
            EngineCalls(llm, 1),
            Exchange(str(tmp_path)),
            world_size=1,
            first_dp_index=0,
            expected=expect(TENSORS, is_head_tied=False, source="test"),
            has_transfer=True,
        )
        with pytest.raises(UpdateFailedError) as caught:
            await updates.load(str(checkpoint), V2)
        assert caught.value.weights_touched
        await updates.abort()
        assert llm.calls == ["reload_weights", "label", "start", "finish"]
        assert llm.label == TORN

    run(main())
