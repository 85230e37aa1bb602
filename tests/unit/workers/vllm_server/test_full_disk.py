"""A full disk under the exchange: it is never taken for damage of the engine."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rlbus.errors import EngineError
from rlbus.schemas import FaultCode, Version
from rlbus.testing import run
from rlbus.workers.engines.base import UpdateFailedError
from rlbus.workers.vllm_server import exchange as exchange_module
from rlbus.workers.vllm_server.calls import OVERDUE_S, EngineCalls
from rlbus.workers.vllm_server.checkpoint import expect
from rlbus.workers.vllm_server.exchange import TORN, Exchange, FolderError, RankOutcome
from rlbus.workers.vllm_server.updates import Updates
from tests.unit.workers.vllm_server.fake_llm import FakeLLM
from tests.unit.workers.vllm_server.full_disk import full_disk
from tests.unit.workers.vllm_server.test_updates import TENSORS, V1, V2, plan, receive

pytestmark = pytest.mark.unit


def on_joined(llm: FakeLLM, tmp_path: Path, check: Callable[[Updates, EngineCalls], Awaitable[None]]) -> None:
    """Run a check, joined to group 1."""

    async def main() -> None:
        calls = EngineCalls(llm, llm.world_size)
        updates = Updates(
            llm,
            calls,
            Exchange(str(tmp_path)),
            world_size=llm.world_size,
            first_dp_index=0,
            expected=expect(TENSORS, is_head_tied=False, source="test"),
            has_transfer=True,
        )
        group = plan(num_ranks=llm.world_size)
        await updates.join(group, group.spans[0])
        llm.calls.clear()
        await check(updates, calls)

    run(main())


def full_for(step: str) -> Callable[[Path, bytes], None]:
    """A write that finds no room for the outcome of a step."""
    write = exchange_module._replace

    def replace(path: Path, data: bytes) -> None:
        if path.name.startswith(step):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    return replace


async def updated(updates: Updates, version: Version) -> None:
    """A whole update."""
    await receive(updates, version)
    await updates.finish(version)


def test_update_without_room_for_its_folder_leaves_the_weights_alone(tmp_path: Path) -> None:
    """The engine wasn't asked; the folder is named; with room again the next one goes well."""

    async def check(updates: Updates, calls: EngineCalls) -> None:
        with full_disk(), pytest.raises(UpdateFailedError, match="No space left on device") as caught:
            await receive(updates)
        assert not caught.value.weights_touched
        assert (caught.value.fault.code, llm.calls) == (FaultCode.ENGINE_FAILED, [])
        assert caught.value.fault.detail["path"].startswith(str(tmp_path))
        await updates.abort()
        await updated(updates, V1)
        assert llm.label == str(V1)

    llm = FakeLLM()
    on_joined(llm, tmp_path, check)


def test_later_part_without_room_for_its_folder_leaves_what_came_torn(tmp_path: Path) -> None:
    """The bytes of the first are in place; the clean-up labels them, and the next update goes well."""

    async def check(updates: Updates, calls: EngineCalls) -> None:
        await receive(updates)
        with full_disk(for_files=False), pytest.raises(UpdateFailedError, match="No space") as caught:
            await receive(updates, V2)
        assert caught.value.weights_touched
        await updates.abort()
        assert llm.label == TORN
        await updated(updates, V2)
        assert llm.label == str(V2)

    llm = FakeLLM()
    on_joined(llm, tmp_path, check)


@pytest.mark.parametrize("step", ["receive", "finish"])
def test_rank_that_cannot_leave_its_outcome_costs_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """It counts as touched, since nobody knows; but its call ends as ever, and the ranks stay in step."""

    async def check(updates: Updates, calls: EngineCalls) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(exchange_module, "_replace", full_for(step))
            with pytest.raises(UpdateFailedError, match="doesn't say how it ended") as caught:
                await updated(updates, V1)
        assert caught.value.weights_touched
        assert calls.death is None
        await updates.abort()
        assert llm.label == TORN
        await updated(updates, V1)
        assert llm.label == str(V1)

    llm = FakeLLM()
    on_joined(llm, tmp_path, check)


