"""What every engine has to do with weights, whatever it is: the same checks on fake, torch and vLLM.

Each test begins with a running engine without a group and leaves it so; its weights are complete, of any version.
"""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from rlbus.errors import EngineError, ManifestError
from rlbus.schemas import FaultCode, Generation, TensorSpec
from rlbus.transfer.manifest import num_bytes
from rlbus.workers.engines.base import UpdateFailedError
from rlbus.workers.engines.contract import (
    A,
    B,
    CaseRunner,
    OpenedEngine,
    begin_receive,
    grouped,
    new_epoch,
    order,
    paused,
    tokens,
    transfer,
    update,
)

pytestmark = pytest.mark.engine


async def fails_untouched(opened: OpenedEngine, epoch: int) -> None:
    """A transfer without a group fails before its first byte, and leaves the engine as it was."""
    expected = await tokens(opened)
    async with paused(opened):
        with pytest.raises(UpdateFailedError) as caught:
            await opened.engine.receive_weights(order(opened, epoch, B), lambda: None, lambda done, total: None)
        assert not caught.value.weights_touched
        await opened.engine.abort_update()
        await opened.engine.flush_cache()
    assert await tokens(opened) == expected


@pytest.mark.parametrize("reason", ["missing", "unexpected", "shape", "dtype"])
def test_manifest_check_names_the_first_bad_tensor(runner: CaseRunner, reason: str) -> None:
    """And changes nothing."""

    async def check(opened: OpenedEngine) -> None:
        good = list(opened.tensors())
        opened.engine.check_manifest(good)
        last = good[-1]
        match reason:
            case "missing":
                bad, name = good[:-1], last.name
            case "unexpected":
                name = "no.such.tensor"
                bad = [*good, TensorSpec(name=name, dtype=last.dtype, shape=last.shape)]
            case "shape":
                shape = (*last.shape[:-1], last.shape[-1] + 1)
                bad, name = [*good[:-1], msgspec.structs.replace(last, shape=shape)], last.name
            case _:
                bad, name = [*good[:-1], msgspec.structs.replace(last, dtype="complex128")], last.name
        with pytest.raises(ManifestError) as caught:
            opened.engine.check_manifest(bad)
        assert caught.value.code is FaultCode.MANIFEST_MISMATCH
        assert caught.value.tensor == name
        assert caught.value.fault.detail["reason"] == reason

    runner.run(check)


def test_join_with_the_wrong_number_of_ranks_fails_without_a_group(runner: CaseRunner) -> None:
    """Before anybody waits for the others; what is received then fails untouched."""

    async def check(opened: OpenedEngine) -> None:
        plan = await opened.plan(new_epoch())
        span = msgspec.structs.replace(plan.spans[0], num_ranks=plan.spans[0].num_ranks + 1)
        with pytest.raises(EngineError) as caught:
            await opened.engine.join_group(plan, span)
        assert caught.value.code is FaultCode.GROUP_FAILED
        await fails_untouched(opened, plan.epoch)

    runner.run(check)


def test_receive_without_a_group_fails_untouched(runner: CaseRunner) -> None:
    """Also after a group was left; leaving twice is fine."""

    async def check(opened: OpenedEngine) -> None:
        async with grouped(opened) as epoch:
            pass
        await opened.engine.leave_group()
        await fails_untouched(opened, epoch)

    runner.run(check)


def test_update_changes_what_is_generated_and_the_same_version_gives_the_same(runner: CaseRunner) -> None:
    """SCENARIOS 47: received sums are the sent ones, in order; the count is right; the label is the version."""

    async def check(opened: OpenedEngine) -> None:
        await update(opened, A)
        first = await tokens(opened)
        async with paused(opened):
            async with grouped(opened) as epoch:
                received, sent, progress = await transfer(opened, epoch, B)
                total = sum(num_bytes(spec) for spec in opened.tensors())
                assert received.sums == sent
                assert [s.name for s in sent] == [spec.name for spec in opened.tensors()]
                assert (received.num_bytes, received.num_tensors) == (total, len(sent))
                assert progress == sorted(progress)
                assert progress[-1] == total
                await opened.engine.finish_update(B)
            await opened.engine.flush_cache()
        second = await tokens(opened)
        assert second != first
        label = (await opened.engine.observe()).weight_version
        assert label in (None, str(B))
        await update(opened, A)
        assert await tokens(opened) == first

    runner.run(check)


def test_group_is_good_for_several_updates(runner: CaseRunner) -> None:
    """It is formed once, and each transfer is a session of its own."""

    async def check(opened: OpenedEngine) -> None:
        await update(opened, A)
        first = await tokens(opened)
        async with paused(opened):
            async with grouped(opened) as epoch:
                for version in (B, A):
                    received, sent, _ = await transfer(opened, epoch, version)
                    assert received.sums == sent
                    await opened.engine.finish_update(version)
            await opened.engine.flush_cache()
        assert await tokens(opened) == first

    runner.run(check)