@pytest.mark.parametrize("way", ["leave", "abort"])
def test_transfer_is_stopped_also_when_the_word_for_it_cannot_be_written(tmp_path: Path, way: str) -> None:
    """Its folder goes instead, and an engine that doesn't come back is lost in time."""

    async def check(updates: Updates, calls: EngineCalls) -> None:
        llm.update_may_end = asyncio.Event()
        receiving = asyncio.ensure_future(receive(updates))
        await asyncio.sleep(1.0)
        with full_disk():
            await (updates.leave() if way == "leave" else updates.abort())
            with pytest.raises(UpdateFailedError):
                await receiving
        assert calls.death is None

    on_joined(llm := FakeLLM(), tmp_path, check)


def test_engine_that_ignores_the_stop_is_lost_in_time_on_a_full_disk(tmp_path: Path) -> None:
    """As it is with room."""

    async def check(updates: Updates, calls: EngineCalls) -> None:
        loop = asyncio.get_running_loop()
        never = loop.create_future()

        async def clings(info: object) -> None:
            await never

        llm._update = clings  # type: ignore[method-assign]
        receiving = asyncio.ensure_future(receive(updates))
        await asyncio.sleep(1.0)
        with full_disk():
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
        await asyncio.sleep(OVERDUE_S + 1.0)
        assert calls.death is not None
        never.cancel()

    on_joined(llm := FakeLLM(), tmp_path, check)


def test_group_is_left_without_a_folder_and_joined_only_with_one(tmp_path: Path) -> None:
    """What frees the engine needs no room; a join that has none fails, says where, and can be tried again."""

    async def check(updates: Updates, calls: EngineCalls) -> None:
        with full_disk():
            await updates.leave()
            assert llm.calls == ["leave"]
            with pytest.raises(EngineError, match="make room"):
                await updates.join(plan(2), plan(2).spans[0])
        await updates.join(plan(2), plan(2).spans[0])

    llm = FakeLLM()
    on_joined(llm, tmp_path, check)


def test_questions_without_room_for_a_folder_cost_no_restart(tmp_path: Path) -> None:
    """Several ranks answer them, and none was asked."""

    async def check(updates: Updates, calls: EngineCalls) -> None:
        llm.start_draft_weight_update = llm.start_weight_update  # type: ignore[attr-defined]
        with full_disk():
            with pytest.raises(FolderError):
                await updates.draft_checksums()
            with pytest.raises(FolderError):
                await updates.take_over()
        assert calls.death is None

    on_joined(llm := FakeLLM(), tmp_path, check)


def test_agent_without_room_for_any_folder_fails_to_start_with_an_engine_error(tmp_path: Path) -> None:
    """Whoever starts it reads where to make room."""
    with pytest.raises(FolderError, match=str(tmp_path / "nothing")):
        Exchange(str(tmp_path / "nothing"))


def test_counts_that_cannot_be_written_fail_no_transfer_that_has_begun(tmp_path: Path) -> None:
    """The first one says that a rank stands ready, so that one has to be written."""
    folder = Exchange(str(tmp_path)).open("update")
    counter = folder.open_counter(0, 100)
    with full_disk():
        counter.update(50, 100)
        with pytest.raises(OSError, match="No space"):
            folder.open_counter(1, 100)
    assert folder.progress(0) == (0, 100)
    assert folder.progress(1) is None
    counter.close()


def test_what_cannot_be_read_counts_as_not_there(tmp_path: Path) -> None:
    """Neither a rank's watch nor the agent ends by it."""
    folder = Exchange(str(tmp_path)).open("update")
    for name in ("stop", "progress-0", "receive-0.json"):
        Path(folder.path, name).mkdir()
    assert (folder.stop_reason(), folder.progress(0), folder.outcome("receive", 0)) == (None, None, None)
    folder.end("receive", 0, RankOutcome())
    folder.stop("enough")
    assert folder.stop_reason() == "the agent is gone"