def test_prefix_of_older_weights_is_not_served_after_an_update(runner: CaseRunner) -> None:
    """SCENARIOS 14: a prompt that was cached before gives the tokens that it gives without a cache."""

    async def check(opened: OpenedEngine) -> None:
        prompt = tuple(range(10, 60))
        await update(opened, A)
        old = await tokens(opened, prompt=prompt)
        assert await tokens(opened, prompt=prompt) == old
        await update(opened, B)
        new = await tokens(opened, prompt=prompt)
        await opened.engine.flush_cache()
        assert await tokens(opened, prompt=prompt) == new
        assert new != old

    runner.run(check)


def test_sender_that_dies_half_way_tears_and_a_full_update_heals(runner: CaseRunner) -> None:
    """SCENARIOS 5: it admits that the weights were touched; the session is closed; nothing has to be restarted."""

    async def check(opened: OpenedEngine) -> None:
        await update(opened, B)
        expected = await tokens(opened)
        await update(opened, A)
        async with paused(opened):
            async with grouped(opened) as epoch:
                with pytest.raises(UpdateFailedError) as caught:
                    await transfer(opened, epoch, B, len(opened.tensors()) // 2)
                assert caught.value.weights_touched
                await opened.engine.abort_update()
                await opened.engine.abort_update()
            async with grouped(opened) as epoch:
                received, sent, _ = await transfer(opened, epoch, B)
                assert received.sums == sent
                await opened.engine.finish_update(B)
            await opened.engine.flush_cache()
        assert await tokens(opened) == expected

    runner.run(check)


def test_leaving_the_group_lets_a_stuck_receive_go_untouched(runner: CaseRunner) -> None:
    """A sender that never begins; meanwhile the engine says how it is."""

    async def check(opened: OpenedEngine) -> None:
        expected = await tokens(opened)
        async with paused(opened):
            async with grouped(opened) as epoch:
                receiving = await begin_receive(opened, epoch, B)
                assert (await opened.engine.observe()).generation is Generation.PAUSED
                assert not receiving.done()
                await opened.engine.leave_group()
                with pytest.raises(UpdateFailedError) as caught:
                    await receiving
                assert not caught.value.weights_touched
                await opened.engine.abort_update()
            await opened.engine.flush_cache()
        assert await tokens(opened) == expected

    runner.run(check)


def test_cancelled_receive_can_be_aborted_and_healed(runner: CaseRunner) -> None:
    """Whatever the cancel left, the next group and a full update work."""

    async def check(opened: OpenedEngine) -> None:
        async with paused(opened), grouped(opened) as epoch:
            receiving = await begin_receive(opened, epoch, B)
            receiving.cancel()
            with suppress(asyncio.CancelledError, UpdateFailedError):
                await receiving
            await opened.engine.abort_update()
        await update(opened, A)
        first = await tokens(opened)
        await update(opened, B)
        assert await tokens(opened) != first

    runner.run(check)


def test_weights_from_disk_equal_those_from_the_group(runner: CaseRunner, tmp_path: Path) -> None:
    """The same version gives the same tokens by either way."""

    async def check(opened: OpenedEngine) -> None:
        await update(opened, A)
        expected = await tokens(opened)
        await update(opened, B)
        await opened.save(tmp_path / "a", A)
        async with paused(opened):
            await opened.engine.load_weights(str(tmp_path / "a"), A)
            await opened.engine.flush_cache()
        assert await tokens(opened) == expected
        assert (await opened.engine.observe()).weight_version in (None, str(A))

    runner.run(check)


def test_missing_folder_leaves_the_weights_untouched(runner: CaseRunner, tmp_path: Path) -> None:
    """A typing error in a path costs nothing."""

    async def check(opened: OpenedEngine) -> None:
        expected = await tokens(opened)
        async with paused(opened):
            with pytest.raises(UpdateFailedError) as caught:
                await opened.engine.load_weights(str(tmp_path / "nothing-here"), B)
            assert not caught.value.weights_touched
            await opened.engine.abort_update()
        assert await tokens(opened) == expected

    runner.run(check)


def test_folder_is_checked_beside_generation_and_nothing_changes(runner: CaseRunner, tmp_path: Path) -> None:
    """A whole one is fine; one that is missing, empty, or truncated is refused."""

    async def check(opened: OpenedEngine) -> None:
        expected = await tokens(opened)
        await opened.save(tmp_path / "b", B)
        await opened.engine.check_checkpoint(str(tmp_path / "b"))
        (tmp_path / "empty").mkdir()
        for file in (tmp_path / "b").iterdir():
            os.truncate(file, file.stat().st_size // 2)
        for name in ("missing", "empty", "b"):
            with pytest.raises(ManifestError):
                await opened.engine.check_checkpoint(str(tmp_path / name))
        assert await tokens(opened) == expected

    runner.run(check)


def test_checksums_follow_the_weights(runner: CaseRunner) -> None:
    """Equal for equal versions, different for different ones."""

    async def check(opened: OpenedEngine) -> None:
        if "get_weight_checksums" not in opened.engine.info.routes:
            return
        await update(opened, A)
        first = await opened.engine.checksums()
        await update(opened, B)
        second = await opened.engine.checksums()
        await update(opened, A)
        assert await opened.engine.checksums() == first
        assert [s.name for s in first.sums] == [s.name for s in second.sums]
        assert first.sums != second.sums

    runner.run(check)
